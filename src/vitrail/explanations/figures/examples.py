"""Attention rollout examples (the paper's figure 6): an image, and beside it what the model looked at."""

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
from vitrail.explanations.figures.colours import INK, PALE, PAPER
from vitrail.explanations.figures.figure import Absent, Figure

NAME, TITLE = "rollout", "What the model looks at"
EXAMPLES = 12
"""Most images in one figure."""
SIDE, GAP, MARGIN, TEXT = 200, 6, 24, 17
"""In pixels: the longer side of an image, between the two of a pair, around all, and the size of letters."""
PAIRS = 3
"""Pairs in a row."""
VEIL = (44, 48, 92)
CAPTION = (
    "Attention rollout: in every layer the heads' mean attention and the residual, half each, multiplied through all "
    "layers, from what the head reads back to the patches. The right image of each pair is the left one under a dark "
    "blue veil, which is clear where the map is largest and full where it is 0: what can be seen is where the answer's "
    "information comes from."
)
BELOW = "Below each stands the class that is explained."


class Explained(Protocol):
    """What this figure takes of an explanation."""

    @property
    def map(self) -> NDArray[np.float32]:
        """(rows, columns), on the grid of patches."""

    @property
    def image(self) -> Image.Image:
        """The image as the model saw it."""

    @property
    def target(self) -> str | int | None:
        """The class that is explained, where one is."""


def examples_figure(explanations: Sequence[Explained]) -> Figure:
    """Draw pairs of an image and the same image, veiled where the model looks less."""
    if not explanations:
        raise InputError("attention rollout needs at least one image, and there is none")
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
    """Draw what a model attends to in images, by attention rollout; only the first `EXAMPLES` are drawn."""
    if bundle.model.config.patches == 1:
        return Absent(NAME, TITLE, "the whole image is one patch, so the model has no choice where to look.")
    return examples_figure(explain(bundle, list(islice(images, EXAMPLES)), method="rollout", device=device))


def attended(image: Image.Image, map: NDArray[np.floating]) -> Image.Image:
    """Veil an image by its map: as it is where the map is largest, all veil where the map is 0.

    The paper's veil is black, under which nothing can be told of an image that is black itself.
    """
    largest = float(map.max())
    share = np.clip(np.asarray(map, np.float32) / (largest if largest > 0 else 1), 0, 1)
    light = np.asarray(Image.fromarray(share).resize(image.size, Image.Resampling.BICUBIC))
    light = np.clip(light, 0, 1)[:, :, None]
    pixels = np.asarray(image.convert("RGB"), np.float32) * light + np.array(VEIL, np.float32) * (1 - light)
    return Image.fromarray(pixels.round().astype(np.uint8))


def _shown_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) at which images are shown: tiny ones are enlarged by a whole number."""
    ratio = SIDE / max(size)
    if ratio >= 2:
        return size[0] * int(ratio), size[1] * int(ratio)
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


def _enlarged(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    whole = size[0] % image.width == 0 and size[0] > image.width
    return image.convert("RGB").resize(size, Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS)


def _shortened(name: str, font: "ImageFont.FreeTypeFont | ImageFont.ImageFont", room: float) -> str:
    text = name
    while len(text) > 1 and font.getlength(text) > room:
        text = text[:-2] + "…"
    return text
