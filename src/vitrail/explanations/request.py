"""What is asked of an explanation, checked before anything is computed; and the map that answers it."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from vitrail.errors import ConfigError, InputError, suggest
from vitrail.explanations.attention import attention_maps, choose_head, read_head
from vitrail.explanations.gradcam import gradcam_maps
from vitrail.explanations.pca import pca_maps
from vitrail.explanations.relevance import explained_token, check_has_classes, relevance_maps
from vitrail.explanations.rollout import Fuse, check_settings, rollout_maps
from vitrail.explanations.tokens import POOL, Query, read_query
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Method = Literal["attention", "rollout", "relevance", "gradcam", "pca"]
METHODS: tuple[str, ...] = get_args(Method)
TARGETED = ("relevance", "gradcam")
"""The methods that explain a class."""
_TAKEN_BY = {
    "layer": ("attention", "gradcam", "pca"),
    "head": ("attention",),
    "query": ("attention", "rollout"),
    "target": TARGETED,
    "fuse": ("rollout",),
    "discard": ("rollout",),
}


@dataclass(frozen=True)
class ExplanationRequest:
    """An explanation that is asked for; what is None is left to the method."""

    method: Method = "relevance"
    layer: int | None = None
    head: int | None = None
    query: Query | None = None
    fuse: Fuse = "mean"
    discard: float = 0.0

    @property
    def targeted(self) -> bool:
        """Whether it explains a class."""
        return self.method in TARGETED

    def check(self, config: ViTConfig, *, target: object = None) -> None:
        """Refuse what a model cannot answer."""
        if self.method not in METHODS:
            near = suggest(self.method, METHODS) or f"; there are {', '.join(METHODS[:-1])} and {METHODS[-1]}"
            raise ConfigError(f"no method is called {self.method!r}{near}")
        check_settings(self.fuse, self.discard)
        for option, default in (("layer", None), ("head", None), ("fuse", "mean"), ("discard", 0)):
            if getattr(self, option) != default:
                self._check_taken(option)
        if target is not None:
            self._check_taken("target")
        if self.layer is not None:
            read_layer(self.layer, config.depth)
        if self.head is not None:
            read_head(self.head, config.heads)
        self._check_query(config)
        if self.targeted:
            check_has_classes(config)

    def _check_taken(self, option: str) -> None:
        if self.method not in _TAKEN_BY[option]:
            *others, last = _TAKEN_BY[option]
            takers = f"{', '.join(others)} and {last}" if others else last
            raise ConfigError(f"{option} means nothing for {self.method}, only for {takers}; leave it out")

    def _check_query(self, config: ViTConfig) -> None:
        if self.targeted and config.pool == "none":
            explained_token(config, self.query)
        elif self.query is not None:
            self._check_taken("query")
            if self.query != POOL or config.pool != "map":
                read_query(self.query, config)
            elif self.layer is not None:
                raise InputError("the pool's query stands behind all layers; leave the layer out, or ask another token")


def explain_pixels(
    model: ViT, pixels: Tensor, request: ExplanationRequest, target: int | Tensor | None = None
) -> Tensor:
    """Return the maps (B, rows, columns), of colours (B, rows, columns, 3) for pca, of normalised pixels (B, C, H, W).

    `target` is the class to explain, one number or one for each image.
    """
    match request.method:
        case "attention":
            return choose_head(attention_maps(model, pixels, request.layer, request.query), request.head)
        case "rollout":
            return rollout_maps(model, pixels, request.query, fuse=request.fuse, discard=request.discard)
        case "pca":
            return pca_maps(model, pixels, request.layer)
    if target is None:
        raise InputError(f"{request.method} explains a class; say which")
    if request.method == "gradcam":
        return gradcam_maps(model, pixels, target, request.layer, request.query)
    return relevance_maps(model, pixels, target, request.query)
