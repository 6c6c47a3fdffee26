"""Crops: distributions as defined, and as in torchvision and TensorFlow."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from tests.support.peers import import_peer

from vitrail.data.augmentation import vectorised
from vitrail.data.augmentation.crops import (
    Box,
    centre,
    cut,
    inception_crop,
    inception_crop_tf,
    padded_crop,
    simple_crop,
    whole_pixels,
)
from vitrail.data.augmentation.draws import draws

COUNT = 2_000
# Fixed seeds, a hundred or so such tests: a sound sample fails one of them with a probability of about a tenth, once.
CHANCE = 0.001
BILINEAR = Image.Resampling.BILINEAR


def drawn(crop: Callable[..., Box], height: int, width: int, *options: object) -> np.ndarray:
    return np.array([crop(height, width, draws(0, position), *options) for position in range(COUNT)])


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether both samples may come from one distribution, column by column."""
    return all(stats.ks_2samp(a, b, method="asymp").pvalue > CHANCE for a, b in zip(actual.T, expected.T, strict=True))


def test_inception_crop_has_uniform_area_and_log_ratio() -> None:
    """Areas up to a quarter always fit into a large square, so nothing is redrawn and rounding hardly matters."""
    boxes = drawn(inception_crop, 8000, 8000, (0.08, 0.25), (3 / 4, 4 / 3))
    area = boxes[:, 2] * boxes[:, 3] / 8000**2
    ratio = np.log(boxes[:, 3] / boxes[:, 2])
    assert stats.kstest(area, stats.uniform(0.08, 0.17).cdf).pvalue > CHANCE
    assert stats.kstest(ratio, stats.uniform(math.log(3 / 4), 2 * math.log(4 / 3)).cdf).pvalue > CHANCE
    assert abs(np.corrcoef(area, ratio)[0, 1]) < 0.05
    # The position is uniform over the free range.
    assert stats.kstest(boxes[:, 0] / (8000 - boxes[:, 2]), "uniform").pvalue > CHANCE
    assert stats.kstest(boxes[:, 1] / (8000 - boxes[:, 3]), "uniform").pvalue > CHANCE


@pytest.mark.parametrize("size", [(375, 500), (64, 64), (900, 300), (7, 5), (40, 400)], ids=str)
@pytest.mark.parametrize(("area", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.9), (1.0, 2.0))], ids=str)
def test_inception_crop_matches_torchvision(
    size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> None:
    peer = import_peer("torchvision.transforms").RandomResizedCrop
    image = torch.empty(1, *size)
    expected = np.array([peer.get_params(image, list(area), list(ratio)) for _ in range(COUNT)])
    assert same(drawn(inception_crop, *size, area, ratio), expected)


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1000, 10), Box(493, 0, 13, 10)),
        ((10, 1000), Box(0, 493, 10, 13)),
        ((100, 100), Box(0, 0, 100, 100)),
    ],
)
def test_inception_crop_falls_back_to_the_centre(size: tuple[int, int], box: Box) -> None:
    """If no draw can fit, torchvision's box and ours are fixed."""
    # Nothing larger than the whole image ever fits.
    area = (1.5, 2.0)
    assert inception_crop(*size, draws(0, 0), area) == box
    peer = import_peer("torchvision.transforms").RandomResizedCrop
    assert peer.get_params(torch.empty(1, *size), list(area), [3 / 4, 4 / 3]) == tuple(box)


