"""Draw the figures of the paper for one model: choose them, read the images, write the files and their captions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.writing import atomic_file
from vitrail.data.inputs import Item, fitted
from vitrail.errors import ConfigError, DataError, InputError, VitrailError, suggest
from vitrail.explanations.figures.distance import IMAGES, distance_figure
from vitrail.explanations.figures.examples import EXAMPLES, rollout_figure
from vitrail.explanations.figures.figure import Absent, Figure, check_writable
from vitrail.explanations.figures.kernels import filters_figure
from vitrail.explanations.figures.positions import positions_figure
from vitrail.runtime import OnProgress, on_stage
from vitrail.text import printable_path

NAMES = {"filters": "filters.png", "positions": "positions.png", "distance": "distance.svg", "rollout": "rollout.png"}
"""The figures and their files."""
WITH_IMAGES = ("distance", "rollout")
CAPTIONS = "captions.md"


class DrawnFigure(NamedTuple):
    """A figure, or the reason why the model has none."""

    name: str
    """filters, positions, distance or rollout."""
    path: Path | None
    """The file; None if the model has no such figure."""
    text: str
    """The caption, or the reason."""


class DrawnFigures(NamedTuple):
    """What `figures` wrote."""

    figures: tuple[DrawnFigure, ...]
    captions: Path
    """A Markdown file with all figures and captions."""
    left_out: tuple[str, ...]
    """Figures that were not drawn because they need images."""
    bad: tuple[str, ...]
    """Images that could not be read, each with the reason."""


def select_figures(only: Sequence[str] | None, *, with_images: bool) -> list[str]:
    """Return the figures to draw, in order: those in `only`, or all for which there are images."""
    if isinstance(only, str):
        raise ConfigError(f"only is {only!r}; pass a list of figures: [{only!r}]")
    for name in only or ():
        if name not in NAMES:
            raise ConfigError(f"no figure is called {name!r}{suggest(name, NAMES)}; there are {', '.join(NAMES)}")
        if name in WITH_IMAGES and not with_images:
            raise InputError(f"the figure {name!r} needs images; pass files or folders after the model")
    wanted = only or (NAMES if with_images else set(NAMES) - set(WITH_IMAGES))
    return [name for name in NAMES if name in wanted]


def check_folder(out: Path, selected: Sequence[str], *, overwrite: bool) -> None:
    """Raise, before anything is computed, if writing would overwrite other files."""
    check_writable(out, [*(NAMES[name] for name in selected), CAPTIONS], overwrite=overwrite)


def draw_figures(
    bundle: Bundle,
    items: Iterable[Item],
    selected: Sequence[str],
    out: Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> DrawnFigures:
    """Draw the selected figures into a folder. The images are sampled if there are more than the paper uses."""
    readable, pixels, bad = _read(items, bundle, on_progress) if set(selected) & set(WITH_IMAGES) else ([], None, [])
    bundle.announce()
    drawn, lines, report = [], ["# Figures", ""], on_stage(on_progress, "drawing")
    for number, name in enumerate(selected):
        if report is not None:
            report(number, len(selected))
        made = _figure(name, bundle, readable, pixels, device)
        if isinstance(made, Absent):
            drawn.append(DrawnFigure(name, None, made.reason))
            lines += [f"## {made.title}", "", f"This figure cannot be drawn: {made.reason}", ""]
            continue
        path = made.save(out, overwrite=overwrite)
        drawn.append(DrawnFigure(name, path, made.caption))
        lines += [f"## {made.title}", "", f"![{made.title}]({path.name})", "", made.caption, ""]
    with atomic_file(out / CAPTIONS, overwrite=overwrite) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    return DrawnFigures(tuple(drawn), out / CAPTIONS, (), tuple(bad))


def _figure(name: str, bundle: Bundle, items: list[Item], pixels: Tensor | None, device: str) -> Figure | Absent:
    if name == "filters":
        return filters_figure(bundle)
    if name == "positions":
        return positions_figure(bundle)
    if name == "distance" and pixels is not None:
        return distance_figure(bundle, pixels, device=device)
    every = -(-len(items) // EXAMPLES)
    return rollout_figure(bundle, [item.read() for item in items[::every]], device=device)


def _read(
    items: Iterable[Item], bundle: Bundle, on_progress: OnProgress | None
) -> tuple[list[Item], Tensor, list[str]]:
    """Read as many images as the paper uses; return the readable ones, their pixels, and the others."""
    readable, pixels, bad = [], [], []
    report = on_stage(on_progress, "reading")
    for number, item in enumerate(sample_items(items, IMAGES)):
        if report is not None:
            report(number)
        try:
            pixels.append(fitted(item, bundle.preprocess))
            readable.append(item)
        except VitrailError as error:
            bad.append(f"{printable_path(item.name)}: {error}")
    if not pixels:
        raise DataError(f"none of the images can be read; the first, {bad[0]}" if bad else "no images in these paths")
    return readable, torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), bad


def sample_items(items: Iterable[Item], count: int) -> list[Item]:
    """Draw a uniform random sample of `count` items, the same every time, without holding them all."""
    generator = np.random.default_rng(0)
    kept: list[tuple[int, Item]] = []
    for number, item in enumerate(items):
        if len(kept) < count:
            kept.append((number, item))
        elif (place := int(generator.integers(number + 1))) < count:
            kept[place] = (number, item)
    return [item for _, item in sorted(kept, key=lambda pair: pair[0])]
