"""Processes that decode images: each can be ended, and no client has more of them than its share.

Images are small work or large work, by what their headers say. Large work leaves one decoder free at any time, so that
small images never wait for it, and one client has at most half of the decoders for it. In both lanes clients take
turns.
"""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, cast

import numpy as np

from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels
from vitrail.serving.connections import told
from vitrail.serving.decoder_process import HEAD, MADE, READY
from vitrail.serving.decoding import check_upload
from vitrail.serving.fair_queue import FairQueue
from vitrail.serving.http_errors import HttpError
from vitrail.serving.settings import Settings

START_TIME = 60.0
"""Seconds that a new process may take to import what it needs; a tenth of a second on an idle machine."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""For the processes: nothing in them computes with more, but NumPy would have a thread and 40 MB for every core."""
LONGEST_REFUSAL = 65_536
"""Bytes in which a decoder says what is wrong with an image."""
LARGE = 16_000_000
"""Pixels times scans from which an image is large work: about a third of a second."""


class _Ended(Exception):  # noqa: N818 - named for what happened
    """A decoder had to be ended, or ended by itself."""


class _Decoder(NamedTuple):
    process: Process
    tasks: asyncio.StreamWriter
    results: asyncio.StreamReader


@dataclass(eq=False)
class _Job:
    content: bytes
    preprocess: Preprocess
    large: bool
    result: asyncio.Future[Pixels]
    arrived: float = field(default_factory=monotonic)


