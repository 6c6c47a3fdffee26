"""Select the images to evaluate a model on, and match their classes to the model's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.sources.alignment import Renumbered, renumber
from vitrail.data.sources.contents import Contents, digests_of
from vitrail.data.sources.given import Data, given_data
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.manifests import Manifest
from vitrail.data.sources.masks import Mask, Masked, mask_at
from vitrail.data.sources.opening import open_data, open_source, title_of
from vitrail.data.sources.parquet import ParquetImages
from vitrail.data.sources.parquet_files import Tables
from vitrail.data.sources.source import Labels, Pixels, Source, check_source
from vitrail.data.sources.splits import Splits, keys_of, split_of
from vitrail.data.sources.targets import AUTOMATIC, Labelling, Targets, recorded_labelling, targets_of
from vitrail.errors import ConfigError, DataError, StorageError, suggest
from vitrail.io import ContentError, read_json

CHOICES = ("test", "val", "train", "all")
CONTENT = "content"


@dataclass(frozen=True, eq=False)
class Joined:
    """The concatenation of several sources with the same classes."""

    sources: tuple[Source, ...]
    labels: Labels
    targets: Targets | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.sources[0].classes

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return a readable name of an image."""
        source, inner = self._find(index)
        return source.name(inner)

    def read(self, index: int) -> bytes | Pixels:
        """Return an image as it is stored."""
        source, inner = self._find(index)
        return source.read(inner)

    def stamp(self, index: int) -> tuple[int, int]:
        """Return two numbers that change when the stored image does."""
        source, inner = self._find(index)
        return source.stamp(inner)

    def mask(self, index: int) -> Mask:
        """Return the mask of an image."""
        source, inner = self._find(index)
        return mask_at(source, inner)

    def _find(self, index: int) -> tuple[Source, int]:
        for source in self.sources:
            if index < len(source):
                return source, index
            index -= len(source)
        raise IndexError(index)


class Selection(NamedTuple):
    """The images to evaluate on."""

    source: Source
    split: str
    """One of `CHOICES`."""
    held_out: bool
    """Whether the data or the model's own run declares that these were held out from training."""


def choose_images(
    data: Data,
    split: str | None = None,
    *,
    record: Mapping[str, Any] | None = None,
    labelling: Labelling = AUTOMATIC,
    on_progress: Progress | None = None,
) -> Selection:
    """Open the images to evaluate a model on.

    By default they are the test split that the data defines, else its validation split. If it defines neither, they
    are the test split of `record`, the split the model was trained with, if it fits this data; else all images. A
    requested split that is not defined anywhere is drawn as training would by default. `labelling` as in `open_data`.
    """
    if split is not None and split not in CHOICES:
        raise ConfigError(f"unknown split {split!r}; choose {', '.join(CHOICES)}")
    labelling = recorded_labelling(record) or labelling
    place = given_data(data, on_progress, labelling=labelling)
    everything, own = _open(place, labelling, on_progress)
    if split is None:
        split = next((name for name in ("test", "val") if name in own), None)
    if split is None:
        return _recorded_test(place, record, labelling, on_progress) or Selection(everything, "all", False)
    if split == "all":
        return Selection(everything, "all", False)
    # If a run drew its validation split from train, only the record knows what it trained on.
    if split in own and not (split == "train" and record is not None):
        return Selection(own[split], split, split != "train")
    if own and record is None:
        raise DataError(f"{title_of(place)} has no {split} split; it has {', '.join(own)}")
    splits = open_data(place, record=record, labelling=labelling, on_progress=on_progress)
    source = {"train": splits.train, "val": splits.val, "test": splits.test}[split]
    if source is None:
        raise DataError(f"the model was trained without a {split} split")
    return Selection(source, split, record is not None and split != "train")


