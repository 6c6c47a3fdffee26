"""`Explanation`: a map of what a model attended to, its rendering over the image, and its files."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from vitrail.checkpoints.writing import atomic_file, check_target
from vitrail.data.sources.source import SUFFIXES
from vitrail.errors import ConfigError
from vitrail.explanations.request import ExplanationRequest, Method
from vitrail.text import percent

Floats = NDArray[np.floating[Any]]
IMAGES = (".png", ".jpg", ".jpeg", ".webp")
OPACITY = 0.6


# ── explanation ──


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What a model attended to in one image."""

    map: NDArray[np.float32]
    """(rows, columns) on the grid of patches; for pca (rows, columns, 3), colours from 0 to 1."""
    image: Image.Image
    """What the model saw: the image after resizing and cropping, in RGB."""
    method: Method
    target: str | int | None = None
    """The explained class: its name, or its index if the bundle has no names; None for methods without a class."""
    probability: float | None = None
    """Its probability, from 0 to 1; None if the model is not a classifier."""
    predicted: str | int | None = None
    """The predicted class; None if the model has no prediction for a whole image."""
    confidence: float | None = None
    """The probability of the predicted class; None if the model is not a classifier."""
    value: str | None = None
    """The value of the explained output as text, if the model is not a classifier."""
    predicted_value: str | None = None
    """The same of the predicted output."""

    @property
    def _target(self) -> str:
        return f"{self.target}, {self.value or f'{percent(self.probability or 0)}%'}"

    def __repr__(self) -> str:
        of = "" if self.target is None else f" of {self._target}"
        return f"Explanation({self.method}{of}: {self.map.shape[0]}×{self.map.shape[1]} patches)"

    def overlay(self, opacity: float = OPACITY, side: int | None = None) -> Image.Image:
        """Return the image with the map overlaid, from its minimum (dark) to its maximum (light).

        `side` is the longer side in pixels; by default that of the image, or 224 if it is smaller.
        """
        return overlay(self.image, self.map, opacity, side)

    def side_by_side(self, opacity: float = OPACITY, side: int | None = None) -> Image.Image:
        """Return the image next to its overlay."""
        return side_by_side([enlarged(self.image, side), self.overlay(opacity, side)])

    @property
    def caption(self) -> str:
        """The line above a saved image: the explained or predicted output and its value."""
        value = self.predicted_value or f"{percent(self.confidence or 0)}%"
        predicted = "" if self.predicted is None else f"predicted {self.predicted}, {value}"
        if self.target is None:
            return f"{self.method}; {predicted}" if predicted else self.method
        explained = f"{self.method} for {self._target}"
        return f"{explained}; {predicted}" if predicted and self.predicted != self.target else explained

    @property
    def notes(self) -> dict[str, str]:
        """The same as key-value pairs, stored as PNG text chunks."""
        notes = {"method": self.method, "target": self.target, "target_probability": self.probability}
        notes |= {"class" if self.predicted_value is None else "output": self.predicted, "probability": self.confidence}
        notes |= {"target_value": self.value, "value": self.predicted_value}
        return {key: str(value) for key, value in notes.items() if value is not None}

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save image and overlay side by side as .png, .jpg or .webp, or the map itself as .npy.

        The line above them names the explained or predicted class and its probability.
        """
        target = Path(path)
        if target.suffix.lower() == ".npy":
            return save_array(self.map, target, overwrite=overwrite)
        if target.suffix.lower() not in IMAGES:
            raise ConfigError(f"{target} has no suffix of an image or an array; use one of {', '.join(IMAGES)} or .npy")
        return save_image(captioned(self.side_by_side(), self.caption), target, notes=self.notes, overwrite=overwrite)


# ── rendering ──

HEAT = ((26, 22, 66), (82, 31, 122), (152, 42, 121), (214, 71, 92), (246, 124, 62), (252, 184, 66), (253, 244, 170))
"""From low to high; lightness increases, so that it also works in greyscale."""
LEAST_SIDE = 224
"""Smaller images, such as 8×8 digits, are enlarged to this."""
GAP = 8
LABEL, CAPTION, MAX_CHARACTERS = 26, 36, 400
PAPER, INK = "#ffffff", "#22211f"


def heat(numbers: Floats) -> NDArray[np.uint8]:
    """Map numbers from 0 to 1, of any shape, to colours (…, 3)."""
    places = np.linspace(0, 1, len(HEAT))
    table = np.array(HEAT, np.float64)
    colours = np.stack([np.interp(numbers, places, table[:, i]) for i in range(3)], axis=-1)
    return colours.round().astype(np.uint8)


def stretched(numbers: Floats) -> Floats:
    """Scale numbers to the range 0 to 1; constant numbers become 0."""
    low, high = float(numbers.min()), float(numbers.max())
    return (numbers - low) / (high - low) if high > low else np.zeros_like(numbers)


def enlarged(image: Image.Image, side: int | None) -> Image.Image:
    """Resize an image to a longer side of `side`; None only enlarges images below `LEAST_SIDE`."""
    longer = max(image.size)
    if side is not None and side < 1:
        raise ConfigError(f"side is {side}; it is the longer side in pixels and should be 1 or more")
    target = max(longer, LEAST_SIDE) if side is None else side
    if target == longer:
        return image
    size = tuple(max(1, round(length * target / longer)) for length in image.size)
    # Tiny images keep square pixels, which is what the model sees; others are smoothed.
    kind = Image.Resampling.NEAREST if target >= 4 * longer else Image.Resampling.BICUBIC
    return image.resize((size[0], size[1]), kind)


def overlay(image: Image.Image, map: Floats, opacity: float, side: int | None) -> Image.Image:
    """Overlay a map (rows, columns), or colours (rows, columns, 3) from 0 to 1, on an image."""
    if not 0 <= opacity <= 1:
        raise ConfigError(f"opacity is {opacity}; it should be from 0 (only the image) to 1 (only the map)")
    ground = enlarged(image, side)
    layers = [map] if map.ndim == 2 else list(map.transpose(2, 0, 1))
    smooth = [_resized(layer if map.ndim == 3 else stretched(layer), ground.size) for layer in layers]
    colours = heat(smooth[0]) if map.ndim == 2 else (255 * np.stack(smooth, axis=-1)).round().astype(np.uint8)
    # The image fades to grey as the map covers it, so that all colour comes from the map.
    grey = Image.blend(ground, ground.convert("L").convert("RGB"), opacity)
    return Image.blend(grey, Image.fromarray(colours), opacity)


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Place images of equal height side by side."""
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    sheet = Image.new("RGB", (width, images[0].height), PAPER)
    left = 0
    for image in images:
        sheet.paste(image, (left, 0))
        left += image.width + GAP
    return sheet


