"""The sections of a segmentation run: images with their true and predicted masks, and metrics of each class."""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from vitrail.charts.bars import Bar, bar_chart
from vitrail.errors import VitrailError
from vitrail.reports.classes import percent_cell
from vitrail.reports.image_views import file, image_notes
from vitrail.reports.mask_views import MaskReader, coloured_names, legend, tiles
from vitrail.reports.page import WIDTH, Cell, Column, Section, absent, chart, paragraph, table
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.tasks.segmentation_metrics import ClassScore, ImageScore, SegmentationMetrics
from vitrail.text import as_percent, plural, shorten

WORST, OTHERS = 6, 3
"""Images with the lowest mean IoU to show, and of the middle and the highest."""
FEW = 12
"""Up to this many classes, all have a bar."""
EXTREMES = 8
"""Number of classes with the lowest and the highest IoU to show of more."""


# ── images ──


def masks(artifacts: RunArtifacts) -> Section:
    """Return images with the lowest, a middle and the highest mean IoU, with their masks."""
    title = "True and predicted masks"
    result = artifacts.run.result
    if not isinstance(result, SegmentationMetrics):
        return Section("masks", "Masks", title, absent(artifacts.run.why_no_result))
    text = (
        "Images as the model sees them, resized and cropped. Masks cover them in the colours of the classes; pixels "
        "without a label stay grey in the true mask and count nowhere. Wrong pixels are red. Look for wrong masks in "
        "the data here, too. A contour that is off by a pixel costs a small object much of its IoU."
    )
    missing: set[str] = set()
    reader = None if artifacts.bundle is None else MaskReader(artifacts, artifacts.bundle)
    colours: set[int] = set()
    groups = "".join(
        f'<h3>{heading}</h3><ul class="mistakes">'
        f"{''.join(_card(reader, image, colours, missing) for image in images)}</ul>"
        for heading, images in _groups(result)
    )
    colour = "" if reader is None or not colours else legend(reader.classes, colours)
    notes = image_notes(artifacts, missing, "images")
    return Section("masks", "Masks", title, notes + paragraph(text) + colour + groups)


def _groups(result: SegmentationMetrics) -> list[tuple[str, list[ImageScore]]]:
    """Return the images to show; none of them twice."""
    worst = list(result.worst[:WORST])
    taken = {image.index for image in worst}
    best = list(islice((image for image in result.best if image.index not in taken), OTHERS))
    taken |= {image.index for image in best}
    centre = (len(result.median) - 1) / 2
    nearest = sorted(range(len(result.median)), key=lambda place: abs(place - centre))
    left = [place for place in nearest if result.median[place].index not in taken][:OTHERS]
    median = [result.median[place] for place in sorted(left)]
    groups = [("Lowest mean IoU", worst), ("Median", median), ("Highest mean IoU", best)]
    return [(heading, images) for heading, images in groups if images]


def _card(reader: MaskReader | None, image: ImageScore, colours: set[int], missing: set[str]) -> str:
    """Return an image with its masks and metrics; add the classes in it to `colours`, or else a reason to `missing`."""
    drawn = ""
    if reader is not None:
        try:
            read = reader.read(image.index, image.name)
            colours |= {*np.unique(read.true).tolist(), *np.unique(read.predicted).tolist()}
            drawn = f'<div class="two">{"".join(tiles(read, len(reader.classes), shorten(image.name)))}</div>'
        except (VitrailError, OSError) as error:
            missing.add(str(error))
    text = (
        f"<p>Mean IoU <strong>{as_percent(image.mean_iou)}</strong>, pixel accuracy "
        f"{as_percent(image.pixel_accuracy)}</p>"
    )
    return f"<li>{drawn}{text}{file(image.name)}</li>"


# ── classes ──


def mask_classes(artifacts: RunArtifacts) -> Section:
    """Return bars of the IoU and a table of all classes, the weakest first."""
    title = "Per-class metrics"
    result = artifacts.run.result
    if not isinstance(result, SegmentationMetrics):
        return Section("classes", "Classes", title, absent(artifacts.run.why_no_result))
    intro = paragraph(
        "IoU (intersection over union) is the fraction of right pixels among those that are of the class or predicted "
        "as it. Precision is the fraction of right pixels among those predicted as the class; recall, among those of "
        "the class; Dice is the harmonic mean of the two. The pixels of all images are counted together."
    )
    order = result.weakest_first
    without = len(result.per_class) - len(order)
    note = paragraph(f"The evaluated images have no pixel of {plural(without, 'class', 'classes')}.") if without else ""
    return Section("classes", "Classes", title, intro + _bars(order) + note + _table(result))


def _bars(order: Sequence[ClassScore]) -> str:
    if len(order) <= FEW:
        groups = [("IoU", order, 1)]
    else:
        most = min(EXTREMES, len(order) // 2)
        groups = [("Lowest IoU", order[:most], 2), ("Highest IoU", order[::-1][:most], 3)]
    drawn = [
        bar_chart(
            [
                Bar(row.name, row.iou or 0.0, f"{row.name}: {as_percent(row.iou)}, {plural(row.images, 'image')}")
                for row in rows
            ],
            title=title, unit="percent", colour=colour, high=1.0, width=WIDTH, standalone=False,
        )
        for title, rows, colour in groups
    ]  # fmt: skip
    return f'<div class="pair">{"".join(map(chart, drawn))}</div>'


def _table(result: SegmentationMetrics) -> str:
    present = result.weakest_first
    rows = [*present, *(row for row in result.per_class if not row.images)]
    names = coloured_names(result.labels)
    columns = [
        Column("Class"),
        Column("Images", number=True, hint="images with pixels of the class"),
        Column("% of pixels", number=True, hint="of all labelled pixels"),
        *(Column(title, number=True) for title in ("IoU", "Dice", "Precision", "Recall")),
    ]
    cells = [
        [
            Cell(names[row.name], row.name),
            Cell(f"{row.images:,}", row.images),
            *(percent_cell(value) for value in (row.fraction, row.iou, row.dice, row.precision, row.recall)),
        ]
        for row in rows
    ]
    return table(columns, cells, caption="All classes")
