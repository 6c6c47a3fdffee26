"""A DataFrame of pandas or polars as a source, with the columns of a manifest."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vitrail.data.sources.cells import Reading
from vitrail.data.sources.columns import Columns, choose_columns
from vitrail.data.sources.in_memory import GivenLabels, InMemory, as_list, read_labels
from vitrail.data.sources.items import item_source
from vitrail.data.sources.kinds import candidates, decide_columns
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import SPLITS, split_of
from vitrail.data.sources.targets import AUTOMATIC, Labelling
from vitrail.errors import DataError

TITLE = "the DataFrame"


def is_frame(data: object) -> bool:
    """Whether an object is a DataFrame; neither library is imported for that."""
    return type(data).__name__ == "DataFrame" and hasattr(data, "columns") and hasattr(data, "__getitem__")


def frame_data(frame: Any, labelling: Labelling = AUTOMATIC) -> InMemory:
    """Open a DataFrame with a column of images, and columns of labels and splits if it has them."""
    header = [str(name) for name in frame.columns]
    columns = choose_columns(TITLE, header, labelling, unlabelled=True)
    images = list(frame[columns.image])
    if not images:
        raise DataError(f"{TITLE} has no images; give at least one")
    given = given_columns(columns, labelling, len(images), lambda name, what: as_list(frame[name], what))
    source = item_source(TITLE, images, read_labels(given, labelling, title=TITLE, unit="row"), unit="row")
    splits: dict[str, Source] = {"train": source}
    if columns.split is not None:
        splits = by_split(source, as_list(frame[columns.split], "the splits"), TITLE, "row")
    return InMemory("dataframe", splits, source.digest)


def given_columns(
    columns: Columns, labelling: Labelling, images: int, read: Callable[[str, str], list[object]]
) -> GivenLabels:
    """Return the labels in a table; `read` returns a column by its name, and what messages call it.

    If no column has a known name, those that hold 0 and 1 or numbers are labels if all others do.
    """
    if columns.name is not None and labelling.kind in (None, "classes"):
        return GivenLabels((read(columns.name, "the class names"),), (columns.name.strip(),), reading=Reading())
    if columns.labels:
        reading = Reading() if columns.are_names and labelling.kind is None else None
        each = tuple(read(name, "the labels") for name in columns.labels)
        return GivenLabels(each, tuple(name.strip() for name in columns.labels), reading=reading)
    some = () if labelling.columns else candidates(columns.others)
    others = tuple(read(name, f"the column {name}") for name in some)
    found = decide_columns(zip(*others, strict=True), some, labelling, strict=True)
    if found is None:
        return GivenLabels(([None] * images,))
    return GivenLabels(others, tuple(name.strip() for name in some), reading=found)


def by_split(source: Source, values: list[object], title: str, unit: str) -> dict[str, Source]:
    """Divide a source by the values of its split column."""
    named: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        split = SPLITS.get(str(value).strip().lower())
        if split is None:
            raise DataError(f"{unit} {index} of {title} has the split {value!r}; write train, val or test")
        named.setdefault(split, []).append(index)
    if "train" not in named:
        raise DataError(f"{title} has no {unit}s of the training split; write train in the split column of some")
    order = [name for name in ("train", "val", "test") if name in named]
    return {name: split_of(source, np.array(named[name], np.int64)) for name in order}
