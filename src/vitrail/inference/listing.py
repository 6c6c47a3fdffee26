"""What is to be predicted: files, folders, patterns, manifests, tar shards and lists, one image after another.

Nothing here grows with the number of images. Where the data for training is listed as a whole, to be shuffled and
divided, this is a stream: what cannot be read is an image with an error, and whoever lists an image twice gets two.
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
from vitrail.data.sources.builtin import digits
from vitrail.data.sources.columns import ManifestRow
from vitrail.data.sources.index_files import shown
from vitrail.data.sources.manifests import path_of, read_csv, read_in_words, read_jsonl
from vitrail.data.sources.opening import MANIFESTS, PACKED
from vitrail.data.sources.parquet import read_parquet
from vitrail.data.sources.patterns import RANGE, expand_pattern, is_pattern
from vitrail.data.sources.shards import CLASSES_FILE, LABEL_SUFFIXES
from vitrail.data.sources.source import SUFFIXES, reason_of
from vitrail.data.sources.tar import members
from vitrail.errors import DataError
from vitrail.inference.skipped import SkippedFiles
from vitrail.io import open_regular

STDIN = "-"
AT_ONCE = 65_536
"""How many names of a folder are held at a time."""
_SUFFIXES = frozenset(suffix.encode() for suffix in SUFFIXES)


def list_items(
    places: Sequence[str],
    *,
    stdin: BufferedReader | None = None,
    null: bool = False,
    skipped: SkippedFiles | None = None,
) -> Iterator[Item]:
    """Give the images of every place, in a fixed order. A place that is not there is refused at once.

    A place is a file, a folder (with all that lie inside it), a pattern, a manifest, a tar shard, the word digits, or
    "-": then `stdin` has a path on each line, or with `null` between NUL bytes. Files that lie among the images of a
    folder, a pattern or a shard and are not read are counted in `skipped`, once the iterator has passed them.
    """
    skipped = SkippedFiles() if skipped is None else skipped
    for place in places:
        _check_place(place)
    return (item for place in places for item in _items(place, stdin, null, skipped))


def read_stdin() -> BufferedReader | None:
    """Return what `list_items` reads paths from, if it is open."""
    return None if sys.stdin is None else cast("BufferedReader", sys.stdin.buffer)


def is_plain_file(place: str) -> bool:
    """Tell whether a place is one image, as far as its name tells."""
    return os.path.isfile(place) and not place.lower().endswith((".tar", *MANIFESTS))


def _check_place(place: str) -> None:
    if place == STDIN:
        return
    if is_url(os.fsencode(place)):
        raise DataError(f"{shown(place)} is {A_URL}")
    if os.path.lexists(place):
        if place.lower().endswith(PACKED) and not os.path.isdir(place):
            raise DataError(f"{shown(place)} is compressed; unpack it and give the result")
    elif is_pattern(place):
        if not _is_range(place) and next(_matches(place), None) is None:
            raise DataError(f"there is no image that {shown(place)} stands for; correct the pattern")
    elif place != "digits":
        raise DataError(
            f"there is no {shown(place)}; give files, folders, patterns, manifests ({', '.join(MANIFESTS)}) or tar "
            f"shards, or - to read paths from stdin"
        )


def _items(place: str, stdin: BufferedReader | None, null: bool, skipped: SkippedFiles) -> Iterator[Item]:
    path = os.fsencode(place)
    if place == STDIN:
        yield from _listed(_lines(stdin, null)) if stdin is not None else ()
    elif os.path.isdir(place):
        yield from _folder(path, skipped)
    elif os.path.lexists(place):
        yield from _file(path, skipped)
    elif place == "digits":
        source = digits()
        yield from (Item(b"digits/%d" % number, content=source.read(number)) for number in range(len(source)))
    else:
        paths = map(os.fsencode, expand_pattern(place)) if _is_range(place) else _matches(place, skipped)
        yield from (item for match in paths for item in _file(match, skipped))


def _file(path: bytes, skipped: SkippedFiles) -> Iterator[Item]:
    """Give the images that a file holds, by what its name ends with; or the file itself."""
    name = os.fsdecode(path).lower()
    if name.endswith(".tar"):
        yield from _tar(path, skipped)
    elif name.endswith(MANIFESTS):
        yield from _manifest(path)
    else:
        yield Item(path, path)


# ── folders and patterns ──


def _names(folder: bytes, wanted: Callable[["os.DirEntry[bytes]"], bool]) -> Iterator[bytes]:
    """Give names of a folder in their order; of very many only some are held, and the others looked up again."""
    last = b""
    while True:
        with os.scandir(folder or b".") as entries:
            found = heapq.nsmallest(AT_ONCE, (entry.name for entry in entries if entry.name > last and wanted(entry)))
        yield from found
        if len(found) < AT_ONCE:
            return
        last = found[-1]


def _is_image(name: bytes) -> bool:
    stem, _, suffix = name.rpartition(b".")
    return bool(stem) and not name.startswith(b".") and suffix.lower() in _SUFFIXES


def _is_folder(entry: "os.DirEntry[bytes]") -> bool:
    return not entry.name.startswith(b".") and entry.name != b"__MACOSX" and entry.is_dir()


def _is_image_file(entry: "os.DirEntry[bytes]") -> bool:
    return _is_image(entry.name) and not entry.is_dir()  # a link to nothing is an image with an error


def _is_other(entry: "os.DirEntry[bytes]") -> bool:
    return not (entry.name.startswith(b".") or _is_image(entry.name) or entry.is_dir())


def _folder(root: bytes, skipped: SkippedFiles) -> Iterator[Item]:
    """Give the images of a folder; or, as for training, of its shards or Parquet files, where it has nothing else."""
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
    """Count the files of a folder that are not images and whose paths do not end as those that are `used`."""
    for path in (os.path.join(folder, name) for name in _names(folder, _is_other)):
        if not path.lower().endswith(used):
            skipped.add(path, path)


def _walk(folder: bytes, around: frozenset[tuple[int, int]], skipped: SkippedFiles) -> Iterator[Item]:
    """Go through a folder and those inside it; meeting one of those `around` it again is a loop."""
    try:
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in around:
            yield Item(folder, error="a link to a folder that it lies in; remove the link")
            return
        for name in _names(folder, _is_image_file):
            path = os.path.join(folder, name)
            yield Item(path, path)
        _count_others(folder, skipped)
        for name in _names(folder, _is_folder):
            yield from _walk(os.path.join(folder, name), around | {here}, skipped)
    except OSError as fault:
        yield _unreadable(folder, fault)


def _unreadable(path: bytes, fault: OSError) -> Item:
    return Item(path, error=f"it cannot be read: {reason_of(fault)}")


def _is_range(place: str) -> bool:
    return RANGE.search(place) is not None


def _matches(pattern: str, skipped: SkippedFiles | None = None) -> Iterator[bytes]:
    """Give the images and tar shards that a pattern stands for, in order; `**` stands for folders at any depth."""
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
        # A link to a folder is not followed: it may lead back.
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


def _match_names(folder: bytes, wanted: Callable[["os.DirEntry[bytes]"], bool]) -> Iterator[bytes]:
    try:
        yield from _names(folder, wanted)
    except OSError:  # as in a shell, a pattern stands for what can be seen
        return


# ── files that list or hold images ──


def _tar(path: bytes, skipped: SkippedFiles) -> Iterator[Item]:
    """Give the files in a tar that end as images do; those that end as labels do are not counted as skipped."""
    try:
        with open_regular(path) as file:
            for member in members(os.fsdecode(path), file.fileno()):
                base = os.path.basename(member.name)
                if base.startswith(b".") or b"__MACOSX/" in member.name:
                    continue
                name = path + b"/" + member.name.lstrip(b"/")
                if not _is_image(base):
                    if base.rpartition(b".")[2].lower() not in LABEL_SUFFIXES:
                        skipped.add(name, path, member.start, member.size if member.is_file else 0)
                    continue
                wrong = None if member.is_file else "a link or a sparse file; write whole files to the tar"
                yield Item(name, path, member.start, member.size, error=wrong)
    except OSError as fault:
        yield _unreadable(path, fault)
    except DataError as fault:
        yield Item(path, error=str(fault))


def _manifest(path: bytes) -> Iterator[Item]:
    """Give the images of a manifest's rows; paths are relative to its folder, and labels are passed over."""
    place = os.fsdecode(path)
    unit = "row" if place.lower().endswith(".parquet") else "line"
    with read_in_words(place):
        for row in _rows(place):
            yield _row_item(row, path, unit)


