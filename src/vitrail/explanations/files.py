"""Explain many images and write a PNG per image, and on request the map as an array."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.inputs import Item
from vitrail.errors import DataError, StorageError
from vitrail.explanations.explain import Each, Explainer
from vitrail.explanations.explanation import Explanation, Outputs, captioned, save_array, save_image, tiled
from vitrail.runtime import OnProgress, on_stage
from vitrail.text import printable_path

TILE = 160
"""The longer side of a tile in a grid, in pixels."""


class ExplainedFile(NamedTuple):
    """One explained image."""

    name: str
    target: str | int | None
    """The explained class; None if the method has none."""
    probability: float | None
    image: Path
    """The map over the image."""
    array: Path | None
    """The map itself, if arrays were requested."""
    value: str | None = None
    """The value of the explained output as text, if the model is not a classifier."""


class ExplainedFiles(NamedTuple):
    """What `explain_files` wrote."""

    files: tuple[ExplainedFile, ...]
    targeted: bool
    """Whether the method explains a class."""
    bad: tuple[str, ...]
    """Images that could not be read, each with the reason."""
    skipped: tuple[str, ...] = ()
    """Messages about files that were skipped because they have no image suffix."""


class Drawing(NamedTuple):
    """How maps are drawn."""

    grid: Each | None = None
    """All heads or all layers in one image."""
    opacity: float = 0.6
    side: int | None = None
    """The longer side of an image in pixels."""


def write_explanations(
    explainer: Explainer,
    items: Sequence[Item],
    planned: Sequence[Outputs],
    drawing: Drawing,
    *,
    overwrite: bool,
    on_progress: OnProgress | None = None,
) -> ExplainedFiles:
    """Explain images and write their files; raise if none of them can be read."""
    rows, bad, report = [], [], on_stage(on_progress, "explaining")
    for number, (item, outputs) in enumerate(zip(items, planned, strict=True)):
        if report is not None:
            report(number, len(items))
        name = printable_path(os.fsdecode(item.name))
        try:
            explanation = _write(explainer, item, name, outputs, drawing, overwrite)
        except StorageError:
            raise
        except DataError as error:
            bad.append(error)
            continue
        rows.append(ExplainedFile(name, explanation.target, explanation.probability, *outputs, explanation.value))
    if not rows:
        raise bad[0]
    return ExplainedFiles(tuple(rows), explainer.request.targeted, tuple(map(str, bad)))


def _write(
    explainer: Explainer, item: Item, name: str, files: Outputs, drawing: Drawing, overwrite: bool
) -> Explanation:
    """Explain one image and write its map."""
    if drawing.grid is None:
        explanation = explainer.explain(item, name)
        sheet, array = explanation.side_by_side(drawing.opacity, drawing.side), explanation.map
    else:
        tiles = explainer.grid(item, drawing.grid, name)
        explanation, array = tiles[0].explanation, np.stack([tile.explanation.map for tile in tiles])
        maps = [tile.explanation.overlay(drawing.opacity, drawing.side or TILE) for tile in tiles]
        sheet = tiled(maps, [tile.label for tile in tiles])
    save_image(captioned(sheet, explanation.caption), files.image, notes=explanation.notes, overwrite=overwrite)
    if files.array is not None:
        save_array(array, files.array, overwrite=overwrite)
    return explanation
