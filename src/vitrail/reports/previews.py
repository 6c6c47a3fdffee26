"""What a pretraining run shows of a few validation images: the first, a middle and the last time."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.svg import escape
from vitrail.errors import CheckpointError
from vitrail.explanations.figures.figure import evenly
from vitrail.reports.page import Section, absent, embedded_image, paragraph
from vitrail.reports.run_record import Record
from vitrail.text import shorten
from vitrail.training.pretraining.previews import COMPONENTS, Preview, preview_steps, read_preview
from vitrail.training.run_folder import PREVIEWS, preview_file

TITLE = "What the model makes of images"
TIMES = 3
"""How many of a run's previews are shown."""
RECONSTRUCTED = (
    "Images of the validation split, with the same masks every time. The model predicts the masked patches from the "
    "others, which are shown as they are. Predictions become plausible, but seldom sharp: the loss rewards the average "
    "of what is possible."
)
NORMALISED = (
    "The model predicts each patch relative to its own mean and contrast. Here these are taken from the original: "
    "judge the structure within the patches, not their brightness."
)
COLOURS = "The model predicts colours with 8 levels per channel, not pixels, so a perfect prediction is coarse, too."
FEATURES = (
    "Images of the validation split, and their patches in colours: red, green and blue are the first three principal "
    "components of the patch features of all these images together. Patches of the same colour have similar features. "
    "The colours of useful features follow the parts of objects; noise, or one colour per position, means that little "
    "has been learned. The components are computed anew each time, so only the shapes compare, not the colours."
)


def previews(run: Record) -> Section:
    """Return a few validation images, and what the model made of them over time."""
    shown, _ = _readable(run)
    if not shown:
        return Section("previews", "Images", TITLE, absent(f"The run has no readable images in {PREVIEWS}/."))
    times = [shown[place] for place in evenly(len(shown), TIMES)]
    last = times[-1][1]
    # Only images and rows that all of them have; the rows before the last one do not change.
    count = min(len(one.names) for _, one in times)
    titles = [*last.rows[:-1], *(f"step {step:,}" for step, _ in times)]
    cells = [
        [*(last.tiles[row, image] for row in range(len(last.rows) - 1)), *(one.tiles[-1, image] for _, one in times)]
        for image in range(count)
    ]
    halves = [range(count)[: -(-count // 2)], range(count)[-(-count // 2) :]]
    groups = "".join(
        _group(titles, [(last.names[image], cells[image]) for image in half]) for half in halves if len(half)
    )
    where = f"All {len(shown)} sheets of images are in {PREVIEWS}/ of the run folder."
    body = "".join(map(paragraph, _explained(run, last))) + f'<div class="pair">{groups}</div>'
    return Section("previews", "Images", TITLE, body + paragraph(where, "quiet small"))


def unreadable_previews(run: Record) -> tuple[str, ...]:
    """Return a sentence if some of the previews cannot be read."""
    _, faults = _readable(run)
    more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
    return (f"{faults[0]}{more}, so the report lacks these images",) if faults else ()


def _explained(run: Record, preview: Preview) -> list[str]:
    if COMPONENTS in preview.rows:
        return [FEATURES]
    settings = run.recipe.get(run.method or "", {})
    notes = [NORMALISED] if settings.get("normalise_pixels") else []
    notes += [COLOURS] if str(settings.get("target", "")).startswith("colour") else []
    return [RECONSTRUCTED, *notes]


def _readable(run: Record) -> tuple[list[tuple[int, Preview]], list[str]]:
    """Return the previews that can be read, by their steps, and a message for each of the others."""
    readable: list[tuple[int, Preview]] = []
    faults: list[str] = []
    for step in preview_steps(run.folder):
        try:
            readable.append((step, read_preview(preview_file(run.folder, step))))
        except CheckpointError as error:
            faults.append(str(error))
    # All that are shown must have the same rows.
    return [one for one in readable if one[1].rows == readable[-1][1].rows], faults


def _group(titles: list[str], rows: list[tuple[str, list[NDArray[np.uint8]]]]) -> str:
    """Return images as a grid: a column for each title, a row for each image."""
    head = "".join(f"<li>{escape(title)}</li>" for title in titles)
    images = "".join(
        f"<li>{embedded_image(_image(tile), f'{shorten(name)}, {title}', exact=True)}</li>"
        for name, tiles in rows
        for title, tile in zip(titles, tiles, strict=True)
    )
    return f'<ul class="previews of-{len(titles)}">{head}{images}</ul>'


def _image(tile: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(tile))
