"""Single images of a report: as stored, as the model's input, and with a map that explains one of the outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer, as_image
from vitrail.explanations.explanation import enlarged
from vitrail.explanations.request import ExplanationRequest, Method
from vitrail.reports.page import absent, embedded_image, path
from vitrail.reports.run_artifacts import SIDE, RunArtifacts, Truth
from vitrail.text import shorten, shorten_path

SHOWN = 12
"""Images in a section."""


class MapKind(NamedTuple):
    """How an output of a model is explained."""

    method: Method
    name: str
    how: str
    effect: str

    def caption(self, of: str, effect: str = "") -> str:
        """Return what a map of an output is, and what bright regions are; `effect` replaces "contributed most"."""
        return f"{self.name} map of {of} ({self.how}): bright regions {effect or self.effect}"


RELEVANCE = MapKind("relevance", "relevance", "attention times gradient", "contributed most")
GRADCAM = MapKind("gradcam", "Grad-CAM", "last feature map times gradient", "support it most")


def map_kind(artifacts: RunArtifacts) -> MapKind:
    """Return the kind of map: a ResNet without encoder blocks has no attention, which relevance needs."""
    return RELEVANCE if artifacts.bundle is None or artifacts.bundle.model.config.depth else GRADCAM


class ImageViews(NamedTuple):
    """An image as stored and as the model's input, and the map of one output, if available."""

    original: Image.Image | None
    image: Image.Image
    map: Image.Image | None


@dataclass(frozen=True)
class ImageCard:
    """An image of a report, and what is said about it."""

    index: int
    """Its index in the source."""
    name: str
    true: Truth
    output: int | None
    """The output that the map explains; None: the prediction."""
    output_name: str
    text: str
    """HTML."""


def load_views(artifacts: RunArtifacts, card: ImageCard) -> ImageViews | None:
    """Return an image and the map of an output; None without a model or data."""
    from vitrail.data.inputs import fitted

    if artifacts.bundle is None or artifacts.source is None:
        return None
    item = artifacts.item(card.index, card.name, card.true)
    original = artifacts.original(item)
    try:
        request = ExplanationRequest(map_kind(artifacts).method)
        explained = Explainer(artifacts.bundle, request, target=card.output).explain(item, card.name)
    except VitrailError:
        return ImageViews(original, enlarged(as_image(fitted(item, artifacts.bundle.preprocess)), SIDE), None)
    return ImageViews(original, enlarged(explained.image, SIDE), explained.overlay(side=SIDE))


def image_cards(artifacts: RunArtifacts, cards: Sequence[ImageCard], missing: set[str]) -> str:
    """Return images with their maps and texts; reasons for missing images are added to `missing`."""
    kind = map_kind(artifacts).name
    drawn = []
    for card in cards:
        try:
            views = load_views(artifacts, card)
        except (VitrailError, OSError) as error:
            views = None
            missing.add(str(error))
        if views is not None and views.map is None:
            missing.add(f"{kind} maps are not available for this model")
        images = _views(views, shorten(card.name), f"{kind} for {card.output_name}")
        drawn.append(f"<li>{images}{card.text}{file(card.name)}</li>")
    return f'<ul class="mistakes">{"".join(drawn)}</ul>'


def image_notes(artifacts: RunArtifacts, missing: set[str], what: str = "images or maps") -> str:
    """Return why images or maps are missing; empty if none are."""
    if artifacts.source is None:
        return absent(artifacts.why_no_images)
    if artifacts.bundle is None:
        return absent(artifacts.why_no_bundle)
    return absent(f"Some {what} are missing: {'; '.join(sorted(missing)[:3])}.") if missing else ""


def stored_image(artifacts: RunArtifacts, index: int, image_name: str, true: Truth) -> str:
    """Return an image as stored; empty if it is not available."""
    if artifacts.source is None:
        return ""
    try:
        original = artifacts.original(artifacts.item(index, image_name, true))
    except (VitrailError, OSError):
        return ""
    return "" if original is None else embedded_image(original, shorten(image_name))


def file(image_name: str, most: int = 56) -> str:
    """Return the path of an image as a quiet line."""
    shown = path(shorten_path(image_name, most))
    return f'<p class="quiet small file" title="{escape(image_name)}">{shown}</p>'


def _views(views: ImageViews | None, image_name: str, map_name: str) -> str:
    """Return the stored image, with the model's input and the map below it."""
    if views is None:
        return ""
    original = (
        "" if views.original is None else f'<div class="original">{embedded_image(views.original, image_name)}</div>'
    )
    first = embedded_image(views.image, f"{image_name}, model input")
    second = "" if views.map is None else embedded_image(views.map, map_name)
    return f'{original}<div class="two">{first}{second}</div>'
