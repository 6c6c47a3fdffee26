"""List the images to predict, lazily: files, folders, patterns, manifests, tar shards and lists of paths.

Memory does not grow with the number of images. Unlike training data, which is listed as a whole to be shuffled and
split, this is a stream: an unreadable image becomes an item with an error, and an image listed twice yields two.
"""

import fnmatch
import glob
import heapq
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from typing import cast

from vitrail.data.inputs import A_URL, Item, is_url
from vitrail.data.remote.filesystems import is_remote, path_in, public_url
from vitrail.data.remote.stored_files import forget_versions, open_stored
from vitrail.data.sources.columns import ManifestRow
from vitrail.data.sources.detection import MANIFESTS, PACKED
from vitrail.data.sources.given import saved_data
from vitrail.data.sources.huggingface import is_saved
from vitrail.data.sources.items import read_items
from vitrail.data.sources.manifests import listed_path, path_of, read_csv, read_in_words, read_jsonl
from vitrail.data.sources.parquet import read_parquet
from vitrail.data.sources.shards import CLASSES_FILE, LABEL_SUFFIXES
from vitrail.data.sources.source import SUFFIXES, digits, reason_of
from vitrail.data.sources.tar import RANGE, expand_pattern, is_pattern, members
from vitrail.errors import DataError, StorageError
from vitrail.inference.skipped import SkippedFiles
from vitrail.text import printable_path

STDIN = "-"
DIGITS = b"digits"
"""The location of the digits that ship with the package."""
EMPTY_STDIN = "there are no paths on stdin; pipe them in, one per line, or give files or folders instead of -"
AT_ONCE = 65_536
"""Number of a folder's names held in memory at a time."""
IMAGES_OF_MASKS = {b"masks": b"images", b"Masks": b"Images"}
"""Folders of masks, and the folder of their images next to them; masks are not images to predict."""
_SUFFIXES = frozenset(suffix.encode() for suffix in SUFFIXES)


def list_items(
    places: Sequence[str],
    *,
    stdin: BufferedReader | None = None,
    null: bool = False,
    skipped: SkippedFiles | None = None,
) -> Iterator[Item]:
    """Iterate over the images of every place, in a fixed order. A place that does not exist raises immediately.

    A place is a file, a folder (searched recursively), a pattern, a manifest, a tar shard, the word digits, or "-":
    then `stdin` has one path per line, or NUL-separated paths with `null`. Other files among the images of a folder,
    a pattern or a shard are counted in `skipped` as the iterator passes them.
    """
    forget_versions()
    skipped = SkippedFiles() if skipped is None else skipped
    for place in places:
        _check_place(place)
    return (item for place in places for item in _items(place, stdin, null, skipped))


def read_stdin() -> BufferedReader | None:
    """Return the stream that `list_items` reads paths from, if it is open."""
    return None if sys.stdin is None else cast("BufferedReader", sys.stdin.buffer)


def nothing_listed(places: Sequence[str], skipped: SkippedFiles) -> DataError:
    """Return the error for places without any image."""
    if set(places) == {STDIN}:
        return DataError(EMPTY_STDIN)
    endings = ", ".join(sorted(SUFFIXES))
    return DataError("; ".join([f"no images found; image files end in {endings}", *skipped.messages()]))


def is_plain_file(place: str) -> bool:
    """Return whether a place is a single image, judging by its name."""
    return os.path.isfile(place) and not place.lower().endswith((".tar", *MANIFESTS))


def _check_place(place: str) -> None:
    if place == STDIN:
        return
    if is_url(os.fsencode(place)) and not is_remote(place):
        raise DataError(f"{printable_path(place)} is {A_URL}")
    if is_remote(place):
        if path_in(place).lower().endswith(PACKED):
            raise DataError(f"{printable_path(place)} is compressed; unpack it and give the result")
    elif os.path.lexists(place):
        if place.lower().endswith(PACKED) and not os.path.isdir(place):
            raise DataError(f"{printable_path(place)} is compressed; unpack it and give the result")
    elif is_pattern(place):
        if not _is_range(place) and next(_matches(place), None) is None:
            raise DataError(f"no image matches {printable_path(place)}; correct the pattern")
    elif place != "digits":
        raise DataError(
            f"{printable_path(place)} does not exist; give files, folders, patterns, manifests "
            f"({', '.join(MANIFESTS)}) or tar "
            f"shards, or - to read paths from stdin"
        )


