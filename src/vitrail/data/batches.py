"""Batches: images read, decoded, augmented and put together by worker processes, as uint8 until the device.

A worker makes whole batches: it writes pixels straight into memory it shares with the caller, who sends them to the
device and normalises there. What a worker cannot read comes back as a value, with the file's name, not as a traceback.
"""

import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.mixing import Mixing, draw_mix
from vitrail.data.decode import LazyImage, open_image
from vitrail.data.preprocess import Preprocess, resized_size
from vitrail.data.sources.source import Pixels, Source
from vitrail.data.stream import WHOLE, Share, Stream, evaluation_share
from vitrail.errors import ConfigError, DataError, VitrailError

BadFiles = Literal["skip", "refuse"]
"""What happens to an image that cannot be read: another one takes its place and it is recorded, or the run stops."""
TRIES = 32
"""How many images in a row may be unreadable before the data as a whole counts as broken."""
MOST_WORKERS = 16
SECONDS_ALONE = 1
"""After how long a worker looks whether its caller was killed."""


class BadImage(NamedTuple):
    """An image that could not be read, and why."""

    name: str
    reason: str


class Batch(NamedTuple):
    """Images on their way to a model."""

    pixels: Tensor
    """(B, C, H, W), uint8, channels last in memory."""
    labels: Tensor
    """(B,), -1 where the class is not known."""
    indices: Tensor
    """(B,), which images of the source these are."""
    share: Tensor
    """(B,), how much of its own label each image keeps (`mixing`)."""
    box: Tensor
    """(B, 4), what comes from the partner (`mixing`)."""
    bad: tuple[BadImage, ...] = ()
    """Images that should have been here."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that has one row an image."""
        return self.pixels, self.labels, self.indices, self.share, self.box

    def to(self, device: torch.device) -> Self:
        """Send the tensors to a device, without waiting where memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def copied(self) -> Self:
        """Return the same in memory of its own."""
        return self._each(torch.clone)

    def micro(self, part: int, parts: int) -> Self:
        """Return one of several equal, contiguous parts."""
        size, rest = divmod(len(self.labels), parts)
        if rest:
            raise ConfigError(f"a batch of {len(self.labels)} cannot be cut into {parts} equal parts")
        return self._each(lambda tensor: tensor[part * size : (part + 1) * size])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        pixels, labels, indices, share, box = map(change, self.tensors)
        return type(self)(pixels, labels, indices, share, box, self.bad)


class _Refused(NamedTuple):
    """Takes the place of a batch that could not be made; the caller raises it."""

    kind: type[VitrailError]
    message: str


@dataclass(frozen=True)
class Training(Dataset[Any]):
    """The training batches of one process, by step: a pure function of step, seed and files."""

    source: Source
    stream: Stream
    preprocess: Preprocess
    """Gives size and channels, and the resizing where nothing is cropped at random."""
    augmentation: Augmentation
    mixing: Mixing = field(default_factory=Mixing)
    share: Share = WHOLE
    bad_files: BadFiles = "skip"

    def __post_init__(self) -> None:
        _check_choice("bad_files", self.bad_files, get_args(BadFiles))
        own = len(self.stream.positions(0, self.share))
        if self.mixing.on and own % 2:
            raise ConfigError(
                f"mixup and CutMix mix pairs of neighbours, but each of the {self.share.parts} processes would get "
                f"{own} images; use a batch that is a multiple of {2 * self.share.parts}"
            )

    def __getitem__(self, step: int) -> Batch | _Refused:
        """Make the batch of a step."""
        try:
            return self._batch(step)
        except VitrailError as error:
            return _Refused(type(error), str(error))

    def _batch(self, step: int) -> Batch:
        positions = self.stream.positions(step, self.share)
        indices = self.stream.images_at(positions)
        mix = draw_mix(self.mixing, self.stream.seed, positions, self.preprocess.size)
        pixels = empty_pixels(len(positions), self.preprocess)
        rows, bad = pixels.numpy(), []
        for row, position in enumerate(positions):
            indices[row], failed = self._fill(rows[row], int(indices[row]), int(position))
            bad += failed
        labels = torch.from_numpy(self.source.labels[indices].astype(np.int64))
        numbers = (torch.from_numpy(indices), torch.from_numpy(mix.share), torch.from_numpy(mix.box))
        return Batch(pixels.permute(0, 3, 1, 2), labels, *numbers, tuple(bad))

    def _fill(self, place: Pixels, index: int, position: int) -> tuple[int, list[BadImage]]:
        """Write an image into its place, or the next one that can be read; return which, and those that cannot."""
        bad: list[BadImage] = []
        for attempt in range(min(TRIES, len(self.source))):
            chosen = (index + attempt) % len(self.source)
            try:
                place[:] = self._made(chosen, position)
            except DataError as error:
                if self.bad_files == "refuse":
                    raise DataError(f"{self.source.name(chosen)}: {error}") from None
                bad.append(BadImage(self.source.name(chosen), str(error)))
            else:
                return chosen, bad
        raise DataError(
            f"{len(bad)} images in a row cannot be read, from {bad[0].name} ({bad[0].reason}) on; look at them with "
            f"vitrail check"
        )

    def _made(self, index: int, position: int) -> Pixels:
        image, size = open_image(self.source.read(index)), self.preprocess.size
        plan = augment.plan(self.augmentation, image.height, image.width, size, draws(self.stream.seed, position))
        if plan.box is None:
            return augment.apply(plan, self.preprocess.fit(image.pixels(self.preprocess.channels)), size)
        scale = max(size[0] / plan.box.height, size[1] / plan.box.width)
        return augment.apply(plan, image.pixels(self.preprocess.channels, scale=scale), size)


@dataclass(frozen=True)
class Evaluation(Dataset[Any]):
    """The batches in which every image of a source is seen exactly once, in order, the last one smaller."""

    source: Source
    preprocess: Preprocess
    batch: int
    share: Share = WHOLE
    bad_files: BadFiles = "refuse"
    fast_decode: bool = False
    """Decode JPEGs at a smaller scale where that is enough; the pixels then differ a little."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch is {self.batch}; it should be 1 or more")
        _check_choice("bad_files", self.bad_files, get_args(BadFiles))

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(evaluation_share(len(self.source), self.share)) // self.batch)

    def __getitem__(self, number: int) -> Batch | _Refused:
        """Make a batch by its number."""
        indices = evaluation_share(len(self.source), self.share)[number * self.batch : (number + 1) * self.batch]
        pixels = empty_pixels(len(indices), self.preprocess)
        bad: list[BadImage] = []
        good: list[int] = []
        for index in indices:
            try:
                pixels.numpy()[len(good)] = self._made(index)
            except DataError as error:
                if self.bad_files == "refuse":
                    return _Refused(DataError, f"{self.source.name(index)}: {error}")
                bad.append(BadImage(self.source.name(index), str(error)))
            else:
                good.append(index)
        count = len(good)
        labels = torch.from_numpy(self.source.labels[np.array(good, np.int64)].astype(np.int64))
        nothing = (torch.ones(count), torch.zeros(count, 4, dtype=torch.int64))
        return Batch(
            pixels[:count].permute(0, 3, 1, 2), labels, torch.tensor(good, dtype=torch.int64), *nothing, tuple(bad)
        )

    def _made(self, index: int) -> Pixels:
        image = open_image(self.source.read(index))
        scale = self._scale(image) if self.fast_decode else 1.0
        return self.preprocess.fit(image.pixels(self.preprocess.channels, scale=scale))

    def _scale(self, image: LazyImage) -> float:
        pre = self.preprocess
        width, height = resized_size((image.width, image.height), pre.resize_to or pre.size, pre.resize)
        return max(width / image.width, height / image.height)


