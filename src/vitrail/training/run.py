"""A run in progress: everything it needs, built from its job and resumed from its newest training state."""

import copy
import functools
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vitrail.checkpoints.bundle import TEACHER, Bundle
from vitrail.checkpoints.writing import recover
from vitrail.data.batches import Training, training_batches
from vitrail.data.gpu_batches import gpu_training_batches
from vitrail.data.resident import Resident
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import Splits
from vitrail.data.sources.targets import output_names_of
from vitrail.data.stream import RankSlice, Stream
from vitrail.data.views import AnyBatch, MultiCropTraining, view_batches
from vitrail.models.lora import add_adapters, merged
from vitrail.models.vit import ViT
from vitrail.runtime import derive_seed, seed_torch
from vitrail.tasks.task import AUGMENTED_ONLY
from vitrail.training.averaging import Average
from vitrail.training.context import Job
from vitrail.training.criterion import BEST, STATES, Best
from vitrail.training.distributed import Ranks
from vitrail.training.finetune_init import FinetuneInit, adapted
from vitrail.training.learner import Learner, ShownMetrics
from vitrail.training.learners import learner_of, shown_metrics
from vitrail.training.optimizers import freeze, make_optimizer
from vitrail.training.pipeline import FinishedStep
from vitrail.training.plan import TrainingPlan, check_batch
from vitrail.training.run_logger import RunLogger
from vitrail.training.sharding import shard, shard_group
from vitrail.training.split_predictions import SplitPredictor, split_predictor
from vitrail.training.state import Progress, Setting, State
from vitrail.training.state_files import StateWriter, check_shared, load_state
from vitrail.training.step import Stepper

LAST = "last"


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def note(self, text: str) -> None:
        """Report a message."""

    def step(self, row: dict[str, Any]) -> None:
        """Report the metrics of a step."""

    def validation(self, row: dict[str, Any]) -> None:
        """Report validation metrics."""


