"""What a run left for its report: the best model, the test images, and the predictions, also next to another run's."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.sources.given import Data
from vitrail.data.sources.in_memory import recorded_kind
from vitrail.data.sources.opening import open_data, open_unlabelled
from vitrail.data.sources.source import Source
from vitrail.errors import DataError, VitrailError
from vitrail.explanations.explanation import enlarged
from vitrail.explanations.figures.figure import evenly
from vitrail.metrics.intervals import Paired, paired
from vitrail.reports.page import absent, embedded_image, name, path
from vitrail.reports.run_record import BEST, Record
from vitrail.text import as_percent, ended, shorten, shorten_path
from vitrail.training.run_folder import TEST_PREDICTIONS

if TYPE_CHECKING:
    from vitrail.data.inputs import Item

SIDE, LARGE = 208, 480
"""Longer side of small and of large images on the page, in pixels."""
COLUMNS = ["index", "name", "true", "predicted", "confidence", "correct", "digest"]
SHOWN = 6
"""Images to show per run."""


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
        return _pretraining_images(place, run.split)
    splits = open_data(place, record=run.split)
    source: Source = splits.test or splits.val or splits.train
    return source


def _pretraining_images(data: Data, record: dict[str, Any]) -> Source:
    """Return the images that a pretraining run validated on; raise if the data has changed."""
    splits = open_unlabelled(data, seed=record["seed"], val=record["fractions"]["val"])
    if json.loads(json.dumps(splits.record)) != record:
        raise DataError("images were added, removed or renamed since the run")
    return splits.val or splits.train


# ── predictions ──


class RunPredictions(NamedTuple):
    """One row per readable test image, in the order of the data."""

    places: NDArray[np.int64]
    """Indices of the images in the source."""
    names: list[str]
    true: list[str]
    predicted: list[str]
    confidence: NDArray[np.float32]
    correct: NDArray[np.bool_]
    digests: list[str]


class PairedPredictions(NamedTuple):
    """The predictions of two runs for the same images."""

    one: RunPredictions
    other: RunPredictions
    paired: Paired


def paired_predictions(one: Record, other: Record) -> tuple[PairedPredictions | None, str]:
    """Return the predictions of two runs for the same images, or the reason why they cannot be paired."""
    first, why = _read(one)
    second, why_not = _read(other) if first is not None else (None, "")
    if first is None or second is None:
        return None, why or why_not
    if _images(first) != _images(second):
        return None, (
            "The two runs were evaluated on different images, so they cannot be compared image by image. Runs with the "
            "same data and seed have the same test images."
        )
    return PairedPredictions(first, second, paired(first.correct, second.correct)), ""


def unreadable_predictions(run: Record) -> tuple[str, ...]:
    """Return a sentence if a run's prediction file exists but cannot be read."""
    there = (run.folder / TEST_PREDICTIONS).exists() and run.classified is not None
    rows, why = _read(run) if there else (None, "")
    return (why.rstrip("."),) if there and rows is None else ()


def evaluated_on_same_images(one: Record, other: Record) -> bool:
    """Whether two runs were evaluated on the same images, by their digests or else by their recorded names."""
    first, second = _read(one)[0], _read(other)[0]
    if first is not None and second is not None:
        return _images(first) == _images(second)
    there, here = (_recorded_names(run) for run in (one, other))
    return bool(there) and there == here and one.data == other.data


def _recorded_names(run: Record) -> list[str]:
    names = (run.split or {}).get("names", {})
    return list(names.get("test") or names.get("val") or ()) if isinstance(names, dict) else []


def _images(predictions: RunPredictions) -> list[tuple[str, str]]:
    # By content: the same data may be at another path, and other data may have the same file names.
    return list(zip(predictions.digests, predictions.true, strict=True))


def _read(run: Record) -> tuple[RunPredictions | None, str]:
    path = run.folder / TEST_PREDICTIONS
    if run.result is None:
        return None, f"{run.name}: {run.why_no_result}"
    if run.classified is None:
        return None, "Only classifiers are compared image by image."
    if not path.is_file():
        return None, (
            f"{run.name} has no {TEST_PREDICTIONS}, so the runs cannot be compared image by image; pip install "
            "'vitrail[train]' and rerun the same train command to add it."
        )
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return None, (
            f"{TEST_PREDICTIONS} cannot be read without pyarrow, so the runs are not compared image by image; pip "
            "install 'vitrail[train]' adds it."
        )
    try:
        table = pq.read_table(path, columns=COLUMNS)
    except (OSError, pa.ArrowException) as error:
        return None, f"{path} cannot be read: {str(error).splitlines()[0]}"
    columns = table.to_pydict()
    if missing := [name for name in COLUMNS if name not in columns]:
        return None, f"{path} has no column {missing[0]!r}; rerun the same train command to write it again."
    return (
        RunPredictions(
            np.array(columns["index"], np.int64),
            columns["name"],
            columns["true"],
            columns["predicted"],
            np.array(columns["confidence"], np.float32),
            np.array(columns["correct"], np.bool_),
            columns["digest"],
        ),
        "",
    )


# ── disagreements ──


def disagreements(run: Record, both: PairedPredictions) -> str:
    """Return the images on which only one run is correct, by descending confidence of the wrong one."""
    paired = both.paired
    if not paired.only_first + paired.only_second:
        return ""
    artifacts = open_artifacts(run)
    groups = []
    for title, right, wrong in (
        ("Only A is correct", both.one, both.other),
        ("Only B is correct", both.other, both.one),
    ):
        rows = [row for row in range(paired.images) if right.correct[row] and not wrong.correct[row]]
        if rows:
            rows.sort(key=lambda row: -float(wrong.confidence[row]))
            cards = "".join(_card(artifacts, both.one, wrong, row) for row in rows[:SHOWN])
            groups.append(f'<h3>{title}</h3><ul class="mistakes many">{cards}</ul>')
    notes = absent(artifacts.why_no_images) if artifacts.source is None else ""
    return notes + "".join(groups)


def _card(artifacts: RunArtifacts, images: RunPredictions, wrong: RunPredictions, row: int) -> str:
    image_name, true = images.names[row], images.true[row]
    return (
        f"<li>{_image(artifacts, int(images.places[row]), image_name, true)}<p><strong>{name(true)}</strong>; the "
        f"other predicts {name(wrong.predicted[row])}, confidence {as_percent(float(wrong.confidence[row]))}</p>"
        f'<p class="quiet small file" title="{escape(image_name)}">{path(shorten_path(image_name, 40))}</p></li>'
    )


def _image(artifacts: RunArtifacts, index: int, image_name: str, true: str) -> str:
    if artifacts.source is None:
        return ""
    try:
        original = artifacts.original(artifacts.item(index, image_name, true))
    except (VitrailError, OSError):
        return ""
    return "" if original is None else embedded_image(original, shorten(image_name))