def tiled(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Arrange images of equal size on a sheet, row by row, each below its label."""
    columns = min(len(images), max(4, round(len(images) ** 0.5)))
    width, height = images[0].width + GAP, images[0].height + LABEL
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=16)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        row, column = divmod(number, columns)
        left, top = GAP + column * width, row * height
        pen.text((left, top + LABEL - 4), label, fill=INK, font=font, anchor="ls")
        sheet.paste(image, (left, top + LABEL))
    return sheet


def captioned(sheet: Image.Image, text: str) -> Image.Image:
    """Add a caption line above a sheet, smaller or shortened in the middle if too wide; empty text adds nothing."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if not words:
        return sheet
    if len(words) > MAX_CHARACTERS:  # class names may be arbitrarily long
        words = f"{words[: MAX_CHARACTERS // 2]}{words[-MAX_CHARACTERS // 2 :]}"
    width = sheet.width - 2 * GAP
    sizes = (20, 17, 14, 12)
    font = next((font for size in sizes if (font := _font(size)).getlength(words) <= width), _font(sizes[-1]))
    full_text, kept = words, len(words)
    while font.getlength(words) > width and kept > 2:
        kept -= 1
        words = f"{full_text[: kept // 2]}…{full_text[len(full_text) - (kept + 1) // 2 :]}"
    canvas = Image.new("RGB", (sheet.width, sheet.height + CAPTION), PAPER)
    ImageDraw.Draw(canvas).text((GAP, CAPTION - 11), words, fill=INK, font=font, anchor="ls")
    canvas.paste(sheet, (0, CAPTION))
    return canvas


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _resized(numbers: Floats, size: tuple[int, int]) -> Floats:
    """Resize a map to an image, each value at the centre of its patch; overshoot is clipped."""
    image = Image.fromarray(np.ascontiguousarray(numbers, np.float32))
    larger: Floats = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    return larger.clip(0, 1)


# ── files ──

LONGEST = 120
"""Bytes of an image's name to keep; file systems allow 255 in total."""
LONGEST_OPTION = 40
"""Characters of a class or token name to keep."""
_UNSAFE = re.compile(r"[^\w.+=@-]+")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)


