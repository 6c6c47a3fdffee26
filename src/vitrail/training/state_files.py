"""The training states of a run on disk. No pickle.

    state/00000120/state.safetensors     weights, their average, the optimizer state; of a sharded run one file per rank
    state/00000120/state.json            step, best checkpoint so far, digests of the other files and of this one

A state is written to a temporary folder and renamed when it is complete. The last two are kept; a corrupt one is
skipped and reported. Where the CPU is idle while the device computes, a state is written in the background.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.io import file_digest, flush, follow_umask, full_disk_hint, read_json
from vitrail.training.distributed import Ranks
from vitrail.training.sharding import ShardGroup
from vitrail.training.state import Setting, State
from vitrail.training.state_shards import (
    NOT_SHARED,
    appears,
    cpu_copies,
    load_slices,
    load_whole,
    prepare_folder,
    save_slices,
)

KEPT = 2
WHOLE = "state.safetensors"
RESUME = "rerun the same command to resume"
"""What to do once a problem of the machine is solved."""


class StateWriter:
    """Writes the training states of a run; all ranks call its methods, and the main one completes each state.

    On a GPU, and if the model is sharded, `save` only copies the state; the rest happens in the background, until the
    next `save` or `wait`.
    """

    def __init__(self, folder: Path, setting: Setting, ranks: Ranks, shards: ShardGroup | None) -> None:
        self.folder, self.setting, self.ranks, self.shards = folder, setting, ranks, shards
        self._thread = ThreadPoolExecutor(1, "state")
        self._writing: Future[None] | None = None

    def save(self, state: State) -> None:
        """Save the training state."""
        self.wait()
        if self.shards is not None:
            tensors, content = cpu_copies(state.tensors(), self.shards), _content(state, self.setting)
            self._writing = self._thread.submit(self._save_slices, self.shards, tensors, content)
        elif self.ranks.is_main and self.ranks.device.type == "cuda":
            # Copies, because the next steps change what is on the CPU already, such as step counts.
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.tensors().items()}
            content = _content(state, self.setting)
            self._writing = self._thread.submit(_save_whole, self.folder, tensors, content)
        elif self.ranks.is_main:
            save_state(self.folder, state, self.setting)

    def wait(self) -> None:
        """Wait until the last state is complete; raise if it could not be saved."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the last state, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _save_slices(self, shards: ShardGroup, tensors: Mapping[str, Tensor], content: dict[str, Any]) -> None:
        temporary = self.folder / f".{content['step']:08d}.partial"
        try:
            prepare_folder(temporary, shards, is_main=self.ranks.is_main)
            save_slices(temporary, tensors, shards)
        except OSError as error:
            raise _not_saved(self.folder, error) from None
        if self.ranks.is_main:
            _complete(self.folder, temporary, content)


def save_state(folder: Path, state: State, setting: Setting) -> None:
    """Write the training state of an unsharded model, and delete all but the newest two."""
    _save_whole(folder, {name: tensor.detach() for name, tensor in state.tensors().items()}, _content(state, setting))


def _content(state: State, setting: Setting) -> dict[str, Any]:
    """Return what state.json holds, except for the digests."""
    content = {**asdict(state.progress), **setting._asdict()}
    return content | ({"scaler": state.scaler.state_dict()} if state.scaler.is_enabled() else {})


def _save_whole(folder: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    temporary = folder / f".{content['step']:08d}.{os.getpid()}"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary / WHOLE)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _not_saved(folder, error) from None
    _complete(folder, temporary, content)


