"""A few small training images of each class, kept by a run: its report shows them, and the explorer starts with them.

They lie in the run folder and not in the bundle, so that a model can be passed on without images of its data.
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
"""The longer side of a sample in pixels."""
MOST, PER_CLASS = 96, 4
"""So many samples in all, and of one class."""
MOST_BYTES = 1_000_000
"""What all samples of a run take, at most."""
TRIES = 3
"""How many images are tried where some cannot be read."""


class Sample(NamedTuple):
    """A sample: the class it has, and its file."""

    label: str
    file: Path


def keep_samples(folder: Path, source: Source) -> list[Sample]:
    """Write a few images of each class into a run folder, unless they are there.

    Images that cannot be read are passed over. A run does not fail for want of samples: where they cannot be written,
    there are none.
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
    """Return the samples of a run; none where there are none, or where their list is damaged."""
    place = folder / SAMPLES
    try:
        rows = read_json(place / INDEX)
        found = [Sample(str(row["label"]), place / Path(str(row["file"])).name) for row in rows]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [sample for sample in found[:MOST] if sample.file.is_file() and not sample.file.is_symlink()]


def samples_of_bundle(bundle: str | Path) -> list[Sample]:
    """Return the samples of the run that a bundle lies in, such as those of runs/pets for runs/pets/best."""
    return read_samples(Path(bundle).resolve().parent)


def _chosen(source: Source) -> list[tuple[int, str, bytes]]:
    """Choose classes evenly where there are many, and images of each evenly; the first of every class come first."""
    labels = np.asarray(source.labels)
    classes = _evenly(len(source.classes), MOST)
    each = max(1, min(PER_CLASS, MOST // max(1, len(classes))))
    found: list[list[tuple[int, str, bytes]]] = [[] for _ in range(each)]
    for number in classes:
        content = _readable(source, np.flatnonzero(labels == number).tolist(), each)
        for turn, one in enumerate(content):
            found[turn].append((number, source.classes[number], one))
    return [row for turn in found for row in turn]


def _readable(source: Source, places: Sequence[int], count: int) -> list[bytes]:
    """Return so many images as JPEG, from evenly over the class; the next one stands in for one that cannot be read."""
    found: list[bytes] = []
    for start in _evenly(len(places), count):
        tried = (_small(source, place) for place in places[start : start + TRIES])
        content = next((one for one in tried if one is not None), None)
        if content is not None:
            found.append(content)
    return found


def _small(source: Source, index: int) -> bytes | None:
    """Return an image as a small JPEG, turned as it is meant to be seen; None where it cannot be read."""
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
    """Choose at most `most` of `count` places, evenly."""
    return list(range(count)) if count <= most else [(2 * place + 1) * count // (2 * most) for place in range(most)]