class SeenInTraining(NamedTuple):
    """How many of the images that a model is evaluated on were used in its training run."""

    selected_on: int = 0
    """Number of images in the run's validation split, which selected the best checkpoint."""
    trained_on: int = 0
    compared_by: str | None = None
    """How they were compared with the run's images: by "content", by "name", or by both as far as known; None if
    nothing is known."""

    def caveat(self, images: int) -> str:
        """Return a caveat for a summary; empty if the model has certainly not seen the images."""
        caveat = ""
        if self.selected_on:
            caveat += (
                f"; selected on {'these' if self.selected_on == images else f'{self.selected_on:,} of these'} images"
            )
        if self.trained_on:
            caveat += f"; trained on {'these' if self.trained_on == images else f'{self.trained_on:,} of these'} images"
        if self.compared_by not in (None, CONTENT):
            caveat += f"; compared with the images of its run by {self.compared_by} only"
        return caveat


def seen_in_training(
    source: Source, record: Mapping[str, Any] | None, contents: Contents | None = None
) -> SeenInTraining:
    """Count the images that a run has used: by content if all digests are known and comparable, else also by name."""
    by_name = SeenInTraining() if record is None else _seen_by_name(source, record)
    if contents is None:
        return by_name
    digests = digests_of(source)
    selected, trained = (int(np.isin(digests, split).sum()) for split in (contents.val, contents.train))
    if not contents.comparable(digests):
        if not (selected or trained):
            return by_name if by_name.selected_on or by_name.trained_on else SeenInTraining()
        return SeenInTraining(selected, trained, "the content of images that are stored alike")
    if contents.complete:
        return SeenInTraining(selected, trained, CONTENT)
    hashed, of = len(contents.train) + len(contents.val), sum(contents.images)
    split = f"the content of {hashed:,} of {of:,}"
    compared = split if record is None else f"name and {split}"
    return SeenInTraining(max(selected, by_name.selected_on), max(trained, by_name.trained_on), compared)


def _seen_by_name(source: Source, record: Mapping[str, Any]) -> SeenInTraining:
    """Count the images whose names are in a run's split record."""
    names = record["names"] if isinstance(record["names"], Mapping) else {}
    val, test = (set(names.get(split) or ()) for split in ("val", "test"))
    keys = set(all_keys_of(source))
    if keys <= test:  # val and test folders may contain files of the same names
        return SeenInTraining(compared_by="name")
    if "train" in names:  # of a run on a subset; the images that it left out were not trained on
        return SeenInTraining(len(keys & val), len((keys & set(names["train"] or ())) - val - test), "name")
    # Names of a whole training split are not recorded; if all val and test images are present, the rest are training
    # images.
    complete = bool(val | test) and (val | test) <= keys
    trained = min(len(keys - val - test), _trained_on(record)) if complete else 0
    return SeenInTraining(len(keys & val), trained, "name")


def _trained_on(record: Mapping[str, Any]) -> int:
    counts = record["counts"].get("train") if isinstance(record["counts"], Mapping) else None
    return sum(counts.values()) if isinstance(counts, Mapping) else 0


def all_keys_of(source: Source) -> list[str]:
    """Return the keys of a source's images, also of several splits."""
    if isinstance(source, Joined):
        return [key for inner in source.sources for key in all_keys_of(inner)]
    return keys_of(source)


def recorded_split(bundle: Path | None) -> dict[str, Any] | None:
    """Return the split record of a bundle's run, so that no training image is used for testing."""
    if bundle is None:
        return None
    place = bundle.absolute().parent / "split.json"
    try:
        record = read_json(place)
    except OSError:
        return None
    except ContentError as error:
        raise DataError(
            f"{place} {error}, so the training images of the model are unknown; restore the file, or copy "
            f"{bundle.name} out of its run"
        ) from None
    return record if isinstance(record, dict) and {"names", "counts"} <= record.keys() else None


def _recorded_test(
    place: str | InMemory, record: Mapping[str, Any] | None, labelling: Labelling, on_progress: Progress | None
) -> Selection | None:
    """Return the test split of a record, or its validation split; None if the record does not fit the data."""
    if record is None:
        return None
    try:
        splits = open_data(place, record=record, labelling=labelling, on_progress=on_progress)
    except StorageError:
        raise  # the record may fit: without it, training images would be evaluated
    except DataError:
        return None
    if splits.test is not None:
        return Selection(splits.test, "test", True)
    return None if splits.val is None else Selection(splits.val, "val", True)


