"""The run folder: its name, its lock and its files.

recipe.toml defaults.json split.json stamps.index contents.index check.json samples/ metrics.jsonl log.txt curves.svg
best/ last/ state/ sessions.json result.json; previews/ if it pretrains; and with the extra `train`: tensorboard/
test_predictions.parquet
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.remote.filesystems import is_remote, public_url
from vitrail.data.sources.in_memory import InMemory, recorded_kind
from vitrail.errors import CheckpointError, ConfigError
from vitrail.io import (
    ContentError,
    atomic_write,
    full_disk_hint,
    lock_file,
    open_regular,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    read_toml,
    remove_partial_files,
)
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import write_toml
from vitrail.training.state_files import RESUME
from vitrail.training.teacher import Teacher

T = TypeVar("T")

RECIPE, SPLIT, CHECK, METRICS = "recipe.toml", "split.json", "check.json", "metrics.jsonl"
RESULT, ORIGIN, DEFAULTS = "result.json", "origin.json", "defaults.json"
BUILT_IN = "digits"
MOST_DIFFERENCES = 4
LOCK = ".lock"
"""Present in every run folder from the start."""
SWEEP, OUTCOME = "sweep.json", "outcome.json"
"""Mark the folder of a sweep, and of each of its runs."""
CURVES, EVENTS, TEST_PREDICTIONS = "curves.svg", "tensorboard", "test_predictions.parquet"
PREVIEWS = "previews"
"""Images to look at, of a pretraining run."""


class Origin(NamedTuple):
    """The inputs of a run besides its recipe."""

    data: str
    """Path of the data; for data in memory its kind and fingerprint."""
    pretrained: str
    """Checksum of the pretrained model's weights and config; empty when training from scratch."""
    teacher: str = ""
    """Checksum of the teacher; empty without one."""


