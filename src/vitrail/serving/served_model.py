"""A bundle being served: its engine, its batch queue and its description."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from vitrail.acceleration.auto import AutoPrecisionEngine
from vitrail.acceleration.cuda.graphs import SIZES
from vitrail.acceleration.cuda.model import FastModel, runs_fast
from vitrail.acceleration.engine import Engine, open_engine
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import open_checkpoint
from vitrail.data.sources.source import Pixels
from vitrail.errors import VitrailError
from vitrail.explanations.request import METHODS, ExplanationRequest
from vitrail.inference.features import FeatureRequest
from vitrail.inference.jobs import digest_model
from vitrail.models.config import ViTConfig
from vitrail.models.stages import sample_image, stages
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, choose_device
from vitrail.serving.batching import Batcher
from vitrail.serving.counters import Counters
from vitrail.serving.files import model_samples
from vitrail.serving.operations import Embed, Operation, Predict, Result
from vitrail.serving.settings import NamedSource, Settings

_log = logging.getLogger("vitrail.serving")
WARM_BATCH = 8
"""Large enough to use every core."""
MAX_READY = 4
"""Feature requests a model stays prepared for; on a GPU each holds its own copy of the weights."""


class ServedModel:
    """One model of the service."""

    def __init__(self, named: NamedSource, settings: Settings, counters: Counters) -> None:
        self.name = named.name
        self.device = choose_device(settings.device)
        self.bundle: Bundle = open_checkpoint(named.source, overrides=settings.overrides, keys=settings.keys)
        model = self.bundle.model.to(self.device).eval()
        _copy_weights(model)
        self.engine: Engine | None = None
        if model.config.classes and model.config.pool != "none":
            self.engine = self._open_engine(settings)
        # `auto` is validated on class predictions, not on features, and other engines do not compute features.
        self.precision: Precision = (
            settings.precision if settings.engine == "torch" and settings.precision != "auto" else "float32"
        )
        self.ready = _ready_for(model, self.precision)
        self.samples = model_samples(named.source)
        self._description = describe(named.name, self.bundle, self.device)
        for assumption in self.bundle.assumptions:  # JSON log lines that name the model
            _log.warning("assumed", extra={"fields": {"model": named.name, "what": str(assumption)}})
        self.users = 0
        """Requests using this model; a replaced model is closed after the last of them."""
        self.batcher = Batcher(
            self.name,
            self.run,
            batch=settings.batch,
            wait=settings.wait / 1000,
            queue=settings.queue,
            counters=counters,
        )

    def _open_engine(self, settings: Settings) -> Engine:
        # Do not capture `self`: a replaced model must be freed at once.
        model, preprocess, device = self.bundle.model, self.bundle.preprocess, self.device

        def open_for(precision: Precision) -> Engine:
            return open_engine(model, preprocess, kind=settings.engine, precision=precision, device=device)

        if settings.precision == "auto":
            return AutoPrecisionEngine(open_for, self.device, partial(_log_precision, self.name))
        return open_for(settings.precision)

    @property
    def description(self) -> dict[str, Any]:
        """The entry of this model in /v1/models."""
        return {**self._description, "precision": self.precision if self.engine is None else self.engine.precision}

    def run(self, operation: Operation, images: Sequence[Pixels]) -> list[Result]:
        """Run an operation on a batch of images; called in the model's thread."""
        return operation.run(self, images)

    def warm_up(self) -> None:
        """Run once, so that the first client does not wait; fails if the output is not finite."""
        # In the compute thread, because thread pools and libraries initialise per thread.
        if self.engine is not None or self.bundle.model.config.pool != "none":
            self.batcher.prepare(self._run_blank_images)
        if isinstance(self.engine, AutoPrecisionEngine):
            self.engine.restart()

    def _run_blank_images(self) -> None:
        height, width = self.bundle.preprocess.size
        blank = np.zeros((height, width, self.bundle.preprocess.channels), np.uint8)
        # A model without a head is served for its features.
        operation: Operation = Embed(FeatureRequest()) if self.engine is None else Predict(top=1)
        # On a GPU each small batch size captures its own CUDA graph on first use, which takes a while.
        sizes = SIZES if self.device.type == "cuda" else (1, WARM_BATCH)
        for images in sorted({min(self.batcher.batch, size) for size in sizes}):
            for result in self.run(operation, [blank] * images):
                if isinstance(result, Exception):
                    raise result


def _ready_for(model: ViT, precision: Precision) -> Callable[[FeatureRequest], ViT | FastModel]:
    """Return a cached function that prepares the model for a feature request."""

    @lru_cache(maxsize=MAX_READY)
    def ready(request: FeatureRequest) -> ViT | FastModel:
        return request.ready(model, precision)

    if precision == "bf16" and runs_fast(model):
        return lambda request: ready(request.cache_key(model.config))
    return lambda _: ready(FeatureRequest())  # the model itself serves every request


def _log_precision(model: str, why: str) -> None:
    _log.info("precision", extra={"fields": {"model": model, "why": why}})


@torch.no_grad()
def _copy_weights(model: ViT) -> None:
    """Copy memory-mapped weights: the file may be overwritten while the model is being served."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def describe(name: str, bundle: Bundle, device: torch.device) -> dict[str, Any]:
    """Describe a model for /v1/models."""
    config, layout = bundle.model.config, bundle.model.config.layout
    why_not = _unsupported_methods(config)
    sample = sample_image(config.channels, config.image_size).to(device)
    return {
        "name": name,
        "classes": None if bundle.classes is None else list(bundle.classes),
        "class_count": config.classes,
        "channels": config.channels,
        "image_size": list(config.image_size),
        "patch_size": list(config.patch_size),
        "grid": list(config.grid),
        "depth": config.depth,
        "heads": config.heads,
        "width": config.width,
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "tokens": _special_tokens(config),
        "token_count": config.tokens,
        "patch_start": layout.patches.start,
        "pool": config.pool,
        "stages": [
            {"name": stage.name, "shape": list(stage.shape), "meaning": stage.meaning}
            for stage in stages(bundle.model, sample)
        ],
        "methods": {method: method not in why_not for method in METHODS},
        "why_not": why_not,
        "digest": digest_model(bundle)[:12],
    }


def _special_tokens(config: ViTConfig) -> list[dict[str, Any]]:
    layout = config.layout
    tokens: list[dict[str, Any]] = []
    if layout.class_token is not None:
        tokens.append({"index": layout.class_token, "kind": "class"})
    if layout.distillation_token is not None:
        tokens.append({"index": layout.distillation_token, "kind": "distillation"})
    registers = range(layout.registers.start, layout.registers.stop)
    tokens += [{"index": index, "kind": "register", "number": number} for number, index in enumerate(registers)]
    return sorted(tokens, key=lambda token: int(token["index"]))


def _unsupported_methods(config: ViTConfig) -> dict[str, str]:
    """Return the explanation methods the model does not support, with the reasons."""
    reasons = {}
    for method in METHODS:
        try:
            ExplanationRequest(method).check(config)  # type: ignore[arg-type]
        except VitrailError as error:
            reasons[method] = str(error)
    return reasons
