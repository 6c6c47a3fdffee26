"""The run: from a settled recipe to a measured bundle, stopping and going on at any step without a trace."""

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
from vitrail.evaluation import Evaluation as Measured
from vitrail.evaluation import evaluate_predictions
from vitrail.models.vit import ViT
from vitrail.runtime import derive_seed, seed_torch
from vitrail.training.auto_batch import within_memory
from vitrail.training.averaging import Average
from vitrail.training.best import BEST, STATES, Best, save_in_run
from vitrail.training.criterion import as_good, score, validated
from vitrail.training.defaults import TrainingPlan
from vitrail.training.distributed import RunContext
from vitrail.training.finetune_init import FinetuneInit, fitted
from vitrail.training.forward import forget_compiled, forward_of
from vitrail.training.memory import Job, resident_images
from vitrail.training.objectives import class_weights, loss_note
from vitrail.training.optimizers import freeze, make_optimizer
from vitrail.training.pipelined_step import PipelinedStep
from vitrail.training.predictions import predictor
from vitrail.training.run_folder import RESULT, MetricsFile, write_json
from vitrail.training.run_logger import RunLogger, card_metrics, gap_warning
from vitrail.training.schedules import learning_rate
from vitrail.training.signals import Stopped, requests_to_stop
from vitrail.training.state import Progress, Setting, State, load_state, save_state
from vitrail.training.step import PendingStep, Stepper, StepResult, first_not_finite


class RunObserver(Protocol):
    """Who is told how a run goes."""

    def note(self, text: str) -> None:
        """Say something once."""

    def step(self, row: dict[str, Any]) -> None:
        """Say how a step went."""

    def measured(self, row: dict[str, Any]) -> None:
        """Say what the validation split came to."""


def train_run(
    plan: TrainingPlan,
    splits: Splits,
    pretrained: Bundle | None,
    folder: Path,
    context: RunContext,
    observer: RunObserver,
    *,
    final: bool,
) -> tuple[Bundle, Measured, list[str]]:
    """Train, or go on training; return the best model, what it is worth, and the files that could not be read.

    `final`: the result is the run's last word, and is kept in its folder.
    """
    run = _Run(plan, splits, pretrained, folder, context, observer)
    with nullcontext() if run.records is None else closing(run.records):
        if not run.state.progress.finished:
            run.check_best()
            there = resident_images(plan, splits)
            job = Job(plan, context.device, context.precision, context.ranks.processes.size, context.workers, there)
            with within_memory(job, folder, observer.note):
                run.go()
        return (*run.evaluate_best(final=final), run.state.progress.bad_files or [])


