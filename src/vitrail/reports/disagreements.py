"""Pictures on which only one of two runs is right."""

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.explanations.overlay import enlarged
from vitrail.reports.answers import Answers, Both
from vitrail.reports.page import absent, name, path, picture
from vitrail.reports.record import Record
from vitrail.reports.sight import SIDE, Sight, look_into
from vitrail.reports.words import cut, share

SHOWN = 6
"""Of each kind."""


def disagreements(run: Record, both: Both) -> str:
    """Return the pictures on which one alone is right, those first of which the other is surest."""
    found = both.paired
    if not found.only_first + found.only_second:
        return ""
    sight = look_into(run)
    parts = []
    for title, right, wrong in (("Only A is right", both.one, both.other), ("Only B is right", both.other, both.one)):
        rows = [row for row in range(found.pictures) if right.right[row] and not wrong.right[row]]
        if rows:
            rows.sort(key=lambda row: -float(wrong.confidence[row]))
            cards = "".join(_card(sight, both.one, wrong, row) for row in rows[:SHOWN])
            parts.append(f'<h3>{title}</h3><ul class="mistakes many">{cards}</ul>')
    notes = absent(sight.why_no_pictures) if sight.source is None else ""
    return notes + "".join(parts)


def _card(sight: Sight, judged: Answers, wrong: Answers, row: int) -> str:
    called, true = judged.names[row], judged.true[row]
    return (
        f"<li>{_seen(sight, int(judged.places[row]), called, true)}<p><strong>{name(true)}</strong>; the other says "
        f"{name(wrong.predicted[row])}, {share(float(wrong.confidence[row]))} sure</p>"
        f'<p class="quiet small" title="{escape(called)}">{path(cut(called, 28))}</p></li>'
    )


def _seen(sight: Sight, index: int, called: str, true: str) -> str:
    from vitrail.data.given import fitted
    from vitrail.explanations.explain import as_picture

    if sight.bundle is None or sight.source is None:
        return ""
    try:
        pixels = fitted(sight.item(index, called, true), sight.bundle.preprocess)
    except (VitrailError, OSError):
        return ""
    return picture(enlarged(as_picture(pixels), SIDE), cut(called))