class Decoders:
    """The processes, and who waits for them. Everything here happens in the event loop's thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._small: FairQueue[_Job] = FairQueue()
        self._large: FairQueue[_Job] = FairQueue()
        self._idle: list[_Decoder] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_work, self._large_at_work = 0, Counter[Hashable]()
        self._large_is_next = False
        self._closed = False

    async def start(self) -> None:
        """Start all processes, so that no request has to wait for that; without it they start as they are needed."""
        self._idle += await asyncio.gather(*(_started() for _ in range(self._settings.decoders - len(self._idle))))

    async def close(self) -> None:
        """End the processes, whatever they do."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*map(_ended, self._idle))

    def waiting(self) -> float:
        """Return for how many seconds the oldest small image has been waiting."""
        return monotonic() - min((job.arrived for job in self._small if not job.result.done()), default=monotonic())

    async def decode(self, content: bytes, preprocess: Preprocess, client: Hashable, request: asyncio.Lock) -> Pixels:
        """Return what an engine takes, or raise a `HttpError`; what its header rules out waits for no decoder.

        `request` is a lock that the images of one request share: their headers are read one at a time, with a round
        of the event loop between them, for a hostile one can take milliseconds.
        """
        async with request:
            found = check_upload(content, self._settings.formats, self._settings.pixels)
            await asyncio.sleep(0)
        job = _Job(
            content,
            preprocess,
            found is None or found.work > LARGE,
            asyncio.get_running_loop().create_future(),
        )
        (self._large if job.large else self._small).add(client, request, job)
        self._dispatch()
        return await job.result

    # ── who is next ──

    def _dispatch(self) -> None:
        while self._at_work < self._settings.decoders and not self._closed:
            taken = self._next()
            if taken is None:
                return
            client, job = taken
            if job.result.done():  # nobody waits for it any more
                continue
            self._at_work += 1
            self._large_at_work[client] += job.large
            task = asyncio.get_running_loop().create_task(self._work(client, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> tuple[Hashable, _Job] | None:
        cpu_threads = (
            (self._take_large, self._take_small) if self._large_is_next else (self._take_small, self._take_large)
        )
        for take in cpu_threads:
            taken = take()
            if taken is not None:
                self._large_is_next = not taken[1].large
                return taken
        return None

    def _take_small(self) -> tuple[Hashable, _Job] | None:
        return self._small.take(lambda _: True)

    def _take_large(self) -> tuple[Hashable, _Job] | None:
        decoders = self._settings.decoders
        if self._large_at_work.total() >= max(1, decoders - 1):
            return None
        return self._large.take(lambda client: self._large_at_work[client] < max(1, decoders // 2))

    # ── at work ──

    async def _work(self, client: Hashable, job: _Job) -> None:
        decoder: _Decoder | None = None
        try:
            decoder = self._living() or await _started()
            made = await self._decoded_in_time(decoder, job)
            if isinstance(made, HttpError):
                raise made
            if not job.result.done():
                job.result.set_result(made)
            self._idle.append(decoder)
        except _Ended as ended:
            await _ended(decoder)
            told.warn("a decoder was ended", why=str(ended))
            _fail(job, HttpError(422, str(ended), reason="decode"))
        except HttpError as refusal:
            if decoder is not None:
                self._idle.append(decoder)
            _fail(job, refusal)
        except BaseException as error:  # the service ends, or there is a fault in it: whoever waits has to hear of it
            await _ended(decoder)
            _fail(job, error)
            raise
        finally:
            self._at_work -= 1
            self._large_at_work[client] -= job.large
            if not self._large_at_work[client]:
                del self._large_at_work[client]
            self._dispatch()

    def _living(self) -> _Decoder | None:
        """Take an idle decoder, and forget those that somebody has ended: the system does where memory runs out."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.process.returncode is None:
                return decoder
            decoder.tasks.close()
        return None

    async def _decoded_in_time(self, decoder: _Decoder, job: _Job) -> Pixels | HttpError:
        seconds = self._settings.decode_time
        try:
            async with asyncio.timeout(seconds):
                return await self._decoded(decoder, job)
        except TimeoutError:
            raise _Ended(f"the image takes more than {seconds:g} s to decode; send a simpler file") from None
        except (asyncio.IncompleteReadError, OSError):
            raise _Ended("the image cannot be used: its decoder has failed") from None

    async def _decoded(self, decoder: _Decoder, job: _Job) -> Pixels | HttpError:
        settings = self._settings
        asked = {"pixels": settings.pixels, "formats": settings.formats, "preprocess": job.preprocess.model_dump()}
        words = json.dumps(asked).encode()
        decoder.tasks.write(HEAD.pack(len(words), len(job.content)) + words)
        decoder.tasks.write(job.content)
        await decoder.tasks.drain()
        # Never a pickle: what comes back has been made by a program that a hostile file may have taken over.
        fine, height, width, size = MADE.unpack(await decoder.results.readexactly(MADE.size))
        if not fine:
            said = json.loads(await decoder.results.readexactly(min(size, LONGEST_REFUSAL)))
            return HttpError(int(said["status"]), str(said["sentence"]))
        if (height, width, size) != (*job.preprocess.size, job.preprocess.channels):
            raise _Ended("the image cannot be used: its decoder has failed")
        content = await decoder.results.readexactly(height * width * size)
        return np.frombuffer(content, np.uint8).reshape(height, width, size)


def _fail(job: _Job, error: BaseException) -> None:
    if not job.result.done():
        job.result.set_exception(error)


async def _started() -> _Decoder:
    # A session of its own: Ctrl-C in a terminal ends the service in order, and it ends its decoders.
    # -P: whatever lies in the folder where the service was started is not imported.
    command = (sys.executable, "-P", "-m", "vitrail.serving.decoder_process")
    decoder: _Decoder | None = None
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True, env={**os.environ, **ONE_THREAD}
        )
        decoder = _Decoder(
            process, cast(asyncio.StreamWriter, process.stdin), cast(asyncio.StreamReader, process.stdout)
        )
        async with asyncio.timeout(START_TIME):
            await decoder.results.readexactly(len(READY))
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        await _ended(decoder)
        told.warn("no decoder can be started")
        raise HttpError(503, "no decoder can be started; try again soon", retry_after=5, reason="decode") from None
    except BaseException:  # also a request that is cancelled: no process is left behind
        await _ended(decoder)
        raise
    return decoder


async def _ended(decoder: _Decoder | None) -> None:
    if decoder is None:
        return
    if decoder.process.returncode is None:
        decoder.process.kill()
    decoder.tasks.close()
    with contextlib.suppress(OSError):
        await decoder.results.read()  # the end of a process is not seen before the end of what it wrote
    await decoder.process.wait()
