"""Read a run folder: its contents, and a sentence for everything that is missing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from vitrail.checkpoints.bundle import CONFIG
from vitrail.errors import CheckpointError, ConfigError
from vitrail.io import ContentError, parse_toml, read_json, read_text
from vitrail.tasks.classification_metrics import ClassificationMetrics
from vitrail.tasks.lookup import CLASSIFICATION, task_named
from vitrail.tasks.metrics import Metrics
from vitrail.tasks.task import Task
from vitrail.training.learner import ShownMetrics
from vitrail.training.pretraining.metrics import PretrainingMetrics, PretrainingShown
from vitrail.training.recipe import METHODS
from vitrail.training.run_folder import (
    CHECK,
    DEFAULTS,
    LOCK,
    METRICS,
    ORIGIN,
    OUTCOME,
    RECIPE,
    RESULT,
    SPLIT,
    SWEEP,
    MetricsFile,
)
from vitrail.training.sessions import SESSIONS, read_sessions

BEST = "best"
PRETRAINING = ("previews", "curves", "use", "settings", "model", "inside", "data", "reproduce")
"""The sections of a pretraining run; those of other runs are its task's."""
T = TypeVar("T")


class Finding(BaseModel):
    """A finding of the data check."""

    text: str
    advice: str = ""
    details: list[str] = []


class Default(BaseModel):
    """A setting that the recipe left unset, from defaults.json."""

    field: str
    value: str
    reason: str


class LabelCount(BaseModel):
    """How many images have a label."""

    name: str
    images: int


class LabelFacts(BaseModel):
    """The labels of all images."""

    labels: int
    per_image: float
    """The mean number of labels of an image."""
    without: int
    """Images that have no label."""
    most: LabelCount
    fewest: LabelCount


class ColumnFacts(BaseModel):
    """The numbers in one column."""

    name: str
    minimum: float
    mean: float
    maximum: float
    missing: int
    """Images without a number."""


class PixelFacts(BaseModel):
    """A class of the pixels in masks."""

    name: str
    images: int
    fraction: float
    """Its fraction of the labelled pixels of all images."""


class TargetFacts(BaseModel):
    """The labels, numbers or masks of the images."""

    images: dict[str, int]
    """Images by split."""
    labels: LabelFacts | None = None
    """None for numbers and masks."""
    columns: list[ColumnFacts] = []
    """Empty for labels and masks."""
    pixels: list[PixelFacts] = []
    """The classes of masks, in the order of their indices."""


class Check(BaseModel):
    """The data check, from check.json."""

    summary: str
    images: int
    checked: int
    not_checked: list[str] = []
    counts: dict[str, dict[str, int]]
    """Images by split and class, label, or class of their pixels; of numbers, by range of the first column."""
    targets: TargetFacts | None = None
    """None if each image has a class."""
    findings: list[Finding]
    formats: dict[str, int]
    modes: dict[str, int]
    short_sides: list[dict[str, int | None]]


@dataclass(frozen=True)
class Record:
    """The contents of a run folder."""

    folder: Path
    recipe: dict[str, Any]
    recipe_text: str
    rows: list[dict[str, Any]]
    """The rows of metrics.jsonl."""
    result: Metrics | None
    why_no_result: str
    check: Check | None
    why_no_check: str
    split: dict[str, Any] | None
    origin: dict[str, Any]
    provenance: dict[str, Any]
    """Provenance of the best model."""
    defaults: tuple[Default, ...] = ()
    """The settings that were chosen for the data."""
    unreadable: tuple[str, ...] = ()
    """A sentence for each file that exists but cannot be read: which, why, and what the report lacks."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.resolve().name

    @property
    def task(self) -> Task:
        """The task of the run."""
        return task_named(str(self.recipe.get("task", CLASSIFICATION.name)))

    @property
    def method(self) -> str | None:
        """The pretraining method; None if the run learned a task."""
        return _method(self.recipe)

    @property
    def purpose(self) -> str:
        """What the model was trained for: a task, or pretraining."""
        return self.task.name if self.method is None else PretrainingMetrics.task

    @property
    def shown(self) -> ShownMetrics:
        """The metrics that the run recorded while it trained."""
        if self.method is None:
            return self.task
        return PretrainingShown(labelled=any("val_knn" in row for row in self.rows))

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections of its report, after the result."""
        return self.task.sections if self.method is None else PRETRAINING

    @property
    def compared_sections(self) -> tuple[str, ...]:
        """The sections of its comparison with another run, after the metrics."""
        return self.task.compared_sections if self.method is None else Task.compared_sections

    @property
    def classified(self) -> ClassificationMetrics | None:
        """The result of a classifier, for the sections that only classifiers have; None if there is none."""
        return self.result if isinstance(self.result, ClassificationMetrics) else None

    @property
    def data(self) -> str:
        """Path of the data."""
        return str(self.origin.get("data", ""))

    @property
    def steps(self) -> tuple[int, int | None]:
        """Steps taken, and steps planned."""
        trained = self.provenance.get("trained")
        planned = trained.get("of") if isinstance(trained, dict) else None
        return max((row["step"] for row in self.rows), default=0), planned

    @property
    def selected_on_test_images(self) -> bool:
        """Whether the evaluated images also selected the best checkpoint, because the run has no test split."""
        if self.method is not None:  # the last checkpoint is kept
            return False
        counts = (self.split or {}).get("counts", {})
        return bool(counts) and not counts.get("test")


