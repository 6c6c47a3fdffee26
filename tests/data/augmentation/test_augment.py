"""Augmentation: `plan` and `apply`."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from tests.support.peers import import_peer

from vitrail.data.augmentation.augment import (
    PRESETS,
    Affine,
    Augmentation,
    AugmentationPlan,
    Jitter,
    apply,
    plan,
    preset,
)
from vitrail.data.augmentation.crops import Box
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.randaugment import Operation, RandAugment
from vitrail.data.decode import open_image
from vitrail.errors import ConfigError, InputError

COUNT = 4_000
# Fixed seeds, a hundred or so such tests: a sound sample fails one of them with a probability of about a tenth, once.
CHANCE = 0.001
EVERYTHING = Augmentation(
    flip_vertical=0.5,
    rotation=10.0,
    affine=Affine(translate=(0.1, 0.2), scale=(0.8, 1.2), shear=8.0),
    randaugment=RandAugment(operations="big_vision"),
    jitter=Jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    grey=0.3,
    blur=0.3,
    erasing=0.5,
    erasing_fill="noise",
)
NOTHING = AugmentationPlan(8, 8, None, "nothing", "bilinear", False, False, None, (), None, None, 0)


def photograph(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Make an image of smooth patches, so that a half-size version resembles it."""
    rng = np.random.default_rng(height * 1000 + width)
    rough = Image.fromarray(rng.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8))
    return rough.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def plans(augmentation: Augmentation, height: int = 300, width: int = 400, size: int = 64) -> list[AugmentationPlan]:
    return [plan(augmentation, height, width, (size, size), draws(0, position)) for position in range(COUNT)]


# plan


def test_a_plan_is_a_function_of_seed_and_position() -> None:
    forwards = [plan(EVERYTHING, 300, 400, (64, 64), draws(9, position)) for position in range(50)]
    backwards = [plan(EVERYTHING, 300, 400, (64, 64), draws(9, position)) for position in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len({drawn.box for drawn in forwards}) == 50
    assert forwards[0] != plan(EVERYTHING, 300, 400, (64, 64), draws(8, 0))


def test_a_plan_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from vitrail.data.augmentation.augment import preset, plan; from vitrail.data.augmentation.draws import draws;"
        "print([plan(preset('augreg_strong2'), 300, 400, (64, 64), draws(1, p)) for p in range(20)])"
    )
    # This process has its own hash seed.
    other = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True)
    expected = [plan(preset("augreg_strong2"), 300, 400, (64, 64), draws(1, p)) for p in range(20)]
    assert other.stdout.decode().strip() == str(expected)


def test_known_plans() -> None:
    """Golden values: a change here changes every training run, so it must be deliberate."""
    first, second = (plan(preset("plain_baseline"), 375, 500, (224, 224), draws(0, position)) for position in (0, 1))
    assert (first.box, first.flip) == (Box(97, 291, 131, 174), False)
    assert first.operations == (Operation("solarize", (0,)), Operation("translate_x", (100,)))
    assert (second.box, second.flip) == (Box(7, 226, 104, 107), True)
    assert second.operations == (Operation("translate_x", (-100,)), Operation("saturation", (1.9000000000000001,)))


@pytest.mark.parametrize(("field", "value"), [("flip", "flip"), ("flip_vertical", "flip_vertical")])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 1.0])
def test_flip_probability(field: str, value: str, chance: float) -> None:
    happened = sum(getattr(drawn, value) for drawn in plans(Augmentation(crop="none").replace(**{field: chance})))
    if chance in (0.0, 1.0):
        assert happened == chance * COUNT
    else:
        assert stats.binomtest(happened, COUNT, chance).pvalue > CHANCE


@pytest.mark.parametrize("name", ["grey", "blur"])
def test_grey_and_blur_probability(name: str) -> None:
    drawn = [d.operations for d in plans(Augmentation(crop="none").replace(**{name: 0.3}))]
    assert stats.binomtest(sum(map(len, drawn)), COUNT, 0.3).pvalue > CHANCE
    assert {operation.name for operations in drawn for operation in operations} == {name}


