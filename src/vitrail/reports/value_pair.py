"""The comparison of two regression runs on the same images."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.points import point_chart
from vitrail.metrics.intervals import Interval, bootstrap_mean
from vitrail.reports.image_views import stored_image
from vitrail.reports.page import WIDTH, Cell, Column, chart, name, paragraph, signed, table
from vitrail.reports.pair import SHOWN, Pair, better_by, image_card, significance
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.test_predictions import ValuePredictions
from vitrail.text import number, plural


@dataclass(frozen=True, eq=False)
class ValuePair(Pair):
    """Two regression models."""

    one: ValuePredictions
    other: ValuePredictions

    @cached_property
    def errors(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The absolute error of each image for A and B; of several columns the mean, in standard deviations."""
        scale = np.ones(1) if len(self.one.columns) == 1 else _spread(self.one.true)
        first, second = ((np.abs(run) / scale).mean(axis=1) for run in self._differences())
        return first, second

    def _differences(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return predicted minus true values (N, K), with the columns of A."""
        order = [self.other.columns.index(column) for column in self.one.columns]
        return self.one.predicted - self.one.true, self.other.predicted[:, order] - self.one.true

    @cached_property
    def difference(self) -> tuple[float, Interval]:
        """The mean absolute error of B minus that of A, and its interval."""
        first, second = self.errors
        return float((second - first).mean()), bootstrap_mean(second - first)

    @property
    def better(self) -> str | None:
        """The run with the lower error, if the interval of the difference leaves no doubt."""
        return better_by(self.difference[1], lower_is_better=True)

    @property
    def statement(self) -> str:
        """The difference of the mean absolute error."""
        apart, interval = self.difference
        scale = float(max(errors.mean() for errors in self.errors))
        low, high = (signed(end, scale) for end in interval)
        unit = "" if len(self.one.columns) == 1 else ", in standard deviations of the true values,"
        return (
            f"On the same {plural(len(self.one.names), 'image')}, the mean absolute error of B minus that of A{unit} "
            f"is {signed(apart, scale)} (95% bootstrap interval {low} to {high}), {significance(self.better)}."
        )

    def summary(self) -> str:
        """Return the difference, a chart of both errors, and of several columns a table."""
        first, second = self.errors
        closer = paragraph(
            f"A is closer to the true value on {plural(int((first < second).sum()), 'image')}, and B on "
            f"{plural(int((second < first).sum()), 'image')}."
        )
        drawn = point_chart(
            first.tolist(), second.tolist(), title="Absolute errors", x_label="absolute error of A",
            y_label="absolute error of B", diagonal=True, guide="equal errors", width=WIDTH, standalone=False,
        )  # fmt: skip
        each = self._columns() if len(self.one.columns) > 1 else ""
        caption = "Below the dotted line, B is closer to the true value."
        return f'<div class="pair"><div>{paragraph(self.statement)}{closer}</div>{chart(drawn, caption)}</div>{each}'

    def _columns(self) -> str:
        before, after = map(np.abs, self._differences())
        rows = []
        for place, column in enumerate(self.one.columns):
            a, b = before[:, place], after[:, place]
            apart, interval, scale = float((b - a).mean()), bootstrap_mean(b - a), float(max(a.mean(), b.mean()))
            kind = {"A": "down", "B": "up", None: ""}[better_by(interval, lower_is_better=True)]
            shown = signed(apart, scale)
            rows.append(
                [
                    Cell(name(column)),
                    Cell(number(float(a.mean())), float(a.mean())),
                    Cell(number(float(b.mean())), float(b.mean())),
                    Cell(f'<span class="{kind}">{shown}</span>' if kind else shown, apart),
                    Cell(f"{signed(interval.low, scale)} to {signed(interval.high, scale)}", interval.low),
                ]
            )
        columns = [
            Column("Column"),
            Column("Mean absolute error, A", number=True),
            Column("Mean absolute error, B", number=True),
            Column("B − A", number=True),
            Column("95% interval", number=True, hint="bootstrap interval of the difference"),
        ]
        return table(columns, rows, caption="Columns on the same images")

    def differing_images(self, artifacts: RunArtifacts) -> str:
        """Return the images for which one run is much closer to the true values than the other."""
        first, second = self.errors
        groups = []
        for title, gain in (("A is much closer", second - first), ("B is much closer", first - second)):
            rows = [row for row in np.argsort(-gain, kind="stable")[:SHOWN].tolist() if gain[row] > 0]
            if rows:
                cards = "".join(self._card(artifacts, row) for row in rows)
                groups.append(f'<h3>{title}</h3><ul class="mistakes many">{cards}</ul>')
        return "".join(groups)

    def _card(self, artifacts: RunArtifacts, row: int) -> str:
        """Return an image, and the predictions for the column in which the runs differ most."""
        true, image_name = self.one.true[row], self.one.names[row]
        ours, theirs = (run[row] for run in self._differences())
        place = int(np.argmax(np.abs(np.abs(theirs) - np.abs(ours)) / _spread(self.one.true)))
        labelled = dict(zip(self.one.columns, true.tolist(), strict=True))
        return image_card(
            stored_image(artifacts, int(self.one.places[row]), image_name, labelled),
            f"<p>{name(self.one.columns[place])}: true <strong>{number(float(true[place]))}</strong>; A predicts "
            f"{number(float(true[place] + ours[place]))}, B {number(float(true[place] + theirs[place]))}</p>",
            image_name,
        )


def _spread(true: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of each column, 1 if it has a single value."""
    deviation = true.std(axis=0)
    return np.where((true == true[0]).all(axis=0) | (deviation == 0), 1.0, deviation)
