"""Labels as people write them, and the order of the classes they name."""

import math
import re
from collections.abc import Sequence

import numpy as np

from vitrail.data.sources.source import Labels
from vitrail.errors import DataError

_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def label_text(value: object, where: str) -> str:
    """Return a label as text; whole numbers are the same label in every way of writing them into a table."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return str(int(value))
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"{where} has no label; write one, or remove it")
    if isinstance(value, int):
        return str(value)
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, list | tuple | dict) or (text.startswith("[") and text.endswith("]")):
        raise DataError(
            f"{where} has several labels per picture, {_short(value)}, which is not possible: "
            "single-label classification only, for now"
        )
    if isinstance(value, str) and text.lower() in ("", "nan", "null"):
        raise DataError(f"{where} has no label (found {value!r}); write one, or remove it")
    if not isinstance(value, str):
        raise DataError(f"{where} has the label {_short(value)}; write a name or a whole number")
    return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def order_classes(
    found: Sequence[str], names: Sequence[str] | None = None, *, place: str
) -> tuple[tuple[str, ...], Labels]:
    """Put classes in order: return their names and the number of each class in `found`, with -1 for index -1.

    Whole numbers are ordered as numbers, everything else as text. With `names`, whole numbers count in that list.
    """
    if names is None:
        whole = all(_WHOLE_NUMBER.fullmatch(text) for text in found)
        names = sorted(found, key=int) if whole else sorted(found)
        numbers = {name: number for number, name in enumerate(names)}
    else:
        numbers = {name: number for number, name in enumerate(names)}
        if len(numbers) < len(names):
            twice = next(name for number, name in enumerate(names) if numbers[name] != number)
            raise DataError(f"{place} has two classes named {twice!r}; give each class its own name")
        numbers |= {str(number): number for number in range(len(names))}
    unknown = next((text for text in found if text not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"{place} has the label {unknown!r}, which is none of its {len(names)} classes; correct the label"
        )
    return tuple(names), np.array([*(numbers[text] for text in found), -1], np.int64)
