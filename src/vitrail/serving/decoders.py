"""A pool of decoder processes, shared fairly between clients.

Images are small or large jobs, judged by their headers. Large jobs always leave one decoder free for small ones, and
one client may use at most half of the decoders for large jobs. Clients take turns in both queues. With `--decode gpu`,
small JPEGs are decoded on the GPU instead (`gpu_uploads`), and the processes decode the rest.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, cast

import numpy as np
import torch

from vitrail.data.decoder_choice import choose_for_uploads
from vitrail.data.preprocess import Preprocess
from vitrail.runtime import available_cores, choose_device
from vitrail.serving.connections import rate_limited_log
from vitrail.serving.decoder_process import READY, RESULT_HEADER, TASK_HEADER
from vitrail.serving.decoding import Upload, check_upload
from vitrail.serving.fair_queue import FairQueue
from vitrail.serving.gpu_uploads import GpuUploads
from vitrail.serving.http_errors import HttpError
from vitrail.serving.settings import Settings

_log = logging.getLogger("vitrail.serving")
START_TIME = 60.0
"""Seconds a new process may take to import its modules; 0.1 s on an idle machine."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of the processes; otherwise NumPy starts a thread and takes 40 MB per core."""
MAX_ERROR_BYTES = 65_536
"""Maximum size of a decoder's error message."""
LARGE = 16_000_000
"""Pixels times scans from which an image is a large job: about a third of a second."""


def default_decoders(device: torch.device) -> int:
    """Return how many processes decode: on a CPU few, because the model needs the cores."""
    return 2 if device.type == "cpu" else max(2, available_cores() - 1)


class _DecoderFailed(Exception):  # noqa: N818 - not an error of ours
    """A decoder was killed, or exited."""


class _Decoder(NamedTuple):
    process: Process
    tasks: asyncio.StreamWriter
    results: asyncio.StreamReader


@dataclass(eq=False)
class _Job:
    content: bytes
    preprocess: Preprocess
    large: bool
    result: asyncio.Future[Upload]
    arrived: float = field(default_factory=monotonic)


