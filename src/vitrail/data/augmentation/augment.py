"""`Augmentation`: the augmentation config and its two steps, `plan` (random) and `apply` (deterministic).

`plan` needs only an image's size and makes all random choices. So the decoder knows the crop box and may decode at a
reduced scale; `apply` then turns the decoded image into the pixels of a batch.
"""

from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from vitrail.data.augmentation import colours, crops, randaugment
from vitrail.data.augmentation.colours import Matrix
from vitrail.data.augmentation.crops import Beyond, Box
from vitrail.data.augmentation.draws import below, between, draws
from vitrail.data.augmentation.randaugment import Operation, RandAugment
from vitrail.data.augmentation.vectorised import flipped
from vitrail.data.decode import extent
from vitrail.data.preprocess import Interpolation
from vitrail.errors import ConfigError, InputError, suggest
from vitrail.schema import Count, Frozen, Sequence

Chance = Annotated[float, Field(ge=0, le=1)]
"""A probability: 0 never, 1 for every image."""
Strength = Annotated[float, Field(ge=0, le=10)]
Degrees = Annotated[float, Field(ge=0, le=180)]
Above = Annotated[float, Field(gt=0, le=1000)]
Range = Annotated[tuple[Above, Above], Sequence]
"""(minimum, maximum)."""

ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
BLUR_RADIUS = (0.1, 2.0)
MIDDLE_GREY = 128


class Jitter(Frozen):
    """Colour jitter, in random order: each by a factor from 1 - strength to 1 + strength."""

    brightness: Strength = 0.0
    """Maximum relative change of brightness."""
    contrast: Strength = 0.0
    """Maximum relative change of contrast."""
    saturation: Strength = 0.0
    """Maximum relative change of saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The largest hue shift in either direction, as a fraction of the colour circle."""


class Affine(Frozen):
    """A random affine transform around the centre."""

    translate: Annotated[tuple[Chance, Chance], Sequence] = (0.0, 0.0)
    """The largest vertical and horizontal translation, as fractions of height and width."""
    scale: Range = (1.0, 1.0)
    """Smallest and largest scale factor."""
    shear: Annotated[float, Field(ge=0, le=80)] = 0.0
    """The largest shear to either side, in degrees."""


class Augmentation(Frozen):
    """The augmentations drawn for each training image, applied in the order of the fields."""

    crop: Literal["inception", "inception_tf", "simple", "padded", "none"] = "inception"
    """`inception` draws area and ratio like torchvision, `inception_tf` like TensorFlow; `simple` resizes to cover the
    size and crops at random, as in 3-Augment; `padded` shifts the whole image by a few pixels, as is usual for CIFAR;
    `none` resizes as in evaluation."""
    crop_area: Range = (0.08, 1.0)
    """Range of the inception crops' area, as a fraction of the image's."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Range of the inception crops' width / height."""
    crop_padding: Count = 4
    """Padding of `simple` (reflected) and `padded` (filled), in pixels."""
    interpolation: Interpolation = "bilinear"
    """Filter used to resize crops."""
    flip: Chance = 0.5
    """Probability of a horizontal flip."""
    flip_vertical: Chance = 0.0
    """Probability of a vertical flip."""
    rotation: Degrees = 0.0
    """The largest rotation to either side, in degrees."""
    affine: Affine | None = None
    """Random translation, scaling and shear. None: off."""
    randaugment: RandAugment | None = None
    """RandAugment. None: off."""
    three_augment: bool = False
    """3-Augment: one of greyscale, solarize and blur."""
    jitter: Jitter | None = None
    """Colour jitter. None: off."""
    grey: Chance = 0.0
    """Probability of a conversion to greyscale."""
    blur: Chance = 0.0
    """Probability of a Gaussian blur."""
    erasing: Chance = 0.0
    """Probability of random erasing (Zhong et al.)."""
    erasing_fill: Literal["grey", "noise"] = "grey"
    """Content of the erased rectangle: mid-grey, or noise."""
    fill: Annotated[Count, Field(le=255)] | None = None
    """The grey value of pixels from outside the image. None: 128 with big_vision's operations, else 0."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        ranges = [("crop_area", self.crop_area), ("crop_ratio", self.crop_ratio)]
        ranges += [("affine.scale", self.affine.scale)] if self.affine else []
        for name, (least, most) in ranges:
            if least > most:
                raise ConfigError(f"augmentation.{name} is ({least}, {most}); put the smaller number first")
        if self.crop_area[1] > 1:
            raise ConfigError(f"augmentation.crop_area is {self.crop_area}; a crop is at most the whole image (1)")
        if self.randaugment is not None and self.three_augment:
            raise ConfigError("randaugment and three_augment are both set; choose one")
        return self


def _augreg(magnitude: float) -> Augmentation:
    """Return one AugReg level: TensorFlow's inception crop, flips, and two of big_vision's operations."""
    operations = RandAugment(layers=2, magnitude=magnitude, operations="big_vision")
    return Augmentation(crop="inception_tf", crop_area=(0.05, 1.0), crop_ratio=(0.75, 1.33), randaugment=operations)


PRESETS: dict[str, Augmentation] = {
    "none": Augmentation(crop="none", flip=0.0),
    "light": Augmentation(),
    # AugReg's levels, without their mixup, which is not part of this config.
    "augreg_light1": _augreg(0),
    "augreg_light2": _augreg(10),
    "augreg_medium1": _augreg(15),
    "augreg_medium2": _augreg(15),
    "augreg_strong1": _augreg(20),
    "augreg_strong2": _augreg(20),
    "plain_baseline": _augreg(10),
    "three_augment": Augmentation(
        crop="simple",
        interpolation="bicubic",
        three_augment=True,
        jitter=Jitter(brightness=0.3, contrast=0.3, saturation=0.3),
    ),
}
"""Augmentations by name."""


def preset(name: str) -> Augmentation:
    """Return a preset by name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown augmentation {name!r}; choose one of {', '.join(PRESETS)}" + suggest(name, PRESETS))
    return PRESETS[name]


