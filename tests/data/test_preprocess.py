"""Preprocessing compared to timm, torchvision and transformers, on the same images."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.peers import import_peer

from vitrail.data.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.errors import ConfigError, InputError

SIZES = [(500, 375), (375, 500), (224, 224), (64, 48), (1023, 301), (17, 333), (256, 257)]


def photograph(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Make an image with edges, gradients and noise, stored as a JPEG, so that both sides read a file."""
    rng = np.random.default_rng(size[0] * 10_000 + size[1])
    x, y = np.meshgrid(np.linspace(0, 6, size[0]), np.linspace(0, 4, size[1]))
    waves = np.stack([np.sin(x * y), np.cos(x + 2 * y), np.sin(3 * x) * np.cos(y)], axis=-1)
    array = 127 + 90 * waves + rng.normal(0, 15, waves.shape)
    file = io.BytesIO()
    Image.fromarray(array.clip(0, 255).astype(np.uint8)).convert(mode).save(file, "JPEG", quality=90)
    return Image.open(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("resize", ["squash", "cover", "contain"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_pixels_and_images_give_the_same_result(resize: Any, channels: int) -> None:
    five = np.random.default_rng(0).integers(0, 255, (37, 53, 5), np.uint8)
    pre = Preprocess(size=(32, 24), resize=resize, resize_to=(40, 30), channels=channels, mean=(0.4,) * channels,
                     std=(0.2,) * channels)  # fmt: skip
    fitted = pre.fit(five[:, :, :channels])
    assert fitted.shape == (32, 24, channels)
    for layer in range(channels):
        alone = pre.replace(channels=1, mean=(0.4,), std=(0.2,)).pixels(Image.fromarray(five[:, :, layer].copy()))
        assert np.array_equal(fitted[:, :, layer], alone[0])
    with pytest.raises(InputError, match=f"takes {channels} channels, but the image has 4"):
        pre.fit(five[:, :, :4])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        (
            {"crop_pct": 0.9, "interpolation": "bicubic"},
            {"resize": "cover", "resize_to": 248, "interpolation": "bicubic"},
        ),
        ({"crop_pct": 0.875, "interpolation": "bilinear"}, {"resize": "cover", "resize_to": 256}),
        ({"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"}, {"interpolation": "bicubic"}),
        (
            {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "lanczos"},
            {"resize_to": 248, "interpolation": "lanczos"},
        ),
        (
            {"crop_pct": 1.0, "crop_mode": "border", "interpolation": "bicubic"},
            {"resize": "contain", "interpolation": "bicubic"},
        ),
        ({"img_size": (112, 208), "crop_pct": 0.9}, {"size": (112, 208), "resize": "cover", "resize_to": (124, 231)}),
    ],
    ids=["bicubic", "bilinear", "squash", "squash-crop", "border", "oblong"],
)
def test_timm(options: dict[str, Any], ours: dict[str, Any], size: tuple[int, int]) -> None:
    factory = import_peer("timm.data.transforms_factory").transforms_imagenet_eval
    statistics: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    image = photograph(size)
    pixels = factory(**{"img_size": 224, **statistics, **options}, normalize=False)(image)
    preprocess = Preprocess(**{"size": 224, **statistics, **ours})
    assert torch.equal(preprocess.pixels(image), torch.as_tensor(np.asarray(pixels)))
    whole = factory(**{"img_size": 224, **statistics, **options})(image)
    assert torch.allclose(preprocess(image), whole, atol=1e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchvision(size: tuple[int, int]) -> None:
    preset = import_peer("torchvision.transforms._presets").ImageClassification(crop_size=224, resize_size=256)
    ours = Preprocess(size=(224, 224), resize="cover", resize_to=(256, 256), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    image = photograph(size)
    assert torch.allclose(ours(image), preset(image), atol=1e-6)
    assert worst(ours.pixels(image), undo(preset(image), IMAGENET_MEAN, IMAGENET_STD)) <= 1e-3
    # On tensors torchvision resizes with torch's own antialiasing.
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert worst(ours.pixels(image), undo(preset(tensor), IMAGENET_MEAN, IMAGENET_STD)) <= 1 + 1e-3


def undo(normalised: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    m, s = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
    return (normalised * s + m) * 255


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in steps of 1/255."""
    assert actual.shape == expected.shape
    return float((actual.float() - expected.float()).abs().max())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("resize", ["squash", "cover", "contain"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_quick_pixels_are_close_to_pillows(size: tuple[int, int], resize: Any, interpolation: Any) -> None:
    preprocess = Preprocess(size=(224, 208), resize=resize, resize_to=(256, 240), interpolation=interpolation)
    pixels = np.asarray(photograph(size))
    exact, quick = preprocess.fit(pixels).astype(int), preprocess.fit(pixels, quick=True).astype(int)
    assert quick.shape == exact.shape
    # Bicubic overshoots at hard edges of enlarged images.
    assert abs(quick - exact).max() <= {"bilinear": 1, "bicubic": 16, "lanczos": 0}[interpolation]
    assert abs(quick - exact).mean() <= 0.05 if min(size) > 240 else 0.3


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("resample", "tolerance"), [("bilinear", 1), ("bicubic", 2)])
def test_transformers(size: tuple[int, int], resample: Any, tolerance: int) -> None:
    image = photograph(size)
    number = Image.Resampling[resample.upper()]
    ours = Preprocess(interpolation=resample, mean=HALF, std=HALF)
    slow = import_peer("transformers.models.vit.image_processing_pil_vit").ViTImageProcessorPil(resample=number)
    fast = import_peer("transformers.models.vit.image_processing_vit").ViTImageProcessor(resample=number)
    # Pillow rounds to whole pixel values between its two passes, torch (without AVX2) does not; where an image is
    # enlarged in both directions, that can amount to one step more.
    tolerance += max(size) < 224
    for processor, limit in ((slow, 1e-3), (fast, tolerance + 1e-3)):
        call: Callable[..., Any] = processor
        expected = torch.as_tensor(np.asarray(call(image, return_tensors="pt")["pixel_values"][0]))
        assert worst(ours.pixels(image), undo(expected, HALF, HALF)) <= limit


def test_grey_images() -> None:
    ours = Preprocess(size=(32, 48), channels=1, mean=(0.5,), std=(0.25,))
    for mode in ("L", "RGB", "CMYK"):
        tensor = ours(photograph((100, 80), mode))
        assert tensor.shape == (1, 32, 48)
    grey = photograph((100, 80), "L")
    expected = np.asarray(grey.resize((48, 32), Image.Resampling.BILINEAR), np.float32) / 255
    assert torch.allclose(ours(grey)[0], torch.from_numpy((expected - 0.5) / 0.25), atol=1e-6)
    colour = Preprocess(size=(32, 48))(grey)
    assert colour.shape == (3, 32, 48)
    assert torch.equal(colour[0], colour[2])


def test_batches_are_normalised_like_single_images() -> None:
    ours = Preprocess(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    pixels = torch.stack([ours.pixels(photograph(size)) for size in SIZES[:3]])
    assert torch.equal(ours.normalise(pixels)[1], ours(photograph(SIZES[1])))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mean": (0.5,)}, "preprocess.mean has 1 values for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "every value must be greater than 0"),
        ({"mean": (0.5, float("nan"), 0.5)}, "finite number"),
        ({"resize": "crop"}, "resize is 'crop', which is not one of 'squash', 'cover' or 'contain'"),
        ({"interpolation": "cubic"}, "did you mean 'bicubic'"),
        ({"size": 0}, "greater than 0"),
    ],
)
def test_bad_settings(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Preprocess(**fields)


def test_many_channels_need_tensors() -> None:
    ours = Preprocess(channels=4, mean=(0.5,) * 4, std=(0.5,) * 4)
    with pytest.raises(InputError, match="takes 4 channels, which an image file does not have"):
        ours(photograph((30, 30)))
    assert ours.normalise(torch.zeros(2, 4, 8, 8, dtype=torch.uint8)).shape == (2, 4, 8, 8)


def test_json_round_trip() -> None:
    ours = Preprocess(size=(96, 64), resize="contain", resize_to=(100, 70), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert Preprocess.from_json(ours.to_json()) == ours
