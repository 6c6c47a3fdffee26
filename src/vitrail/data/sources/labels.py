"""Labels as people write them, and the order of the classes they name."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vitrail.data.sources.source import Labels
from vitrail.errors import DataError

JOINTS = "|;,"
"""What people put between the labels of an image that has several."""
MANY_NUMBERS, FEW_EACH = 20, 2.0
"""So many different whole numbers, with fewer images for each, are measurements and not classes."""
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def label_text(value: object, where: str) -> str:
    """Return a label as text; whole numbers are the same label in every way of writing them into a table."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"{where} has no label; write one, or remove it")
    if isinstance(value, int):
        return str(value)
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, list | tuple | dict) or (text.startswith("[") and text.endswith("]")):
        raise DataError(
            f"{where} has several labels per image, {_short(value)}, which is not possible: "
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


def check_classes(images: Mapping[str, int], place: str, remedy: str) -> None:
    """Refuse labels that are surely not classes: several joined, or measurements. `images` counts those of each label.

    `remedy` says how to tell us that they are classes nevertheless.
    """
    numbers = {text: float(text.replace(",", ".")) for text in images if _NUMBER.fullmatch(text)}
    if images and len(numbers) == len(images):
        _check_numbers(numbers, sum(images.values()), place, remedy)
        return
    for joint in JOINTS:
        joined = {text: _pieces(text, joint) for text in images if joint in text}
        found = _several(joined, images, sure=joint == "|")
        if found is not None:
            raise DataError(
                f"{place} has labels that look like several joined by {joint!r}, such as {_short(found)}; several "
                f"labels per image are not supported yet: keep one label for each image, or, if {_short(found)} is the "
                f"name of one class, {remedy}"
            )


def _check_numbers(numbers: Mapping[str, float], images: int, place: str, remedy: str) -> None:
    fractions = not all(number.is_integer() for number in numbers.values())
    if not fractions and (len(numbers) < MANY_NUMBERS or images >= FEW_EACH * len(numbers)):
        return
    some = ", ".join(sorted(numbers, key=lambda text: numbers[text])[:3]) + (", …" if len(numbers) > 3 else "")
    what = "numbers with fractions" if fractions else f"{len(numbers):,} different numbers for {images:,} images"
    raise DataError(
        f"{place} has {what} as labels ({some}), which are not classes; regression is not supported yet: "
        f"write the name of a class for each image, or, if every number is a class, {remedy}"
    )


def _pieces(text: str, joint: str) -> list[str]:
    return [piece.strip() for piece in text.split(joint) if piece.strip()]


def _several(joined: Mapping[str, Sequence[str]], labels: Mapping[str, int], *, sure: bool) -> str | None:
    """Return a label that is several: its pieces are labels, too. One piece is enough where the joint is a `sure` sign.

    Names of classes have commas in them ("tench, Tinca tinca"), and now and then a piece is another class's name, so
    that there at least half of the labels with a joint must be made of pieces that others have.
    """
    uses = Counter(piece for pieces in joined.values() for piece in set(pieces))
    uses.update(label.strip() for label in labels if label not in joined)
    several = [
        text
        for text, pieces in joined.items()
        if len(pieces) > 1 and (any if sure else all)(uses[piece] > 1 for piece in pieces)
    ]
    return several[0] if several and (sure or 2 * len(several) >= len(joined)) else None


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
