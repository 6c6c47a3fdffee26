"""`ViTConfig`: every option of a Vision Transformer, as one frozen, validated value.

This file does not import torch, so that reading, validating and printing a config is fast.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from vitrail.errors import ConfigError
from vitrail.schema import LIMIT, Count, Frozen, Index, Pair, Positive, Rate, Sequence

GROUPS = 32
"""Groups of every GroupNorm in the ResNet."""
RELATIVE_LIMIT = 10_000
"""The maximum number of tokens with relative positions, which store a value for every pair."""

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"]
Initialisation = Literal["paper", "timm", "torchvision", "lucidrains"]

FIELD_ALIASES = {
    "num_classes": "classes", "num_labels": "classes", "n_classes": "classes",
    "img_size": "image_size", "input_size": "image_size",
    "in_chans": "channels", "in_channels": "channels", "num_channels": "channels",
    "embed_dim": "width", "hidden_size": "width", "dim": "width", "mlp_ratio": "mlp_width", "mlp_dim": "mlp_width",
    "num_layers": "depth", "num_hidden_layers": "depth", "num_heads": "heads", "num_attention_heads": "heads",
    "global_pool": "pool", "reg_tokens": "registers", "init_values": "layer_scale",
    "drop_path_rate": "stochastic_depth", "pos_drop_rate": "embed_dropout",
    "attn_drop_rate": "attention_dropout", "patch_drop_rate": "patch_dropout",
}  # fmt: skip
"""Argument names of timm, transformers, torchvision and vit-pytorch, mapped to fields of `ViTConfig`."""


def value_here(name: str, value: object) -> str:
    """Return how the value of another library's argument is written here; "…" where that depends on the model."""
    if name == "mlp_ratio":
        return "…"
    return repr({"avg": "mean", "token": "cls"}.get(str(value), value) if name == "global_pool" else value)


class ConvLayer(Frozen):
    """One convolution + BatchNorm + ReLU of the `conv_stem` stem."""

    channels: Positive
    kernel: Positive = 3
    stride: Positive = 2


class ResNet(Frozen):
    """The ResNet of the `resnet` stem: weight-standardised convolutions with GroupNorm.

    Every stage after the first doubles the stride of the root.
    """

    depths: Annotated[tuple[Positive, ...], Sequence] = (3, 4, 9)
    """Bottleneck blocks in each stage. () is the root alone, as in R+Ti/16."""
    width_factor: Annotated[float, Field(ge=0.5, le=64, multiple_of=0.5)] = 1.0
    """Multiplies the 64 channels of the root, and so those of every stage. A multiple of 0.5, because of GroupNorm's
    groups."""
    root_stride: Literal[4, 2, 1] = 4
    """Stride of the root. 4: a 7×7 convolution of stride 2, then max-pooling. 2 and 1, for images of 64 or 32 pixels: a
    3×3 convolution with or without stride, and no pooling."""
    numerics: Literal["google", "timm"] = "google"
    """The epsilons: google divides by (std + 1e-5) and has GroupNorm eps 1e-6; timm divides by
    sqrt(var + 1e-8) and has eps 1e-5."""

    @property
    def root_channels(self) -> int:
        """Channels after the root convolution."""
        return int(64 * self.width_factor)

    @property
    def stride(self) -> int:
        """The total stride."""
        return self.root_stride << max(0, len(self.depths) - 1)

    @property
    def out_channels(self) -> int:
        """Channels of the feature map."""
        return self.root_channels * (4 << (len(self.depths) - 1) if self.depths else 1)


class Layout(NamedTuple):
    """The index of each kind of token in the sequence."""

    patches: slice
    class_token: int | None
    distillation_token: int | None
    registers: slice
    total: int


