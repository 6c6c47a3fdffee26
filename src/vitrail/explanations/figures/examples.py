"""Attention rollout examples (the paper's figure 6): each image next to what the model attends to."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.checking.contact_sheet import drawable
from vitrail.data.inputs import ImageInput
from vitrail.errors import InputError
from vitrail.explanations.explain import explain
from vitrail.explanations.figures.figure import INK, PALE, PAPER, Absent, Figure

NAME, TITLE = "rollout", "What the model attends to"
EXAMPLES = 12
"""Maximum number of images in one figure."""
SIDE, GAP, MARGIN, TEXT = 200, 6, 24, 17
"""In pixels: the longer side of an image, the gap within a pair, the margin, and the font size."""
PAIRS = 3
"""Pairs per row."""
MASK = (44, 48, 92)
CAPTION = (
    "Attention rollout: in every layer the mean attention of the heads and the residual, half each, multiplied through "
    "all layers, from what the head reads back to the patches. The right image of each pair is the left one under a "
    "dark blue mask, transparent where the map is largest and opaque where it is 0: the visible regions contribute "
    "most to the prediction."
)
BELOW = "The explained class is below each pair."


class Explained(Protocol):
    """The parts of an explanation that this figure uses."""

    @property
    def map(self) -> NDArray[np.float32]:
        """(rows, columns), on the grid of patches."""

    @property
    def image(self) -> Image.Image:
        """The image as the model saw it."""

    @property
    def target(self) -> str | int | None:
        """The explained class, if any."""


def examples_figure(explanations: Sequence[Explained]) -> Figure:
    """Draw pairs of an image and the same image, masked by its map."""
    if not explanations:
        raise InputError("attention rollout needs at least one image, found none")
    width, height = _shown_size(explanations[0].image.size)
    columns = 2 if len(explanations) == 4 else min(PAIRS, len(explanations))
    lines = -(-len(explanations) // columns)
    named = any(explained.target is not None for explained in explanations)
    pair, line = 2 * width + GAP, height + (2 * TEXT if named else TEXT)
    sheet = Image.new("RGB", (columns * (pair + MARGIN) + MARGIN, 2 * MARGIN + TEXT + lines * line), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=TEXT)
    for number, explained in enumerate(explanations):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (pair + MARGIN), MARGIN + TEXT + row * line
        if row == 0:
            pen.text((left, top - TEXT / 2), "image", fill=INK, font=font, anchor="ls")
            pen.text((left + width + GAP, top - TEXT / 2), "attention", fill=INK, font=font, anchor="ls")
        seen = _enlarged(explained.image, (width, height))
        sheet.paste(seen, (left, top))
        sheet.paste(attended(seen, explained.map), (left + width + GAP, top))
        name = "" if explained.target is None else drawable(str(explained.target))
        pen.text((left, top + height + TEXT * 1.2), _shortened(name, font, pair), fill=PALE, font=font, anchor="ls")
    return Figure(NAME, TITLE, f"{CAPTION} {BELOW}" if named else CAPTION, image=sheet)


def rollout_figure(bundle: Bundle, images: Iterable[ImageInput], *, device: str = "auto") -> Figure | Absent:
    """Draw the attention rollout of images; only the first `EXAMPLES` are drawn."""
    if not bundle.model.config.depth:
        return Absent(NAME, TITLE, "this model is a ResNet, which has no attention.")
    if bundle.model.config.patches == 1:
        return Absent(NAME, TITLE, "the whole image is one patch, so there is nothing to choose from.")
    return examples_figure(explain(bundle, list(islice(images, EXAMPLES)), method="rollout", device=device))


def attended(image: Image.Image, map: NDArray[np.floating]) -> Image.Image:
    """Mask an image by its map: transparent where the map is largest, opaque where it is 0.

    The paper's mask is black, which is invisible on dark images.
    """
    largest = float(map.max())
    alpha = np.clip(np.asarray(map, np.float32) / (largest if largest > 0 else 1), 0, 1)
    light = np.asarray(Image.fromarray(alpha).resize(image.size, Image.Resampling.BICUBIC))
    light = np.clip(light, 0, 1)[:, :, None]
    pixels = np.asarray(image.convert("RGB"), np.float32) * light + np.array(MASK, np.float32) * (1 - light)
    return Image.fromarray(pixels.round().astype(np.uint8))


def _shown_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) of displayed images: tiny ones are enlarged by an integer factor."""
    ratio = SIDE / max(size)
    if ratio >= 2:
        return size[0] * int(ratio), size[1] * int(ratio)
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


def _enlarged(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    integral = size[0] % image.width == 0 and size[0] > image.width
    return image.convert("RGB").resize(size, Image.Resampling.NEAREST if integral else Image.Resampling.LANCZOS)


def _shortened(name: str, font: "ImageFont.FreeTypeFont | ImageFont.ImageFont", width: float) -> str:
    text = name
    while len(text) > 1 and font.getlength(text) > width:
        text = text[:-2] + "…"
    return text
