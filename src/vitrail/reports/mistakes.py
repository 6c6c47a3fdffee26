"""The most confident mistakes, with what the model looked at."""

from typing import NamedTuple

from PIL import Image

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer, as_picture
from vitrail.explanations.overlay import enlarged
from vitrail.explanations.wanted import Wanted
from vitrail.reports.page import Section, absent, name, paragraph, path, picture
from vitrail.reports.record import Mistake
from vitrail.reports.sight import SIDE, Sight
from vitrail.reports.words import cut, share

SHOWN = 12
TITLE = "Where it is sure, and wrong"
WHAT = (
    "The mistakes of which the model was surest; here wrong labels come to light, too. Beside each picture, as the "
    "model saw it, is what spoke for its answer: the lighter, the more (relevance, by attention and its gradient)."
)


class Seen(NamedTuple):
    """A picture as the model saw it, and what spoke for an answer; None where that cannot be told."""

    picture: Image.Image
    relevance: Image.Image | None


def mistakes(sight: Sight) -> Section:
    """Return the most confident mistakes with their pictures."""
    verdict = sight.run.verdict
    if verdict is None:
        return Section("mistakes", "Mistakes", TITLE, absent(sight.run.why_no_verdict))
    if not verdict.worst:
        return Section("mistakes", "Mistakes", TITLE, paragraph("No picture was mistaken."))
    cards, without = [], set()
    for mistake in verdict.worst[:SHOWN]:
        try:
            seen = look(sight, mistake.index, mistake.name, mistake.true, mistake.predicted)
        except (VitrailError, OSError) as error:
            seen = None
            without.add(str(error))
        if seen is not None and seen.relevance is None:
            without.add("there are no relevance maps for this model")
        cards.append(_card(mistake, seen))
    notes = ""
    if sight.source is None:
        notes = absent(sight.why_no_pictures)
    elif sight.bundle is None:
        notes = absent(sight.why_no_bundle)
    elif without:
        notes = absent(f"Something is missing here: {'; '.join(sorted(without)[:3])}.")
    return Section("mistakes", "Mistakes", TITLE, f'{paragraph(WHAT)}{notes}<ul class="mistakes">{"".join(cards)}</ul>')


def look(sight: Sight, index: int, called: str, true: str, answer: str) -> Seen | None:
    """Return a picture and what spoke for an answer; None where there is no model to see it."""
    from vitrail.data.given import fitted

    if sight.bundle is None or sight.source is None:
        return None
    item = sight.item(index, called, true)
    try:
        explained = Explainer(sight.bundle, Wanted("relevance"), target=sight.numbers.get(answer)).explain(item, called)
    except VitrailError:
        return Seen(enlarged(as_picture(fitted(item, sight.bundle.preprocess)), SIDE), None)
    return Seen(enlarged(explained.picture, SIDE), explained.overlay(side=SIDE))


def pair(seen: Seen | None, called: str, answer: str) -> str:
    """Return picture and map side by side."""
    if seen is None:
        return ""
    first = picture(seen.picture, f"{called}, as the model saw it")
    second = "" if seen.relevance is None else picture(seen.relevance, f"what spoke for {answer}")
    return f'<div class="two">{first}{second}</div>'


def _card(mistake: Mistake, seen: Seen | None) -> str:
    return (
        f"<li>{pair(seen, cut(mistake.name), mistake.predicted)}"
        f"<p><strong>{name(mistake.true)}</strong> taken for <strong>{name(mistake.predicted)}</strong>, "
        f'{share(mistake.confidence)} sure</p><p class="quiet small" title="{escape(mistake.name)}">'
        f"{path(cut(mistake.name, 44))}</p></li>"
    )
