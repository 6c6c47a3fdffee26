"""Several Parquet files as one source, like Hugging Face's train-00000-of-00004.parquet."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.faults import Faults
from vitrail.data.sources.index_files import Progress, shown
from vitrail.data.sources.labels import order_classes
from vitrail.data.sources.manifests import Manifest
from vitrail.data.sources.parquet import ParquetImages, open_parquet
from vitrail.data.sources.source import Labels
from vitrail.errors import DataError

Table = Manifest | ParquetImages
FILES_HELD = 2
"""Number of files whose row groups a process keeps in memory."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The images of several Parquet files, concatenated."""

    tables: tuple[Table, ...]
    classes: tuple[str, ...]
    labels: Labels
    split_of: NDArray[np.int8] | None
    """The split of every image: 0 train, 1 validation, 2 test; None if the files have no split column."""
    _recent: OrderedDict[int, None] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Row groups are not pickled.
        return {**self.__dict__, "_recent": OrderedDict()}

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(table) for table in self.tables], dtype=np.int64)

    @cached_property
    def _home(self) -> str:
        return os.path.commonpath([os.path.dirname(os.path.abspath(table.place)) for table in self.tables])

    def _find(self, index: int) -> tuple[int, int]:
        """Return the index of an image's file, and its index there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def key(self, index: int) -> str:
        """Return the path of the file relative to the files' common folder, and the image's key there."""
        number, inner = self._find(index)
        table = self.tables[number]
        return f"{shown(os.path.relpath(os.path.abspath(table.place), self._home))}, {table.key(inner)}"

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        number, inner = self._find(index)
        return self.tables[number].name(inner)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        number, inner = self._find(index)
        self._recent.pop(number, None)
        self._recent[number] = None
        if len(self._recent) > FILES_HELD:
            oldest = self.tables[self._recent.popitem(last=False)[0]]
            if isinstance(oldest, ParquetImages):
                oldest.release()
        return self.tables[number].read(inner)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        number, inner = self._find(index)
        return self.tables[number].stamp(inner)


def open_tables(
    paths: Sequence[str],
    *,
    unlabelled: bool = False,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Table | Tables:
    """Open Parquet files as one source. Their classes may differ; all or none must have a split column."""
    tables = tuple(open_parquet(path, unlabelled=unlabelled, faults=faults, on_progress=on_progress) for path in paths)
    if len(tables) == 1:
        return tables[0]
    divided = [table.split_of for table in tables if table.split_of is not None]
    if divided and len(divided) < len(tables):
        has, lacks = (
            next(table.place for table in tables if (table.split_of is None) is without) for without in (False, True)
        )
        raise DataError(f"{shown(has)} has a split column and {shown(lacks)} has none; add it there, or remove it")
    classes = tables[0].classes
    if any(table.classes != classes for table in tables):
        names = list(dict.fromkeys(name for table in tables for name in table.classes))
        classes, _ = order_classes(names, place=shown(paths[0]))
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [np.array([*(numbers[name] for name in table.classes), -1], np.int64)[table.labels] for table in tables]
    return Tables(tables, classes, np.concatenate(labels), np.concatenate(divided) if divided else None)