class AugmentationPlan(NamedTuple):
    """All random choices for one image, as plain numbers."""

    height: int
    """Of the original image; the box is in its pixels."""
    width: int
    box: Box | None
    """The crop; None: the image is already resized."""
    beyond: Beyond
    interpolation: Interpolation
    flip: bool
    flip_vertical: bool
    warp: Matrix | None
    operations: tuple[Operation, ...]
    erased: Box | None
    noise: int | None
    """The seed of the noise for erased pixels; None: grey."""
    fill: int


def plan(
    augmentation: Augmentation, height: int, width: int, size: tuple[int, int], generator: Generator
) -> AugmentationPlan:
    """Draw the augmentation of an image of (height, width) to `size`, also (height, width)."""
    if height < 1 or width < 1:
        raise InputError(f"an image of {height}×{width} pixels cannot be cropped")
    erased, noise = None, None
    box, beyond = _drawn_box(augmentation, height, width, size, generator)
    flip, flip_vertical = bernoulli(augmentation.flip, generator), bernoulli(augmentation.flip_vertical, generator)
    warp = _drawn_warp(augmentation, size, generator)
    operations = _drawn_operations(augmentation, size, generator)
    if bernoulli(augmentation.erasing, generator):
        shape = crops.shape_that_fits(*size, generator, ERASED_AREA, ERASED_RATIO)
        if shape is not None:
            top, left = (below(generator, length - side + 1) for length, side in zip(size, shape, strict=True))
            erased = Box(top, left, *shape)
        noise = below(generator, 2**53) if augmentation.erasing_fill == "noise" else None
    fill = augmentation.fill
    if fill is None:
        big_vision = augmentation.randaugment is not None and augmentation.randaugment.operations == "big_vision"
        fill = MIDDLE_GREY if big_vision else 0
    return AugmentationPlan(
        height, width, box, beyond, augmentation.interpolation,
        flip, flip_vertical, warp, operations, erased, noise, fill,
    )  # fmt: skip


def bernoulli(chance: float, generator: Generator) -> bool:
    """Draw whether something with this probability happens; nothing is drawn for probability 0."""
    return chance > 0 and generator.random() < chance


