"""What `data=` takes: a path, or a Python object that holds or lists images."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.data.inputs import ImageInput
from vitrail.data.sources.dataframes import frame_data, is_frame
from vitrail.data.sources.huggingface import huggingface_data, is_huggingface, open_saved
from vitrail.data.sources.in_memory import Fingerprint, Fingerprinted, InMemory
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.items import Items, array_data, column_data, is_pair, list_data
from vitrail.data.sources.source import SUPPORTED_DATA, Source, place_of
from vitrail.data.sources.splits import SPLITS
from vitrail.data.sources.targets import AUTOMATIC, Labelling, check_no_columns, resolved
from vitrail.data.sources.torch_datasets import dataset_data
from vitrail.errors import DataError, InputError


class Frame(Protocol):
    """A DataFrame, of pandas or polars."""

    @property
    def columns(self) -> Any:
        """The names of the columns."""

    def __getitem__(self, name: Any, /) -> Any:
        """Return a column."""


class HuggingFaceDataset(Protocol):
    """A `datasets.Dataset`."""

    @property
    def features(self) -> Any:
        """The types of the columns."""

    def __getitem__(self, key: Any, /) -> Any:
        """Return a row or a column."""


Label = str | int | float | Sequence[str] | Sequence[int] | Sequence[float]
LabelColumn = Sequence[Label] | np.ndarray[Any, Any] | Tensor
Images = np.ndarray[Any, Any] | Tensor | Sequence[ImageInput]
InPython = (
    tuple[Images, LabelColumn] | Sequence[tuple[ImageInput, Label]] | Images | Dataset[Any] | Frame | HuggingFaceDataset
)
Data = str | os.PathLike[str] | InPython | Mapping[str, InPython] | InMemory
"""What functions take as `data`: a path; or images with labels in Python.

- a tuple `(images, labels)`: an array (images, height, width[, channels]), a tensor (images, channels, height, width),
  or a list of images, with one label per image; or with a list of labels, a row of 0 and 1, or numbers for each;
- a list of `(image, label)`, where an image is a path, the bytes of a file, a Pillow image, an array or a tensor;
- a map-style torch `Dataset` with such items;
- a DataFrame of pandas or polars with the columns of a manifest, such as `path`, `label` and `split`;
- a `datasets.Dataset` of Hugging Face;
- a mapping from `"train"`, `"val"` and `"test"` to any of these, such as a `datasets.DatasetDict`.
"""


def given_data(
    data: object, on_progress: Progress | None = None, *, labelling: Labelling = AUTOMATIC
) -> str | InMemory:
    """Return a path as text, and anything else as data in memory; raise for what is neither.

    Data in memory is labelled when it is opened: later, another labelling has no effect on it.
    """
    if isinstance(data, str | bytes | os.PathLike):
        return place_of(data)
    if isinstance(data, InMemory):
        return data
    if isinstance(data, Mapping):
        return _mapping_data(data, labelling, on_progress)
    return _convert(data, labelling, on_progress)


def _convert(data: Any, labelling: Labelling, on_progress: Progress | None) -> InMemory:
    if is_huggingface(data):
        return huggingface_data(data, labelling)
    if is_frame(data):
        return frame_data(data, labelling)
    check_no_columns(labelling, "the data")
    if isinstance(data, np.ndarray | Tensor):
        return array_data(data, None)
    if _is_two_columns(data):
        return _columns(data[0], data[1], labelling)
    if isinstance(data, list | tuple):
        return list_data(data, labelling)
    if isinstance(data, Dataset | DataLoader) or (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return dataset_data(data, labelling, on_progress)
    kind = type(data)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__.partition('.')[0]}."
    raise InputError(
        f"the data is of type {home}{kind.__name__}, which is not supported; give a path ({SUPPORTED_DATA}), or "
        "images in Python: (images, labels), a list of pairs, a torch Dataset, a DataFrame or a Hugging Face dataset"
    )


def saved_data(place: str, labelling: Labelling = AUTOMATIC) -> InMemory:
    """Open a folder written by `save_to_disk` of Hugging Face."""
    saved = open_saved(place)
    return _mapping_data(saved, labelling, None) if isinstance(saved, Mapping) else _convert(saved, labelling, None)


def _columns(images: Any, labels: Any, labelling: Labelling) -> InMemory:
    """Open images and their labels."""
    if isinstance(images, np.ndarray | Tensor):
        return array_data(images, labels, labelling)
    if isinstance(images, str | bytes | os.PathLike) or not hasattr(images, "__len__"):
        raise InputError(
            f"a tuple of two should be (images, labels), but the first is of type {type(images).__name__}; put "
            "images without labels into a list"
        )
    return column_data(list(images), labels, labelling)


def _mapping_data(data: Mapping[Any, Any], labelling: Labelling, on_progress: Progress | None) -> InMemory:
    """Open a mapping from the names of splits to their images; the labels of all are read as those of train."""
    named: dict[str, InMemory] = {}
    for name, images in sorted(data.items(), key=lambda item: str(item[0]).lower() != "train"):
        split = SPLITS.get(str(name).lower())
        if split is None or split in named:
            raise InputError(
                f"the data is a mapping with the keys {', '.join(map(repr, data))}; name its splits train, val and "
                "test, each once, or pass a tuple (images, labels)"
            )
        if isinstance(images, str | bytes | os.PathLike | Mapping):
            raise InputError(f"the {name} split is of type {type(images).__name__}; give its images with labels")
        named[split] = _convert(images, labelling, on_progress)
        if len(named[split].splits) > 1:
            raise DataError(f"the {name} split has a column split; remove the column, or pass the data by itself")
        labelling = resolved(labelling, named[split].splits["train"])
    if not named:
        raise DataError("the data is an empty mapping; give its splits train, val and test")
    fingerprint = Fingerprint()
    sources: dict[str, Source] = {}
    for split in [name for name in ("train", "val", "test") if name in named]:
        fingerprint.add(split)
        fingerprint.add(named[split].fingerprint)
        sources[split] = _prefixed(named[split].splits["train"], f"{split} ")
    return InMemory(next(iter(named.values())).kind, sources, fingerprint.hex)


def _prefixed(source: Source, prefix: str) -> Source:
    """Return a source whose images are named after their split."""
    if isinstance(source, Fingerprinted):
        return replace(source, place=prefix)
    return replace(source, unit=prefix + source.unit) if isinstance(source, Items) else source


def lists_images(data: object) -> bool:
    """Whether `predict` should open an object as data: it is not itself an image, nor a sequence of images."""
    if isinstance(data, tuple) and _is_two_columns(data):
        return _is_column(data[1], data[0])
    if isinstance(data, list | tuple):
        return bool(data) and is_pair(data[0])
    return isinstance(data, Mapping | Dataset | DataLoader) or is_frame(data) or is_huggingface(data)


def _is_two_columns(data: object) -> bool:
    """Whether an object is (images, labels), not two pairs: a list of two images is a column, a tuple is a pair."""
    if not isinstance(data, tuple) or len(data) != 2:
        return False
    return isinstance(data[0], list) or not is_pair(data[0])


def _is_column(labels: object, images: object) -> bool:
    """Whether an object is a column of labels, or an array with a row for each of several `images`; no image is."""
    if isinstance(labels, np.ndarray | Tensor):
        return labels.ndim == 1 or (labels.ndim == 2 and getattr(images, "ndim", 4) == 4)
    return isinstance(labels, list | tuple) or type(labels).__name__ == "Series"