def _open(
    place: str | InMemory, labelling: Labelling, on_progress: Progress | None
) -> tuple[Source, dict[str, Source]]:
    """Return all images, and those of each split if the data defines splits."""
    if isinstance(place, InMemory) and set(place.splits) != {"train"}:
        return _whole(place), dict(place.splits)
    try:
        source = open_source(place, labelling=labelling, on_progress=on_progress)
    except StorageError:
        raise
    except DataError:  # several splits are not one source; data that cannot be opened at all fails again
        return _whole_and_splits(open_data(place, val=0, test=0, labelling=labelling, on_progress=on_progress))
    if not isinstance(source, Manifest | ParquetImages | Tables | Masked) or source.split_of is None:
        return source, {}
    rows = {name: np.flatnonzero(source.split_of == number) for number, name in enumerate(("train", "val", "test"))}
    return source, {name: split_of(source, indices) for name, indices in rows.items() if len(indices)}


def _whole(data: InMemory) -> Source:
    """Return the images of all splits, with the classes of the training split, or of the first."""
    first, *others = data.splits.values()
    sources = (first, *(renumber(source, first) for source in others))
    return joined(sources)


def _whole_and_splits(splits: Splits) -> tuple[Source, dict[str, Source]]:
    sources = {"train": splits.train, "val": splits.val, "test": splits.test}
    own = {name: source for name, source in sources.items() if source is not None}
    if len(own) == 1:
        return splits.train, {}
    return joined(tuple(own.values())), own


def joined(sources: tuple[Source, ...]) -> Joined:
    """Return the concatenation of sources with the same classes or targets."""
    each = [targets_of(source) for source in sources]
    targets = [some for some in each if some is not None]
    whole: Any = np.concatenate([some.values for some in targets]) if targets else None
    labels = np.concatenate([source.labels for source in sources])
    return Joined(sources, labels, replace(targets[0], values=whole) if targets else None)


def match_classes(source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
    """Return a source with the class indices of a model's outputs.

    Classes are matched by name if the model has `names`, else by index, for which the numbers of classes must agree.
    """
    check_source(source)
    if (targets := targets_of(source)) is not None:
        what = {"labels": "several labels per image", "values": "numbers", "masks": "masks"}[targets.kind]
        raise DataError(f"the data has {what}, but the model has one class per image; use a model of that task")
    unknown = np.flatnonzero(source.labels < 0)
    if len(unknown):
        more = f" and {len(unknown) - 1:,} more have" if len(unknown) > 1 else " has"
        raise DataError(
            f"{source.name(int(unknown[0]))}{more} no class, so predictions cannot be evaluated; "
            "put images into class folders, add labels in a manifest, or use vitrail predict"
        )
    if names is None or by_number:
        if len(source.classes) != outputs:
            raise DataError(
                f"the data has {len(source.classes):,} classes and the model {outputs:,}, so they cannot be "
                "matched by index; use data with the model's classes"
            )
        return source if names is None else Renumbered(source, names, source.labels)
    if tuple(source.classes) == names:
        return source
    numbers = {name: number for number, name in enumerate(names)}
    present = [source.classes[label] for label in np.unique(source.labels).tolist()]
    _check_names(present, names)
    lookup = np.array([numbers.get(name, -1) for name in source.classes], np.int64)
    return Renumbered(source, names, lookup[source.labels])


def _check_names(present: list[str], names: tuple[str, ...]) -> None:
    """Raise unless the model has exactly one class of each name."""
    if strange := [name for name in present if name not in names]:
        more = f" (and {len(strange) - 1:,} more)" if len(strange) > 1 else ""
        listed = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        raise DataError(
            f"the data has the class {strange[0]!r}{more}, which the model does not have; its {len(names):,} classes "
            f"are {listed}{suggest(strange[0], names)}"
        )
    if twice := [name for name in present if names.count(name) > 1]:
        raise DataError(f"the model has several classes named {twice[0]!r}; match the classes by index")
