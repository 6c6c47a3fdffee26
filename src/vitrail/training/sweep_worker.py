"""`python -m vitrail.training.sweep_worker`: one run of a sweep in its own process, with a request as JSON on stdin.

Exit codes: 0, finished or diverged; 2, an error, as JSON on stdout; 128 + signal, stopped, with the state saved.
"""

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


class RunRequest(NamedTuple):
    """What a worker needs to know, as JSON."""

    run: dict[str, Any]
    """A `PlannedRun`."""
    data: str
    pretrained: str | None
    """A folder with the bundle."""
    device: str
    workers: int | None
    threads: int
    launcher: int
    """The process of the sweep; a worker ends with it."""

    @classmethod
    def of(cls, run: PlannedRun, training: SweepTraining, pretrained: Path | None, threads: int) -> Self:
        """Return the request for a run; `pretrained` is where its bundle is saved."""
        return cls(
            {**run._asdict(), "recipe": run.recipe.to_json(), "folder": str(run.folder)},
            str(training.data),
            None if pretrained is None else str(pretrained),
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
        training = SweepTraining(self.data, bundle, self.device, self.workers, quiet=True)
        PlannedRun(**{**self.run, "recipe": recipe, "folder": folder}).complete(training)


def main() -> None:
    """Read a request and train its run."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout is for an error only; anything printed belongs to stderr
    request = RunRequest(**json.load(sys.stdin))
    exit_with_launcher(request.launcher)
    try:
        request.complete()
    except Stopped as stopped:
        sys.exit(128 + stopped.number)
    except VitrailError as error:
        with report:
            json.dump({"error": type(error).__name__, "message": str(error)}, report)
        sys.exit(2)


if __name__ == "__main__":
    main()
