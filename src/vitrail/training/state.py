"""The state of a run: what has to survive a stop, and nothing else. No pickle anywhere.

    state/000120/state.safetensors   weights, their average, the optimiser's numbers
    state/000120/state.json          the step, what was best so far, the checksum of the other file, and its own

A state is written under another name and gets its own when it is whole. The last two are kept; a damaged one is passed
over, and said.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.amp import GradScaler

from vitrail.errors import CheckpointError
from vitrail.io import file_digest, flush, follow_umask, read_json
from vitrail.training.averaging import Average
from vitrail.training.distributed import Ranks

KEPT = 2


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    best_step: int = 0
    best_digest: str = ""
    """Of the config.json of best/, which has the digest of the weights beside it."""
    highest: float = -1.0
    """The highest score on the validation split. best/ may be a later checkpoint that is as good."""
    since_highest: int = 0
    """Validations since that one."""
    bad_files: list[str] | None = None
    finished: bool = False

    def reach(self, score: float) -> bool:
        """Take in the score of a validation; return whether it is the highest, as the first one is."""
        if self.best_step and not score > self.highest:
            self.since_highest += 1
            return False
        self.highest, self.since_highest = score, 0
        return True


class Setting(NamedTuple):
    """What the last bits of the weights depend on, beside the recipe."""

    threads: int
    processes: int
    precision: str


@dataclass
class State:
    """What a step changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    progress: Progress
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", enabled=False))
    """In fp16, keeps small gradients from becoming zero."""


def save_state(folder: Path, state: State, setting: Setting) -> None:
    """Write the state of a run, whole or not at all, and drop all but the newest two."""
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
        then = (
            f"the one of step {int(kept[-1].name):,} is intact"
            if kept
            else "no state was saved before, so none is there"
        )
        raise CheckpointError(f"the state of the run could not be saved in {folder}: {reason}; {then}") from None
    for old in _states(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load_state(folder: Path, state: State, setting: Setting, ranks: Ranks) -> list[str]:
    """Put the newest whole state into `state`, if there is any; return what a person should know of it.

    The main process reads it and the others get it from there, so that only one of them need see the folder.
    """
    notes: list[str] = []
    with ranks.together():
        tensors, content = _newest(folder, setting, notes) if ranks.is_main else (None, None)
    content = ranks.from_main(content)
    if content is not None:
        _restore(folder, state, ranks.tensors_from_main(tensors), content)
    return notes


def _newest(folder: Path, setting: Setting, notes: list[str]) -> tuple[dict[str, Tensor] | None, dict[str, Any] | None]:
    """Read the newest state that is whole, and say what is to be said of it."""
    found: tuple[dict[str, Tensor] | None, dict[str, Any] | None] = (None, None)
    for place in reversed(_states(folder)):
        try:
            tensors, content = _read(place)
        except (OSError, ValueError, SafetensorError) as error:
            # Out of the way, so that it does not count among the two that are kept.
            place.rename(place.with_name(f"damaged-{place.name}"))
            then = "the one before was taken" if _states(folder) else "the run begins again"
            notes.append(f"the state {place.name} is damaged ({error}), so {then}")
            continue
        for name, now in setting._asdict().items():
            if content.get(name, now) != now:
                notes.append(
                    f"the run had {name} {content[name]} before and has {name} {now} now, so the last bits of its "
                    f"weights may differ from those of an uninterrupted run"
                )
        found = tensors, content
        break
    for stray in folder.glob(".*"):
        shutil.rmtree(stray, ignore_errors=True)
    return found


def _read(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read one state; whatever is wrong with it is an `OSError`, a `ValueError` or a `SafetensorError`."""
    content = read_json(place / "state.json")
    if not isinstance(content, dict) or content.pop("digest", None) != content_digest(content):
        raise ValueError("state.json is not as it was written")
    if file_digest(place / "state.safetensors") != content["checksum"]:
        raise ValueError("its checksum is another")
    return load_file(place / "state.safetensors"), content


def content_digest(content: Mapping[str, Any]) -> str:
    """Return a digest of what state.json says."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_at(folder: Path, step: int, *, averaged: bool) -> dict[str, Tensor] | None:
    """Return the weights, or their average, of the state of a step that is still kept and whole; else None."""
    part = "average/" if averaged else "model/"
    try:
        tensors, _ = _read(folder / f"{step:08d}")
    except (OSError, ValueError, SafetensorError):
        return None
    return {name.removeprefix(part): tensor for name, tensor in tensors.items() if name.startswith(part)}


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir() and path.name.isdecimal())


def _named(state: State) -> dict[str, Tensor]:
    """Return the parameters that the optimiser changes, by name."""
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
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    wanted = {name: tensor.shape for name, tensor in state.model.state_dict().items()}
    if wanted != {name: tensor.shape for name, tensor in parts["model"].items()}:
        raise CheckpointError(
            f"what was saved in {folder} is of another model than the recipe makes; delete the folder of that run, or "
            f"name another one with --run"
        )
    state.model.load_state_dict(parts["model"])
    if state.average is not None:
        state.average.load(parts["average"])
    for name, parameter in _named(state).items():
        found = {
            place.removeprefix(f"{name}/"): tensor
            for place, tensor in parts["optimizer"].items()
            if place.startswith(f"{name}/")
        }
        if found:
            state.optimizer.state[parameter] = {key: tensor.to(parameter.device) for key, tensor in found.items()}
    state.scaler.load_state_dict(content.get("scaler", {}))
    missing = [name for name in asdict(state.progress) if name not in content]
    if missing:
        raise CheckpointError(
            f"{folder} was written by another version of Vitrail (it lacks {', '.join(missing)}); resume it with that "
            "version, or start a new run with --run NEW_FOLDER"
        )
    state.progress.__dict__.update({name: content[name] for name in asdict(state.progress)})
