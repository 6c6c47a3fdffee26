"""The best model and the test images of a run; if either cannot be opened, the reason why."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.source import Source
from vitrail.errors import DataError, VitrailError
from vitrail.explanations.figures.grid_of_grids import evenly
from vitrail.explanations.overlay import enlarged
from vitrail.reports.formatting import ended
from vitrail.reports.run_record import BEST, Record

if TYPE_CHECKING:
    from vitrail.data.inputs import Item

SIDE, LARGE = 208, 480
"""Longer side of small and of large images on the page, in pixels."""


@dataclass(frozen=True, eq=False)
class RunArtifacts:
    """The best model of a run and the images it was evaluated on."""

    run: Record
    bundle: Bundle | None
    why_no_bundle: str
    source: Source | None
    why_no_images: str

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Return a sentence if the best model cannot be opened, unless it was already reported."""
        place = self.run.folder / BEST
        reported = any(text.startswith(f"{place}/") for text in self.run.unreadable)
        if self.bundle is not None or reported or not (place.exists() or self.run.result is not None):
            return ()
        return (f"{self.why_no_bundle.rstrip('.')}, so the report lacks the model and its attention maps",)

    @cached_property
    def class_indices(self) -> dict[str, int]:
        """The index of each class by its name."""
        return {} if self.source is None else {name: index for index, name in enumerate(self.source.classes)}

    def item(self, index: int, name: str, true: str) -> "Item":
        """Return one of the images; raise `DataError` if the data has changed."""
        from vitrail.data.inputs import Item

        if self.source is None:
            raise DataError(self.why_no_images)
        # The run may have been started with another path to the same data, so compare file names only.
        same = index < len(self.source) and os.path.basename(self.source.name(index)) == os.path.basename(name)
        if not same or self.source.labels[index] != self.class_indices.get(true):
            raise DataError("the data has changed since the run, and another image has taken its place")
        return Item(b"", content=self.source.read(index))

    def original(self, item: "Item") -> Image.Image | None:
        """Return an image as stored, upright and reduced for the page; None if it cannot be shown as RGB."""
        from vitrail.data.decode import open_image

        try:
            opened = open_image(item.read())
            scale = min(1.0, LARGE / max(opened.width, opened.height))
            image = Image.fromarray(np.ascontiguousarray(opened.pixels(3, scale=scale)))
        except (VitrailError, OSError, ValueError):  # such as 13 channels
            return None
        image.thumbnail((LARGE, LARGE), Image.Resampling.LANCZOS)
        return image if max(image.size) >= SIDE else enlarged(image, LARGE)

    def some(self, count: int) -> list["Item"]:
        """Return `count` images, spread evenly over the source; unreadable ones are skipped."""
        from vitrail.data.inputs import Item

        if self.source is None or not len(self.source):
            return []
        items = []
        for index in evenly(len(self.source), count):
            try:
                items.append(Item(os.fsencode(self.source.name(index)), content=self.source.read(index)))
            except (VitrailError, OSError):
                continue
        return items


def open_artifacts(run: Record) -> RunArtifacts:
    """Open the best model and the held-out images of a run, as far as they are available."""
    bundle, why_no_bundle = None, ""
    try:
        bundle = load(run.folder / BEST)
    except (VitrailError, OSError) as error:
        why_no_bundle = ended(f"The best model cannot be opened: {error}")
    source, why_no_images = None, ""
    try:
        source = _held_out(run)
    except (VitrailError, OSError, KeyError, TypeError) as error:
        why_no_images = ended(f"The images cannot be shown because the data of the run cannot be opened: {error}")
    return RunArtifacts(run, bundle, why_no_bundle, source, why_no_images)


def _held_out(run: Record) -> Source:
    if not run.data or run.split is None:
        raise DataError("the run does not record its path")
    splits = open_data(run.data, record=run.split)
    source: Source = splits.test or splits.val or splits.train
    return source