def _items(place: str, stdin: BufferedReader | None, null: bool, skipped: SkippedFiles) -> Iterator[Item]:
    path = os.fsencode(place)
    if place == STDIN:
        yield from _listed(_lines(stdin, null)) if stdin is not None else ()
    elif is_saved(place):
        yield from read_items(list(saved_data(place).splits.values()), f"{place}, ")
    elif os.path.isdir(place):
        yield from _folder(path, skipped)
    elif os.path.lexists(place) or (is_remote(place) and not is_pattern(place)):
        yield from _file(path, skipped)
    elif place == "digits":
        source = digits()
        for number in range(len(source)):
            yield Item(b"digits/%d" % number, DIGITS, number, content=source.read(number))
    else:
        paths = map(os.fsencode, expand_pattern(place)) if _is_listed(place) else _matches(place, skipped)
        yield from (item for match in paths for item in _file(match, skipped))


def _file(path: bytes, skipped: SkippedFiles) -> Iterator[Item]:
    """Yield the images in a file, by its suffix; or the file itself."""
    name = path_in(os.fsdecode(path)).lower()
    if name.endswith(".tar"):
        yield from _tar(path, skipped)
    elif name.endswith(MANIFESTS):
        yield from _manifest(path)
    else:
        yield Item(path, path)


# ── folders and patterns ──


def _names(folder: bytes, keep: Callable[["os.DirEntry[bytes]"], bool]) -> Iterator[bytes]:
    """Yield names of a folder in order; of very many, only some are held at a time and the folder is scanned again."""
    last = b""
    while True:
        with os.scandir(folder or b".") as entries:
            names = heapq.nsmallest(AT_ONCE, (entry.name for entry in entries if entry.name > last and keep(entry)))
        yield from names
        if len(names) < AT_ONCE:
            return
        last = names[-1]


def _is_image(name: bytes) -> bool:
    stem, _, suffix = name.rpartition(b".")
    return bool(stem) and not name.startswith(b".") and suffix.lower() in _SUFFIXES


def _is_folder(entry: "os.DirEntry[bytes]") -> bool:
    return not entry.name.startswith(b".") and entry.name != b"__MACOSX" and entry.is_dir()


def _is_image_file(entry: "os.DirEntry[bytes]") -> bool:
    return _is_image(entry.name) and not entry.is_dir()  # a dangling link is an image with an error


def _is_other(entry: "os.DirEntry[bytes]") -> bool:
    return not (entry.name.startswith(b".") or _is_image(entry.name) or entry.is_dir())


def _folder(root: bytes, skipped: SkippedFiles) -> Iterator[Item]:
    """Yield the images of a folder; or, as in training, of its shards or Parquet files if it has nothing else."""
    try:
        with os.scandir(root) as entries:
            others = any(_is_folder(entry) or _is_image_file(entry) for entry in entries)
    except OSError as fault:
        yield _unreadable(root, fault)
        return
    if others:
        yield from _walk(root, frozenset(), skipped)
    else:
        ends = (b".tar", b".parquet")
        shards = _names(root, lambda entry: entry.name.lower().endswith(ends) and not entry.name.startswith(b"."))
        yield from (item for name in shards for item in _file(os.path.join(root, name), skipped))
        _count_others(root, skipped, (*ends, b"/" + CLASSES_FILE.encode()))


def _count_others(folder: bytes, skipped: SkippedFiles, used: tuple[bytes, ...] = ()) -> None:
    """Count the files of a folder that are not images and do not end in one of the `used` suffixes."""
    for path in (os.path.join(folder, name) for name in _names(folder, _is_other)):
        if not path.lower().endswith(used):
            skipped.add(path, path)


def _walk(folder: bytes, around: frozenset[tuple[int, int]], skipped: SkippedFiles) -> Iterator[Item]:
    """Walk a folder recursively; meeting one of its parents (`around`) again is a loop."""
    try:
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in around:
            yield Item(folder, error="a link to a folder that contains it; remove the link")
            return
        for name in _names(folder, _is_image_file):
            path = os.path.join(folder, name)
            yield Item(path, path)
        _count_others(folder, skipped)
        for name in _names(folder, _is_folder):
            images = IMAGES_OF_MASKS.get(name)
            if images is not None and os.path.isdir(os.path.join(folder, images)):
                continue
            yield from _walk(os.path.join(folder, name), around | {here}, skipped)
    except OSError as fault:
        yield _unreadable(folder, fault)


def _unreadable(path: bytes, fault: OSError) -> Item:
    return Item(path, error=f"it cannot be read: {reason_of(fault)}")


def _is_range(place: str) -> bool:
    return RANGE.search(place) is not None


def _is_listed(place: str) -> bool:
    return _is_range(place) or is_remote(place)


def _matches(pattern: str, skipped: SkippedFiles | None = None) -> Iterator[bytes]:
    """Yield the images and tar shards that match a pattern, in order; `**` matches folders at any depth."""
    parts = os.fsencode(pattern).split(b"/")
    if parts[-1] == b"**":
        parts.append(b"*")
    start = b"/" if not parts[0] else b""
    for path in _match(start, [part for part in parts if part]):
        if _is_image(os.path.basename(path)) or path.lower().endswith((b".tar", b".parquet")):
            yield path
        elif skipped is not None and not os.path.basename(path).startswith(b"."):
            skipped.add(path, path)


