"""torch's kernels for uint8 images: how far they are from Pillow's, and when they are used."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.augmentation import vectorised
from vitrail.data.augmentation.crops import Box, cut
from vitrail.data.augmentation.vectorised import can_resize, flipped, resized

FURTHEST = {Image.Resampling.BILINEAR: (1, 0.3), Image.Resampling.BICUBIC: (16, 0.35)}
"""Largest and mean difference to Pillow in grey levels; bicubic overshoots at hard edges."""


def scene(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Return smooth shapes with hard edges and a little noise, as photographs have."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(generator.uniform(2, 30) * (x * a + y * b)) for a, b in generator.uniform(-1, 1, (3, 2))]
    image = 127 + 100 * np.stack(waves, axis=2) + generator.normal(0, 6, (height, width, 3))
    image[height // 3 : height // 2, width // 4 : width // 2] = generator.uniform(0, 255, 3)
    return np.clip(image, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("resample", FURTHEST)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_resized_images_are_close_to_pillows(resample: Image.Resampling, data: st.DataObject) -> None:
    height, width = data.draw(st.integers(40, 200)), data.draw(st.integers(40, 200))
    size = data.draw(st.integers(24, 160)), data.draw(st.integers(24, 160))
    image = scene(height, width, data.draw(st.integers(0, 1000)))
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], resample)).astype(int)
    apart = np.abs(resized(image, size, resample).astype(int) - expected)
    most, mean = FURTHEST[resample]
    assert apart.max() <= most
    assert apart.mean() <= mean


@pytest.mark.parametrize("horizontally", [False, True])
@pytest.mark.parametrize("vertically", [False, True])
def test_flips(horizontally: bool, vertically: bool) -> None:
    image = scene(20, 30, 0)
    image.flags.writeable = False  # as images in the cache are; torch would warn
    expected = image[:: -1 if vertically else 1, :: -1 if horizontally else 1]
    assert np.array_equal(flipped(image, horizontally, vertically), expected)


def test_where_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    image, bilinear = scene(60, 80, 0), Image.Resampling.BILINEAR
    monkeypatch.setattr(vectorised, "_has_kernel", lambda: True)
    assert can_resize(image, bilinear)
    assert not can_resize(image, Image.Resampling.LANCZOS)
    assert not can_resize(image[:, :, 0], bilinear)
    assert isinstance(cut(image, Box(3, 5, 40, 50), (32, 32), bilinear), np.ndarray)
    between = cut(image, Box(3.5, 5, 40, 50), (32, 32), bilinear)
    assert isinstance(between, Image.Image), "torch cannot start between two pixels"
    outside = cut(image, Box(-4, 0, 60, 80), (60, 80), bilinear, "fill")
    assert isinstance(outside, Image.Image)
    monkeypatch.setattr(vectorised, "_has_kernel", lambda: False)
    assert isinstance(cut(image, Box(3, 5, 40, 50), (32, 32), bilinear), Image.Image)
