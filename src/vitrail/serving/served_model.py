"""A bundle made ready to be served: its engine, its queue, and how it is described."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from vitrail.acceleration.auto import SettlingEngine
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
from vitrail.serving.files import own_samples
from vitrail.serving.operations import Answer, Embed, ParsedRequest, Predict
from vitrail.serving.settings import NamedSource, Settings

_log = logging.getLogger("vitrail.serving")
WARM_BATCH = 8
"""Enough for every core to have its share."""
READY = 4
"""How many kinds of features a model is kept ready for; on a GPU each has weights of its own."""


class ServedModel:
    """One model of the service."""

    def __init__(self, named: NamedSource, settings: Settings, counters: Counters) -> None:
        self.name = named.name
        self.device = choose_device(settings.device)
        self.bundle: Bundle = open_checkpoint(named.source, overrides=settings.overrides, keys=settings.keys)
        model = self.bundle.model.to(self.device).eval()
        _own_weights(model)
        self.engine: Engine | None = None
        if model.config.classes and model.config.pool != "none":
            self.engine = self._opened_engine(settings)
        # What `auto` settles on has been tried on classes, not on features, and other engines compute no features.
        self.precision: Precision = (
            settings.precision if settings.engine == "torch" and settings.precision != "auto" else "float32"
        )
        self.ready = _ready_for(model, self.precision)
        self.samples = own_samples(named.source)
        self._description = describe(named.name, self.bundle, self.device)
        for assumption in self.bundle.assumptions:  # in the service's own log, whose lines are JSON and name the model
            _log.warning("assumed", extra={"fields": {"model": named.name, "what": str(assumption)}})
        self.users = 0
        """Requests that hold on to this model; one that was replaced ends with the last of them."""
        self.batcher = Batcher(
            self.name,
            self.answer,
            batch=settings.batch,
            wait=settings.wait / 1000,
            queue=settings.queue,
            counters=counters,
        )

    def _opened_engine(self, settings: Settings) -> Engine:
        # None of this may hold on to `self`: a model that was replaced is to be let go of at once.
        model, preprocess, device = self.bundle.model, self.bundle.preprocess, self.device

        def open_for(precision: Precision) -> Engine:
            return open_engine(model, preprocess, kind=settings.engine, precision=precision, device=device)

        if settings.precision == "auto":
            return SettlingEngine(open_for, self.device, partial(_tell_precision, self.name))
        return open_for(settings.precision)

    @property
    def description(self) -> dict[str, Any]:
        """What /v1/models says of this model."""
        return {**self._description, "precision": self.precision if self.engine is None else self.engine.precision}

    def answer(self, work_item: ParsedRequest, images: Sequence[Pixels]) -> list[Answer]:
        """Compute the answers for some images; called in the model's own thread."""
        return work_item.answer(self, images)

    def warm_up(self) -> None:
        """Compute once what the first client would otherwise wait for; a model that answers nonsense is found out."""
        # In the thread that will answer: a thread's first work starts threads and opens libraries for that thread.
        if self.engine is not None or self.bundle.model.config.pool != "none":
            self.batcher.prepare(self._answer_blanks)
        if isinstance(self.engine, SettlingEngine):
            self.engine.begin()

    def _answer_blanks(self) -> None:
        height, width = self.bundle.preprocess.size
        blank = np.zeros((height, width, self.bundle.preprocess.channels), np.uint8)
        # A model without a head is there for its features.
        work_item: ParsedRequest = Embed(FeatureRequest()) if self.engine is None else Predict(top=1)
        # On a GPU every size of a small batch is recorded when it first comes, and that takes a while.
        sizes = SIZES if self.device.type == "cuda" else (1, WARM_BATCH)
        for images in sorted({min(self.batcher.batch, size) for size in sizes}):
            for answer in self.answer(work_item, [blank] * images):
                if isinstance(answer, Exception):
                    raise answer


def _ready_for(model: ViT, precision: Precision) -> Callable[[FeatureRequest], ViT | FastModel]:
    """Return what makes a model ready for some features, and remembers it."""

    @lru_cache(maxsize=READY)
    def ready(request: FeatureRequest) -> ViT | FastModel:
        return request.ready(model, precision)

    if precision == "bf16" and runs_fast(model):
        return lambda request: ready(request.cache_key(model.config))
    return lambda _: ready(FeatureRequest())  # the model itself, which has all of them


def _tell_precision(model: str, why: str) -> None:
    _log.info("precision", extra={"fields": {"model": model, "why": why}})


@torch.no_grad()
def _own_weights(model: ViT) -> None:
    """Copy weights that are read from their file only as they are used: it may be overwritten while it is served."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def describe(name: str, bundle: Bundle, device: torch.device) -> dict[str, Any]:
    """Say what a model is, as /v1/models answers."""
    config, layout = bundle.model.config, bundle.model.config.layout
    why_not = _refused_methods(config)
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
    found: list[dict[str, Any]] = []
    if layout.class_token is not None:
        found.append({"index": layout.class_token, "kind": "class"})
    if layout.distillation_token is not None:
        found.append({"index": layout.distillation_token, "kind": "distillation"})
    places = range(layout.registers.start, layout.registers.stop)
    found += [{"index": place, "kind": "register", "number": number} for number, place in enumerate(places)]
    return sorted(found, key=lambda token: int(token["index"]))


def _refused_methods(config: ViTConfig) -> dict[str, str]:
    """Return the methods that explain nothing for a model, and why."""
    refused = {}
    for method in METHODS:
        try:
            ExplanationRequest(method).check(config)  # type: ignore[arg-type]
        except VitrailError as error:
            refused[method] = str(error)
    return refused
