"""What a model makes of images before its head: pooled vectors or tokens, of any layer, batch by batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.acceleration.casting import cast_once
from vitrail.acceleration.cuda.encoder import Numbers
from vitrail.acceleration.cuda.model import FastModel, runs_fast
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadImage, Evaluation, evaluation_batches
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, suggest
from vitrail.evaluation import check_finite, in_use
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast, choose_device

FeatureKind = Literal["pooled", "class", "patches", "registers"]
FEATURE_KINDS: tuple[FeatureKind, ...] = get_args(FeatureKind)


@dataclass(frozen=True)
class FeatureRequest:
    """Which features."""

    tokens: FeatureKind = "pooled"
    """`pooled` is what the head sees; the others are tokens: that of the class, those of the patches, the registers."""
    layer: int | None = None
    """As if the model ended after this layer: its final norm follows, and its pooling. None: the last."""
    normalise: bool = False
    """Scale every vector to length 1."""
    raw: bool = False
    """Tokens as they leave the layer, without the final norm."""

    def check(self, config: ViTConfig) -> None:
        """Refuse what a model does not have."""
        if self.tokens not in FEATURE_KINDS:
            raise ConfigError(
                f"no features are called {self.tokens!r}; choose {', '.join(FEATURE_KINDS)}{suggest(self.tokens, FEATURE_KINDS)}"
            )
        if self.layer is not None:
            read_layer(self.layer, config.depth)
        if self.raw and self.tokens == "pooled":
            raise ConfigError("raw features are tokens as they leave a layer; choose class, patches or registers too")
        lacking = _lacking(config)
        if self.tokens in lacking:
            others = [kind for kind in FEATURE_KINDS if kind not in lacking]
            raise ConfigError(f"this model {lacking[self.tokens]}; choose {' or '.join(others)}")

    def shape(self, config: ViTConfig) -> tuple[int, ...]:
        """Return the shape of one image's features."""
        return {
            "pooled": (config.pooled_width,),
            "class": (config.width,),
            "patches": (config.patches, config.width),
            "registers": (config.registers, config.width),
        }[self.tokens]

    def ready(self, model: ViT, precision: Precision) -> ViT | FastModel:
        """Return what computes these features soonest: in bf16 on a CUDA device the fast encoder, where it can."""
        return (
            self.folded(model, Numbers()) if precision == "bf16" and runs_fast(model) else cast_once(model, precision)
        )

    def alike(self, config: ViTConfig) -> "FeatureRequest":
        """Return these features as far as `ready` looks at them: what it makes for one serves all that are alike."""
        layer = None if self.layer is None else read_layer(self.layer, config.depth)
        return replace(self, layer=None if layer == config.depth - 1 else layer, normalise=False, raw=False)

    def folded(self, model: ViT, numbers: Numbers) -> FastModel:
        """Return the fast encoder of the layers that these features need, and of all tokens but where one is pooled."""
        layers = None if self.layer is None else read_layer(self.layer, model.config.depth) + 1
        return FastModel(model, numbers, layers=layers, whole=self.tokens != "pooled")

    def take(self, model: ViT | FastModel, x: Tensor) -> Tensor:
        """Return the features of images that are ready for the model, in float32."""
        found = self._tokens(model, x).float()
        return F.normalize(found, dim=-1) if self.normalise else found

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


def _lacking(config: ViTConfig) -> dict[FeatureKind, str]:
    """Return the features that a model does not have, and why."""
    lacking: dict[FeatureKind, str] = {}
    if config.pool == "none":
        lacking["pooled"] = "does not pool its tokens"
    if config.class_token == "none":
        lacking["class"] = "has no class token"
    if not config.registers:
        lacking["registers"] = "has no registers"
    return lacking


@dataclass(frozen=True)
class ComputeOptions:
    """Where, in which numbers and how many at a time features are computed."""

    device: str = "auto"
    precision: Precision = "float32"
    batch: int = 64
    workers: int | None = None
    """Processes that decode; None: one for each core."""
    on_progress: Callable[[int, int], None] | None = None
    """Told how many images are done, and of how many."""

    def check(self) -> torch.device:
        """Refuse what is not there, and return the device."""
        place = choose_device(self.device)
        autocast(place, self.precision)
        return place


DEFAULT_COMPUTE = ComputeOptions()


class FeatureBatch(NamedTuple):
    """The features of some images, in the order of the source, without those that could not be read."""

    features: NDArray[np.float32]
    """(B, …)."""
    labels: NDArray[np.int64]
    """(B,), -1 where the class is not known."""
    indices: NDArray[np.int64]
    """(B,), which images of the source these are."""
    bad: tuple[BadImage, ...]
    """The images that should have been here."""


def feature_batches(
    bundle: Bundle, source: Source, request: FeatureRequest, how: ComputeOptions = DEFAULT_COMPUTE
) -> Iterator[FeatureBatch]:
    """Give the features of every image once, in order; the bundle's model goes to the device."""
    request.check(bundle.model.config)
    place = how.check()
    model, done = request.ready(bundle.model.to(place), how.precision), 0
    data = Evaluation(source, bundle.preprocess, how.batch, bad_files="skip")
    with in_use(model):
        for images in evaluation_batches(data, workers=how.workers, pin=place.type == "cuda"):
            features = np.zeros((0, *request.shape(model.config)), np.float32)
            if len(images.labels):
                # Only here, since what the caller does between two batches is no business of ours.
                with torch.inference_mode(), autocast(place, how.precision):
                    found = request.take(model, bundle.preprocess.normalise(images.to(place).pixels))
                    check_finite(found.flatten(1), images.indices, source.name, how.precision)
                    features = found.cpu().numpy()
            yield FeatureBatch(features, images.labels.numpy(), images.indices.numpy(), images.bad)
            done += len(images.labels) + len(images.bad)
            if how.on_progress is not None:
                how.on_progress(done, len(source))


class Features(NamedTuple):
    """The features of all images of a source that could be read, in memory."""

    features: NDArray[np.float32]
    """(N, …)."""
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]
    bad: tuple[BadImage, ...]


def gather(
    bundle: Bundle, source: Source, request: FeatureRequest | None = None, how: ComputeOptions = DEFAULT_COMPUTE
) -> Features:
    """Return the features of every image as one array; as a rule what the head sees."""
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
    """Return the error for images of which none can be read."""
    why = f"none of the {len(bad):,} can be read; the first, {bad[0].name}: {bad[0].reason}" if bad else "none"
    return DataError(f"there are no images to compute features of: {why}")
