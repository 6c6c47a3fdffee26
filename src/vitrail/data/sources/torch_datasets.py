"""A torch `Dataset` as a source: its items are images with labels, read when they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from vitrail.data.sources.in_memory import (
    Fingerprint,
    Fingerprinted,
    GivenLabels,
    InMemory,
    as_list,
    note_slow,
    read_labels,
)
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.items import is_pair, read_stored, stored_image
from vitrail.data.sources.source import Labels, Pixels
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets
from vitrail.errors import DataError, InputError, VitrailError

SAMPLED = 64
"""Number of items, spread evenly, whose content is part of the fingerprint."""
REPEATED = 8
"""Number of items, at least if there are so many, that are read twice: a random flip changes every other one."""
PROGRESS_EVERY = 1000
TITLE = "the dataset"


@dataclass(frozen=True, eq=False)
class DatasetItems:
    """The items of a map-style dataset."""

    dataset: Any
    labels: Labels
    classes: tuple[str, ...]
    targets: Targets | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return the number of an item."""
        return f"item {index}"

    def read(self, index: int) -> bytes | Pixels:
        """Return the image of an item."""
        return _image(self.dataset, index)[0]

    def stamp(self, index: int) -> tuple[int, int]:
        """Return the index: nothing else is known of an item that is not read."""
        return index, 0


def dataset_data(dataset: Any, labelling: Labelling = AUTOMATIC, on_progress: Progress | None = None) -> InMemory:
    """Open a dataset of (image, label), or of images."""
    _check_kind(dataset)
    count = len(dataset)
    if not count:
        raise DataError("the dataset is empty; give at least one image")
    chosen = sorted({*np.linspace(0, count - 1, min(SAMPLED, count)).astype(int).tolist()})
    sampled = [_image(dataset, index) for index in chosen]
    for index, (image, _) in list(zip(chosen, sampled, strict=True))[:: max(1, len(chosen) // REPEATED)]:
        _check_repeats(dataset, index, image)
    labels = _known_labels(dataset)
    if labels is None or [labels[index] for index in chosen] != [label for _, label in sampled]:
        labels = _read_labels(dataset, on_progress) if sampled[0][1] is not None else [None] * count
    labelled = read_labels(GivenLabels((labels,), classes=class_names(dataset)), labelling, title=TITLE, unit="item")
    fingerprint = Fingerprint()
    fingerprint.add_labels(labelled)
    for image, _ in sampled:
        fingerprint.add(image)
    items = DatasetItems(dataset, labelled.labels, labelled.classes, labelled.targets)
    source = Fingerprinted(items, fingerprint.hex)
    return InMemory("dataset", {"train": source}, fingerprint.hex)


def _check_kind(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise InputError("the data is a DataLoader; pass its dataset, loader.dataset: Vitrail makes the batches")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"the data is a {type(dataset).__name__} without random access; pass a dataset with __len__ and "
            "__getitem__, or write tar shards"
        )


def _image(dataset: Any, index: int) -> tuple[bytes | Pixels, object]:
    """Return the image of an item, and its label, or None."""
    where = f"item {index} of {TITLE}"
    try:
        item = dataset[index]
    except VitrailError:
        raise
    except Exception as error:  # code of the user
        raise DataError(f"{where} cannot be read: {type(error).__name__}: {str(error)[:200]}") from None
    image, label = item if is_pair(item) else (item, None)
    if isinstance(image, tuple | list) and len(image) == 1:  # of a `TensorDataset` without labels
        image = image[0]
    return read_stored(stored_image(image, where), where), as_list([label], "the labels")[0]


def _check_repeats(dataset: Any, index: int, before: bytes | Pixels) -> None:
    """Raise if an item differs when it is read again: training could not be resumed exactly."""
    if not np.array_equal(
        np.frombuffer(_raw(before), np.uint8), np.frombuffer(_raw(_image(dataset, index)[0]), np.uint8)
    ):
        raise DataError(
            f"item {index} of {TITLE} is another image when it is read again; leave out random transforms, Vitrail "
            "augments by itself"
        )


def _raw(image: bytes | Pixels) -> bytes:
    return image if isinstance(image, bytes) else image.tobytes()


# ── labels ──


def class_names(dataset: Any) -> Sequence[str] | None:
    """Return the class names of a dataset, if it has them."""
    if isinstance(dataset, Subset):
        return class_names(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        each = [class_names(part) for part in dataset.datasets]
        return each[0] if all(names == each[0] for names in each) else None
    names: Any = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not names:
        return None
    # torchvision's ImageNet has several names for a class.
    return [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]


def _known_labels(dataset: Any) -> list[object] | None:
    """Return the labels of a dataset without reading its images; None if it does not tell them."""
    if isinstance(dataset, Subset):
        whole = _known_labels(dataset.dataset)
        return None if whole is None else [whole[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_known_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else [label for part in parts for label in part or ()]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1].tolist() if len(dataset.tensors) == 2 and dataset.tensors[1].ndim in (1, 2) else None
    for name in ("targets", "labels"):
        known: Any = getattr(dataset, name, None)
        one_each = isinstance(known, list | tuple) or (isinstance(known, np.ndarray | Tensor) and known.ndim in (1, 2))
        if one_each and len(known) == len(dataset):
            return as_list(known, "the labels")
    return None


def _read_labels(dataset: Any, on_progress: Progress | None) -> list[object]:
    """Read every item for its label."""
    count = len(dataset)
    note_slow(f"reading the labels of {count:,} items: the dataset has no attribute targets or labels", count)
    labels = []
    for index in range(count):
        labels.append(_image(dataset, index)[1])
        if on_progress is not None and not (index + 1) % PROGRESS_EVERY:
            on_progress(index + 1)
    return labels
