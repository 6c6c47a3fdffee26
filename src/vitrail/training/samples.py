"""A few small training images of each class, saved in the run folder for the report and the explorer.

They are not part of the bundle, so that a model can be shared without images of its data.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.decode import open_image
from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError, VitrailError
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
            total += len(content)
            if total > MOST_BYTES:
                break
            name = f"{len(rows) + 1:03d}-class-{number}.jpg"
            (place / name).write_bytes(content)
            rows.append({"label": label, "file": name})
        write_json(place / INDEX, rows)
    except (OSError, CheckpointError):
        return []
    return read_samples(folder)


def read_samples(folder: Path) -> list[Sample]:
    """Return the samples of a run; empty if there are none, or if their index is corrupt."""
    place = folder / SAMPLES
    try:
        rows = read_json(place / INDEX)
        samples = [Sample(str(row["label"]), place / Path(str(row["file"])).name) for row in rows]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [sample for sample in samples[:MOST] if sample.file.is_file() and not sample.file.is_symlink()]


def samples_of_bundle(bundle: str | Path) -> list[Sample]:
    """Return the samples of a bundle's run, such as those of runs/pets for runs/pets/best."""
    return read_samples(Path(bundle).resolve().parent)


def _chosen(source: Source) -> list[tuple[int, str, bytes]]:
    """Choose classes and images of each class evenly; the first image of every class comes first."""
    labels = np.asarray(source.labels)
    classes = _evenly(len(source.classes), MOST)
    each = max(1, min(PER_CLASS, MOST // max(1, len(classes))))
    chosen: list[list[tuple[int, str, bytes]]] = [[] for _ in range(each)]
    for number in classes:
        content = _readable(source, np.flatnonzero(labels == number).tolist(), each)
        for turn, one in enumerate(content):
            chosen[turn].append((number, source.classes[number], one))
    return [row for turn in chosen for row in turn]


def _readable(source: Source, places: Sequence[int], count: int) -> list[bytes]:
    """Return `count` images as JPEG, spread evenly over the class; an unreadable one is replaced by the next."""
    readable: list[bytes] = []
    for start in _evenly(len(places), count):
        tried = (_small(source, place) for place in places[start : start + TRIES])
        content = next((one for one in tried if one is not None), None)
        if content is not None:
            readable.append(content)
    return readable


def _small(source: Source, index: int) -> bytes | None:
    """Return an image as a small, upright JPEG; None if it cannot be read."""
    try:
        opened = open_image(source.read(index))
        scale = SIDE / max(opened.width, opened.height)
        image = Image.fromarray(np.ascontiguousarray(opened.pixels(3, scale=min(1.0, scale))))
    except (VitrailError, OSError, ValueError):
        return None
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85, optimize=True)
    return file.getvalue()


def _evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, spread evenly."""
    return list(range(count)) if count <= most else [(2 * place + 1) * count // (2 * most) for place in range(most)]
