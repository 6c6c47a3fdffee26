"""The most confident mistakes of a classifier, with their images."""

from collections.abc import Sequence

from vitrail.reports.image_views import SHOWN, ImageCard, image_cards, image_notes, map_kind
from vitrail.reports.page import Section, absent, name, paragraph
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.tasks.classification_metrics import Mistake
from vitrail.text import as_percent

HIGH = 0.8
"""Predictions with at least this confidence count as confident."""
WHAT = "Look for wrong labels here, too. Each image is shown as stored"


def mistakes(artifacts: RunArtifacts) -> Section:
    """Return the most confident mistakes with their images."""
    result = artifacts.run.classified
    if result is None:
        return Section("mistakes", "Mistakes", "Mistakes", absent(artifacts.run.why_no_result))
    if not result.worst:
        return Section("mistakes", "Mistakes", "Mistakes", paragraph("Every prediction is correct."))
    shown = result.worst[:SHOWN]
    confident = [one for one in shown if one.confidence >= HIGH]
    others = [one for one in shown if one.confidence < HIGH]
    missing: set[str] = set()
    caption = map_kind(artifacts).caption("the prediction")
    body = paragraph(f"{WHAT}; below it are the model's input and the {caption}.")
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
    return Section("mistakes", "Mistakes", title, image_notes(artifacts, missing) + body)


def _cards(artifacts: RunArtifacts, mistakes: Sequence[Mistake], missing: set[str]) -> str:
    cards = [
        ImageCard(
            one.index, one.name, one.true, artifacts.class_indices.get(one.predicted), one.predicted,
            f"<p><strong>{name(one.true)}</strong> predicted as <strong>{name(one.predicted)}</strong>, confidence "
            f"{as_percent(one.confidence)}</p>",
        )
        for one in mistakes
    ]  # fmt: skip
    return image_cards(artifacts, cards, missing)
