"""Detect what is at a place: a folder, shards, a manifest; on disk, or at a URL."""

import os
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from vitrail.data.remote.filesystems import is_remote, path_in
from vitrail.data.sources.source import SUFFIXES, reason_of
from vitrail.data.sources.splits import SPLITS
from vitrail.data.sources.tar import is_pattern
from vitrail.errors import DataError
from vitrail.text import printable_path

Kind = Literal["digits", "folder", "pattern", "shard", "manifest"]
MANIFESTS = (".csv", ".tsv", ".jsonl", ".parquet")
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4", ".zip")
_SHARD_OF_SPLIT = re.compile(r"(" + "|".join(SPLITS) + r")(?![a-z])", re.IGNORECASE)


def kind_of(place: str) -> Kind:
    """Return the kind of data at a place, by its name and by what exists on disk."""
    if is_remote(place):
        return "pattern" if is_pattern(place) else _kind_of_file(place)
    if not os.path.lexists(place):
        if place == "digits":
            return "digits"
        if not is_pattern(place):
            raise DataError(
                f"{printable_path(place)} does not exist; give a folder, a manifest, tar shards, or the word digits"
            )
        return "pattern"
    if os.path.isdir(place):
        return "folder"
    if not os.path.exists(place):
        raise DataError(f"{printable_path(place)} is a dangling link; correct the link")
    return _kind_of_file(place)


def _kind_of_file(place: str) -> Literal["shard", "manifest"]:
    lower = path_in(place).lower()
    if lower.endswith(PACKED):
        raise DataError(
            f"{printable_path(place)} is compressed, which prevents random access; unpack it and use the result"
        )
    if lower.endswith(".tar"):
        return "shard"
    if lower.endswith(MANIFESTS):
        return "manifest"
    if is_remote(place):
        raise DataError(
            f"{printable_path(place)} is not a file of a known type; give a manifest ({', '.join(MANIFESTS)}), tar "
            "shards, or a folder of shards with / at the end"
        )
    raise DataError(
        f"{printable_path(place)} is neither a folder nor a file of a known type; give a folder, "
        f"a manifest ({', '.join(MANIFESTS)}) or tar shards"
    )


def are_tables(paths: Sequence[str]) -> bool:
    """Return whether files are Parquet files, not tar shards."""
    return bool(paths) and path_in(paths[0]).lower().endswith(".parquet")


class Inside(NamedTuple):
    """The contents of a folder."""

    folders: list[str]
    shards: list[str]
    """Tar shards or Parquet files, sorted; empty if there are sub-folders."""


def look_into(place: str) -> Inside:
    """Return the sorted paths of the sub-folders and shards in a folder."""
    try:
        with os.scandir(place) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name != "__MACOSX"]
            folders = sorted(entry.path for entry in seen if entry.is_dir())
    except OSError as fault:
        raise DataError(f"{printable_path(place)} cannot be read: {reason_of(fault)}") from None
    tars, tables = (sorted(one.path for one in seen if one.name.lower().endswith(end)) for end in (".tar", ".parquet"))
    if folders:
        return Inside(folders, [])
    if tars and tables:
        raise DataError(
            f"{printable_path(place)} has both tar shards and Parquet files; select one kind with a pattern"
        )
    return Inside([], tars or tables)


def split_folders(place: str, folders: list[str]) -> dict[str, str]:
    """Return the folders of the splits, if there are any: train with another split, or train alone."""
    splits: dict[str, str] = {}
    for folder in folders:
        split = SPLITS.get(os.path.basename(folder).lower())
        if split is not None and split in splits:
            both = f"{printable_path(os.path.basename(splits[split]))}/ and {printable_path(os.path.basename(folder))}/"
            raise DataError(f"{printable_path(place)} has {both}, which are the same split; keep one")
        if split is not None:
            splits[split] = folder
    if "train" not in splits or (len(splits) == 1 and len(folders) > 1):
        return {}
    ignored = [folder for folder in folders if folder not in splits.values() and _holds_images(folder)]
    others = [printable_path(os.path.basename(folder)) for folder in ignored]
    if others:
        raise DataError(
            f"{printable_path(place)} has the splits {', '.join(splits)}, but also images in {', '.join(others)}, "
            "which would "
            f"be ignored; move them away, or into one of the splits"
        )
    return splits


def _holds_images(folder: str) -> bool:
    """Return whether a folder contains an image, at any depth."""
    return any(name.rpartition(".")[2].lower() in SUFFIXES for _, _, names in os.walk(folder) for name in names)


def group_shards(tars: list[str]) -> dict[str, list[str]]:
    """Group shards by the split their names start with ("val-0001.tar"), if all do and some are for training."""
    groups: dict[str, list[str]] = {}
    for tar in tars:
        match = _SHARD_OF_SPLIT.match(os.path.basename(path_in(tar)))
        groups.setdefault(SPLITS[match[1].lower()] if match else "", []).append(tar)
    return groups if "train" in groups and "" not in groups else {"train": tars}
