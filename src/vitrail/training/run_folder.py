"""The folder of a run: its name, who may write to it, and what lies in it.

recipe.toml split.json stamps.index contents.index check.json samples/ metrics.jsonl log.txt best/ last/ state/
sessions.json result.json; and with the extra `train`: curves.png tensorboard/ test_predictions.parquet
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import CheckpointError, ConfigError
from vitrail.io import ContentError, atomic_write, open_regular, parse_json, parse_toml, read_json, read_text, read_toml
from vitrail.training.recipe import Recipe, write_toml

T = TypeVar("T")

RECIPE, SPLIT, CHECK, METRICS, LOG = "recipe.toml", "split.json", "check.json", "metrics.jsonl", "log.txt"
RESULT, ORIGIN = "result.json", "origin.json"
BUILT_IN = "digits"
MOST_DIFFERENCES = 4
NUMBERS = frozenset(
    {
        "epoch",
        "loss",
        "accuracy",
        "lr",
        "gradient_norm",
        "val_top1",
        "val_loss",
        "val_balanced_accuracy",
        "val_macro_f1",
        "best",
    }
)
"""What is a number in every row of a journal that has it."""
LOCK = ".lock"
"""Every run folder has it, from its first moment on."""
SWEEP = "sweep.json"
"""What a folder of several runs has instead."""
CURVES, EVENTS, TEST_PREDICTIONS = "curves.png", "tensorboard", "test_predictions.parquet"


class Origin(NamedTuple):
    """What a run is made from, beside its recipe."""

    data: str
    """Where the images are."""
    pretrained: str
    """A checksum of the model it starts from, its weights and its config; nothing for a fresh one."""


def origin_of(data: str | Path, pretrained: Bundle | None) -> Origin:
    """Say what a run is made from."""
    place = str(data) if str(data) == BUILT_IN else str(Path(data).resolve())
    if pretrained is None:
        return Origin(place, "")
    digest = hashlib.blake2b(pretrained.model.config.resolved().to_json().encode(), digest_size=16)
    for name, tensor in sorted(pretrained.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return Origin(place, digest.hexdigest())


def default_folder(origin: Origin, recipes: Sequence[Recipe]) -> Path:
    """Return where a run, or a sweep, lies: the same command finds the same folder, anything else another one."""
    words = "\n".join([*sorted(recipe.to_json() for recipe in recipes), *origin])
    mark = hashlib.blake2b(words.encode(), digest_size=3).hexdigest()
    return Path("runs") / f"{Path(origin.data).name or 'data'}-{mark}"


def keep_origin(folder: Path, origin: Origin) -> str | None:
    """Write down what a new run is made from. An old one must start from the same weights; say if its data moved."""
    path = folder / ORIGIN
    if not path.exists():
        write_json(path, origin._asdict())
        return None
    found = read_in_run(path, read_json)
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in Origin._fields):
        raise damaged(path, "lacks what a run writes there")
    old = Origin(*(found[name] for name in Origin._fields))
    if old.pretrained != origin.pretrained:
        began = (
            "fresh weights" if not old.pretrained else "other weights" if origin.pretrained else "a model that exists"
        )
        raise ConfigError(f"{folder} holds a run that began with {began}; choose another --run, or start from the same")
    return (
        None
        if old.data == origin.data
        else f"the data was in {old.data} when the run began, and is in {origin.data} now"
    )


def read_in_run(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file of a run folder, or say that it is damaged and what to do."""
    try:
        return read(path)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file of a run folder without which the run cannot be resumed."""
    return CheckpointError(f"{path} {what}, so the run cannot be resumed; restore the file, or choose another --run")


def check_apart(folder: Path, origin: Origin) -> None:
    """Refuse a run among the images it is trained on: its own folders would be taken for classes."""
    data = Path(origin.data)
    if data.is_dir() and folder.resolve().is_relative_to(data):
        raise ConfigError(f"the run folder {folder} lies in the data, {data}; choose another --run")


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep a run folder for this process; another process that wants it is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / LOCK).exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is no run; choose another --run")
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise CheckpointError(f"the run folder {folder} cannot be written: {error.strerror or error}") from None
    with lock:
        try:
            # Unlike flock's, this lock is not inherited by workers, which outlive a killed run for some seconds.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"the run folder {folder} is in use by another process; wait, or choose --run") from None
        yield


def keep_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe of a new run; an old run must have the same."""
    path, text = folder / RECIPE, write_toml(recipe)
    if not path.exists():
        if (folder / SWEEP).exists():
            raise ConfigError(f"{folder} holds a sweep, not a run; choose one of the folders in it, or another --run")
        write_text(path, text)
        return
    old = read_in_run(path, read_text)
    if old != text:
        differences = _differences(read_in_run(path, read_toml), parse_toml(text))
        raise ConfigError(
            f"{folder} holds a run with another recipe ({differences}); choose another --run, or the same settings"
        )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say which settings of two recipes differ, the first few of them."""
    there, here = _settings(old), _settings(new)
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    said = [f"{name} is {there.get(name, 'not set')} there and {here.get(name, 'not set')} here" for name in names]
    return ", ".join(said[:MOST_DIFFERENCES]) + (
        f" and {len(said) - MOST_DIFFERENCES} more" if len(said) > MOST_DIFFERENCES else ""
    )


def _settings(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return every value of a TOML table by its dotted name."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _settings(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give another name to write a file under; it gets its own when it is whole."""
    try:
        with atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class MetricsFile:
    """What a run measured, line by line; a run that goes on forgets what came after the state it goes on from."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / METRICS
        rows = [row for row in self.read(folder) if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, row: dict[str, Any]) -> None:
        """Add a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be written: {error.strerror or error}") from None

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """Return the lines of a run's journal; one that was cut short by a crash is left out."""
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
    """Return the validation of the checkpoint that is the best by the last one; None where the journal lacks it."""
    validations = {row["step"]: row for row in rows if {"val_top1", "best"} <= row.keys()}
    return validations.get(validations[max(validations)]["best"]) if validations else None


def _is_row(found: object) -> bool:
    """Tell whether a line is one of the journal's: a step, and numbers that can be drawn."""
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return False
    # Not float(value): an integer of a thousand digits has none.
    numbers = [value for name, value in found.items() if name in NUMBERS or isinstance(value, int)]
    return all(isinstance(number, float) or (isinstance(number, int) and abs(number) < 2**63) for number in numbers)
