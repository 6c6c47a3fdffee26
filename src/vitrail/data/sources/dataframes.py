"""A DataFrame of pandas or polars as a source, with the columns of a manifest."""

from typing import Any

import numpy as np

from vitrail.data.sources.columns import choose_columns
from vitrail.data.sources.in_memory import InMemory, as_list
from vitrail.data.sources.items import item_source
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import SPLITS, split_of
from vitrail.errors import DataError

TITLE = "the DataFrame"


def is_frame(data: object) -> bool:
    """Whether an object is a DataFrame; neither library is imported for that."""
    return type(data).__name__ == "DataFrame" and hasattr(data, "columns") and hasattr(data, "__getitem__")


def frame_data(frame: Any) -> InMemory:
    """Open a DataFrame with a column of images, and columns of labels and splits if it has them."""
    columns = choose_columns(TITLE, [str(name) for name in frame.columns], unlabelled=True)
    images = list(frame[columns.image])
    labels = None if columns.label is None else as_list(frame[columns.label], "the labels")
    if columns.name is not None:
        labels = as_list(frame[columns.name], "the class names")
    source = item_source(TITLE, images, labels, None, unit="row")
    splits: dict[str, Source] = {"train": source}
    if columns.split is not None:
        splits = by_split(source, as_list(frame[columns.split], "the splits"), TITLE, "row")
    return InMemory("dataframe", splits, source.digest)


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