def naive_tf_crop(
    height: int, width: int, rng: np.random.Generator, area: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Implement TensorFlow's definition literally, by trying every height, in its single precision."""
    single = np.float32
    for _ in range(100):
        r = single(rng.uniform(*ratio))
        least, most = (single(share) * single(width) * single(height) for share in area)
        bounds = [int(np.rint(np.sqrt(limit / r))) for limit in (least, most)]
        fits = np.flatnonzero(np.rint(np.arange(height + 1, dtype=single) * r) <= width)
        top_height = min(bounds[1], int(fits[-1]))
        h = int(rng.integers(min(bounds[0], top_height), top_height + 1))
        w = int(np.rint(single(h) * r))
        if w * h < least:
            h, w = h + 1, int(np.rint(single(h + 1) * r))
        if w * h > most:
            h, w = h - 1, int(np.rint(single(h - 1) * r))
        if least <= w * h <= most and 0 < w <= width and 0 < h <= height:
            y = rng.integers(height - h) if h < height else 0
            x = rng.integers(width - w) if w < width else 0
            return Box(int(y), int(x), h, w)
    return Box(0, 0, height, width)


@pytest.mark.parametrize("size", [(75, 100), (64, 64), (60, 40), (7, 5)], ids=str)
@pytest.mark.parametrize("area", [(0.05, 1.0), (0.5, 1.0)], ids=str)
def test_tf_crop_matches_tensorflow(size: tuple[int, int], area: tuple[float, float]) -> None:
    rng = np.random.default_rng(1)
    expected = np.array([naive_tf_crop(*size, rng, area, (0.75, 1.33)) for _ in range(COUNT // 2)])
    actual = drawn(inception_crop_tf, *size, area, (0.75, 1.33))
    assert same(actual, expected)


def test_tf_crop_has_uniform_ratio_and_height() -> None:
    side = 8000
    boxes = drawn(inception_crop_tf, side, side, (0.05, 0.5), (0.75, 1.33))
    area, ratio = boxes[:, 2] * boxes[:, 3] / side**2, boxes[:, 3] / boxes[:, 2]
    assert area.min() >= 0.05
    assert area.max() <= 0.5
    assert stats.kstest(ratio, stats.uniform(0.75, 0.58).cdf).pvalue > CHANCE
    lowest, highest = side * np.sqrt(0.05 / ratio), side * np.sqrt(0.5 / ratio)
    assert stats.kstest((boxes[:, 2] - lowest) / (highest - lowest), "uniform").pvalue > CHANCE
    # Unlike torchvision's, its area is not uniform: small crops are more frequent.
    assert np.median(area) < 0.25


def test_tf_crop_corrects_rounding() -> None:
    """Squares of 20 to 45 pixels: of the equally likely heights 4 to 7, 4 becomes 5 and 7 becomes 6."""
    heights = drawn(inception_crop_tf, 10, 10, (0.2, 0.45), (1.0, 1.0))[:, 2]
    assert set(heights) == {5, 6}
    assert stats.binomtest(int((heights == 5).sum()), COUNT).pvalue > CHANCE


def test_tf_crop_falls_back_to_the_whole_image() -> None:
    assert inception_crop_tf(10, 1000, draws(0, 0), (0.5, 1.0)) == Box(0, 0, 10, 1000)


SIDES = st.integers(1, 600)
AREAS = st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(lambda pair: tuple(sorted(pair)))
RATIOS = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(lambda pair: tuple(sorted(pair)))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(SIDES, SIDES, AREAS, RATIOS, st.integers(0, 2**62))
def test_inception_boxes_are_inside_the_image(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], position: int
) -> None:
    for crop in (inception_crop, inception_crop_tf):
        box = crop(height, width, draws(0, position), area, ratio)
        assert box.top >= 0
        assert box.left >= 0
        assert box.height >= 1
        assert box.width >= 1
        assert box.bottom <= height
        assert box.right <= width
        assert all(value == int(value) for value in box)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(SIDES, SIDES, st.tuples(SIDES, SIDES), st.integers(0, 8), st.integers(0, 2**62))
def test_other_boxes_exceed_the_image_by_at_most_the_padding(
    height: int, width: int, size: tuple[int, int], padding: int, position: int
) -> None:
    padded = padded_crop(height, width, draws(0, position), padding)
    assert (padded.height, padded.width) == (height, width)
    assert max(abs(padded.top), abs(padded.left)) <= padding
    simple = simple_crop(height, width, draws(0, position), size, padding)
    # One output pixel, in pixels of the image.
    row, column = simple.height / size[0], simple.width / size[1]
    close = 1e-6
    assert simple.top >= -padding * row - close
    assert simple.left >= -padding * column - close
    assert simple.bottom <= height + padding * row + close
    assert simple.right <= width + padding * column + close


def test_padded_crops_shift_uniformly() -> None:
    boxes = drawn(padded_crop, 32, 32, 4)
    for column in (0, 1):
        values, counts = np.unique(boxes[:, column], return_counts=True)
        assert list(values) == list(range(-4, 5))
        assert stats.chisquare(counts).pvalue > CHANCE


def photograph(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    rough = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    return rough.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(100, 150), (150, 100), (37, 90), (64, 64)], ids=str)
def test_simple_crop_is_resize_pad_crop(size: tuple[int, int]) -> None:
    """Every crop of 3-Augment: resize the short side, reflect 4 pixels, crop."""
    transforms = import_peer("torchvision.transforms")
    functional = import_peer("torchvision.transforms.functional")
    image, made = photograph(*size), 48
    resized = transforms.Resize(made, interpolation=transforms.InterpolationMode.BICUBIC)(image)
    larger = np.asarray(functional.pad(resized, 4, padding_mode="reflect")).astype(int)
    row, column = size[0] / resized.height, size[1] / resized.width
    for position in range(20):
        box = simple_crop(*size, draws(0, position), (made, made))
        top, left = round(box.top / row) + 4, round(box.left / column) + 4
        assert 0 <= top <= larger.shape[0] - made
        result = np.asarray(cut(image, box, (made, made), Image.Resampling.BICUBIC, "mirror")).astype(int)
        # The filter's weights are rounded for each position of the box: at most one step of 255.
        assert abs(result - larger[top : top + made, left : left + made]).max() <= 1


def test_padded_crop_is_pad_then_crop() -> None:
    functional = import_peer("torchvision.transforms.functional")
    image = photograph(32, 40)
    larger = functional.pad(image, 4, fill=7)
    for position in range(20):
        box = padded_crop(32, 40, draws(0, position), 4)
        expected = functional.crop(larger, int(box.top) + 4, int(box.left) + 4, 32, 40)
        for form in (image, np.asarray(image)):
            actual = cut(form, box, (32, 40), BILINEAR, "fill", fill=7)
            assert np.array_equal(np.asarray(actual), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_box_entirely_outside_is_filled(mode: str) -> None:
    image = photograph(4, 4).convert(mode)
    for form in (image, np.asarray(image)):
        result = cut(form, Box(-9, 0, 4, 4), (6, 5), BILINEAR, "fill", fill=9)
        assert (result.mode, result.size) == (mode, (5, 6))
        assert np.all(np.asarray(result) == 9)


@pytest.mark.parametrize("name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_cut_matches_torchvisions_resized_crop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorised, "_has_kernel", lambda: False)
    functional = import_peer("torchvision.transforms.functional")
    mode = import_peer("torchvision.transforms").InterpolationMode(name)
    image = photograph(120, 160)
    for position in range(10):
        box = inception_crop(120, 160, draws(0, position))
        expected = functional.resized_crop(image, *map(int, box), [32, 24], mode)
        for form in (image, np.asarray(image)):
            actual = cut(form, box, (32, 24), Image.Resampling[name.upper()])
            assert np.array_equal(np.asarray(actual), np.asarray(expected))


def test_centre() -> None:
    assert centre(10, 7, 4, 4) == Box(3, 1, 4, 4)
    assert centre(4, 4, 4, 4) == Box(0, 0, 4, 4)


@given(st.data())
def test_boxes_are_rounded_to_pixels_of_the_image(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    top, left = data.draw(st.floats(0, height - 0.25)), data.draw(st.floats(0, width - 0.25))
    box = Box(top, left, data.draw(st.floats(0.25, height - top)), data.draw(st.floats(0.25, width - left)))
    made = whole_pixels(box, height, width)
    assert all(float(side).is_integer() for side in made)
    assert 0 <= made.top < made.bottom <= height
    assert 0 <= made.left < made.right <= width
    edges = [(one.top, one.left, one.bottom, one.right) for one in (made, box)]
    assert 1 in (made.height, made.width) or max(abs(a - b) for a, b in zip(*edges, strict=True)) <= 0.5
    if all(side >= 1 for side in box[2:]):
        assert whole_pixels(made, height, width) == made
