"""Batches: worker processes read, decode, augment and collate images, as uint8 until they reach the device.

A worker makes whole batches. It writes pixels straight into shared memory (`slots`); the caller moves them to the
device and normalises there. A file that a worker cannot read is returned as a value, with its name, not as a traceback.
"""

import multiprocessing
import os
import re
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Augmentation, AugmentationPlan
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.masks import apply_to_mask
from vitrail.data.augmentation.mixing import Mixing, draw_mix
from vitrail.data.decode import LazyImage, open_image
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.slots import InSlots, Slots, empty_buffer
from vitrail.data.sources.masks import IGNORED_PIXEL, Mask, mask_at
from vitrail.data.sources.source import Pixels, Source
from vitrail.data.sources.targets import kind_of_labels, labels_at
from vitrail.data.stream import WHOLE_BATCH, RankSlice, Stream, evaluation_slice
from vitrail.errors import ConfigError, DataError, StorageError, VitrailError
from vitrail.runtime import available_cores

T = TypeVar("T")
BadFiles = Literal["skip", "refuse"]
"""What to do with an unreadable image: replace it by another and report it, or stop the run."""
TRIES = 32
"""Number of consecutive unreadable images after which the dataset counts as broken."""
MOST_WORKERS = 16
SECONDS_ALONE = 1
"""Seconds between a worker's checks that its parent is still alive."""


class BadImage(NamedTuple):
    """An image that could not be read, and why."""

    name: str
    reason: str


class Batch(NamedTuple):
    """A batch of images for a model."""

    pixels: Tensor
    """(B, C, H, W), uint8, channels last in memory."""
    labels: Tensor
    """(B,), -1 where the class is unknown; or targets (B, K); or masks (B, H, W), uint8, 255 without a class."""
    indices: Tensor
    """(B,), indices into the source."""
    lam: Tensor
    """(B,), λ: how much of its own label each image keeps (`mixing`)."""
    box: Tensor
    """(B, 4), the box taken from the partner (`mixing`)."""
    bad: tuple[BadImage, ...] = ()
    """Images that could not be read."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors with one row per image."""
        return self.pixels, self.labels, self.indices, self.lam, self.box

    def to(self, device: torch.device) -> Self:
        """Move the tensors to a device, asynchronously if their memory is pinned."""
        if device.type == "mps" and self.labels.dtype == torch.float64:  # which MPS does not have
            return self._replace(labels=self.labels.float()).to(device)
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def clone(self) -> Self:
        """Return a copy."""
        return self._each(torch.clone)

    def micro(self, index: int, count: int) -> Self:
        """Return one of `count` equal, contiguous micro-batches."""
        size, rest = divmod(len(self.labels), count)
        if rest:
            raise ConfigError(f"a batch of {len(self.labels)} cannot be split into {count} equal micro-batches")
        return self._each(lambda tensor: tensor[index * size : (index + 1) * size])

    def slices(self, size: int) -> Iterator[Self]:
        """Yield the batch in slices of at most `size` images; the first one has the unreadable ones."""
        for start in range(0, max(1, len(self.labels)), size):
            part = self._each(lambda tensor, start=start: tensor[start : start + size])  # type: ignore[misc]
            yield part if not start else part._replace(bad=())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        pixels, labels, indices, lam, box = map(change, self.tensors)
        return type(self)(pixels, labels, indices, lam, box, self.bad)


class Failure(NamedTuple):
    """Returned instead of a batch that could not be made; the caller raises the error."""

    kind: type[VitrailError]
    message: str


class BatchDataset(Dataset[Any], ABC):
    """A dataset whose items are whole batches of pixels, which workers hand over in slots of shared memory."""

    @property
    @abstractmethod
    def batch_bytes(self) -> int:
        """Bytes of a batch's pixels, or more."""


