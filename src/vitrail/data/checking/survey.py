"""Survey every image: size, format, content hash, and why it cannot be decoded. Parallel and cached.

An image takes one row of a structured array, so a million images need little memory. Rows are cached on disk by file
content, so a second survey decodes only what is new or has changed. It still reads every file: neither an unreadable
file nor a flipped bit is hidden by the cache.
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
    CORRUPT,
    FINE,
    IN_MEMORY,
    NO_PREVIOUS_SURVEY,
    PENDING,
    ROW,
    UNREAD,
    PreviousSurvey,
    SurveyRows,
    load_survey,
    save_survey,
)
from vitrail.data.decode import open_image
from vitrail.data.image_files import HEAD, reads_heic, sniff
from vitrail.data.sources.contents import content_hash
from vitrail.data.sources.index_files import index_file
from vitrail.data.sources.source import Pixels, Source
from vitrail.errors import DataError, StorageError

SurveyProgress = Callable[[int, int], None]
"""Called with the number of images done so far and the total."""
FLAT = 2
"""Largest range of a channel in an image of a single colour: JPEG rounds."""
CHUNK = 16
"""Images per task: few enough for a smooth progress bar and a prompt Ctrl-C."""
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
    """colour, grey, alpha, palette, CMYK, 16-bit, …"""
    channels: int
    """Number of channels to decode to."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out about images of several sources, which are numbered consecutively."""

    sources: dict[str, Source]
    """By split name."""
    indices: NDArray[np.int64]
    """The surveyed images, numbered consecutively through all sources."""
    rows: SurveyRows
    faults: dict[int, str]
    """Why images are unusable, by row."""
    decoded: bool
    """Whether images were decoded, or only their headers read."""


def stored_format(stored: bytes | Pixels) -> StoredFormat:
    """Return how an image is stored, from its header."""
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
                container, mode, transparent = str(image.format), image.mode, "transparency" in image.info
    except (OSError, ValueError, SyntaxError):  # another decoder may still read it
        return StoredFormat("unknown", "unknown", 3)
    # Pillow calls a 16-bit colour PNG "RGB"; the header has the bit depth.
    if mode.startswith("I") or (container == "PNG" and stored[24:25] == b"\x10"):
        return StoredFormat(container, "16-bit", 3)
    if transparent or mode.lower() in ("la", "pa", "rgba"):
        return StoredFormat(container, "alpha", 3)
    return StoredFormat(container, _MODES.get(mode, mode), 3)


def survey(
    sources: Mapping[str, Source],
    *,
    indices: NDArray[np.int64] | None = None,
    workers: int = 0,
    on_progress: SurveyProgress | None = None,
    cache: bool = True,
) -> Survey:
    """Decode every image, or those at the given indices, with `workers` processes; 0 means this process."""
    indices = np.arange(sum(map(len, sources.values()))) if indices is None else indices
    result = Survey(dict(sources), indices, np.zeros(len(indices), ROW), {}, decoded=True)
    result.rows["state"] = PENDING
    path = _file_of(result) if cache and len(indices) else None
    previous = NO_PREVIOUS_SURVEY if path is None else load_survey(path)
    done = 0
    try:
        for chunk, (rows, faults) in _inspect_all(result, previous, workers):
            result.rows[chunk] = rows
            result.faults.update({int(chunk[place]): reason for place, reason in faults.items()})
            done += len(chunk)
            if on_progress is not None:
                on_progress(done, len(indices))
    finally:  # also keeps what was done before Ctrl-C
        if path is not None:
            save_survey(path, result.rows, result.faults, previous)
    return result


def survey_headers(
    sources: Mapping[str, Source], indices: NDArray[np.int64], most: int, stop: Callable[[], bool]
) -> Survey:
    """Read the headers of `most` images, and only hash the content of the others, until `stop` returns True."""
    each = list(sources.values())
    rows, faults = np.zeros(len(indices), ROW), {}
    done = 0
    for index in indices.tolist():
        if done and stop():
            break
        rows[done], reason = _inspect(*_place(each, index), depth="header" if done < most else "content")
        if reason is not None:
            faults[done] = reason
        done += 1
    return Survey(dict(sources), indices[:done], rows[:done], faults, decoded=False)


# ── inspecting images ──

_Chunk = NDArray[np.int64]
_Inspected = tuple[SurveyRows, dict[int, str]]
_Depth = Literal["pixels", "header", "content"]
"""How much of an image is inspected."""
_worker_sources: list[Source] = []
_worker_previous: list[PreviousSurvey] = []
"""In a worker process, the sources and the previous survey: passed once, not with every chunk."""


