"""`Metrics`: the result of an evaluation. `train` and `evaluate` return it, and a report reads it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import TypeAdapter

from vitrail.data.batches import BadImage
from vitrail.data.sources.selection import CONTENT, SeenInTraining
from vitrail.metrics.intervals import Interval
from vitrail.text import as_percent, percent

HELD_OUT, TRAINING = "held-out images", "training images"
SPLITS = {
    "test": "the test split", "val": "the validation split", "train": "the training split", "all": "all images"
}  # fmt: skip
UNSEEN = SeenInTraining()


class Metric(NamedTuple):
    """One number of a result, as tables, reports and model cards show it."""

    name: str
    value: float | None
    interval: Interval | None = None
    """95% interval."""
    unit: Literal["percent", "number"] = "percent"
    lower_is_better: bool = False
    explanation: str = ""

    @property
    def text(self) -> str:
        """The value as text."""
        return as_percent(self.value) if self.unit == "percent" or self.value is None else f"{self.value:.3f}"

    @property
    def span(self) -> str:
        """The interval as text; empty if there is none."""
        if self.interval is None:
            return ""
        low, high = (percent(end) if self.unit == "percent" else f"{end:.3f}" for end in self.interval)
        return f"{low}–{high}"

    @property
    def interval_text(self) -> str:
        """The interval as part of a sentence; empty if there is none."""
        unit = "%" if self.unit == "percent" else ""
        return f"95% interval {self.span}{unit}" if self.span else ""


class ResultTable(NamedTuple):
    """A table of a result, for people."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: tuple[str, ...] = ()
    """The columns with numbers, which are right-aligned."""
    shown: int | None = None
    """How many rows to show unless all are asked for; None: always all."""
    note: str = ""
    """A sentence below the table."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Metrics(ABC):
    """The metrics of a model on some images. Fractions are between 0 and 1; intervals are 95% intervals."""

    task: ClassVar[str]
    images: int
    kind: str
    """A plural noun for the images: "held-out images"."""
    bad: tuple[BadImage, ...] = ()
    """The images that could not be read."""
    warnings: tuple[str, ...] = ()
    """Reasons not to trust the result, each with the next step."""
    split: str | None = None
    """The split that `evaluate` selected: "test", "val", "train" or "all"."""
    seen: SeenInTraining = UNSEEN
    """How many of these images the model's run trained on, or selected the checkpoint on."""

    @property
    @abstractmethod
    def headline(self) -> Metric:
        """The metric that stands for the result."""

    @property
    @abstractmethod
    def numbers(self) -> list[Metric]:
        """Every metric, the headline first."""

    @property
    @abstractmethod
    def details(self) -> dict[str, Any]:
        """The fields of this task as JSON."""

    @property
    def clauses(self) -> list[str]:
        """What the summary says besides the headline."""
        return []

    @property
    def remarks(self) -> list[str]:
        """Sentences to print below the numbers."""
        return []

    @property
    def tables(self) -> list[ResultTable]:
        """Tables to print below the numbers."""
        return []

    @property
    def on_training(self) -> bool:
        """Whether no images were held out, so that the model was evaluated on its training images."""
        return self.kind == TRAINING

    @property
    def noun(self) -> str:
        """The images, in singular or plural."""
        return self.kind if self.images != 1 else self.kind.removesuffix("s")

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        bad = [f"{len(self.bad):,} more could not be read"] if self.bad else []
        return "; ".join([f"{self._opening}", *self.clauses, *bad, *self._provenance()])

    @property
    def _opening(self) -> str:
        headline = self.headline
        name = "" if headline.unit == "percent" else f"{headline.name} "
        span = f", 95% interval {headline.span}" if headline.span else ""
        return f"{name}{headline.text} on {self.images:,} {self.noun}{span}"

    def _provenance(self) -> list[str]:
        """Say which split was evaluated, and whether the model has seen it."""
        if self.split is None:
            return []
        total = self.images + len(self.bad)
        clauses = [f"evaluated on {SPLITS[self.split]}{self.seen.caveat(total)}"]
        if not (self.seen.selected_on or self.seen.trained_on):
            if self.seen.compared_by == CONTENT:
                clauses.append("by content, its run trained on none of these images")
            elif self.split == "all":
                clauses.append("it is unknown whether the model was trained on them")
        return clauses

    def card(self, *, tested: bool) -> dict[str, str]:
        """Return the rows of a model card: the split with a caveat about it, and the numbers."""
        split = "test" if tested else "train" if self.on_training else "validation"
        caveat = {"train": ", which the model was trained on", "validation": ", which also selected the checkpoint"}
        rows = {"split": f"{split}, {self.images:,} images{caveat.get(split, '')}"}
        for metric in self.numbers:
            rows[metric.name] = f"{metric.text} ({metric.interval_text})" if metric.interval else metric.text
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        return {
            **({} if self.split is None else {"split": self.split, **self.seen._asdict()}),
            "task": self.task,
            "summary": self.summary,
            "images": self.images,
            "kind": self.kind,
            "warnings": list(self.warnings),
            **self.details,
            "bad": [row._asdict() for row in self.bad],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `as_dict` returned; raises ValueError if it is something else, or inconsistent."""
        seen = {name: values[name] for name in SeenInTraining._fields if name in values}
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return TypeAdapter(cls).validate_python({**known, **({"seen": seen} if seen else {})})