def _rows(place: str) -> Iterable[ManifestRow]:
    if place.lower().endswith(".parquet"):
        return read_parquet(place)
    return (read_jsonl if place.lower().endswith(".jsonl") else read_csv)(place, True)[1]


def _row_item(row: ManifestRow, manifest: bytes, unit: str) -> Item:
    held = row.image.get("bytes") if isinstance(row.image, dict) else row.image
    name = manifest + f", {unit} {row.number}".encode()
    if isinstance(held, bytes):
        return Item(name, content=held)
    try:
        path = path_of(row, f"the {unit}")
    except DataError as fault:
        return Item(name, error=str(fault))
    if is_url(path):
        return Item(path, error=A_URL)
    file = os.path.join(os.path.dirname(manifest), path)
    return Item(file, file)


def _lines(stream: BufferedReader, null: bool) -> Iterator[bytes]:
    """Give the paths of a list."""
    rest = b""
    while piece := stream.read1(AT_ONCE):
        if not null and b"\0" in piece:
            raise DataError("there are NUL bytes in the list of paths; if they stand between the paths, add -0")
        *whole, rest = (rest + piece).split(b"\0" if null else b"\n")
        yield from whole if null else (line.removesuffix(b"\r") for line in whole)
    yield rest if null else rest.removesuffix(b"\r")


def _listed(paths: Iterable[bytes]) -> Iterator[Item]:
    """Give an image for each path, whatever is there: a list has as many rows as it has paths."""
    return (Item(path, path, error=A_URL if is_url(path) else None) for path in paths if path)
