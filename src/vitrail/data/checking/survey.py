"""A look at every picture: its size, its kind, its content, and why it cannot be decoded. In parallel, and remembered.

What is found out about a picture is one row of an array, so that a million pictures take little memory; the rows are
kept on disk by the picture's name and stamp, so that a second look decodes only what is new or has changed.
"""

import hashlib
import io
import json
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from vitrail._version import __version__
from vitrail.data.decode import open_picture
from vitrail.data.sources.listing import YOUNG_NS, index_file, load_index, now_ns, save_index
from vitrail.data.sources.source import Pixels, Source
from vitrail.errors import DataError

Seen = Callable[[int, int], None]
"""Called now and then with the number of pictures looked at so far, and the number of all."""
Rows = NDArray[Any]
ROW = np.dtype(
    [
        ("state", "u1"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("bytes", "<i8"),
        ("content", "<u8", (2,)),
        ("format", "S8"),
        ("mode", "S16"),
    ]
)
"""What is known of a picture. `content` is a hash of the file, or of the pixels where there is no file."""
FINE, DAMAGED, UNREAD, PENDING = range(4)
"""States: it can be decoded; it was read but cannot be decoded; it cannot even be read; nobody has looked yet."""
CHUNK = 16
"""Pictures given to a process at once: few enough that the bar moves and Ctrl-C is answered at once."""
IN_MEMORY = b"array"
"""The format of pictures without a file."""
_MODES = {
    "1": "black and white",
    "L": "grey",
    "P": "palette",
    "RGB": "colour",
    "YCbCr": "colour",
    "LAB": "colour",
    "HSV": "colour",
    "CMYK": "CMYK",
    "F": "fractions",
}
_CHANNELS = {1: "grey", 3: "colour", 4: "alpha"}


class Kind(NamedTuple):
    """How a picture is stored."""

    format: str
    mode: str
    """In words: colour, grey, alpha, palette, CMYK, 16-bit, …"""
    channels: int
    """How many channels its pixels are to be decoded to."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out about some pictures of some sources, which are counted through in order."""

    sources: dict[str, Source]
    """By the name of the part."""
    indices: NDArray[np.int64]
    """Which pictures were looked at, counted through all sources."""
    rows: Rows
    faults: dict[int, str]
    """Why pictures cannot be used, by their row."""
    decoded: bool
    """Whether pictures were decoded, or only their headers read."""


def kind_of(stored: bytes | Pixels) -> Kind:
    """Tell how a picture is stored, from its header."""
    name = IN_MEMORY.decode()
    if isinstance(stored, bytes) and stored[:6] == b"\x93NUMPY":
        stored, name = np.load(io.BytesIO(stored), allow_pickle=False), "NumPy"
    if isinstance(stored, np.ndarray):
        channels = stored.shape[2] if stored.ndim == 3 else 1
        return Kind(name, _CHANNELS.get(channels, f"{channels} channels"), channels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(stored)) as picture:
                found, mode, transparent = str(picture.format), picture.mode, "transparency" in picture.info
    except (OSError, ValueError, SyntaxError):  # another decoder may read it nevertheless
        return Kind("unknown", "unknown", 3)
    # Pillow calls a 16-bit colour PNG "RGB"; its header tells.
    if mode.startswith("I") or (found == "PNG" and stored[24:25] == b"\x10"):
        return Kind(found, "16-bit", 3)
    if transparent or mode.lower() in ("la", "pa", "rgba"):
        return Kind(found, "alpha", 3)
    return Kind(found, _MODES.get(mode, mode), 3)


def survey(
    sources: Mapping[str, Source],
    *,
    indices: NDArray[np.int64] | None = None,
    workers: int = 0,
    on_progress: Seen | None = None,
    cache: bool = True,
) -> Survey:
    """Decode every picture, or those with the given indices, by `workers` processes; 0 does it in this one."""
    indices = np.arange(sum(map(len, sources.values()))) if indices is None else indices
    found = Survey(dict(sources), indices, np.zeros(len(indices), ROW), {}, decoded=True)
    found.rows["state"] = PENDING
    keys, path = _keys(found) if cache else (np.zeros(len(indices), np.uint64), None)
    if path is not None:
        _remember(found, keys, path)
    todo = np.flatnonzero(found.rows["state"] == PENDING)
    done = len(indices) - len(todo)
    try:
        for chunk, (rows, faults) in _looks(found, todo, workers):
            found.rows[chunk] = rows
            found.faults.update({int(chunk[place]): reason for place, reason in faults.items()})
            done += len(chunk)
            if on_progress is not None:
                on_progress(done, len(indices))
    finally:  # also what was done before Ctrl-C need not be done again
        if path is not None and len(todo):
            _keep(found, keys, path)
    return found


def survey_headers(sources: Mapping[str, Source], indices: NDArray[np.int64], stop: Callable[[], bool]) -> Survey:
    """Read the headers of pictures, until `stop` says so."""
    each = list(sources.values())
    rows, faults = np.zeros(len(indices), ROW), {}
    done = 0
    for index in indices.tolist():
        if done and stop():
            break
        rows[done], reason = _look(*_place(each, index), decode=False)
        if reason is not None:
            faults[done] = reason
        done += 1
    return Survey(dict(sources), indices[:done], rows[:done], faults, decoded=False)


# ── looking ──

_Chunk = NDArray[np.int64]
_Looked = tuple[Rows, dict[int, str]]
_worker_sources: list[Source] = []
"""In a worker process, the sources it reads: handed over once, not with every chunk."""


def _looks(found: Survey, todo: NDArray[np.int64], workers: int) -> Iterator[tuple[_Chunk, _Looked]]:
    """Look at the pictures of some rows, chunk by chunk and in order."""
    sources = list(found.sources.values())
    chunks = [todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK)]
    if min(workers, len(chunks)) < 2:
        yield from ((chunk, _look_at(sources, found.indices[chunk])) for chunk in chunks)
        return
    workers = min(workers, len(chunks))
    waiting: deque[tuple[_Chunk, Future[_Looked]]] = deque()
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(sources,))
    try:
        for chunk in chunks:
            with _interrupts_held_back():
                waiting.append((chunk, pool.submit(_look_in_worker, found.indices[chunk])))
            if len(waiting) > 3 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool:
        raise DataError(
            "a process that decodes pictures ended; this is most often a lack of memory: use fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait. A process made meanwhile lets it wait too, until it has said what Ctrl-C shall do to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(sources: list[Source]) -> None:
    # Ctrl-C reaches every process of the terminal: a worker just ends, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _worker_sources[:] = sources


def _look_in_worker(indices: NDArray[np.int64]) -> _Looked:
    return _look_at(_worker_sources, indices)


def _look_at(sources: list[Source], indices: NDArray[np.int64]) -> _Looked:
    rows, faults = np.zeros(len(indices), ROW), {}
    for place, index in enumerate(indices.tolist()):
        rows[place], reason = _look(*_place(sources, index), decode=True)
        if reason is not None:
            faults[place] = reason
    return rows, faults


def _place(sources: list[Source], index: int) -> tuple[Source, int]:
    """Return the source that a picture lies in, and its number there."""
    for source in sources:
        if index < len(source):
            return source, index
        index -= len(source)
    raise IndexError("there are not so many pictures")


def _look(source: Source, index: int, *, decode: bool) -> tuple[tuple[Any, ...], str | None]:
    """Return the row of one picture, and why it cannot be used."""
    try:
        stored = source.read(index)
    except DataError as error:
        cause = str(error).removeprefix(source.name(index)).removeprefix(" cannot be read: ").strip()
        return (UNREAD, 0, 0, 0, (0, 0), b"", b""), cause
    size = stored.nbytes if isinstance(stored, np.ndarray) else len(stored)
    content = _hash(stored) if decode else (0, 0)
    height, width, kind = 0, 0, Kind("", "", 3)
    reason: str | None = None
    try:
        picture = open_picture(stored)
        height, width, kind = picture.height, picture.width, kind_of(stored)
        if decode:
            picture.pixels(kind.channels)
    except DataError as error:
        reason = str(error)
    except Exception as error:  # a check goes on, whatever a damaged file does to a decoder
        reason = " ".join(f"the decoder failed with {type(error).__name__}: {error}".split())[:200]
    state = FINE if reason is None else DAMAGED
    return (state, width, height, size, content, kind.format[:8].encode(), kind.mode[:16].encode()), reason


def _hash(stored: bytes | Pixels) -> tuple[int, int]:
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(stored, np.ndarray):
        digest.update(f"{stored.dtype.str} {stored.shape}".encode())
        stored = stored.tobytes()
    digest.update(stored)
    first, second = np.frombuffer(digest.digest(), "<u8").tolist()
    return first, second


# ── remembering ──


def _keys(found: Survey) -> tuple[NDArray[np.uint64], Path]:
    """Return a number for each picture by its name and stamp, 0 where there is none, and the file to keep rows in."""
    sources, keys = list(found.sources.values()), np.zeros(len(found.indices), np.uint64)
    young = now_ns() - YOUNG_NS
    first, last = "", ""
    for row, index in enumerate(found.indices.tolist()):
        source, number = _place(sources, index)
        name = source.name(number)
        first, last = (min(first, name), max(last, name)) if row else (name, name)
        try:
            size, changed = source.stamp(number)
        except DataError:
            continue
        if changed < young:  # else it may change once more and keep its stamp
            digest = hashlib.blake2b(f"{name}\0{size}\0{changed}".encode(errors="surrogateescape"), digest_size=8)
            keys[row] = int.from_bytes(digest.digest(), "little")
    # What the first and the last name have in common, all have: the folder, which stays when pictures are added.
    place = os.path.dirname(os.path.commonprefix([first, last]))  # noqa: RUF071 - dirname cuts back to whole names
    return keys, index_file(f"check {__version__} {PIL.__version__}", [place])


def _remember(found: Survey, keys: NDArray[np.uint64], path: Path) -> None:
    """Fill in the rows that are known from an earlier look."""
    arrays = load_index(path, ("keys", "rows", "faults"))
    if arrays is None:
        return
    try:
        known, rows, faults = arrays["keys"], arrays["rows"], json.loads(arrays["faults"].tobytes())
        if rows.dtype != ROW or known.dtype != np.uint64 or len(known) != len(rows) or not len(known):
            return
        reasons = {int(key): str(reason) for key, reason in faults.items()}
    except (ValueError, AttributeError):  # damaged, or of another version: look again
        return
    order = np.argsort(known)
    places = order[np.minimum(np.searchsorted(known, keys, sorter=order), len(known) - 1)]
    same = (known[places] == keys) & (keys != 0)
    found.rows[same] = rows[places[same]]
    for row in np.flatnonzero(same & (found.rows["state"] == DAMAGED)).tolist():
        found.faults[row] = reasons.get(int(keys[row]), "it cannot be decoded")


def _keep(found: Survey, keys: NDArray[np.uint64], path: Path) -> None:
    """Write rows for `_remember`: not those of unreadable files, as permissions change without a stamp."""
    states = found.rows["state"]
    kept = (keys != 0) & ((states == FINE) | (states == DAMAGED)) & (found.rows["format"] != IN_MEMORY)
    if kept.any():
        faults = {str(keys[row]): reason for row, reason in found.faults.items() if kept[row]}
        text = np.frombuffer(json.dumps(faults).encode(), np.uint8)
        save_index(path, {"keys": keys[kept], "rows": found.rows[kept], "faults": text})
