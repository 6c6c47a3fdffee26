"""The run: from a settled recipe to a measured bundle, stopping and going on at any step without a trace."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vitrail.checkpoints.adapt import adapt
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Evaluation, Training, evaluation_batches, training_batches
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import Parts
from vitrail.data.stream import Share, Stream
from vitrail.errors import Diverged
from vitrail.evaluation import Evaluation as Measured
from vitrail.evaluation import Predictions, measure, predict_all
from vitrail.metrics.classification import log_losses
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, Processes, derive_seed, seed_torch
from vitrail.training.averaging import Average
from vitrail.training.choices import Plan
from vitrail.training.fitting import within_memory
from vitrail.training.folder import Journal, write_json
from vitrail.training.memory import Job, evaluation_batch
from vitrail.training.objectives import class_weights
from vitrail.training.optimizers import freeze, make_optimizer
from vitrail.training.schedules import learning_rate
from vitrail.training.state import Progress, State, load_state, save_state
from vitrail.training.step import Stepped, Stepper, first_not_finite

ALONE = Processes()


class Watcher(Protocol):
    """Who is told how a run goes."""

    def note(self, text: str) -> None:
        """Say something once."""

    def step(self, row: dict[str, Any]) -> None:
        """Say how a step went."""

    def measured(self, row: dict[str, Any]) -> None:
        """Say what the val part came to."""


@dataclass(frozen=True)
class Where:
    """What a run computes on."""

    device: torch.device
    precision: Precision
    workers: int
    processes: Processes = ALONE


class Stopped(Exception):  # noqa: N818 - named for what happened
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def train_run(
    plan: Plan, parts: Parts, start: Bundle | None, folder: Path, where: Where, watcher: Watcher
) -> tuple[Bundle, Measured, list[str]]:
    """Train, or go on training; return the best model, what it is worth, and the files that could not be read."""
    run = _Run(plan, parts, start, folder, where, watcher)
    if not run.state.progress.finished:
        job = Job(plan, where.device, where.precision, where.processes.size, where.workers)
        with within_memory(job, folder, watcher.note if where.processes.is_main else _say_nothing):
            run.go()
    return (*run.verdict(), sorted(run.bad))


class _Run:
    """A run while it runs."""

    def __init__(
        self, plan: Plan, parts: Parts, start: Bundle | None, folder: Path, where: Where, watcher: Watcher
    ) -> None:
        self.plan, self.parts, self.folder, self.where, self.watcher = plan, parts, folder, where, watcher
        recipe = plan.recipe
        self.bundle = _first_bundle(plan, parts.train.classes, start)
        model = self.bundle.model.to(where.device).train()
        model.gradient_checkpointing = recipe.gradient_checkpointing
        freeze(model, recipe.freeze)
        average = None if recipe.averaging.kind == "none" else Average(model, recipe.averaging)
        self.state = State(model, make_optimizer(model, recipe.optimizer), average, Progress())
        self.threads = torch.get_num_threads()
        for note in load_state(folder / "state", self.state, self.threads):
            watcher.note(note)
        if self.state.progress.step:
            watcher.note(f"going on from step {self.state.progress.step:,} of {plan.steps:,}")
        labels = parts.train.labels
        weights = class_weights(torch.from_numpy(labels), plan.model.classes, recipe.objective)
        weights = None if weights is None else weights.to(where.device)
        rank = where.processes.rank
        self.stepper = Stepper(recipe, plan.preprocess, where.device, where.precision, weights, rank)
        stream = Stream(
            len(parts.train), plan.batch, recipe.seed, recipe.data.repeats, labels if recipe.data.balance else None
        )
        self.training = Training(
            parts.train,
            stream,
            plan.preprocess,
            plan.augmentation,
            plan.mixing,
            Share(rank, where.processes.size),
            recipe.data.bad_files,
        )
        self.journal = Journal(folder, self.state.progress.step)
        self.bad: set[str] = set(self.state.progress.bad_files or [])

    def go(self) -> None:
        """Take step after step to the end."""
        plan, progress = self.plan, self.state.progress
        forward: nn.Module = torch.compile(self.state.model) if plan.recipe.compile else self.state.model  # type: ignore[assignment]
        evaluate_at = _evenly(plan.steps, plan.recipe.evaluations)
        saved = time.monotonic()
        with _signals() as stop:
            for batch, waited in _timed(
                training_batches(
                    self.training, progress.step, plan.steps, workers=self.where.workers, pin=self._on_cuda()
                )
            ):
                self._note_bad(batch.bad)
                rate = self._rate(progress.step)
                began = time.monotonic()
                try:
                    stepped = self.stepper.step(self.state, forward, batch, rate)
                except Diverged as error:
                    raise self._explained(error, batch) from None
                self._report(stepped, rate, len(batch.labels), waited, time.monotonic() - began)
                ended = progress.step in evaluate_at and self._measure()
                late = time.monotonic() - saved > 60 * plan.recipe.save_minutes
                if ended or late or stop() or progress.step in evaluate_at or progress.step == plan.steps:
                    save_state(self.folder / "state", self.state, self.threads)
                    saved = time.monotonic()
                if number := stop():
                    raise Stopped(number)
                if ended:
                    break
        progress.finished = True
        self._bundle_now().save(self.folder / "last", overwrite=True)
        save_state(self.folder / "state", self.state, self.threads)

    def verdict(self) -> tuple[Bundle, Measured]:
        """Measure the best model on the test part, once; without one, on the part it was chosen by."""
        from vitrail.checkpoints.load import load

        best = load(self.folder / "best")
        source = self.parts.test or self.parts.val or self.parts.train
        measured = measure(self._predict(best.model.to(self.where.device), source), source)
        write_json(self.folder / "verdict.json", measured.as_dict())
        return best, measured

    def _rate(self, step: int) -> float:
        return learning_rate(self.plan.recipe.schedule, step, self.plan.steps, self.plan.rate)

    def _measure(self) -> bool:
        """Measure the val part, keep the model if it is the best, and say whether the run should end early."""
        progress, source = self.state.progress, self.parts.val or self.parts.train
        with self._averaged():
            answers = self._predict(self.state.model, source)
            top1 = float((answers.probabilities.argmax(axis=1) == answers.labels).mean())
            loss = float(log_losses(answers.probabilities, answers.labels).mean())
            score = top1 - 1e-6 * loss  # the loss decides between equals
            if score > progress.best_score:
                progress.best_score, progress.best_step, progress.since_best = score, progress.step, 0
                self._bundle_now().save(self.folder / "best", overwrite=True)
            else:
                progress.since_best += 1
        row = {"step": progress.step, "val_top1": top1, "val_loss": loss, "best": progress.best_step}
        self.journal.write(row)
        self.watcher.measured(row)
        return 0 < self.plan.recipe.patience <= progress.since_best

    def _predict(self, model: nn.Module, source: Source) -> Predictions:
        pictures = self.plan.batch // (self.where.processes.size * self.plan.recipe.micro_batches)
        data = Evaluation(source, self.plan.preprocess, evaluation_batch(pictures), bad_files="skip")
        batches = evaluation_batches(data, workers=self.where.workers, pin=self._on_cuda())
        return predict_all(
            model, batches, self.plan.preprocess, self.where.device, self.where.precision, name=source.name
        )

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if self.state.average is None:
            yield
        else:
            with self.state.average.swapped(self.state.model):
                yield

    def _bundle_now(self) -> Bundle:
        provenance = {**self.bundle.provenance, "trained": {"step": self.state.progress.step, "of": self.plan.steps}}
        return Bundle(self.state.model, self.plan.preprocess, self.bundle.classes, provenance)  # type: ignore[arg-type]

    def _report(self, stepped: Stepped, rate: float, pictures: int, waited: float, took: float) -> None:
        progress = self.state.progress
        row = {
            "step": progress.step,
            "epoch": round(self.training.stream.epoch(progress.step), 4),
            "loss": stepped.loss,
            "accuracy": stepped.correct / pictures,
            "lr": rate,
            "gradient_norm": stepped.gradient_norm,
        }
        self.journal.write(row)
        self.watcher.step({**row, "steps": self.plan.steps, "seconds": took, "waited": waited, "pictures": pictures})

    def _note_bad(self, bad: tuple[Any, ...]) -> None:
        for name, reason in bad:
            if name not in self.bad:
                self.bad.add(name)
                self.watcher.note(f"{name} cannot be read and was left out: {reason}")
        self.state.progress.bad_files = sorted(self.bad)

    def _explained(self, error: Diverged, batch: Any) -> Diverged:
        losses = [row["loss"] for row in Journal.read(self.folder) if "loss" in row][-5:]
        layer = first_not_finite(self.state.model, self.plan.preprocess.normalise(batch.to(self.where.device).pixels))
        recent = ", ".join(f"{loss:.3g}" for loss in losses)
        return Diverged(
            f"{error}; the losses before it were {recent or 'none'}; the first part whose output was not finite: "
            f"{layer}. Try a smaller optimizer.lr, optimizer.clip=1, a longer warm-up, or precision=float32; the last "
            f"saved state is kept in {self.folder / 'state'}"
        )

    def _on_cuda(self) -> bool:
        return self.where.device.type == "cuda"


def _first_bundle(plan: Plan, classes: tuple[str, ...], start: Bundle | None) -> Bundle:
    """Return what training begins with: the model to start from, fitted to the data, or a fresh one."""
    if start is not None:
        head = start if start.classes == classes else adapt(start, classes=classes)
        config = plan.model
        return adapt(head, image_size=config.image_size, patch_size=config.patch_size, channels=config.channels)
    seed_torch(derive_seed(plan.recipe.seed, "weights"))
    return Bundle(ViT(plan.model), plan.preprocess, classes, {"source": "trained from scratch"})


def _say_nothing(_: str) -> None:
    """The main process alone says something."""


def _evenly(steps: int, count: int) -> set[int]:
    """Return the steps after which the val part is measured; the last one is among them."""
    return {max(1, round(steps * (number + 1) / count)) for number in range(count)} | {steps}


def _timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Give each batch with the seconds it was waited for."""
    while True:
        began = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.monotonic() - began


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Give a function that tells which signal has asked for an end, 0 for none; a second one ends at once."""
    received: list[int] = []

    def remember(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    old = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
