"""The classes of pixels: the values in masks, and classes.txt, which names them."""

import os
import re
from collections.abc import Iterable, Sequence

import numpy as np

from vitrail.data.sources.index_files import Names
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.mask_scan import MaskScan
from vitrail.data.sources.masks import IGNORED_PIXEL, LARGEST_VALUE, MOST_CLASSES, Masked
from vitrail.data.sources.source import Source, reason_of
from vitrail.data.sources.targets import Labelling, Targets
from vitrail.errors import ConfigError, DataError
from vitrail.text import plural, printable_path

FILE = "classes.txt"
REASON = "every image has a mask"
_NUMBERED = re.compile(r"(\d{1,5})\s*[\s,;:=]\s*(\S.*)")


def masked(
    source: Source, files: Names, scan: MaskScan, labelling: Labelling, names_in: Sequence[str],
    place: str, faults: Faults | None,
) -> Masked:  # fmt: skip
    """Return images with their masks, all of which are usable. `names_in` are the folders that may hold classes.txt."""
    if not len(source):
        report_faults([*scan.faults, f"{printable_path(place)} has no image with a mask; add some"], place, None)
    check_ignored(labelling.ignore)
    ignored = {IGNORED_PIXEL, *labelling.ignore}
    named = class_names(names_in)
    wrong = list(scan.faults)
    strange = [] if named is None else [value for value in scan.values if value not in {*named, *ignored}]
    for value in strange:
        pixels = scan.counts[:, scan.values.index(value)]
        masks, example = int((pixels > 0).sum()), printable_path(files[int(np.argmax(pixels))])
        more = f" (and {plural(masks - 1, 'other mask')})" if masks > 1 else ""
        wrong.append(
            f"the mask {example}{more} has the value {value}, which {FILE} does not name; name it there, or leave its "
            f"pixels out with --set data.ignore=[{value}]"
        )
    report_faults(wrong, printable_path(place), faults)
    values = [value for value in (scan.values if named is None else sorted(named)) if value not in ignored]
    if len(values) > MOST_CLASSES:
        raise DataError(
            f"the masks of {printable_path(place)} have {len(values):,} different values, more than {MOST_CLASSES} "
            "classes; write the class of each pixel, not the number of an object"
        )
    names = tuple(str(value) if named is None else named[value] for value in values)
    columns = {value: place for place, value in enumerate(scan.values)}
    counts = np.zeros((len(source), len(values)), np.int64)
    for number, value in enumerate(values):
        if value in columns:
            counts[:, number] = scan.counts[:, columns[value]]
    targets = Targets("masks", names, counts, REASON if labelling.kind is None else "")
    return Masked(
        source, files, tuple(values), tuple(sorted({*labelling.ignore, *strange})), targets,
        getattr(source, "split_of", None),
    )  # fmt: skip


def check_ignored(values: Iterable[int]) -> None:
    """Raise for values that no mask can have."""
    if odd := [value for value in values if not 0 <= value <= LARGEST_VALUE]:
        raise ConfigError(f"data.ignore has {odd[0]}; the values of masks are 0 to {LARGEST_VALUE}")


def class_names(folders: Sequence[str]) -> dict[int, str] | None:
    """Return the names of values, from classes.txt in the first of the folders that has one; None if none does."""
    for folder in folders:
        path = os.path.join(folder, FILE)
        if os.path.isfile(path):
            return _parsed(path)
    return None


def _parsed(path: str) -> dict[int, str]:
    """Read lines "VALUE NAME", or names of the values from 0."""
    name = printable_path(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file]
    except UnicodeDecodeError:
        raise DataError(f"{name} is not UTF-8; save it as UTF-8") from None
    except OSError as fault:
        raise DataError(f"{name} cannot be read: {reason_of(fault)}") from None
    while lines and not lines[-1]:
        lines.pop()
    numbered = [_NUMBERED.fullmatch(line) for line in lines if line]
    if not numbered:
        raise DataError(f"{name} is empty; write a line such as 0 background for each value, or remove it")
    pairs = [(int(match[1]), match[2]) for match in numbered if match is not None]
    if len(pairs) < len(numbered):
        if "" in lines:
            raise DataError(f"{name} has an empty line {lines.index('') + 1}; write the name of that value")
        pairs = list(enumerate(lines))
    for what, items in (("names the value", [value for value, _ in pairs]), ("has the name", [n for _, n in pairs])):
        twice = next((item for place, item in enumerate(items) if item in items[:place]), None)
        if twice is not None:
            raise DataError(f"{name} {what} {twice!r} twice; use each once")
    if (largest := max(value for value, _ in pairs)) > LARGEST_VALUE:
        raise DataError(f"{name} names the value {largest}; the values of masks are 0 to {LARGEST_VALUE}")
    return dict(pairs)
