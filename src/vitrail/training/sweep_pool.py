"""The runs of a sweep: one after the other in this process, or several at once, each in its own process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from vitrail import errors
from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import VitrailError
from vitrail.tasks.lookup import task_named
from vitrail.text import first_line
from vitrail.training.console import LOG
from vitrail.training.sessions import Stopped, stop_signal
from vitrail.training.sweep_run import PlannedRun, SweepTraining
from vitrail.training.sweep_worker import RunRequest

INTERVAL = 0.1
"""Seconds between two looks at the running processes."""
SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SOURCE = Path(__file__).parents[2]
"""The folder of the package, for the workers."""


@dataclass
class SweepPool:
    """Completes the runs of a sweep, and counts them."""

    training: SweepTraining
    jobs: int
    total: int
    """How many runs the sweep trains."""
    counted: set[Path] = field(default_factory=set)

    def complete(self, runs: Sequence[PlannedRun], on_done: Callable[[], object]) -> None:
        """Complete all runs, and call `on_done` after each. A signal raises `Stopped` when all states are saved."""
        if self.jobs == 1:
            for run in runs:
                self._print(run, " is already finished" if run.finished else "")
                if not run.finished:
                    run.complete(self.training)
                    on_done()
            return
        todo = []
        for run in runs:
            if run.finished:
                self._print(run, " is already finished")
            else:
                todo.append(run)
        if not todo:
            return
        with (
            _saved(self.training.pretrained) as pretrained,
            closing(_Processes(self.training, self.jobs, pretrained).completed(todo)) as completed,
        ):
            for run in completed:
                self._print(run, f": {_outcome(run)}")
                on_done()

    def _print(self, run: PlannedRun, text: str) -> None:
        """Print a line about a run: numbered when it is trained, and without a number when it is tested later."""
        trained_before = run.folder in self.counted
        self.counted.add(run.folder)
        if not trained_before:
            self.training.print(f"{len(self.counted)} of {self.total}: {run.title}{text}")
        elif not run.finished:
            self.training.print(f"{run.title}: evaluation on the test split")


def _outcome(run: PlannedRun) -> str:
    """Return the outcome of a finished run as text."""
    outcome, headline = run.outcome, task_named(run.recipe.task).headline
    if outcome is None or outcome.diverged is not None:
        return "diverged"
    reached = headline.show(outcome.metrics[headline.key])
    return f"validation {headline.name} {reached} after {outcome.seconds / 60:.1f} minutes"


@contextmanager
def _saved(bundle: Bundle | None) -> Iterator[Path | None]:
    """Save the pretrained model for the workers: it may have been changed since it was opened."""
    if bundle is None:
        yield None
        return
    bundle.announce()
    with tempfile.TemporaryDirectory(prefix="vitrail-sweep-") as folder:
        yield bundle.save(Path(folder) / "pretrained")


class _Processes:
    """Runs that are trained at the same time; they share the cores of the machine."""

    def __init__(self, training: SweepTraining, jobs: int, pretrained: Path | None) -> None:
        self.training, self.jobs, self.pretrained = training, jobs, pretrained
        self.threads = max(1, torch.get_num_threads() // jobs)
        self.running: list[_Worker] = []

    def completed(self, runs: Sequence[PlannedRun]) -> Generator[PlannedRun, None, None]:
        """Yield each run when it has finished."""
        queue, failure = deque(runs), None
        with stop_signal() as received, self._killing_at_the_end():
            while self.running or (queue and not failure and not received()):
                while queue and len(self.running) < self.jobs and not failure and not received():
                    self._start(queue.popleft())
                if failure or received():
                    self._terminate()
                time.sleep(INTERVAL)
                for worker in [one for one in self.running if one.process.poll() is not None]:
                    self.running.remove(worker)
                    error = worker.error()
                    if error is None and worker.process.returncode == 0:
                        yield worker.run
                    elif not received():  # else it was stopped like all others
                        failure = failure or error
            if failure:
                raise failure
            if received():
                raise Stopped(received())

    def _start(self, run: PlannedRun) -> None:
        self.running.append(_Worker(run, RunRequest.of(run, self.training, self.pretrained, self.threads), self.jobs))
        started = run.title if run.outcome is None else f"the evaluation of {run.title} on the test split"
        self.training.print(f"started {started}; its log is {run.folder / LOG}")

    def _terminate(self) -> None:
        """Let every process save its state and end."""
        for worker in self.running:
            if not worker.terminated:
                worker.process.terminate()
            worker.terminated = True

    @contextmanager
    def _killing_at_the_end(self) -> Iterator[None]:
        """Leave no process behind, also if a second Ctrl-C interrupts the wait for the first."""
        try:
            yield
        finally:
            for worker in self.running:
                worker.process.kill()
                worker.process.wait()
                worker.close()


class _Worker:
    """A process that trains one run."""

    def __init__(self, run: PlannedRun, request: RunRequest, jobs: int) -> None:
        self.run, self.terminated = run, False
        self.stdin, self.stdout, self.stderr = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        self.stdin.write(json.dumps(request._asdict()).encode())
        self.stdin.seek(0)
        own = {
            "OMP_NUM_THREADS": str(request.threads),
            "LOCAL_WORLD_SIZE": str(jobs),  # as under torchrun: memory and data-loading processes are shared
            "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path]),
        }
        inherited = {name: value for name, value in os.environ.items() if name not in SET_BY_TORCHRUN}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitrail.training.sweep_worker"],
            stdin=self.stdin,
            stdout=self.stdout,
            stderr=self.stderr,
            env={**inherited, **own},
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops all others in order
        )

    def close(self) -> None:
        """Close the files; the process has ended."""
        for file in (self.stdin, self.stdout, self.stderr):
            file.close()

    def error(self) -> VitrailError | None:
        """Return the error of a process that has ended, and add what it printed to the log of its run."""
        printed, reported = _content(self.stderr), _content(self.stdout)
        self.close()
        if printed and self.run.folder.is_dir():
            with suppress(OSError), (self.run.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(printed)
        code = self.process.returncode
        if code == 0:
            return None
        with suppress(ValueError):
            report = json.loads(reported)
            kind: type[VitrailError] = getattr(errors, report["error"], VitrailError)
            return kind(f"{self.run.title}: {report['message']}")
        if code < 0:
            name = signal.Signals(-code).name
            return VitrailError(
                f"the process of {self.run.title} was killed ({name}); if memory ran out, use a smaller --jobs, and "
                "rerun the same command"
            )
        last = first_line(Exception(printed.strip().rpartition("\n")[2]))
        return VitrailError(
            f"the process of {self.run.title} failed ({last}); see {self.run.folder / LOG}, and rerun the same command"
        )


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