@dataclass(eq=False)
class TrainingRun:
    """A run in progress."""

    job: Job
    splits: Splits
    folder: Path
    observer: RunObserver
    state: State
    training: Training | MultiCropTraining
    """The training images, in the order of the stream."""
    stepper: Stepper
    shown: ShownMetrics
    writer: StateWriter
    logger: RunLogger | None
    """Writes the metrics, on the main process only."""
    predict: SplitPredictor
    best: Best
    first_step: int
    """Where this session started or resumed."""
    best_replaced: bool = False
    """Whether the best model was lost, so that another one took its place."""

    def __post_init__(self) -> None:
        self.bad: set[str] = set(self.progress.bad_files or [])

    @property
    def plan(self) -> TrainingPlan:
        """The resolved recipe."""
        return self.job.plan

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run."""
        return self.job.context.ranks

    @property
    def learner(self) -> Learner:
        """What the run trains."""
        return self.stepper.learner

    @property
    def progress(self) -> Progress:
        """Steps taken and the best checkpoint so far."""
        return self.state.progress

    @property
    def validation_source(self) -> Source:
        """The split that selects the best checkpoint."""
        return self.splits.val or self.splits.train

    @property
    def out_of_patience(self) -> bool:
        """Whether validation has not improved for `patience` evaluations."""
        return 0 < self.plan.recipe.patience <= self.progress.since_highest

    @property
    def waiting_fraction(self) -> float | None:
        """Fraction of this session's time spent waiting for data; None without a step, and on other ranks."""
        if self.logger is None or self.progress.step == self.first_step:
            return None
        return self.logger.throughput.total_waiting_fraction

    def batches(self) -> Generator[AnyBatch, None, None]:
        """Return the batches of the remaining steps."""
        context, first, steps = self.job.context, self.progress.step, self.plan.steps
        if isinstance(self.training, MultiCropTraining):
            pin = context.device.type == "cuda"
            return view_batches(self.training, first, steps, workers=context.workers, pin=pin)
        if self.plan.recipe.data.on_device:
            return Resident(self.training, context.device, context.workers, context.decoder).batches(first, steps)
        if context.decoder.device is not None:
            return gpu_training_batches(self.training, first, steps, context.decoder.device, workers=context.workers)
        pin = context.device.type == "cuda"
        return training_batches(self.training, first, steps, workers=context.workers, pin=pin)

    def bundle_now(self, constants: Mapping[str, Any]) -> Bundle:
        """Return the current model as a bundle, with constants of the task that follow from its predictions."""
        bundle = self.best.bundle_of(self.state.plain, self.progress.step)
        bundle.task_constants = {**bundle.task_constants, **constants}
        return bundle

    def log(self, finished: Iterable[FinishedStep]) -> None:
        """Log the metrics of finished steps."""
        images = self.plan.batch
        for step, result, lr, waited, seconds in finished:
            row = {
                "step": step,
                "epoch": round(self.training.stream.epoch(step), 4),
                "loss": result.loss,
                self.shown.training_metric.key: result.total / images,
                "lr": lr,
                "gradient_norm": result.gradient_norm,
            }
            if self.logger is not None:
                self.logger.step(row, seconds=seconds, waited=waited, images=images)
            speed = {"seconds": seconds, "waited": waited, "images": images}
            self.observer.step({**row, "steps": self.plan.steps, **speed})

    def report_bad_files(self, batch: AnyBatch) -> None:
        """Report each unreadable image once, and record it in the training state."""
        for name, reason in batch.bad:
            if name not in self.bad:
                self.bad.add(name)
                self.observer.note(f"{name} cannot be read and is skipped: {reason}")
        self.progress.bad_files = sorted(self.bad)

    def gather_bad_files(self) -> None:
        """Collect the unreadable files of all ranks on every rank."""
        self.bad = set().union(*self.ranks.all_gather(self.bad))
        self.progress.bad_files = sorted(self.bad)

    def save(self) -> None:
        """Save the training state."""
        if self.logger is not None:
            self.logger.flush()
        self.writer.save(self.state)


# ── start ──


def start_run(job: Job, splits: Splits, pretrained: Bundle | None, folder: Path, observer: RunObserver) -> TrainingRun:
    """Build a run, and load its newest training state if it has one."""
    plan, context = job
    ranks = context.ranks
    with ranks.together():
        bundle = _initial_bundle(plan, output_names_of(splits.train), pretrained)
        learner = learner_of(plan, context.device, splits.train, context.precision)
        state = _initial_state(job, bundle.model, learner)
        training = _training(job, splits.train)
        stepper = Stepper(plan.recipe, plan.preprocess, context.device, context.precision, learner, ranks)
    setting = Setting(
        torch.get_num_threads(), ranks.processes.size, context.precision, context.sharded, context.decoder.name
    )
    shards = shard_group() if context.sharded else None
    if shards is not None:
        check_shared(folder, ranks)  # now, not when the first state is saved
    if ranks.is_main:
        for name in (BEST, LAST):
            recover(folder / name)
    for note in load_state(folder / STATES, state, setting, ranks, shards):
        observer.note(note)
    if state.progress.finished:
        observer.note(f"the run already finished after {state.progress.step:,} steps, so nothing is trained")
    elif state.progress.step:
        observer.note(f"resuming from step {state.progress.step:,} of {plan.steps:,}")
    logger = _logger(folder, plan, state.progress.step, observer) if ranks.is_main else None
    predict = split_predictor(plan, context, splits.val or splits.train)
    best = Best(folder, state, ranks, observer.note, functools.partial(_trained_bundle, plan, bundle, learner))
    return TrainingRun(
        job=job,
        splits=splits,
        folder=folder,
        observer=observer,
        state=state,
        training=training,
        stepper=stepper,
        shown=shown_metrics(plan),
        writer=StateWriter(folder / STATES, setting, ranks, shards),
        logger=logger,
        predict=predict,
        best=best,
        first_step=state.progress.step,
    )


