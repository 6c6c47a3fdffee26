"""Parsing labels, the order of classes, and collecting all faults of a dataset in one pass."""

import math
import re
from collections.abc import Sequence

import numpy as np

from vitrail.data.sources.source import Labels
from vitrail.errors import DataError

_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def label_text(value: object, where: str) -> str:
    """Return a label as text; an integer is the same label however a table stores it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"{where} has no label; add one, or remove the image")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        raise DataError(f"{where} has several labels, {short(value)}, where others have one class; write one label")
    if not isinstance(value, str):
        raise DataError(f"{where} has the label {short(value)}; use a name or an integer")
    if is_missing(value):
        raise DataError(f"{where} has no label (found {value!r}); add one, or remove the image")
    return value.strip()


def is_missing(text: str) -> bool:
    """Whether a text stands for no label."""
    return text.strip().lower() in ("", "nan", "null")


def short(value: object) -> str:
    """Return a label as messages quote it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def order_classes(
    labels: Sequence[str], names: Sequence[str] | None = None, *, place: str
) -> tuple[tuple[str, ...], Labels]:
    """Sort classes: return their names and the class index of each entry of `labels`, with -1 at index -1.

    Integers are sorted numerically, everything else as text. With `names`, integers are indices into that list.
    """
    if names is None:
        integers = all(_WHOLE_NUMBER.fullmatch(text) for text in labels)
        names = sorted(labels, key=int) if integers else sorted(labels)
        numbers = {name: number for number, name in enumerate(names)}
    else:
        numbers = {name: number for number, name in enumerate(names)}
        if len(numbers) < len(names):
            twice = next(name for number, name in enumerate(names) if numbers[name] != number)
            raise DataError(f"{place} has two classes named {twice!r}; use unique names")
        numbers |= {str(number): number for number in range(len(names))}
    unknown = next((text for text in labels if text not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"{place} has the label {unknown!r}, which is not one of its {len(names)} classes; correct the label"
        )
    return tuple(names), np.array([*(numbers[text] for text in labels), -1], np.int64)


# ── faults ──

Faults = list[str]
"""One sentence per fault. If a list is passed when opening data, unusable items are skipped and named in the list;
otherwise an error names all of them."""
MAX_LISTED = 10
"""Number of faults in an error message; `vitrail check` lists them all."""


def report_faults(messages: Sequence[str], place: str, faults: Faults | None, *, listed: int = MAX_LISTED) -> None:
    """Add faults to the caller's list, or raise one error that names the first `listed` of them."""
    if faults is not None:
        faults.extend(messages)
    elif len(messages) == 1:
        raise DataError(messages[0])
    elif messages:
        texts = ". ".join(f"({number}) {text}" for number, text in enumerate(messages[:listed], start=1))
        more = f". Run `vitrail check` to list {len(messages) - listed:,} more" if len(messages) > listed else ""
        raise DataError(f"{place} has {len(messages):,} faults: {texts}{more}")