def training_batches(
    data: Training, start: int, stop: int, *, workers: int | None = None, pin: bool = False, method: str | None = None
) -> Generator[Batch, None, None]:
    """Give the batches of steps [start, stop), made ahead by `workers` processes; 0 makes them here."""
    yield from _batches(data, range(start, stop), workers, pin, method)


def evaluation_batches(
    data: Evaluation, *, workers: int | None = None, pin: bool = False, method: str | None = None
) -> Iterator[Batch]:
    """Give every batch, in order."""
    yield from _batches(data, range(len(data)), workers, pin, method)


def _batches(
    data: Training | Evaluation, numbers: range, workers: int | None, pin: bool, method: str | None
) -> Iterator[Batch]:
    workers = min(default_workers() if workers is None else workers, len(numbers))
    for made in made_ahead(data, numbers, workers=workers, pin=pin, method=method):
        if isinstance(made, _Refused):
            raise made.kind(made.message)
        yield made


def made_ahead(
    data: Dataset[Any], order: Iterable[Any], *, workers: int, pin: bool = False, method: str | None = None
) -> Generator[Any, None, None]:
    """Give `data[which]` for each `which` of `order`, in that order, made ahead by `workers` processes; 0: made here.

    `order` may be endless and may hold anything that travels to another process: only as much of it is read as is
    being made, two for each worker.
    """
    if workers < 0:
        raise ConfigError(f"workers is {workers}; it should be 0 or more")
    _check_choice("the way to start workers", method, (None, "fork", "spawn", "forkserver"))
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=order,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin,
        worker_init_fn=_begin_to_work,
        multiprocessing_context=method if workers else None,
        prefetch_factor=2 if workers else None,
    )
    try:
        yield from loader
    except (RuntimeError, ConnectionError, EOFError) as error:  # by when it died, torch or the connection notices first
        if isinstance(error, RuntimeError) and not re.match(r"DataLoader worker .*(exited|killed)", str(error)):
            raise
        raise DataError(
            f"a process that reads images ended ({_reason(error)}); this is most often a "
            f"lack of memory: use fewer workers, or a smaller batch"
        ) from None