def _initial_bundle(plan: TrainingPlan, classes: tuple[str, ...], pretrained: Bundle | None) -> Bundle:
    """Return the initial bundle: the pretrained model adapted to the data, or one with random weights."""
    seed_torch(derive_seed(plan.recipe.seed, "weights"))  # also for a new head
    if plan.recipe.method is not None:
        method = plan.recipe.method.replace("_", "-")
        return Bundle(ViT(plan.model), plan.preprocess, None, {"source": f"pretrained from scratch: {method}"})
    task, names = plan.task, plan.task.output_names(classes)
    if pretrained is not None:
        bundle = adapted(pretrained, plan.recipe.pretrained or FinetuneInit(), plan.model, task.name, names)
    else:
        bundle = Bundle(ViT(plan.model), plan.preprocess, names, {"source": "trained from scratch"}, task=task.name)
    bundle.task_constants = task.constants
    return bundle


def _trained_bundle(plan: TrainingPlan, initial: Bundle, learner: Learner, module: nn.Module, step: int) -> Bundle:
    """Return the bundle of a module after some steps; adapters are merged, so that it is a plain model."""
    # If the initial model was trained with LoRA, that no longer describes how this one was.
    provenance = {key: value for key, value in initial.provenance.items() if key != "lora"}
    provenance["trained"] = {"step": step, "of": plan.steps}
    if plan.teacher is not None:
        provenance[TEACHER] = plan.teacher.record()
    model = learner.kept(module)
    if plan.recipe.lora.rank:
        provenance["lora"] = plan.recipe.lora.record()
        model = merged(model)
    constants = initial.task_constants
    return Bundle(model, plan.preprocess, initial.classes, provenance, task=initial.task, task_constants=constants)


def _initial_state(job: Job, model: ViT, learner: Learner) -> State:
    recipe, device = job.plan.recipe, job.device
    model.train().gradient_checkpointing = recipe.gradient_checkpointing
    add_adapters(model, recipe.lora, derive_seed(recipe.seed, "lora"))
    freeze(model, recipe.frozen)
    module = learner.module(model)
    whole = copy.deepcopy(module) if job.context.sharded else None
    if whole is None:
        module.to(device)  # not .train(): a frozen BatchNorm stays in eval mode
    else:
        shard(module, job.context.ranks, job.precision, compiled=recipe.compile is True)
    average = Average(module, recipe.averaging) if recipe.averaging.on else None
    scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
    return State(module, make_optimizer(module, recipe.optimizer), average, Progress(), scaler, whole)


def _training(job: Job, train: Source) -> Training | MultiCropTraining:
    """Return this rank's slice of the training stream."""
    plan, processes, data = job.plan, job.context.ranks.processes, job.plan.recipe.data
    stream = Stream(len(train), plan.batch, plan.recipe.seed, data.repeats, train.labels if data.balance else None)
    check_batch(plan, processes.size)
    rank_slice = RankSlice(processes.rank, processes.size)
    if plan.recipe.dino is not None and not data.on_device:  # on the device, the learner makes the views
        crops = plan.recipe.dino.crops(plan.model)
        return MultiCropTraining(train, stream, plan.preprocess, crops, rank_slice, data.bad_files)
    return Training(train, stream, plan.preprocess, plan.augmentation, plan.mixing, rank_slice, data.bad_files)


def _logger(folder: Path, plan: TrainingPlan, step: int, observer: RunObserver) -> RunLogger:
    note = AUGMENTED_ONLY if plan.recipe.method is not None else plan.task.loss_note(plan.recipe.model_dump())
    return RunLogger(
        folder,
        step,
        observer.note,
        shown=shown_metrics(plan),
        compiled=plan.recipe.compile is True,
        losses=(note.training, note.validation),
    )
