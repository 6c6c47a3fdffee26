"""`explain`: maps of what a model attends to in images."""

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
from vitrail.explanations.attention import Fuse, Query, attention_maps, choose_head, maps_of_layers
from vitrail.explanations.explanation import Explanation
from vitrail.explanations.relevance import explained_logits
from vitrail.explanations.request import ExplanationRequest, Method, explain_pixels
from vitrail.models.checks import as_int
from vitrail.runtime import choose_device, eval_mode
from vitrail.tasks.lookup import task_of_head
from vitrail.tasks.task import Explained, Task

Each = Literal["heads", "layers"]


@overload
def explain(  # type: ignore[overload-overlap]  # a str is a path, not a sequence
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
    """Explain one image or several: `explain("runs/pets/best", "cat.jpg").overlay()`.

    `method` is one of: attention (the weights of `layer` and `head`, or the mean of the heads, for the token `query`),
    rollout (all layers multiplied; `fuse` is the mean, max or min of the heads, `discard` the fraction of smallest
    weights dropped), relevance (gradient-weighted attention for class `target`), gradcam (the input features of
    `layer`, weighted for class `target`), pca (features after `layer` as colours). `target` is a class name or index,
    by default the predicted class. `query` is class, distillation, register:N, mean, pool, or a patch as "row,column",
    by default what the head reads. Layers, heads, rows and columns are 0-based. The model is moved to the device.
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
    """One explanation of a grid."""

    label: str
    explanation: Explanation


class Subject(NamedTuple):
    """What a map is about."""

    target: Explained | None
    """The output that the map explains; None if the method has none."""
    predicted: Explained | None
    """The model's prediction; None if it makes none for a whole image."""

    @property
    def output(self) -> int | None:
        """The index of the output to explain."""
        return None if self.target is None else self.target.index


@torch.no_grad()
def subject_of(
    bundle: Bundle, task: Task | None, pixels: Tensor, request: ExplanationRequest, target: int | None
) -> Subject:
    """Return what a map of one image (1, C, H, W) is about: the output `target`, by default the model's prediction."""
    config = bundle.model.config
    if task is None or (not config.has_pool and not request.targeted):
        return Subject(None, None)  # no prediction for the whole image
    outputs = explained_logits(bundle.model(pixels), config, request.query)[0]
    predicted = task.explained(outputs, bundle.classes, None)
    if not request.targeted:
        return Subject(None, predicted)
    return Subject(predicted if target is None else task.explained(outputs, bundle.classes, target), predicted)


class Explainer:
    """A bundle ready to explain images with one method."""

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
        self.task = task_of_head(opened)
        self.target = None if target is None else read_output(target, opened, self.task)
        self.model = opened.model.to(self.device)
        opened.announce()

    def explain(self, item: Item, name: str = "the image") -> Explanation:
        """Explain one image; `name` is for messages."""
        shown, pixels = self._load(item, name)
        with eval_mode(self.model):
            subject = self._subject(pixels)
            map = explain_pixels(self.model, pixels, self.request, subject.output)[0]
        return self._explanation(map, shown, subject)

    def grid(self, item: Item, each: Each, name: str = "the image") -> list[Tile]:
        """Explain one image for every head of a layer, or for every layer."""
        check_grid(self.request, each)
        shown, pixels = self._load(item, name)
        with eval_mode(self.model):
            subject = self._subject(pixels)
            if each == "heads":
                maps = list(attention_maps(self.model, pixels, self.request.layer, self.request.query)[0])
            elif self.request.method == "attention":
                every = maps_of_layers(self.model, pixels, self.request.query)
                maps = [choose_head(of_layer, self.request.head)[0] for of_layer in every]
            else:
                layers = [replace(self.request, layer=layer) for layer in range(self.model.config.depth)]
                maps = [explain_pixels(self.model, pixels, request, subject.output)[0] for request in layers]
        unit = each.removesuffix("s")
        return [Tile(f"{unit} {i}", self._explanation(map, shown, subject)) for i, map in enumerate(maps)]

    def _load(self, item: Item, name: str) -> tuple[Image.Image, Tensor]:
        """Read an image; return the crop the model sees, for display, and its normalised pixels."""
        try:
            crop = fitted(item, self.bundle.preprocess)
        except VitrailError as error:
            raise type(error)(f"{name}: {error}") from None
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)[None].to(self.device)
        return as_image(crop), self.bundle.preprocess.normalise(pixels)

    def _subject(self, pixels: Tensor) -> Subject:
        return subject_of(self.bundle, self.task, pixels, self.request, self.target)

    def _explanation(self, map: Tensor, shown: Image.Image, subject: Subject) -> Explanation:
        if not bool(map.isfinite().all()):
            raise Diverged("the map is not finite; the model's weights are corrupt")
        values = map.float().cpu().numpy()
        target, probability, value = _shown(subject.target)
        predicted, confidence, predicted_value = _shown(subject.predicted)
        return Explanation(
            values, shown, self.request.method, target, probability, predicted, confidence, value, predicted_value
        )


def _shown(output: Explained | None) -> tuple[str | int | None, float | None, str | None]:
    """Return the name of an output, and its probability, or else its value as text."""
    if output is None:
        return None, None, None
    return (output.name, output.value, None) if output.is_probability else (output.name, None, output.text)


def check_grid(request: ExplanationRequest, each: str) -> None:
    """Raise for a grid over something a method does not have."""
    if each not in ("heads", "layers"):
        raise ConfigError(f"a grid shows heads or layers, not {each!r}")
    if each == "heads" and request.method != "attention":
        raise ConfigError(f"only attention has one map per head, {request.method} does not")
    if each == "heads" and request.head is not None:
        raise ConfigError(f"a grid of heads shows all heads; omit head {request.head}")
    if each == "layers" and request.method in ("rollout", "relevance"):
        raise ConfigError(
            f"{request.method} combines all layers in one map; a grid of layers works for attention, gradcam and pca"
        )
    if each == "layers" and request.layer is not None:
        raise ConfigError(f"a grid of layers shows all layers; omit layer {request.layer}")


def read_output(target: str | int, bundle: Bundle, task: Task | None) -> int:
    """Return the index of an output, such as a class, given by name or index."""
    names, outputs = bundle.classes, bundle.model.config.classes
    one, several = Task.output_noun if task is None else task.output_noun
    if isinstance(target, str) and names is not None and target in names:
        return names.index(target)
    if isinstance(target, str) and not (target.isascii() and target.isdigit()):
        near = suggest(target, names) if names is not None else f"; its {several} have no names, use an index"
        raise InputError(f"this model has no {one} {target!r}{near or f'; it has {_listed(names or ())}'}")
    number = int(target) if isinstance(target, str) else as_int(target)
    if number is None or not 0 <= number < outputs:
        raise InputError(f"{one} {target} does not exist: this model has {several} 0 to {outputs - 1}")
    return number


def as_image(pixels: Pixels) -> Image.Image:
    """Turn pixels (height, width, channels) into an RGB image; other than three channels become their mean in grey."""
    if pixels.shape[2] == 3:
        return Image.fromarray(pixels)
    grey = pixels.mean(axis=2).round().astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def _named_item(image: object, number: int, channels: int) -> Item:
    """Turn one of several inputs into an item; errors name it by its number."""
    try:
        return item_of(image, channels)
    except VitrailError as error:
        raise type(error)(f"{name_of(image, number)}: {error}") from None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
