"""Decode JPEGs on a GPU with nvImageCodec, batch by batch, and resize them there.

What the GPU cannot decode is decoded by the caller's own function, usually on the CPU. nvImageCodec is imported when it
is first used. It also decodes on the CPU, which tests use.
"""

import contextlib
import importlib
import importlib.util
import io
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from vitrail.data.device_resize import resize
from vitrail.data.encoded import EncodedBatch, Region, StoredJpeg, turned
from vitrail.data.preprocess import Interpolation
from vitrail.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")
THREADS = 2
"""Batches decoded at the same time: while one is resized, the next one is decoded."""
CPU_THREADS = 4
"""Threads per decoder that parse headers."""
PADDED_PIXELS = 2**26
"""Most pixels of images that are resized together, padded to the largest: 0.8 GB as float32."""
KEPT_BYTES = 2**22
"""Largest image whose memory is used again for the next batch: allocating it takes longer than decoding."""


class Output(NamedTuple):
    """What decoded images become."""

    size: tuple[int, int]
    channels: int
    interpolation: Interpolation
    fill: tuple[int, ...]
    """The colour of padding."""


def is_installed() -> bool:
    """Return whether nvImageCodec is installed, without importing it."""
    with contextlib.suppress(ModuleNotFoundError):  # without any package of NVIDIA
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    return False


@cache
def _codec() -> Any:
    """Import nvImageCodec; what it prints about libraries for other formats is dropped."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        return importlib.import_module("nvidia.nvimgcodec")
    except ImportError:
        raise ConfigError("decoding on the GPU needs nvImageCodec: pip install 'vitrail[gpu]'") from None
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@cache
def why_not(device: torch.device) -> str | None:
    """Return why JPEGs cannot be decoded on a device, after trying one; None if they can."""
    file, grey = io.BytesIO(), Image.new("RGB", (32, 32), (128, 128, 128))
    grey.save(file, "JPEG")
    content = np.frombuffer(file.getvalue(), np.uint8)
    jpeg = StoredJpeg(content, None, 32, 32, Region(0, 0, 32, 32))
    try:
        (pixels,) = decoding_threads(device).map(lambda decoder, one: decoder.decode([one])[0], iter([jpeg]))
    except RuntimeError as error:  # of nvImageCodec, or of CUDA
        return f"nvImageCodec does not work here: {str(error).strip().splitlines()[0]}"
    return None if pixels is not None else "nvImageCodec decodes no JPEG here, as without nvJPEG (nvidia-nvjpeg)"


class GpuDecoder:
    """Decodes JPEGs on one device; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        codec = self.codec = _codec()
        self.device = device
        kinds: tuple[Any, ...]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            # The engines decode what they can, always: so the same images have the same pixels in every run.
            kinds = (codec.BackendKind.HW_GPU_ONLY, codec.BackendKind.GPU_ONLY, codec.BackendKind.HYBRID_CPU_GPU)
        else:
            index, kinds = codec.NVIMGCODEC_DEVICE_CPU_ONLY, (codec.BackendKind.CPU_ONLY,)
        self.decoder = codec.Decoder(
            device_id=index, max_num_cpu_threads=CPU_THREADS, backends=[codec.Backend(kind) for kind in kinds]
        )
        self.params = codec.DecodeParams(
            apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB, sample_format=codec.SampleFormat.P_RGB
        )
        self.buffers: list[Any] = []

    def decode(self, jpegs: Sequence[StoredJpeg]) -> list[Tensor | None]:
        """Decode the regions of images to (3, H, W), turned; None for those that cannot be decoded.

        The pixels are overwritten by the next call.
        """
        reused = [*self.buffers[: len(jpegs)], *[None] * (len(jpegs) - len(self.buffers))]
        queue = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        images = self.decoder.decode(
            [self._stream(jpeg) for jpeg in jpegs], images=reused, params=self.params, cuda_stream=queue
        )
        self.buffers = [image for image in images if image is not None and image.capacity <= KEPT_BYTES]
        return [
            None if image is None else turned(self._tensor(image), jpeg.turn)
            for image, jpeg in zip(images, jpegs, strict=True)
        ]

    def pixels(
        self, batch: EncodedBatch, memory: Tensor, output: Output, failed: Callable[[int, StoredJpeg], None]
    ) -> Tensor:
        """Return the encoded images of a batch, resized: (n, C, H, W), uint8.

        `failed` is called with the number of each image that cannot be decoded, whose pixels are 0.
        """
        jpegs, axes = batch.jpegs(memory), batch.axes.of(memory)
        made = torch.zeros(len(jpegs), output.channels, *output.size, dtype=torch.uint8, device=self.device)
        fill = output.fill if batch.padded else None
        for group in _groups(jpegs):
            decoded = self.decode([jpegs[number] for number in group])
            good = [number for number, image in zip(group, decoded, strict=True) if image is not None]
            for number in sorted(set(group) - set(good)):
                failed(number, jpegs[number])
            if good:
                images = [image for image in decoded if image is not None]
                images = images if output.channels == 3 else [_grey(image) for image in images]
                resized = resize(images, axes[good], output.size, output.interpolation, fill)
                made[torch.tensor(good).to(self.device)] = resized
            self.wait()  # the memory of the decoded images is written again, by engines that ignore the stream
        return made

    def wait(self) -> None:
        """Wait for this thread's work on the device."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _stream(self, jpeg: StoredJpeg) -> Any:
        stream = self.codec.CodeStream(jpeg.content)
        if jpeg.whole:
            return stream
        top, left, bottom, right = jpeg.region
        return stream.get_sub_code_stream(region=self.codec.Region(top, left, bottom, right))

    def _tensor(self, image: Any) -> Tensor:
        # On a CPU, DLPack would look for a CUDA driver.
        return from_dlpack(image) if self.device.type == "cuda" else torch.from_numpy(np.asarray(image))


def _groups(jpegs: Sequence[StoredJpeg]) -> Iterator[list[int]]:
    """Yield the numbers of images to resize together: of similar size, if a batch is too large for one group."""
    order = list(range(len(jpegs)))
    if _padded(jpegs, order) > PADDED_PIXELS:
        order.sort(key=lambda number: max(_sides(jpegs[number])))
    group: list[int] = []
    for number in order:
        if group and _padded(jpegs, [*group, number]) > PADDED_PIXELS:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _sides(jpeg: StoredJpeg) -> tuple[int, int]:
    top, left, bottom, right = jpeg.region
    return bottom - top, right - left


def _padded(jpegs: Sequence[StoredJpeg], numbers: Sequence[int]) -> int:
    sides = [_sides(jpegs[number]) for number in numbers]
    return len(sides) * max((side[0] for side in sides), default=0) * max((side[1] for side in sides), default=0)


def _grey(pixels: Tensor) -> Tensor:
    """Return Pillow's grey of (3, H, W)."""
    red, green, blue = pixels.int().unbind(0)
    grey = (red * 19595 + green * 38470 + blue * 7471 + 0x8000).bitwise_right_shift_(16)
    return grey.to(torch.uint8)[None]


