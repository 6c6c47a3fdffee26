"""Folders with images/ and masks/: where they are, and which mask belongs to which image."""

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.detection import Inside, look_into, split_folders
from vitrail.data.sources.folders import Folder
from vitrail.data.sources.index_files import Names, Progress
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.mask_classes import masked
from vitrail.data.sources.mask_scan import scan_masks
from vitrail.data.sources.masks import Masked
from vitrail.data.sources.splits import SPLITS
from vitrail.data.sources.targets import Labelling, check_no_columns
from vitrail.data.sources.tree import Listing, list_images
from vitrail.errors import DataError
from vitrail.text import printable_path

IMAGES, MASKS = "images", "masks"
OTHER_IMAGES = frozenset({"images", "image", "imgs", "img", "jpegimages"})
OTHER_MASKS = frozenset(
    {"masks", "mask", "labels", "label", "annotations", "annotation", "segmentationclass", "segmentation", "gt"}
)
"""Names, in lower case, that others give the two folders; as names of the only two classes they are hardly meant."""
ENDINGS = ("", "_mask", "-mask", "_masks", "_label", "_labels", "_labelIds", "_seg", "_segmentation", "_gt")
"""What the name of a mask may have after that of its image."""


class MaskFolders(NamedTuple):
    """A folder of images, and that of their masks."""

    place: str
    """What messages call them."""
    images: str
    masks: str
    names_in: tuple[str, ...]
    """The folders that may hold classes.txt."""


def find_mask_folders(place: str, inside: Inside) -> dict[str, MaskFolders] | None:
    """Return the images and masks in a folder by split, or all as train; None if it has no images/ and masks/.

    The splits may be inside of both: images/train and masks/train.
    """
    named = {os.path.basename(folder).lower(): folder for folder in reversed(inside.folders)}
    if IMAGES not in named or MASKS not in named:
        return None
    images, masks = named[IMAGES], named[MASKS]
    names_in: tuple[str, ...] = (place, masks)
    if os.path.basename(os.path.normpath(place)).lower() in SPLITS:
        names_in = (*names_in, os.path.dirname(os.path.abspath(place)))
    splits = split_folders(images, look_into(images).folders)
    if not splits:
        return {"train": MaskFolders(place, images, masks, names_in)}
    of_masks = split_folders(masks, look_into(masks).folders)
    if missing := [folder for split, folder in splits.items() if split not in of_masks]:
        raise DataError(
            f"{printable_path(missing[0])} has no masks; add {printable_path(masks)}/{os.path.basename(missing[0])}"
        )
    return {
        split: MaskFolders(folder, folder, of_masks[split], (*names_in, of_masks[split]))
        for split, folder in splits.items()
    }


def check_not_masks(place: str, inside: Inside, labelling: Labelling) -> None:
    """Raise if the only folders are called like those of images and masks, which would be taken for two classes."""
    names = sorted(map(os.path.basename, inside.folders), key=lambda name: name.lower() not in OTHER_IMAGES)
    if labelling.kind is not None or len(names) != 2:
        return
    if names[0].lower() in OTHER_IMAGES and names[1].lower() in OTHER_MASKS:
        renamed = [f"{old} to {new}" for old, new in zip(names, (IMAGES, MASKS), strict=True) if old.lower() != new]
        raise DataError(
            f"{printable_path(place)} has the folders {names[0]} and {names[1]}: if {names[1]} holds masks, rename "
            f"{' and '.join(renamed)}; if they are two classes, choose --task classification"
        )


def open_mask_folder(
    folders: MaskFolders, labelling: Labelling, faults: Faults | None = None, on_progress: Progress | None = None
) -> Masked:
    """Open a folder of images and that of their masks. With `faults`, unusable items are skipped and named there."""
    title = printable_path(folders.place)
    if labelling.kind not in (None, "masks"):
        what = {"classes": "one class", "labels": "several labels"}.get(labelling.kind, "numbers")
        raise DataError(
            f"{title} has a mask per image, not {what}; leave the task to the data, or choose --task segmentation"
        )
    check_no_columns(labelling, title)
    listing, masks = list_images(folders.images, on_progress=on_progress), list_images(folders.masks)
    pairs = _pairs(folders, listing, masks)
    wrong = [*listing.faults, *masks.faults, *pairs.faults]
    if not len(pairs.images):
        report_faults(
            [*wrong, f"{title} has no image with a mask; give each image in images one in masks"], title, None
        )
    report_faults(wrong, title, faults)
    scan = scan_masks(_folder(folders, listing, pairs.images), pairs.masks, folders.masks, on_progress)
    kept = Names.of(pairs.masks[image] for image in scan.usable.tolist())
    source = _folder(folders, listing, pairs.images[scan.usable])
    return masked(source, kept, scan, labelling, folders.names_in, folders.place, faults)


def _folder(folders: MaskFolders, listing: Listing, images: NDArray[np.int64]) -> Folder:
    """Return some images of a folder, without classes."""
    return Folder(folders.images, listing, (), np.full(len(images), -1, np.int64), images)


class _Pairs(NamedTuple):
    images: NDArray[np.int64]
    """Places in the listing."""
    masks: Names
    faults: list[str]


def _pairs(folders: MaskFolders, images: Listing, masks: Listing) -> _Pairs:
    """Match masks to images by path, without suffix and common endings."""
    of_stem: dict[bytes, list[int]] = {}
    for number in range(len(masks.files)):
        of_stem.setdefault(_stem(masks.path(number)), []).append(number)
    image_roots, mask_roots = os.fsencode(folders.images), os.fsencode(folders.masks)
    paired: dict[int, int] = {}
    used: dict[int, int] = {}
    faults: list[str] = []
    for number in range(len(images.files)):
        stem = _stem(images.path(number))
        name = printable_path(os.path.join(image_roots, images.path(number)))
        found = next((of_stem[key] for ending in ENDINGS if (key := stem + ending.encode()) in of_stem), [])
        if not found:
            expected = printable_path(os.path.join(mask_roots, stem + b".png"))
            faults.append(f"{name} has no mask; add {expected}, or remove the image")
        elif len(found) > 1:
            both = " and ".join(printable_path(masks.path(mask)) for mask in found[:2])
            faults.append(f"{name} has two masks, {both}; keep one")
            used |= dict.fromkeys(found, number)
        elif found[0] in used:
            other = printable_path(images.path(used[found[0]]))
            faults.append(f"{name} has the mask of {other}; give each image its own name without the suffix")
        else:
            paired[number], used[found[0]] = found[0], number
    for mask in range(len(masks.files)):
        if mask not in used:
            name = printable_path(os.path.join(mask_roots, masks.path(mask)))
            faults.append(f"{name} has no image; add it to {printable_path(folders.images)}, or remove the mask")
    files = Names.of(os.path.join(mask_roots, masks.path(mask)) for mask in paired.values())
    return _Pairs(np.array(list(paired), np.int64), files, faults)


def _stem(path: bytes) -> bytes:
    return path[: path.rindex(b".")]
