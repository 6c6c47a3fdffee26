"""Images on which exactly one of two runs is correct."""

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.reports.formatting import as_percent, cut, file_name
from vitrail.reports.page import absent, embedded_image, name, path
from vitrail.reports.predictions import PairedPredictions, RunPredictions
from vitrail.reports.run_artifacts import RunArtifacts, open_artifacts
from vitrail.reports.run_record import Record

SHOWN = 6
"""Images to show per run."""


def disagreements(run: Record, both: PairedPredictions) -> str:
    """Return the images on which only one run is correct, by descending confidence of the wrong one."""
    paired = both.paired
    if not paired.only_first + paired.only_second:
        return ""
    artifacts = open_artifacts(run)
    groups = []
    for title, right, wrong in (
        ("Only A is correct", both.one, both.other),
        ("Only B is correct", both.other, both.one),
    ):
        rows = [row for row in range(paired.images) if right.correct[row] and not wrong.correct[row]]
        if rows:
            rows.sort(key=lambda row: -float(wrong.confidence[row]))
            cards = "".join(_card(artifacts, both.one, wrong, row) for row in rows[:SHOWN])
            groups.append(f'<h3>{title}</h3><ul class="mistakes many">{cards}</ul>')
    notes = absent(artifacts.why_no_images) if artifacts.source is None else ""
    return notes + "".join(groups)


def _card(artifacts: RunArtifacts, images: RunPredictions, wrong: RunPredictions, row: int) -> str:
    image_name, true = images.names[row], images.true[row]
    return (
        f"<li>{_image(artifacts, int(images.places[row]), image_name, true)}<p><strong>{name(true)}</strong>; the "
        f"other predicts {name(wrong.predicted[row])}, confidence {as_percent(float(wrong.confidence[row]))}</p>"
        f'<p class="quiet small file" title="{escape(image_name)}">{path(file_name(image_name, 40))}</p></li>'
    )


def _image(artifacts: RunArtifacts, index: int, image_name: str, true: str) -> str:
    if artifacts.source is None:
        return ""
    try:
        original = artifacts.original(artifacts.item(index, image_name, true))
    except (VitrailError, OSError):
        return ""
    return "" if original is None else embedded_image(original, cut(image_name))