@dataclass(frozen=True)
class Training(BatchDataset):
    """The training batches of one rank, by step: a pure function of step, seed and files."""

    source: Source
    stream: Stream
    preprocess: Preprocess
    """Size and channels, and how to resize if the augmentation does not crop."""
    augmentation: Augmentation
    mixing: Mixing = field(default_factory=Mixing)
    rank_slice: RankSlice = WHOLE_BATCH
    bad_files: BadFiles = "skip"

    def __post_init__(self) -> None:
        check_choice("bad_files", self.bad_files, get_args(BadFiles))
        own = len(self.stream.positions(0, self.rank_slice))
        if self.mixing.on and kind_of_labels(self.source) == "masks":
            raise ConfigError("mixup and CutMix do not mix masks; turn mixing off")
        if self.mixing.on and own % 2:
            raise ConfigError(
                f"mixup and CutMix mix pairs of neighbours, but each of the {self.rank_slice.world_size} processes "
                f"would get {own} images; use a batch that is a multiple of {2 * self.rank_slice.world_size}"
            )

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch's pixels, and masks."""
        return len(self.stream.positions(0, self.rank_slice)) * _bytes_each(self.source, self.preprocess)

    def __getitem__(self, step: int) -> Batch | Failure:
        """Make the batch of a step."""
        try:
            return self._batch(step)
        except VitrailError as error:
            return Failure(type(error), str(error))

    def _batch(self, step: int) -> Batch:
        positions = self.stream.positions(step, self.rank_slice)
        indices = self.stream.images_at(positions)
        mix = draw_mix(self.mixing, self.stream.seed, positions, self.preprocess.size)
        pixels = empty_pixels(len(positions), self.preprocess)
        masks = empty_masks(len(positions), self.source, self.preprocess)
        rows, bad = pixels.numpy(), []
        for row, position in enumerate(positions):
            load = partial(self._into, rows, masks, row, position=int(position))
            indices[row], _, failed = load_readable(self.source, int(indices[row]), self.bad_files, load)
            bad += failed
        labels = torch.from_numpy(labels_at(self.source, indices)) if masks is None else masks
        numbers = (torch.from_numpy(indices), torch.from_numpy(mix.lam), torch.from_numpy(mix.box))
        return Batch(pixels.permute(0, 3, 1, 2), labels, *numbers, tuple(bad))

    def _into(self, pixels: Pixels, masks: Tensor | None, row: int, index: int, position: int) -> None:
        """Load an image, and its mask, into a row of a batch."""
        if masks is None:
            pixels[row] = self.load(index, position)
        else:
            pixels[row], masks.numpy()[row] = self.load_masked(index, position)

    def load(self, index: int, position: int) -> Pixels:
        """Read, decode and augment an image for a position of the stream: (H, W, C)."""
        image, plan = self.open(index, position)
        return self.augmented(image, plan)

    def load_masked(self, index: int, position: int) -> tuple[Pixels, Mask]:
        """Do the same for an image (H, W, C) and its mask (H, W)."""
        image, plan = self.open(index, position)
        mask, size = mask_of(self.source, index, image), self.preprocess.size
        if plan.box is None:  # resized as in evaluation, and then moved
            mask, plan = self.preprocess.fit_mask(mask, IGNORED_PIXEL), plan._replace(height=size[0], width=size[1])
        return self.augmented(image, plan), apply_to_mask(plan, mask, size, IGNORED_PIXEL)

    def open(self, index: int, position: int) -> tuple[LazyImage, AugmentationPlan]:
        """Open an image and draw its augmentation."""
        image, size = open_image(self.source.read(index)), self.preprocess.size
        return image, augment.plan(
            self.augmentation, image.height, image.width, size, draws(self.stream.seed, position)
        )

    def augmented(self, image: LazyImage, plan: AugmentationPlan) -> Pixels:
        """Decode and augment an open image: (H, W, C)."""
        size = self.preprocess.size
        if plan.box is None:
            return augment.apply(plan, self.preprocess.fit(image.pixels(self.preprocess.channels)), size)
        scale = max(size[0] / plan.box.height, size[1] / plan.box.width)
        return augment.apply(plan, image.pixels(self.preprocess.channels, scale=scale), size)


def load_readable(
    source: Source, index: int, bad_files: BadFiles, load: Callable[[int], T]
) -> tuple[int, T, list[BadImage]]:
    """Load an image, or the next readable one; return its index, what `load` returned, and the images skipped."""
    bad: list[BadImage] = []
    for attempt in range(min(TRIES, len(source))):
        chosen = (index + attempt) % len(source)
        try:
            return chosen, load(chosen), bad
        except StorageError:
            raise  # the image may be fine: another one in its place would change the run
        except DataError as error:
            if bad_files == "refuse":
                raise DataError(f"{source.name(chosen)}: {error}") from None
            bad.append(BadImage(source.name(chosen), str(error)))
    raise DataError(
        f"{len(bad)} consecutive images cannot be read, the first is {bad[0].name} ({bad[0].reason}); run "
        f"vitrail check to find them all"
    )