class _Run:
    """A run while it runs."""

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
            self.bundle = _first_bundle(plan, splits.train.classes, pretrained)
            self.state = self._first_state()
            self.training = self._training()
            self.stepper = self._stepper()
        self.setting = Setting(torch.get_num_threads(), ranks.processes.size, context.precision)
        if ranks.is_main:
            for name in (BEST, "last"):
                recover(folder / name)
        for note in load_state(folder / STATES, self.state, self.setting, ranks):
            observer.note(note)
        if self.state.progress.finished:
            observer.note(f"the run was finished after {self.state.progress.step:,} steps, so nothing is trained")
        elif self.state.progress.step:
            observer.note(f"going on from step {self.state.progress.step:,} of {plan.steps:,}")
        self.records = self._records() if ranks.is_main else None
        self.replaced = False
        self.bad: set[str] = set(self.state.progress.bad_files or [])
        self.measured_by = splits.val or splits.train
        self.predictions = predictor(plan, context, self.measured_by)
        self.best = Best(folder, self.state, ranks, observer.note, self._bundle_of)

    def _records(self) -> RunLogger:
        recipe, step = self.plan.recipe, self.state.progress.step
        losses = loss_note(recipe.model_dump())
        return RunLogger(self.folder, step, self.observer.note, compiled=recipe.compile, losses=losses)

    def _first_state(self) -> State:
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
        parts = self.ranks.processes.size * plan.recipe.gradient_accumulation
        if plan.batch % (2 * parts if plan.mixing.on else parts):
            pairs = " of whole pairs, which mixing needs" if plan.mixing.on else ""
            raise ConfigError(
                f"a batch of {plan.batch} cannot be cut into {parts} equal parts{pairs} (ranks × "
                f"gradient_accumulation); use a batch that is a multiple of {2 * parts if plan.mixing.on else parts}"
            )
        rank_slice = RankSlice(self.ranks.processes.rank, self.ranks.processes.size)
        return Training(train, stream, plan.preprocess, plan.augmentation, plan.mixing, rank_slice, data.bad_files)

    def _stepper(self) -> Stepper:
        plan, context = self.plan, self.context
        labels = torch.from_numpy(self.splits.train.labels)
        weights = class_weights(labels, plan.model.classes, plan.recipe.objective)
        weights = None if weights is None else weights.to(context.device)
        return Stepper(plan.recipe, plan.preprocess, context.device, context.precision, weights, context.ranks)

    def go(self) -> None:
        """Take step after step to the end."""
        if not self._tired():  # a run may have been stopped just as it was about to end early
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
                self.state.optimizer.zero_grad(set_to_none=True)  # gradients that lie in what was recorded
                forget_compiled(self.ranks.device)

    def _take_steps(self, forward: nn.Module) -> None:
        plan, progress = self.plan, self.state.progress
        evaluate_at = _evenly(plan.steps, plan.recipe.evaluations)
        saved = time.monotonic()
        pipelined = PipelinedStep()
        with requests_to_stop() as asked, closing(self._batches(progress.step)) as batches:
            for batch, seconds in _timed(batches):
                waited = pipelined.waited(seconds)
                self._note_bad(batch.bad)
                rate = self._rate(progress.step)
                taken = self._taken(forward, batch, rate)
                # The step before is asked for its numbers when this one is on its way, so that the device never waits.
                self._settle(pipelined)
                pipelined.put(taken, batch, rate, waited)
                # Of one mind, also about the time: a process that reads its numbers sooner would diverge sooner.
                stop, late = self.ranks.largest(asked(), time.monotonic() - saved > 60 * plan.recipe.save_minutes)
                if taken.ready is not None and not (late or stop or progress.step in evaluate_at):
                    continue
                self._settle(pipelined)
                ended = progress.step in evaluate_at and self._measure()
                if stop or progress.step in evaluate_at:  # where all processes are at the same place
                    self._share_bad()
                if late or stop or progress.step in evaluate_at:
                    self._save()
                    saved = time.monotonic()
                    pipelined.begin()
                if ended:
                    break
                if stop:
                    raise Stopped(stop)

    def _taken(self, forward: nn.Module, batch: Batch, rate: float) -> PendingStep:
        try:
            return self.stepper.take(self.state, forward, batch, rate)
        except Diverged as error:
            raise self._explained(error, batch) from None

    def _settle(self, pipelined: PipelinedStep) -> None:
        """Ask the step that is under way for its numbers, and report them."""
        if pipelined.taken is None or pipelined.batch is None:
            return
        try:
            stepped = pipelined.taken.read()
        except Diverged as error:
            raise self._explained(error, pipelined.batch) from None
        self._report(pipelined.taken.number + 1, stepped, pipelined.rate, pipelined.waited_for, pipelined.done())

    def _batches(self, first: int) -> Generator[Batch, None, None]:
        """Give the batches from a step on."""
        steps, workers = self.plan.steps, self.context.workers
        if self.plan.recipe.data.on_device:
            return Resident(self.training, self.context.device, workers).batches(first, steps)
        return training_batches(self.training, first, steps, workers=workers, pin=self._on_cuda())

    def _tired(self) -> bool:
        """Say whether the validation split has not become better for as long as patience lasts."""
        return 0 < self.plan.recipe.patience <= self.state.progress.since_highest

    def evaluate_best(self, *, final: bool) -> tuple[Bundle, Measured]:
        """Measure the best model on the test split, once; without one, on the part it was chosen by."""
        self.check_best()
        best = self.best.load()
        source = self.splits.test or self.splits.val or self.splits.train
        answers = self.predictions(best.model.to(self.context.device), source)
        kind = "training images" if source is self.splits.train else "held-out images"
        measured = evaluate_predictions(answers, source, kind=kind)
        if self.records is not None and self.splits.val is not None:
            gap = gap_warning(MetricsFile.read(self.folder), len(self.splits.val))
            measured = replace(measured, warnings=(*measured.warnings, *gap))
        if final:
            best.provenance[METRICS] = card_metrics(measured, tested=source is self.splits.test)
        if final and self.records is not None:
            self.records.held_out(answers, source)
            self.best.write_card(best)
            if self.replaced or not (self.folder / RESULT).exists():
                write_json(self.folder / RESULT, measured.as_dict())
        return best, measured

    def check_best(self) -> None:
        """See to it that best/ is the model that the state calls the best; where it is lost, take what there is now."""
        found = self.best.check()
        if found == "lost":
            self.replaced = True
            self._measure()
        if found != "whole":
            self._save()  # with the digest of what was written

    def _rate(self, step: int) -> float:
        return learning_rate(self.plan.recipe.schedule, step, self.plan.steps, self.plan.rate)

    def _measure(self) -> bool:
        """Measure the validation split, keep the model if it is the best, and say whether the run should end early."""
        progress = self.state.progress
        with self._averaged():
            answers = self.predictions(self.state.model, self.measured_by)
            found = validated(answers)
            criterion = self.plan.recipe.settled_criterion()
            reached = score(found, criterion)
            is_highest = progress.reach(reached)
            if is_highest or as_good(reached, progress.highest, criterion, len(answers.labels)):
                progress.best_step = progress.step
                if self.ranks.is_main:
                    self.best.save(self._bundle_now())
        row = {"step": progress.step, **found, "best": progress.best_step}
        if self.records is not None:
            self.records.measured(row)
        self.observer.measured({**row, "criterion": criterion, "highest": is_highest})
        return self._tired()

    def _save(self) -> None:
        if self.records is not None:
            self.records.flush()
            save_state(self.folder / STATES, self.state, self.setting)

    def _share_bad(self) -> None:
        """Let every process know the files that any of them could not read."""
        self.bad = set().union(*self.ranks.gathered(self.bad))
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

    def _report(self, step: int, stepped: StepResult, rate: float, waited: float, took: float) -> None:
        images = self.plan.batch
        row = {
            "step": step,
            "epoch": round(self.training.stream.epoch(step), 4),
            "loss": stepped.loss,
            "accuracy": stepped.correct / images,
            "lr": rate,
            "gradient_norm": stepped.gradient_norm,
        }
        if self.records is not None:
            self.records.step(row, seconds=took, waited=waited, images=images)
        self.observer.step({**row, "steps": self.plan.steps, "seconds": took, "waited": waited, "images": images})

    def _note_bad(self, bad: tuple[Any, ...]) -> None:
        for name, reason in bad:
            if name not in self.bad:
                self.bad.add(name)
                self.observer.note(f"{name} cannot be read and was left out: {reason}")
        self.state.progress.bad_files = sorted(self.bad)

    def _explained(self, error: Diverged, batch: Any) -> Diverged:
        losses = [row["loss"] for row in MetricsFile.read(self.folder) if "loss" in row][-5:]
        layer = first_not_finite(self.state.model, self.stepper, batch)
        recent = ", ".join(f"{loss:.3g}" for loss in losses)
        explained = Diverged(
            f"{error}; the losses before it were {recent or 'none'}; the first part whose output was not finite: "
            f"{layer}. Try a smaller optimizer.lr, optimizer.clip=1, a longer warm-up, or precision=float32; the last "
            f"saved state is kept in {self.folder / 'state'}"
        )
        explained.everywhere = True
        return explained

    def _on_cuda(self) -> bool:
        return self.context.device.type == "cuda"


def _first_bundle(plan: TrainingPlan, classes: tuple[str, ...], pretrained: Bundle | None) -> Bundle:
    """Return what training begins with: the model to start from, fitted to the data, or a fresh one."""
    seed_torch(derive_seed(plan.recipe.seed, "weights"))  # also for a new head
    if pretrained is not None:
        return fitted(pretrained, plan.recipe.pretrained or FinetuneInit(), plan.model, classes)
    return Bundle(ViT(plan.model), plan.preprocess, classes, {"source": "trained from scratch"})


def _evenly(steps: int, count: int) -> set[int]:
    """Return the steps after which the validation split is measured; the last one is among them."""
    return {max(1, round(steps * (number + 1) / count)) for number in range(count)} | {steps}


def _timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Give each batch with the seconds it was waited for."""
    while True:
        began = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.monotonic() - began
