"""RandAugment compared to torchvision's, and big_vision's operations by their definition."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from tests.support.peers import import_peer

from vitrail.data.augmentation import randaugment
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.randaugment import BIG_VISION, BINS, USUAL, Operation, RandAugment
from vitrail.errors import ConfigError

autoaugment = import_peer("torchvision.transforms.autoaugment")
NEAREST = import_peer("torchvision.transforms").InterpolationMode.NEAREST
# Our names for torchvision's operations, in its order.
PEER = dict(zip(USUAL, autoaugment.RandAugment()._augmentation_space(BINS, (9, 9)), strict=True))
SIZES = [(224, 224), (32, 32), (331, 331), (96, 224), (7, 1), (384, 512)]
COUNT = 8_000
# Fixed seeds, a hundred or so such tests: a sound sample fails one of them with a probability of about a tenth, once.
CHANCE = 0.001


def photograph(height: int, width: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    rough = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    return rough.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def test_names_correspond() -> None:
    assert list(PEER.values()) == [
        "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
        "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
    ]  # fmt: skip
    assert len(set(BIG_VISION)) == 16


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_magnitudes_match_torchvision(size: tuple[int, int]) -> None:
    space = autoaugment.RandAugment()._augmentation_space(BINS, size)
    for ours, theirs in PEER.items():
        magnitudes, signed = space[theirs]
        assert signed == (ours in randaugment.SIGNED_USUALLY)
        expected = magnitudes.tolist() if magnitudes.ndim else [0.0] * BINS
        actual = [randaugment.usual_magnitude(ours, step, size) for step in range(BINS)]
        # Single precision, whose last bit depends on the CPU's fused multiply-add.
        assert actual == pytest.approx(expected, rel=2e-7, abs=1e-6)
        if "translate" in ours:
            assert list(map(int, actual)) == list(map(int, expected))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(48, 64), (31, 17), (1, 1)], ids=str)
@pytest.mark.parametrize("name", USUAL)
def test_operations_match_torchvision(name: str, size: tuple[int, int], mode: str) -> None:
    """Every operation, with both signs and from weak to strong, gives torchvision's pixels."""
    image = photograph(*size, mode)
    space = autoaugment.RandAugment()._augmentation_space(BINS, size)
    for step in (0, 1, 9, 15, 22, 30):
        settings = RandAugment(layers=1, magnitude=step)
        drawn = {operation_of(name, settings, size, position) for position in range(8)}
        magnitudes, signed = space[PEER[name]]
        magnitude = float(magnitudes[step]) if magnitudes.ndim else 0.0
        expected = {sign * magnitude for sign in ((1, -1) if signed else (1,))}
        their_images = [
            autoaugment._apply_op(image, PEER[name], value, interpolation=NEAREST, fill=None) for value in expected
        ]
        our_images = [randaugment.perform(operation, image) for operation in drawn]
        assert {p.tobytes() for p in our_images} == {p.tobytes() for p in their_images}


def operation_of(name: str, settings: RandAugment, size: tuple[int, int], position: int) -> Operation:
    choose = randaugment._usual if settings.operations == "usual" else randaugment._big_vision
    return choose(name, settings.magnitude, size, draws(0, position))


def test_strongest_operations_differ_by_sign() -> None:
    """The test above compares sets, so a sign that is never drawn would be a missing image."""
    image = photograph(48, 64)
    for name in randaugment.SIGNED_USUALLY:
        drawn = {operation_of(name, RandAugment(magnitude=30), (48, 64), position) for position in range(8)}
        assert len({randaugment.perform(operation, image).tobytes() for operation in drawn}) == 2


@pytest.mark.parametrize("operations", ["usual", "big_vision"])
def test_operations_are_drawn_uniformly(operations: str) -> None:
    settings = RandAugment(layers=2, magnitude=9, operations=operations)
    names = USUAL if operations == "usual" else BIG_VISION
    signed = randaugment.SIGNED_USUALLY if operations == "usual" else randaugment.SIGNED_BY_BIG_VISION
    pairs = [randaugment.draw(settings, (224, 224), draws(0, position)) for position in range(COUNT)]
    for layer in range(2):
        counts = Counter(pair[layer].name for pair in pairs)
        assert set(counts) == set(names)
        assert stats.chisquare(list(counts.values())).pvalue > CHANCE
    together = Counter((first.name, second.name) for first, second in pairs)
    table = np.array([[together[first, second] for second in names] for first in names])
    assert stats.chi2_contingency(table).pvalue > CHANCE
    for name in signed:
        neutral = 1.0 if name in ("brightness", "saturation", "contrast", "sharpness") else 0.0
        values = [op.values[0] for pair in pairs for op in pair if op.name == name]
        more = sum(value > neutral for value in values)
        assert sum(value < neutral for value in values) + more == len(values)
        assert stats.binomtest(more, len(values)).pvalue > CHANCE


