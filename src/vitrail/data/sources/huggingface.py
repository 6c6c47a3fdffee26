"""Datasets of the library Hugging Face `datasets`: objects in memory, and folders written by `save_to_disk`.

The library is imported only to open a folder; an object brings it along.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.data.sources.columns import IMAGE_COLUMNS, LABEL_COLUMNS
from vitrail.data.sources.dataframes import by_split
from vitrail.data.sources.in_memory import Fingerprint, Fingerprinted, InMemory, as_list, index_labels
from vitrail.data.sources.items import FilePath, read_stored, stored_image
from vitrail.data.sources.source import Labels, Pixels, Source, stamp_file
from vitrail.errors import DataError, InputError
from vitrail.text import printable_path

MODULES = ("datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.dataset_dict")
"""Where the library's classes are; many projects have a module `datasets` of their own."""
MOST_DIGESTED = 2**30
"""Up to this many bytes, the fingerprint is that of the content; of larger datasets it is the library's own."""
ROWS_AT_ONCE = 256
TITLE = "the Hugging Face dataset"
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What marks a folder written by `save_to_disk`: of one dataset, and of several splits."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The images of a dataset, as they are stored."""

    rows: Any
    """A `datasets.Dataset` whose only column holds the images, not decoded."""
    column: str
    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return the number of a row."""
        return f"row {index}"

    def read(self, index: int) -> bytes | Pixels:
        """Return the bytes of an image."""
        where = f"row {index} of {TITLE}"
        value = self.rows[index][self.column]
        if value is None or (isinstance(value, dict) and not (value.get("bytes") or value.get("path"))):
            raise DataError(f"{where} has no image; add it, or remove the row")
        return read_stored(stored_image(value, where), where)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the index: nothing else is known of a row that is not read."""
        return index, 0


def is_huggingface(data: object) -> bool:
    """Whether an object is a dataset of the library; it is not imported for that."""
    return any(kind.__module__ in MODULES for kind in type(data).__mro__)


def huggingface_data(dataset: Any) -> InMemory:
    """Open a `datasets.Dataset` with a column of images, and columns of labels and splits if it has them."""
    if not hasattr(dataset, "cast_column") or not hasattr(dataset, "__len__") or not hasattr(dataset, "_fingerprint"):
        raise InputError(
            f"the data is a {type(dataset).__name__} without random access; pass a Dataset, loaded with "
            "streaming=False, or write tar shards"
        )
    if not len(dataset):
        raise DataError(f"{TITLE} is empty; give at least one image")
    image, label = _image_column(dataset.features), _label_column(dataset.features)
    plain = dataset.with_format(None)
    names: Sequence[str] | None = None
    values: list[object] = [None] * len(plain)
    if label is not None:
        names = getattr(plain.features[label], "names", None)
        values = as_list(plain.select_columns([label]).with_format("arrow")[:][label].to_pylist(), "the labels")
    classes, labels = index_labels(values, names, title=TITLE, unit="row")
    rows = plain.select_columns([image])
    if hasattr(rows.features[image], "decode"):
        rows = rows.cast_column(image, type(rows.features[image])(decode=False))
    digest = _fingerprint(dataset, rows, image, classes, labels)
    source = Fingerprinted(Rows(rows, image, labels, classes), digest)
    splits: dict[str, Source] = {"train": source}
    if "split" in plain.features:
        splits = by_split(source, as_list(list(plain["split"]), "the splits"), TITLE, "row")
    return InMemory("huggingface", splits, digest)


def _image_column(features: Mapping[str, Any]) -> str:
    """Return the column of images: by its type, else by its name."""
    typed = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    named = [name for name in features if name.lower() in IMAGE_COLUMNS]
    chosen = [name for name in typed if name in named] or typed or named
    if len(typed) > 1 and len(chosen) > 1:
        raise DataError(f"{TITLE} has several image columns ({', '.join(chosen)}); keep one with select_columns")
    if not chosen:
        raise DataError(
            f"{TITLE} has no image column ({', '.join(features)}); cast one to datasets.Image with cast_column"
        )
    return min(chosen, key=lambda name: IMAGE_COLUMNS.index(name.lower()) if name in named else 0)


def _label_column(features: Mapping[str, Any]) -> str | None:
    """Return the column of labels: by its name, else by its type."""
    by_name = {name.lower(): name for name in features}
    named = next((by_name[name] for name in LABEL_COLUMNS if name in by_name), None)
    typed = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    if named is None and len(typed) > 1:
        raise DataError(
            f"{TITLE} has several columns of labels ({', '.join(typed)}); call the one to use label, with rename_column"
        )
    return named or next(iter(typed), None)


def _fingerprint(dataset: Any, rows: Any, image: str, classes: Sequence[str], labels: Labels) -> str:
    fingerprint = Fingerprint()
    fingerprint.add_labels(classes, labels)
    if rows.data.nbytes > MOST_DIGESTED:
        fingerprint.add(str(dataset._fingerprint))
        return fingerprint.hex
    numbers = itertools.count()
    for table in rows.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        for value in table.column(image).to_pylist():
            where = f"row {next(numbers)} of {TITLE}"
            stored = b"" if value is None else stored_image(value, where)
            if isinstance(stored, FilePath):
                fingerprint.add(stored.path)
                stored = str(stamp_file(stored.path, printable_path(stored.path))[0]).encode()
            fingerprint.add(stored)
    return fingerprint.hex


# ── folders ──


def is_saved(place: str | bytes) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    names = (SAVED_DATASET, "dataset_info.json"), (SAVED_SPLITS,)
    place = os.fsdecode(place)
    return any(all(os.path.isfile(os.path.join(place, name)) for name in files) for files in names)


def open_saved(place: str) -> Any:
    """Open a folder written by `save_to_disk`: a `Dataset` or a `DatasetDict`."""
    try:
        from datasets import load_from_disk
    except ImportError:
        raise DataError(
            f"{printable_path(place)} cannot be read without the package datasets: pip install 'vitrail[hf]'"
        ) from None
    try:
        return load_from_disk(place)
    except Exception as error:  # a corrupt folder may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{printable_path(place)} cannot be read as a Hugging Face dataset: {reason}") from None
