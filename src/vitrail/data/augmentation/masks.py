"""Masks of segmentation move with their images: the geometric part of an augmentation plan, without mixing classes."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.augmentation import colours, crops, randaugment
from vitrail.data.augmentation.augment import AugmentationPlan
from vitrail.data.augmentation.vectorised import flipped
from vitrail.errors import InputError

MOVING = frozenset({"rotate", "shear_x", "shear_y", "translate_x", "translate_y"})
"""Operations of RandAugment that move pixels. All others change colours, or cover a part of the image: what is covered
keeps its class, so that the model learns it from what is around."""
NEAREST = Image.Resampling.NEAREST


def apply_to_mask(
    plan: AugmentationPlan, mask: NDArray[np.uint8], size: tuple[int, int], ignore: int
) -> NDArray[np.uint8]:
    """Apply the plan of an image to its mask (height, width); pixels from outside the image become `ignore`.

    The mask has the size of the image as stored; without a crop it is resized to `size`.
    """
    if mask.dtype != np.uint8 or mask.ndim != 2 or mask.shape != (plan.height, plan.width):
        raise InputError(
            f"a mask of {mask.dtype} and shape {mask.shape} for an image of {plan.height}×{plan.width} pixels; use "
            "uint8 and the size of the image"
        )
    if plan.box is None:
        moved = Image.fromarray(mask).resize(size[::-1], NEAREST)
    else:
        cut = crops.cut(Image.fromarray(mask), plan.box, size, NEAREST, plan.beyond, ignore)
        moved = cut if isinstance(cut, Image.Image) else Image.fromarray(cut)
    moved = Image.fromarray(np.ascontiguousarray(flipped(np.asarray(moved), plan.flip, plan.flip_vertical)))
    if plan.warp is not None:
        moved = colours.affine(moved, plan.warp, ignore, NEAREST)
    for operation in plan.operations:
        if operation.name in MOVING:
            moved = randaugment.perform(operation, moved, ignore)
    return np.array(moved)
