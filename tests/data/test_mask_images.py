"""Masks as files and overlays."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.mask_images import mask_png, overlay, palette
from vitrail.data.sources.masks import IGNORED_PIXEL, MOST_CLASSES
from vitrail.errors import InputError


@given(st.integers(1, MOST_CLASSES), st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_the_values_of_a_mask_survive(classes: int, height: int, width: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    mask = generator.integers(0, classes, (height, width)).astype(np.uint8)
    mask[generator.random(mask.shape) < 0.1] = IGNORED_PIXEL
    image = Image.open(io.BytesIO(mask_png(mask, classes)))
    assert image.mode == "P"
    assert np.array_equal(np.asarray(image), mask)
    colours = np.asarray(image.convert("RGB"))
    assert np.array_equal(colours[mask < classes], palette(classes)[mask[mask < classes]])
    assert (colours[mask == IGNORED_PIXEL] == 255).all()


def test_colours_are_distinct_and_do_not_depend_on_their_number() -> None:
    every = palette(MOST_CLASSES)
    assert len({tuple(colour) for colour in every[:60].tolist()}) == 60
    for classes in (0, 1, 8, 9, 30):
        assert np.array_equal(palette(classes), every[:classes])


def test_an_overlay_leaves_ignored_pixels() -> None:
    pixels = np.full((2, 2, 1), 100, np.uint8)
    mask = np.array([[0, 1], [IGNORED_PIXEL, 1]], np.uint8)
    drawn = overlay(pixels, mask, 2)
    assert drawn.shape == (2, 2, 3)
    assert (drawn[1, 0] == 100).all()
    assert np.array_equal(drawn[0, 1], drawn[1, 1])
    assert not np.array_equal(drawn[0, 0], drawn[0, 1])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_large_overlay_is_that_of_its_rows(channels: int) -> None:
    generator = np.random.default_rng(1)
    pixels = generator.integers(0, 256, (600, 4, channels)).astype(np.uint8)
    mask = generator.choice(np.array([0, 1, 2, IGNORED_PIXEL], np.uint8), (600, 4))
    drawn = overlay(pixels, mask, 3)
    rows = [overlay(pixels[row : row + 1], mask[row : row + 1], 3) for row in range(600)]
    assert np.array_equal(drawn, np.concatenate(rows))


@pytest.mark.parametrize(("pixels", "mask"), [((2, 3, 3), (2, 2)), ((2, 2, 4), (2, 2)), ((2, 2), (2, 2))])
def test_shapes_that_do_not_fit(pixels: tuple[int, ...], mask: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="the same size"):
        overlay(np.zeros(pixels, np.uint8), np.zeros(mask, np.uint8), 2)


def test_too_many_classes() -> None:
    with pytest.raises(InputError, match="at most 255"):
        palette(256)
    with pytest.raises(InputError, match="use uint8"):
        mask_png(np.zeros((2, 2), np.int64), 2)
