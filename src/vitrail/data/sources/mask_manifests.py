"""Manifests with a column of masks: paths relative to the manifest, as those of the images."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from vitrail.data.remote.filesystems import is_remote, path_in
from vitrail.data.sources.columns import MASK_COLUMNS
from vitrail.data.sources.index_files import Names, Progress
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.manifests import (
    Manifest,
    is_file,
    listed_path,
    open_manifest,
    read_csv,
    read_in_words,
    read_jsonl,
)
from vitrail.data.sources.mask_classes import masked
from vitrail.data.sources.mask_scan import scan_masks
from vitrail.data.sources.masks import Masked
from vitrail.data.sources.source import SUFFIXES
from vitrail.data.sources.targets import Labelling
from vitrail.errors import ConfigError, DataError
from vitrail.text import printable_path

SAMPLED_ROWS = 20


def mask_column(place: str, labelling: Labelling) -> str | None:
    """Return the column of a CSV or JSONL manifest that holds masks; None if its images have other labels.

    If nothing asks for masks, a column of labels goes first, and the values of the column must be names of images.
    """
    if labelling.kind not in (None, "masks") or (labelling.kind is None and labelling.columns):
        return None
    if labelling.columns:
        if len(labelling.columns) > 1:
            raise ConfigError(
                f"{len(labelling.columns)} columns were named ({', '.join(labelling.columns)}), but an image has one "
                "mask; name one column"
            )
        return labelling.columns[0]
    read = read_jsonl if path_in(place).lower().endswith(".jsonl") else read_csv
    with read_in_words(place):
        columns, _ = read(place, unlabelled=True)
        found = {column.strip().lower(): column for column in reversed(columns.header)}
        column = next((found[name] for name in MASK_COLUMNS if name in found), None)
        if column is None and labelling.kind == "masks":
            listed = ", ".join(map(repr, columns.header[:20]))
            raise DataError(
                f"{printable_path(place)} has no column mask; its columns are {listed}: rename one, or name it with "
                "--set data.labels=COLUMN"
            )
        if column is None or labelling.kind == "masks":
            return column
        rows = read(place, Labelling(columns=(column,)), unlabelled=True)[1]
        cells = [row.labels[0] for row in islice(rows, SAMPLED_ROWS) if row.labels]
    return column if not columns.labels and _are_images(cells) else None


def _are_images(cells: Sequence[object]) -> bool:
    """Whether all values that are there are names of images."""
    names = [str(cell).strip() for cell in cells if cell is not None and str(cell).strip()]
    return bool(names) and all("." in name and path_in(name).rpartition(".")[2].lower() in SUFFIXES for name in names)


def open_mask_manifest(
    place: str, column: str, labelling: Labelling, faults: Faults | None = None, on_progress: Progress | None = None
) -> Masked:
    """Open a manifest whose images have masks. With `faults`, unusable items are skipped and named there."""
    asked = Labelling("masks", (column,))
    listed = open_manifest(place, labelling=asked, faults=faults, on_progress=on_progress)
    paths = [listed_path(place, os.fsencode(listed.classes[label])) for label in listed.labels.tolist()]
    there = np.array([is_file(path) for path in paths], np.bool_)
    wrong = [
        f"the mask {printable_path(paths[row])}, listed in {printable_path(place)}, does not exist; correct the path, "
        "which is relative to the manifest's folder"
        for row in np.flatnonzero(~there).tolist()
    ]
    report_faults(wrong, printable_path(place), faults)
    images = np.flatnonzero(there)
    files = Names.of(paths[row] for row in images.tolist())
    scan = scan_masks(_rows(listed, images), files, place, on_progress)
    kept = Names.of(files[row] for row in scan.usable.tolist())
    names_in = () if is_remote(place) else (os.path.dirname(os.path.abspath(place)),)
    return masked(_rows(listed, images[scan.usable]), kept, scan, labelling, names_in, place, faults)


def _rows(manifest: Manifest, rows: NDArray[np.int64]) -> Manifest:
    """Return some images of a manifest, without classes."""
    return replace(
        manifest,
        paths=Names.of(manifest.paths[row] for row in rows.tolist()),
        classes=(),
        labels=np.full(len(rows), -1, np.int64),
        split_of=None if manifest.split_of is None else manifest.split_of[rows],
    )
