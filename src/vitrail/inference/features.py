"""Features of images: pooled vectors or tokens, from any layer, batch by batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.acceleration.agreement import compare_features
from vitrail.acceleration.auto import IMAGES, open_best, plan_text
from vitrail.acceleration.casting import cast_once
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.int8.engine import Int8Engine
from vitrail.acceleration.planner import ExecutionPlan, plan_of
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadImage, Batch, Evaluation, first_images
from vitrail.data.decoder_choice import ON_CPU, Decoder, check_decode, choose_for_source
from vitrail.data.sources.given import Data
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, suggest
from vitrail.evaluation import check_finite
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.quantisation import Int8Features, check_calibration, open_int8
from vitrail.runtime import (
    InferencePrecision,
    OnPlan,
    OnProgress,
    Precision,
    PrecisionChoice,
    autocast,
    choose_device,
    eval_mode,
)

FeatureKind = Literal["pooled", "class", "patches", "registers"]
FEATURE_KINDS: tuple[FeatureKind, ...] = get_args(FeatureKind)


@dataclass(frozen=True)
class FeatureRequest:
    """Which features to compute."""

    tokens: FeatureKind = "pooled"
    """`pooled` is the input of the head; the others are tokens."""
    layer: int | None = None
    """As if the model ended after this layer: its final norm and pooling follow. None: the last."""
    normalise: bool = False
    """Scale every vector to length 1."""
    raw: bool = False
    """Tokens as they leave the layer, without the final norm."""

    def check(self, config: ViTConfig) -> None:
        """Raise if a model does not have these features."""
        if self.tokens not in FEATURE_KINDS:
            raise ConfigError(
                f"unknown features {self.tokens!r}; choose {', '.join(FEATURE_KINDS)}"
                f"{suggest(self.tokens, FEATURE_KINDS)}"
            )
        if self.layer is not None:
            read_layer(self.layer, config.depth)
        if self.raw and self.tokens == "pooled":
            raise ConfigError("raw features are tokens as they leave a layer; choose class, patches or registers too")
        missing = _missing(config)
        if self.tokens in missing:
            others = [kind for kind in FEATURE_KINDS if kind not in missing]
            raise ConfigError(f"this model {missing[self.tokens]}; choose {' or '.join(others)}")

    def shape(self, config: ViTConfig) -> tuple[int, ...]:
        """Return the shape of one image's features."""
        return {
            "pooled": (config.pooled_width,),
            "class": (config.width,),
            "patches": (config.patches, config.width),
            "registers": (config.registers, config.width),
        }[self.tokens]

    def ready(self, model: ViT, plan: ExecutionPlan) -> ViT | FastModel:
        """Return the model for these features, as planned."""
        if plan.path == "fused_encoder":
            return self.folded(model, EncoderPrecision())
        return cast_once(model, plan.autocast)

    def in_int8(self) -> Int8Features:
        """Return what is quantised for these features; vectors are scaled to length 1 afterwards."""
        plain = replace(self, normalise=False)
        return Int8Features(plain.take, str(plain))

    def cache_key(self, config: ViTConfig, plan: ExecutionPlan) -> "FeatureRequest":
        """Return the cache key of `ready`: requests with the same key can share its result."""
        if plan.path != "fused_encoder":  # the model itself serves every request
            return FeatureRequest()
        layer = None if self.layer is None else read_layer(self.layer, config.depth)
        return replace(self, layer=None if layer == config.depth - 1 else layer, normalise=False, raw=False)

    def folded(self, model: ViT, numbers: EncoderPrecision) -> FastModel:
        """Return the fast encoder of the layers that these features need; all tokens, unless they are pooled."""
        layers = None if self.layer is None else read_layer(self.layer, model.config.depth) + 1
        return FastModel(model, numbers, layers=layers, all_tokens=self.tokens != "pooled")

    def take(self, model: ViT | FastModel, x: Tensor) -> Tensor:
        """Return the features of normalised images, in float32."""
        tokens = self._tokens(model, x).float()
        return F.normalize(tokens, dim=-1) if self.normalise else tokens

    def _tokens(self, model: ViT | FastModel, x: Tensor) -> Tensor:
        if self.raw:
            layer = -1 if self.layer is None else self.layer
            tokens = model.encode(x) if isinstance(model, FastModel) else model.trace(x, tokens=(layer,)).tokens[layer]
        else:
            features = model.features(x) if isinstance(model, FastModel) else model.features(x, layer=self.layer)
            if self.tokens == "pooled":
                return features.pooled
            tokens = features.tokens
        layout = model.config.layout
        if self.tokens == "class" and layout.class_token is not None:
            return tokens[:, layout.class_token]
        return tokens[:, layout.registers if self.tokens == "registers" else layout.patches]


