"""The Vision Transformer (arXiv 2010.11929).

    image (B, C, H, W)
      -> stem: one token a patch, (B, N, D)
      -> class token and other special tokens join, positions are added, (B, T, D)
      -> encoder blocks
      -> pool, representation layer, head: (B, classes)

Parameter names are timm's, so that a plain ViT's weights load into either.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import ConfigError, InputError
from vitrail.models.blocks import Block
from vitrail.models.checks import check_images, read_layer, read_layers
from vitrail.models.config import ViTConfig
from vitrail.models.initialise import initialise
from vitrail.models.pooling import AttentionPool, PreLogits
from vitrail.models.position import (
    Places,
    add_table,
    drop_patches,
    locate,
    pick,
    read_table,
    relative_offsets,
    resized_tables,
    rope_2d,
    sincos_2d,
)
from vitrail.models.resample import Method, check_method
from vitrail.models.stems import STEMS, resized_stem


@dataclass(frozen=True)
class Features:
    """What an image looks like to the model, before the head."""

    pooled: Tensor
    """(B, D), or (B, representation): what the head sees; for every token, (B, T, …), where `pool` is none."""
    tokens: Tensor
    """(B, T, D), every token in order; or (B, D, rows, columns), the patches only, with `as_grid`."""


@dataclass(frozen=True)
class Traced:
    """A forward pass with the intermediate values that were asked for, all differentiable."""

    logits: Tensor
    attention: dict[int, Tensor]
    """Attention weights (B, heads, T, T) of the layers asked for; row i says where token i looks."""
    tokens: dict[int, Tensor]
    """Tokens (B, T, D) as they leave the layers asked for."""
    pooling: Tensor | None = None
    """How much the pool `map` looks at each token it pools over, (B, heads, tokens); None with any other pool."""


class ViT(nn.Module):
    """A Vision Transformer built from a `ViTConfig`, freshly initialised."""

    dist_token: nn.Parameter | None
    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    rotation: Tensor | None
    offsets: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise ConfigError(
                f"ViT takes a ViTConfig, found {config!r}; a named model is made by vitrail.create('B/16')"
            )
        self.config = config
        self.gradient_checkpointing = False
        """Recompute each block's activations in the backward pass: less memory, more time."""

        D = config.width
        self.patch_embed = STEMS[config.stem](config)
        self.register_parameter("cls_token", _token(1, D) if config.class_token != "none" else None)
        self.register_parameter("dist_token", _token(1, D) if config.distillation_token else None)
        self.register_parameter("reg_token", _token(config.registers, D) if config.registers else None)
        if config.table_owner == "model":
            add_table(self, config)
        self._set_places(self._computed_places(config))
        self.pos_drop = nn.Dropout(config.embed_dropout)
        self.norm_pre = self._norm(config.norm_before_blocks)

        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))

        self.norm = self._norm(config.final_norm == "before_pool")
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        self.fc_norm = self._norm(config.final_norm == "after_pool")
        self.pre_logits = PreLogits(D, config.representation) if config.representation else nn.Identity()
        self.head = _head(config)
        self.head_dist = _head(config) if config.distillation_token else None
        initialise(self, config)

    # ── from image to logits ──

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes); to (B, T, classes) where `pool` is none."""
        return self._classify(self._encode(x))

    def features(self, x: Tensor, *, layer: int | None = None, as_grid: bool = False) -> Features:
        """Return the pooled vector and the tokens after `layer` (0-based, negative from the end).

        The model is treated as if it ended after that layer: its final norm, pooling and representation layer follow. A
        norm that comes after pooling is in `pooled` only. Raw tokens of a layer come from `trace`.
        """
        if as_grid and self.training and self.config.patch_dropout:
            raise InputError(
                "patch dropout leaves no whole grid of patches; call .eval() before features(as_grid=True)"
            )
        depth = None if layer is None else read_layer(layer, self.config.depth) + 1
        tokens = self.norm(self._encode(x, depth))
        pooled = self._pool(tokens)
        if as_grid:
            patches = tokens[:, self.config.layout.patches]
            tokens = patches.transpose(1, 2).unflatten(2, self.config.grid)
        return Features(pooled, tokens)

    def trace(self, x: Tensor, *, attention: Iterable[int] = (), tokens: Iterable[int] = ()) -> Traced:
        """Run `forward` and also return attention weights and tokens of the layers asked for.

        Layers whose attention is not asked for keep the fused kernel, so that memory grows with the request alone.
        """
        weights_at, tokens_at = (read_layers(layers, self.config.depth) for layers in (attention, tokens))
        weights_of: dict[int, Tensor] = {}
        tokens_of: dict[int, Tensor] = {}
        state, places = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i in weights_at.values():
                state, weights_of[i] = cast("Block", block).traced(state, places)
            else:
                state = self._run(block, state, places)
            if i in tokens_at.values():
                tokens_of[i] = state
        logits, pooling = self.classify(state)
        return Traced(
            logits,
            pooling=pooling,
            attention={asked: weights_of[layer] for asked, layer in weights_at.items()},
            tokens={asked: tokens_of[layer] for asked, layer in tokens_at.items()},
        )

    def distilled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class token's and the distillation token's logits apart, as DeiT's training needs them."""
        if self.head_dist is None:
            raise InputError("this model has no distillation token; build it with distillation_token=True")
        return self._both_heads(self.norm(self._encode(x)))

    # ── changing a model that exists ──

    def reset_head(self, classes: int) -> None:
        """Replace the head by a fresh one for `classes` classes; 0 leaves none. Everything else keeps its weights.

        The head's parameters are new objects: make the optimiser afterwards.
        """
        config, like = self.config.replace(classes=classes), next(self.parameters())
        heads = [_head(config).to(like).train(self.training) for _ in range(2 if config.distillation_token else 1)]
        self.reconfigure(config)
        self.head = heads[0]
        if config.distillation_token:
            self.head_dist = heads[1]
        initialise(self, config, only=("head", "head_dist"))

    def resize(
        self,
        image_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        *,
        method: Method = "timm",
    ) -> None:
        """Fit the model to another image or patch size, resampling position tables and patch kernels.

        `method` names whose way of resampling positions is followed; see `vitrail.models.resample`. What is resampled
        becomes new parameters: make the optimiser afterwards.
        """
        changes = {"image_size": image_size, "patch_size": patch_size}
        old, new = self.config, self.config.replace(**{k: v for k, v in changes.items() if v is not None})
        check_method(method)
        stem = resized_stem(self.patch_embed, new) if new.patch_size != old.patch_size else self.patch_embed
        owners = [self, *self.blocks, *(cast("Block", block).attn for block in self.blocks)]
        tables = [(owner, resized_tables(owner, old, new, method)) for owner in owners]
        places = self._computed_places(new)
        # Whatever can fail (too little memory, say) has been done by now, and the model is as it was.
        self.patch_embed = stem
        for owner, resized in tables:
            for name, parameter in resized.items():
                setattr(owner, name, parameter)
        self.reconfigure(new)
        self._set_places(places)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Move to a device without keeping values, as torch does; what follows from the config is computed again."""
        super().to_empty(device=device, recurse=recurse)
        self._set_places(self._computed_places(self.config))
        return self

    def reconfigure(self, config: ViTConfig) -> None:
        """Tell the model and its blocks what they have become; their weights must be so already."""
        self.config = config
        for block in self.blocks:
            cast("Block", block).config = config

    # ── the steps of the forward pass ──

    def embed(self, x: Tensor) -> tuple[Tensor, Places]:
        """Turn images into placed tokens (B, T, D), and say what the blocks need to know of their places."""
        check_images(x, self.config, next(self.parameters()))
        return self.placed(self.patch_embed(x))

    def placed(self, patches: Tensor) -> tuple[Tensor, Places]:
        """Do what `embed` does behind the stem: patches (B, N, D) become tokens that know their places."""
        config = self.config
        tokens = self._join(patches)
        table = read_table(self, config) if config.table_owner == "model" else None
        if table is not None and config.position_at == "stem":
            tokens, table = tokens + table, None
        tokens = self.pos_drop(tokens)
        places = Places(table, self.rotation, self.offsets)
        if self.training and config.patch_dropout:
            kept = drop_patches(config, len(tokens), tokens.device)
            tokens, places = pick(tokens, kept), locate(places, kept)
        return self.norm_pre(tokens), places

    def classify(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn tokens (B, T, D), as they leave the last block, into logits; also say where the pool `map` looks."""
        if self.attn_pool is None:
            return self._classify(tokens), None
        pooled, weights = self.attn_pool.traced(self._pooled_over(self.norm(tokens)))
        return self.head(self.pre_logits(self.fc_norm(pooled))), weights

    def _join(self, patches: Tensor) -> Tensor:
        """Put the special tokens before or behind the patches."""
        special = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        if not special:
            return patches
        expanded = [token.expand(patches.shape[0], -1, -1) for token in special]
        if self.config.class_token == "last":
            return torch.cat([patches, *reversed(expanded)], dim=1)
        return torch.cat([*expanded, patches], dim=1)

    def _encode(self, x: Tensor, depth: int | None = None) -> Tensor:
        """Run images through the first `depth` blocks, or through all: (B, T, D)."""
        tokens, places = self.embed(x)
        for block in list(self.blocks)[:depth]:
            tokens = self._run(block, tokens, places)
        return tokens

    def _run(self, block: nn.Module, tokens: Tensor, places: Places) -> Tensor:
        """Run one block, forgetting its activations until the backward pass where that is wanted."""
        if self.gradient_checkpointing and self.training:
            return cast("Tensor", checkpoint(block, tokens, places, use_reentrant=False))
        return cast("Tensor", block(tokens, places))

    def _classify(self, tokens: Tensor) -> Tensor:
        """Turn the encoder's output into logits."""
        tokens = self.norm(tokens)
        if self.head_dist is not None:
            by_class, by_distillation = self._both_heads(tokens)
            return (by_class + by_distillation) / 2
        return cast("Tensor", self.head(self._pool(tokens)))

    def _pool(self, tokens: Tensor) -> Tensor:
        """Reduce normed tokens (B, T, D) to what the head sees."""
        match self.config.pool:
            case "cls":
                pooled = tokens[:, 0 if self.config.class_token == "first" else -1]
            case "mean":
                pooled = self._pooled_over(tokens).mean(dim=1)
            case "map":
                pooled = cast("AttentionPool", self.attn_pool)(self._pooled_over(tokens))
            case _:
                pooled = tokens
        return cast("Tensor", self.pre_logits(self.fc_norm(pooled)))

    def _pooled_over(self, tokens: Tensor) -> Tensor:
        """Return the tokens that pooling looks at."""
        if self.config.pool_over == "all":
            return tokens
        # Counted from both ends, because patch dropout changes the number of patches.
        before, after = self.config.layout.patches.start, self.config.tokens - self.config.layout.patches.stop
        return tokens[:, before : tokens.shape[1] - after]

    def _both_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token and of the distillation token."""
        second = tokens[:, 1 if self.config.class_token == "first" else -2]
        second = self.pre_logits(self.fc_norm(second))
        return self.head(self._pool(tokens)), cast("nn.Module", self.head_dist)(second)

    # ── small helpers ──

    def _computed_places(self, config: ViTConfig) -> dict[str, Tensor | None]:
        """Compute the buffers that follow from the grid."""
        like = next(self.parameters())
        # On the meta device they are computed all the same, so that a model filled by assigned weights is whole.
        device = torch.device("cpu") if like.is_meta else like.device
        kind = config.position
        return {
            "pos_embed_fixed": sincos_2d(config.grid, config.width).to(device, like.dtype)
            if kind == "sincos_2d"
            else None,
            "rotation": rope_2d(config).to(device, like.dtype) if kind == "rope_2d" else None,
            "offsets": relative_offsets(config).to(device) if kind == "relative" else None,
        }

    def _set_places(self, places: dict[str, Tensor | None]) -> None:
        """Keep the computed buffers. They are not saved: the config says it all."""
        # Those that are there first: torch.export counts buffers that are None, but passes none for them.
        for name, table in sorted(places.items(), key=lambda item: item[1] is None):
            self.register_buffer(name, table, persistent=False)

    def _norm(self, wanted: bool) -> nn.Module:
        return nn.LayerNorm(self.config.width, eps=self.config.norm_eps) if wanted else nn.Identity()


def _head(config: ViTConfig) -> nn.Module:
    return nn.Linear(config.pooled_width, config.classes) if config.classes else nn.Identity()


def _token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, count, width))