def _inspect_all(survey: Survey, previous: PreviousSurvey, workers: int) -> Iterator[tuple[_Chunk, _Inspected]]:
    """Inspect all images, chunk by chunk and in order."""
    sources = list(survey.sources.values())
    count = len(survey.indices)
    chunks = [np.arange(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    if min(workers, len(chunks)) < 2:
        yield from ((chunk, _inspect_chunk(sources, survey.indices[chunk], previous)) for chunk in chunks)
        return
    workers = min(workers, len(chunks))
    waiting: deque[tuple[_Chunk, Future[_Inspected]]] = deque()
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(sources, previous))
    try:
        for chunk in chunks:
            with _interrupts_blocked():
                waiting.append((chunk, pool.submit(_inspect_in_worker, survey.indices[chunk])))
            if len(waiting) > 3 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool:
        raise DataError("a decoding worker died, most often because memory ran out; use fewer workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C. A process forked meanwhile inherits this until it has set its own handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(sources: list[Source], previous: PreviousSurvey) -> None:
    # Ctrl-C reaches every process of the terminal: a worker just exits, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _worker_sources[:] = sources
    _worker_previous[:] = [previous]


def _inspect_in_worker(indices: NDArray[np.int64]) -> _Inspected:
    return _inspect_chunk(_worker_sources, indices, _worker_previous[0])


def _inspect_chunk(sources: list[Source], indices: NDArray[np.int64], previous: PreviousSurvey) -> _Inspected:
    rows, faults = np.zeros(len(indices), ROW), {}
    for place, index in enumerate(indices.tolist()):
        rows[place], reason = _inspect(*_place(sources, index), depth="pixels", previous=previous)
        if reason is not None:
            faults[place] = reason
    return rows, faults


def _place(sources: list[Source], index: int) -> tuple[Source, int]:
    """Return the source of an image, and its index there."""
    for source in sources:
        if index < len(source):
            return source, index
        index -= len(source)
    raise IndexError("image index out of range")


def _inspect(
    source: Source, index: int, *, depth: _Depth, previous: PreviousSurvey = NO_PREVIOUS_SURVEY
) -> tuple[tuple[Any, ...], str | None]:
    """Return the row of one image, and why it is unusable."""
    try:
        stored = source.read(index)
    except StorageError:
        raise  # the image may be fine
    except DataError as error:
        cause = str(error).removeprefix(source.name(index)).removeprefix(" cannot be read: ").strip()
        return (UNREAD, 0, 0, 0, (0, 0), False, b"", b""), cause
    size = stored.nbytes if isinstance(stored, np.ndarray) else len(stored)
    content = content_hash(stored)
    if depth == "content":
        return (COMPARED, 0, 0, size, content, False, b"", b""), None
    if depth == "pixels" and (before := previous.find(content)) is not None:
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
    except MemoryError:  # not the file's fault, so it is not cached
        return (UNREAD, 0, 0, size, content, False, b"", b""), "not enough memory to decode it"
    except Exception as error:  # a check continues, whatever a corrupt file does to a decoder
        reason = " ".join(f"the decoder failed with {type(error).__name__}: {error}".split())[:200]
    state = FINE if reason is None else CORRUPT
    return (state, width, height, size, content, flat, kind.format[:8].encode(), kind.mode[:16].encode()), reason


def _is_flat(pixels: Pixels) -> bool:
    """Return whether an image has a single colour; for most images a few pixels rule that out."""
    return all(
        int((some.max(axis=(0, 1)).astype(int) - some.min(axis=(0, 1))).max()) <= FLAT
        for some in (pixels[::16, ::16], pixels)
    )


# ── the cache ──


def _file_of(survey: Survey) -> Path:
    """Return the cache file: by the folder of the images, which stays the same when images are added."""
    sources = list(survey.sources.values())
    names = (source.name(number) for source, number in (_place(sources, index) for index in survey.indices.tolist()))
    first = last = next(names)
    for name in names:
        first, last = min(first, name), max(last, name)
    # The common prefix of the first and the last name is that of all.
    place = os.path.dirname(os.path.commonprefix([first, last]))  # noqa: RUF071 - dirname cuts back to whole names
    decoders = f"{PIL.__version__} {'heif' if reads_heic() else ''}"
    return index_file(f"check {__version__} {decoders}", [place])
