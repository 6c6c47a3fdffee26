"""The mistakes of highest confidence: each image as stored, as the model saw it, and what spoke for the prediction."""

from typing import NamedTuple

from PIL import Image

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer, as_image
from vitrail.explanations.overlay import enlarged
from vitrail.explanations.request import ExplanationRequest
from vitrail.reports.formatting import cut, file_name, share
from vitrail.reports.page import Section, absent, embedded_image, name, paragraph, path
from vitrail.reports.run_artifacts import SIDE, RunArtifacts
from vitrail.reports.run_record import Mistake

SHOWN = 12
HIGH = 0.8
"""From this confidence on a prediction is called confident."""
WHAT = (
    "Wrong labels come to light here, too. Each image is shown as it is stored; below it is what the model saw of it, "
    "and what spoke for its prediction: the lighter, the more (relevance, by attention and its gradient)."
)


class Seen(NamedTuple):
    """An image as stored and as the model saw it, and what spoke for a prediction; None where that is not known."""

    original: Image.Image | None
    image: Image.Image
    relevance: Image.Image | None


def mistakes(sight: RunArtifacts) -> Section:
    """Return the mistakes of highest confidence with their images."""
    result = sight.run.result
    if result is None:
        return Section("mistakes", "Mistakes", "Mistakes", absent(sight.run.why_no_result))
    if not result.worst:
        return Section("mistakes", "Mistakes", "Mistakes", paragraph("No image was mistaken."))
    shown = result.worst[:SHOWN]
    confident = [one for one in shown if one.confidence >= HIGH]
    others = [one for one in shown if one.confidence < HIGH]
    without: set[str] = set()
    body = paragraph(WHAT)
    if confident:
        title = "Confident, and wrong"
        body += f"{_cards(sight, confident, without)}"
        body += f"<h3>Wrong with less than {share(HIGH)} confidence</h3>" if others else ""
    else:
        title = "The mistakes of highest confidence"
        body = (
            paragraph(
                f"No mistake was made with high confidence ({share(HIGH)} or more); the highest is "
                f"{share(shown[0].confidence)}."
            )
            + body
        )
    body += _cards(sight, others, without) if others else ""
    return Section("mistakes", "Mistakes", title, _notes(sight, without) + body)


def _notes(sight: RunArtifacts, without: set[str]) -> str:
    if sight.source is None:
        return absent(sight.why_no_images)
    if sight.bundle is None:
        return absent(sight.why_no_bundle)
    return absent(f"Something is missing here: {'; '.join(sorted(without)[:3])}.") if without else ""


def _cards(sight: RunArtifacts, found: list[Mistake], without: set[str]) -> str:
    """Return mistakes as a list; what is missing is added to `without`."""
    cards = []
    for mistake in found:
        try:
            seen = look(sight, mistake.index, mistake.name, mistake.true, mistake.predicted)
        except (VitrailError, OSError) as error:
            seen = None
            without.add(str(error))
        if seen is not None and seen.relevance is None:
            without.add("there are no relevance maps for this model")
        cards.append(_card(mistake, seen))
    return f'<ul class="mistakes">{"".join(cards)}</ul>'


def look(sight: RunArtifacts, index: int, called: str, true: str, answer: str) -> Seen | None:
    """Return an image and what spoke for a prediction; None where there is no model to see it."""
    from vitrail.data.inputs import fitted

    if sight.bundle is None or sight.source is None:
        return None
    item = sight.item(index, called, true)
    original = sight.original(item)
    try:
        explained = Explainer(sight.bundle, ExplanationRequest("relevance"), target=sight.numbers.get(answer)).explain(
            item, called
        )
    except VitrailError:
        return Seen(original, enlarged(as_image(fitted(item, sight.bundle.preprocess)), SIDE), None)
    return Seen(original, enlarged(explained.image, SIDE), explained.overlay(side=SIDE))


def pair(seen: Seen | None, called: str, answer: str) -> str:
    """Return the image as it is stored, and below it what the model saw and what spoke for the prediction."""
    if seen is None:
        return ""
    whole = "" if seen.original is None else f'<div class="whole">{embedded_image(seen.original, called)}</div>'
    first = embedded_image(seen.image, f"{called}, as the model saw it")
    second = "" if seen.relevance is None else embedded_image(seen.relevance, f"what spoke for {answer}")
    return f'{whole}<div class="two">{first}{second}</div>'


def _card(mistake: Mistake, seen: Seen | None) -> str:
    return (
        f"<li>{pair(seen, cut(mistake.name), mistake.predicted)}"
        f"<p><strong>{name(mistake.true)}</strong> taken for <strong>{name(mistake.predicted)}</strong>, "
        f'confidence {share(mistake.confidence)}</p><p class="quiet small file" title="{escape(mistake.name)}">'
        f"{path(file_name(mistake.name))}</p></li>"
    )