def _missing(config: ViTConfig) -> dict[FeatureKind, str]:
    """Return the features that a model does not have, and why."""
    missing: dict[FeatureKind, str] = {}
    if not config.has_pool:
        missing["pooled"] = "does not pool its tokens"
    if config.class_token == "none":
        missing["class"] = "has no class token"
    if not config.registers:
        missing["registers"] = "has no registers"
    return missing


@dataclass(frozen=True)
class ComputeOptions:
    """Device, precision, batch size and workers."""

    device: str = "auto"
    precision: PrecisionChoice | Literal["int8"] = "float32"
    batch: int = 64
    workers: int | None = None
    """Decoding processes; None: one per core."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with the number of images done and the total."""
    on_plan: OnPlan | None = None
    """Called with the execution plan, before the first image."""
    decode: str = "auto"
    """Where JPEGs are decoded."""
    calibrate: Data | None = None
    """Images to calibrate int8 on; by default those of the model's run."""
    on_quantising: OnProgress | None = None
    """Called with the progress of quantising to int8."""

    def check(self) -> torch.device:
        """Raise for an unavailable device or precision; return the device."""
        place = choose_device(self.device)
        check_decode(self.decode)
        check_calibration(self.precision, "torch", self.calibrate)
        if self.precision != "auto" and self.precision != "int8":
            autocast(place, self.precision)
        return place


DEFAULT_COMPUTE = ComputeOptions()


class FeatureBatch(NamedTuple):
    """The features of a batch of images, in the order of the source, without unreadable ones."""

    features: NDArray[np.float32]
    """(B, …)."""
    labels: NDArray[np.int64]
    """(B,), -1 where the class is unknown."""
    indices: NDArray[np.int64]
    """(B,), indices into the source."""
    bad: tuple[BadImage, ...]
    """Images that could not be read."""


