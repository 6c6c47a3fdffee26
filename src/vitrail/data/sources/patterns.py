"""Patterns that stand for several shards: train-{000..127}.tar, train-*.parquet."""

import glob
import os
import re
from itertools import product

from vitrail.data.sources.index_files import shown
from vitrail.errors import DataError

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_pattern(place: str) -> bool:
    """Tell whether a name stands for several files."""
    return glob.has_magic(place) or RANGE.search(place) is not None


def expand_pattern(pattern: str) -> list[str]:
    """Return the files that a pattern such as "train-{000..127}.tar" or "train-*.parquet" stands for, in order."""
    pieces = RANGE.split(pattern)  # text, first, last, text, first, last, text
    ranges = [_numbers(first, last) for first, last in zip(pieces[1::3], pieces[2::3], strict=True)]
    paths: list[str] = []
    for numbers in product(*ranges):
        filled = "".join(text + number for text, number in zip(pieces[::3], [*numbers, ""], strict=True))
        found = sorted(glob.glob(filled)) if glob.has_magic(filled) else [filled] if os.path.exists(filled) else []
        if not found:
            what = (
                f"{shown(filled)}, which {shown(pattern)} asks for"
                if ranges
                else f"file that {shown(pattern)} stands for"
            )
            raise DataError(f"there is no {what}; correct the pattern")
        paths += found
    kind = ".parquet" if paths[0].lower().endswith(".parquet") else ".tar"
    wrong = next((path for path in paths if not path.lower().endswith(kind)), None)
    if wrong is not None:
        kinds = "tar shards, or for Parquet files, only"
        raise DataError(f"{shown(pattern)} stands for {shown(wrong)} among others; a pattern is for {kinds}")
    return paths


def _numbers(first: str, last: str) -> list[str]:
    if not 0 <= int(last) - int(first) < 1_000_000:
        raise DataError(
            f"the pattern {{{first}..{last}}} does not count upwards to a million at most; correct the pattern"
        )
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
