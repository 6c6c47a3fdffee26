"""A look at every image: its size, its kind, its content, and why it cannot be decoded. In parallel, and remembered.

What is found out about an image is one row of an array, so that a million images take little memory; the rows are
kept on disk by the content of the file, so that a second look decodes only what is new or has changed. It reads every
file again: neither a file that can no longer be read nor a changed bit hides behind what was seen before.
"""

import io
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
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from vitrail._version import __version__
from vitrail.data.checking.rows import (
    COMPARED,
    DAMAGED,
    FINE,
    IN_MEMORY,
    NO_PREVIOUS_SURVEY,
    PENDING,
    ROW,
    UNREAD,
    PreviousSurvey,
    SurveyRows,
    keep,
    remembered,
)
from vitrail.data.decode import open_image
from vitrail.data.file_types import HEAD, reads_heic, sniff
from vitrail.data.sources.contents import content_hash
from vitrail.data.sources.index_files import index_file
from vitrail.data.sources.source import Pixels, Source
from vitrail.errors import DataError

SurveyProgress = Callable[[int, int], None]
"""Called now and then with the number of images looked at so far, and the number of all."""
FLAT = 2
"""By so much may the numbers of a channel differ in an image that shows nothing: JPEG rounds."""
CHUNK = 16
"""Images given to a process at once: few enough that the bar moves and Ctrl-C is answered at once."""
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


class StoredFormat(NamedTuple):
    """How an image is stored."""

    format: str
    mode: str
    """In words: colour, grey, alpha, palette, CMYK, 16-bit, …"""
    channels: int
    """How many channels its pixels are to be decoded to."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out about some images of some sources, which are counted through in order."""

    sources: dict[str, Source]
    """By the name of the split."""
    indices: NDArray[np.int64]
    """Which images were looked at, counted through all sources."""
    rows: SurveyRows
    faults: dict[int, str]
    """Why images cannot be used, by their row."""
    decoded: bool
    """Whether images were decoded, or only their headers read."""


def stored_format(stored: bytes | Pixels) -> StoredFormat:
    """Tell how an image is stored, from its header."""
    name = IN_MEMORY.decode()
    if isinstance(stored, bytes) and stored[:6] == b"\x93NUMPY":
        stored, name = np.load(io.BytesIO(stored), allow_pickle=False), "NumPy"
    if isinstance(stored, np.ndarray):
        channels = stored.shape[2] if stored.ndim == 3 else 1
        return StoredFormat(name, _CHANNELS.get(channels, f"{channels} channels"), channels)
    if sniff(stored[:HEAD]) == "HEIC":
        reads_heic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(stored)) as image:
                found, mode, transparent = str(image.format), image.mode, "transparency" in image.info
    except (OSError, ValueError, SyntaxError):  # another decoder may read it nevertheless
        return StoredFormat("unknown", "unknown", 3)
    # Pillow calls a 16-bit colour PNG "RGB"; its header tells.
    if mode.startswith("I") or (found == "PNG" and stored[24:25] == b"\x10"):
        return StoredFormat(found, "16-bit", 3)
    if transparent or mode.lower() in ("la", "pa", "rgba"):
        return StoredFormat(found, "alpha", 3)
    return StoredFormat(found, _MODES.get(mode, mode), 3)


def survey(
    sources: Mapping[str, Source],
    *,
    indices: NDArray[np.int64] | None = None,
    workers: int = 0,
    on_progress: SurveyProgress | None = None,
    cache: bool = True,
) -> Survey:
    """Decode every image, or those with the given indices, by `workers` processes; 0 does it in this one."""
    indices = np.arange(sum(map(len, sources.values()))) if indices is None else indices
    found = Survey(dict(sources), indices, np.zeros(len(indices), ROW), {}, decoded=True)
    found.rows["state"] = PENDING
    path = _file_of(found) if cache and len(indices) else None
    known = NO_PREVIOUS_SURVEY if path is None else remembered(path)
    done = 0
    try:
        for chunk, (rows, faults) in _looks(found, known, workers):
            found.rows[chunk] = rows
            found.faults.update({int(chunk[place]): reason for place, reason in faults.items()})
            done += len(chunk)
            if on_progress is not None:
                on_progress(done, len(indices))
    finally:  # also what was done before Ctrl-C need not be done again
        if path is not None:
            keep(path, found.rows, found.faults, known)
    return found


def survey_headers(
    sources: Mapping[str, Source], indices: NDArray[np.int64], most: int, stop: Callable[[], bool]
) -> Survey:
    """Read the headers of `most` images, and of the others the content alone, until `stop` says so."""
    each = list(sources.values())
    rows, faults = np.zeros(len(indices), ROW), {}
    done = 0
    for index in indices.tolist():
        if done and stop():
            break
        rows[done], reason = _look(*_place(each, index), depth="header" if done < most else "content")
        if reason is not None:
            faults[done] = reason
        done += 1
    return Survey(dict(sources), indices[:done], rows[:done], faults, decoded=False)


