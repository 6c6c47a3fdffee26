"""Datasets of the library Hugging Face `datasets`: objects in memory, and folders written by `save_to_disk`.

The library is imported only to open a folder; an object brings it along.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.data.sources.columns import IMAGE_COLUMNS, LABEL_COLUMNS, Columns, choose_columns
from vitrail.data.sources.dataframes import by_split, given_columns
from vitrail.data.sources.in_memory import Fingerprint, Fingerprinted, InMemory, as_list, read_labels
from vitrail.data.sources.items import FilePath, read_stored, stored_image
from vitrail.data.sources.labelled import Labelled
from vitrail.data.sources.source import Labels, Pixels, Source, stamp_file
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
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
    targets: Targets | None = None

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


def huggingface_data(dataset: Any, labelling: Labelling = AUTOMATIC) -> InMemory:
    """Open a `datasets.Dataset` with a column of images, and columns of labels and splits if it has them."""
    if not hasattr(dataset, "cast_column") or not hasattr(dataset, "__len__") or not hasattr(dataset, "_fingerprint"):
        raise InputError(
            f"the data is a {type(dataset).__name__} without random access; pass a Dataset, loaded with "
            "streaming=False, or write tar shards"
        )
    if not len(dataset):
        raise DataError(f"{TITLE} is empty; give at least one image")
    image = _image_column(dataset.features)
    plain = dataset.with_format(None)
    labelled = _read_labels(plain, image, labelling)
    rows = plain.select_columns([image])
    if hasattr(rows.features[image], "decode"):
        rows = rows.cast_column(image, type(rows.features[image])(decode=False))
    digest = _fingerprint(dataset, rows, image, labelled)
    source = Fingerprinted(Rows(rows, image, labelled.labels, labelled.classes, labelled.targets), digest)
    splits: dict[str, Source] = {"train": source}
    if "split" in plain.features:
        splits = by_split(source, as_list(list(plain["split"]), "the splits"), TITLE, "row")
    return InMemory("huggingface", splits, digest)


def _read_labels(plain: Any, image: str, labelling: Labelling) -> Labelled:
    """Return the labels in the columns of a dataset."""

    def read(name: str, what: str) -> list[object]:
        return as_list(plain.select_columns([name]).with_format("arrow")[:][name].to_pylist(), what)

    header = tuple(plain.features)
    label = _label_column(plain.features)
    columns = Columns(image, () if label is None else (label,), None, "split" if "split" in header else None, header)
    if labelling.columns:
        columns = columns._replace(labels=choose_columns(TITLE, header, labelling, images=[image.lower()]).labels)
    if not columns.labels and not all(_is_number(plain.features[name]) for name in columns.others):
        labelling = Labelling("classes")
    given = given_columns(columns, labelling, len(plain), read)
    if len(columns.labels) == 1:
        given = given._replace(classes=_class_names(plain.features[columns.labels[0]]))
    return read_labels(given, labelling, title=TITLE, unit="row")


def _is_number(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("bool", "int", "uint", "float", "decimal"))


def _class_names(feature: Any) -> Sequence[str] | None:
    """Return the names of classes, or of labels in lists."""
    while isinstance(feature, list) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list) else feature.feature
    names: Sequence[str] | None = getattr(feature, "names", None)
    return names


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
    typed = [name for name, feature in features.items() if _class_names(feature) is not None]
    if named is None and len(typed) > 1:
        raise DataError(
            f"{TITLE} has several columns of labels ({', '.join(typed)}); call the one to use label, with rename_column"
        )
    return named or next(iter(typed), None)


def _fingerprint(dataset: Any, rows: Any, image: str, labelled: Labelled) -> str:
    fingerprint = Fingerprint()
    fingerprint.add_labels(labelled)
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
