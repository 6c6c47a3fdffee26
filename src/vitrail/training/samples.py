"""A few small training images of each class, saved in the run folder for the report and the explorer.

They are not part of the bundle, so that a model can be shared without images of its data.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.decode import LazyImage, open_image
from vitrail.data.mask_images import mask_png
from vitrail.data.sources.masks import has_masks, mask_at
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import output_names_of
from vitrail.errors import CheckpointError, DataError, VitrailError
from vitrail.io import read_json
from vitrail.training.run_folder import write_json

SAMPLES, INDEX = "samples", "samples.json"
SIDE = 192
"""Longer side of a sample, in pixels."""
MOST, PER_CLASS = 96, 4
"""Maximum number of samples in total, and per class."""
MOST_BYTES = 1_000_000
"""Maximum total size of a run's samples."""
TRIES = 3
"""How many images to try if some cannot be read."""


class Sample(NamedTuple):
    """The class of a sample and its file."""

    label: str
    file: Path
    mask: Path | None = None
    """The mask of the same size, if images have masks: a PNG file whose pixel values are the model's classes."""


class _Content(NamedTuple):
    """The files of a sample."""

    image: bytes
    mask: bytes | None


def keep_samples(folder: Path, source: Source) -> list[Sample]:
    """Write a few images of each class into a run folder, unless they exist already.

    Unreadable images are skipped. Samples are optional: if they cannot be written, the result is empty.
    """
    place = folder / SAMPLES
    if (place / INDEX).exists():
        return read_samples(folder)
    rows: list[dict[str, str]] = []
    try:
        place.mkdir(exist_ok=True)
        total = 0
        for number, label, content in _chosen(source):
            total += len(content.image) + len(content.mask or b"")
            if total > MOST_BYTES:
                break
            name = f"{len(rows) + 1:03d}-class-{number}"
            files = {"file": f"{name}.jpg"} | ({} if content.mask is None else {"mask": f"{name}-mask.png"})
            (place / files["file"]).write_bytes(content.image)
            if content.mask is not None:
                (place / files["mask"]).write_bytes(content.mask)
            rows.append({"label": label, **files})
        write_json(place / INDEX, rows)
    except (OSError, CheckpointError):
        return []
    return read_samples(folder)


def read_samples(folder: Path) -> list[Sample]:
    """Return the samples of a run; empty if there are none, or if their index is corrupt."""
    place = folder / SAMPLES
    try:
        rows = read_json(place / INDEX)
        samples = [
            Sample(
                str(row["label"]),
                place / Path(str(row["file"])).name,
                place / Path(str(row["mask"])).name if "mask" in row else None,
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [sample for sample in samples[:MOST] if sample.file.is_file() and not sample.file.is_symlink()]


def samples_of_bundle(bundle: str | Path) -> list[Sample]:
    """Return the samples of a bundle's run, such as those of runs/pets for runs/pets/best."""
    return read_samples(Path(bundle).resolve().parent)


def _chosen(source: Source) -> list[tuple[int, str, _Content]]:
    """Choose classes and images of each class evenly; the first image of every class comes first."""
    labels = np.asarray(source.labels)
    classes = _evenly(len(source.classes), MOST)
    each = max(1, min(PER_CLASS, MOST // max(1, len(classes))))
    chosen: list[list[tuple[int, str, _Content]]] = [[] for _ in range(each)]
    for number in classes:
        content = _readable(source, np.flatnonzero(labels == number).tolist(), each)
        for turn, one in enumerate(content):
            chosen[turn].append((number, source.classes[number], one))
    return [row for turn in chosen for row in turn]


def _readable(source: Source, places: Sequence[int], count: int) -> list[_Content]:
    """Return `count` images, spread evenly over the class; an unreadable one is replaced by the next."""
    readable: list[_Content] = []
    for start in _evenly(len(places), count):
        tried = (_small(source, place) for place in places[start : start + TRIES])
        content = next((one for one in tried if one is not None), None)
        if content is not None:
            readable.append(content)
    return readable


def _small(source: Source, index: int) -> _Content | None:
    """Return an image as a small, upright JPEG, with its mask if it has one; None if it cannot be read."""
    try:
        opened = open_image(source.read(index))
        scale = SIDE / max(opened.width, opened.height)
        image = Image.fromarray(np.ascontiguousarray(opened.pixels(3, scale=min(1.0, scale))))
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        mask = _small_mask(source, index, opened, image.size) if has_masks(source) else None
    except (VitrailError, OSError, ValueError):
        return None
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85, optimize=True)
    return _Content(file.getvalue(), mask)


def _small_mask(source: Source, index: int, opened: LazyImage, size: tuple[int, int]) -> bytes:
    """Return the mask of an image in another size (width, height)."""
    mask = mask_at(source, index)
    if mask.shape != (opened.height, opened.width):
        raise DataError(f"the mask of {source.name(index)} has another size")
    small = Image.fromarray(mask).resize(size, Image.Resampling.NEAREST)
    return mask_png(np.asarray(small), len(output_names_of(source)))


def _evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, spread evenly."""
    return list(range(count)) if count <= most else [(2 * place + 1) * count // (2 * most) for place in range(most)]
