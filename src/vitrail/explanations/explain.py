"""`explain`: what a bundle looks at in images."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.inputs import ImageInput, Item, fitted, is_one, item_of, name_of, no_image
from vitrail.data.sources.source import Pixels
from vitrail.errors import ConfigError, Diverged, InputError, VitrailError, suggest
from vitrail.evaluation import in_use
from vitrail.explanations.attention import attention_maps, choose_head, maps_of_layers
from vitrail.explanations.explanation import Explanation
from vitrail.explanations.relevance import explained_token
from vitrail.explanations.request import ExplanationRequest, Method, explain_pixels
from vitrail.explanations.rollout import Fuse
from vitrail.explanations.tokens import Query
from vitrail.models.checks import whole_number
from vitrail.runtime import choose_device

Each = Literal["heads", "layers"]


@overload
def explain(  # type: ignore[overload-overlap]  # a text is a path, not several letters
    bundle: Bundle | str | Path,
    images: ImageInput,
    *,
    method: Method = "relevance",
    layer: int | None = None,
    head: int | None = None,
    query: Query | None = None,
    target: str | int | None = None,
    fuse: Fuse = "mean",
    discard: float = 0.0,
    device: str = "auto",
) -> Explanation: ...


@overload
def explain(
    bundle: Bundle | str | Path,
    images: Iterable[ImageInput],
    *,
    method: Method = "relevance",
    layer: int | None = None,
    head: int | None = None,
    query: Query | None = None,
    target: str | int | None = None,
    fuse: Fuse = "mean",
    discard: float = 0.0,
    device: str = "auto",
) -> list[Explanation]: ...


def explain(
    bundle: Bundle | str | Path,
    images: ImageInput | Iterable[ImageInput],
    *,
    method: Method = "relevance",
    layer: int | None = None,
    head: int | None = None,
    query: Query | None = None,
    target: str | int | None = None,
    fuse: Fuse = "mean",
    discard: float = 0.0,
    device: str = "auto",
) -> Explanation | list[Explanation]:
    """Show what a model looks at in an image, or in each of several: `explain("runs/pets/best", "cat.jpg").overlay()`.

    `method` is one of: attention (the weights of `layer` and `head`, or the heads' mean, for the token `query`),
    rollout (all layers multiplied; `fuse` is mean, max or min of the heads, `discard` the share of smallest weights
    left out), relevance (gradient-weighted attention for class `target`), gradcam (weighted features, as `layer` reads
    them, for class `target`), pca (features after `layer` as colours). `target` is a class's name or number; without
    it, the likeliest. `query` is class, distillation, register:N, mean, pool, or a patch as "row,column"; without it,
    what the head reads. Layers, heads, rows and columns count from 0. The model goes to the device.
    """
    request = ExplanationRequest(method, layer, head, query, fuse, discard)
    explainer = Explainer(bundle, request, target=target, device=device)
    if is_one(images):
        return explainer.explain(item_of(images, explainer.channels), name_of(images, None))
    if not isinstance(images, Iterable):
        raise no_image(images)
    return [
        explainer.explain(_named_item(image, number, explainer.channels), name_of(image, number))
        for number, image in enumerate(images)
    ]


class Tile(NamedTuple):
    """One of the explanations of a grid."""

    label: str
    explanation: Explanation


class _Told(NamedTuple):
    """What a model says of an image: the class to explain and the class it predicts, by their numbers."""

    target: int | None
    probability: float | None
    predicted: int | None
    confidence: float | None


class Explainer:
    """A bundle made ready to be explained in one way, one image after another."""

    def __init__(
        self,
        bundle: Bundle | str | Path,
        request: ExplanationRequest,
        *,
        target: str | int | None = None,
        device: str = "auto",
    ) -> None:
        self.device = choose_device(device)
        opened = ready_bundle(bundle)
        request.check(opened.model.config, target=target)
        self.bundle, self.request, self.channels = opened, request, opened.preprocess.channels
        self.target = None if target is None else read_class(target, opened)
        self.model = opened.model.to(self.device)
        opened.announce()

    def explain(self, item: Item, name: str = "the image") -> Explanation:
        """Explain one image; `name` is for messages."""
        seen, pixels = self._prepared(item, name)
        with in_use(self.model):
            told = self._told(pixels)
            map = explain_pixels(self.model, pixels, self.request, told.target)[0]
        return self._explanation(map, seen, told)

    def grid(self, item: Item, each: Each, name: str = "the image") -> list[Tile]:
        """Explain one image for every head of the layer, or for every layer."""
        check_grid(self.request, each)
        seen, pixels = self._prepared(item, name)
        with in_use(self.model):
            told = self._told(pixels)
            if each == "heads":
                maps = list(attention_maps(self.model, pixels, self.request.layer, self.request.query)[0])
            elif self.request.method == "attention":
                every = maps_of_layers(self.model, pixels, self.request.query)
                maps = [choose_head(of_layer, self.request.head)[0] for of_layer in every]
            else:
                layers = [replace(self.request, layer=layer) for layer in range(self.model.config.depth)]
                maps = [explain_pixels(self.model, pixels, request, told.target)[0] for request in layers]
        unit = each.removesuffix("s")
        return [Tile(f"{unit} {i}", self._explanation(map, seen, told)) for i, map in enumerate(maps)]

    def _prepared(self, item: Item, name: str) -> tuple[Image.Image, Tensor]:
        """Read an image: what the model sees, to look at, and as it is given to the model."""
        try:
            crop = fitted(item, self.bundle.preprocess)
        except VitrailError as error:
            raise type(error)(f"{name}: {error}") from None
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)[None].to(self.device)
        return as_image(crop), self.bundle.preprocess.normalise(pixels)

    @torch.no_grad()
    def _told(self, pixels: Tensor) -> "_Told":
        """Return the class to explain and the class that is predicted, each with its probability."""
        config = self.model.config
        if not config.classes or (config.pool == "none" and not self.request.targeted):
            return _Told(None, None, None, None)  # nothing is said of a whole image
        logits = self.model(pixels)[0]
        answer = logits[explained_token(config, self.request.query)] if config.pool == "none" else logits
        shares, best = answer.softmax(dim=0), int(answer.argmax())
        if not self.request.targeted:
            return _Told(None, None, best, float(shares[best]))
        target = best if self.target is None else self.target
        return _Told(target, float(shares[target]), best, float(shares[best]))

    def _explanation(self, map: Tensor, seen: Image.Image, told: "_Told") -> Explanation:
        if not bool(map.isfinite().all()):
            raise Diverged("the map has numbers that are not finite; the model's weights are damaged")
        target, predicted = (
            number if self.bundle.classes is None or number is None else self.bundle.classes[number]
            for number in (told.target, told.predicted)
        )
        numbers = map.float().cpu().numpy()
        return Explanation(numbers, seen, self.request.method, target, told.probability, predicted, told.confidence)


def check_grid(request: ExplanationRequest, each: str) -> None:
    """Refuse a grid of what has no heads or no layers."""
    if each not in ("heads", "layers"):
        raise ConfigError(f"a grid shows heads or layers, not {each!r}")
    if each == "heads" and request.method != "attention":
        raise ConfigError(f"only attention has a map for every head, not {request.method}")
    if each == "heads" and request.head is not None:
        raise ConfigError(f"a grid of heads shows all of them; leave head {request.head} out")
    if each == "layers" and request.method in ("rollout", "relevance"):
        raise ConfigError(
            f"{request.method} joins all layers in one map; a grid of layers is for attention, gradcam, pca"
        )
    if each == "layers" and request.layer is not None:
        raise ConfigError(f"a grid of layers shows all of them; leave layer {request.layer} out")


def read_class(target: str | int, bundle: Bundle) -> int:
    """Return the number of a class that is given by its name or its number."""
    names, outputs = bundle.classes, bundle.model.config.classes
    if isinstance(target, str) and names is not None and target in names:
        return names.index(target)
    if isinstance(target, str) and not (target.isascii() and target.isdigit()):
        near = suggest(target, names) if names is not None else "; its classes have no names, so give a number"
        raise InputError(f"this model has no class {target!r}{near or f'; it has {_listed(names or ())}'}")
    number = int(target) if isinstance(target, str) else whole_number(target)
    if number is None or not 0 <= number < outputs:
        raise InputError(f"class {target} does not exist: this model has classes 0 to {outputs - 1}")
    return number


def as_image(pixels: Pixels) -> Image.Image:
    """Make pixels (height, width, channels) an image to look at; of unusual channels, the mean in grey."""
    if pixels.shape[2] == 3:
        return Image.fromarray(pixels)
    grey = pixels.mean(axis=2).round().astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def _named_item(image: object, number: int, channels: int) -> Item:
    """Read what was given as one of many; what is no image is refused with its number."""
    try:
        return item_of(image, channels)
    except VitrailError as error:
        raise type(error)(f"{name_of(image, number)}: {error}") from None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
