"""The runs of a sweep: one after the other in this process, or several at once, each in its own process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self, cast

import torch

from vitrail import errors
from vitrail.errors import VitrailError
from vitrail.text import first_line
from vitrail.training.console import LOG
from vitrail.training.sessions import Stopped, stop_signal
from vitrail.training.sweep_run import PlannedRun, SweepTraining
from vitrail.training.sweep_worker import RunRequest, SavedModels

INTERVAL = 0.1
"""Seconds between two looks at the running processes."""
SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SOURCE = Path(__file__).parents[2]
"""The folder of the package, for the workers."""


@dataclass
class SweepPool:
    """Completes the runs of a sweep, and counts them. Use it as a context, which ends the processes."""

    training: SweepTraining
    jobs: int
    total: int
    """How many runs the sweep trains."""
    counted: set[Path] = field(default_factory=set)
    _processes: "_Processes | None" = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

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
        if todo and self._processes is None:
            saved = self._stack.enter_context(_saved(self.training))
            self._processes = self._stack.enter_context(_Processes(self.training, self.jobs, saved))
        if self._processes is None:
            return
        for run in self._processes.completed(todo):
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
    outcome, headline = run.outcome, run.recipe.known_task.headline
    if outcome is None or outcome.diverged is not None:
        return "diverged"
    reached = headline.show(outcome.metrics[headline.key])
    return f"validation {headline.name} {reached} after {outcome.seconds / 60:.1f} minutes"


@contextmanager
def _saved(training: SweepTraining) -> Iterator[SavedModels]:
    """Save the pretrained model and the teacher for the workers: they may have been changed since they were opened."""
    teacher = None if training.teacher is None else training.teacher.bundle
    models = {"pretrained": training.pretrained, "teacher": teacher}
    with tempfile.TemporaryDirectory(prefix="vitrail-sweep-") as folder:
        saved = SavedModels()
        for name, bundle in models.items():
            if bundle is not None:
                bundle.announce()
                saved = saved._replace(**{name: bundle.save(Path(folder) / name)})
        yield saved


class _Processes:
    """Runs that are trained at the same time, in processes that share the cores of the machine."""

    def __init__(self, training: SweepTraining, jobs: int, saved: SavedModels) -> None:
        self.training, self.jobs, self.saved = training, jobs, saved
        self.threads = max(1, torch.get_num_threads() // jobs)
        self.workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave no process behind, also if a second Ctrl-C interrupts the wait for the first."""
        for worker in self.workers:
            worker.close()

    def completed(self, runs: Sequence[PlannedRun]) -> Generator[PlannedRun, None, None]:
        """Yield each run when it has finished."""
        queue, failure = list(runs), None
        with stop_signal() as received:
            while self._busy() or (queue and not failure and not received()):
                if not failure and not received():
                    self._start(queue)
                else:
                    self._terminate()
                time.sleep(INTERVAL)
                for worker in self.workers:
                    run = worker.run
                    if run is None or not worker.has_finished():
                        continue
                    error = worker.finish(run)
                    if error is None:
                        yield run
                    elif not received():  # else it was stopped like all others
                        failure = failure or error
            if failure:
                raise failure
            if received():
                raise Stopped(received())

    def _busy(self) -> list["_Worker"]:
        return [worker for worker in self.workers if worker.run is not None]

    def _start(self, queue: list[PlannedRun]) -> None:
        """Give every process a run; start processes while there are fewer than `jobs`."""
        while queue and len(self._busy()) < self.jobs:
            worker = next((one for one in self.workers if one.idle), None)
            if worker is None:
                worker = _Worker(self.threads, self.jobs)
                self.workers.append(worker)
            run = queue.pop(self._suitable(queue, worker.model))
            worker.start(run, RunRequest.of(run, self.training, self.saved, self.threads))
            started = run.title if run.outcome is None else f"the evaluation of {run.title} on the test split"
            self.training.print(f"started {started}; its log is {run.folder / LOG}")

    def _suitable(self, queue: Sequence[PlannedRun], model: str | None) -> int:
        """Return the index of the next run of a process: compiled kernels serve the runs of one model.

        That is a run of the process's last model, or else of a model that no other process has, or else the first.
        """
        if model is None:
            taken = {worker.model for worker in self.workers}
            return next((index for index, run in enumerate(queue) if run.compiled_model not in taken), 0)
        return next((index for index, run in enumerate(queue) if run.compiled_model == model), 0)

    def _terminate(self) -> None:
        """Let every process save its state and end."""
        for worker in self._busy():
            if not worker.terminated:
                worker.process.terminate()
            worker.terminated = True


