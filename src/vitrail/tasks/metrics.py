"""`Metrics`: the result of an evaluation. `train` and `evaluate` return it, and a report reads it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import TypeAdapter

from vitrail.data.batches import BadImage
from vitrail.data.sources.selection import CONTENT, SeenInTraining
from vitrail.metrics.intervals import Interval
from vitrail.text import as_percent, capitalised, ended, number

HELD_OUT, TRAINING = "held-out images", "training images"
SPLITS = {
    "test": "the test split", "val": "the validation split", "train": "the training split", "all": "all images"
}  # fmt: skip
UNSEEN = SeenInTraining()


Unit = Literal["percent", "number"]


class MetricSpec(NamedTuple):
    """What a metric is: its name and unit, which direction is better, and where its axis ends."""

    name: str
    unit: Unit = "percent"
    lower_is_better: bool = False
    key: str = ""
    """Its key in metrics.jsonl, if a run records it."""
    ends: tuple[float | None, float | None] | None = None
    """The ends of an axis; None: from the values. Without ends, a percentage is drawn from 0 to 1."""
    explanation: str = ""

    @property
    def axis(self) -> tuple[float | None, float | None]:
        """The ends of an axis; None: from the values."""
        return self.ends or ((0.0, 1.0) if self.unit == "percent" else (None, None))

    def show(self, value: float | None) -> str:
        """Return a value as text."""
        return as_percent(value) if self.unit == "percent" or value is None else number(value)


class Metric(NamedTuple):
    """One number of a result, as tables, reports and model cards show it."""

    spec: MetricSpec
    value: float | None
    interval: Interval | None = None
    """95% interval."""

    @property
    def name(self) -> str:
        """The name."""
        return self.spec.name

    @property
    def text(self) -> str:
        """The value as text."""
        return self.spec.show(self.value)

    @property
    def ends(self) -> tuple[str, str] | None:
        """The ends of the interval as text; None if there is none."""
        return None if self.interval is None else (self.spec.show(self.interval[0]), self.spec.show(self.interval[1]))

    @property
    def span(self) -> str:
        """The interval as text, without a percent sign; empty if there is none."""
        return "–".join(end.removesuffix("%") for end in self.ends or ())

    @property
    def interval_text(self) -> str:
        """The interval as part of a sentence; empty if there is none."""
        unit = "%" if self.spec.unit == "percent" else ""
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
    names_headline: ClassVar[bool] = True
    """Whether the summary begins with the name of the headline."""
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
    def lead(self) -> list[str]:
        """The same in sentences, for a report."""
        return [ended(capitalised(clause)) for clause in self.clauses]

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
        name = f"{headline.name} " if self.names_headline else ""
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