def _check_choice(what: str, found: object, valid: tuple[object, ...]) -> None:
    if found not in valid:
        raise ConfigError(f"{what} is {found!r}; choose one of {', '.join(map(repr, valid))}")


def default_workers() -> int:
    """Return how many processes read images by default: one for each core that is this process's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    siblings = os.environ.get("LOCAL_WORLD_SIZE", "1")  # the processes that torchrun started here
    return max(1, min(cores // (int(siblings) if siblings.isdecimal() else 1), MOST_WORKERS))


def empty_pixels(count: int, preprocess: Preprocess) -> Tensor:
    """Return room for images (B, H, W, C); a worker takes it from memory that the caller sees too."""
    room = torch.empty(count, *preprocess.size, preprocess.channels, dtype=torch.uint8)
    return room.share_memory_() if get_worker_info() is not None else room


def _as_it_is(made: Any) -> Any:
    return made


def _begin_to_work(_: int) -> None:
    """Prepare a worker's process."""
    # A thread of the worker hands its tensors over, and waits for Python several times each; at the usual 5 ms the
    # caller waited 30 ms for a batch from a worker that was already busy with the next one, and now 2.
    sys.setswitchinterval(1e-4)
    _leave_the_end_to_the_caller()


def _leave_the_end_to_the_caller() -> None:
    """A request to stop reaches every process; the caller ends the workers, when it has saved what it wants to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # which a Mac does not have
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_caller_says_so, daemon=True).start()
    sys.excepthook = _print_unless_the_caller_left


def _end_when_the_caller_says_so() -> None:
    """Take SIGTERM from the caller alone; what others send to all processes is the caller's to answer.

    A caller that was killed says nothing. torch looks for that, too, but asks who the caller is only after this, when
    it may be gone already; then its end of a pipe is closed, unless a worker that was forked later holds that as well.
    """
    caller, parent = multiprocessing.parent_process(), os.getppid()  # which is another one where a server forks
    while caller is None or (caller.is_alive() and os.getppid() == parent):
        told = signal.sigtimedwait({signal.SIGTERM}, SECONDS_ALONE)
        if told is not None and told.si_pid == (parent if caller is None else caller.pid):
            break
    os._exit(0)


def _print_unless_the_caller_left(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The thread that hands memory over finds nobody at the other end when the caller leaves early."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(". ")
