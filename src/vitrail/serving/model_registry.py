"""The models of a service by name, each with its engine, batch queue and description, reloadable while in use."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import numpy as np
import torch

from vitrail.acceleration.auto import AutoPrecisionEngine
from vitrail.acceleration.cuda.graphs import SIZES
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.engine import Engine, open_engine
from vitrail.acceleration.planner import ExecutionPlan, plan_of
from vitrail.checkpoints.bundle import Bundle, digest_model
from vitrail.checkpoints.load import open_checkpoint
from vitrail.data.sources.source import Pixels
from vitrail.errors import CheckpointError, ConfigError, VitrailError, suggest
from vitrail.explanations.request import METHODS, ExplanationRequest
from vitrail.inference.features import FeatureRequest
from vitrail.models.config import ViTConfig
from vitrail.models.stages import sample_image, stages
from vitrail.models.vit import ViT
from vitrail.quantisation import check_calibration, open_int8
from vitrail.runtime import Precision, choose_device
from vitrail.serving.batching import Batcher
from vitrail.serving.files import model_samples
from vitrail.serving.lifecycle import Counters
from vitrail.serving.operations import Embed, Operation, Predict, Result
from vitrail.serving.settings import NamedSource, Settings
from vitrail.tasks.lookup import compare_for, task_of_head, unsuited_head

_log = logging.getLogger("vitrail.serving")
WARM_BATCH = 8
"""Large enough to use every core."""
MAX_READY = 4
"""Feature requests a model stays prepared for; on a GPU each holds its own copy of the weights."""


# ── one model ──


class ServedModel:
    """One model of the service."""

    def __init__(self, named: NamedSource, settings: Settings, counters: Counters) -> None:
        self.name = named.name
        self.device = choose_device(settings.device)
        self.bundle: Bundle = open_checkpoint(named.source, overrides=settings.overrides, keys=settings.keys)
        model = self.bundle.model.to(self.device).eval()
        _copy_weights(model)
        self.task = task_of_head(self.bundle)
        self.engine: Engine | None = None
        if self.task is not None and not unsuited_head(self.task, model.config):
            self.engine = self._open_engine(settings)
        # `auto` and int8 are validated on predictions, not on features, and other engines do not compute features.
        self.precision: Precision = (
            settings.precision
            if settings.engine == "torch" and settings.precision != "auto" and settings.precision != "int8"
            else "float32"
        )
        self._feature_plan = plan_of(model, self.precision, "features")
        self.ready = _ready_for(model, self._feature_plan)
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

        check_calibration(settings.precision, settings.engine, settings.calibrate)
        if settings.precision == "int8":
            return open_int8(self.bundle, settings.calibrate, device=device)

        def open_for(precision: Precision) -> Engine:
            return open_engine(model, preprocess, kind=settings.engine, precision=precision, device=device)

        if settings.precision == "auto":
            return AutoPrecisionEngine(
                open_for, self.device, partial(_log_precision, ref(self), self.name), compare_for(self.bundle)
            )
        return open_for(settings.precision)

    @property
    def plan(self) -> ExecutionPlan:
        """How predictions are computed at present; of a model without a head, features."""
        return self._feature_plan if self.engine is None else self.engine.plan

    def log_plan(self) -> None:
        """Log how the model is computed."""
        _log.info("plan", extra={"fields": {"model": self.name, "plan": str(self.plan)}})

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
        if self.engine is not None or self.bundle.model.config.has_pool:
            self.batcher.prepare(self._run_blank_images)
        if isinstance(self.engine, AutoPrecisionEngine):
            self.engine.restart()

    def _run_blank_images(self) -> None:
        height, width = self.bundle.preprocess.size
        blank = np.zeros((height, width, self.bundle.preprocess.channels), np.uint8)
        # A model without a head is served for its features.
        operation: Operation = Embed(FeatureRequest()) if self.engine is None else Predict(top=1)
        # Each small batch size captures its own CUDA graph on first use, which takes a while.
        sizes = SIZES if self.plan.graphs else (1, WARM_BATCH)
        for images in sorted({min(self.batcher.batch, size) for size in sizes}):
            for result in self.run(operation, [blank] * images):
                if isinstance(result, Exception):
                    raise result


def describe(name: str, bundle: Bundle, device: torch.device) -> dict[str, Any]:
    """Describe a model for /v1/models."""
    config, layout = bundle.model.config, bundle.model.config.layout
    why_not = _unsupported_methods(config)
    sample = sample_image(config.channels, config.image_size).to(device)
    return {
        "name": name,
        "task": bundle.task if config.classes else None,
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


def _ready_for(model: ViT, plan: ExecutionPlan) -> Callable[[FeatureRequest], ViT | FastModel]:
    """Return a cached function that prepares the model for a feature request."""

    @lru_cache(maxsize=MAX_READY)
    def ready(request: FeatureRequest) -> ViT | FastModel:
        return request.ready(model, plan)

    return lambda request: ready(request.cache_key(model.config, plan))


def _log_precision(served: "ref[ServedModel]", name: str, why: str) -> None:
    _log.info("precision", extra={"fields": {"model": name, "why": why}})
    model = served()
    if model is not None and model.engine is not None:  # a model that is being opened logs its plan later
        model.log_plan()


@torch.no_grad()
def _copy_weights(model: ViT) -> None:
    """Copy memory-mapped weights: the file may be overwritten while the model is being served."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


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


