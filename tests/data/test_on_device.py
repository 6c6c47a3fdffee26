"""Batched augmentation equals augmentation of single images."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_augmentation import apply_all

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Affine, Augmentation, AugmentationPlan, Jitter
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.on_device import check_on_device
from vitrail.data.augmentation.randaugment import BIG_VISION, USUAL, Operation, RandAugment, draw, usual_magnitude
from vitrail.errors import ConfigError

SIZE = (24, 32)


def images(count: int, channels: int = 3) -> np.ndarray:
    """Return smooth images with some noise, like photographs."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    made = []
    for _ in range(count):
        waves = [np.sin(y / generator.uniform(2, 9) + x / generator.uniform(2, 9)) for _ in range(channels)]
        low, high = sorted(generator.uniform(0, 255, 2))
        smooth = np.stack(waves, axis=2) * (high - low) / 2 + (high + low) / 2
        made.append((smooth + generator.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8))
    return np.stack(made)


def compare(plans: list[AugmentationPlan], pixels: np.ndarray) -> tuple[float, int]:
    """Return the fraction of values that differ, and the largest difference."""
    expected = np.stack([augment.apply(plan, image, SIZE) for plan, image in zip(plans, pixels, strict=True)])
    actual = apply_all(plans, torch.from_numpy(pixels).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
    assert actual.dtype == np.uint8
    difference = np.abs(actual.astype(int) - expected)
    return float((difference > 0).mean()), int(difference.max())


def planned(augmentation: Augmentation, count: int) -> list[AugmentationPlan]:
    return [augment.plan(augmentation, *SIZE, SIZE, draws(3, position)) for position in range(count)]


@pytest.mark.parametrize("channels", [1, 3])
def test_crops_flips_and_erasing_are_exact(channels: int) -> None:
    some = Augmentation(crop="padded", flip=0.5, flip_vertical=0.5, erasing=0.5, fill=7)
    plans = planned(some, 40)
    assert len({plan.box for plan in plans}) > 10
    assert compare(plans, images(40, channels)) == (0.0, 0)


@pytest.mark.parametrize("name", sorted({*USUAL, *BIG_VISION} - {"identity"}))
def test_every_operation(name: str) -> None:
    """Rotations may pick the neighbour of a pixel on a tie; colours may differ by one in rounding."""
    single = Augmentation(crop="none", flip=0.0)
    plans = []
    for number, plan in enumerate(planned(single, 24)):
        sets = "big_vision" if name not in USUAL or number % 2 else "usual"
        sets = "usual" if name not in BIG_VISION else sets
        settings = RandAugment(layers=1, magnitude=9, operations=sets)
        tries = (draw(settings, SIZE, draws(number, position))[0] for position in range(500))
        plans.append(plan._replace(operations=(next(drawn for drawn in tries if drawn.name == name),)))
    # A run never mixes contrast to a fixed level with contrast to the mean.
    if name == "contrast":
        plans = [plan for plan in plans if len(plan.operations[0].values) == 1]
    differing, most = compare(plans, images(len(plans)))
    if name in ("rotate", "shear_x", "shear_y"):
        assert differing < 0.02
    else:
        assert differing < 0.03
        assert most <= 1


def test_a_full_recipe() -> None:
    recipe = Augmentation(
        crop="padded",
        randaugment=RandAugment(layers=2, magnitude=9),
        rotation=10,
        affine=Affine(translate=(0.1, 0.1), scale=(0.9, 1.1), shear=5),
        jitter=Jitter(brightness=0.3, contrast=0.3, saturation=0.3),
        grey=0.1,
        erasing=0.3,
    )
    pixels = images(64)
    plans = planned(recipe, 64)
    expected = np.stack([augment.apply(plan, image, SIZE) for plan, image in zip(plans, pixels, strict=True)])
    actual = apply_all(plans, torch.from_numpy(pixels).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
    near = np.abs(actual.astype(int) - expected) <= 4
    assert near.mean() > 0.95


@given(
    seed=st.integers(0, 2**31),
    magnitude=st.integers(0, 30),
    operations=st.sampled_from(["usual", "big_vision"]),
    channels=st.sampled_from([1, 3]),
)
@settings(max_examples=25, deadline=None)
def test_all_operations_together(seed: int, magnitude: int, operations: str, channels: int) -> None:
    """Every image gets its own operation, and none of another image's."""
    chosen = Augmentation(
        crop="padded", erasing=0.2, randaugment=RandAugment(layers=1, magnitude=magnitude, operations=operations)
    )
    plans = [augment.plan(chosen, *SIZE, SIZE, draws(seed, position)) for position in range(80)]
    some = images(80, channels)
    expected = np.stack([augment.apply(plan, image, SIZE) for plan, image in zip(plans, some, strict=True)])
    inputs = torch.from_numpy(some).permute(0, 3, 1, 2)
    actual = apply_all(plans, inputs)
    assert torch.equal(inputs, torch.from_numpy(some).permute(0, 3, 1, 2))
    assert torch.equal(actual, apply_all(plans, inputs))
    alone = [apply_all([plan], image[None]) for plan, image in zip(plans, inputs, strict=True)]
    assert torch.equal(actual, torch.cat(alone))
    difference = np.abs(actual.permute(0, 2, 3, 1).numpy().astype(int) - expected)
    for number, plan in enumerate(plans):
        if plan.operations[0].name in ("rotate", "shear_x", "shear_y"):
            assert (difference[number] > 0).mean() < 0.3, plan  # ties between two pixels
        else:
            assert difference[number].max() <= 1, plan


def test_contrast_to_a_fixed_level_and_to_the_mean() -> None:
    plans = planned(Augmentation(crop="none", flip=0), 12)
    contrasts = [Operation("contrast", (1.5, 3) if number % 2 else (0.4,)) for number in range(12)]
    plans = [plan._replace(operations=(contrast,)) for plan, contrast in zip(plans, contrasts, strict=True)]
    assert compare(plans, images(12))[1] <= 1


@pytest.mark.parametrize("values", [[7], [0, 255], [99, 100, 101]])
def test_images_of_few_values(values: list[int]) -> None:
    some = np.random.default_rng(0).choice(np.array(values, np.uint8), (16, *SIZE, 3))
    names = ("equalize", "autocontrast", "contrast", "sharpness")
    plans = [
        plan._replace(operations=(Operation(names[number % 4], (1.9,) if number % 4 > 1 else ()),))
        for number, plan in enumerate(planned(Augmentation(crop="none", flip=0), 16))
    ]
    assert compare(plans, some)[1] <= 1


def test_an_unsupported_operation() -> None:
    plans = [plan._replace(operations=(Operation("blur", (1.0,)),)) for plan in planned(Augmentation(crop="none"), 2)]
    with pytest.raises(ValueError, match="not implemented on the device: blur"):
        compare(plans, images(2))


def test_identity() -> None:
    plans = [
        plan._replace(operations=(Operation("identity"),)) for plan in planned(Augmentation(crop="none", flip=0), 2)
    ]
    assert compare(plans, images(2)) == (0.0, 0)
    assert usual_magnitude("identity", 9, SIZE) == 0.0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (Augmentation(), "crop"),
        (Augmentation(crop="padded", blur=0.1), "blur"),
        (Augmentation(crop="none", three_augment=True), "three_augment"),
        (Augmentation(crop="none", jitter=Jitter(hue=0.1)), "hue"),
        (Augmentation(crop="none", erasing=0.1, erasing_fill="noise"), "noise"),
    ],
)
def test_unsupported_augmentations(wrong: Augmentation, word: str) -> None:
    check_on_device(Augmentation(crop="padded"))
    with pytest.raises(ConfigError, match=word):
        check_on_device(wrong)