class FeatureModel:
    """A model ready to compute features of any number of sources; the bundle's model is moved to the device."""

    def __init__(self, bundle: Bundle, request: FeatureRequest, how: ComputeOptions = DEFAULT_COMPUTE) -> None:
        request.check(bundle.model.config)
        self.device, self.request, self.how, self.preprocess = how.check(), request, how, bundle.preprocess
        self.precision: InferencePrecision = "float32" if how.precision == "auto" else how.precision
        self.int8: Int8Engine | None = None
        self.model: ViT | FastModel = bundle.model
        if self.precision == "int8":
            self.int8 = open_int8(
                bundle, how.calibrate, device=self.device, features=request.in_int8(), on_progress=how.on_quantising
            )
            self.plan = self.int8.plan
        else:
            self.plan = plan_of(bundle.model.to(self.device), self.precision, "features")
            self.model = request.ready(bundle.model, self.plan)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the features of images (B, C, H, W); the model must be in eval mode."""
        if self.int8 is not None:
            features = self.int8(pixels)
            return F.normalize(features, dim=-1) if self.request.normalise else features
        # Only here, so that the caller's code between two batches runs in its own mode.
        with torch.inference_mode(), autocast(self.device, self.plan.autocast):
            pixels = pixels.to(self.device, non_blocking=True)
            return self.request.take(self.model, self.preprocess.normalise(pixels)).cpu()

    def decoder(self, source: Source) -> Decoder:
        """Choose where the JPEGs of a source are decoded."""
        return choose_for_source(self.how.decode, self.device, self.preprocess, source, workers=self.how.workers)

    def batches(self, source: Source, decoder: Decoder = ON_CPU) -> Iterator[FeatureBatch]:
        """Yield the features of every image once, in order."""
        how, done = self.how, 0
        data = Evaluation(source, self.preprocess, how.batch, bad_files="skip")
        with eval_mode(self.model):
            for images in decoder.batches(data, self.device, how.workers):
                features = self._compute(images, source)
                indices = images.indices.numpy()
                yield FeatureBatch(features, source.labels[indices].astype(np.int64), indices, images.bad)
                done += len(images.labels) + len(images.bad)
                if how.on_progress is not None:
                    how.on_progress(done, len(source))

    def _compute(self, images: Batch, source: Source) -> NDArray[np.float32]:
        if not len(images.labels):
            return np.zeros((0, *self.request.shape(self.model.config)), np.float32)
        computed = self(images.pixels)
        check_finite(computed.flatten(1), images.indices, source.name, self.precision)
        return computed.numpy()


def open_features(
    bundle: Bundle, source: Source, request: FeatureRequest, how: ComputeOptions
) -> tuple[FeatureModel, str]:
    """Return the model in the precision that was asked for, or that is best for these images, and how it computes."""

    if how.precision == "int8":
        with eval_mode(bundle.model):
            ready = FeatureModel(bundle, request, how)
        return ready, str(ready.plan)

    def open_for(precision: Precision) -> FeatureModel:
        return FeatureModel(bundle, request, replace(how, precision=precision))

    def first() -> Tensor:
        return first_images(source, bundle.preprocess, IMAGES)

    config = bundle.model.config
    with eval_mode(bundle.model):
        ready, why = open_best(open_for, how.precision, config, len(source), first, how.check(), compare_features)
    return ready, plan_text(ready.plan, why)


def feature_batches(
    bundle: Bundle, source: Source, request: FeatureRequest, how: ComputeOptions = DEFAULT_COMPUTE
) -> Iterator[FeatureBatch]:
    """Yield the features of every image once, in order; the bundle's model is moved to the device."""
    ready, plan = open_features(bundle, source, request, how)
    if how.on_plan is not None:
        how.on_plan(plan)
    decoder = ready.decoder(source)
    decoder.announce(how.on_plan)
    yield from ready.batches(source, decoder)


class Features(NamedTuple):
    """The features of all readable images of a source, in memory."""

    features: NDArray[np.float32]
    """(N, …)."""
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]
    bad: tuple[BadImage, ...]


def gather(
    bundle: Bundle, source: Source, request: FeatureRequest | None = None, how: ComputeOptions = DEFAULT_COMPUTE
) -> Features:
    """Return the features of every image as one array; by default the input of the head."""
    request = FeatureRequest() if request is None else request
    request.check(bundle.model.config)
    shape = request.shape(bundle.model.config)
    features = np.empty((len(source), *shape), np.float32)
    labels, indices = np.empty(len(source), np.int64), np.empty(len(source), np.int64)
    bad: list[BadImage] = []
    rows = 0
    for some in feature_batches(bundle, source, request, how):
        place = slice(rows, rows + len(some.labels))
        features[place], labels[place], indices[place] = some.features, some.labels, some.indices
        rows = place.stop
        bad += some.bad
    if not rows:
        raise nothing_to_read(bad)
    return Features(features[:rows], labels[:rows], indices[:rows], tuple(bad))


def nothing_to_read(bad: list[BadImage]) -> DataError:
    """Return the error for a source without readable images."""
    why = f"none of the {len(bad):,} can be read; the first, {bad[0].name}: {bad[0].reason}" if bad else "none"
    return DataError(f"no images to compute features for: {why}")