def _drawn_box(
    augmentation: Augmentation, height: int, width: int, size: tuple[int, int], generator: Generator
) -> tuple[Box | None, Beyond]:
    area, ratio, padding = augmentation.crop_area, augmentation.crop_ratio, augmentation.crop_padding
    match augmentation.crop:
        case "inception":
            return crops.inception_crop(height, width, generator, area, ratio), "nothing"
        case "inception_tf":
            return crops.inception_crop_tf(height, width, generator, area, ratio), "nothing"
        case "simple":
            return crops.simple_crop(height, width, generator, size, padding), "mirror"
        case "padded":
            # Keep part of the image visible if it is smaller than the padding.
            return crops.padded_crop(height, width, generator, min(padding, min(height, width) // 2)), "fill"
        case "none":
            return None, "nothing"


def _drawn_warp(augmentation: Augmentation, size: tuple[int, int], generator: Generator) -> Matrix | None:
    """Draw rotation and affine transform together, so that pixels are interpolated once."""
    if not augmentation.rotation and augmentation.affine is None:
        return None
    affine = augmentation.affine or Affine()
    degrees = between(generator, -augmentation.rotation, augmentation.rotation)
    down, right = (
        round(between(generator, -fraction * side, fraction * side))
        for fraction, side in zip(affine.translate, size, strict=True)
    )
    scale = between(generator, *affine.scale)
    return colours.affine_matrix(*size, degrees, right, down, scale, between(generator, -affine.shear, affine.shear))


def _drawn_operations(augmentation: Augmentation, size: tuple[int, int], generator: Generator) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    if augmentation.randaugment is not None:
        operations += randaugment.draw(augmentation.randaugment, size, generator)
    if augmentation.three_augment:
        blurred = Operation("blur", (between(generator, *BLUR_RADIUS),))
        operations.append((Operation("grey"), Operation("solarize", (128,)), blurred)[below(generator, 3)])
    if augmentation.jitter is not None:
        operations += draw_jitter(augmentation.jitter, generator)
    if bernoulli(augmentation.grey, generator):
        operations.append(Operation("grey"))
    if bernoulli(augmentation.blur, generator):
        operations.append(Operation("blur", (between(generator, *BLUR_RADIUS),)))
    return tuple(operations)


def draw_jitter(jitter: Jitter, generator: Generator) -> list[Operation]:
    """Draw the factors and the order of the colour operations."""
    strengths = {"brightness": jitter.brightness, "contrast": jitter.contrast, "saturation": jitter.saturation}
    operations = [
        Operation(name, (between(generator, max(0.0, 1 - strength), 1 + strength),))
        for name, strength in strengths.items()
        if strength
    ]
    if jitter.hue:
        operations.append(Operation("hue", (between(generator, -jitter.hue, jitter.hue),)))
    return [operations[index] for index in generator.permutation(len(operations))]


def apply(plan: AugmentationPlan, image: Image.Image | NDArray[Any], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Apply a plan to an image or a smaller version of it: uint8, (height, width, channels).

    For images with other than one or three channels, colour operations are skipped.
    """
    if isinstance(image, np.ndarray):
        image = _checked_array(image)
    elif image.mode not in ("RGB", "L"):
        raise InputError(f"an image of mode {image.mode} cannot be augmented; convert it to RGB or L")
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] != 3:
        planes = [_shaped(plan, image[:, :, channel], size) for channel in range(image.shape[2])]
        pixels = np.stack([np.asarray(plane) for plane in planes], axis=2)
    else:
        shaped = _shaped(plan, image, size)
        for operation in plan.operations:
            shaped = randaugment.perform(operation, _pillow(shaped), plan.fill)
        pixels = np.array(shaped)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if plan.erased is not None:
        top, left, height, width = map(int, plan.erased)
        hole = pixels[top : top + height, left : left + width]
        hole[:] = MIDDLE_GREY if plan.noise is None else _noise(plan.noise, hole.shape)
    return pixels


def _checked_array(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Return (height, width) for one channel, else (height, width, channels)."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
        raise InputError(
            f"an array of {image.dtype} and shape {image.shape} cannot be augmented; "
            "use uint8 and (height, width, channels)"
        )
    return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image


def _noise(seed: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return draws(seed, 0, "erasing").integers(0, 256, shape, dtype=np.uint8)


def _shaped(
    plan: AugmentationPlan, image: Image.Image | NDArray[np.uint8], size: tuple[int, int]
) -> Image.Image | NDArray[np.uint8]:
    """Apply the geometric part: crop and resize, flip, warp."""
    shaped = _resized(plan, image, size)
    if isinstance(shaped, np.ndarray):
        shaped = flipped(shaped, plan.flip, plan.flip_vertical)
    else:
        if plan.flip:
            shaped = shaped.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if plan.flip_vertical:
            shaped = shaped.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return shaped if plan.warp is None else colours.affine(_pillow(shaped), plan.warp, plan.fill)


def _pillow(image: Image.Image | NDArray[np.uint8]) -> Image.Image:
    return image if isinstance(image, Image.Image) else Image.fromarray(np.ascontiguousarray(image))


def _resized(
    plan: AugmentationPlan, image: Image.Image | NDArray[np.uint8], size: tuple[int, int]
) -> Image.Image | NDArray[np.uint8]:
    """Crop the box and resize it; the box is scaled if the image was decoded at a reduced scale."""
    height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[:2]
    if plan.box is None:
        if (height, width) != tuple(size):
            raise InputError(
                f"without a crop, the image must already be resized: it is {height}×{width}, not {size[0]}×{size[1]}"
            )
        return image
    top, left, box_height, box_width = plan.box
    down, across = extent(plan.height, height) / plan.height, extent(plan.width, width) / plan.width
    box = Box(top * down, left * across, box_height * down, box_width * across)
    if plan.beyond == "nothing" and (height, width) != (plan.height, plan.width):
        box = crops.whole_pixels(box, height, width)  # as the fast kernel needs; the crop moves by half a pixel at most
    resample = Image.Resampling[plan.interpolation.upper()]
    return crops.cut(image, box, size, resample, plan.beyond, plan.fill)
