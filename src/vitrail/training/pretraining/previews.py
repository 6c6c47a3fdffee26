"""Images to look at while a run pretrains: a few of the validation split, and what the model makes of them.

    previews/000120.png    a column per image, after step 120; rows: original, masked, reconstruction
                           or, if the method does not reconstruct: original, patch features

The images and their masks follow from the seed, so that they are the same after every validation.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from vitrail.data.decode import open_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError, DataError, StorageError
from vitrail.metrics.components import as_colours, principal_components
from vitrail.models.vit import ViT
from vitrail.runtime import autocast, derive_seed, eval_mode
from vitrail.training.context import evaluation_batch
from vitrail.training.pretraining.masking import Reconstruction, encode
from vitrail.training.run_folder import PREVIEWS

if TYPE_CHECKING:
    from vitrail.training.run import TrainingRun

IMAGES = 8
"""Images in a preview."""
MOST = 10
"""A run is divided into this many intervals, and the first validation of each is shown; also the last one of all."""
TRIES = 4
"""How many images to try for each one shown, if some cannot be read."""
SIDE, GAP = 128, 4
"""Longer side of an image on the sheet, and the gap between two, in pixels."""
ORIGINAL, MASKED, RECONSTRUCTION, COMPONENTS = "original", "masked", "reconstruction", "patch features"
_KEY = "vitrail"
"""The text chunk of the PNG that describes it."""

Rows = Mapping[str, Tensor]
"""Images (B, C, H, W) from 0 to 1, by the title of their row."""


class Preview(NamedTuple):
    """A sheet of images: the rows are named, the columns are images of the validation split."""

    rows: tuple[str, ...]
    names: tuple[str, ...]
    """The names of the images."""
    tiles: NDArray[np.uint8]
    """(rows, images, height, width, 3)."""


# ── what is shown ──


class Reconstructs(Protocol):
    """A module that predicts masked patches."""

    def reconstruct(self, pixels: Tensor, noise: Tensor) -> Reconstruction:
        """Return the images with their masked patches predicted."""


def reconstructions(module: Reconstructs, pixels: Tensor, noise: Tensor, preprocess: Preprocess) -> Rows:
    """Return normalised images as the model sees them, and with the masked patches predicted."""
    made = module.reconstruct(pixels, noise)
    shown = {ORIGINAL: pixels, MASKED: made.masked, RECONSTRUCTION: made.images}
    return {title: unnormalised(images, preprocess) for title, images in shown.items()}


def patch_features(encoder: ViT, pixels: Tensor, preprocess: Preprocess) -> Rows:
    """Return normalised images and their patch tokens in colours: patches of similar colours have similar features.

    The colours are the first three principal components of the tokens of all images together.
    """
    config = encoder.config
    tokens = encode(encoder, *encoder.embed(pixels))[:, config.layout.patches].float()
    colours = as_colours(principal_components(tokens.flatten(0, 1), 3).project(tokens))
    maps = colours.float().reshape(len(pixels), *config.grid, 3).permute(0, 3, 1, 2)
    return {
        ORIGINAL: unnormalised(pixels, preprocess),
        COMPONENTS: F.interpolate(maps, config.image_size, mode="nearest"),
    }


def unnormalised(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Return normalised images (B, C, H, W) with values from 0 to 1."""
    mean, std = (pixels.new_tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return (pixels * std + mean).clamp(0, 1)


# ── while a run trains ──


def write_preview(run: "TrainingRun", draw: Callable[[Tensor], Rows]) -> None:
    """Show what the model makes of a few validation images, on rank 0; `draw` gets them normalised.

    No collective is called, and no random state is used.
    """
    step, context, preprocess = run.progress.step, run.job.context, run.plan.preprocess
    if run.logger is None or not is_due(run.folder, step, run.plan.steps):
        return
    most = min(IMAGES, evaluation_batch(run.job.images))  # as many as validation has memory for
    images, names = drawn_images(run.validation_source, preprocess, run.plan.recipe.seed, most)
    if not names:
        return
    with torch.no_grad(), eval_mode(run.state.plain), autocast(context.device, context.precision):
        rows = draw(preprocess.normalise(images.to(context.device)))
    preview = Preview(tuple(rows), names, np.stack([_tiles(images) for images in rows.values()]))
    run.logger.preview(step, encoded(preview))


def is_due(folder: Path, step: int, steps: int) -> bool:
    """Whether the validation after a step is shown. Later previews do not count: a resumed run writes them again."""
    interval = -(-step * MOST // steps)
    return step == steps or all(-(-before * MOST // steps) != interval for before in preview_steps(folder, step - 1))


def drawn_images(source: Source, preprocess: Preprocess, seed: int, most: int) -> tuple[Tensor, tuple[str, ...]]:
    """Draw images of a split by the seed; return them (B, C, H, W), uint8, and their names. Skip unreadable ones."""
    images: list[Tensor] = []
    names: list[str] = []
    order = np.random.default_rng(derive_seed(seed, "previews")).permutation(len(source))
    for index in order[: TRIES * most].tolist():
        try:
            pixels = preprocess.fit(open_image(source.read(index)).pixels(preprocess.channels))
        except StorageError:
            raise
        except DataError:
            continue
        images.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        names.append(source.name(index))
        if len(images) == most:
            break
    return torch.stack(images) if images else torch.empty(0), tuple(names)


def _tiles(images: Tensor) -> NDArray[np.uint8]:
    """Return images (B, C, H, W) from 0 to 1 as RGB (B, height, width, 3), enlarged or reduced to the tiles' size."""
    colours = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    pixels = (colours.float().cpu() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    height, width = pixels.shape[1:3]
    zoom = SIDE // max(height, width)
    if zoom >= 1:
        return pixels.repeat(zoom, axis=1).repeat(zoom, axis=2)
    size = max(1, SIDE * width // max(height, width)), max(1, SIDE * height // max(height, width))
    return np.stack([np.asarray(Image.fromarray(one).resize(size, Image.Resampling.LANCZOS)) for one in pixels])


# ── sheets ──


def encoded(preview: Preview) -> bytes:
    """Return a preview as a PNG that also holds its description."""
    rows, columns, height, width = preview.tiles.shape[:4]
    sheet = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for row, column in np.ndindex(rows, columns):
        sheet.paste(Image.fromarray(preview.tiles[row, column]), (column * (width + GAP), row * (height + GAP)))
    info, file = PngInfo(), io.BytesIO()
    info.add_text(_KEY, json.dumps({"rows": preview.rows, "names": preview.names}))  # ASCII, as the chunk requires
    sheet.save(file, "PNG", pnginfo=info)
    return file.getvalue()


def read_preview(path: Path) -> Preview:
    """Read a preview; raise a `CheckpointError` if the file is corrupt."""
    try:
        with Image.open(path, formats=("PNG",)) as sheet:
            described = json.loads(sheet.info[_KEY])
            rows, names = (tuple(map(str, described[key])) for key in ("rows", "names"))
            pixels = np.asarray(sheet.convert("RGB"))
        return Preview(rows, names, _cut(pixels, len(rows), len(names)))
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}") from None


def _cut(pixels: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    """Return the tiles of a sheet."""
    if not rows or not columns:
        raise ValueError("it names no images")
    height, width = ((side + GAP) // count - GAP for side, count in zip(pixels.shape, (rows, columns), strict=False))
    if pixels.shape[:2] != (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP) or min(height, width) < 1:
        raise ValueError(f"{rows}×{columns} images do not fill it")
    padded = np.pad(pixels, ((0, GAP), (0, GAP), (0, 0)))
    tiles = padded.reshape(rows, height + GAP, columns, width + GAP, 3)[:, :height, :, :width]
    return tiles.transpose(0, 2, 1, 3, 4)


def preview_steps(folder: Path, most: int | None = None) -> Sequence[int]:
    """Return the steps of a run's previews, in order; with `most`, those up to that step."""
    found = sorted(int(path.stem) for path in (folder / PREVIEWS).glob("*.png") if path.stem.isdecimal())
    return [step for step in found if most is None or step <= most]