def read_run(folder: str | Path) -> Record:
    """Read a run folder; missing files are reported later, but a folder that is not a run raises `ConfigError`."""
    place = Path(folder)
    _check_is_run(place)
    try:
        text = read_text(place / RECIPE)
        recipe = parse_toml(text)
    except ContentError as error:
        raise ConfigError(f"{place / RECIPE} {error}") from None
    except OSError as error:
        raise ConfigError(f"{place / RECIPE} cannot be read: {error.strerror or error}") from None
    faults: list[str] = []
    result, why_no_result = _read(place / RESULT, _reader(recipe), "the result", faults)
    check, why_no_check = _read(place / CHECK, Check.model_validate, "the data check", faults)
    if result is None and not (place / RESULT).exists():
        why_no_result = _why_not_evaluated(place)
    split = _json(place / SPLIT, "the held-out images", faults)
    origin = _json(place / ORIGIN, "the path of the data", faults) or {}
    config = _json(place / BEST / CONFIG, "the provenance of the best model", faults) or {}
    rows, defaults = _rows(place, faults), _defaults(place, faults)
    if (place / SESSIONS).exists() and not read_sessions(place):
        faults.append(f"{place / SESSIONS} cannot be read, so the report lacks time and hardware")
    return Record(
        place, recipe, text, rows, result, why_no_result, check, why_no_check, split, origin, _provenance(config),
        defaults, tuple(faults),
    )  # fmt: skip


def _rows(place: Path, faults: list[str]) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line truncated by a crash is ignored."""
    try:
        rows = MetricsFile.read(place)
        lines = read_text(place / METRICS).split("\n") if (place / METRICS).exists() else []
    except (CheckpointError, ContentError, OSError) as error:
        faults.append(f"{place / METRICS} cannot be read ({error}), so the report lacks curves")
        return []
    lost = sum(bool(line.strip()) for line in lines) - len(rows)
    if lost > 1 or (lost and not rows):
        faults.append(f"{place / METRICS} has {lost:,} unreadable lines, which the curves lack")
    return rows


def _check_is_run(place: Path) -> None:
    if not place.exists():
        raise ConfigError(f"{place} does not exist; pass a run folder")
    if (place / RECIPE).is_file():
        return
    if (place / SWEEP).exists():
        raise ConfigError(f"{place} holds a sweep, not a run; pass one of its subfolders")
    if (place.resolve().parent / RECIPE).is_file() and place.is_dir():
        raise ConfigError(f"{place} is inside a run folder; pass the run folder itself, {place.resolve().parent}")
    if (place / LOCK).exists():
        raise ConfigError(f"{place} holds a run that has not started, so there is nothing to report")
    raise ConfigError(f"{place} is not a run: it has no {RECIPE}; pass a folder written by vitrail train")


def _why_not_evaluated(place: Path) -> str:
    if (place / OUTCOME).exists():
        return "This run of a sweep was not selected, so it was not evaluated on the test split."
    return "The run has not finished, so it has not been evaluated on held-out images yet."


def _reader(recipe: dict[str, Any]) -> Callable[[dict[str, Any]], Metrics]:
    """Return what reads the result of a run with this recipe."""
    if _method(recipe) is not None:
        return PretrainingMetrics.from_dict
    return task_named(str(recipe.get("task", CLASSIFICATION.name))).metrics.from_dict


def _method(recipe: dict[str, Any]) -> str | None:
    """Return the pretraining method of a recipe, if it has the table of one."""
    return next((name for name in METHODS if isinstance(recipe.get(name), dict)), None)


def _defaults(place: Path, faults: list[str]) -> tuple[Default, ...]:
    """Return the settings that were chosen for the data; none if the run did not record them."""
    try:
        return tuple(TypeAdapter(list[Default]).validate_python(read_json(place / DEFAULTS)))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError):  # among them pydantic's and `ContentError`
        faults.append(f"{place / DEFAULTS} cannot be read, so the report lacks the reasons of the settings")
        return ()


def _read(path: Path, parse: Callable[[dict[str, Any]], T], what: str, faults: list[str]) -> tuple[T | None, str]:
    content = _json(path, what, faults)
    if content is None:
        state = "cannot be read" if path.exists() else "is missing"
        return None, f"{path.name} {state}, so this section is left out."
    try:
        return parse(content), ""
    except ValueError:  # among them pydantic's
        fault = "was not written by this version of vitrail"
        faults.append(f"{path} {fault}, so the report lacks {what}")
        return None, f"{path.name} {fault}, so this section is left out."


def _json(path: Path, what: str, faults: list[str]) -> dict[str, Any] | None:
    """Return the content of a JSON file of a run; if it exists but cannot be read, report what is missing."""
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ContentError as error:
        why = str(error)
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    else:
        if isinstance(content, dict):
            return content
        why = "is not a JSON object"
    faults.append(f"{path} {why}, so the report lacks {what}")
    return None


def _provenance(config: dict[str, Any]) -> dict[str, Any]:
    ours = config.get("vitrail", {})
    provenance = ours.get("provenance", {}) if isinstance(ours, dict) else {}
    return provenance if isinstance(provenance, dict) else {}


def settings(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten a recipe to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= settings(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return flat