@dataclass(frozen=True)
class Evaluation(BatchDataset):
    """Batches that cover every image of a source exactly once, in order; the last may be smaller."""

    source: Source
    preprocess: Preprocess
    batch: int
    rank_slice: RankSlice = WHOLE_BATCH
    bad_files: BadFiles = "refuse"
    fast_decode: bool = False
    """Decode JPEGs at a reduced scale where that suffices; pixels then differ slightly."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch is {self.batch}; it should be 1 or more")
        check_choice("bad_files", self.bad_files, get_args(BadFiles))

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(evaluation_slice(len(self.source), self.rank_slice)) // self.batch)

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch's pixels, and masks."""
        return min(self.batch, len(self.source)) * _bytes_each(self.source, self.preprocess)

    def __getitem__(self, number: int) -> Batch | Failure:
        """Make a batch by its index."""
        indices = self.indices(number)
        pixels = empty_pixels(len(indices), self.preprocess)
        masks = empty_masks(len(indices), self.source, self.preprocess)

        def load(row: int, index: int) -> None:
            image = self.open(index)
            if masks is not None:
                masks.numpy()[row] = self.preprocess.fit_mask(mask_of(self.source, index, image), IGNORED_PIXEL)
            pixels.numpy()[row] = self.fitted(image)

        try:
            good, bad = self.each_readable(indices, load)
        except VitrailError as error:
            return Failure(type(error), str(error))
        masks = None if masks is None else masks[: len(good)]
        return self.batch_of(pixels[: len(good)].permute(0, 3, 1, 2), good, tuple(row for _, row in bad), masks)

    def indices(self, number: int) -> range:
        """Return the images of a batch."""
        return evaluation_slice(len(self.source), self.rank_slice)[number * self.batch : (number + 1) * self.batch]

    def each_readable(
        self, indices: Iterable[int], load: Callable[[int, int], None]
    ) -> tuple[list[int], list[tuple[int, BadImage]]]:
        """Call `load(row, index)` for images; return those it could load, and the others with the reason.

        Rows count the images that could be loaded.
        """
        good: list[int] = []
        bad: list[tuple[int, BadImage]] = []
        for index in indices:
            try:
                load(len(good), index)
            except StorageError:
                raise
            except DataError as error:
                if self.bad_files == "refuse":
                    raise DataError(f"{self.source.name(index)}: {error}") from None
                bad.append((index, BadImage(self.source.name(index), str(error))))
            else:
                good.append(index)
        return good, bad

    def batch_of(
        self, pixels: Tensor, good: Sequence[int], bad: tuple[BadImage, ...], masks: Tensor | None = None
    ) -> Batch:
        """Return the batch of images (B, C, H, W), with their indices and masks (B, H, W), if they have some."""
        labels = torch.from_numpy(labels_at(self.source, np.array(good, np.int64))) if masks is None else masks
        no_mixing = (torch.ones(len(good)), torch.zeros(len(good), 4, dtype=torch.int64))
        return Batch(pixels, labels, torch.tensor(good, dtype=torch.int64), *no_mixing, bad)

    def load(self, index: int) -> Pixels:
        """Read, decode and transform an image: (H, W, C)."""
        return self.fitted(self.open(index))

    def open(self, index: int) -> LazyImage:
        """Open an image."""
        return open_image(self.source.read(index))

    def fitted(self, image: LazyImage) -> Pixels:
        """Decode and transform an open image: (H, W, C)."""
        scale = self._scale(image) if self.fast_decode else 1.0
        return self.preprocess.fit(image.pixels(self.preprocess.channels, scale=scale))

    def _scale(self, image: LazyImage) -> float:
        pre = self.preprocess
        width, height = resized_size((image.width, image.height), pre.resize_to or pre.size, pre.resize)
        return max(width / image.width, height / image.height)


def training_batches(
    data: Training, start: int, stop: int, *, workers: int | None = None, pin: bool = False, method: str | None = None
) -> Generator[Batch, None, None]:
    """Yield the batches of steps [start, stop), prefetched by `workers` processes; 0 means in this process."""
    yield from checked_batches(data, range(start, stop), workers, pin, method)


def evaluation_batches(
    data: Evaluation, *, workers: int | None = None, pin: bool = False, method: str | None = None
) -> Iterator[Batch]:
    """Yield every batch, in order."""
    yield from checked_batches(data, range(len(data)), workers, pin, method)


def first_images(source: Source, preprocess: Preprocess, count: int) -> Tensor:
    """Return the readable ones of the first images, (B, C, H, W)."""
    data = Evaluation(source, preprocess, min(count, len(source)), bad_files="skip")
    (batch,) = checked_batches(data, range(1), 0, False, None)
    pixels: Tensor = batch.pixels
    return pixels


def checked_batches(
    data: Dataset[Any], numbers: range, workers: int | None, pin: bool, method: str | None
) -> Iterator[Any]:
    """Yield the batches of a dataset by number, prefetched; a `Failure` is raised."""
    workers = min(default_workers() if workers is None else workers, len(numbers))
    size = data.batch_bytes if isinstance(data, BatchDataset) else 0
    for made in prefetch(data, numbers, workers=workers, pin=pin, method=method, batch_bytes=size):
        if isinstance(made, Failure):
            raise made.kind(made.message)
        yield made