def origin_of(data: str | Path | InMemory, pretrained: Bundle | None, teacher: Teacher | None = None) -> Origin:
    """Return the origin of a run."""
    taught_by = "" if teacher is None else teacher.digest
    if is_remote(str(data)):
        place = public_url(str(data))  # the signature of a URL changes, and is secret
    else:
        place = str(data) if isinstance(data, InMemory) or str(data) == BUILT_IN else str(Path(str(data)).resolve())
    if pretrained is None:
        return Origin(place, "", taught_by)
    digest = hashlib.blake2b(pretrained.model.config.resolved().to_json().encode(), digest_size=16)
    for name, tensor in sorted(pretrained.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return Origin(place, digest.hexdigest(), taught_by)


def default_folder(origin: Origin, recipes: Sequence[Recipe]) -> Path:
    """Return the folder of a run or a sweep: the same command finds the same folder, any other command another."""
    given = [origin.data, origin.pretrained, *([origin.teacher] if origin.teacher else [])]
    words = "\n".join([*sorted(recipe.identity().to_json() for recipe in recipes), *given])
    fingerprint = hashlib.blake2b(words.encode(), digest_size=3).hexdigest()
    name = recorded_kind(origin.data) or Path(origin.data).name
    plain = re.sub(r"[^\w.]+", "-", name).strip("-.") or "data"  # a pattern's braces mean something to a shell
    return Path("runs") / f"{plain}-{fingerprint}"


def keep_origin(folder: Path, origin: Origin) -> str | None:
    """Record the origin of a new run; return a note if the data of a resumed one moved.

    A resumed run must use the same pretrained model and the same teacher.
    """
    path = folder / ORIGIN
    if not path.exists():
        write_json(path, origin._asdict())
        return None
    stored = read_in_run(path, read_json)
    if isinstance(stored, dict):
        stored = {"teacher": "", **stored}  # runs from before there were teachers have none
    if not isinstance(stored, dict) or not all(isinstance(stored.get(name), str) for name in Origin._fields):
        raise corrupt(path, "lacks required keys")
    old = Origin(*(stored[name] for name in Origin._fields))
    if old.pretrained != origin.pretrained:
        initial = (
            "from scratch"
            if not old.pretrained
            else "from other weights"
            if origin.pretrained
            else "from a pretrained model"
        )
        raise ConfigError(
            f"{folder} holds a run that was trained {initial}; choose another --run, or use the same initialisation"
        )
    if old.teacher != origin.teacher:
        taught = (
            "without a teacher" if not old.teacher else "with another teacher" if origin.teacher else "with a teacher"
        )
        raise ConfigError(f"{folder} holds a run that was trained {taught}; choose another --run, or use the same one")
    if old.data != origin.data and (recorded_kind(old.data) or recorded_kind(origin.data)):
        raise ConfigError(
            f"{folder} holds a run on other data ({old.data} there and {origin.data} here); choose another folder, "
            "or pass the same images and labels in the same order"
        )
    return (
        None
        if old.data == origin.data
        else f"the data was at {old.data} when the run started, and is at {origin.data} now"
    )


def read_in_run(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file of a run folder; raise a `CheckpointError` with a remedy if it is corrupt."""
    try:
        return read(path)
    except OSError as error:
        raise corrupt(path, f"cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise corrupt(path, str(error)) from None


def corrupt(path: Path, what: str) -> CheckpointError:
    """Return the error for a corrupt file that a run needs to resume."""
    return CheckpointError(f"{path} {what}, so the run cannot be resumed; restore the file, or choose another --run")


def not_written(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that a run needs and cannot write."""
    reason, hint = error.strerror or error, full_disk_hint(error, RESUME)
    return CheckpointError(f"{path} could not be written: {reason}{hint}")


def check_outside_data(folder: Path, origin: Origin) -> None:
    """Raise if the run folder is inside the data, where its subfolders would be read as classes."""
    data = Path(origin.data)
    if data.is_dir() and folder.resolve().is_relative_to(data):
        raise ConfigError(f"the run folder {folder} is inside the data, {data}; choose another --run")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder for this process; raise if another process holds it."""
    with contextlib.ExitStack() as stack:
        _lock(folder, stack)
        yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / LOCK).exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not a run; choose another --run")
        stack.enter_context(lock_file(folder / LOCK))
        for place in (folder, folder / "best", folder / "last", folder / PREVIEWS):
            remove_partial_files(place)
    except BlockingIOError:
        raise ConfigError(f"the run folder {folder} is in use by another process; wait, or choose --run") from None
    except OSError as error:
        hint = full_disk_hint(error, RESUME)
        raise CheckpointError(f"the run folder {folder} cannot be written: {error.strerror or error}{hint}") from None


def keep_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe of a new run; a resumed run must have the same."""
    path, text = folder / RECIPE, write_toml(recipe.identity())
    if not path.exists():
        if (folder / SWEEP).exists():
            raise ConfigError(f"{folder} holds a sweep, not a run; choose one of its subfolders, or another --run")
        write_text(path, text)
        return
    old = read_in_run(path, read_text)
    if old != text:
        differences = _differences(read_in_run(path, read_toml), parse_toml(text))
        raise ConfigError(
            f"{folder} holds a run with another recipe ({differences}); choose another --run, or the same settings"
        )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """List the first few settings in which two recipes differ."""
    there, here = _settings(old), _settings(new)
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    listed = [f"{name} is {there.get(name, 'not set')} there and {here.get(name, 'not set')} here" for name in names]
    return ", ".join(listed[:MOST_DIFFERENCES]) + (
        f" and {len(listed) - MOST_DIFFERENCES} more" if len(listed) > MOST_DIFFERENCES else ""
    )


def _settings(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten a TOML table to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _settings(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return flat


@contextlib.contextmanager
def atomic_run_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file is renamed to `path` when it is complete."""
    try:
        with atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        raise not_written(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with atomic_run_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def preview_file(folder: Path, step: int) -> Path:
    """Return the file of the images shown after a step."""
    return folder / PREVIEWS / f"{step:06d}.png"


class MetricsFile:
    """metrics.jsonl: one row per step or validation. A resumed run drops the rows after its training state."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / METRICS
        rows = [row for row in self.read(folder) if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise not_written(self.path, error) from None

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """Return the rows of a run's metrics file; a line truncated by a crash is skipped."""
        try:
            with open_regular(folder / METRICS) as file:
                lines = file.readall().decode("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{folder / METRICS} cannot be read: {error.strerror or error}") from None
        rows: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(ContentError):
                rows += [row] if _is_row(row := parse_json(line)) else []
        return rows


def best_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the validation row of the best checkpoint, as named by the last validation; None if it is missing."""
    validations = {row["step"]: row for row in rows if {"val_loss", "best"} <= row.keys()}
    return validations.get(validations[max(validations)]["best"]) if validations else None


def _is_row(row: object) -> bool:
    """Whether a parsed line is a row of the metrics file: a step, and numbers that can be plotted."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    # Not float(value), which overflows for huge integers.
    numbers = row.values()
    return all(isinstance(number, float) or (isinstance(number, int) and abs(number) < 2**63) for number in numbers)
