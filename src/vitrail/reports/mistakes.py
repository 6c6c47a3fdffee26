"""The most confident mistakes: each image as stored, as the model's input, and with its relevance map."""

from typing import NamedTuple

from PIL import Image

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer, as_image
from vitrail.explanations.overlay import enlarged
from vitrail.explanations.request import ExplanationRequest
from vitrail.reports.formatting import as_percent, cut, file_name
from vitrail.reports.page import Section, absent, embedded_image, name, paragraph, path
from vitrail.reports.run_artifacts import SIDE, RunArtifacts
from vitrail.reports.run_record import Mistake

SHOWN = 12
HIGH = 0.8
"""Predictions with at least this confidence count as confident."""
WHAT = (
    "Look for wrong labels here, too. Each image is shown as stored; below it are the model's input and the relevance "
    "map of the prediction (attention times gradient): bright regions contributed most."
)


class ImageViews(NamedTuple):
    """An image as stored and as the model's input, and its relevance map, if available."""

    original: Image.Image | None
    image: Image.Image
    relevance: Image.Image | None


def mistakes(artifacts: RunArtifacts) -> Section:
    """Return the most confident mistakes with their images."""
    result = artifacts.run.result
    if result is None:
        return Section("mistakes", "Mistakes", "Mistakes", absent(artifacts.run.why_no_result))
    if not result.worst:
        return Section("mistakes", "Mistakes", "Mistakes", paragraph("Every prediction is correct."))
    shown = result.worst[:SHOWN]
    confident = [one for one in shown if one.confidence >= HIGH]
    others = [one for one in shown if one.confidence < HIGH]
    missing: set[str] = set()
    body = paragraph(WHAT)
    if confident:
        title = "Confident mistakes"
        body += f"{_cards(artifacts, confident, missing)}"
        body += f"<h3>Mistakes with less than {as_percent(HIGH)} confidence</h3>" if others else ""
    else:
        title = "Most confident mistakes"
        body = (
            paragraph(
                f"No mistake has a confidence of {as_percent(HIGH)} or more; the highest is "
                f"{as_percent(shown[0].confidence)}."
            )
            + body
        )
    body += _cards(artifacts, others, missing) if others else ""
    return Section("mistakes", "Mistakes", title, _notes(artifacts, missing) + body)


def _notes(artifacts: RunArtifacts, missing: set[str]) -> str:
    if artifacts.source is None:
        return absent(artifacts.why_no_images)
    if artifacts.bundle is None:
        return absent(artifacts.why_no_bundle)
    return absent(f"Some images or maps are missing: {'; '.join(sorted(missing)[:3])}.") if missing else ""


def _cards(artifacts: RunArtifacts, mistakes: list[Mistake], missing: set[str]) -> str:
    """Return mistakes as cards; reasons for missing images are added to `missing`."""
    cards = []
    for mistake in mistakes:
        try:
            views = load_views(artifacts, mistake.index, mistake.name, mistake.true, mistake.predicted)
        except (VitrailError, OSError) as error:
            views = None
            missing.add(str(error))
        if views is not None and views.relevance is None:
            missing.add("relevance maps are not available for this model")
        cards.append(_card(mistake, views))
    return f'<ul class="mistakes">{"".join(cards)}</ul>'


def load_views(artifacts: RunArtifacts, index: int, image_name: str, true: str, predicted: str) -> ImageViews | None:
    """Return an image and the relevance map of a prediction; None without a model or data."""
    from vitrail.data.inputs import fitted

    if artifacts.bundle is None or artifacts.source is None:
        return None
    item = artifacts.item(index, image_name, true)
    original = artifacts.original(item)
    try:
        explained = Explainer(
            artifacts.bundle, ExplanationRequest("relevance"), target=artifacts.class_indices.get(predicted)
        ).explain(item, image_name)
    except VitrailError:
        return ImageViews(original, enlarged(as_image(fitted(item, artifacts.bundle.preprocess)), SIDE), None)
    return ImageViews(original, enlarged(explained.image, SIDE), explained.overlay(side=SIDE))


def pair(views: ImageViews | None, image_name: str, predicted: str) -> str:
    """Return the stored image, with the model's input and the relevance map below it."""
    if views is None:
        return ""
    original = (
        "" if views.original is None else f'<div class="original">{embedded_image(views.original, image_name)}</div>'
    )
    first = embedded_image(views.image, f"{image_name}, model input")
    second = "" if views.relevance is None else embedded_image(views.relevance, f"relevance for {predicted}")
    return f'{original}<div class="two">{first}{second}</div>'


def _card(mistake: Mistake, views: ImageViews | None) -> str:
    return (
        f"<li>{pair(views, cut(mistake.name), mistake.predicted)}"
        f"<p><strong>{name(mistake.true)}</strong> predicted as <strong>{name(mistake.predicted)}</strong>, "
        f'confidence {as_percent(mistake.confidence)}</p><p class="quiet small file" title="{escape(mistake.name)}">'
        f"{path(file_name(mistake.name))}</p></li>"
    )