# ── threads ──


class DecodingThreads:
    """Threads that decode, each with a decoder, and on a GPU with a stream of its own."""

    def __init__(self, device: torch.device, count: int = THREADS) -> None:
        self.device, self.count = device, count
        self._free: list[tuple[GpuDecoder, torch.cuda.Stream | None]] = []

    def map(self, work: Callable[[GpuDecoder, T], R], items: Iterator[T]) -> Generator[R, None, None]:
        """Yield `work(decoder, item)` for each item, in order; `count` of them run ahead of the caller."""
        pool = ThreadPoolExecutor(self.count, thread_name_prefix="decode")
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(self.run, work, item))
                if len(pending) > self.count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def run(self, work: Callable[[GpuDecoder, T], R], item: T) -> R:
        """Return `work(decoder, item)` with a decoder that is free, in the caller's thread."""
        try:
            decoder, stream = self._free.pop()
        except IndexError:
            decoder = GpuDecoder(self.device)
            stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        try:
            with torch.cuda.stream(stream):  # None leaves the stream as it is
                made = work(decoder, item)
                decoder.wait()
        finally:
            self._free.append((decoder, stream))
        return made


@cache
def decoding_threads(device: torch.device) -> DecodingThreads:
    """Return the threads for a device; their decoders are made once in a process."""
    return DecodingThreads(device)