def test_erasing_has_uniform_area_and_log_ratio() -> None:
    """As defined, before redrawing what does not fit: only areas for which every ratio fits are counted."""
    drawn = plans(Augmentation(crop="none", erasing=0.75), size=2000)
    boxes = np.array([d.erased for d in drawn if d.erased is not None])
    assert stats.binomtest(len(boxes), COUNT, 0.75).pvalue > CHANCE
    area, ratio = boxes[:, 2] * boxes[:, 3] / 2000**2, boxes[:, 3] / boxes[:, 2]
    assert area.min() >= 0.0199
    assert area.max() <= 0.331
    assert ratio.min() >= 0.299
    assert ratio.max() <= 3.301
    # A box of area a is at most √(3.3 a) long, so up to 0.3 all fit.
    small = area < 0.3
    assert stats.kstest(area[small], stats.uniform(0.02, 0.28).cdf).pvalue > CHANCE
    low, high = np.log(0.3), np.log(3.3)
    assert stats.kstest(np.log(ratio[small]), stats.uniform(low, high - low).cdf).pvalue > CHANCE
    assert stats.kstest(boxes[:, 0] / (2000 - boxes[:, 2]), "uniform").pvalue > CHANCE


def test_jitter_matches_torchvision() -> None:
    """The factors are uniform over their range, the order is uniform over all orders."""
    jitter = Jitter(brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1)
    drawn = [d.operations for d in plans(Augmentation(crop="none", jitter=jitter))]
    limits = {"brightness": (0.6, 1.4), "contrast": (0.0, 2.5), "saturation": (0.8, 1.2), "hue": (-0.1, 0.1)}
    peer = import_peer("torchvision.transforms").ColorJitter(0.4, 1.5, 0.2, 0.1)
    assert {name: getattr(peer, name) for name in limits} == {name: pytest.approx(limits[name]) for name in limits}
    for name, (low, high) in limits.items():
        values = [op.values[0] for operations in drawn for op in operations if op.name == name]
        assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > CHANCE
    orders, counts = np.unique([" ".join(op.name for op in ops) for ops in drawn], return_counts=True)
    assert len(orders) == 24
    assert stats.chisquare(counts).pvalue > CHANCE


def test_three_augment_draws_one_of_three() -> None:
    drawn = [d.operations for d in plans(preset("three_augment"))]
    names, counts = np.unique([operations[0].name for operations in drawn], return_counts=True)
    assert list(names) == ["blur", "grey", "solarize"]
    assert stats.chisquare(counts).pvalue > CHANCE
    blurs = [operations[0].values[0] for operations in drawn if operations[0].name == "blur"]
    assert stats.kstest(blurs, stats.uniform(0.1, 1.9).cdf).pvalue > CHANCE
    assert {op.values for ops in drawn for op in ops if op.name == "solarize"} == {(128,)}
    assert all(sorted(op.name for op in ops[1:]) == ["brightness", "contrast", "saturation"] for ops in drawn)


def test_rotation_and_affine_stay_within_their_limits() -> None:
    turned = [d.warp for d in plans(Augmentation(crop="none", rotation=20.0), size=64)]
    degrees = np.degrees([np.arctan2(-warp[3], warp[0]) for warp in turned if warp is not None])
    assert stats.kstest(degrees, stats.uniform(-20, 40).cdf).pvalue > CHANCE
    # Whole pixels, each side separately: (down, right) are fractions of (height, width).
    moved = [d.warp for d in plans(Augmentation(crop="none", affine=Affine(translate=(0.125, 0.25))), size=64)]
    assert {warp[2] for warp in moved if warp is not None} == {float(x) for x in range(-16, 17)}
    assert {warp[5] for warp in moved if warp is not None} == {float(y) for y in range(-8, 9)}
    scaled = [d.warp for d in plans(Augmentation(crop="none", affine=Affine(scale=(0.5, 2.0))))]
    scales = [1 / warp[0] for warp in scaled if warp is not None]
    assert stats.kstest(scales, stats.uniform(0.5, 1.5).cdf).pvalue > CHANCE


# apply


