"""The training loop: from a job to an evaluated bundle; stopping and resuming leave no trace."""

import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import NamedTuple

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.sources.splits import Splits
from vitrail.tasks.metrics import Metrics
from vitrail.training.auto_batch import within_memory
from vitrail.training.context import Job
from vitrail.training.criterion import save_in_run
from vitrail.training.pipeline import PipelinedStepper
from vitrail.training.run import LAST, RunObserver, TrainingRun, start_run
from vitrail.training.sessions import Stopped, stop_signal
from vitrail.training.step import compiler_errors
from vitrail.training.validation import check_best, evaluate_best, validate


class RunResult(NamedTuple):
    """What a run ends with."""

    best: Bundle
    metrics: Metrics
    bad_files: list[str]
    """Training images that could not be read."""
    waiting_fraction: float | None
    """Fraction of the time spent waiting for data; None if no step was taken, and on all ranks but the main one."""


def train_run(
    job: Job, splits: Splits, pretrained: Bundle | None, folder: Path, observer: RunObserver, *, final: bool
) -> RunResult:
    """Train or resume, and evaluate the best model; `final`: write the result to the run folder."""
    run = start_run(job, splits, pretrained, folder, observer)
    with nullcontext() if run.logger is None else closing(run.logger), closing(run.writer):
        if not run.progress.finished:
            check_best(run)
            with within_memory(job, folder, observer.note), compiler_errors():
                _train_to_the_end(run)
        best, metrics = evaluate_best(run, final=final)
        return RunResult(best, metrics, run.progress.bad_files or [], run.waiting_fraction)


def _train_to_the_end(run: TrainingRun) -> None:
    """Train, and save the last model."""
    if not run.out_of_patience:  # a run may have been interrupted just before early stopping
        with PipelinedStepper(run.job, run.stepper, run.state, run.folder) as stepper:
            take_steps(run, stepper)
    run.progress.finished = True
    with run.state.unsharded():
        constants = run.learner.constants(run)
        if run.ranks.is_main:
            save_in_run(run.bundle_now(constants), run.folder / LAST)
    run.save()
    run.writer.wait()


def take_steps(run: TrainingRun, stepper: PipelinedStepper) -> None:
    """Take the remaining steps: step, log, maybe validate, maybe save."""
    validate_at = _validation_steps(run.plan.steps, run.plan.recipe.evaluations)
    timer = _SaveTimer(run.plan.recipe.save_minutes)
    with stop_signal() as signal, closing(run.batches()) as loader:
        for batch in stepper.timed(loader):
            run.report_bad_files(batch)
            run.log(stepper.step(batch))
            # All ranks must agree, also on the time to save.
            stop, late = run.ranks.all_reduce_max(signal(), timer.is_late())
            validating = run.progress.step in validate_at
            if not (validating or late or stop):
                continue
            run.log(stepper.flush())
            if validating:
                validate(run)
            if validating or stop:
                run.gather_bad_files()
            run.save()
            timer.restart()
            if run.out_of_patience:
                break
            if stop:
                raise Stopped(stop)


def _validation_steps(steps: int, count: int) -> set[int]:
    """Return the steps after which to validate, including the last one."""
    return {max(1, round(steps * (number + 1) / count)) for number in range(count)} | {steps}


class _SaveTimer:
    """Tells when the training state is due to be saved."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.restart()

    def restart(self) -> None:
        self.saved = time.monotonic()

    def is_late(self) -> bool:
        return time.monotonic() - self.saved > 60 * self.minutes
