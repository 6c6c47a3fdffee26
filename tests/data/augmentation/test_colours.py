"""Image operations equal torchvision's, pixel by pixel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.peers import import_peer

from vitrail.data.augmentation import colours

F = import_peer("torchvision.transforms.functional")
BILINEAR = import_peer("torchvision.transforms").InterpolationMode.BILINEAR
SIZES = [(40, 56), (33, 17), (1, 1), (2, 3)]

Operation = Callable[[Image.Image], Image.Image]


def photograph(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Make an image of smooth patches with some noise."""
    rng = np.random.default_rng(height * 1000 + width)
    rough = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    smooth = np.asarray(rough.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noisy = 20 + 0.8 * smooth + rng.integers(-6, 7, smooth.shape)
    return Image.fromarray(noisy.astype(np.uint8)).convert(mode)


PAIRS: dict[str, tuple[Operation, Operation]] = {
    "brightness": (lambda p: colours.brightness(p, 1.37), lambda p: F.adjust_brightness(p, 1.37)),
    "darkness": (lambda p: colours.brightness(p, 0.1), lambda p: F.adjust_brightness(p, 0.1)),
    "contrast": (lambda p: colours.contrast(p, 1.81), lambda p: F.adjust_contrast(p, 1.81)),
    "little contrast": (lambda p: colours.contrast(p, 0.23), lambda p: F.adjust_contrast(p, 0.23)),
    "saturation": (lambda p: colours.saturation(p, 1.9), lambda p: F.adjust_saturation(p, 1.9)),
    "little saturation": (lambda p: colours.saturation(p, 0.4), lambda p: F.adjust_saturation(p, 0.4)),
    "sharpness": (lambda p: colours.sharpness(p, 1.9), lambda p: F.adjust_sharpness(p, 1.9)),
    "smoothness": (lambda p: colours.sharpness(p, 0.1), lambda p: F.adjust_sharpness(p, 0.1)),
    "hue": (lambda p: colours.hue(p, 0.123), lambda p: F.adjust_hue(p, 0.123)),
    "hue back": (lambda p: colours.hue(p, -0.456), lambda p: F.adjust_hue(p, -0.456)),
    "solarize": (lambda p: colours.solarize(p, 127.5), lambda p: F.solarize(p, 127.5)),
    "invert": (colours.invert, F.invert),
    "equalize": (colours.equalize, F.equalize),
    "autocontrast": (colours.autocontrast, F.autocontrast),
    "grey": (colours.grey, lambda p: F.to_grayscale(p, len(p.getbands()))),
    "rotate": (lambda p: colours.rotate(p, 17.5), lambda p: F.rotate(p, 17.5)),
    "rotate back, filled": (lambda p: colours.rotate(p, -30.0, fill=128), lambda p: F.rotate(p, -30.0, fill=128)),
    "translate": (
        lambda p: colours.translate(p, 5, -3, fill=9),
        lambda p: F.affine(p, 0.0, [5, -3], 1.0, [0.0, 0.0], fill=9),
    ),
} | {
    f"posterize {bits}": (
        lambda p, bits=bits: colours.posterize(p, bits),
        lambda p, bits=bits: F.posterize(p, bits),
    )
    for bits in range(1, 9)
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", PAIRS)
def test_torchvision(name: str, mode: str, size: tuple[int, int]) -> None:
    image = photograph(*size, mode)
    before = np.array(image)
    ours, theirs = PAIRS[name]
    result = ours(image)
    assert result.mode == mode
    assert result.size == image.size
    assert np.array_equal(np.asarray(result), np.asarray(theirs(image)))
    assert np.array_equal(np.asarray(image), before), "the image itself must stay"


@pytest.mark.parametrize("name", [name for name in PAIRS if "little" not in name and name != "posterize 8"])
def test_every_operation_does_something(name: str) -> None:
    image = photograph(40, 56)
    assert not np.array_equal(np.asarray(PAIRS[name][0](image)), np.asarray(image))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    "numbers",
    [
        {"degrees": 23.0},
        {"right": 4.0, "down": -7.0},
        {"scale": 0.8},
        {"shear_degrees": 15.0},
        {"degrees": -11.0, "right": 3.0, "down": 2.0, "scale": 1.3, "shear_degrees": -20.0},
    ],
    ids=str,
)
def test_affine_matrices_match_torchvision(numbers: dict[str, Any], mode: str) -> None:
    image = photograph(40, 56, mode)
    actual = colours.affine(image, colours.affine_matrix(40, 56, **numbers), fill=77)
    expected = F.affine(
        image,
        numbers.get("degrees", 0.0),
        [numbers.get("right", 0), numbers.get("down", 0)],
        numbers.get("scale", 1.0),
        [numbers.get("shear_degrees", 0.0), 0.0],
        BILINEAR,
        fill=77,
    )
    # The same matrix, up to the last bit.
    difference = abs(np.asarray(actual).astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
def test_blur_is_nearly_a_gaussian(radius: float) -> None:
    """Pillow stacks three box filters, which is very close except at the edges."""
    image = photograph(60, 70)
    actual = np.asarray(colours.blur(image, radius)).astype(int)
    expected = np.asarray(F.gaussian_blur(image, [21, 21], [radius, radius])).astype(int)
    difference = abs(actual - expected)[8:-8, 8:-8]
    assert difference.max() <= 4
    assert difference.mean() <= 0.8


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_solarize_add(mode: str) -> None:
    image = photograph(20, 30, mode)
    before = pixels(image)
    expected = np.where(before < 128, np.clip(before + 110, 0, 255), before)
    assert np.array_equal(pixels(colours.solarize_add(image, 110)), expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("row", "column", "reach"), [(10, 12, 5), (0, 0, 4), (19, 29, 8), (3, 3, 0), (5, 5, 100)])
def test_cutout(row: int, column: int, reach: int, mode: str) -> None:
    image = photograph(20, 30, mode)
    expected = pixels(image)
    y, x = np.mgrid[:20, :30]
    expected[(y >= row - reach) & (y < row + reach) & (x >= column - reach) & (x < column + reach)] = 128
    before = pixels(image)
    assert np.array_equal(pixels(colours.cutout(image, row, column, reach)), expected)
    assert np.array_equal(pixels(image), before)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("factor", [0.1, 1.9, 2.8])
def test_contrast_around_a_fixed_level(factor: float, mode: str) -> None:
    image = photograph(20, 30, mode)
    exact = 196 + np.float32(factor) * (pixels(image) - 196).astype(np.float32)
    expected = np.clip(exact, 0, 255).astype(np.uint8)
    assert np.array_equal(pixels(colours.contrast(image, factor, 196)), expected)


def test_colour_operations_leave_grey_images_unchanged() -> None:
    image = photograph(20, 30, "L")
    for changed in (colours.saturation(image, 0.1), colours.hue(image, 0.3), colours.grey(image)):
        assert changed is image


def test_shear_keeps_the_first_row_and_column() -> None:
    image = photograph(40, 40)
    sheared = pixels(colours.shear(image, 0.3, 0.0))
    assert np.array_equal(sheared[0], pixels(image)[0])
    # The row at y + 1/2 = 20.5 reads its pixels 0.3 × 20.5 = 6.15 to the right.
    assert np.array_equal(sheared[20, :34], pixels(image)[20, 6:])
    assert np.all(sheared[20, 34:] == 0)
    turned = pixels(colours.shear(image.transpose(Image.Transpose.TRANSPOSE), 0.0, 0.3))
    assert np.array_equal(turned, sheared.transpose(1, 0, 2))