# ── all models ──


class ModelRegistry:
    """All served models."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        """Open every bundle; raise if one cannot be opened."""
        self._settings, self._counters = settings, counters
        self._sources = {named.name: named for named in settings.models}
        self._served = {named.name: self._open(named) for named in settings.models}
        self._reload_lock = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._pending: dict[str | None, asyncio.Task[list[str]]] = {}
        """Requested reloads that have not started."""

    async def start(self) -> None:
        """Warm up every model and start its batcher."""
        async with self._reload_lock:  # a concurrent reload runs afterwards
            for served in list(self._served.values()):
                await asyncio.to_thread(served.warm_up)
                self._activate(served)
                served.log_plan()

    async def close(self) -> None:
        """Finish the queued images, then close."""
        await asyncio.gather(*(served.batcher.close() for served in self._served.values()), *self._closing)

    @contextmanager
    def use(self, name: str | None) -> Iterator[ServedModel]:
        """Yield the model with this name (default: the first); a reload does not close it while in use."""
        served = self._served[self.check_name(name)]
        served.users += 1
        try:
            yield served
        finally:
            served.users -= 1
            if served.users == 0 and self._served.get(served.name) is not served:
                self._retire(served)

    def check_name(self, name: str | None) -> str:
        """Return the name of an existing model; None means the first."""
        if name is None:
            return next(iter(self._served))
        if name not in self._served:
            near = suggest(name, self._served) or f"; choose from {', '.join(self._served)}"
            raise ConfigError(f"no model is called {name[:80]!r}{near}")
        return name

    def check_capacity(self, name: str | None, *, alone: bool) -> None:
        """Raise early if the queue is full; an unknown name is reported later."""
        served = self._served.get(name or next(iter(self._served)))
        if served is not None:
            served.batcher.check_capacity(1, alone=alone)

    def waiting(self) -> float:
        """Return how many seconds the oldest queued image of any model has waited."""
        return max(served.batcher.waiting() for served in self._served.values())

    def descriptions(self) -> list[dict[str, Any]]:
        """Describe every model."""
        first = next(iter(self._served))
        return [{**served.description, "default": name == first} for name, served in self._served.items()]

    async def reload(self, name: str | None = None) -> list[str]:
        """Reload one bundle, or all of them; if one fails, none is replaced.

        Running requests finish on the old model.
        """
        # A pending reload will read the current files, so concurrent requests share it.
        pending = self._pending.get(name)
        if pending is None:
            pending = self._pending[name] = asyncio.get_running_loop().create_task(self._reload(name))
        return await asyncio.shield(pending)

    async def _reload(self, name: str | None) -> list[str]:
        async with self._reload_lock:
            del self._pending[name]
            names = list(self._served) if name is None else [self.check_name(name)]
            try:
                fresh = [await asyncio.to_thread(self._open_warm, self._sources[name]) for name in names]
            except Exception as error:  # a file that is still being copied can fail in any way
                self._counters.reloads.labels("failed").inc()
                _log.warning("reload failed", exc_info=None if isinstance(error, VitrailError) else error)
                raise CheckpointError(self._error_message(error)) from None
            for served in fresh:
                old = self._served[served.name]
                self._activate(served)
                served.log_plan()
                if old.users == 0:
                    self._retire(old)
            self._counters.reloads.labels("done").inc()
            return names

    def _error_message(self, error: Exception) -> str:
        """Describe an error without revealing where the bundle is on disk."""
        why = str(error) if isinstance(error, VitrailError) else "it cannot be opened"
        for named in self._sources.values():
            for path in (os.path.abspath(named.source), named.source):
                why = why.replace(path, named.name)
        return f"nothing was reloaded, the loaded models keep serving: {why}"

    def _activate(self, served: ServedModel) -> None:
        served.batcher.start()
        self._served[served.name] = served
        self._counters.waiting.labels(served.name).set_function(lambda: self._served[served.name].batcher.taken)

    def _retire(self, served: ServedModel) -> None:
        task = asyncio.get_running_loop().create_task(served.batcher.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open(self, named: NamedSource) -> ServedModel:
        return ServedModel(named, self._settings, self._counters)

    def _open_warm(self, named: NamedSource) -> ServedModel:
        served = self._open(named)
        served.warm_up()
        return served
