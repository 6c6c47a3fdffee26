"""`vitrail figures`: draw the figures of the ViT paper for a model."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.output import echo, progress
from vitrail.cli.overrides import Keys, Overrides, open_model
from vitrail.text import printable_path

if TYPE_CHECKING:
    import torch

    from vitrail.checkpoints.bundle import Bundle
    from vitrail.data.inputs import Item
    from vitrail.explanations.figures import Absent, Figure

NAMES = {"filters": "filters.png", "positions": "positions.png", "distance": "distance.svg", "rollout": "rollout.png"}
"""The figures and their files."""
WITH_IMAGES = ("distance", "rollout")
CAPTIONS = "captions.md"
LISTED = 10
"""Unreadable images listed."""


def figures(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Images for distance and rollout: files, folders or quoted patterns. At most 128 are sampled."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("figures"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Figure to draw: filters, positions, distance or rollout. Can be repeated; by default all, "
            "or without images the first two."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing figures.")] = False,
) -> None:
    """Draw the figures of the ViT paper: filters, position similarity, attention distance, attention rollout."""
    selected = _select(only, with_images=bool(images))
    from vitrail.explanations.figures.figure import Absent, check_writable
    from vitrail.inference.listing import list_items, read_stdin
    from vitrail.runtime import choose_device

    check_writable(out, [*(NAMES[name] for name in selected), CAPTIONS], overwrite=overwrite)
    choose_device(device)  # fail early on a wrong device
    listed = list_items(images or [], stdin=read_stdin())
    opened = open_model(bundle, override, keys)
    items, pixels = _readable(listed, opened) if set(selected) & set(WITH_IMAGES) else ([], None)
    opened.announce()
    captions = ["# Figures", ""]
    with progress("drawing") as on_drawn:
        for number, name in enumerate(selected):
            on_drawn(number, len(selected))
            made = _figure(name, opened, items, pixels, device)
            if isinstance(made, Absent):
                echo(f"{name}: not drawn, because {made.reason}")
                captions += [f"## {made.title}", "", f"This figure cannot be drawn: {made.reason}", ""]
                continue
            path = made.save(out, overwrite=overwrite)
            echo(f"{name}: {path}")
            captions += [f"## {made.title}", "", f"![{made.title}]({path.name})", "", made.caption, ""]
    _save_captions(out / CAPTIONS, "\n".join(captions), overwrite=overwrite)
    echo(f"captions: {out / CAPTIONS}")
    left_out = [name for name in WITH_IMAGES if not images and only is None]
    if left_out:
        echo(f"not drawn: {' and '.join(left_out)}, which need images; pass some after the model", err=True)


def _select(only: list[str] | None, *, with_images: bool) -> list[str]:
    """Return the figures to draw, in order."""
    from vitrail.errors import ConfigError, InputError, suggest

    for name in only or []:
        if name not in NAMES:
            raise ConfigError(f"no figure is called {name!r}{suggest(name, NAMES)}; there are {', '.join(NAMES)}")
        if name in WITH_IMAGES and not with_images:
            raise InputError(f"the figure {name!r} needs images; pass files or folders after the model")
    return [name for name in NAMES if name in (only or (NAMES if with_images else set(NAMES) - set(WITH_IMAGES)))]


def _figure(
    name: str, bundle: "Bundle", items: list["Item"], pixels: "torch.Tensor | None", device: str
) -> "Figure | Absent":
    from vitrail.explanations.figures import distance_figure, filters_figure, positions_figure, rollout_figure
    from vitrail.explanations.figures.examples import EXAMPLES

    if name == "filters":
        return filters_figure(bundle)
    if name == "positions":
        return positions_figure(bundle)
    if name == "distance" and pixels is not None:
        return distance_figure(bundle, pixels, device=device)
    every = -(-len(items) // EXAMPLES)
    return rollout_figure(bundle, [item.read() for item in items[::every]], device=device)


def _readable(items: Iterable["Item"], bundle: "Bundle") -> "tuple[list[Item], torch.Tensor]":
    """Read as many images as the paper uses; report and skip unreadable ones."""
    import numpy as np
    import torch

    from vitrail.data.inputs import fitted
    from vitrail.errors import DataError, VitrailError
    from vitrail.explanations.figures.distance import IMAGES

    readable, pixels, bad = [], [], []
    with progress("reading") as on_read:
        for number, item in enumerate(_sample(items, IMAGES)):
            on_read(number, None)
            try:
                pixels.append(fitted(item, bundle.preprocess))
                readable.append(item)
            except VitrailError as error:
                bad.append(f"{printable_path(item.name)}: {error}")
    for line in bad[:LISTED]:
        echo(f"skipped: {line}", err=True)
    if len(bad) > LISTED:
        echo(f"skipped: {len(bad) - LISTED:,} more", err=True)
    if not pixels:
        raise DataError("none of the images can be read" if bad else "no images in these paths")
    return readable, torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


def _sample(items: Iterable["Item"], count: int) -> list["Item"]:
    """Draw a uniform random sample of `count` items, the same every time, without holding them all."""
    import numpy as np

    generator = np.random.default_rng(0)
    kept: list[tuple[int, Item]] = []
    for number, item in enumerate(items):
        if len(kept) < count:
            kept.append((number, item))
        elif (place := int(generator.integers(number + 1))) < count:
            kept[place] = (number, item)
    return [item for _, item in sorted(kept, key=lambda pair: pair[0])]


def _save_captions(path: Path, text: str, *, overwrite: bool) -> None:
    from vitrail.checkpoints.writing import atomic_file

    with atomic_file(path, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")