class Decoders:
    """The processes and their queues. Everything here runs in the event loop's thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        device = choose_device(settings.device)
        self._count = settings.decoders or default_decoders(device)
        chosen = choose_for_uploads(settings.decode, device)
        chosen.announce(_log.info)
        self._gpu = None if chosen.device is None else GpuUploads(chosen.device)
        self._small: FairQueue[_Job] = FairQueue()
        self._large: FairQueue[_Job] = FairQueue()
        self._idle: list[_Decoder] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._active, self._large_active = 0, Counter[Hashable]()
        self._large_is_next = False
        self._closed = False

    async def start(self) -> None:
        """Start all processes up front; otherwise they start on demand."""
        if self._gpu is not None:
            await self._gpu.start()
        self._idle += await asyncio.gather(*(_start_decoder() for _ in range(self._count - len(self._idle))))

    async def close(self) -> None:
        """Kill the processes."""
        self._closed = True
        if self._gpu is not None:
            await self._gpu.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*map(_kill, self._idle))

    def waiting(self) -> float:
        """Return how many seconds the oldest small image has waited."""
        now = monotonic()
        waited = max((now - job.arrived for job in self._small if not job.result.done()), default=0.0)
        return waited if self._gpu is None else max(waited, self._gpu.waiting())

    async def decode(self, content: bytes, preprocess: Preprocess, client: Hashable, request: asyncio.Lock) -> Upload:
        """Return the decoded image, or raise `HttpError`; images rejected by their header do not wait.

        `request` is a lock shared by the images of one request: headers are parsed one at a time, yielding to the
        event loop in between, because a hostile one can take milliseconds.
        """
        async with request:
            outline = check_upload(content, self._settings.formats, self._settings.pixels)
            await asyncio.sleep(0)
        large = outline is None or outline.work > LARGE
        if self._gpu is not None and not large:
            upload = await self._gpu.decode(content, preprocess, client, request)
            if upload is not None:
                return upload
        job = _Job(content, preprocess, large, asyncio.get_running_loop().create_future())
        (self._large if job.large else self._small).add(client, request, job)
        self._dispatch()
        return await job.result

    # ── scheduling ──

    def _dispatch(self) -> None:
        while self._active < self._count and not self._closed:
            taken = self._next()
            if taken is None:
                return
            client, job = taken
            if job.result.done():  # cancelled
                continue
            self._active += 1
            self._large_active[client] += job.large
            task = asyncio.get_running_loop().create_task(self._run(client, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> tuple[Hashable, _Job] | None:
        queues = (self._take_large, self._take_small) if self._large_is_next else (self._take_small, self._take_large)
        for take in queues:
            taken = take()
            if taken is not None:
                self._large_is_next = not taken[1].large
                return taken
        return None

    def _take_small(self) -> tuple[Hashable, _Job] | None:
        return self._small.take(lambda _: True)

    def _take_large(self) -> tuple[Hashable, _Job] | None:
        if self._large_active.total() >= max(1, self._count - 1):
            return None
        return self._large.take(lambda client: self._large_active[client] < max(1, self._count // 2))

    # ── decoding ──

    async def _run(self, client: Hashable, job: _Job) -> None:
        decoder: _Decoder | None = None
        try:
            decoder = self._idle_decoder() or await _start_decoder()
            result = await self._decoded_in_time(decoder, job)
            if isinstance(result, HttpError):
                raise result
            if not job.result.done():
                job.result.set_result(result)
            self._idle.append(decoder)
        except _DecoderFailed as failure:
            await _kill(decoder)
            rate_limited_log.warn("decoder killed", why=str(failure))
            _fail(job, HttpError(422, str(failure), reason="decode"))
        except HttpError as error:
            if decoder is not None:
                self._idle.append(decoder)
            _fail(job, error)
        except BaseException as error:  # shutdown or a bug: pass it to the waiting request
            await _kill(decoder)
            _fail(job, error)
            raise
        finally:
            self._active -= 1
            self._large_active[client] -= job.large
            if not self._large_active[client]:
                del self._large_active[client]
            self._dispatch()

    def _idle_decoder(self) -> _Decoder | None:
        """Take an idle decoder, dropping dead ones: the OOM killer may have ended them."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.process.returncode is None:
                return decoder
            decoder.tasks.close()
        return None

    async def _decoded_in_time(self, decoder: _Decoder, job: _Job) -> Upload | HttpError:
        seconds = self._settings.decode_time
        try:
            async with asyncio.timeout(seconds):
                return await self._decoded(decoder, job)
        except TimeoutError:
            raise _DecoderFailed(f"the image takes more than {seconds:g} s to decode; send a simpler file") from None
        except (asyncio.IncompleteReadError, OSError):
            raise _DecoderFailed("the image cannot be used: its decoder failed") from None

    async def _decoded(self, decoder: _Decoder, job: _Job) -> Upload | HttpError:
        settings = self._settings
        task = {"pixels": settings.pixels, "formats": settings.formats, "preprocess": job.preprocess.model_dump()}
        header = json.dumps(task).encode()
        decoder.tasks.write(TASK_HEADER.pack(len(header), len(job.content)) + header)
        decoder.tasks.write(job.content)
        await decoder.tasks.drain()
        # Never pickle: a hostile file may have taken over the process that wrote this.
        header = await decoder.results.readexactly(RESULT_HEADER.size)
        ok, height, width, size, *original = RESULT_HEADER.unpack(header)
        if not ok:
            error = json.loads(await decoder.results.readexactly(min(size, MAX_ERROR_BYTES)))
            return HttpError(int(error["status"]), str(error["message"]))
        as_expected = (height, width, size) == (*job.preprocess.size, job.preprocess.channels)
        if not as_expected or not 0 < original[0] * original[1] <= settings.pixels:
            raise _DecoderFailed("the image cannot be used: its decoder failed")
        content = await decoder.results.readexactly(height * width * size)
        return Upload(np.frombuffer(content, np.uint8).reshape(height, width, size), (original[0], original[1]))


def _fail(job: _Job, error: BaseException) -> None:
    if not job.result.done():
        job.result.set_exception(error)


async def _start_decoder() -> _Decoder:
    # In a new session: Ctrl-C reaches only the service, which then stops its decoders.
    # -P: do not import from the working directory.
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
        await _kill(decoder)
        rate_limited_log.warn("no decoder can be started")
        raise HttpError(503, "no decoder can be started; try again soon", retry_after=5, reason="decode") from None
    except BaseException:  # including cancellation: leave no process behind
        await _kill(decoder)
        raise
    return decoder


async def _kill(decoder: _Decoder | None) -> None:
    if decoder is None:
        return
    if decoder.process.returncode is None:
        decoder.process.kill()
    decoder.tasks.close()
    with contextlib.suppress(OSError):
        await decoder.results.read()  # asyncio reports the exit only after its output is read
    await decoder.process.wait()
