"""Detect the kind of a dataset, and open it."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from vitrail.data.sources.alignment import Renumbered, not_trainable, renumber, strange_classes
from vitrail.data.sources.detection import are_tables, group_shards, kind_of, look_into, split_folders
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.given import Data, given_data, saved_data
from vitrail.data.sources.huggingface import is_saved
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.manifests import open_manifest
from vitrail.data.sources.mask_folders import check_not_masks, find_mask_folders, open_mask_folder
from vitrail.data.sources.mask_manifests import mask_column, open_mask_manifest
from vitrail.data.sources.masks import Masked
from vitrail.data.sources.parquet import Table, open_parquet
from vitrail.data.sources.parquet_files import Tables, open_tables
from vitrail.data.sources.shards import open_shards
from vitrail.data.sources.source import Source, digits
from vitrail.data.sources.splits import (
    Splits,
    check_counts,
    check_subset,
    draw_split,
    make_record,
    split_indices,
    split_of,
    split_source,
    splits_from_record,
    take_subset,
    too_few_images,
)
from vitrail.data.sources.tar import expand_pattern
from vitrail.data.sources.targets import (
    AUTOMATIC,
    IGNORED,
    Labelling,
    check_labelling,
    check_no_columns,
    labelling_record,
    recorded_labelling,
    resolved,
    targets_of,
)
from vitrail.errors import ConfigError, DataError
from vitrail.text import plural, printable_path

S = TypeVar("S", bound=Source)
T = TypeVar("T")


def open_data(
    data: Data,
    *,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
    fraction: float = 1.0,
    per_class: int | None = None,
    record: Mapping[str, Any] | None = None,
    labelling: Labelling = AUTOMATIC,
    faults: Faults | None = None,
    on_progress: Progress | None = None,
) -> Splits:
    """Open training data in three splits: those that the data defines, the others drawn from train.

    `data` is a folder with one sub-folder per class (or with such folders in train/, val/ and test/), a manifest
    (.csv, .tsv, .jsonl, .parquet), tar shards or Parquet files (one, a folder of them, a pattern), a folder written by
    `save_to_disk` of Hugging Face, the word "digits", or a Python object with images (`Data`).

    `fraction` keeps only this fraction of every class in the training split, `per_class` at most this many images of
    it; with the same seed, a smaller subset is contained in every larger one. The `record` of an earlier split
    reproduces it, regardless of `seed` and the fractions. `labelling` tells what the images are labelled with, and in
    which columns; by default, whatever the labels look like. With `faults`, unusable items are skipped and named there,
    and data that cannot be split is used for training only.
    """
    check_subset(fraction, per_class)
    labelling = recorded_labelling(record) or labelling
    opened = given_data(data, on_progress, labelling=labelling)
    title = title_of(opened)
    if isinstance(opened, InMemory):
        named = _labelled_splits(opened)
    else:
        named = _open_splits(opened, labelling, faults, on_progress)
    train = named["train"]
    check_labelling(labelling, train, title)
    wrong = not_trainable(title, train)
    others = [name for name in ("val", "test") if name in named]
    for name in others:
        strange = strange_classes(named[name], train, f"the {name} split of {title}")
        if strange and faults is not None and targets_of(train) is None:
            labelled = np.isin(np.array(named[name].classes)[named[name].labels], np.array(train.classes))
            named[name] = split_of(named[name], np.flatnonzero(labelled))
        wrong += strange
    if faults is None:
        report_faults(wrong, title, None)
    named |= {name: renumber(named[name], train) for name in others}
    if per_class is not None and targets_of(train) is not None:
        raise ConfigError(f"per_class is {per_class}, but the images of {title} have no classes; use fraction")
    if record is not None:
        return _as_recorded(named, record)
    alone = len(named) == 1
    fractions = {"val": val, "test": test} if alone else {"val": val} if "val" not in named and val > 0 else {}
    if faults is not None:
        few = too_few_images(train, val=fractions.get("val", 0), test=fractions.get("test", 0))
        faults += [*wrong, *few]
        if wrong or few:
            return Splits(train, named.get("val"), named.get("test"), {})
    whole = split_source(train, seed=seed, val=val, test=test) if alone else _draw_val(named, seed, fractions)
    kept = labelling_record(labelling, train)
    whole = whole._replace(record={**whole.record, **kept})
    return take_subset(whole, seed=seed, fraction=fraction, per_class=per_class)


def _draw_val(named: Mapping[str, Source], seed: int, fractions: Mapping[str, float]) -> Splits:
    """Return the splits that the data defines; the validation split is drawn if it has a fraction."""
    train, val, test = named["train"], named.get("val"), named.get("test")
    if fractions:
        for_train, for_val, _ = draw_split(train, seed=seed, val=fractions["val"], test=0)
        train, val = split_of(train, for_train), split_of(train, for_val)
    record = make_record("given", train, val, test, seed=seed if fractions else None, fractions=fractions)
    return Splits(train, val, test, record)


def title_of(data: str | InMemory) -> str:
    """Return what messages call the data."""
    return data.title if isinstance(data, InMemory) else printable_path(data)


def _labelled_splits(data: InMemory) -> dict[str, Source]:
    if "train" not in data.splits:
        raise DataError(f"{data.title} has no train split; give one, besides {', '.join(data.splits)}")
    data.check_labelled()
    return dict(data.splits)


def open_unlabelled(data: Data, *, seed: int = 0, val: float = 0.05, labelling: Labelling = AUTOMATIC) -> Splits:
    """Open images to pretrain on: a training split, and a validation split drawn from it; no labels are needed.

    If the data defines splits, only its training split is used. Classes are kept if all images have one, and if there
    are two images to validate on; otherwise, as with several labels or numbers, all images are of the class "image".
    Masks are not read.
    """
    opened = given_data(data, labelling=labelling)
    source = _training_images(opened, labelling)
    if len(source) < 2:
        raise DataError(f"{title_of(opened)} has {plural(len(source), 'image')}; pretraining needs at least two")
    nothing = np.zeros_like(source.labels)
    # Not by class: a rare one need not be in both splits.
    for_train, for_val, _ = split_indices(nothing, seed=seed, val=val, test=0)
    alone = len(for_val) == 1  # without neighbours to compare it with
    if alone or (source.labels < 0).any() or targets_of(source) is not None:
        source = Renumbered(source, ("image",), nothing, IGNORED)
    train, drawn = split_of(source, for_train), split_of(source, for_val) if len(for_val) else None
    return Splits(train, drawn, None, make_record("drawn", train, drawn, None, seed=seed, fractions={"val": val}))


def _images_with_masks(place: str) -> str | None:
    """Return the folder of the training images if a folder of masks is next to it."""
    if is_saved(place) or kind_of(place) != "folder":
        return None
    inside = look_into(place)
    splits = {} if find_mask_folders(place, inside) else split_folders(place, inside.folders)
    train = splits.get("train", place)
    found = find_mask_folders(train, look_into(train))
    return None if found is None else found["train"].images


def _training_images(data: str | InMemory, labelling: Labelling) -> Source:
    """Return the images of the training split, all images if there are no splits; other splits are not opened."""
    if isinstance(data, str) and is_saved(data):
        data = saved_data(data, labelling)
    if isinstance(data, InMemory):
        return data.splits["train"] if "train" in data.splits else _only_split(data)
    if (images := _images_with_masks(data)) is not None:
        return open_folder(images, unlabelled=True)
    kind, shards = kind_of(data), list[str]()
    if kind == "pattern":
        shards = group_shards(expand_pattern(data))["train"]
    elif kind == "folder":
        inside = look_into(data)
        splits = split_folders(data, inside.folders)
        folder = splits.get("train", data)
        # Names of shards divide a folder into splits, unless it is one.
        shards = look_into(folder).shards if splits else group_shards(inside.shards)["train"]
        if not shards:
            check_no_columns(labelling, printable_path(folder))
            return open_folder(folder, unlabelled=True)
    source = (
        _one(data, {"train": shards}, labelling, None) if shards else _open_source(data, labelling, None, masks=False)
    )
    if isinstance(source, Table | Tables):
        return _splits_in(data, source)["train"]
    return source


def open_source(data: Data, *, labelling: Labelling = AUTOMATIC, on_progress: Progress | None = None) -> Source:
    """Open data as one source, to predict or evaluate. Images without a class have label -1."""
    return _open_source(given_data(data, on_progress, labelling=labelling), labelling, on_progress)


def _open_source(
    place: str | InMemory, labelling: Labelling, on_progress: Progress | None, *, masks: bool = True
) -> Source:
    """Open data as one source; without `masks`, those of a manifest are not read."""
    if isinstance(place, str) and is_saved(place):
        place = saved_data(place, labelling)
    if isinstance(place, InMemory):
        return _only_split(place)
    kind = kind_of(place)
    if kind == "digits":
        check_no_columns(labelling, place)
        return digits()
    if kind == "pattern":
        return _one(place, group_shards(expand_pattern(place)), labelling, on_progress)
    if kind == "folder":
        inside = look_into(place)
        if found := find_mask_folders(place, inside):
            if len(found) > 1:
                raise DataError(f"{printable_path(place)} has the splits {', '.join(found)}; give the folder of one")
            return open_mask_folder(found["train"], labelling, None, on_progress)
        if folders := split_folders(place, inside.folders):
            splits = ", ".join(sorted(os.path.basename(folder) for folder in folders.values()))
            raise DataError(f"{printable_path(place)} has the splits {splits}; give the folder of one of them")
        if inside.shards:
            return _one(place, group_shards(inside.shards), labelling, on_progress)
        check_no_columns(labelling, printable_path(place))
        return open_folder(place, unlabelled=True, on_progress=on_progress)
    if kind == "shard":
        return open_shards([place], labelling=labelling, unlabelled=True, on_progress=on_progress)
    return _open_table(place, labelling, True, None, on_progress, masks=masks)


def _only_split(data: InMemory) -> Source:
    if len(data.splits) > 1:
        raise DataError(f"{data.title} has the splits {', '.join(data.splits)}; give one of them")
    return next(iter(data.splits.values()))


def _one(place: str, shards: dict[str, list[str]], labelling: Labelling, on_progress: Progress | None) -> Source:
    """Open shards as one source, unless they belong to several splits."""
    if len(shards) > 1:
        raise DataError(
            f"{printable_path(place)} has shards of the splits {', '.join(shards)}; select one split with a pattern"
        )
    paths = next(iter(shards.values()))
    if are_tables(paths):
        return open_tables(paths, labelling=labelling, unlabelled=True, on_progress=on_progress)
    return open_shards(paths, labelling=labelling, unlabelled=True, on_progress=on_progress)


def _open_splits(
    place: str, labelling: Labelling, faults: Faults | None, on_progress: Progress | None
) -> dict[str, Source]:
    """Open the splits that the data defines; data without splits is all "train"."""
    if is_saved(place):
        return _labelled_splits(saved_data(place, labelling))
    kind = kind_of(place)
    if kind == "digits":
        check_no_columns(labelling, place)
        return {"train": digits()}
    if kind == "pattern":
        return _open_shards_of_splits(place, expand_pattern(place), labelling, faults, on_progress)
    if kind == "folder":
        inside = look_into(place)
        if found := find_mask_folders(place, inside):
            return dict(_alike(found, labelling, lambda pair, some: open_mask_folder(pair, some, faults, on_progress)))
        if splits := split_folders(place, inside.folders):
            return _alike(splits, labelling, lambda folder, some: _open_split(folder, some, faults, on_progress))
        if inside.shards:
            return _open_shards_of_splits(place, inside.shards, labelling, faults, on_progress)
        check_no_columns(labelling, printable_path(place))
        check_not_masks(place, inside, labelling)
        return {"train": open_folder(place, faults=faults, on_progress=on_progress)}
    if kind == "shard":
        return {"train": open_shards([place], labelling=labelling, on_progress=on_progress)}
    return _splits_in(place, _open_table(place, labelling, False, faults, on_progress))


def _alike(places: Mapping[str, T], labelling: Labelling, opened: Callable[[T, Labelling], S]) -> dict[str, S]:
    """Open splits, first train: the labels of the others are read as its labels."""
    sources = {"train": opened(places["train"], labelling)}
    labelling = resolved(labelling, sources["train"])
    return {name: sources[name] if name in sources else opened(place, labelling) for name, place in places.items()}


def _splits_in(place: str, table: Table | Tables | Masked) -> dict[str, Source]:
    """Split a manifest by its split column, if it has one."""
    if table.split_of is None:
        return {"train": table}
    rows = {name: np.flatnonzero(table.split_of == number) for number, name in enumerate(("train", "val", "test"))}
    if not len(rows["train"]):
        raise DataError(
            f"{printable_path(place)} has no rows of the training split; write train in the split column of some rows"
        )
    return {name: split_of(table, indices) for name, indices in rows.items() if len(indices)}


def _open_table(
    place: str, labelling: Labelling, unlabelled: bool, faults: Faults | None, on_progress: Progress | None,
    *, masks: bool = True,
) -> Table | Masked:  # fmt: skip
    if labelling.kind == "masks" and are_tables([place]):
        raise DataError(
            f"{printable_path(place)} is a Parquet file, which cannot list masks; use a CSV or JSONL manifest, or the "
            "folders images and masks"
        )
    if masks and not are_tables([place]) and (column := mask_column(place, labelling)) is not None:
        return open_mask_manifest(place, column, labelling, faults, on_progress)
    opener = open_parquet if are_tables([place]) else open_manifest
    return opener(place, labelling=labelling, unlabelled=unlabelled, faults=faults, on_progress=on_progress)


def _open_split(place: str, labelling: Labelling, faults: Faults | None, on_progress: Progress | None) -> Source:
    """Open the folder of one split."""
    inside = look_into(place)
    if found := find_mask_folders(place, inside):
        return open_mask_folder(found["train"], labelling, faults, on_progress)
    if are_tables(inside.shards):
        return open_tables(inside.shards, labelling=labelling, faults=faults, on_progress=on_progress)
    if inside.shards:
        return open_shards(inside.shards, labelling=labelling, on_progress=on_progress)
    check_no_columns(labelling, printable_path(place))
    check_not_masks(place, inside, labelling)
    return open_folder(place, faults=faults, on_progress=on_progress)


def _open_shards_of_splits(
    place: str, shards: list[str], labelling: Labelling, faults: Faults | None, on_progress: Progress | None
) -> dict[str, Source]:
    groups = group_shards(shards)
    if not are_tables(shards):
        tars = _alike(
            groups, labelling, lambda group, some: open_shards(group, labelling=some, on_progress=on_progress)
        )
        return dict(tars)
    tables = _alike(
        groups,
        labelling,
        lambda group, some: open_tables(group, labelling=some, faults=faults, on_progress=on_progress),
    )
    if len(tables) == 1:
        return _splits_in(place, tables["train"])
    return dict(tables)


def _as_recorded(named: Mapping[str, Source], record: Mapping[str, Any]) -> Splits:
    """Return the recorded splits: those that the data defines must have the recorded counts, others are restored."""
    drawn = {
        key: {
            split: value for split, value in dict(record.get(key, {})).items() if split == "train" or split not in named
        }
        for key in ("names", "counts")
    }
    splits = splits_from_record(named["train"], drawn)
    for name in named.keys() - {"train"}:
        check_counts(name, named[name], dict(record.get("counts", {})).get(name, {}))
    val, test = named.get("val", splits.val), named.get("test", splits.test)
    return Splits(splits.train, val, test, dict(record))
