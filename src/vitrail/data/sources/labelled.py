"""From the cells of label columns to classes, or to targets with their strata."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.cells import BITS, Cell, Reading, is_empty, number_in, pieces_of
from vitrail.data.sources.labels import order_classes
from vitrail.data.sources.source import Labels
from vitrail.data.sources.strata import strata_of
from vitrail.data.sources.targets import Targets
from vitrail.errors import DataError

LARGEST = 4 * 10**9
"""Bytes that the labels of all images may take."""


class Labelled(NamedTuple):
    """What the images of a source are labelled with."""

    classes: tuple[str, ...]
    """Or strata, if there are targets."""
    labels: Labels
    targets: Targets | None = None


class CellColumn(NamedTuple):
    """A column of labels."""

    name: str
    cells: Sequence[Cell]
    """Its distinct cells."""
    codes: NDArray[np.int64]
    """The index of every image's cell; -1 if it is not known."""


def targets_in(
    columns: Sequence[CellColumn], reading: Reading, names: Sequence[str] | None, *, place: str, base: str | None = None
) -> Labelled:
    """Return the targets in columns whose cells were checked.

    `names` are those of labels that are integers, or of the entries of lists; `base` is what the entries of lists are
    called otherwise: "value" for "value 0".
    """
    known = np.all([column.codes >= 0 for column in columns], axis=0)
    values: NDArray[np.float64] | NDArray[np.uint8]
    if reading.layout == "columns":
        outputs = tuple(column.name.strip() for column in columns)
        values = np.stack([_numbers(column, reading) for column in columns], axis=1)
        known &= ~np.isnan(values).any(axis=1)
    elif reading.layout == "vectors":
        outputs, values = _vectors(columns[0], names, base or columns[0].name, place)
    elif reading.kind == "values":
        outputs, values = (base or columns[0].name.strip(),), _numbers(columns[0], reading)[:, None]
    else:
        outputs, values = _label_sets(columns[0], reading.separator, names, place)
    return with_strata(outputs, values, known, reading, place)


def with_strata(
    outputs: tuple[str, ...], values: NDArray[np.float64] | NDArray[np.uint8], known: NDArray[np.bool_],
    reading: Reading, place: str,
) -> Labelled:  # fmt: skip
    """Return targets with the strata of their images; those that are not `known` are in none."""
    if len(set(outputs)) < len(outputs):
        twice = next(name for number, name in enumerate(outputs) if name in outputs[:number])
        raise DataError(f"{place} has two columns named {twice!r}; use unique names")
    if reading.kind == "labels":
        targets = Targets("labels", outputs, values.astype(np.uint8, copy=False), reading.reason, reading.separator)
        targets.values[~known] = 0
    else:
        targets = Targets("values", outputs, values.astype(np.float64, copy=False), reading.reason)
        targets.values[~known] = np.nan
    strata = strata_of(targets, known)
    return Labelled(strata.names, np.where(known, strata.assign(targets), -1), targets)


def _numbers(column: CellColumn, reading: Reading) -> NDArray[np.float64]:
    """Return the numbers of a column, NaN where there are none."""
    each = np.array([*(_number(cell, reading) for cell in column.cells), np.nan])
    return each[column.codes]


def _number(cell: Cell, reading: Reading) -> float:
    if not isinstance(cell, str) or is_empty(cell):
        return np.nan
    number = BITS.get(cell.lower()) if reading.kind == "labels" else number_in(cell)
    return np.nan if number is None else float(number)


def _vectors(
    column: CellColumn, names: Sequence[str] | None, base: str, place: str
) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Return the entries of lists of one length."""
    lists = [cell for cell in column.cells if isinstance(cell, tuple)]
    length = len(lists[0]) if lists else 0
    if odd := next((cell for cell in lists if len(cell) != length), None):
        raise DataError(f"{place} has lists of {length} and of {len(odd)} numbers; give every image as many")
    rows = [[_entry(text) for text in cell] if isinstance(cell, tuple) else [np.nan] * length for cell in column.cells]
    values = np.array([*rows, [np.nan] * length], np.float64).reshape(-1, length)
    if names is not None and len(names) == length:
        return tuple(names), values[column.codes]
    outputs = (base,) if length == 1 else tuple(f"{base} {number}" for number in range(length))
    return outputs, values[column.codes]


def _entry(text: str) -> float:
    bit = BITS.get(text.lower())
    number = number_in(text) if bit is None else float(bit)
    return np.nan if number is None else number


def _label_sets(
    column: CellColumn, separator: str | None, names: Sequence[str] | None, place: str
) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """Return the labels, and which of them every image has."""
    sets = [pieces_of(cell, separator) for cell in column.cells]
    texts = list(dict.fromkeys(piece for pieces in sets for piece in pieces))
    outputs, lookup = order_classes(texts, names, place=place)
    if names is not None:  # a label that no image has cannot be learnt
        used, lookup = np.unique(lookup[:-1], return_inverse=True)
        outputs = tuple(outputs[label] for label in used.tolist())
    if len(column.codes) * len(outputs) > LARGEST:
        raise DataError(
            f"{place} has {len(outputs):,} different labels for {len(column.codes):,} images, too many to hold; "
            "leave out the rarest"
        )
    number_of = {text: int(number) for text, number in zip(texts, lookup.tolist()[: len(texts)], strict=True)}
    has = np.zeros((len(sets) + 1, len(outputs)), np.uint8)
    for row, pieces in enumerate(sets):
        has[row, [number_of[piece] for piece in pieces]] = 1
    return outputs, has[column.codes]
