"""Parsing labels, the order of classes, and collecting all faults of a dataset in one pass."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vitrail.data.sources.source import Labels
from vitrail.errors import DataError

JOINTS = "|;,"
"""Separators between the labels of a multi-label image."""
MANY_NUMBERS, FEW_EACH = 20, 2.0
"""At least this many distinct integers, with fewer images each, are regression targets and not classes."""
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")
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
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, list | tuple | dict) or (text.startswith("[") and text.endswith("]")):
        raise DataError(
            f"{where} has several labels per image, {_short(value)}, which is not supported: "
            "only single-label classification for now"
        )
    if isinstance(value, str) and text.lower() in ("", "nan", "null"):
        raise DataError(f"{where} has no label (found {value!r}); add one, or remove the image")
    if not isinstance(value, str):
        raise DataError(f"{where} has the label {_short(value)}; use a name or an integer")
    return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_classes(images: Mapping[str, int], place: str, remedy: str) -> None:
    """Raise for labels that are clearly not classes: joined labels, or regression targets.

    `images` counts the images of each label; `remedy` tells how to use them as classes anyway.
    """
    numbers = {text: float(text.replace(",", ".")) for text in images if _NUMBER.fullmatch(text)}
    if images and len(numbers) == len(images):
        _check_numbers(numbers, sum(images.values()), place, remedy)
        return
    for joint in JOINTS:
        joined = {text: _pieces(text, joint) for text in images if joint in text}
        advice = _several(joined, images, certain=joint == "|")
        if advice is not None:
            raise DataError(
                f"{place} has labels that look like several joined by {joint!r}, such as {_short(advice)}; several "
                f"labels per image are not supported yet: keep one label per image, or, if {_short(advice)} is the "
                f"name of one class, {remedy}"
            )


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


def _check_numbers(numbers: Mapping[str, float], images: int, place: str, remedy: str) -> None:
    fractions = not all(number.is_integer() for number in numbers.values())
    if not fractions and (len(numbers) < MANY_NUMBERS or images >= FEW_EACH * len(numbers)):
        return
    some = ", ".join(sorted(numbers, key=lambda text: numbers[text])[:3]) + (", …" if len(numbers) > 3 else "")
    what = "fractional numbers" if fractions else f"{len(numbers):,} different numbers for {images:,} images"
    raise DataError(
        f"{place} has {what} as labels ({some}), which are not classes; regression is not supported yet: "
        f"use a class name for each image, or, if every number is a class, {remedy}"
    )


def _pieces(text: str, joint: str) -> list[str]:
    return [piece.strip() for piece in text.split(joint) if piece.strip()]


def _several(joined: Mapping[str, Sequence[str]], labels: Mapping[str, int], *, certain: bool) -> str | None:
    """Return a label that joins several: its pieces are labels, too. One piece is enough for a `certain` separator.

    Class names may contain commas ("tench, Tinca tinca"), and sometimes a piece is another class's name. So for commas,
    at least half of the labels with a separator must consist of pieces that others have.
    """
    uses = Counter(piece for pieces in joined.values() for piece in set(pieces))
    uses.update(label.strip() for label in labels if label not in joined)
    several = [
        text
        for text, pieces in joined.items()
        if len(pieces) > 1 and (any if certain else all)(uses[piece] > 1 for piece in pieces)
    ]
    return several[0] if several and (certain or 2 * len(several) >= len(joined)) else None


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