# ── looking ──

_Chunk = NDArray[np.int64]
_Looked = tuple[SurveyRows, dict[int, str]]
_Depth = Literal["pixels", "header", "content"]
"""How far a look goes."""
_worker_sources: list[Source] = []
_worker_known: list[PreviousSurvey] = []
"""In a worker process, the sources it reads and what is known of them: handed over once, not with every chunk."""


def _looks(found: Survey, known: PreviousSurvey, workers: int) -> Iterator[tuple[_Chunk, _Looked]]:
    """Look at all images, chunk by chunk and in order."""
    sources = list(found.sources.values())
    count = len(found.indices)
    chunks = [np.arange(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    if min(workers, len(chunks)) < 2:
        yield from ((chunk, _look_at(sources, found.indices[chunk], known)) for chunk in chunks)
        return
    workers = min(workers, len(chunks))
    waiting: deque[tuple[_Chunk, Future[_Looked]]] = deque()
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(sources, known))
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
            "a process that decodes images ended; this is most often a lack of memory: use fewer workers"
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


def _start_worker(sources: list[Source], known: PreviousSurvey) -> None:
    # Ctrl-C reaches every process of the terminal: a worker just ends, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _worker_sources[:] = sources
    _worker_known[:] = [known]


def _look_in_worker(indices: NDArray[np.int64]) -> _Looked:
    return _look_at(_worker_sources, indices, _worker_known[0])


def _look_at(sources: list[Source], indices: NDArray[np.int64], known: PreviousSurvey) -> _Looked:
    rows, faults = np.zeros(len(indices), ROW), {}
    for place, index in enumerate(indices.tolist()):
        rows[place], reason = _look(*_place(sources, index), depth="pixels", known=known)
        if reason is not None:
            faults[place] = reason
    return rows, faults


def _place(sources: list[Source], index: int) -> tuple[Source, int]:
    """Return the source that an image lies in, and its number there."""
    for source in sources:
        if index < len(source):
            return source, index
        index -= len(source)
    raise IndexError("there are not so many images")


def _look(
    source: Source, index: int, *, depth: _Depth, known: PreviousSurvey = NO_PREVIOUS_SURVEY
) -> tuple[tuple[Any, ...], str | None]:
    """Return the row of one image, and why it cannot be used."""
    try:
        stored = source.read(index)
    except DataError as error:
        cause = str(error).removeprefix(source.name(index)).removeprefix(" cannot be read: ").strip()
        return (UNREAD, 0, 0, 0, (0, 0), False, b"", b""), cause
    size = stored.nbytes if isinstance(stored, np.ndarray) else len(stored)
    content = content_hash(stored)
    if depth == "content":
        return (COMPARED, 0, 0, size, content, False, b"", b""), None
    if depth == "pixels" and (before := known.find(content)) is not None:
        return before
    height, width, kind, flat = 0, 0, StoredFormat("", "", 3), False
    reason: str | None = None
    try:
        image = open_image(stored)
        height, width, kind = image.height, image.width, stored_format(stored)
        if depth == "pixels":
            flat = _is_flat(image.pixels(kind.channels))
    except DataError as error:
        reason = str(error)
    except MemoryError:  # no fault of the file, so that it is not remembered
        return (UNREAD, 0, 0, size, content, False, b"", b""), "there is too little memory to decode it"
    except Exception as error:  # a check goes on, whatever a damaged file does to a decoder
        reason = " ".join(f"the decoder failed with {type(error).__name__}: {error}".split())[:200]
    state = FINE if reason is None else DAMAGED
    return (state, width, height, size, content, flat, kind.format[:8].encode(), kind.mode[:16].encode()), reason


def _is_flat(pixels: Pixels) -> bool:
    """Tell whether an image shows one colour and nothing else; of most a few pixels tell that it does not."""
    return all(
        int((some.max(axis=(0, 1)).astype(int) - some.min(axis=(0, 1))).max()) <= FLAT
        for some in (pixels[::16, ::16], pixels)
    )


# ── remembering ──


def _file_of(found: Survey) -> Path:
    """Return the file to keep rows in: by the folder of the images, which stays when some are added."""
    sources = list(found.sources.values())
    names = (source.name(number) for source, number in (_place(sources, index) for index in found.indices.tolist()))
    first = last = next(names)
    for name in names:
        first, last = min(first, name), max(last, name)
    # What the first and the last name have in common, all have.
    place = os.path.dirname(os.path.commonprefix([first, last]))  # noqa: RUF071 - dirname cuts back to whole names
    decoders = f"{PIL.__version__} {'heif' if reads_heic() else ''}"
    return index_file(f"check {__version__} {decoders}", [place])
