"""Patterns for several shards: train-{000..127}.tar, train-*.parquet."""

import glob
import os
import re
from itertools import product

from vitrail.data.sources.index_files import shown
from vitrail.errors import DataError

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_pattern(place: str) -> bool:
    """Return whether a path is a pattern."""
    return glob.has_magic(place) or RANGE.search(place) is not None


def expand_pattern(pattern: str) -> list[str]:
    """Return the files that match a pattern such as "train-{000..127}.tar" or "train-*.parquet", in order."""
    pieces = RANGE.split(pattern)  # text, first, last, text, first, last, text
    ranges = [_numbers(first, last) for first, last in zip(pieces[1::3], pieces[2::3], strict=True)]
    paths: list[str] = []
    for numbers in product(*ranges):
        filled = "".join(text + number for text, number in zip(pieces[::3], [*numbers, ""], strict=True))
        matches = sorted(glob.glob(filled)) if glob.has_magic(filled) else [filled] if os.path.exists(filled) else []
        if not matches:
            what = (
                f"{shown(filled)}, which is part of {shown(pattern)},"
                if ranges
                else f"a file that matches {shown(pattern)}"
            )
            raise DataError(f"{what} does not exist; correct the pattern")
        paths += matches
    kind = ".parquet" if paths[0].lower().endswith(".parquet") else ".tar"
    wrong = next((path for path in paths if not path.lower().endswith(kind)), None)
    if wrong is not None:
        kinds = "only tar shards, or only Parquet files"
        raise DataError(f"{shown(pattern)} also matches {shown(wrong)}; a pattern should match {kinds}")
    return paths


def _numbers(first: str, last: str) -> list[str]:
    if not 0 <= int(last) - int(first) < 1_000_000:
        raise DataError(
            f"the pattern {{{first}..{last}}} is not an increasing range of at most a million numbers; correct it"
        )
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
