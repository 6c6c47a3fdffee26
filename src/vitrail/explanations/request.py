"""`ExplanationRequest`: the options of an explanation, validated before anything is computed."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from vitrail.errors import ConfigError, InputError, suggest
from vitrail.explanations.attention import (
    POOL,
    Fuse,
    Query,
    attention_maps,
    check_settings,
    choose_head,
    read_head,
    read_query,
    rollout_maps,
)
from vitrail.explanations.relevance import check_head, explained_token, gradcam_maps, pca_maps, relevance_maps
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Method = Literal["attention", "rollout", "relevance", "gradcam", "pca"]
METHODS: tuple[str, ...] = get_args(Method)
TARGETED = ("relevance", "gradcam")
"""Methods that explain a class."""
NEED_ATTENTION = ("attention", "rollout", "relevance")
_METHODS_WITH = {
    "layer": ("attention", "gradcam", "pca"),
    "head": ("attention",),
    "query": ("attention", "rollout"),
    "target": TARGETED,
    "fuse": ("rollout",),
    "discard": ("rollout",),
}


@dataclass(frozen=True)
class ExplanationRequest:
    """The options of an explanation; None means the method's default."""

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
        """Raise if the options do not fit the method or the model."""
        if self.method not in METHODS:
            near = suggest(self.method, METHODS) or f"; choose {', '.join(METHODS[:-1])} or {METHODS[-1]}"
            raise ConfigError(f"unknown method {self.method!r}{near}")
        if self.method in NEED_ATTENTION and not config.depth:
            raise ConfigError(f"this model is a ResNet, so {self.method} has no attention to show; use gradcam or pca")
        check_settings(self.fuse, self.discard)
        for option, default in (("layer", None), ("head", None), ("fuse", "mean"), ("discard", 0)):
            if getattr(self, option) != default:
                self._check_option(option)
        if target is not None:
            self._check_option("target")
        if self.layer is not None:
            read_layer(self.layer, config.depth)
        if self.head is not None:
            read_head(self.head, config.heads)
        if self.targeted:
            check_head(config)
        self._check_query(config)

    def _check_option(self, option: str) -> None:
        if self.method not in _METHODS_WITH[option]:
            *others, last = _METHODS_WITH[option]
            takers = f"{', '.join(others)} and {last}" if others else last
            raise ConfigError(f"{option} does not apply to {self.method}, only to {takers}; omit it")

    def _check_query(self, config: ViTConfig) -> None:
        if self.targeted and not config.has_pool:
            explained_token(config, self.query)
        elif self.query is not None:
            self._check_option("query")
            if self.query != POOL or config.pool != "map":
                read_query(self.query, config)
            elif self.layer is not None:
                raise InputError("the pool's query comes after all layers; omit the layer, or choose another token")


def explain_pixels(
    model: ViT, pixels: Tensor, request: ExplanationRequest, target: int | Tensor | None = None
) -> Tensor:
    """Return maps (B, rows, columns) for normalised pixels (B, C, H, W); for pca, colours (B, rows, columns, 3).

    `target` is the class to explain, one index or one per image.
    """
    match request.method:
        case "attention":
            return choose_head(attention_maps(model, pixels, request.layer, request.query), request.head)
        case "rollout":
            return rollout_maps(model, pixels, request.query, fuse=request.fuse, discard=request.discard)
        case "pca":
            return pca_maps(model, pixels, request.layer)
    if target is None:
        raise InputError(f"{request.method} explains a class; give a target")
    if request.method == "gradcam":
        return gradcam_maps(model, pixels, target, request.layer, request.query)
    return relevance_maps(model, pixels, target, request.query)
