"""What the model has learned: the paper's figures, drawn from it."""

from collections.abc import Callable

import numpy as np
import torch

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.inputs import Item, fitted
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer
from vitrail.explanations.figures import Absent, Figure, distance_figure, filters_figure, positions_figure
from vitrail.explanations.figures.distance import IMAGES
from vitrail.explanations.figures.examples import attended
from vitrail.explanations.overlay import enlarged
from vitrail.explanations.request import ExplanationRequest
from vitrail.reports.formatting import ended
from vitrail.reports.page import Section, absent, embedded_image, paragraph
from vitrail.reports.run_artifacts import SIDE, RunArtifacts

TITLE = "Inside the model"
WHAT = "What the ViT paper shows of its models (arXiv 2010.11929, figures 6, 7 and 11), drawn from this one."
EXAMPLES = 6
WORK = 200_000_000_000
"""Floating-point operations that the attention distance may take on a CPU: some seconds, not minutes."""


def inside(sight: RunArtifacts) -> Section:
    """Return the paper's figures for the best model."""
    if sight.bundle is None:
        return Section("inside", "Inside", TITLE, absent(sight.why_no_bundle))
    bundle = sight.bundle
    drawn = [_drawn(lambda: filters_figure(bundle)), _drawn(lambda: positions_figure(bundle))]
    images = _readable(sight.some(_affordable(bundle)), bundle)
    if images:
        pixels = torch.from_numpy(np.stack([pixels for _, pixels in images])).permute(0, 3, 1, 2)
        drawn.append(_drawn(lambda: distance_figure(bundle, pixels, standalone=False)))
        every = -(-len(images) // EXAMPLES)
        looks = _rollout(bundle, [item for item, _ in images[::every]])
    else:
        looks = absent(sight.why_no_images or "No image can be read, so attention cannot be shown.")
    return Section("inside", "Inside", TITLE, f'{paragraph(WHAT)}<div class="pair">{"".join(drawn)}</div>{looks}')


def _affordable(bundle: Bundle) -> int:
    if torch.cuda.is_available():
        return IMAGES
    # Every token meets every weight once, in a multiplication and an addition; near enough, and at once.
    weights = sum(parameter.numel() for parameter in bundle.model.parameters())
    return max(EXAMPLES, min(IMAGES, WORK // (2 * weights * bundle.model.config.tokens)))


def _readable(items: list[Item], bundle: Bundle) -> list[tuple[Item, np.ndarray]]:
    found = []
    for item in items:
        try:
            found.append((item, fitted(item, bundle.preprocess)))
        except VitrailError:
            continue
    return found


def _drawn(draw: Callable[[], Figure | Absent]) -> str:
    try:
        made = draw()
    except VitrailError as error:
        return absent(ended(f"A figure is missing here: {error}"))
    if isinstance(made, Absent):
        return f"<div><h3>{escape(made.title)}</h3>{absent(f'There is no such figure: {made.reason}')}</div>"
    shown = made.svg or "" if made.image is None else embedded_image(made.image, made.title, exact=True)
    kind = "sheet" if made.image is not None else "drawn"
    caption = f"<figcaption>{escape(made.caption)}</figcaption>"
    return f'<div><h3>{escape(made.title)}</h3><figure class="{kind}">{shown}{caption}</figure></div>'


def _rollout(bundle: Bundle, items: list[Item]) -> str:
    """Return images, and the same darkened where the model looks less; not as one sheet, which would stay white."""
    if bundle.model.config.patches == 1:
        return ""
    cards = []
    try:
        explainer = Explainer(bundle, ExplanationRequest("rollout"))
        for item in items:
            explained = explainer.explain(item)
            seen = enlarged(explained.image, SIDE)
            both = embedded_image(seen, "a held-out image") + embedded_image(
                attended(seen, explained.map), "where the model looks"
            )
            cards.append(f'<li><div class="two">{both}</div></li>')
    except VitrailError as error:
        return absent(ended(f"Attention rollout cannot be shown: {error}"))
    caption = (
        "Held-out images, and beside each what the answer could take from where, through all layers (attention "
        "rollout, Abnar and Zuidema): dark parts do not reach it."
    )
    return f'<h3>Where it looks</h3><ul class="mistakes many">{"".join(cards)}</ul>{paragraph(caption, "quiet small")}'
