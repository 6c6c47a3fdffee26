"""Cells: what a label column holds for an image: one text, a list of texts, or nothing."""

import ast
import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Literal, NamedTuple

import numpy as np

from vitrail.data.sources.labels import is_missing, label_text, short
from vitrail.data.sources.targets import Kind
from vitrail.errors import DataError

Cell = str | tuple[str, ...] | None
"""A number is the text of it, so that it is the same however a table stores it; None: nothing."""
BITS = {"0": 0, "1": 1, "false": 0, "true": 1, "0.0": 0, "1.0": 1}
"""What a column of a label may hold, in lower case."""
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")


class Reading(NamedTuple):
    """How the cells of label columns become classes or targets."""

    kind: Kind = "classes"
    layout: Literal["cells", "columns", "vectors"] = "cells"
    """A cell holds all labels of an image; or there is a column for each label or number; or a cell lists 0 or 1 for
    every label, or all numbers."""
    separator: str | None = None
    """What is between labels in one text; None if a text is one label."""
    reason: str = ""
    """Why, if nobody asked for it."""


def cell_of(value: object, where: str) -> Cell:
    """Return what a table holds as a cell; raise for what cannot be a label, a number or a list of them."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return _listed(value, where)
    if isinstance(value, Decimal):
        value = float(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if not isinstance(value, str):
        return label_text(value, where)
    if is_missing(value):
        return value
    text = value.strip()
    return _listed(_parsed(text, where), where) if text.startswith("[") and text.endswith("]") else text


def _listed(values: Iterable[object], where: str) -> tuple[str, ...]:
    texts = []
    for value in values:
        text = None if isinstance(value, list | tuple | dict | set) else cell_of(value, where)
        if not isinstance(text, str):
            raise DataError(f"{where} has {short(value)} in a list of labels; list names or numbers")
        if text.strip():
            texts.append(text)
    return tuple(texts)


def _parsed(text: str, where: str) -> list[object]:
    """Return the list in a text, written as in JSON or in Python."""
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list):
            return found
    raise DataError(f'{where} has {short(text)}, which is not a list of labels; write it as ["cat", "dog"] or cat;dog')


def is_empty(cell: Cell) -> bool:
    """Whether a cell holds nothing, or a text that stands for nothing."""
    return cell is None or (isinstance(cell, str) and is_missing(cell))


def written(cell: Cell) -> str:
    """Return a cell as messages quote it."""
    return short(list(cell) if isinstance(cell, tuple) else cell)


def number_in(text: str) -> float | None:
    """Return the number that a text is, also with a decimal comma; None if it is none."""
    return float(text.replace(",", ".")) if _NUMBER.fullmatch(text) else None


def pieces_of(cell: Cell, separator: str | None) -> tuple[str, ...]:
    """Return the labels in a cell."""
    if isinstance(cell, tuple):
        return cell
    if cell is None or is_missing(cell):
        return ()
    pieces = [cell] if separator is None else cell.split(separator)
    return tuple(piece.strip() for piece in pieces if piece.strip())


def check_cell(cell: Cell, reading: Reading, where: str, column: str | None) -> None:
    """Raise for a cell that is not what its reading expects; `column` is its column, for messages."""
    at = f" in the column {column}" if column else ""
    if reading.kind == "values":
        texts = cell if isinstance(cell, tuple) and reading.layout == "vectors" else (cell,)
        for text in texts:
            _check_number(text, where, at)
    elif reading.layout != "cells":
        texts = cell if isinstance(cell, tuple) else (cell,)
        for text in texts:
            if text is None or (isinstance(text, str) and is_missing(text)):
                raise DataError(f"{where} has neither 0 nor 1{at}; write one of them, or remove the image")
            if not isinstance(text, str) or text.lower() not in BITS:
                raise DataError(f"{where} has {written(text)}{at}; write 0 or 1")
    elif reading.kind == "labels" and (cell is None or (isinstance(cell, str) and is_missing(cell) and cell.strip())):
        found = "" if cell is None else f" (found {cell!r})"
        raise DataError(f"{where} has no label{found}{at}; leave the text empty if it has none, or remove the image")


def _check_number(text: Cell, where: str, at: str) -> None:
    if isinstance(text, tuple):
        raise DataError(f"{where} has a list, {written(text)}{at}; write one number")
    if text is None or is_missing(text):
        raise DataError(f"{where} has no number{at}; write one, or remove the image")
    number = number_in(text)
    if number is None and text.lower().lstrip("+-") not in ("inf", "infinity"):
        raise DataError(f"{where} has {text!r}{at}; write a number")
    if number is None or not math.isfinite(number):
        raise DataError(f"{where} has {text!r}{at}; write a finite number")
