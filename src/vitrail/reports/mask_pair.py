"""The comparison of two segmentation runs on the same images."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.points import MOST_DOTS, point_chart
from vitrail.checkpoints.load import load
from vitrail.data.sources.masks import renumbering
from vitrail.errors import VitrailError
from vitrail.metrics.intervals import Interval, bootstrap_mean
from vitrail.metrics.segmentation import bootstrap_mean_iou_difference, mean_iou
from vitrail.reports.image_views import file, image_notes
from vitrail.reports.mask_views import MaskReader, image_tile, legend, masked_tile
from vitrail.reports.page import WIDTH, chart, paragraph, points
from vitrail.reports.pair import Pair, better_by, significance
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.run_record import BEST
from vitrail.reports.test_predictions import MaskPredictions
from vitrail.text import as_percent, plural, shorten, shorten_path

SHOWN = 3
"""Images to show per run."""


@dataclass(frozen=True, eq=False)
class MaskPair(Pair):
    """Two segmentation models."""

    one: MaskPredictions
    other: MaskPredictions
    folder: Path
    """The run folder of B."""

    @cached_property
    def difference(self) -> tuple[float, Interval]:
        """The mean IoU of B minus that of A, over the pixels of all images, and its interval."""
        apart = mean_iou(self.other.counts) - mean_iou(self.one.counts)
        return apart, bootstrap_mean_iou_difference(self.one.counts, self.other.counts)

    @cached_property
    def each(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """The rows of the images with labelled pixels, and their mean IoU for A and B."""
        labelled = np.flatnonzero(~np.isnan(self.one.mean_iou + self.other.mean_iou))
        return labelled, self.one.mean_iou[labelled], self.other.mean_iou[labelled]

    @property
    def better(self) -> str | None:
        """The run with the higher mean IoU, if the interval of the difference leaves no doubt."""
        return better_by(self.difference[1], lower_is_better=False)

    @property
    def statement(self) -> str:
        """The difference of the mean IoU."""
        apart, (low, high) = self.difference
        return (
            f"On the same {plural(len(self.one.names), 'image')}, the mean IoU of B minus that of A is {points(apart)} "
            f"percentage points (95% bootstrap interval {points(low)} to {points(high)}), {significance(self.better)}."
        )

    def summary(self) -> str:
        """Return the difference over all pixels and per image, with a chart."""
        rows, first, second = self.each
        texts = [self.statement]
        if len(first):
            low, high = bootstrap_mean(second - first)
            texts += [
                "This is the mean IoU over the pixels of all images together. Computed for each image and then "
                f"averaged, B − A is {points(float((second - first).mean()))} percentage points, 95% bootstrap "
                f"interval {points(low)} to {points(high)}.",
                f"A has the higher mean IoU on {plural(int((first > second).sum()), 'image')}, and B on "
                f"{plural(int((second > first).sum()), 'image')}.",
            ]
        if (self.one.counts[:, 2].sum(axis=1) != self.other.counts[:, 2].sum(axis=1)).any():
            texts.append(
                "The models' inputs have different sizes, and each mask is compared at the size of the model's input: "
                "a smaller one has coarser masks."
            )
        notes = [
            f"{shorten_path(self.one.names[row], 40)}: A {as_percent(a)}, B {as_percent(b)}"
            for row, a, b in zip(rows.tolist(), first.tolist(), second.tolist(), strict=True)
        ] if len(rows) <= MOST_DOTS else []  # fmt: skip
        drawn = point_chart(
            (100 * first).tolist(), (100 * second).tolist(), title="Mean IoU of each image",
            x_label="mean IoU of A in %", y_label="mean IoU of B in %", diagonal=True, guide="equal", notes=notes,
            width=WIDTH, standalone=False,
        )  # fmt: skip
        caption = "Above the dotted line, B has the higher mean IoU."
        return f'<div class="pair"><div>{"".join(map(paragraph, texts))}</div>{chart(drawn, caption)}</div>'

    def differing_images(self, artifacts: RunArtifacts) -> str:
        """Return the images for which the mean IoU of the runs differs most, with the masks of both."""
        readers, why = self._readers(artifacts)
        rows, first, second = self.each
        missing, colours = set(why), set[int]()
        groups = []
        for title, gain in (("A has the higher IoU", first - second), ("B has the higher IoU", second - first)):
            chosen = [place for place in np.argsort(-gain, kind="stable")[:SHOWN].tolist() if gain[place] > 0]
            cards = "".join(self._card(readers, int(rows[place]), missing, colours) for place in chosen)
            groups.append(f'<h3>{title}</h3><ul class="mistakes">{cards}</ul>' if chosen else "")
        notes = image_notes(artifacts, missing, "images") if artifacts.source is not None else ""
        colour = legend(readers[0].classes, colours) if readers and colours else ""
        return notes + colour + "".join(groups)

    def _readers(self, artifacts: RunArtifacts) -> tuple[tuple[MaskReader, ...], list[str]]:
        """Return what predicts the masks of A and B; A's images are used for both, whose indices may differ."""
        if artifacts.bundle is None:
            return (), []
        first = MaskReader(artifacts, artifacts.bundle)
        try:
            bundle = load(self.folder / BEST)
        except (VitrailError, OSError) as error:
            return (first,), [f"the model of B cannot be opened: {error}"]
        return (first, MaskReader(artifacts, bundle)), []

    def _card(self, readers: tuple[MaskReader, ...], row: int, missing: set[str], colours: set[int]) -> str:
        index, image_name = int(self.one.places[row]), self.one.names[row]
        text = (
            f"<p>Mean IoU of A <strong>{as_percent(float(self.one.mean_iou[row]))}</strong>, of B "
            f"<strong>{as_percent(float(self.other.mean_iou[row]))}</strong></p>"
        )
        drawn = ""
        try:
            drawn = self._tiles(readers, index, image_name, colours)
        except (VitrailError, OSError) as error:
            missing.add(str(error))
        return f"<li>{drawn}{text}{file(image_name)}</li>"

    def _tiles(self, readers: tuple[MaskReader, ...], index: int, image_name: str, colours: set[int]) -> str:
        """Return the image, its true mask, and those that A and B predict."""
        if not readers:
            return ""
        names, label = readers[0].classes, shorten(image_name)
        read = readers[0].read(index, image_name)
        shown = [(read.pixels, read.true, "True mask"), (read.pixels, read.predicted, "A")]
        if len(readers) > 1:
            pixels, predicted = readers[1].predict(index, image_name)
            shown.append((pixels, renumbering(tuple(readers[1].classes), tuple(names))[predicted], "B"))
        colours.update(*(np.unique(mask).tolist() for _, mask, _ in shown))
        masked = [masked_tile(pixels, mask, len(names), title, label) for pixels, mask, title in shown]
        return f'<div class="two">{"".join([image_tile(read.pixels, label), *masked])}</div>'
