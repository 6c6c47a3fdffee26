"""Output files of explanations: portable and unique names."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.checkpoints.writing import check_target
from vitrail.data.sources.source import SUFFIXES
from vitrail.errors import ConfigError
from vitrail.explanations.request import ExplanationRequest

LONGEST = 120
"""Bytes of an image's name to keep; file systems allow 255 in total."""
LONGEST_OPTION = 40
"""Characters of a class or token name to keep."""
_UNSAFE = re.compile(r"[^\w.+=@-]+")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)


class Outputs(NamedTuple):
    """The files of one image."""

    image: Path
    array: Path | None


def ending_of(request: ExplanationRequest, target: str | None, grid: str | None) -> str:
    """Return the options as a suffix, so that another layer, head or class is another file.

    >>> ending_of(ExplanationRequest("attention", layer=5, query="2,5"), None, "heads")
    'attention-layer5-2_5-heads'
    """
    chosen = [
        "" if request.layer is None else f"layer{request.layer}",
        "" if request.head is None else f"head{request.head}",
        "" if request.query is None else str(request.query),
        "" if request.fuse == "mean" else request.fuse,
        f"discard{request.discard:g}" if request.discard else "",
        target or "",
        grid or "",
    ]
    return "-".join([request.method, *(_UNSAFE.sub("_", one)[:LONGEST_OPTION] for one in chosen if one)])


def plan_outputs(names: Sequence[bytes], folder: Path, ending: str, *, arrays: bool, overwrite: bool) -> list[Outputs]:
    """Choose the files for images of these names; an existing file raises unless `overwrite` is set."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, but the output is a folder; choose another --out")
    taken: set[str] = set()
    planned = []
    for name in names:
        stem = base = safe_name(name)
        number = 1
        while stem.lower() in taken:  # some file systems ignore case
            number += 1
            stem = f"{base}-{number}"
        taken.add(stem.lower())
        array = folder / f"{stem}-{ending}.npy" if arrays else None
        planned.append(Outputs(folder / f"{stem}-{ending}.png", array))
    for file in (file for outputs in planned for file in outputs if file is not None):
        check_target(file, overwrite=overwrite, folder=False)
    return planned


def safe_name(name: bytes) -> str:
    """Turn an image's name into a portable file name.

    >>> safe_name(b"photos/my cat?.jpg")
    'my_cat_'
    """
    last = re.split(r"[/\\]", os.fsdecode(name).rstrip("/\\"))[-1]
    stem, dot, suffix = last.rpartition(".")
    kept = _UNSAFE.sub("_", stem if dot and suffix.lower() in SUFFIXES else last).lstrip(".")
    kept = kept.encode("utf-8", "ignore")[:LONGEST].decode("utf-8", "ignore")
    return f"_{kept}" if _RESERVED.fullmatch(kept) else kept or "image"