def prefetch(
    data: Dataset[Any],
    order: Iterable[Any],
    *,
    workers: int,
    pin: bool = False,
    method: str | None = None,
    batch_bytes: int = 0,
) -> Generator[Any, None, None]:
    """Yield `data[key]` for each `key` of `order`, prefetched by `workers` processes; 0 means in this process.

    `order` may be endless and may hold anything picklable. It is consumed lazily: two keys ahead per worker.
    With `batch_bytes`, the size of the largest item's buffers, workers hand them over in slots (`slots`).
    """
    if workers < 0:
        raise ConfigError(f"workers is {workers}; it should be 0 or more")
    check_choice("the start method of workers", method, (None, "fork", "spawn", "forkserver"))
    slots = Slots.of(workers, batch_bytes, method) if workers and batch_bytes else None
    loader = DataLoader(
        data if slots is None else InSlots(data, slots),
        batch_size=None,
        sampler=order if slots is None else slots.numbered(order),
        num_workers=workers,
        collate_fn=_identity,
        pin_memory=pin and slots is None,
        worker_init_fn=_init_worker,
        multiprocessing_context=method if workers else None,
        prefetch_factor=2 if workers else None,
    )
    try:
        yield from loader if slots is None else (slots.receive(message, pin=pin) for message in loader)
    except (
        RuntimeError,
        ConnectionError,
        EOFError,
    ) as error:  # depending on when it died, torch or the connection notices first
        if isinstance(error, RuntimeError) and not re.match(r"DataLoader worker .*(exited|killed)", str(error)):
            raise
        raise DataError(
            f"a data loading worker died ({_reason(error)}), most often because memory ran out; use fewer workers or a "
            f"smaller batch"
        ) from None


def check_choice(what: str, value: object, valid: tuple[object, ...]) -> None:
    """Raise unless a setting has a valid value."""
    if value not in valid:
        raise ConfigError(f"{what} is {value!r}; choose one of {', '.join(map(repr, valid))}")


def default_workers() -> int:
    """Return the default number of workers: one per core available to this process."""
    siblings = os.environ.get("LOCAL_WORLD_SIZE", "1")  # the processes that torchrun started here
    return max(1, min(available_cores() // (int(siblings) if siblings.isdecimal() else 1), MOST_WORKERS))


def empty_pixels(count: int, preprocess: Preprocess) -> Tensor:
    """Return an empty buffer for images (B, H, W, C); in a worker it is shared memory."""
    return empty_buffer(count, *preprocess.size, preprocess.channels)


def empty_masks(count: int, source: Source, preprocess: Preprocess) -> Tensor | None:
    """Return an empty buffer for masks (B, H, W), like that for pixels; None if the images have other labels."""
    return empty_buffer(count, *preprocess.size) if kind_of_labels(source) == "masks" else None


def _bytes_each(source: Source, preprocess: Preprocess) -> int:
    height, width = preprocess.size
    return preprocess.pixel_bytes + (height * width if kind_of_labels(source) == "masks" else 0)


def mask_of(source: Source, index: int, image: LazyImage) -> Mask:
    """Return the mask of an open image; raise if it has another size."""
    mask = mask_at(source, index)
    if mask.shape != (image.height, image.width):
        raise DataError(
            f"its mask has {mask.shape[1]}×{mask.shape[0]} pixels, but the image {image.width}×{image.height}; run "
            "vitrail check"
        )
    return mask


def _identity(made: Any) -> Any:
    return made


def _init_worker(_: int) -> None:
    """Initialise a worker process."""
    # A thread of the worker sends its tensors and waits for the GIL several times for each. With the default interval
    # of 5 ms the caller waited 30 ms for a batch while the worker computed the next one; now it waits 2 ms.
    sys.setswitchinterval(1e-4)
    _ignore_stop_signals()


def _ignore_stop_signals() -> None:
    """Ctrl-C and SIGTERM reach every process of a group; the parent stops the workers once it has saved its state."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.excepthook = _print_unless_disconnected


def _exit_with_parent() -> None:
    """Exit on SIGTERM from the parent only: signals sent to the whole group are handled by the parent.

    A killed parent sends nothing. torch checks for that too, but asks for the parent's id only after this, when it may
    already be gone; then its end of a pipe is closed, unless a worker forked later holds it open.
    """
    caller, parent = multiprocessing.parent_process(), os.getppid()  # these differ with a fork server
    while caller is None or (caller.is_alive() and os.getppid() == parent):
        received = signal.sigtimedwait({signal.SIGTERM}, SECONDS_ALONE)
        if received is not None and received.si_pid == (parent if caller is None else caller.pid):
            break
    os._exit(0)


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ignore the connection errors of the thread that sends memory: they mean that the parent stopped early."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(". ")
