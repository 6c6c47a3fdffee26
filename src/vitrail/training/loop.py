"""The training loop: from a resolved recipe to an evaluated bundle; stopping and resuming leave no trace."""

import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vitrail.checkpoints.bundle import METRICS, Bundle
from vitrail.checkpoints.writing import recover
from vitrail.data.batches import Batch, Training, training_batches
from vitrail.data.resident import Resident
from vitrail.data.sources.splits import Splits
from vitrail.data.stream import RankSlice, Stream
from vitrail.errors import ConfigError, Diverged
from vitrail.evaluation import Evaluation, evaluate_predictions
from vitrail.models.vit import ViT
from vitrail.runtime import derive_seed, seed_torch
from vitrail.training.auto_batch import within_memory
from vitrail.training.averaging import Average
from vitrail.training.criterion import BEST, STATES, Best, as_good, save_in_run, score, validation_metrics
from vitrail.training.defaults import TrainingPlan
from vitrail.training.distributed import RunContext
from vitrail.training.finetune_init import FinetuneInit, adapted
from vitrail.training.memory import Job, resident_images
from vitrail.training.objectives import class_weights, loss_note
from vitrail.training.optimizers import freeze, learning_rate, make_optimizer
from vitrail.training.predictions import predictor
from vitrail.training.run_folder import RESULT, MetricsFile, write_json
from vitrail.training.run_logger import RunLogger, card_metrics, gap_warning
from vitrail.training.sessions import Stopped, stop_signal
from vitrail.training.state import Progress, Setting, State, load_state, save_state
from vitrail.training.step import (
    PendingStep,
    PipelinedStep,
    Stepper,
    StepResult,
    first_not_finite,
    forward_of,
    reset_compiled,
)


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def note(self, text: str) -> None:
        """Report a message."""

    def step(self, row: dict[str, Any]) -> None:
        """Report the metrics of a step."""

    def validation(self, row: dict[str, Any]) -> None:
        """Report validation metrics."""


def train_run(
    plan: TrainingPlan,
    splits: Splits,
    pretrained: Bundle | None,
    folder: Path,
    context: RunContext,
    observer: RunObserver,
    *,
    final: bool,
) -> tuple[Bundle, Evaluation, list[str]]:
    """Train or resume; return the best model, its evaluation, and the files that could not be read.

    `final`: the result is final and is written to the run folder.
    """
    run = _Run(plan, splits, pretrained, folder, context, observer)
    with nullcontext() if run.logger is None else closing(run.logger):
        if not run.state.progress.finished:
            run.check_best()
            resident = resident_images(plan, splits)
            job = Job(plan, context.device, context.precision, context.ranks.processes.size, context.workers, resident)
            with within_memory(job, folder, observer.note):
                run.train()
        return (*run.evaluate_best(final=final), run.state.progress.bad_files or [])


