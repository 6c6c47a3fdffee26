"""The comparison of two multi-label runs on the same images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.intervals import Interval, Paired, bootstrap_mean, paired
from vitrail.metrics.multilabel import mean_average_precision
from vitrail.metrics.multilabel_intervals import bootstrap_difference
from vitrail.reports.image_views import stored_image
from vitrail.reports.page import name, paragraph, points, signed
from vitrail.reports.pair import (
    Pair,
    better_by,
    counted_next_to,
    image_card,
    mcnemar_statement,
    only_one_is_right,
    points_apart,
    significance,
)
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.test_predictions import LabelPredictions
from vitrail.text import plural


@dataclass(frozen=True, eq=False)
class LabelPair(Pair):
    """Two multi-label classifiers."""

    one: LabelPredictions
    other: LabelPredictions

    @cached_property
    def exact(self) -> Paired:
        """McNemar's test of the images with all labels right."""
        return paired(self.one.correct, self.other.correct)

    @cached_property
    def difference(self) -> tuple[float, Interval]:
        """The mean average precision of B minus that of A, and its interval."""
        truth, first, second = self._shared()
        apart = mean_average_precision(second, truth) - mean_average_precision(first, truth)
        return apart, bootstrap_difference(first, second, truth)

    def _shared(self) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.float32]]:
        """Return truth and probabilities of the labels that both models have, which include those of all images."""
        shared = [label for label in self.one.labels if label in self.other.labels]
        ours, theirs = ([run.labels.index(label) for label in shared] for run in (self.one, self.other))
        return self.one.true[:, ours], self.one.probabilities[:, ours], self.other.probabilities[:, theirs]

    @property
    def better(self) -> str | None:
        """The run with the higher mean average precision, if the interval of the difference leaves no doubt."""
        return better_by(self.difference[1], lower_is_better=False)

    @property
    def statement(self) -> str:
        """The difference of the mean average precision."""
        apart, (low, high) = self.difference
        return (
            f"On the same {plural(len(self.one.names), 'image')}, the mean average precision of B minus that of A is "
            f"{points(apart)} percentage points (95% bootstrap interval {points(low)} to {points(high)}), "
            f"{significance(self.better)}."
        )

    def summary(self) -> str:
        """Return the differences of mean average precision, exact matches and loss."""
        losses = self.other.loss - self.one.loss
        low, high = bootstrap_mean(losses)
        mean, scale = float(losses.mean()), float(self.one.loss.mean())
        closer = f"It is lower for A on {int((losses > 0).sum()):,} images, and for B on {int((losses < 0).sum()):,}."
        text = (
            paragraph(self.statement)
            + self._exact_matches()
            + paragraph(
                f"The log loss of B minus that of A is {signed(mean, scale)}, 95% bootstrap interval "
                f"{signed(low, scale)} to {signed(high, scale)}. {closer}"
            )
        )
        return counted_next_to(self.exact, text, "right")

    def _exact_matches(self) -> str:
        if self.exact.neither == self.exact.images:
            return paragraph("Neither run has all labels of any image right.")
        statement = paragraph(mcnemar_statement(self.exact, "right about all labels"))
        return statement + points_apart(self.exact, " of exact matches")

    def differing_images(self, artifacts: RunArtifacts) -> str:
        """Return the images for which only one run has all labels right, by descending loss of the other."""

        def card(wrong: LabelPredictions, row: int) -> str:
            true, image_name = self.one.named(self.one.true[row]), self.one.names[row]
            image = stored_image(artifacts, int(self.one.places[row]), image_name, frozenset(true))
            others = _names(wrong.named(wrong.predicted[row]))
            return image_card(image, f"<p><strong>{_names(true)}</strong>; the other predicts {others}</p>", image_name)

        return only_one_is_right(self.one, self.other, lambda wrong: -wrong.loss, card, "has all labels right")


def _names(labels: Sequence[str]) -> str:
    return ", ".join(map(name, labels)) or "no label"
