"""The Vision Transformer (arXiv 2010.11929).

    image (B, C, H, W)
      -> stem: one token per patch, (B, N, D)
      -> special tokens are concatenated and positions added, (B, T, D)
      -> encoder blocks
      -> pool, representation layer, head: (B, classes), or (B, classes, rows, columns) with the pool `patches`

Parameter names follow timm, so that the weights of a plain ViT load into either.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import ConfigError, InputError
from vitrail.models.blocks import AttentionPool, Block, PreLogits
from vitrail.models.checks import check_images, read_layer, read_layers
from vitrail.models.config import ViTConfig
from vitrail.models.initialise import initialise
from vitrail.models.position import (
    Method,
    TokenPositions,
    add_table,
    check_method,
    drop_patches,
    gather_tokens,
    keep_positions,
    read_table,
    relative_offsets,
    resized_tables,
    rope_2d,
    sincos_2d,
)
from vitrail.models.stems import STEMS, resized_stem


@dataclass(frozen=True)
class Features:
    """The features of images, before the head."""

    pooled: Tensor
    """The input of the head: (B, D), or (B, representation); with `pool="none"` one per token, (B, T, …), with
    `"patches"` one per patch, (B, N, …)."""
    tokens: Tensor
    """All tokens, (B, T, D); with `as_grid` the patches only, (B, D, rows, columns)."""


@dataclass(frozen=True)
class Traced:
    """The logits and the requested intermediate values of a forward pass, all differentiable."""

    logits: Tensor
    attention: dict[int, Tensor]
    """Attention weights (B, heads, T, T) of the requested layers; row i is the attention of token i."""
    tokens: dict[int, Tensor]
    """Output tokens (B, T, D) of the requested layers."""
    pooling: Tensor | None = None
    """Attention weights of the `map` pool over its tokens, (B, heads, tokens); None with any other pool."""


class ViT(nn.Module):
    """A Vision Transformer, built and initialised from a `ViTConfig`."""

    dist_token: nn.Parameter | None
    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    rotation: Tensor | None
    offsets: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise ConfigError(
                f"ViT takes a ViTConfig, found {config!r}; build a named model with vitrail.create('B/16')"
            )
        self.config = config
        self.gradient_checkpointing = False
        """Recompute each block's activations in the backward pass: less memory, more compute."""

        D = config.width
        self.patch_embed = STEMS[config.stem](config)
        self.register_parameter("cls_token", _token(1, D) if config.class_token != "none" else None)
        self.register_parameter("dist_token", _token(1, D) if config.distillation_token else None)
        self.register_parameter("reg_token", _token(config.registers, D) if config.registers else None)
        if config.table_owner == "model":
            add_table(self, config)
        self._set_position_buffers(self._position_buffers(config))
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

    # ── inference ──

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes).

        They are (B, T, classes) with `pool="none"`, and (B, classes, rows, columns), one per patch, with `"patches"`.
        """
        return self._classify(*self._layers_read(*self.embed(x)))

    def features(self, x: Tensor, *, layer: int | None = None, as_grid: bool = False) -> Features:
        """Return the pooled vector and the tokens after `layer` (0-based, negative from the end).

        The model is truncated after that layer; final norm, pooling and representation layer still apply. A norm after
        pooling affects `pooled` only. Use `trace` for the raw tokens of a layer. If the head reads several layers
        (`head_layers`), `pooled` holds the patches of `layer` alone.
        """
        if as_grid and self.training and self.config.patch_dropout:
            raise InputError("patch dropout removes patches from the grid; call .eval() before features(as_grid=True)")
        if layer is None:
            layers = self._layers_read(*self.embed(x))
        else:
            layers = [self._encode(x, read_layer(layer, self.config.depth) + 1)]
        layers = [self.norm(tokens) for tokens in layers]
        tokens, pooled = layers[-1], self._pool(*layers)
        if as_grid:
            patches = tokens[:, self.config.layout.patches]
            tokens = patches.transpose(1, 2).unflatten(2, self.config.grid)
        return Features(pooled, tokens)

    def trace(self, x: Tensor, *, attention: Iterable[int] = (), tokens: Iterable[int] = ()) -> Traced:
        """Run `forward` and also return attention weights and tokens of the requested layers.

        All other layers keep the fused attention kernel, so memory grows only with the requested layers.
        """
        weights_at, tokens_at = (read_layers(layers, self.config.depth) for layers in (attention, tokens))
        weights_of: dict[int, Tensor] = {}
        tokens_of: dict[int, Tensor] = {}
        read: list[Tensor] = []
        state, positions = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i in weights_at.values():
                state, weights_of[i] = cast("Block", block).traced(state, positions)
            else:
                state = self._run(block, state, positions)
            if i in tokens_at.values():
                tokens_of[i] = state
            if i in self.config.layers_read:
                read.append(state)
        logits, pooling = self.classify(*read or [state])
        return Traced(
            logits,
            pooling=pooling,
            attention={key: weights_of[layer] for key, layer in weights_at.items()},
            tokens={key: tokens_of[layer] for key, layer in tokens_at.items()},
        )

    def distilled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of class and distillation token separately, for DeiT training."""
        if self.head_dist is None:
            raise InputError("this model has no distillation token; build it with distillation_token=True")
        return self._both_heads(self.norm(self._encode(x)))

    # ── changing a model ──

    def reset_head(self, classes: int) -> None:
        """Replace the head with a new one for `classes` classes; 0 removes it. All other weights are kept.

        The head's parameters are new objects: create the optimizer afterwards.
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
        """Change the image or patch size, resampling position tables and patch kernels.

        `method` is the resampling method for positions; see `vitrail.models.position`. Resampled tensors are new
        parameters: create the optimizer afterwards.
        """
        changes = {"image_size": image_size, "patch_size": patch_size}
        old, new = self.config, self.config.replace(**{k: v for k, v in changes.items() if v is not None})
        check_method(method)
        stem = resized_stem(self.patch_embed, new) if new.patch_size != old.patch_size else self.patch_embed
        owners = [self, *self.blocks, *(cast("Block", block).attn for block in self.blocks)]
        tables = [(owner, resized_tables(owner, old, new, method)) for owner in owners]
        positions = self._position_buffers(new)
        # Everything that can fail, such as an allocation, is done by now; until here the model is unchanged.
        self.patch_embed = stem
        for owner, resized in tables:
            for name, parameter in resized.items():
                setattr(owner, name, parameter)
        self.reconfigure(new)
        self._set_position_buffers(positions)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Move to a device without copying values, as in torch; buffers that follow from the config are recomputed."""
        super().to_empty(device=device, recurse=recurse)
        self._set_position_buffers(self._position_buffers(self.config))
        return self

    def reconfigure(self, config: ViTConfig) -> None:
        """Set the config of the model and its blocks; the weights must match it already."""
        self.config = config
        for block in self.blocks:
            cast("Block", block).config = config

    # ── steps of the forward pass ──

    def embed(self, x: Tensor) -> tuple[Tensor, TokenPositions]:
        """Embed images as tokens (B, T, D) with positions; also return the position information for the blocks."""
        check_images(x, self.config, next(self.parameters()))
        return self.add_positions(self.patch_embed(x))

    def add_positions(self, patches: Tensor) -> tuple[Tensor, TokenPositions]:
        """Do everything in `embed` after the stem: add special tokens and positions to patches (B, N, D)."""
        config = self.config
        tokens = self._join(patches)
        table = read_table(self, config) if config.table_owner == "model" else None
        if table is not None and config.position_at == "stem":
            tokens, table = tokens + table, None
        tokens = self.pos_drop(tokens)
        positions = TokenPositions(table, self.rotation, self.offsets)
        if self.training and config.patch_dropout:
            kept = drop_patches(config, len(tokens), tokens.device)
            tokens, positions = gather_tokens(tokens, kept), keep_positions(positions, kept)
        return self.norm_pre(tokens), positions

    def run_blocks(self, tokens: Tensor, positions: TokenPositions, depth: int | None = None) -> Tensor:
        """Run embedded tokens (B, T, D) through the first `depth` blocks, or all; the final norm is not applied."""
        for block in list(self.blocks)[:depth]:
            tokens = self._run(block, tokens, positions)
        return tokens

    def classify(self, *layers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map the output tokens (B, T, D) of each layer that the head reads, usually the last block, to logits.

        Also return the attention of the `map` pool.
        """
        if self.attn_pool is None:
            return self._classify(*layers), None
        pooled, weights = self.attn_pool.traced(self._pooled_over(self.norm(layers[-1])))
        return self.head(self.pre_logits(self.fc_norm(pooled))), weights

    def _join(self, patches: Tensor) -> Tensor:
        """Concatenate the special tokens and the patches."""
        special = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        if not special:
            return patches
        expanded = [token.expand(patches.shape[0], -1, -1) for token in special]
        if self.config.class_token == "last":
            return torch.cat([patches, *reversed(expanded)], dim=1)
        return torch.cat([*expanded, patches], dim=1)

    def _encode(self, x: Tensor, depth: int | None = None) -> Tensor:
        """Run images through the first `depth` blocks, or all: (B, T, D)."""
        tokens, positions = self.embed(x)
        return self.run_blocks(tokens, positions, depth)

    def _layers_read(self, tokens: Tensor, positions: TokenPositions) -> list[Tensor]:
        """Run embedded tokens through all blocks; return the outputs (B, T, D) of the layers that the head reads."""
        read = []
        for i, block in enumerate(self.blocks):
            tokens = self._run(block, tokens, positions)
            if i in self.config.layers_read:
                read.append(tokens)
        return read or [tokens]

    def _run(self, block: nn.Module, tokens: Tensor, positions: TokenPositions) -> Tensor:
        """Run one block, with gradient checkpointing if enabled."""
        if self.gradient_checkpointing and self.training:
            return cast("Tensor", checkpoint(block, tokens, positions, use_reentrant=False))
        return cast("Tensor", block(tokens, positions))

    def _classify(self, *layers: Tensor) -> Tensor:
        """Map the outputs (B, T, D) of the layers that the head reads to logits."""
        normalised = [self.norm(tokens) for tokens in layers]
        if self.head_dist is not None:
            by_class, by_distillation = self._both_heads(normalised[-1])
            return (by_class + by_distillation) / 2
        outputs: Tensor = self.head(self._pool(*normalised))
        if self.config.pool == "patches" and self.config.classes:
            outputs = outputs.transpose(1, 2).unflatten(2, self.config.grid)
        return outputs

    def _pool(self, *layers: Tensor) -> Tensor:
        """Pool the normalised tokens (B, T, D) of the layers that the head reads into its input."""
        tokens = layers[-1]
        match self.config.pool:
            case "cls":
                pooled = tokens[:, 0 if self.config.class_token == "first" else -1]
            case "mean":
                pooled = self._pooled_over(tokens).mean(dim=1)
            case "map":
                pooled = cast("AttentionPool", self.attn_pool)(self._pooled_over(tokens))
            case "patches":
                patches = [self.fc_norm(self._pooled_over(layer)) for layer in layers]
                return cast("Tensor", self.pre_logits(torch.cat(patches, dim=-1)))
            case _:
                pooled = tokens
        return cast("Tensor", self.pre_logits(self.fc_norm(pooled)))

    def _pooled_over(self, tokens: Tensor) -> Tensor:
        """Return the tokens that are pooled."""
        if self.config.pool_over == "all":
            return tokens
        # Count from both ends, because patch dropout changes the number of patches.
        before, after = self.config.layout.patches.start, self.config.tokens - self.config.layout.patches.stop
        return tokens[:, before : tokens.shape[1] - after]

    def _both_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token and of the distillation token."""
        second = tokens[:, 1 if self.config.class_token == "first" else -2]
        second = self.pre_logits(self.fc_norm(second))
        return self.head(self._pool(tokens)), cast("nn.Module", self.head_dist)(second)

    # ── small helpers ──

    def _position_buffers(self, config: ViTConfig) -> dict[str, Tensor | None]:
        """Compute the position buffers for the config's grid."""
        like = next(self.parameters())
        # Computed even for a meta model, so that it is complete once weights are assigned.
        device = torch.device("cpu") if like.is_meta else like.device
        kind = config.position
        return {
            "pos_embed_fixed": sincos_2d(config.grid, config.width).to(device, like.dtype)
            if kind == "sincos_2d"
            else None,
            "rotation": rope_2d(config).to(device, like.dtype) if kind == "rope_2d" else None,
            "offsets": relative_offsets(config).to(device) if kind == "relative" else None,
        }

    def _set_position_buffers(self, positions: dict[str, Tensor | None]) -> None:
        """Register the computed buffers. They are not saved, because they follow from the config."""
        # Non-None buffers first: torch.export counts None buffers, but does not pass them.
        for name, table in sorted(positions.items(), key=lambda item: item[1] is None):
            self.register_buffer(name, table, persistent=False)

    def _norm(self, enabled: bool) -> nn.Module:
        return nn.LayerNorm(self.config.width, eps=self.config.norm_eps) if enabled else nn.Identity()


def _head(config: ViTConfig) -> nn.Module:
    return nn.Linear(config.pooled_width, config.classes) if config.classes else nn.Identity()


def _token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, count, width))
