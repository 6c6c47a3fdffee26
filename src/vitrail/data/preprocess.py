"""`Preprocess`: the evaluation transform, as a value that is stored with the weights."""

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from vitrail.errors import ConfigError, InputError
from vitrail.schema import Frozen, Pair, Positive, Sequence

if TYPE_CHECKING:  # importing torch takes two seconds, and processes that only decode images do not need it
    from torch import Tensor

Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Numbers = Annotated[tuple[Annotated[float, Field()], ...], Sequence]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_NUMBERS = 1 << 28
"""Most values in one image: 1 GB as float32, more than 9,000×9,000 RGB pixels. More is a mistake that would run out of
memory."""
HALF = (0.5, 0.5, 0.5)
"""Mean and std that map 0…255 to ±1."""


class Preprocess(Frozen):
    """The evaluation transform: resize, centre crop, scale to 0…1, subtract `mean`, divide by `std`."""

    size: Pair = (224, 224)
    """Height and width of the model's input."""
    resize: Literal["squash", "cover", "contain"] = "squash"
    """`squash` ignores the aspect ratio; `cover` keeps it and crops the edges; `contain` keeps it and pads with the
    mean colour."""
    resize_to: Pair | None = None
    """Height and width that the image is resized to (`squash`), covers, or is contained in, before the centre crop of
    `size`. None: `size` itself."""
    half: Literal["even", "down"] = "even"
    """How the centre crop rounds half a pixel: to even (timm, torchvision), or down (transformers)."""
    interpolation: Interpolation = "bilinear"
    channels: Positive = 3
    """1 for greyscale, 3 for colour."""
    mean: Numbers = HALF
    std: Numbers = HALF

    @model_validator(mode="after")
    def _one_number_a_channel(self) -> Self:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) != self.channels:
                raise ConfigError(
                    f"preprocess.{name} has {len(numbers)} values for {self.channels} channels; give one per channel"
                )
        for name, box in (("size", self.size), ("resize_to", self.resize_to or self.size)):
            if box[0] * box[1] * self.channels > MOST_NUMBERS:
                raise ConfigError(
                    f"preprocess.{name} is {box[0]:,}×{box[1]:,} with {self.channels:,} channels, more than "
                    f"{MOST_NUMBERS:,} values per image; make it smaller"
                )
        if min(self.std) <= 0:
            raise ConfigError(f"preprocess.std is {self.std}; every value must be greater than 0")
        return self

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixels of one image, as uint8."""
        return self.size[0] * self.size[1] * self.channels

    @property
    def sees_whole(self) -> bool:
        """Whether the model's input is the whole image, and nothing else."""
        return self.resize == "squash" and self.resize_to in (None, self.size)

    def resized(self, size: tuple[int, int]) -> Self:
        """Return the same preprocessing for another image size; the crop keeps its fraction of the image."""
        if self.resize_to is None:
            return self.replace(size=size)
        sides = zip(size, self.size, self.resize_to, strict=True)
        return self.replace(size=size, resize_to=tuple(round(new * box / old) for new, old, box in sides))

    def with_channels(self, channels: int) -> Self:
        """Return the same preprocessing for another number of channels, with the averaged statistics."""
        if channels == self.channels:
            return self
        mean, std = ((sum(numbers) / len(numbers),) * channels for numbers in (self.mean, self.std))
        return self.replace(channels=channels, mean=mean, std=std)

    def __call__(self, image: Image.Image) -> "Tensor":
        """Return the model's input for an image: (channels, height, width), normalised."""
        return self.normalise(self.pixels(image))

    def pixels(self, image: Image.Image) -> "Tensor":
        """Resize and crop an image: (channels, height, width), uint8."""
        array = np.asarray(self._fit(self._coloured(image)))
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        import torch

        return torch.from_numpy(array.copy())

    def fit(self, pixels: NDArray[np.uint8], *, quick: bool = False) -> NDArray[np.uint8]:
        """Resize and crop decoded pixels (height, width, channels), of any number of channels.

        `quick` uses torch's resize kernel where it fits: a few pixels then differ from Pillow's by a grey level.
        """
        if pixels.shape[2] != self.channels:
            raise InputError(f"this model takes {self.channels} channels, but the image has {pixels.shape[2]}")
        if quick and (made := self._quick_fit(pixels)) is not None:
            return made
        if self.channels == 3:
            return np.asarray(self._fit(Image.fromarray(pixels)))
        layers = [
            np.asarray(self._fit(Image.fromarray(np.ascontiguousarray(layer)), fill=mean))
            for layer, mean in zip(pixels.transpose(2, 0, 1), self.mean, strict=True)
        ]
        return np.stack(layers, axis=2)

    def fit_mask(self, mask: NDArray[np.uint8], ignored: int) -> NDArray[np.uint8]:
        """Resize and crop a mask (height, width) as the image of the same size; padding becomes `ignored`."""
        width, height = resized_size((mask.shape[1], mask.shape[0]), self.resize_to or self.size, self.resize)
        image = Image.fromarray(np.ascontiguousarray(mask)).resize((width, height), Image.Resampling.NEAREST)
        return np.array(self._cut(image, (ignored,)))

    def normalise(self, pixels: "Tensor") -> "Tensor":
        """Normalise pixels 0…255 (…, channels, height, width) to float32, on their own device."""
        import torch

        # One kernel: pixels · 1 / (255 · std) - mean / std.
        factor = _by_channel([1 / (255 * s) for s in self.std], pixels)
        shift = _by_channel([-m / s for m, s in zip(self.mean, self.std, strict=True)], pixels)
        return torch.addcmul(shift, pixels, factor)

    def _coloured(self, image: Image.Image) -> Image.Image:
        if self.channels not in (1, 3):
            raise InputError(
                f"this model takes {self.channels} channels, which an image file does not have; use a tensor"
            )
        mode = "RGB" if self.channels == 3 else "L"
        return image if image.mode == mode else image.convert(mode)

    def _resized(self, image: Image.Image) -> Image.Image:
        width, height = resized_size(image.size, self.resize_to or self.size, self.resize)
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling[self.interpolation.upper()])

    def _fit(self, image: Image.Image, fill: float | None = None) -> Image.Image:
        return self._cut(self._resized(image), self.padding(self.mean if fill is None else (fill,)))

    def _quick_fit(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Resize and crop with torch's kernel; None if it does not fit, or there is nothing to resize."""
        from vitrail.data.augmentation.vectorised import can_resize, resized

        resample = Image.Resampling[self.interpolation.upper()]
        image = pixels.shape[1], pixels.shape[0]
        width, height = resized_size(image, self.resize_to or self.size, self.resize)
        padded = height < self.size[0] or width < self.size[1]
        if self.channels != 3 or padded or (width, height) == image or not can_resize(pixels, resample):
            return None
        top, left = self.crop_start(height, self.size[0]), self.crop_start(width, self.size[1])
        made = resized(pixels, (height, width), resample)
        return made[top : top + self.size[0], left : left + self.size[1]]

    def _cut(self, image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
        """Centre crop, after padding an image that is too small with a colour."""
        height, width = self.size
        if image.height < height or image.width < width:
            wide, tall = max(image.width, width), max(image.height, height)
            larger = Image.new(image.mode, (wide, tall), colour if len(colour) == 3 else colour[0])
            larger.paste(
                image, (-min(0, self.crop_start(image.width, width)), -min(0, self.crop_start(image.height, height)))
            )
            image = larger
        top, left = self.crop_start(image.height, height), self.crop_start(image.width, width)
        return image.crop((left, top, left + width, top + height))

    def padding(self, mean: tuple[float, ...] | None = None) -> tuple[int, ...]:
        """Return the colour around an image that is too small, one value per channel."""
        return tuple(round(255 * m) if self.resize == "contain" else 0 for m in (self.mean if mean is None else mean))

    def crop_start(self, resized: int, side: int) -> int:
        """Return where the centre crop starts along an axis; negative if the image has to be padded."""
        if resized < side:
            return -((side - resized) // 2)
        return (round if self.half == "even" else math.floor)((resized - side) / 2)


def resized_size(
    image: tuple[int, int], box: tuple[int, int], mode: Literal["squash", "cover", "contain"]
) -> tuple[int, int]:
    """Return the resized (width, height) of an image of (width, height), for a box of (height, width).

    Fractions of a pixel are truncated when covering a square, like torchvision, and otherwise rounded, like timm.
    """
    width, height = image
    if mode == "squash":
        return box[1], box[0]
    if mode == "cover" and box[0] == box[1]:
        short, long = sorted(image)
        longer = int(box[0] * long / short)
        return (box[0], longer) if width <= height else (longer, box[0])
    choose = min if mode == "cover" else max
    ratio = choose(height / box[0], width / box[1])
    return max(1, round(width / ratio)), max(1, round(height / ratio))


def _by_channel(numbers: list[float], pixels: "Tensor") -> "Tensor":
    """Return one value per channel, (channels, 1, 1) in float32, on the pixels' device."""
    import torch

    if not pixels.is_cuda:
        return pixels.new_tensor(numbers, dtype=torch.float32)[:, None, None]
    # Created on the device: a copy from the host would synchronise.
    made = [torch.full((1, 1), number, dtype=torch.float32, device=pixels.device) for number in numbers]
    return torch.stack(made)
