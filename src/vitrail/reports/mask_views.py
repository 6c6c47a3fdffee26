"""Images of a segmentation run with their masks: true, predicted, and where the two differ."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.inputs import fitted
from vitrail.data.mask_images import overlay, palette
from vitrail.data.sources.masks import IGNORED_PIXEL, Mask, mask_at
from vitrail.data.sources.source import Pixels, Source
from vitrail.errors import DataError, Diverged
from vitrail.explanations.explain import as_image
from vitrail.explanations.explanation import enlarged
from vitrail.reports.page import embedded_image, name
from vitrail.reports.run_artifacts import SIDE, RunArtifacts
from vitrail.reports.test_predictions import MaskPredictions
from vitrail.runtime import choose_device, eval_mode
from vitrail.tasks.lookup import task_of
from vitrail.tasks.segmentation import upsampled

SAME = 0.02
"""The fraction of a mask's pixels that may differ from those that the run counted: devices resize a little differently.
"""
DIMMED = 0.5
"""How much of the contrast is left where a prediction is right."""
WRONG = (255, 40, 90)
LEGEND = 24
"""The most classes in a legend."""


class Masks(NamedTuple):
    """An image at the size of the model's input, and its masks."""

    pixels: Pixels
    true: Mask
    predicted: Mask


@dataclass(frozen=True, eq=False)
class MaskReader:
    """Reads test images of a run with their masks, and predicts masks with a model."""

    artifacts: RunArtifacts
    bundle: Bundle

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the model's classes."""
        return self.bundle.classes or tuple(map(str, range(self.bundle.model.config.classes)))

    @cached_property
    def device(self) -> torch.device:
        """Where the model computes."""
        return choose_device("auto")

    @cached_property
    def source(self) -> Source:
        """The images, with masks that have the model's class indices."""
        if self.artifacts.source is None:
            raise DataError(self.artifacts.why_no_images)
        return task_of(self.bundle).match(self.artifacts.source, self.bundle.classes, self.bundle.model.config.classes)

    def read(self, index: int, image_name: str) -> Masks:
        """Return an image with its masks; raise `VitrailError` or `OSError` if it is not as it was in the run."""
        pixels, predicted = self.predict(index, image_name)
        true = self.bundle.preprocess.fit_mask(mask_at(self.source, index), IGNORED_PIXEL)
        self._check(index, true)
        return Masks(pixels, true, predicted)

    def predict(self, index: int, image_name: str) -> tuple[Pixels, Mask]:
        """Return an image and its predicted mask."""
        pixels = fitted(self.artifacts.item(index, image_name, None), self.bundle.preprocess)
        return pixels, self._predicted(pixels)

    def _predicted(self, pixels: Pixels) -> Mask:
        model, preprocess = self.bundle.model.to(self.device), self.bundle.preprocess
        batch = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].to(self.device)
        with eval_mode(model), torch.inference_mode():
            outputs = model(preprocess.normalise(batch)).float()
            if not bool(outputs.isfinite().all()):
                raise Diverged("the predicted mask is not finite; the model's weights are corrupt")
            mask = upsampled(outputs, preprocess.size)[0].argmax(dim=0)
        return np.asarray(mask.to(torch.uint8).cpu().numpy())

    def _check(self, index: int, true: Mask) -> None:
        """Raise if the mask is not the one that the run counted."""
        stored, _ = self.artifacts.predictions
        row = stored.rows.get(index) if isinstance(stored, MaskPredictions) else None
        if not isinstance(stored, MaskPredictions) or row is None:
            return
        here = np.bincount(true.ravel(), minlength=IGNORED_PIXEL + 1)[: len(self.classes)]
        if np.abs(here - stored.true(self.classes)[row]).sum() > SAME * true.size:
            raise DataError("the data has changed since the run, and another mask has taken its place")


# ── drawing ──


def tiles(masks: Masks, classes: int, image_name: str) -> list[str]:
    """Return the image, its true mask, the predicted one, and the wrong pixels, each with a title."""
    ground = np.asarray(as_image(masks.pixels))
    wrong = (masks.predicted != masks.true) & (masks.true != IGNORED_PIXEL)
    return [
        image_tile(masks.pixels, image_name),
        masked_tile(masks.pixels, masks.true, classes, "True mask", image_name),
        masked_tile(masks.pixels, masks.predicted, classes, "Predicted mask", image_name),
        tile(marked(ground, wrong), "Wrong pixels", image_name),
    ]


def image_tile(pixels: Pixels, image_name: str) -> str:
    """Return an image (H, W, C) as the model sees it."""
    return tile(np.asarray(as_image(pixels)), "Image", image_name)


def masked_tile(pixels: Pixels, mask: Mask, classes: int, title: str, image_name: str) -> str:
    """Return an image (H, W, C) in the colours of a mask, with a title below it."""
    return tile(coloured(np.asarray(as_image(pixels)), mask, classes), title, image_name)


def coloured(pixels: NDArray[np.uint8], mask: Mask, classes: int) -> NDArray[np.uint8]:
    """Return an image (H, W, 3) in grey under the colours of a mask, so that all colour is that of a class."""
    return overlay(np.rint(pixels.mean(axis=2, keepdims=True)).astype(np.uint8), mask, classes)


def tile(pixels: NDArray[np.uint8], title: str, image_name: str) -> str:
    """Return an image (H, W, 3) with a title below it."""
    shown = embedded_image(enlarged(Image.fromarray(pixels), SIDE), f"{image_name}, {title.lower()}")
    return f"<figure>{shown}<figcaption>{escape(title)}</figcaption></figure>"


def marked(ground: NDArray[np.uint8], wrong: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return an image in pale grey, with some pixels in colour."""
    grey = np.repeat(ground.mean(axis=2, keepdims=True), 3, axis=2)
    pale = 255 - DIMMED * (255 - grey)
    return np.rint(np.where(wrong[:, :, None], np.array(WRONG), pale)).astype(np.uint8)


def coloured_names(classes: Sequence[str]) -> Mapping[str, str]:
    """Return the name of each class in masks as HTML, after a square of its colour."""
    colours = palette(len(classes)).tolist()
    return {
        one: f'<span class="keyed">{_swatch(colour)}{name(one)}</span>'
        for one, colour in zip(classes, colours, strict=True)
    }


def _swatch(colour: Sequence[int]) -> str:
    # The page's policy forbids style attributes.
    fill = f"#{bytes(colour).hex()}"
    return (
        f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill="{fill}"/></svg>'
    )


def legend(classes: Sequence[str], shown: Collection[int]) -> str:
    """Return the colours of the classes; of many, only of those that are shown."""
    names = coloured_names(classes)
    listed = [one for place, one in enumerate(classes) if place in shown or len(classes) <= LEGEND]
    more = f"<li>and {len(listed) - LEGEND:,} more</li>" if len(listed) > LEGEND else ""
    return f'<ul class="legend">{"".join(f"<li>{names[one]}</li>" for one in listed[:LEGEND])}{more}</ul>'