class _Run:
    """The state and methods of a run in progress."""

    def __init__(
        self,
        plan: TrainingPlan,
        splits: Splits,
        pretrained: Bundle | None,
        folder: Path,
        context: RunContext,
        observer: RunObserver,
    ) -> None:
        self.plan, self.splits, self.folder, self.context, self.observer = plan, splits, folder, context, observer
        ranks = self.ranks = context.ranks
        with ranks.together():
            self.bundle = _initial_bundle(plan, splits.train.classes, pretrained)
            self.state = self._initial_state()
            self.training = self._training()
            self.stepper = self._stepper()
        self.setting = Setting(torch.get_num_threads(), ranks.processes.size, context.precision)
        if ranks.is_main:
            for name in (BEST, "last"):
                recover(folder / name)
        for note in load_state(folder / STATES, self.state, self.setting, ranks):
            observer.note(note)
        if self.state.progress.finished:
            observer.note(f"the run already finished after {self.state.progress.step:,} steps, so nothing is trained")
        elif self.state.progress.step:
            observer.note(f"resuming from step {self.state.progress.step:,} of {plan.steps:,}")
        self.logger = self._make_logger() if ranks.is_main else None
        self.replaced = False
        self.bad: set[str] = set(self.state.progress.bad_files or [])
        self.validation_source = splits.val or splits.train
        self.predict = predictor(plan, context, self.validation_source)
        self.best = Best(folder, self.state, ranks, observer.note, self._bundle_of)

    def _make_logger(self) -> RunLogger:
        recipe, step = self.plan.recipe, self.state.progress.step
        losses = loss_note(recipe.model_dump())
        return RunLogger(self.folder, step, self.observer.note, compiled=recipe.compile, losses=losses)

    def _initial_state(self) -> State:
        recipe, device = self.plan.recipe, self.context.device
        model = self.bundle.model.to(device).train()
        model.gradient_checkpointing = recipe.gradient_checkpointing
        freeze(model, recipe.freeze)
        average = Average(model, recipe.averaging) if recipe.averaging.on else None
        scaler = torch.amp.GradScaler(device.type, enabled=self.context.precision == "fp16")
        return State(model, make_optimizer(model, recipe.optimizer), average, Progress(), scaler)

    def _training(self) -> Training:
        plan, train, data = self.plan, self.splits.train, self.plan.recipe.data
        stream = Stream(len(train), plan.batch, plan.recipe.seed, data.repeats, train.labels if data.balance else None)
        micro_batches = self.ranks.processes.size * plan.recipe.gradient_accumulation
        unit = 2 * micro_batches if plan.mixing.on else micro_batches
        if plan.batch % unit:
            pairs = " of whole pairs, which mixing needs" if plan.mixing.on else ""
            raise ConfigError(
                f"a batch of {plan.batch} cannot be split into {micro_batches} equal micro-batches{pairs} (ranks × "
                f"gradient_accumulation); use a batch that is a multiple of {unit}"
            )
        rank_slice = RankSlice(self.ranks.processes.rank, self.ranks.processes.size)
        return Training(train, stream, plan.preprocess, plan.augmentation, plan.mixing, rank_slice, data.bad_files)

    def _stepper(self) -> Stepper:
        plan, context = self.plan, self.context
        labels = torch.from_numpy(self.splits.train.labels)
        weights = class_weights(labels, plan.model.classes, plan.recipe.objective)
        weights = None if weights is None else weights.to(context.device)
        return Stepper(plan.recipe, plan.preprocess, context.device, context.precision, weights, context.ranks)

    def train(self) -> None:
        """Train to the end."""
        if not self._out_of_patience():  # a run may have been interrupted just before early stopping
            self._train()
        self.state.progress.finished = True
        if self.ranks.is_main:
            save_in_run(self._bundle_now(), self.folder / "last")
        self._save()

    def _train(self) -> None:
        recipe = self.plan.recipe
        try:
            self._take_steps(forward_of(self.state.model, recipe, self.context.precision, self.ranks))
        finally:
            if recipe.compile:
                self.state.optimizer.zero_grad(set_to_none=True)  # they live in the CUDA graph's memory
                reset_compiled(self.ranks.device)

    def _take_steps(self, forward: nn.Module) -> None:
        plan, progress = self.plan, self.state.progress
        evaluate_at = _evaluation_steps(plan.steps, plan.recipe.evaluations)
        saved = time.monotonic()
        pipelined = PipelinedStep()
        with stop_signal() as signal, closing(self._batches(progress.step)) as batches:
            for batch, seconds in _timed(batches):
                waited = pipelined.waited(seconds)
                self._report_bad_files(batch.bad)
                lr = self._lr(progress.step)
                pending = self._launch(forward, batch, lr)
                # Read the previous step's metrics only after launching this one, so that the device never idles.
                self._report_pending(pipelined)
                pipelined.put(pending, batch, lr, waited)
                # All ranks must agree, also on the time to save.
                stop, late = self.ranks.all_reduce_max(
                    signal(), time.monotonic() - saved > 60 * plan.recipe.save_minutes
                )
                if pending.ready is not None and not (late or stop or progress.step in evaluate_at):
                    continue
                self._report_pending(pipelined)
                stop_early = progress.step in evaluate_at and self._validate()
                if stop or progress.step in evaluate_at:  # all ranks are at the same step
                    self._gather_bad_files()
                if late or stop or progress.step in evaluate_at:
                    self._save()
                    saved = time.monotonic()
                    pipelined.restart()
                if stop_early:
                    break
                if stop:
                    raise Stopped(stop)

    def _launch(self, forward: nn.Module, batch: Batch, lr: float) -> PendingStep:
        try:
            return self.stepper.launch(self.state, forward, batch, lr)
        except Diverged as error:
            raise self._explained(error, batch) from None

    def _report_pending(self, pipelined: PipelinedStep) -> None:
        """Wait for the pending step and report its metrics."""
        if pipelined.pending is None or pipelined.batch is None:
            return
        try:
            result = pipelined.pending.read()
        except Diverged as error:
            raise self._explained(error, pipelined.batch) from None
        self._report(pipelined.pending.number + 1, result, pipelined.lr, pipelined.waited_for, pipelined.done())

    def _batches(self, first: int) -> Generator[Batch, None, None]:
        """Yield the batches from a step on."""
        steps, workers = self.plan.steps, self.context.workers
        if self.plan.recipe.data.on_device:
            return Resident(self.training, self.context.device, workers).batches(first, steps)
        return training_batches(self.training, first, steps, workers=workers, pin=self._on_cuda())

    def _out_of_patience(self) -> bool:
        """Whether validation has not improved for `patience` evaluations."""
        return 0 < self.plan.recipe.patience <= self.state.progress.since_highest

    def evaluate_best(self, *, final: bool) -> tuple[Bundle, Evaluation]:
        """Evaluate the best model on the test split, once; without one, on the split that selected it."""
        self.check_best()
        best = self.best.load()
        source = self.splits.test or self.splits.val or self.splits.train
        predictions = self.predict(best.model.to(self.context.device), source)
        kind = "training images" if source is self.splits.train else "held-out images"
        evaluation = evaluate_predictions(predictions, source, kind=kind)
        if self.logger is not None and self.splits.val is not None:
            gap = gap_warning(MetricsFile.read(self.folder), len(self.splits.val))
            evaluation = replace(evaluation, warnings=(*evaluation.warnings, *gap))
        if final:
            best.provenance[METRICS] = card_metrics(evaluation, tested=source is self.splits.test)
        if final and self.logger is not None:
            self.logger.test_predictions(predictions, source)
            self.best.write_card(best)
            if self.replaced or not (self.folder / RESULT).exists():
                write_json(self.folder / RESULT, evaluation.as_dict())
        return best, evaluation

    def check_best(self) -> None:
        """Check best/ against the training state; if it is lost, the current model takes its place."""
        status = self.best.check()
        if status == "lost":
            self.replaced = True
            self._validate()
        if status != "intact":
            self._save()  # with the new digest of best/

    def _lr(self, step: int) -> float:
        return learning_rate(self.plan.recipe.schedule, step, self.plan.steps, self.plan.peak_lr)

    def _validate(self) -> bool:
        """Validate, keep the model if it is the best, and return whether to stop early."""
        progress = self.state.progress
        with self._averaged():
            predictions = self.predict(self.state.model, self.validation_source)
            metrics = validation_metrics(predictions)
            criterion = self.plan.recipe.resolved_criterion()
            reached = score(metrics, criterion)
            is_highest = progress.reach(reached)
            if is_highest or as_good(reached, progress.highest, criterion, len(predictions.labels)):
                progress.best_step = progress.step
                if self.ranks.is_main:
                    self.best.save(self._bundle_now())
        row = {"step": progress.step, **metrics, "best": progress.best_step}
        if self.logger is not None:
            self.logger.validation(row)
        self.observer.validation({**row, "criterion": criterion, "highest": is_highest})
        return self._out_of_patience()

    def _save(self) -> None:
        if self.logger is not None:
            self.logger.flush()
            save_state(self.folder / STATES, self.state, self.setting)

    def _gather_bad_files(self) -> None:
        """Collect the unreadable files of all ranks on every rank."""
        self.bad = set().union(*self.ranks.all_gather(self.bad))
        self.state.progress.bad_files = sorted(self.bad)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if self.state.average is None:
            yield
        else:
            with self.state.average.swapped(self.state.model):
                yield

    def _bundle_now(self) -> Bundle:
        return self._bundle_of(self.state.model, self.state.progress.step)

    def _bundle_of(self, model: nn.Module, step: int) -> Bundle:
        provenance = {**self.bundle.provenance, "trained": {"step": step, "of": self.plan.steps}}
        return Bundle(model, self.plan.preprocess, self.bundle.classes, provenance)  # type: ignore[arg-type]

    def _report(self, step: int, result: StepResult, lr: float, waited: float, took: float) -> None:
        images = self.plan.batch
        row = {
            "step": step,
            "epoch": round(self.training.stream.epoch(step), 4),
            "loss": result.loss,
            "accuracy": result.correct / images,
            "lr": lr,
            "gradient_norm": result.gradient_norm,
        }
        if self.logger is not None:
            self.logger.step(row, seconds=took, waited=waited, images=images)
        self.observer.step({**row, "steps": self.plan.steps, "seconds": took, "waited": waited, "images": images})

    def _report_bad_files(self, bad: tuple[Any, ...]) -> None:
        for name, reason in bad:
            if name not in self.bad:
                self.bad.add(name)
                self.observer.note(f"{name} cannot be read and is skipped: {reason}")
        self.state.progress.bad_files = sorted(self.bad)

    def _explained(self, error: Diverged, batch: Any) -> Diverged:
        losses = [row["loss"] for row in MetricsFile.read(self.folder) if "loss" in row][-5:]
        layer = first_not_finite(self.state.model, self.stepper, batch)
        recent = ", ".join(f"{loss:.3g}" for loss in losses)
        explained = Diverged(
            f"{error}; previous losses: {recent or 'none'}; first module with a non-finite output: {layer}. Try a "
            f"smaller optimizer.lr, optimizer.max_grad_norm=1, a longer warm-up, or precision=float32; the last saved "
            f"training state is kept in {self.folder / 'state'}"
        )
        explained.everywhere = True
        return explained

    def _on_cuda(self) -> bool:
        return self.context.device.type == "cuda"


def _initial_bundle(plan: TrainingPlan, classes: tuple[str, ...], pretrained: Bundle | None) -> Bundle:
    """Return the initial bundle: the pretrained model adapted to the data, or one with random weights."""
    seed_torch(derive_seed(plan.recipe.seed, "weights"))  # also for a new head
    if pretrained is not None:
        return adapted(pretrained, plan.recipe.pretrained or FinetuneInit(), plan.model, classes)
    return Bundle(ViT(plan.model), plan.preprocess, classes, {"source": "trained from scratch"})


def _evaluation_steps(steps: int, count: int) -> set[int]:
    """Return the steps after which to validate, including the last one."""
    return {max(1, round(steps * (number + 1) / count)) for number in range(count)} | {steps}


def _timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch with the seconds spent waiting for it."""
    while True:
        start = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.monotonic() - start
