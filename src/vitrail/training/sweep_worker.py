"""`python -m vitrail.training.sweep_worker`: the runs of a sweep, one after the other, in a process of their own.

Reads a request per line from stdin, as JSON, and writes a line to stdout when it is done: an empty object, or the
error. Importing torch, starting CUDA and loading the compiler take longer than a short run, so a process is used
again.

Exit codes: 0, no more requests; 128 + signal, stopped, with the state of the run saved.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from vitrail.checkpoints.load import load
from vitrail.errors import VitrailError
from vitrail.runtime import exit_with_launcher
from vitrail.training.recipe import Recipe
from vitrail.training.sessions import Stopped
from vitrail.training.sweep_run import PlannedRun, SweepTraining
from vitrail.training.teacher import Teacher


class SavedModels(NamedTuple):
    """Folders with the models of a sweep."""

    pretrained: Path | None = None
    teacher: Path | None = None


class RunRequest(NamedTuple):
    """What a worker needs to know about a run, as JSON."""

    run: dict[str, Any]
    """A `PlannedRun`."""
    data: str
    pretrained: str | None
    """A folder with the bundle."""
    teacher: str | None
    """A folder with its bundle."""
    teacher_name: str
    device: str
    workers: int | None
    threads: int
    launcher: int
    """The process of the sweep; a worker ends with it."""

    @classmethod
    def of(cls, run: PlannedRun, training: SweepTraining, saved: SavedModels, threads: int) -> Self:
        """Return the request for a run; `saved` is where its pretrained model and its teacher are."""
        return cls(
            {**run._asdict(), "recipe": run.recipe.to_json(), "folder": str(run.folder)},
            str(training.data),
            None if saved.pretrained is None else str(saved.pretrained),
            None if saved.teacher is None else str(saved.teacher),
            "" if training.teacher is None else training.teacher.name,
            training.device,
            training.workers,
            threads,
            os.getpid(),
        )

    def complete(self) -> None:
        """Train the run; its messages go to its log only."""
        torch.set_num_threads(self.threads)
        recipe, folder = Recipe.from_json(self.run["recipe"]), Path(self.run["folder"])
        bundle = None if self.pretrained is None else load(self.pretrained)
        teacher = None if self.teacher is None else Teacher(load(self.teacher), self.teacher_name)
        training = SweepTraining(self.data, bundle, self.device, self.workers, quiet=True, teacher=teacher)
        PlannedRun(**{**self.run, "recipe": recipe, "folder": folder}).complete(training)


def main() -> None:
    """Train the run of each request."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout is for reports only; anything printed belongs to stderr
    watched = False
    for line in sys.stdin:
        request, report = RunRequest(**json.loads(line)), {}
        if not watched:
            exit_with_launcher(request.launcher)
            watched = True
        try:
            request.complete()
        except Stopped as stopped:
            sys.exit(128 + stopped.number)
        except VitrailError as error:
            report = {"error": type(error).__name__, "message": str(error)}
        gc.collect()
        torch.cuda.empty_cache()  # other processes may need the memory before this one does
        sys.stdout.flush()
        print(json.dumps(report), file=reports, flush=True)


if __name__ == "__main__":
    main()