class ViTConfig(Frozen):
    """A Vision Transformer. The defaults are the paper's ViT-B/16 at 224×224 (arXiv 2010.11929), with the exact GELU
    of every PyTorch library where Google's code computes `gelu_tanh`."""

    aliases: ClassVar[Mapping[str, str]] = FIELD_ALIASES

    # The image and its patches
    image_size: Pair = (224, 224)
    """Height and width of the image, in pixels."""
    patch_size: Pair = (16, 16)
    """Height and width of a patch, in pixels; for convolutional stems, the total stride."""
    channels: Positive = 3
    """Channels of the image."""
    stem: Literal["linear", "conv", "linear_norm", "conv_stem", "resnet"] = "conv"
    """The patch embedding. `linear` and `conv` compute the same function."""
    conv_stem: Annotated[tuple[ConvLayer, ...], Sequence] | None = None
    """The layers of `conv_stem`. None: 3×3 convolutions of stride 2 whose channels double up to `width`."""
    resnet: ResNet | None = None
    """The config of the `resnet` stem. None: depths (3, 4, 9), the paper's R50 without the fourth stage."""
    patch_bias: bool = True
    """Whether the patch projection has a bias (not in CLIP)."""

    # Special tokens
    class_token: Literal["first", "last", "none"] = "first"
    """Position of the class token. `last` puts all special tokens after the patches, and the class token at the end."""
    registers: Count = 0
    """Number of register tokens (arXiv 2309.16588)."""
    distillation_token: bool = False
    """A second class token with its own head (DeiT); the logits are the mean of both heads."""

    # Positions
    position: Literal["none", "learned_1d", "learned_2d", "relative", "sincos_2d", "rope_2d"] = "learned_1d"
    """The position embedding. `relative` and `rope_2d` act inside every attention layer; the others are added."""
    position_at: Literal["stem", "every_block", "shared"] = "stem"
    """Where the table is added: once after the stem, before every block from a separate table per block, or before
    every block from one shared table (the paper's Table 8)."""
    position_covers: Literal["patches", "class", "all"] | None = None
    """Which tokens have a row in the `learned_1d` table: patches only, also class and distillation token, or also
    registers. None: all. Every other kind of position covers patches only."""
    rope_theta: Annotated[float, Field(gt=0, le=1e9)] = 100.0
    """The base of the `rope_2d` frequencies."""

    # The encoder
    width: Positive = 768
    depth: Count = 12
    """Number of blocks. 0: no encoder; the `resnet` stem is then a plain ResNet, whose feature map is pooled."""
    heads: Positive = 12
    head_dim: Positive | None = None
    """Width of one head. None: width / heads."""
    mlp_width: Positive | None = None
    """Hidden width of the MLP. None: 4 × width."""
    activation: Activation = "gelu"
    norm_order: Literal["pre", "post"] = "pre"
    """`pre`: x + f(norm(x)), the paper's. `post`: norm(x + f(x)), the original Transformer's."""
    norm_before_blocks: bool = False
    """A LayerNorm between the embedding and the first block (CLIP)."""
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False
    """LayerNorm on the queries and keys of every head."""
    out_proj: bool = True
    """Whether attention has an output projection (lucidrains omits it for a single head of full width)."""
    proj_bias: bool = True
    """Whether the output projection has a bias."""
    mlp_bias: bool = True
    """Whether both layers of the MLP have biases."""
    layer_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Initial value of LayerScale. None: no LayerScale."""

    # Regularisation: active only in training
    embed_dropout: Rate = 0.0
    """After the position embedding."""
    attention_dropout: Rate = 0.0
    """On the attention weights."""
    proj_dropout: Rate = 0.0
    """After the attention's output projection."""
    mlp_dropout: Rate = 0.0
    """After each of the MLP's two layers."""
    stochastic_depth: Rate = 0.0
    """Drop probability of the last block's branches; it grows linearly from 0 at the first block."""
    patch_dropout: Rate = 0.0
    """Fraction of the patches dropped before the first block."""

    # Pooling and head
    pool: Literal["cls", "mean", "map", "none", "patches"] = "cls"
    """`cls` takes the class token, `mean` averages, `map` attends with a learned query, `none` keeps every token.
    `patches` keeps the patches only: the logits are a map, (B, classes, rows, columns)."""
    pool_over: Literal["patches", "all"] = "patches"
    """Which tokens `mean` and `map` pool."""
    head_layers: Annotated[tuple[Index, ...], Sequence] = ()
    """With `pool="patches"`: the layers whose patches the head reads, each after the final norm, concatenated. 0-based,
    negative from the end, in ascending order, with the last layer. (): the last layer only."""
    final_norm: Literal["before_pool", "after_pool", "none"] = "before_pool"
    """`after_pool` is applied to each patch with `pool="patches"`, and to each token with `none`."""
    representation: Positive | None = None
    """Width of a tanh layer before the head (`pre_logits`). None: no such layer."""
    classes: Count = 1000
    """Outputs of the head. 0: no head; the model returns the pooled features."""
    init: Initialisation = "paper"
    """The initialisation scheme of a new model."""
    head_bias: Annotated[float, Field(ge=-100, le=100)] | None = None
    """Initial bias of the head; Google's code uses -10 for sigmoid losses. None: by `init`."""

    # ── derived values ──

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.width // self.heads

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends: a block, or the `map` pool."""
        return self.depth > 0 or self.pool == "map"

    @property
    def heads_fill_width(self) -> bool:
        """Whether heads × head width equals the model width, as in every plain ViT."""
        return self.heads * self.head_width == self.width

    @property
    def mlp_hidden(self) -> int:
        """Hidden width of the MLP."""
        return self.mlp_width if self.mlp_width is not None else 4 * self.width

    @property
    def stem_layers(self) -> tuple[ConvLayer, ...]:
        """The convolutions of `conv_stem`, with the default resolved."""
        if self.conv_stem is not None:
            return self.conv_stem
        halvings = self.patch_size[0].bit_length() - 1
        return tuple(ConvLayer(channels=self.width >> i) for i in reversed(range(halvings)))

    @property
    def stem_resnet(self) -> ResNet:
        """The ResNet of the hybrid, with the default resolved."""
        return self.resnet if self.resnet is not None else ResNet()

    @property
    def covers(self) -> Literal["patches", "class", "all"]:
        """Which tokens have a row in the position table."""
        return self.position_covers or ("all" if self.position == "learned_1d" else "patches")

    @property
    def resnet_numerics(self) -> Literal["google", "timm"] | None:
        """The epsilons of the hybrid's ResNet; None without a ResNet."""
        return self.stem_resnet.numerics if self.stem == "resnet" else None

    @property
    def registers_placed(self) -> bool:
        """Whether registers have rows in the position table."""
        return self.registers > 0 and self.covers == "all"

    @property
    def table_owner(self) -> Literal["model", "blocks", "none"]:
        """Which module holds the added table; a computed table is never copied into the blocks."""
        if self.position not in ("learned_1d", "learned_2d", "sincos_2d"):
            return "none"
        return "blocks" if self.position_at == "every_block" and self.position != "sincos_2d" else "model"

    @property
    def layout(self) -> Layout:
        """The order of the tokens: class, distillation, registers, patches; reversed if the class token is last."""
        has_class, special = self.class_token != "none", self.special_tokens
        patches, total = self.patches, self.patches + special
        if self.class_token == "last":
            registers = slice(patches, patches + self.registers)
            distillation = total - 2 if self.distillation_token else None
            return Layout(slice(0, patches), total - 1, distillation, registers, total)
        return Layout(
            patches=slice(special, total),
            class_token=0 if has_class else None,
            distillation_token=1 if self.distillation_token else None,
            registers=slice(special - self.registers, special),
            total=total,
        )

    @property
    def encoder_text(self) -> str:
        """The size of the encoder in words; of a plain ResNet, that of the ResNet."""
        if not self.depth:
            blocks = ", ".join(map(str, self.stem_resnet.depths))
            return f"ResNet with {blocks} bottleneck blocks and {self.width:,} output channels"
        blocks, heads = ("s" * (count != 1) for count in (self.depth, self.heads))
        return f"{self.depth} block{blocks} of width {self.width:,} with {self.heads} head{heads}"

    @property
    def special_tokens(self) -> int:
        """Number of tokens that are not patches."""
        return int(self.class_token != "none") + int(self.distillation_token) + self.registers

    @property
    def tokens(self) -> int:
        """Sequence length of the encoder."""
        return self.patches + self.special_tokens

    @property
    def has_pool(self) -> bool:
        """Whether the tokens are pooled into one vector per image."""
        return self.pool not in ("none", "patches")

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The layers whose outputs the head reads, 0-based; () without encoder blocks."""
        return tuple(layer % self.depth for layer in self.head_layers) or tuple(range(self.depth)[-1:])

    @property
    def pooled_width(self) -> int:
        """Width of the head's input."""
        return self.representation or self.width * max(1, len(self.head_layers))

    def resolved(self) -> Self:
        """Return an equal config with all derived defaults made explicit, for saving."""
        return self.replace(
            head_dim=self.head_width,
            mlp_width=self.mlp_hidden,
            conv_stem=self.stem_layers if self.stem == "conv_stem" else None,
            resnet=self.stem_resnet if self.stem == "resnet" else None,
            position_covers=self.covers,
            head_layers=self.layers_read if self.head_layers else (),
        )

    # ── validation ──

    @model_validator(mode="after")
    def _patches_fit_image(self) -> Self:
        for side, image, patch in zip(("height", "width"), self.image_size, self.patch_size, strict=True):
            if image % patch:
                below, above = image - image % patch, image - image % patch + patch
                choices = f"{below} or {above}" if below else str(above)
                raise ConfigError(
                    f"image {side} {image} is not a multiple of patch {side} {patch}; use an image {side} of "
                    f"{choices}, or another patch size"
                )
        limit = RELATIVE_LIMIT if self.position == "relative" else LIMIT
        if self.tokens > limit:
            raise ConfigError(
                f"images of {_by(self.image_size)} in patches of {_by(self.patch_size)} make {self.tokens:,} tokens; "
                f"at most {limit:,} are allowed with position {self.position!r}, so use larger patches"
            )
        return self

    @model_validator(mode="after")
    def _heads_fit_width(self) -> Self:
        if not self.has_attention:
            return self
        if self.head_dim is None and self.width % self.heads:
            raise ConfigError(
                f"width {self.width} is not a multiple of heads {self.heads}; change one, or set head_dim to choose "
                f"the width of a head freely"
            )
        if not self.out_proj and self.heads * self.head_width != self.width:
            raise ConfigError(
                f"without out_proj the heads must add up to width {self.width}, but {self.heads} heads × "
                f"{self.head_width} = {self.heads * self.head_width}; set out_proj=True or change head_dim"
            )
        return self

    @model_validator(mode="after")
    def _stem_fits_patches(self) -> Self:
        for option in ("conv_stem", "resnet"):
            if getattr(self, option) is not None and self.stem != option:
                raise ConfigError(f"{option} is set but stem is {self.stem!r}; set stem={option!r} or omit {option}")
        if self.stem == "resnet":
            stride = self.stem_resnet.stride
            if any(side % stride for side in self.patch_size):
                raise ConfigError(
                    f"patch_size {_by(self.patch_size)} is not a multiple of the ResNet's total stride {stride}; "
                    f"change patch_size, or resnet.depths"
                )
        if self.stem == "conv_stem":
            self._check_conv_stem()
        return self

    def _check_conv_stem(self) -> None:
        height, width = self.patch_size
        if self.conv_stem is None and (height != width or height & (height - 1) or height == 1):
            raise ConfigError(
                f"the default conv_stem needs a square patch of 2, 4, 8, 16, …, but patch_size is "
                f"{_by(self.patch_size)}; set conv_stem to a list of layers"
            )
        if self.conv_stem is None and self.width % (height // 2):
            raise ConfigError(
                f"the default conv_stem doubles its channels up to width {self.width}, which is not a multiple of "
                f"{height // 2}; set conv_stem to a list of layers"
            )
        stride = math.prod(layer.stride for layer in self.stem_layers)
        if (stride, stride) != self.patch_size:
            raise ConfigError(
                f"the strides of conv_stem multiply to {stride}, but patch_size is {_by(self.patch_size)}; "
                f"make them equal"
            )
        for layer in self.stem_layers:
            if layer.kernel % 2 == 0 and layer.stride == 1:
                raise ConfigError(
                    f"a conv_stem layer with even kernel {layer.kernel} and stride 1 shrinks the image by a pixel; "
                    f"use an odd kernel"
                )

    @model_validator(mode="after")
    def _works_without_encoder(self) -> Self:
        if self.depth:
            return self
        if self.stem != "resnet":
            raise ConfigError(
                f"depth=0 leaves only the stem, which must be 'resnet', not {self.stem!r}; set depth above 0"
            )
        resnet = self.stem_resnet
        needed = {
            "width": resnet.out_channels,
            "patch_size": (resnet.stride, resnet.stride),
            "class_token": "none",
            "registers": 0,
            "position": "none",
            "final_norm": "none",
            "norm_before_blocks": False,
            "patch_dropout": 0.0,
        }
        wrong = [f"{name}={value!r}" for name, value in needed.items() if getattr(self, name) != value]
        if wrong:
            raise ConfigError(f"with depth=0 the model is a plain ResNet, which needs {', '.join(wrong)}")
        return self

    @model_validator(mode="after")
    def _position_fits(self) -> Self:
        if self.position in ("none", "relative", "rope_2d") and self.position_at != "stem":
            raise ConfigError(
                f"position_at={self.position_at!r} needs a table that is added to the tokens, but position is "
                f"{self.position!r}; omit position_at"
            )
        if self.position != "learned_1d" and self.position_covers not in (None, "patches"):
            raise ConfigError(
                f"position {self.position!r} covers patches only, but position_covers is {self.position_covers!r}; "
                f"omit it, or use position='learned_1d'"
            )
        for position, divisor, name, number in (
            ("sincos_2d", 4, "width", self.width),
            ("learned_2d", 2, "width", self.width),
            ("rope_2d", 4, "head width", self.head_width),
        ):
            if self.position == position and number % divisor:
                raise ConfigError(f"position {position!r} needs a {name} that is a multiple of {divisor}, not {number}")
        return self

    @model_validator(mode="after")
    def _pooling_fits(self) -> Self:
        if self.pool == "cls" and self.class_token == "none":
            raise ConfigError("pool='cls' needs a class token, but class_token is 'none'; use pool='mean' or 'map'")
        if self.distillation_token and (self.pool != "cls" or self.class_token == "none"):
            raise ConfigError(
                f"a distillation token needs a class token and pool='cls', but class_token is {self.class_token!r} and "
                f"pool is {self.pool!r}; use class_token='first' and pool='cls'"
            )
        if self.pool_over == "all" and self.pool not in ("mean", "map"):
            raise ConfigError(f"pool_over='all' has no effect with pool={self.pool!r}; omit pool_over")
        if self.pool == "patches" and self.patch_dropout:
            raise ConfigError(
                f"pool='patches' needs every patch, but patch_dropout is {self.patch_dropout}; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _head_layers_exist(self) -> Self:
        if not self.head_layers:
            return self
        if self.pool != "patches":
            raise ConfigError(f"head_layers is for pool='patches', but pool is {self.pool!r}; omit head_layers")
        if not self.depth:
            raise ConfigError("head_layers names encoder blocks, but depth is 0; omit it")
        for layer in self.head_layers:
            if not -self.depth <= layer < self.depth:
                raise ConfigError(
                    f"head_layers names layer {layer}, but the model has layers 0 to {self.depth - 1} (or -1 for the "
                    f"last)"
                )
        layers = self.layers_read
        if (ordered := tuple(sorted(set(layers)))) != layers:
            raise ConfigError(f"head_layers {layers} must be different layers in ascending order; use {ordered}")
        if layers[-1] != self.depth - 1:
            raise ConfigError(
                f"head_layers ends with layer {layers[-1]}, so the layers after it would have no effect; add layer "
                f"{self.depth - 1}, or set depth={layers[-1] + 1}"
            )
        if self.representation and len(layers) > 1:
            raise ConfigError(
                f"representation is for a head that reads one layer, but head_layers names {len(layers)}; omit one of "
                f"them"
            )
        return self


def _by(size: tuple[int, int]) -> str:
    """Format a size: 224×224."""
    return f"{size[0]}×{size[1]}"