@pytest.mark.parametrize("form", ["image", "array"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_crop_and_flip_match_torchvision(mode: str, form: str) -> None:
    """Arrays in colour are resized by torch's kernel: at most one grey level apart."""
    functional = import_peer("torchvision.transforms.functional")
    image = photograph(120, 160, mode)
    inputs = image if form == "image" else np.asarray(image)
    flips = 0
    for position in range(20):
        drawn = plan(Augmentation(), 120, 160, (48, 64), draws(0, position))
        expected = functional.resized_crop(image, *map(int, drawn.box), [48, 64])
        flips += drawn.flip
        if drawn.flip:
            expected = functional.hflip(expected)
        actual = apply(drawn, inputs, (48, 64))
        assert actual.shape == (48, 64, 3 if mode == "RGB" else 1)
        apart = np.abs(actual.squeeze().astype(int) - np.asarray(expected))
        assert apart.max() <= (1 if (mode, form) == ("RGB", "array") else 0)
    assert 0 < flips < 20


def test_operations_are_applied_in_order() -> None:
    """`apply` is the composition of its steps."""
    image = photograph(120, 160)
    drawn = plan(Augmentation(), 120, 160, (48, 64), draws(0, 3))
    half = NOTHING._replace(operations=(Operation("posterize", (2,)),))
    other = NOTHING._replace(operations=(Operation("invert"), Operation("solarize", (100,))))
    both = drawn._replace(operations=half.operations + other.operations)
    steps = Image.fromarray(apply(drawn, image, (48, 64)))
    for step in (half, other):
        steps = Image.fromarray(apply(step, steps, (48, 64)))
    assert np.array_equal(apply(both, image, (48, 64)), np.asarray(steps))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_erased_pixels_are_grey_or_noise(channels: int) -> None:
    pixels = np.zeros((40, 50, channels), np.uint8)
    hole = NOTHING._replace(erased=Box(5, 6, 20, 30))
    result = apply(hole, pixels, (40, 50))
    assert np.all(result[5:25, 6:36] == 128)
    assert result.sum() == 128 * 20 * 30 * channels
    noisy = apply(hole._replace(noise=3), pixels, (40, 50))
    assert np.array_equal(noisy, apply(hole._replace(noise=3), pixels, (40, 50)))
    assert not np.array_equal(noisy, apply(hole._replace(noise=4), pixels, (40, 50)))
    counts = np.bincount(noisy[5:25, 6:36].ravel() // 16, minlength=16)
    assert stats.chisquare(counts).pvalue > CHANCE
    noisy[5:25, 6:36] = 0
    assert noisy.sum() == 0
    assert pixels.sum() == 0, "the image itself must stay"


@pytest.mark.parametrize("channels", [2, 4, 7])
def test_many_channels_are_transformed_together(channels: int) -> None:
    """Each channel is transformed like a grey image; colour operations are skipped."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 80, channels), dtype=np.uint8)
    for position in range(10):
        drawn = plan(EVERYTHING.replace(erasing=0.0), 60, 80, (32, 24), draws(0, position))
        result = apply(drawn, pixels, (32, 24))
        assert result.shape == (32, 24, channels)
        grey = [apply(drawn._replace(operations=()), pixels[:, :, c], (32, 24)) for c in range(channels)]
        assert np.array_equal(result, np.concatenate(grey, axis=2))


FLOATS = st.floats(0.05, 1.0)
PAIRS = st.tuples(FLOATS, FLOATS).map(lambda pair: (min(pair), max(pair)))
AUGMENTATIONS = st.builds(
    Augmentation,
    crop=st.sampled_from(["inception", "inception_tf", "simple", "padded"]),
    crop_area=PAIRS,
    crop_ratio=PAIRS.map(lambda pair: (2 * pair[0], 2 * pair[1])),
    crop_padding=st.integers(0, 9),
    interpolation=st.sampled_from(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]),
    flip_vertical=st.sampled_from([0.0, 0.5]),
    rotation=st.sampled_from([0.0, 30.0]),
    affine=st.none() | st.builds(Affine, translate=PAIRS, scale=PAIRS, shear=st.floats(0, 30)),
    randaugment=st.none()
    | st.builds(
        RandAugment,
        layers=st.integers(0, 3),
        magnitude=st.integers(0, 30),
        operations=st.sampled_from(["usual", "big_vision"]),
    ),
    jitter=st.none() | st.builds(Jitter, brightness=FLOATS, contrast=FLOATS, saturation=FLOATS, hue=st.floats(0, 0.5)),
    grey=st.sampled_from([0.0, 0.5]),
    blur=st.sampled_from([0.0, 0.5]),
    erasing=st.sampled_from([0.0, 1.0]),
    erasing_fill=st.sampled_from(["grey", "noise"]),
    fill=st.none() | st.integers(0, 255),
)
SIDES = st.integers(1, 600)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    AUGMENTATIONS,
    st.tuples(SIDES, SIDES),
    st.tuples(st.integers(1, 64), st.integers(1, 64)),
    st.integers(0, 2**62),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([1, 2, 8]),
)
def test_any_augmentation_gives_the_requested_size(
    augmentation: Augmentation, shape: tuple[int, int], size: tuple[int, int], position: int, channels: int, scale: int
) -> None:
    height, width = shape
    drawn = plan(augmentation, height, width, size, draws(0, position))
    assert drawn == plan(augmentation, height, width, size, draws(0, position))
    if augmentation.crop.startswith("inception"):
        box = drawn.box
        assert box.top >= 0
        assert box.left >= 0
        assert box.bottom <= height
        assert box.right <= width
    if drawn.erased is not None:
        assert drawn.erased.bottom <= size[0]
        assert drawn.erased.right <= size[1]
    # As libjpeg rounds the size at a reduced scale.
    decoded = np.full((-(-height // scale), -(-width // scale), channels), 100, np.uint8)
    result = apply(drawn, decoded, size)
    assert result.shape == (*size, channels)
    assert result.dtype == np.uint8
    assert result.flags.writeable
    assert result.flags.c_contiguous


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(0, 2**62),
    st.sampled_from(["inception", "inception_tf", "simple"]),
    st.sampled_from([(400, 600), (401, 333), (600, 250)]),
    st.sampled_from([2, 4]),
)
def test_a_reduced_image_gives_similar_pixels(position: int, crop: str, shape: tuple[int, int], scale: int) -> None:
    image = photograph(*shape)
    content = simplejpeg.encode_jpeg(np.asarray(image), quality=95, colorsubsampling="444")
    smaller = open_image(content).pixels(3, scale=1 / scale)
    drawn = plan(Augmentation(crop=crop, crop_area=(0.2, 1.0), rotation=5.0), *shape, (64, 64), draws(0, position))
    whole, part = (apply(drawn, p, (64, 64)).astype(int) for p in (image, smaller))
    assert abs(whole - part).mean() < 5
    # Close everywhere: nothing is shifted or mirrored.
    assert np.quantile(abs(whole - part), 0.99) < 20


def test_without_a_crop_the_image_must_be_resized() -> None:
    drawn = plan(Augmentation(crop="none", flip=1.0), 300, 400, (48, 64), draws(0, 0))
    assert drawn.box is None
    pixels = np.asarray(photograph(48, 64))
    assert np.array_equal(apply(drawn, pixels, (48, 64)), pixels[:, ::-1])
    with pytest.raises(InputError, match="it is 64×48, not 48×64"):
        apply(drawn, photograph(64, 48), (48, 64))


@pytest.mark.parametrize("image", [np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8), np.zeros(4, np.uint8)])
def test_arrays_that_are_not_images(image: np.ndarray) -> None:
    with pytest.raises(InputError, match="use uint8 and"):
        apply(NOTHING, image, (4, 4))


def test_modes_that_are_not_colour_or_grey() -> None:
    with pytest.raises(InputError, match="mode CMYK cannot be augmented"):
        apply(NOTHING, Image.new("CMYK", (4, 4)), (4, 4))
    with pytest.raises(InputError, match="an image of 0×4 pixels cannot be cropped"):
        plan(Augmentation(), 0, 4, (4, 4), draws(0, 0))


# settings


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"crop": "inceptoin"}, "did you mean 'inception'"),
        ({"crop_area": (0.5, 0.1)}, r"crop_area is \(0\.5, 0\.1\); put the smaller number first"),
        ({"crop_area": (0.5, 1.5)}, "at most the whole image"),
        ({"crop_area": (0.0, 0.5)}, "greater than 0"),
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio is"),
        ({"affine": Affine(scale=(2.0, 1.0))}, r"affine\.scale is"),
        ({"flip": 1.5}, "flip is 1.5: input should be less than or equal to 1"),
        ({"flip": float("nan")}, "flip is nan"),
        ({"fill": 256}, "fill"),
        ({"randaugment": RandAugment(), "three_augment": True}, "choose one"),
        ({"jitter": {"hue": 0.6}}, "hue is 0.6"),
        ({"colour_jitter": 0.4}, "Augmentation has no option 'colour_jitter'"),
    ],
)
def test_bad_settings(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Augmentation(**fields)


def test_settings_round_trip() -> None:
    assert Augmentation.from_json(EVERYTHING.to_json()) == EVERYTHING
    # TOML has lists.
    assert Augmentation(crop_area=[0.1, 1.0]).crop_area == (0.1, 1.0)


def test_presets() -> None:
    levels = {"light1": 0, "light2": 10, "medium1": 15, "medium2": 15, "strong1": 20, "strong2": 20}
    for name, magnitude in levels.items():
        expected = RandAugment(layers=2, magnitude=magnitude, operations="big_vision")
        assert preset(f"augreg_{name}").randaugment == expected
    baseline = preset("plain_baseline")
    assert (baseline.crop, baseline.crop_area, baseline.flip) == ("inception_tf", (0.05, 1.0), 0.5)
    assert plan(baseline, 9, 9, (8, 8), draws(0, 0)).fill == 128
    assert plan(preset("light"), 9, 9, (8, 8), draws(0, 0)).fill == 0
    pixels = np.asarray(photograph(16, 16))
    assert np.array_equal(apply(plan(preset("none"), 16, 16, (16, 16), draws(0, 0)), pixels, (16, 16)), pixels)
    with pytest.raises(ConfigError, match="unknown augmentation 'ligth'; choose one of none, light"):
        preset("ligth")
    assert all(Augmentation.from_json(value.to_json()) == value for value in PRESETS.values())