def _complete(folder: Path, temporary: Path, content: dict[str, Any]) -> None:
    """Add the digests to a state whose tensors are written, rename it, and delete all but the newest two."""
    target = folder / f"{content['step']:08d}"
    try:
        content["files"] = {path.name: file_digest(path) for path in sorted(temporary.iterdir())}
        content["digest"] = content_digest(content)
        (temporary / "state.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        follow_umask(*temporary.iterdir())
        for file in temporary.iterdir():
            flush(file)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        flush(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _not_saved(folder, error) from None
    for old in _states(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _not_saved(folder: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or error
    kept = _states(folder)
    then = f"the one of step {int(kept[-1].name):,} is intact" if kept else "no earlier state was saved"
    hint = full_disk_hint(error, RESUME)
    return CheckpointError(f"the training state could not be saved in {folder}: {reason}; {then}{hint}")


def load_state(
    folder: Path, state: State, setting: Setting, ranks: Ranks, shards: ShardGroup | None = None
) -> list[str]:
    """Load the newest intact training state into `state`, if there is one; return messages about it.

    It may have been saved by any number of ranks, sharded or not. If `state` is sharded, every rank reads its slices;
    otherwise the main process reads everything and broadcasts it, so that only one rank needs access to the folder.
    """
    notes: list[str] = []
    with ranks.together():
        newest = _newest(folder, setting, notes) if ranks.is_main else None
    content = ranks.from_main(None if newest is None else newest[1])
    if content is None:
        return notes
    place = folder / f"{content['step']:08d}"
    if shards is not None:
        check_shared(place, ranks)
    if shards is None:
        with ranks.together():
            tensors = _tensors_in(place, content) if newest is not None else None
        state.restore(ranks.tensors_from_main(tensors), str(folder))
    else:
        state.restore(load_slices(place, state, shards), str(folder))
    _restore_progress(folder, state, content)
    return notes


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raise on all ranks if one of them does not see a folder of the main process: sharded states need that."""
    with ranks.together():
        if not appears(folder):
            raise CheckpointError(f"sharded training needs {folder} on every rank, but {NOT_SHARED}")


def _newest(folder: Path, setting: Setting, notes: list[str]) -> tuple[Path, dict[str, Any]] | None:
    """Find the newest intact state, and add messages about it to `notes`."""
    newest: tuple[Path, dict[str, Any]] | None = None
    for place in reversed(_states(folder)):
        try:
            content = _verified(place)
        except (OSError, ValueError) as error:
            # Renamed, so that it does not count as one of the two that are kept.
            aside = place.with_name(f"corrupt-{place.name}")
            shutil.rmtree(aside, ignore_errors=True)  # the same step of an earlier session, corrupt as well
            place.rename(aside)
            then = "the previous one is used" if _states(folder) else "training restarts"
            notes.append(f"the training state {place.name} is corrupt ({error}), so {then}")
            continue
        for name, now in setting._asdict().items():
            if content.get(name, now) != now:
                what = (
                    "the pixels differ slightly" if name == "decoder" else "the weights may differ in their last bits"
                )
                notes.append(
                    f"{name} was {content[name]} before and is {now} now, so {what} from those of an uninterrupted run"
                )
        newest = place, content
        break
    for stray in folder.glob(".*"):
        shutil.rmtree(stray, ignore_errors=True)
    return newest


def _verified(place: Path) -> dict[str, Any]:
    """Return the content of state.json; a state that is corrupt raises `OSError` or `ValueError`."""
    content = read_json(place / "state.json")
    if not isinstance(content, dict) or content.pop("digest", None) != content_digest(content):
        raise ValueError("state.json was modified")
    if any(file_digest(place / name) != digest for name, digest in content["files"].items()):
        raise ValueError("its checksum does not match")
    return content


def _tensors_in(place: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a state, whole."""
    return load_file(place / WHOLE) if WHOLE in content["files"] else load_whole(place)


def content_digest(content: Mapping[str, Any]) -> str:
    """Return a digest of the content of state.json."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_at(folder: Path, step: int, *, averaged: bool) -> dict[str, Tensor] | None:
    """Return the weights (or their average) of an intact saved state; None if there is none for this step."""
    prefix, place = "average/" if averaged else "model/", folder / f"{step:08d}"
    try:
        tensors = _tensors_in(place, _verified(place))
    except (OSError, ValueError, SafetensorError):
        return None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir() and path.name.isdecimal())


def _restore_progress(folder: Path, state: State, content: Mapping[str, Any]) -> None:
    state.scaler.load_state_dict(content.get("scaler", {}))
    missing = [name for name in asdict(state.progress) if name not in content]
    if missing:
        raise CheckpointError(
            f"{folder} was written by another version of Vitrail (it lacks {', '.join(missing)}); resume it with that "
            "version, or start a new run with --run NEW_FOLDER"
        )
    state.progress.__dict__.update({name: content[name] for name in asdict(state.progress)})
