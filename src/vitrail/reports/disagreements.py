"""Images on which only one of two runs is right."""

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.reports.formatting import cut, file_name, share
from vitrail.reports.page import absent, embedded_image, name, path
from vitrail.reports.predictions import Answers, Both
from vitrail.reports.run_artifacts import RunArtifacts, open_artifacts
from vitrail.reports.run_record import Record

SHOWN = 6
"""Of each kind."""


def disagreements(run: Record, both: Both) -> str:
    """Return the images on which one alone is right, those first of which the other is surest."""
    found = both.paired
    if not found.only_first + found.only_second:
        return ""
    sight = open_artifacts(run)
    parts = []
    for title, right, wrong in (("Only A is right", both.one, both.other), ("Only B is right", both.other, both.one)):
        rows = [row for row in range(found.images) if right.right[row] and not wrong.right[row]]
        if rows:
            rows.sort(key=lambda row: -float(wrong.confidence[row]))
            cards = "".join(_card(sight, both.one, wrong, row) for row in rows[:SHOWN])
            parts.append(f'<h3>{title}</h3><ul class="mistakes many">{cards}</ul>')
    notes = absent(sight.why_no_images) if sight.source is None else ""
    return notes + "".join(parts)


def _card(sight: RunArtifacts, judged: Answers, wrong: Answers, row: int) -> str:
    called, true = judged.names[row], judged.true[row]
    return (
        f"<li>{_seen(sight, int(judged.places[row]), called, true)}<p><strong>{name(true)}</strong>; the other says "
        f"{name(wrong.predicted[row])}, confidence {share(float(wrong.confidence[row]))}</p>"
        f'<p class="quiet small file" title="{escape(called)}">{path(file_name(called, 40))}</p></li>'
    )


def _seen(sight: RunArtifacts, index: int, called: str, true: str) -> str:
    if sight.source is None:
        return ""
    try:
        original = sight.original(sight.item(index, called, true))
    except (VitrailError, OSError):
        return ""
    return "" if original is None else embedded_image(original, cut(called))
