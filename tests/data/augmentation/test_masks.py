"""Masks move exactly as their images do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage

from vitrail.data.augmentation.augment import Affine, Augmentation, apply, plan
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.masks import MOVING, apply_to_mask
from vitrail.data.augmentation.randaugment import BIG_VISION, USUAL, RandAugment
from vitrail.errors import InputError

IGNORE, SIZE = 255, (48, 40)
GEOMETRY = st.builds(
    Augmentation,
    crop=st.sampled_from(["inception", "inception_tf", "simple", "padded"]),
    interpolation=st.sampled_from(["bilinear", "nearest"]),
    flip_vertical=st.sampled_from([0.0, 0.5]),
    rotation=st.sampled_from([0.0, 30.0]),
    affine=st.sampled_from([None, Affine(translate=(0.1, 0.2), scale=(0.8, 1.2), shear=8.0)]),
    fill=st.just(IGNORE),
)


def blocks(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Return a mask of large rectangles of five classes, whose values an image can have, too."""
    classes = np.random.default_rng(seed).integers(0, 5, (4, 4)) * 40
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    return classes[rows][:, columns].astype(np.uint8)


@given(GEOMETRY, st.integers(60, 140), st.integers(60, 140), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_every_pixel_goes_where_the_images_pixel_goes(
    augmentation: Augmentation, height: int, width: int, seed: int
) -> None:
    mask = blocks(height, width, seed)
    drawn = plan(augmentation, height, width, SIZE, draws(seed, 0))
    moved = apply_to_mask(drawn, mask, SIZE, IGNORE)
    image = apply(drawn, mask, SIZE)[:, :, 0]  # an image that looks like its mask
    assert moved.shape == SIZE
    assert set(np.unique(moved)) <= {*np.unique(mask).tolist(), IGNORE}, "classes are never mixed"
    # Interpolation mixes the colours of an image next to edges, also those just outside of the crop, and nowhere else.
    inner = np.zeros(SIZE, bool)
    inner[3:-3, 3:-3] = (ndimage.minimum_filter(moved, 7) == ndimage.maximum_filter(moved, 7))[3:-3, 3:-3]
    assert inner.mean() > 0.05
    assert np.array_equal(image[inner], moved[inner])


@given(st.sampled_from(["usual", "big_vision"]), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_operations_that_move_pixels_move_the_mask(operations: str, seed: int) -> None:
    augmentation = Augmentation(
        crop="padded", crop_padding=0, flip=0.0, fill=IGNORE,
        randaugment=RandAugment(layers=3, magnitude=9, operations=operations),
    )  # fmt: skip
    mask = blocks(*SIZE, seed)
    drawn = plan(augmentation, *SIZE, SIZE, draws(seed, 0))
    moving = drawn._replace(operations=tuple(one for one in drawn.operations if one.name in MOVING))
    moved = apply_to_mask(drawn, mask, SIZE, IGNORE)
    assert np.array_equal(moved, apply_to_mask(moving, mask, SIZE, IGNORE))
    assert np.array_equal(moved, apply(moving, mask, SIZE)[:, :, 0]), "these operations take the nearest pixel"


def test_every_operation_is_known_to_move_pixels_or_not() -> None:
    assert {*USUAL, *BIG_VISION} >= MOVING
    ramp = np.arange(30 * 30, dtype=np.uint16).reshape(30, 30).astype(np.uint8)
    for seed in range(40):
        drawn = plan(
            Augmentation(crop="padded", crop_padding=0, flip=0.0, randaugment=RandAugment(layers=1, magnitude=9)),
            30, 30, (30, 30), draws(seed, 0),
        )  # fmt: skip
        (operation,) = drawn.operations
        changed = not np.array_equal(apply_to_mask(drawn, ramp, (30, 30), IGNORE), ramp)
        assert changed <= (operation.name in MOVING)


def test_without_a_crop_the_mask_is_resized() -> None:
    mask = blocks(96, 80, 0)
    drawn = plan(Augmentation(crop="none", flip=0.0), 96, 80, SIZE, draws(0, 0))
    assert np.array_equal(apply_to_mask(drawn, mask, SIZE, IGNORE), blocks(*SIZE, 0))


@pytest.mark.parametrize(
    "mask", [np.zeros((10, 12), np.uint8), np.zeros((12, 10), np.int64), np.zeros((12, 10, 3), np.uint8)]
)
def test_a_mask_of_another_size_is_refused(mask: NDArray[np.uint8]) -> None:
    drawn = plan(Augmentation(), 12, 10, SIZE, draws(0, 0))
    with pytest.raises(InputError, match="for an image of 12×10 pixels; use uint8 and the size of the image"):
        apply_to_mask(drawn, mask, SIZE, IGNORE)
