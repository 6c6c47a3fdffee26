"""Two runs on the same images: what every comparison has, and that of two classifiers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.intervals import Interval, Paired, paired
from vitrail.reports.image_views import file, stored_image
from vitrail.reports.page import Cell, Column, absent, name, paragraph, points, table
from vitrail.reports.run_artifacts import RunArtifacts, open_artifacts
from vitrail.reports.run_record import Record
from vitrail.reports.test_predictions import ClassPredictions
from vitrail.text import as_percent, plural

SIGNIFICANCE = 0.05
"""A difference with a p-value below this is called significant."""
SHOWN = 6
"""Images to show per run."""
TITLE = "On the same images"


class Pair(ABC):
    """The predictions of two runs, A and B, for the same images."""

    @property
    @abstractmethod
    def better(self) -> str | None:
        """The better run; None without a clear difference."""

    @property
    @abstractmethod
    def statement(self) -> str:
        """How they differ, in a sentence or two."""

    @abstractmethod
    def summary(self) -> str:
        """Return the comparison as HTML, without images."""

    @abstractmethod
    def differing_images(self, artifacts: RunArtifacts) -> str:
        """Return the images on which the runs differ most, as HTML."""

    @property
    def winner(self) -> str:
        """Which run is better, for a headline."""
        return "No clear difference" if self.better is None else f"{self.better} is better"

    def body(self, run: Record) -> str:
        """Return the comparison as HTML; `run` has the images."""
        artifacts = open_artifacts(run)
        images = self.differing_images(artifacts)
        notes = absent(artifacts.why_no_images) if images and artifacts.source is None else ""
        return self.summary() + notes + images


# ── shared ──


def better_by(interval: Interval, *, lower_is_better: bool) -> str | None:
    """Return the better run by the interval of B minus A; None if it includes 0."""
    if interval.low <= 0 <= interval.high or np.isnan(interval.low):
        return None
    return "B" if (interval.high < 0) == lower_is_better else "A"


def significance(better: str | None) -> str:
    """Return the end of a sentence about a difference."""
    return "so the difference is not significant" if better is None else "so the difference is significant"


def only_one_is_right(
    one: Any, other: Any, order: Callable[[Any], NDArray[Any]], card: Callable[[Any, int], str], right: str
) -> str:
    """Return the images on which only one run is right, in an order by the other one."""
    groups = []
    for title, winner, loser in ((f"Only A {right}", one, other), (f"Only B {right}", other, one)):
        rows = np.flatnonzero(winner.correct & ~loser.correct)
        if len(rows):
            first = rows[np.argsort(order(loser)[rows], kind="stable")][:SHOWN].tolist()
            cards = "".join(card(loser, row) for row in first)
            groups.append(f'<h3>{title}</h3><ul class="mistakes many">{cards}</ul>')
    return "".join(groups)


def image_card(image: str, text: str, image_name: str) -> str:
    """Return an image with a text below it."""
    return f"<li>{image}{text}{file(image_name, 40)}</li>"


# ── classification ──


@dataclass(frozen=True, eq=False)
class ClassPair(Pair):
    """Two classifiers."""

    one: ClassPredictions
    other: ClassPredictions

    @cached_property
    def paired(self) -> Paired:
        """McNemar's test."""
        return paired(self.one.correct, self.other.correct)

    @property
    def better(self) -> str | None:
        """The run with the higher accuracy, if that is significant."""
        return better_of(self.paired)

    @property
    def statement(self) -> str:
        """McNemar's test."""
        return mcnemar_statement(self.paired)

    def summary(self) -> str:
        """Return the test, the difference of the accuracies and the counts."""
        return counted_next_to(self.paired, paragraph(self.statement) + points_apart(self.paired))

    def differing_images(self, artifacts: RunArtifacts) -> str:
        """Return the images on which only one run is correct, by descending confidence of the wrong one."""

        def card(wrong: ClassPredictions, row: int) -> str:
            image_name, true = self.one.names[row], self.one.true[row]
            return image_card(
                stored_image(artifacts, int(self.one.places[row]), image_name, true),
                f"<p><strong>{name(true)}</strong>; the other predicts {name(wrong.predicted[row])}, confidence "
                f"{as_percent(float(wrong.confidence[row]))}</p>",
                image_name,
            )

        return only_one_is_right(self.one, self.other, lambda wrong: -wrong.confidence, card, "is correct")


def better_of(result: Paired) -> str | None:
    """Return the run that is right more often; None if that is not significant."""
    if result.chance >= SIGNIFICANCE:
        return None
    return "B" if result.difference > 0 else "A"


def mcnemar_statement(result: Paired, right: str = "correct") -> str:
    """Summarise McNemar's test on the same images; `right` is what it counts."""
    only_one = f"only A is {right} on {result.only_first:,} and only B on {result.only_second:,}"
    if not result.only_first + result.only_second:
        return f"On the same {plural(result.images, 'image')} both runs are {right} on exactly the same ones."
    p_value = "p < 0.001" if result.chance < 0.001 else f"p = {result.chance:.2g}"
    so = "so the difference is significant" if result.chance < SIGNIFICANCE else "so the difference is not significant"
    return f"On the same {plural(result.images, 'image')}, {only_one} (exact McNemar test, {p_value}), {so}."


def points_apart(result: Paired, what: str = "") -> str:
    """Return the difference of two fractions of images."""
    low, high = result.interval
    return paragraph(
        f"B − A is {points(result.difference)} percentage points{what}, 95% interval {points(low)} to {points(high)}."
    )


def counted_next_to(result: Paired, summary: str, right: str = "correct") -> str:
    """Return a summary next to the counts of images on which both, one or none of the runs is right."""
    columns = [Column(""), Column(f"B {right}", number=True), Column("B wrong", number=True)]
    rows = [
        [Cell(f"A {right}"), Cell(f"{result.both:,}"), Cell(f"{result.only_first:,}")],
        [Cell("A wrong"), Cell(f"{result.only_second:,}"), Cell(f"{result.neither:,}")],
    ]
    counted = table(columns, rows, caption=TITLE, sortable=False)
    return f'<div class="pair"><div>{summary}</div><div>{counted}</div></div>'
