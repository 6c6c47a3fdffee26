"""The masks of a predict job as files: an index PNG and an overlay for every image.

    FOLDER/masks/a/b.png      the class of every pixel, at the size of the image as it is displayed
    FOLDER/overlays/a/b.jpg   the image in the colours of its mask, to look at

The files of an image are complete before its row is written, so a job that is stopped has no row without its mask.
"""

import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.acceleration.cpu.threads import start_pool
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import default_workers
from vitrail.data.decode import open_image
from vitrail.data.inputs import Item
from vitrail.data.mask_images import mask_png, overlay
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.mask_folders import IMAGES
from vitrail.data.sources.source import Pixels, reason_of
from vitrail.errors import ConfigError, DataError, StorageError
from vitrail.inference.mirrored_names import MirroredNames
from vitrail.inference.writing import PredictionRow, Sink
from vitrail.io import PARTIAL, full_disk_hint, remove_partial_files
from vitrail.tasks.lookup import task_of
from vitrail.tasks.segmentation import MaskPrediction, check_mask_classes
from vitrail.text import plural, printable_path

MASKS, OVERLAYS = "masks", "overlays"
QUALITY = 90
"""Of the JPEGs."""
MAX_JPEG = 65_500
"""The longest side of a JPEG; a larger overlay is a PNG."""


class _Waiting(NamedTuple):
    """An image whose row has not been written."""

    item: Item
    name: str


class MaskFolder:
    """The folder that the masks of a job are written to. Images pass through `named`, then their rows through `write`.

    An image is decoded a second time, at its full size: the pixels of the model's input are too few for the overlay.
    """

    def __init__(self, folder: Path, places: Sequence[str], channels: int = 3) -> None:
        self.folder, self.channels = folder, channels
        self._names = MirroredNames(places)
        self._waiting: deque[_Waiting] = deque()
        self._missing = 0
        self._started = False
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "MaskFolder":
        with _explained(self.folder):
            for kind in (MASKS, OVERLAYS):
                (self.folder / kind).mkdir(parents=True, exist_ok=True)
            remove_partial_files(self.folder)  # of a process that was killed
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        remove_partial_files(self.folder)

    def named(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the images of a job, all of them and in order: those that have a row, and after `start` the others."""
        for item in items:
            name = self._names.of(item.name)
            if self._started:
                self._waiting.append(_Waiting(item, name))
            elif not self._mask(name).is_file():
                self._missing += 1
            yield item

    def start(self, sink: Sink) -> None:
        """Expect the rows of the other images; raise if a mask of the earlier ones is gone."""
        self._started = True
        if self._missing > sink.bad:  # an image that could not be read has no mask
            raise DataError(
                f"{printable_path(os.fspath(self.folder))} lacks {plural(self._missing - sink.bad, 'mask')} of the "
                f"{plural(sink.done, 'row')} written so far; restart with --overwrite"
            )

    def write(self, rows: Sequence[PredictionRow]) -> list[PredictionRow]:
        """Write the masks of the next images; return their rows with the names of the files."""
        some = [self._waiting.popleft() for _ in rows]
        with _explained(self.folder):
            if self._pool is None:
                self._pool = start_pool(max(1, default_workers()), 1, "masks")
            return list(self._pool.map(self._write, rows, some))

    def _write(self, row: PredictionRow, image: _Waiting) -> PredictionRow:
        prediction = row.prediction
        if not isinstance(prediction, MaskPrediction) or prediction.logits is None:
            return row
        pixels, classes = full_pixels(image.item, self.channels), len(prediction.logits)
        mask = prediction.mask(pixels.shape[0], pixels.shape[1])
        shown = Image.fromarray(overlay(pixels, mask, classes))
        file = io.BytesIO()
        is_jpeg = max(shown.size) <= MAX_JPEG
        shown.save(file, "JPEG" if is_jpeg else "PNG", quality=QUALITY)
        suffix = ".jpg" if is_jpeg else ".png"
        self._replace(self.folder / OVERLAYS / f"{image.name}{suffix}", file.getvalue())
        self._replace(self._mask(image.name), mask_png(mask, classes))
        return row._replace(prediction=replace(prediction, file=os.fspath(self._mask(image.name))))

    def _mask(self, name: str) -> Path:
        return self.folder / MASKS / f"{name}.png"

    def _replace(self, path: Path, content: bytes) -> None:
        """Write a file atomically. The temporary name is short: that of the file may be as long as names can be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{os.getpid()}-{threading.get_ident()}{PARTIAL}"
        temporary.write_bytes(content)
        temporary.replace(path)


def full_pixels(item: Item, channels: int) -> Pixels:
    """Decode an image at its full size, as it is displayed: (height, width, 1 or 3)."""
    try:
        image = open_image(item.read())
        pixels = image.pixels(channels)
    except StorageError:
        raise  # the image may be as it was
    except DataError as error:
        raise type(error)(f"{printable_path(item.name)} has changed while it was predicted: {error}") from None
    return pixels if pixels.shape[2] in (1, 3) else pixels[:, :, : 3 if pixels.shape[2] > 3 else 1]


def check_masks(bundle: Bundle) -> None:
    """Raise unless a bundle predicts masks that can be written."""
    task = task_of(bundle)
    if not task.is_dense:
        raise ConfigError(f"--masks is for segmentation, but the task of this model is {task.name}; leave out --masks")
    check_mask_classes(bundle.model.config.classes)


def check_whole(preprocess: Preprocess) -> None:
    """Raise if the model does not see the whole image, so that its mask would not fit."""
    if not preprocess.sees_whole:
        raise ConfigError(
            "the preprocessing of this model crops or pads images, so a mask would not fit its image; add "
            "--override preprocess.resize=squash, or --window 1"
        )


def check_mask_folder(folder: Path, places: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """Raise if a folder cannot take masks, or has files that would be mixed with those of this job.

    `resume` is whether the job continues an earlier one.
    """
    name = printable_path(os.fspath(folder))
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{name} is a file; give a folder for the masks")
    written = [os.path.realpath(folder / kind) for kind in (MASKS, OVERLAYS)]
    for place in places:
        images = os.path.realpath(place)
        if os.path.isdir(place) and any(os.path.commonpath([images, kind]) == images for kind in written):
            raise DataError(
                f"{name} would put masks among the images of {printable_path(place)}; give a folder outside of it"
            )
    if overwrite and _is_dataset(folder):
        raise DataError(
            f"{printable_path(os.fspath(folder / MASKS))} has the masks of a dataset, which predict did not write; "
            "choose another folder"
        )
    if resume or overwrite:
        return
    for kind in (MASKS, OVERLAYS):
        if _has_files(folder / kind):
            raise DataError(
                f"{printable_path(os.fspath(folder / kind))} already has files; choose another folder, or replace them "
                "with --overwrite"
            )


def _is_dataset(folder: Path) -> bool:
    """Whether the masks in a folder are labels: predict also writes overlays."""
    return (folder / IMAGES).is_dir() and _has_files(folder / MASKS) and not (folder / OVERLAYS).is_dir()


def _has_files(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError as fault:
        raise DataError(f"{printable_path(os.fspath(folder))} cannot be read: {reason_of(fault)}") from None


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        hint = full_disk_hint(fault, "rerun the same command with --resume")
        raise DataError(
            f"masks cannot be written to {printable_path(os.fspath(folder))}: {reason_of(fault)}{hint}"
        ) from None
