"""The ViT paper's figures, drawn from the trained model."""

from collections.abc import Callable

import numpy as np
import torch

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.inputs import Item, fitted
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer
from vitrail.explanations.explanation import enlarged
from vitrail.explanations.figures import Absent, Figure, distance_figure, filters_figure, positions_figure
from vitrail.explanations.figures.distance import IMAGES
from vitrail.explanations.figures.examples import attended
from vitrail.explanations.request import ExplanationRequest
from vitrail.reports.page import Section, absent, embedded_image, paragraph
from vitrail.reports.run_artifacts import SIDE, RunArtifacts
from vitrail.text import ended

TITLE = "Inside the model"
WHAT = "Figures 6, 7 and 11 of the ViT paper (arXiv 2010.11929), drawn from this model."
EXAMPLES = 6
WORK = 200_000_000_000
"""FLOP budget of the attention distance on a CPU: a few seconds, not minutes."""


def inside(artifacts: RunArtifacts) -> Section:
    """Return the paper's figures for the best model."""
    if artifacts.bundle is None:
        return Section("inside", "Inside", TITLE, absent(artifacts.why_no_bundle))
    bundle = artifacts.bundle
    drawn = [_drawn(lambda: filters_figure(bundle)), _drawn(lambda: positions_figure(bundle))]
    images = _readable(artifacts.some(_affordable(bundle)), bundle)
    if images:
        pixels = torch.from_numpy(np.stack([pixels for _, pixels in images])).permute(0, 3, 1, 2)
        drawn.append(_drawn(lambda: distance_figure(bundle, pixels, standalone=False)))
        every = -(-len(images) // EXAMPLES)
        rollout = _rollout(bundle, [item for item, _ in images[::every]])
    else:
        rollout = absent(artifacts.why_no_images or "No image could be read, so attention cannot be shown.")
    return Section("inside", "Inside", TITLE, f'{paragraph(WHAT)}<div class="pair">{"".join(drawn)}</div>{rollout}')


def _affordable(bundle: Bundle) -> int:
    if torch.cuda.is_available():
        return IMAGES
    # One multiply-add per token and weight: a good enough estimate.
    weights = sum(parameter.numel() for parameter in bundle.model.parameters())
    return max(EXAMPLES, min(IMAGES, WORK // (2 * weights * bundle.model.config.tokens)))


def _readable(items: list[Item], bundle: Bundle) -> list[tuple[Item, np.ndarray]]:
    readable = []
    for item in items:
        try:
            readable.append((item, fitted(item, bundle.preprocess)))
        except VitrailError:
            continue
    return readable


def _drawn(draw: Callable[[], Figure | Absent]) -> str:
    try:
        made = draw()
    except VitrailError as error:
        return absent(ended(f"A figure is missing: {error}"))
    if isinstance(made, Absent):
        return f"<div><h3>{escape(made.title)}</h3>{absent(f'This figure is not available: {made.reason}')}</div>"
    shown = made.svg or "" if made.image is None else embedded_image(made.image, made.title, exact=True)
    kind = "sheet" if made.image is not None else "drawn"
    caption = f"<figcaption>{escape(made.caption)}</figcaption>"
    return f'<div><h3>{escape(made.title)}</h3><figure class="{kind}">{shown}{caption}</figure></div>'


def _rollout(bundle: Bundle, items: list[Item]) -> str:
    """Return images next to their attention rollout; as separate cards, which follow the page's colour scheme."""
    if bundle.model.config.patches == 1 or not bundle.model.config.depth:
        return ""
    cards = []
    try:
        explainer = Explainer(bundle, ExplanationRequest("rollout"))
        for item in items:
            explained = explainer.explain(item)
            image = enlarged(explained.image, SIDE)
            both = embedded_image(image, "a held-out image") + embedded_image(
                attended(image, explained.map), "attention rollout"
            )
            cards.append(f'<li><div class="two">{both}</div></li>')
    except VitrailError as error:
        return absent(ended(f"Attention rollout cannot be shown: {error}"))
    caption = (
        "Held-out images, each with its attention rollout through all layers (Abnar and Zuidema): dark regions do not "
        "contribute to the output."
    )
    return (
        f'<h3>Attention rollout</h3><ul class="mistakes many">{"".join(cards)}</ul>{paragraph(caption, "quiet small")}'
    )
