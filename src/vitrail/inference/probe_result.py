"""The result of a probe: one row per protocol and setting."""

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, get_args

from vitrail.data.batches import BadImage
from vitrail.metrics.intervals import Interval, wilson_interval

Method = Literal["fewshot", "knn", "linear"]
METHODS: tuple[Method, ...] = get_args(Method)


class ProbeRow(NamedTuple):
    """One protocol with one setting."""

    method: Method
    setting: float
    """The shots, k, or the selected decay."""
    accuracies: tuple[float, ...]
    """One per seed; a single one if nothing is drawn."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class ProbeResult:
    """The accuracy of frozen features, from 0 to 1."""

    rows: tuple[ProbeRow, ...]
    images: int
    """Number of images evaluated on."""
    split: str
    examples: int
    """Number of training images to draw from."""
    classes: tuple[str, ...]
    split_origin: str
    """Origin of the splits: "recorded" (the model's own run), "given" (the data), or "stratified" (drawn here)."""
    notes: tuple[str, ...]
    """What was skipped, and why."""
    bad: tuple[BadImage, ...]

    def interval(self, row: ProbeRow) -> Interval | None:
        """Return the 95% interval of an accuracy without random draws; None where the spread says more."""
        if row.spread is not None or row.method == "fewshot":
            return None
        return wilson_interval(round(row.mean * self.images), self.images)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        names = {"fewshot": "shots", "knn": "k", "linear": "decay"}
        rows = [
            {
                "method": row.method,
                names[row.method]: row.setting,
                "accuracy": row.mean,
                "spread": row.spread,
                "accuracies": list(row.accuracies),
                "interval": None if (interval := self.interval(row)) is None else list(interval),
            }
            for row in self.rows
        ]
        return {
            "probes": rows,
            "split": self.split,
            "images": self.images,
            "examples": self.examples,
            "classes": list(self.classes),
            "split_origin": self.split_origin,
            "notes": list(self.notes),
            "bad": [image._asdict() for image in self.bad],
        }