class Outputs(NamedTuple):
    """The files of one image."""

    image: Path
    array: Path | None


def ending_of(request: ExplanationRequest, target: str | None, grid: str | None) -> str:
    """Return the options as a suffix, so that another layer, head or class is another file.

    >>> ending_of(ExplanationRequest("attention", layer=5, query="2,5"), None, "heads")
    'attention-layer5-2_5-heads'
    """
    chosen = [
        "" if request.layer is None else f"layer{request.layer}",
        "" if request.head is None else f"head{request.head}",
        "" if request.query is None else str(request.query),
        "" if request.fuse == "mean" else request.fuse,
        f"discard{request.discard:g}" if request.discard else "",
        target or "",
        grid or "",
    ]
    return "-".join([request.method, *(_UNSAFE.sub("_", one)[:LONGEST_OPTION] for one in chosen if one)])


def plan_outputs(names: Sequence[bytes], folder: Path, ending: str, *, arrays: bool, overwrite: bool) -> list[Outputs]:
    """Choose the files for images of these names; an existing file raises unless `overwrite` is set."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, but the output is a folder; choose another --out")
    taken: set[str] = set()
    planned = []
    for name in names:
        stem = base = safe_name(name)
        number = 1
        while stem.lower() in taken:  # some file systems ignore case
            number += 1
            stem = f"{base}-{number}"
        taken.add(stem.lower())
        array = folder / f"{stem}-{ending}.npy" if arrays else None
        planned.append(Outputs(folder / f"{stem}-{ending}.png", array))
    for file in (file for outputs in planned for file in outputs if file is not None):
        check_target(file, overwrite=overwrite, folder=False)
    return planned


def safe_name(name: bytes) -> str:
    """Turn an image's name into a portable file name.

    >>> safe_name(b"photos/my cat?.jpg")
    'my_cat_'
    """
    last = re.split(r"[/\\]", os.fsdecode(name).rstrip("/\\"))[-1]
    stem, dot, suffix = last.rpartition(".")
    kept = _UNSAFE.sub("_", stem if dot and suffix.lower() in SUFFIXES else last).lstrip(".")
    kept = kept.encode("utf-8", "ignore")[:LONGEST].decode("utf-8", "ignore")
    return f"_{kept}" if _RESERVED.fullmatch(kept) else kept or "image"


def save_image(image: Image.Image, target: Path, *, overwrite: bool, notes: Mapping[str, str] | None = None) -> Path:
    """Write an image atomically; a PNG also stores `notes`."""
    options: dict[str, Any] = {}
    if notes and target.suffix.lower() == ".png":
        options["pnginfo"] = PngInfo()
        for key, value in notes.items():
            options["pnginfo"].add_itxt(f"vitrail:{key}", value)
    with atomic_file(target, overwrite=overwrite) as temporary:
        image.save(temporary, **options)
    return target


def save_array(array: NDArray[np.float32], target: Path, *, overwrite: bool) -> Path:
    """Write a .npy file atomically."""
    with atomic_file(target, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.save(file, array)
    return target