BIG_VISION_AT = {
    # magnitude: the parameter of each operation, without its sign
    0: {"rotate": 0, "posterize": 1, "solarize": 0, "saturation": 0.1, "shear_x": 0, "translate_x": 0,
        "cutout": 0, "solarize_add": 0},
    10: {"rotate": 30, "posterize": 4, "solarize": 0, "saturation": 1.9, "shear_x": 0.3, "translate_x": 100,
         "cutout": 40, "solarize_add": 110},
    15: {"rotate": 45, "posterize": 6, "solarize": 128, "saturation": 2.8, "shear_x": 0.45, "translate_x": 150,
         "cutout": 60, "solarize_add": 165},
    20: {"rotate": 60, "posterize": 8, "solarize": 0, "saturation": 3.7, "shear_x": 0.6, "translate_x": 200,
         "cutout": 80, "solarize_add": 220},
}  # fmt: skip
ALIKE = {"brightness": "saturation", "contrast": "saturation", "sharpness": "saturation"} | {
    "shear_y": "shear_x",
    "translate_y": "translate_x",
}


@pytest.mark.parametrize("magnitude", BIG_VISION_AT)
def test_big_vision_magnitudes(magnitude: int) -> None:
    settings = RandAugment(magnitude=magnitude, operations="big_vision")
    for name in BIG_VISION:
        expected = BIG_VISION_AT[magnitude].get(ALIKE.get(name, name))
        for position in range(5):
            values = operation_of(name, settings, (224, 224), position).values
            if expected is None:
                assert values == ()
            else:
                assert abs(values[2 if name == "cutout" else 0]) == pytest.approx(expected)
    # Its "mean" is the number of pixels / 256, as in the code of all published results.
    assert operation_of("contrast", settings, (224, 224), 0).values[1] == 196
    assert operation_of("contrast", settings, (512, 512), 0).values[1] == 255


def test_cutout_positions() -> None:
    settings = RandAugment(magnitude=10, operations="big_vision")
    places = np.array([operation_of("cutout", settings, (64, 100), p).values[:2] for p in range(COUNT)])
    for column, side in ((0, 64), (1, 100)):
        counts = np.bincount(places[:, column].astype(int), minlength=side)
        assert len(counts) == side
        assert stats.chisquare(counts).pvalue > CHANCE


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("magnitude", [0, 5, 10, 20, 30])
def test_every_operation_keeps_mode_and_size(magnitude: int, mode: str) -> None:
    for size in ((24, 40), (1, 1), (1, 9)):
        image = photograph(*size, mode)
        for operations in ("usual", "big_vision"):
            settings = RandAugment(magnitude=magnitude, operations=operations)
            for name in USUAL if operations == "usual" else BIG_VISION:
                result = randaugment.perform(operation_of(name, settings, size, 1), image, fill=128)
                assert (result.mode, result.size) == (mode, image.size)


def test_solarize_above_white_is_the_identity() -> None:
    image = photograph(20, 20)
    assert randaugment.perform(Operation("solarize", (256,)), image).tobytes() == image.tobytes()


def test_pixels_from_outside_are_filled() -> None:
    image = Image.new("RGB", (60, 60), (255, 255, 255))
    for name in ("translate_x", "translate_y"):
        result = np.asarray(randaugment.perform(Operation(name, (20,)), image, fill=128))
        assert set(np.unique(result)) == {128, 255}
        assert (result == 128).mean() == pytest.approx(1 / 3)


def test_an_unknown_operation() -> None:
    with pytest.raises(ValueError, match="unknown operation"):
        randaugment.perform(Operation("melt", (1,)), photograph(4, 4))


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"magnitude is 9\.5; the usual operations have integer magnitudes"):
        RandAugment(magnitude=9.5)
    with pytest.raises(ConfigError, match="magnitude is 31"):
        RandAugment(magnitude=31)
    with pytest.raises(ConfigError, match="did you mean 'usual'"):
        RandAugment(operations="usal")
    assert RandAugment(magnitude=9.5, operations="big_vision").magnitude == 9.5
