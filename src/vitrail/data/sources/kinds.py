"""What the labels of a dataset are, by what they look like: classes, several labels per image, or numbers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from vitrail.data.sources.cells import BITS, Cell, Reading, cell_of, is_empty, number_in, written
from vitrail.data.sources.targets import Labelling
from vitrail.errors import ConfigError, DataError

JOINTS = "|;,"
"""Separators between the labels of an image."""
MANY_NUMBERS, FEW_EACH = 20, 2.0
"""At least this many distinct integers, with fewer images each, are numbers and not classes."""
NAMED_FOR_SEVERAL = ("labels", "tags")
"""Columns whose name says that an image may have several labels."""
NO_LABELS = ("", "unnamed: 0", "id", "image_id", "index")
"""Columns that hold no labels even if they hold numbers, in lower case: "" and "Unnamed: 0" are an index of pandas."""


def decide(
    images: Mapping[Cell, int],
    labelling: Labelling,
    subject: str,
    *,
    named: bool = False,
    numeric: bool = True,
    many: bool = True,
    column: bool = False,
) -> Reading:
    """Return how to read the cells of one label column. `images` counts the images of each.

    `subject` is what holds them, for the reason. With `named`, integers are indices into a list of names. Texts are
    taken for numbers only if they are `numeric`, and integers only if there may be `many`. `column` tells that the
    column was chosen by its name, so that 0 and 1 are no labels but say who has this one.
    """
    lists = {cell: count for cell, count in images.items() if isinstance(cell, tuple)}
    texts = {cell: count for cell, count in images.items() if isinstance(cell, str) and not is_empty(cell)}
    if labelling.kind == "classes":
        return Reading()
    if labelling.kind == "values":
        return Reading("values", "vectors" if lists and not texts else "cells")
    if labelling.kind == "labels":
        if column and texts and not lists and all(text.lower() in BITS for text in texts):
            return Reading("labels", "columns")
        if _are_bits(lists) and not texts and not named:
            return Reading("labels", "vectors")
        separator = labelling.separator or next(
            (joint for joint in JOINTS if any(joint in text for text in texts)), None
        )
        return Reading("labels", "cells", None if lists else separator)
    if lists:
        return _of_lists(lists, subject, alone=not texts, named=named)
    if named:
        return Reading()
    return _of_texts(texts, subject, numeric=numeric, many=many, separator=labelling.separator)


def _of_texts(texts: Mapping[str, int], subject: str, *, numeric: bool, many: bool, separator: str | None) -> Reading:
    numbers = {text: number for text in texts if (number := number_in(text)) is not None}
    if texts and len(numbers) == len(texts):
        reason = _why_numbers(numbers, sum(texts.values()), many=many) if numeric else ""
        return Reading("values", reason=f"{subject} {reason}") if reason else Reading()
    for joint in JOINTS if separator is None else (separator,):
        joined = {text: _pieces(text, joint) for text in texts if joint in text}
        is_certain = joint == "|" or separator is not None or (joint == ";" and subject.lower() in NAMED_FOR_SEVERAL)
        example = _several(joined, texts, certain=is_certain)
        if example is not None:
            return Reading("labels", "cells", joint, _why_several(subject, example))
    return Reading()


def _of_lists(lists: Mapping[tuple[str, ...], int], subject: str, *, alone: bool, named: bool) -> Reading:
    """Return how to read lists: labels, 0 or 1 for every label, or numbers."""
    example = max(lists, key=lambda cell: (len(cell) > 1, lists[cell]))
    labels = Reading("labels", "cells", None, _why_several(subject, example))
    if not alone or named:
        return labels
    if _are_bits(lists):
        check_not_one_hot(all(sum(BITS[text.lower()] for text in cell) == 1 for cell in lists), subject)
        return Reading("labels", "vectors", None, f"{subject} holds lists of 0 and 1")
    numbers = {text: number_in(text) for cell in lists for text in cell}
    one_length = len({len(cell) for cell in lists}) == 1
    fractions = [text for text, number in numbers.items() if number is None or not number.is_integer()]
    if one_length and fractions and None not in numbers.values():
        return Reading("values", "vectors", None, f"{subject} has numbers with fractions ({fractions[0]})")
    return labels


def check_not_one_hot(one_hot: bool, subject: str) -> None:
    """Raise for one-hot rows, which are classes and not labels."""
    if one_hot:
        raise DataError(
            f"{subject} has one-hot labels, one 1 per image; give one label per image, such as labels.argmax(1), or "
            "ask for several labels per image"
        )


def _are_bits(lists: Iterable[tuple[str, ...]]) -> bool:
    """Whether lists hold 0 or 1 for each of several labels."""
    lengths = {len(cell) for cell in lists}
    return len(lengths) == 1 and min(lengths) > 1 and all(text.lower() in BITS for cell in lists for text in cell)


def _why_several(subject: str, example: Cell) -> str:
    return f"{subject} holds several labels per image, such as {written(example)}"


def _why_numbers(numbers: Mapping[str, float], images: int, *, many: bool) -> str:
    """Return why numbers are not classes, "" if they may be."""
    fraction = next((text for text, number in numbers.items() if not number.is_integer()), None)
    if fraction is not None:
        return f"has numbers with fractions ({fraction})"
    if not many or len(numbers) < MANY_NUMBERS or images >= FEW_EACH * len(numbers):
        return ""
    return f"has {len(numbers):,} different numbers for {images:,} images"


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


# ── a column for each label or number ──


def candidates(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that may hold labels though their names do not say so."""
    return tuple(dict.fromkeys(column for column in columns if column.strip().lower() not in NO_LABELS))


def decide_columns(
    rows: Iterable[Sequence[object]], columns: Sequence[str], labelling: Labelling, *, strict: bool = False
) -> Reading | None:
    """Return how to read several label columns; None if they are neither all 0 and 1 nor all numbers.

    With `strict`, no cell may be missing.
    """
    if labelling.kind == "classes" or not columns:
        return None
    bits, numbers, some = labelling.kind != "values", labelling.kind != "labels", False
    alone = len(columns) == 1 and labelling.kind is None
    texts: Counter[str] = Counter()
    for row in rows:
        for value in row:
            try:
                cell = cell_of(value, "")
            except DataError:
                return None
            if is_empty(cell):
                if strict:
                    return None
                continue
            if not isinstance(cell, str):
                return None
            some = True
            bits = bits and cell.lower() in BITS
            numbers = numbers and number_in(cell) is not None
            if not bits and not numbers:
                return None
            texts.update([cell] if alone else ())
    if not some:
        return None
    if alone:  # a few integers are more likely classes in a column of an unknown name
        reading = _of_texts(texts, columns[0], numeric=True, many=True, separator=None)
        return reading._replace(layout="columns") if reading.kind == "values" else None
    if bits:
        return Reading("labels", "columns", None, _counted(columns, "0 and 1"))
    return Reading("values", "columns", None, _counted(columns, "numbers"))


def _counted(columns: Sequence[str], what: str) -> str:
    return f"{columns[0]} holds {what}" if len(columns) == 1 else f"{len(columns)} columns of {what}"


def required(reading: Reading | None, columns: Sequence[str], labelling: Labelling, title: str) -> Reading:
    """Return how to read columns that were asked for, even if some cells are wrong: those are named one by one."""
    if labelling.kind == "classes":
        raise ConfigError(f"{title} has one class per image, but {len(columns)} columns were named; name one of them")
    if reading is not None:
        return reading._replace(reason="") if labelling.kind is not None else reading
    return Reading(labelling.kind or "values", "columns")
