"""What a run left for its report: the best model, the test images, and the predictions for them."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.sources.given import Data
from vitrail.data.sources.in_memory import recorded_kind
from vitrail.data.sources.opening import open_data, open_unlabelled
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import Labelling, Targets, targets_of
from vitrail.errors import DataError, VitrailError
from vitrail.explanations.explanation import enlarged
from vitrail.explanations.figures.figure import evenly
from vitrail.reports.run_record import BEST, Record
from vitrail.reports.test_predictions import StoredPredictions, read_predictions
from vitrail.text import ended
from vitrail.training.run_folder import TEST_PREDICTIONS

if TYPE_CHECKING:
    from vitrail.data.inputs import Item

SIDE, LARGE = 208, 480
"""Longer side of small and of large images on the page, in pixels."""
SHOW_PREDICTIONS = {"labels", "label_mistakes", "predictions"}
"""The sections that read the predictions of single images."""
Truth = str | frozenset[str] | Mapping[str, float] | None
"""What an image is labelled with: a class, labels, or the numbers of columns; None for a mask."""


# ── model and images ──


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
        """Return a sentence if the best model, or the predictions if they are shown, cannot be opened."""
        path = self.run.folder / TEST_PREDICTIONS
        shown = SHOW_PREDICTIONS & set(self.run.sections) and self.run.result is not None and path.exists()
        missing = (self.predictions[1].rstrip("."),) if shown and self.predictions[0] is None else ()
        return (*self._unreadable_model, *missing)

    @property
    def _unreadable_model(self) -> tuple[str, ...]:
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

    @cached_property
    def targets(self) -> Targets | None:
        """The labels or numbers of the images; None if each has a class."""
        return None if self.source is None else targets_of(self.source)

    @cached_property
    def predictions(self) -> tuple[StoredPredictions | None, str]:
        """The predictions for the images, or the reason why they are missing."""
        return read_predictions(self.run)

    def item(self, index: int, name: str, true: Truth) -> "Item":
        """Return one of the images; raise `DataError` if the data has changed."""
        from vitrail.data.inputs import Item

        if self.source is None:
            raise DataError(self.why_no_images)
        # The run may have been started with another path to the same data, so compare file names only.
        same = index < len(self.source) and os.path.basename(self.source.name(index)) == os.path.basename(name)
        if not same or not self._is_labelled(index, true):
            raise DataError("the data has changed since the run, and another image has taken its place")
        return Item(b"", content=self.source.read(index))

    def _is_labelled(self, index: int, true: Truth) -> bool:
        """Whether an image still has the label that it had in the run."""
        if isinstance(true, str):
            place = self.class_indices.get(true)
            return self.source is not None and self.targets is None and self.source.labels[index] == place
        if self.targets is None or true is None:
            return self.targets is not None and self.targets.kind == "masks"
        row = dict(zip(self.targets.names, self.targets.values[index].tolist(), strict=True))
        if isinstance(true, frozenset):
            return self.targets.kind == "labels" and {label for label, has in row.items() if has} == true
        return self.targets.kind == "values" and all(
            math.isclose(row.get(column, math.nan), value, rel_tol=1e-6) for column, value in true.items()
        )

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


def open_artifacts(run: Record, data: Data | None = None) -> RunArtifacts:
    """Open the best model and the held-out images of a run, as far as they are available.

    `data` are the images of a run on data in memory.
    """
    bundle, why_no_bundle = None, ""
    try:
        bundle = load(run.folder / BEST)
    except (VitrailError, OSError) as error:
        why_no_bundle = ended(f"The best model cannot be opened: {error}")
    source, why_no_images = None, ""
    try:
        source = _held_out(run, data)
    except (VitrailError, OSError, KeyError, TypeError) as error:
        why_no_images = ended(f"The images cannot be shown because the data of the run cannot be opened: {error}")
    return RunArtifacts(run, bundle, why_no_bundle, source, why_no_images)


def _held_out(run: Record, data: Data | None) -> Source:
    if not run.data or run.split is None:
        raise DataError("the run does not record its path")
    if data is None and recorded_kind(run.data):
        raise DataError("it was in memory; write the report with vitrail.report(run, data=...)")
    place: Data = run.data if data is None else data
    if run.method is not None:
        return _pretraining_images(place, run.split, Labelling(columns=_label_columns(run)))
    splits = open_data(place, record=run.split, labelling=Labelling(run.task.kind, _label_columns(run)))
    source: Source = splits.test or splits.val or splits.train
    return source


def _label_columns(run: Record) -> tuple[str, ...]:
    """Return the columns that the recipe names for the labels."""
    return tuple(map(str, run.recipe.get("data", {}).get("labels", ())))


def _pretraining_images(data: Data, record: dict[str, Any], labelling: Labelling) -> Source:
    """Return the images that a pretraining run validated on; raise if the data has changed."""
    splits = open_unlabelled(data, seed=record["seed"], val=record["fractions"]["val"], labelling=labelling)
    if json.loads(json.dumps(splits.record)) != record:
        raise DataError("images were added, removed or renamed since the run")
    return splits.val or splits.train
