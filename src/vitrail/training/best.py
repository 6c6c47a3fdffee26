"""best/ of a run: whether it still is what the state says, and what becomes of one that is not."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from torch import nn

from vitrail.checkpoints.bundle import CONFIG, Bundle, check_weights, is_bundle
from vitrail.checkpoints.files import read_json
from vitrail.checkpoints.load import load
from vitrail.checkpoints.writing import atomic_folder
from vitrail.data.sources.contents import carry_contents
from vitrail.errors import CheckpointError
from vitrail.io import file_digest
from vitrail.training.distributed import Ranks
from vitrail.training.state import Progress, State, weights_at

BEST, ASIDE, STATES = "best", "damaged-best", "state"
Found = Literal["whole", "recovered", "lost"]


@dataclass(frozen=True, eq=False)
class Best:
    """Keeps the best model of a run. Only the main process sees the folder; what is found there, all are told."""

    run: Path
    state: State
    ranks: Ranks
    note: Callable[[str], None]
    bundle_of: Callable[[nn.Module, int], Bundle]
    """Makes a bundle of a model and its step."""

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.run / BEST

    def save(self, bundle: Bundle) -> None:
        """Write the best model, and into the state what tells whether it has stayed the same."""
        save_in_run(bundle, self.folder)
        self.state.progress.best_digest = file_digest(self.folder / CONFIG)

    def write_card(self, bundle: Bundle) -> None:
        """Write the model's card again; one that cannot be written is no reason to fail."""
        with suppress(OSError):
            bundle.write_card(self.folder)

    def load(self) -> Bundle:
        """Return the best model, in every process."""
        with self.ranks.together():
            best = (
                load(self.folder) if self.ranks.is_main else self.bundle_of(self.state.model, self.state.progress.step)
            )
        weights = self.ranks.tensors_from_main(best.model.state_dict() if self.ranks.is_main else None)
        provenance = self.ranks.from_main(best.provenance)
        if not self.ranks.is_main:
            best.model.load_state_dict(weights)
            best = Bundle(best.model.eval(), best.preprocess, best.classes, provenance)
        return best

    def check(self) -> Found:
        """Tell whether best/ is the model that the state calls the best; where it is not, say so.

        Its weights are those of a state that is still there: it is written again. Else they are lost, and whoever asks
        has to find another best model.
        """
        progress = self.state.progress
        if not progress.best_step:
            return "whole"
        with self.ranks.together():
            said = self._recovered() if self.ranks.is_main else None
        found, what = self.ranks.from_main(said) or ("whole", "")
        if what:
            self.note(what)
        if found == "lost":
            progress.best_step = 0  # so that the next model measured is the best one, whatever it reaches
        return found

    def _recovered(self) -> tuple[Found, str] | None:
        """Return None where best/ is as it should be; else what has become of it, and what is to be said."""
        progress = self.state.progress
        fault = best_fault(self.folder, progress)
        if fault is None:
            return None
        aside = put_aside(self.folder)
        said = fault if aside is None else f"{fault}, so it was put aside as {aside.name}/"
        averaged = self.state.average is not None
        weights = weights_at(self.run / STATES, progress.best_step, averaged=averaged)
        if weights is None:
            return "lost", (
                f"{said}; the best weights, those of step {progress.best_step:,}, are lost, and the "
                f"{'averaged ' if averaged else ''}weights of step {progress.step:,} take their place"
            )
        model = copy.deepcopy(self.state.model).cpu()
        model.load_state_dict(weights)
        self.save(self.bundle_of(model, progress.best_step))
        return "recovered", (f"{said}; the state still had the weights of step {progress.best_step:,}: nothing is lost")


def save_in_run(bundle: Bundle, folder: Path) -> None:
    """Write a bundle into the run folder it lies in, with the digests of the images that the run trains on."""
    with atomic_folder(folder, overwrite=True) as temporary:
        bundle.write(temporary)
        carry_contents(folder.parent, temporary)


def best_fault(place: Path, progress: Progress) -> str | None:
    """Say what is wrong with best/, None where it is what the state has written down."""
    if not place.is_dir():
        return f"{place} is missing"
    try:
        config = read_json(place / CONFIG)
        if not is_bundle(config):
            return f"{place / CONFIG} is not that of a bundle"
        check_weights(place, config["vitrail"])
        known = file_digest(place / CONFIG) == progress.best_digest
    except (OSError, CheckpointError) as error:
        return f"{place} cannot be used ({error})"
    if known or _is_of_later(config["vitrail"], progress):
        return None
    return f"{place} is not what the run wrote there: {CONFIG} has changed"


def _is_of_later(ours: dict[str, object], progress: Progress) -> bool:
    """Tell whether a run was killed after it wrote best/ and before its state: resumed, it writes the same again."""
    provenance = ours.get("provenance")
    trained = provenance.get("trained") if isinstance(provenance, dict) else None
    step = trained.get("step") if isinstance(trained, dict) else None
    return not progress.finished and isinstance(step, int) and step > progress.step


def put_aside(place: Path) -> Path | None:
    """Keep what cannot be used under another name, because somebody may have changed it on purpose; None: not there."""
    if not (place.exists() or place.is_symlink()):
        return None
    names = (place.with_name(ASIDE if number == 1 else f"{ASIDE}-{number}") for number in count(1))
    aside = next(name for name in names if not (name.exists() or name.is_symlink()))
    try:
        return place.rename(aside)
    except OSError as error:
        raise CheckpointError(f"{place} could not be put aside: {error.strerror or error}") from None