class _Worker:
    """A process that trains one run after the other."""

    def __init__(self, threads: int, jobs: int) -> None:
        self.run: PlannedRun | None = None
        """What it is training."""
        self.model: str | None = None
        """What it has compiled last."""
        self.terminated = False
        self.reports, self.printed = _Output(), _Output()
        own = {
            "OMP_NUM_THREADS": str(threads),
            "LOCAL_WORLD_SIZE": str(jobs),  # as under torchrun: memory and data-loading processes are shared
            "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path]),
        }
        inherited = {name: value for name, value in os.environ.items() if name not in SET_BY_TORCHRUN}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitrail.training.sweep_worker"],
            stdin=subprocess.PIPE,
            stdout=self.reports.file,
            stderr=self.printed.file,
            env={**inherited, **own},
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops all others in order
        )
        self.requests = cast(IO[bytes], self.process.stdin)

    @property
    def idle(self) -> bool:
        """Whether it waits for a run."""
        return self.run is None and self.process.poll() is None

    def start(self, run: PlannedRun, request: RunRequest) -> None:
        """Train a run; a process that has ended meanwhile is noticed by `has_finished`."""
        self.run, self.model = run, run.compiled_model
        with suppress(BrokenPipeError):
            self.requests.write(json.dumps(request._asdict()).encode() + b"\n")
            self.requests.flush()

    def has_finished(self) -> bool:
        """Whether the run has finished, or the process has ended."""
        return self.process.poll() is not None or self.reports.has_line()

    def finish(self, run: PlannedRun) -> VitrailError | None:
        """Return the error of a run, if any; add what it printed to its log."""
        self.run = None
        printed, report = self.printed.read(), self.reports.read()
        if printed and run.folder.is_dir():
            with suppress(OSError), (run.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(printed)
        return self._error(run, printed, report)

    def _error(self, run: PlannedRun, printed: str, report: str) -> VitrailError | None:
        with suppress(ValueError):
            content = json.loads(report)
            if not content:
                return None
            kind: type[VitrailError] = getattr(errors, content["error"], VitrailError)
            return kind(f"{run.title}: {content['message']}")
        code = self.process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return VitrailError(
                f"the process of {run.title} was killed ({name}); if memory ran out, use a smaller --jobs, and "
                "rerun the same command"
            )
        last = first_line(Exception(printed.strip().rpartition("\n")[2]))
        return VitrailError(
            f"the process of {run.title} failed ({last}); see {run.folder / LOG}, and rerun the same command"
        )

    def close(self) -> None:
        """End the process. An idle one has nothing to lose."""
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self.requests.close()
        self.reports.file.close()
        self.printed.file.close()


class _Output:
    """What a process writes, read bit by bit."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.done = 0

    def has_line(self) -> bool:
        """Whether the process has written a whole line since the last `read`."""
        size = os.fstat(self.file.fileno()).st_size
        return size > self.done and os.pread(self.file.fileno(), 1, size - 1) == b"\n"

    def read(self) -> str:
        """Return what the process has written since the last call."""
        content = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size - self.done, self.done)
        self.done += len(content)
        return content.decode("utf-8", "replace")
