"""The training state of a run: what resuming needs, and nothing else. No pickle.

    state/000120/state.safetensors   weights, their average, the optimizer state
    state/000120/state.json          step, best checkpoint so far, checksum of the other file, digest of this one

A state is written to a temporary folder and renamed when it is complete. The last two are kept; a corrupt one is
skipped and reported.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.amp import GradScaler

from vitrail.errors import CheckpointError
from vitrail.io import file_digest, flush, follow_umask, full_disk_hint, read_json
from vitrail.training.averaging import Average
from vitrail.training.distributed import Ranks

KEPT = 2
RESUME = "rerun the same command to resume"
"""What to do once a problem of the machine is solved."""


class Score(NamedTuple):
    """How good a checkpoint is; scores are compared by value, then by loss. Higher is better."""

    value: float
    """The criterion; negated if lower is better."""
    loss: float
    """The validation loss, negated."""

    @property
    def known(self) -> bool:
        """Whether the criterion is finite."""
        return math.isfinite(self.value)


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    best_step: int = 0
    best_digest: str = ""
    """Digest of best/config.json, which holds the digest of the weights."""
    highest: tuple[float, float] | None = None
    """The highest `Score` of a validation. best/ may be a later checkpoint that is as good."""
    since_highest: int = 0
    """Validations since the highest score."""
    bad_files: list[str] | None = None
    finished: bool = False

    @property
    def highest_score(self) -> Score | None:
        """The highest score; None if no validation had a finite one, and after best/ was lost."""
        return None if self.highest is None or not self.best_step else Score(*self.highest)

    def reach(self, score: Score) -> bool:
        """Take in the score of a validation; return whether it is the highest, as the first finite one is."""
        highest = self.highest_score
        if not score.known or (highest is not None and not score > highest):
            self.since_highest += 1
            return False
        self.highest, self.since_highest = (score.value, score.loss), 0
        return True


class Setting(NamedTuple):
    """What the exact bits of the weights depend on, besides the recipe."""

    threads: int
    processes: int
    precision: str


@dataclass
class State:
    """Everything that a step changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    progress: Progress
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", enabled=False))
    """Loss scaling for fp16."""

    def averaged(self) -> AbstractContextManager[None]:
        """Swap in the averaged weights, if there are any, inside a `with` block."""
        return nullcontext() if self.average is None else self.average.swapped(self.model)


def save_state(folder: Path, state: State, setting: Setting) -> None:
    """Write the training state atomically, and delete all but the newest two."""
    target = folder / f"{state.progress.step:08d}"
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(state), temporary / "state.safetensors")
        checksum = file_digest(temporary / "state.safetensors")
        content = {**asdict(state.progress), **setting._asdict(), "checksum": checksum}
        if state.scaler.is_enabled():
            content["scaler"] = state.scaler.state_dict()
        content["digest"] = content_digest(content)
        (temporary / "state.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        follow_umask(*temporary.iterdir())
        for file in temporary.iterdir():
            flush(file)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        kept = _states(folder)
        then = f"the one of step {int(kept[-1].name):,} is intact" if kept else "no earlier state was saved"
        hint = full_disk_hint(error, RESUME)
        raise CheckpointError(f"the training state could not be saved in {folder}: {reason}; {then}{hint}") from None
    for old in _states(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load_state(folder: Path, state: State, setting: Setting, ranks: Ranks) -> list[str]:
    """Load the newest intact training state into `state`, if there is one; return messages about it.

    The main process reads it and broadcasts it, so that only one rank needs access to the folder.
    """
    notes: list[str] = []
    with ranks.together():
        tensors, content = _newest(folder, setting, notes) if ranks.is_main else (None, None)
    content = ranks.from_main(content)
    if content is not None:
        _restore(folder, state, ranks.tensors_from_main(tensors), content)
    return notes


def _newest(folder: Path, setting: Setting, notes: list[str]) -> tuple[dict[str, Tensor] | None, dict[str, Any] | None]:
    """Read the newest intact state, and add messages about it to `notes`."""
    newest: tuple[dict[str, Tensor] | None, dict[str, Any] | None] = (None, None)
    for place in reversed(_states(folder)):
        try:
            tensors, content = _read(place)
        except (OSError, ValueError, SafetensorError) as error:
            # Renamed, so that it does not count as one of the two that are kept.
            place.rename(place.with_name(f"corrupt-{place.name}"))
            then = "the previous one is used" if _states(folder) else "training restarts"
            notes.append(f"the training state {place.name} is corrupt ({error}), so {then}")
            continue
        for name, now in setting._asdict().items():
            if content.get(name, now) != now:
                notes.append(
                    f"{name} was {content[name]} before and is {now} now, so the weights may differ in their last bits "
                    f"from those of an uninterrupted run"
                )
        newest = tensors, content
        break
    for stray in folder.glob(".*"):
        shutil.rmtree(stray, ignore_errors=True)
    return newest


def _read(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read one state; a corrupt one raises `OSError`, `ValueError` or `SafetensorError`."""
    content = read_json(place / "state.json")
    if not isinstance(content, dict) or content.pop("digest", None) != content_digest(content):
        raise ValueError("state.json was modified")
    if file_digest(place / "state.safetensors") != content["checksum"]:
        raise ValueError("its checksum does not match")
    return load_file(place / "state.safetensors"), content


def content_digest(content: Mapping[str, Any]) -> str:
    """Return a digest of the content of state.json."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_at(folder: Path, step: int, *, averaged: bool) -> dict[str, Tensor] | None:
    """Return the weights (or their average) of an intact saved state; None if there is none for this step."""
    prefix = "average/" if averaged else "model/"
    try:
        tensors, _ = _read(folder / f"{step:08d}")
    except (OSError, ValueError, SafetensorError):
        return None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir() and path.name.isdecimal())


def _named(state: State) -> dict[str, Tensor]:
    """Return the trainable parameters by name."""
    return {name: p for name, p in state.model.named_parameters() if p.requires_grad}


def _tensors(state: State) -> dict[str, Tensor]:
    tensors = {f"model/{name}": tensor for name, tensor in state.model.state_dict().items()}
    if state.average is not None:
        tensors |= {f"average/{name}": tensor for name, tensor in state.average.state().items()}
    for name, parameter in _named(state).items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _restore(folder: Path, state: State, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    groups: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    expected = {name: tensor.shape for name, tensor in state.model.state_dict().items()}
    if expected != {name: tensor.shape for name, tensor in groups["model"].items()}:
        raise CheckpointError(
            f"the training state in {folder} is of another model than the recipe's; delete that run folder, or choose "
            f"another one with --run"
        )
    state.model.load_state_dict(groups["model"])
    if state.average is not None:
        state.average.load(groups["average"])
    for name, parameter in _named(state).items():
        states = {
            place.removeprefix(f"{name}/"): tensor
            for place, tensor in groups["optimizer"].items()
            if place.startswith(f"{name}/")
        }
        if states:
            state.optimizer.state[parameter] = {key: tensor.to(parameter.device) for key, tensor in states.items()}
    state.scaler.load_state_dict(content.get("scaler", {}))
    missing = [name for name in asdict(state.progress) if name not in content]
    if missing:
        raise CheckpointError(
            f"{folder} was written by another version of Vitrail (it lacks {', '.join(missing)}); resume it with that "
            "version, or start a new run with --run NEW_FOLDER"
        )
    state.progress.__dict__.update({name: content[name] for name in asdict(state.progress)})