def _match(folder: bytes, parts: list[bytes]) -> Iterator[bytes]:
    if not parts:
        if not os.path.isdir(folder):
            yield folder
        return
    first, *rest = parts
    if first == b"**":
        yield from _match(folder, rest)
        inner = _match_names(folder, lambda entry: not entry.name.startswith(b".") and entry.is_dir())
        # Links to folders are not followed: they may form a loop.
        yield from (path for name in inner for path in _below(os.path.join(folder, name), parts))
    elif glob.has_magic(first):
        hidden = first.startswith(b".")
        fits = re.compile(fnmatch.translate(os.fsdecode(first)))
        names = _match_names(
            folder,
            lambda entry: (
                (hidden or not entry.name.startswith(b".")) and fits.match(os.fsdecode(entry.name)) is not None
            ),
        )
        yield from (path for name in names for path in _match(os.path.join(folder, name), rest))
    elif os.path.lexists(os.path.join(folder, first)):
        yield from _match(os.path.join(folder, first), rest)


def _below(folder: bytes, parts: list[bytes]) -> Iterator[bytes]:
    return iter(()) if os.path.islink(folder) else _match(folder, parts)


def _match_names(folder: bytes, keep: Callable[["os.DirEntry[bytes]"], bool]) -> Iterator[bytes]:
    try:
        yield from _names(folder, keep)
    except OSError:  # as in a shell, a pattern matches what is visible
        return


# ── files that list or hold images ──


def _tar(path: bytes, skipped: SkippedFiles) -> Iterator[Item]:
    """Yield the files in a tar with an image suffix; label files are not counted as skipped."""
    shown = os.fsencode(public_url(os.fsdecode(path)))
    try:
        with open_stored(path, sequential=True) as file:
            for member in members(os.fsdecode(path), file):
                base = os.path.basename(member.name)
                if base.startswith(b".") or b"__MACOSX/" in member.name:
                    continue
                name = shown + b"/" + member.name.lstrip(b"/")
                if not _is_image(base):
                    if base.rpartition(b".")[2].lower() not in LABEL_SUFFIXES:
                        skipped.add(name, path, member.start, member.size if member.is_file else 0)
                    continue
                wrong = None if member.is_file else "a link or a sparse file; write whole files to the tar"
                yield Item(name, path, member.start, member.size, error=wrong)
    except OSError as fault:
        yield _unreadable(path, fault)
    except StorageError:
        raise
    except DataError as fault:
        yield Item(path, error=str(fault))


def _manifest(path: bytes) -> Iterator[Item]:
    """Yield the images of a manifest's rows; paths are relative to its folder, and labels are ignored."""
    place = os.fsdecode(path)
    unit = "row" if path_in(place).lower().endswith(".parquet") else "line"
    with read_in_words(place):
        for row in _rows(place):
            yield _row_item(row, path, unit)


def _rows(place: str) -> Iterable[ManifestRow]:
    lower = path_in(place).lower()
    if lower.endswith(".parquet"):
        return read_parquet(place)
    return (read_jsonl if lower.endswith(".jsonl") else read_csv)(place, unlabelled=True)[1]


def _row_item(row: ManifestRow, manifest: bytes, unit: str) -> Item:
    held = row.image.get("bytes") if isinstance(row.image, dict) else row.image
    name = os.fsencode(public_url(os.fsdecode(manifest))) + f", {unit} {row.number}".encode()
    if isinstance(held, bytes):
        return Item(name, manifest, row.number - 1, content=held)
    try:
        path = path_of(row, f"the {unit}")
        file = listed_path(os.fsdecode(manifest), path)
    except DataError as fault:
        return Item(name, error=str(fault))
    if is_url(path) and not is_remote(path):
        return Item(path, error=A_URL)
    return Item(file, file)


def _lines(stream: BufferedReader, null: bool) -> Iterator[bytes]:
    """Yield the paths of a list."""
    rest = b""
    while piece := stream.read1(AT_ONCE):
        if not null and b"\0" in piece:
            raise DataError("the list of paths contains NUL bytes; if they separate the paths, add -0")
        *complete, rest = (rest + piece).split(b"\0" if null else b"\n")
        yield from complete if null else (line.removesuffix(b"\r") for line in complete)
    yield rest if null else rest.removesuffix(b"\r")


def _listed(paths: Iterable[bytes]) -> Iterator[Item]:
    """Yield an item per path, readable or not: a list has as many rows as paths."""
    return (Item(path, path, error=_unsupported(path)) for path in paths if path)


def _unsupported(path: bytes) -> str | None:
    return A_URL if is_url(path) and not is_remote(path) else None
