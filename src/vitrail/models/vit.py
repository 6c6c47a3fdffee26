"""The Vision Transformer (arXiv 2010.11929).

    picture (B, C, H, W)
      -> stem: one token a patch, (B, N, D)
      -> class token and other special tokens join, positions are added, (B, T, D)
      -> encoder blocks
      -> pool, representation layer, head: (B, classes)

Parameter names are timm's, so that a plain ViT's weights load into either.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import InputError
from vitrail.models.blocks import Block
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
    resize_table,
    rope_2d,
)
from vitrail.models.resample import Method, check_method, resample_offsets
from vitrail.models.stems import STEMS, resized_stem


class Features(NamedTuple):
    """What a picture looks like to the model, before the head."""

    pooled: Tensor
    """(B, D): what the head sees; (B, T, D) where `pool` is none."""
    tokens: Tensor
    """(B, T, D), every token in order; or (B, D, rows, columns), the patches only, with `as_grid`."""


class Traced(NamedTuple):
    """A forward pass with the intermediate values that were asked for, all differentiable."""

    logits: Tensor
    attention: dict[int, Tensor]
    """Attention weights (B, heads, T, T) of the layers asked for; row i says where token i looks."""
    tokens: dict[int, Tensor]
    """Tokens (B, T, D) as they leave the layers asked for."""


class ViT(nn.Module):
    """A Vision Transformer built from a `ViTConfig`, freshly initialised."""

    dist_token: nn.Parameter | None
    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    rotation: Tensor | None
    offsets: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
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
        self._compute_places(config)
        self.pos_drop = nn.Dropout(config.embed_dropout)
        self.norm_pre = self._norm(config.norm_before_blocks)

        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))

        self.norm = self._norm(config.final_norm == "before_pool")
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        self.fc_norm = self._norm(config.final_norm == "after_pool")
        self.pre_logits = PreLogits(D, config.representation) if config.representation else nn.Identity()
        self.head = self._new_head()
        self.head_dist = self._new_head() if config.distillation_token else None
        initialise(self, config)

    # ── from picture to logits ──

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures (B, C, H, W) to logits (B, classes); to (B, T, classes) where `pool` is none."""
        return self._classify(self._encode(x))

    def features(self, x: Tensor, *, layer: int | None = None, as_grid: bool = False) -> Features:
        """Return the pooled vector and the tokens after `layer` (0-based, negative from the end), normed.

        The model is treated as if it ended after that layer: its final norm, pooling and representation layer follow.
        Raw tokens of a layer come from `trace`.
        """
        if as_grid and self.training and self.config.patch_dropout:
            raise InputError(
                "patch dropout leaves no whole grid of patches; call .eval() before features(as_grid=True)"
            )
        depth = None if layer is None else self._layer(layer) + 1
        tokens = self.norm(self._encode(x, depth))
        pooled = self._pool(tokens)
        if as_grid:
            patches = tokens[:, self.config.layout.patches]
            tokens = patches.transpose(1, 2).unflatten(2, self.config.grid)
        return Features(pooled, tokens)

    def trace(self, x: Tensor, *, attention: Sequence[int] = (), tokens: Sequence[int] = ()) -> Traced:
        """Run `forward` and also return attention weights and tokens of the layers asked for.

        Layers whose attention is not asked for keep the fused kernel, so that memory grows with the request alone.
        """
        traced_layers, kept_layers = ({self._layer(layer) for layer in asked} for asked in (attention, tokens))
        weights_of: dict[int, Tensor] = {}
        tokens_of: dict[int, Tensor] = {}
        state, places = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i in traced_layers:
                state, weights_of[i] = cast("Block", block).traced(state, places)
            else:
                state = self._run(block, state, places)
            if i in kept_layers:
                tokens_of[i] = state
        return Traced(
            self._classify(state),
            attention={layer: weights_of[self._layer(layer)] for layer in attention},
            tokens={layer: tokens_of[self._layer(layer)] for layer in tokens},
        )

    def distilled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class token's and the distillation token's logits apart, as DeiT's training needs them."""
        if self.head_dist is None:
            raise InputError("this model has no distillation token; build it with distillation_token=True")
        return self._both_heads(self.norm(self._encode(x)))

    # ── changing a model that exists ──

    def reset_head(self, classes: int) -> None:
        """Replace the head by a fresh one for `classes` classes; 0 leaves none. Everything else keeps its weights."""
        self.config = self.config.replace(classes=classes)
        like = next(self.parameters())
        self.head = self._new_head().to(like)
        if self.head_dist is not None:
            self.head_dist = self._new_head().to(like)
        initialise(self, self.config, only=("head", "head_dist"))

    def resize(
        self,
        image_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        *,
        method: Method = "timm",
    ) -> None:
        """Fit the model to another picture or patch size, resampling position tables and patch kernels.

        `method` names whose way of resampling positions is followed; see `vitrail.models.resample`.
        """
        changes = {"image_size": image_size, "patch_size": patch_size}
        old, new = self.config, self.config.replace(**{k: v for k, v in changes.items() if v is not None})
        check_method(method)
        if new.patch_size != old.patch_size:
            self.patch_embed = resized_stem(self.patch_embed, new)
        self._resize_positions(old, new, method)
        self.config = new

    def _resize_positions(self, old: ViTConfig, new: ViTConfig, method: Method) -> None:
        resize_table(self, old, new, method)
        for block in cast("list[Block]", list(self.blocks)):
            block.config = new
            resize_table(block, old, new, method)
            if block.attn.rel_pos is not None:
                rows = resample_offsets(block.attn.rel_pos.detach(), old.grid, new.grid)
                block.attn.rel_pos = nn.Parameter(rows, requires_grad=block.attn.rel_pos.requires_grad)
        self._compute_places(new)

    # ── the steps of the forward pass ──

    def embed(self, x: Tensor) -> tuple[Tensor, Places]:
        """Turn pictures into placed tokens (B, T, D), and say what the blocks need to know of their places."""
        self._check(x)
        config = self.config
        tokens = self._join(self.patch_embed(x))
        table = read_table(self, config) if config.table_owner == "model" else None
        if table is not None and config.position_at == "stem":
            tokens, table = tokens + table, None
        tokens = self.pos_drop(tokens)
        places = Places(table, self.rotation, self.offsets)
        if self.training and config.patch_dropout:
            kept = drop_patches(config, x.shape[0], x.device)
            tokens, places = pick(tokens, kept), locate(places, kept)
        return self.norm_pre(tokens), places

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
        """Run pictures through the first `depth` blocks, or through all: (B, T, D)."""
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
        layout = self.config.layout
        if self.config.pool_over == "patches" and self.config.pool in ("mean", "map"):
            # Counted from both ends, because patch dropout changes the number of patches.
            tokens = tokens[:, layout.patches.start : tokens.shape[1] - (layout.total - layout.patches.stop)]
        match self.config.pool:
            case "cls":
                pooled = tokens[:, 0 if layout.class_token == 0 else -1]
            case "mean":
                pooled = tokens.mean(dim=1)
            case "map":
                pooled = cast("AttentionPool", self.attn_pool)(tokens)
            case _:
                pooled = tokens
        return cast("Tensor", self.pre_logits(self.fc_norm(pooled)))

    def _both_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token and of the distillation token."""
        second = tokens[:, 1 if self.config.class_token == "first" else -2]
        second = self.pre_logits(self.fc_norm(second))
        return self.head(self._pool(tokens)), cast("nn.Module", self.head_dist)(second)

    # ── small helpers ──

    def _compute_places(self, config: ViTConfig) -> None:
        """Compute the buffers that follow from the grid. They are not saved: the config says it all."""
        device = next(self.parameters()).device
        device = torch.device("cpu") if device.type == "meta" else device
        rotation = rope_2d(config).to(device) if config.position == "rope_2d" else None
        offsets = relative_offsets(config).to(device) if config.position == "relative" else None
        self.register_buffer("rotation", rotation, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)

    def _norm(self, wanted: bool) -> nn.Module:
        return nn.LayerNorm(self.config.width, eps=self.config.norm_eps) if wanted else nn.Identity()

    def _new_head(self) -> nn.Module:
        return nn.Linear(self.config.pooled_width, self.config.classes) if self.config.classes else nn.Identity()

    def _layer(self, layer: int) -> int:
        """Read a layer's number, which may count from the end."""
        depth = self.config.depth
        if not -depth <= layer < depth:
            raise InputError(
                f"layer {layer} does not exist: this model has layers 0 to {depth - 1} (or -1 for the last)"
            )
        return layer % depth

    def _check(self, x: Tensor) -> None:
        """Refuse what is not a batch of pictures of this model's size."""
        config = self.config
        if x.ndim != 4:
            hint = "; add a batch axis with x[None]" if x.ndim == 3 else ""
            raise InputError(
                f"expected pictures (batch, channels, height, width), found a tensor of {x.ndim} axes, "
                f"{tuple(x.shape)}{hint}"
            )
        if x.shape[1] != config.channels:
            last = x.shape[3] == config.channels
            remedy = f"convert the picture, or build the model with channels={x.shape[1]}"
            raise InputError(
                f"this model takes pictures of {config.channels} channels, found {x.shape[1]}; "
                + ("the channels seem to be last, so use x.permute(0, 3, 1, 2)" if last else remedy)
            )
        if tuple(x.shape[2:]) != config.image_size:
            found, wanted = (f"{h}×{w}" for h, w in (x.shape[2:], config.image_size))
            raise InputError(
                f"this model takes pictures of {wanted} pixels, found {found}; resize the pictures, "
                f"or call model.resize(({x.shape[2]}, {x.shape[3]}))"
            )
        if not x.is_floating_point():
            raise InputError(
                f"expected normalised floating-point pictures, found {x.dtype}; preprocess the picture first"
            )


def _token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, count, width))
