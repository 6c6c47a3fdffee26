"""Uploads whose JPEGs are decoded on the GPU, in this process: in batches, which gather while others are decoded.

It needs `--decode gpu` or `auto`, because a thread that decodes cannot be killed and has no memory limit. What the GPU
does not decode is left to the decoder processes: other formats, files that may be broken, very narrow images.
"""

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from time import monotonic
from typing import NamedTuple

import torch

from vitrail.data.decode import open_image
from vitrail.data.device_resize import FILTERS, evaluation_window
from vitrail.data.encoded import Encoded, StoredJpeg, encoded, end_of_baseline, pack_images
from vitrail.data.gpu_batches import evaluation_output
from vitrail.data.gpu_decoding import THREADS, GpuDecoder, decoding_threads
from vitrail.data.packing import PackedArrays
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels
from vitrail.errors import DataError
from vitrail.serving.connections import rate_limited_log
from vitrail.serving.decoding import MAX_ASPECT, Upload
from vitrail.serving.fair_queue import FairQueue

MOST = 64
"""Images decoded together, so that none waits long for the others."""
START_TIME = 60.0
"""Seconds that the decoders may take to start."""


@dataclass(eq=False)
class _Waiting:
    content: bytes
    preprocess: Preprocess
    result: asyncio.Future[Upload | None]
    arrived: float = field(default_factory=monotonic)


class GpuUploads:
    """The queue and the threads. Everything but the decoding runs in the event loop's thread."""

    def __init__(self, device: torch.device) -> None:
        self._threads = decoding_threads(device)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="decode-uploads")
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Make a decoder for each thread; otherwise the first images wait for it."""
        together, loop = Barrier(THREADS, timeout=START_TIME), asyncio.get_running_loop()

        def work(_: GpuDecoder, __: None) -> None:
            together.wait()

        run = partial(self._threads.run, work, None)
        await asyncio.gather(*(loop.run_in_executor(self._pool, run) for _ in range(THREADS)))

    async def close(self) -> None:
        """Stop; images that are being decoded are waited for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(cancel_futures=True)

    def waiting(self) -> float:
        """Return how many seconds the oldest image has waited."""
        now = monotonic()
        return max((now - one.arrived for one in self._queue if not one.result.done()), default=0.0)

    async def decode(
        self, content: bytes, preprocess: Preprocess, client: Hashable, request: Hashable
    ) -> Upload | None:
        """Return a decoded upload; None if a decoder process should decode it."""
        if preprocess.interpolation not in FILTERS or preprocess.channels not in (1, 3):
            return None
        if end_of_baseline(content) is None:
            return None
        waiting = _Waiting(content, preprocess, asyncio.get_running_loop().create_future())
        self._queue.add(client, request, waiting)
        self._dispatch()
        return await waiting.result

    def _dispatch(self) -> None:
        while len(self._tasks) < THREADS and (batch := self._next()):
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._dispatch()

    def _next(self) -> list[_Waiting]:
        """Take uploads for one model."""
        batch: list[_Waiting] = []
        while len(batch) < MOST and (taken := self._queue.take(lambda _: True)) is not None:
            if not taken[1].result.done():  # not cancelled
                batch.append(taken[1])
        return batch

    async def _run(self, batch: list[_Waiting]) -> None:
        made: list[Upload | None] = [None] * len(batch)
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._pool, self._decoded, batch)
        except RuntimeError as error:  # of nvImageCodec or CUDA, such as too little memory: the processes decode them
            rate_limited_log.warn("decoding on the GPU failed", why=str(error).strip().partition("\n")[0])
        finally:
            for waiting, upload in zip(batch, made, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(upload)

    def _decoded(self, batch: Sequence[_Waiting]) -> list[Upload | None]:
        """Decode a batch, in a thread."""
        made: list[Upload | None] = [None] * len(batch)
        for preprocess in dict.fromkeys(waiting.preprocess for waiting in batch):  # one for each model
            ready: dict[int, Opened] = {}
            for number, waiting in enumerate(batch):
                opened = for_gpu(waiting.content, preprocess) if waiting.preprocess == preprocess else None
                if opened is not None:
                    ready[number] = opened
            if ready:
                decode = partial(decode_together, preprocess=preprocess)
                rows = self._threads.run(decode, [opened.image for opened in ready.values()])
                for (number, opened), pixels in zip(ready.items(), rows, strict=True):
                    made[number] = None if pixels is None else Upload(pixels, opened.size)
        return made


class Opened(NamedTuple):
    """An upload that the GPU can decode."""

    image: Encoded
    size: tuple[int, int]
    """Height and width of the original, as it is displayed."""


def for_gpu(content: bytes, preprocess: Preprocess) -> Opened | None:
    """Return an upload as the GPU decodes it; None if a decoder process should."""
    try:
        image = open_image(content)
    except DataError:
        return None
    if max(image.height, image.width) > MAX_ASPECT * min(image.height, image.width):
        return None
    made = encoded(image, evaluation_window(preprocess, image.height, image.width), preprocess.channels)
    return None if made is None else Opened(made, (image.height, image.width))


def decode_together(decoder: GpuDecoder, images: Sequence[Encoded], *, preprocess: Preprocess) -> list[Pixels | None]:
    """Return the pixels (H, W, C) of images; None for those that the GPU could not decode."""
    packed, failed = PackedArrays(), set[int]()
    batch = pack_images(images, preprocess.size, preprocess.channels, packed)

    def fail(number: int, _: StoredJpeg) -> None:
        failed.add(number)

    pixels = decoder.pixels(batch, packed.memory(), evaluation_output(preprocess), fail)
    rows = pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return [None if number in failed else row for number, row in enumerate(rows)]
