"""The intermediate tensors of a forward pass, what each stage is, and its shape; and the cost of a model."""

from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from vitrail.models.config import ViTConfig
from vitrail.models.stems import EarlyConvolutions, Hybrid, LinearProjection, NormedLinearProjection, Order, patchify
from vitrail.models.vit import ViT

Side = Literal["in", "out"]
Named = tuple[str, Tensor, str]
"""A stage with its tensor: name, tensor, meaning."""


class Stage(NamedTuple):
    """One intermediate tensor."""

    name: str
    shape: tuple[int, ...]
    meaning: str


@torch.no_grad()
def stages(model: ViT, image: Tensor) -> list[Stage]:
    """Run images (B, C, H, W) through the model and list the intermediate tensors."""
    config = model.config
    model.embed(image)  # fail early on an image that does not fit
    special = [
        name
        for name, count in (
            ("the class token", config.class_token != "none"),
            ("the distillation token", config.distillation_token),
            (f"{config.registers} registers", config.registers),
        )
        if count
    ]
    joined = f"{' and '.join(special)} added, " if special else ""
    placed = "" if config.position == "none" else f"position {config.position}"
    pooled = {
        "cls": "the class token",
        "mean": "the mean of the tokens",
        "map": "attention of a learned query over the tokens",
        "none": "every token",
        "patches": "every patch",
    }[config.pool]
    if config.head_layers:
        pooled += f", after layers {', '.join(map(str, config.layers_read))}"
    outputs = (
        f"a score for each of {config.classes} classes{' in each patch' * (config.pool == 'patches')}"
        if config.classes
        else "the features, because the model has no head"
    )
    named = [
        (
            "image",
            image,
            f"{_channels(config.channels)} of {config.image_size[0]}×{config.image_size[1]} pixels",
        ),
        *_through_the_stem(model, image),
        *(_through_the_encoder(model, image, f"{joined}{placed}".strip(", ")) if config.depth else []),
        ("pooled", model.features(image).pooled, pooled),
        ("logits", model(image), outputs),
    ]
    return [Stage(name, tuple(tensor.shape), meaning) for name, tensor, meaning in named]


def sample_image(channels: int, size: tuple[int, int]) -> Tensor:
    """Draw a bright disc on a gradient: (1, channels, height, width) in ±1, different in every channel."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
    disc = (((x - 0.25) ** 2 + (y + 0.2) ** 2) < 0.3).float()
    turns = torch.linspace(0, 3, channels + 1)[:channels, None, None]
    slope = 0.5 * (x * torch.cos(turns) + y * torch.sin(turns))
    return (slope * (1 - disc) + disc * torch.cos(2 * turns + x)).clamp(-1, 1)[None]


def _through_the_stem(model: ViT, image: Tensor) -> list[Named]:
    """Return the tensors that this stem computes; a convolution, for example, never makes flattened patches."""
    stem, config = model.patch_embed, model.config
    named: list[Named] = []
    if isinstance(stem, LinearProjection | NormedLinearProjection):
        (rows, columns), (h, w) = config.grid, config.patch_size
        meaning = f"{rows}×{columns} patches, each {h}×{w} pixels × {_channels(config.channels)}"
        order: Order = "hwc" if isinstance(stem, NormedLinearProjection) else "chw"
        named.append(("patches", patchify(image, config.patch_size, order), meaning))
        meaning = f"each patch as {config.width} learned features"
    else:
        meaning = "the feature map, flattened in row-major order"
    with ExitStack() as hooks:
        for name, inner, module, side in _hooked(stem, config):
            hooks.callback(_hook(module, side, name, inner, named).remove)
        embeddings = stem(image)
    return [*named, ("patch embeddings", embeddings, meaning)]


def _through_the_encoder(model: ViT, image: Tensor, added: str) -> list[Named]:
    """Return the tokens before and after the blocks, and the attention of the first block."""
    config, last = model.config, model.config.depth - 1
    traced = model.trace(image, attention=(0,), tokens=(last,))
    return [
        ("tokens", model.embed(image)[0], added or "unchanged from the stem"),
        (
            "attention, layer 0",
            traced.attention[0],
            f"the attention between all tokens, in each of {config.heads} heads",
        ),
        (f"tokens after layer {last}", traced.tokens[last], f"after {config.depth} blocks of attention and MLP"),
    ]


def _hook(module: nn.Module, side: Side, name: str, meaning: str, named: list[Named]) -> RemovableHandle:
    """Record the input or the output of a module when it runs."""
    if side == "in":
        return module.register_forward_pre_hook(lambda _, inputs: named.append((name, inputs[0], meaning)))
    return module.register_forward_hook(lambda _, __, output: named.append((name, output, meaning)))


def _hooked(stem: nn.Module, config: ViTConfig) -> list[tuple[str, str, nn.Module, Side]]:
    """Return the modules of a stem to record: name, meaning, module, and whether its input or output."""
    h, w = config.patch_size
    match stem:
        case LinearProjection():
            return []
        case NormedLinearProjection():
            return [("patches, normalised", "each by its mean and variance", stem.norm_in, "out")]
        case EarlyConvolutions():
            layers = zip(config.stem_layers, stem.backbone, strict=True)
            return [
                *(
                    (f"convolution {number}", f"{layer.kernel}×{layer.kernel}, stride {layer.stride}", module, "out")
                    for number, (layer, module) in enumerate(layers, start=1)
                ),
                ("feature map", f"{config.width} features per {h}×{w} pixels", stem.proj, "out"),
            ]
        case Hybrid():
            backbone, depths = stem.backbone, config.stem_resnet.depths
            pooled: tuple[nn.Module, Side] = (backbone.stages[0], "in") if depths else (backbone, "out")
            kernel, stride = backbone.stem.conv.kernel_size[0], backbone.stem.conv.stride[0]
            root = f"a {kernel}×{kernel} convolution, stride {stride}"
            pooling = [("ResNet root, pooled", "3×3 max pooling, stride 2", *pooled)] if backbone.pooled else []
            projected: list[tuple[str, str, nn.Module, Side]] = []
            if stem.proj is not None:
                projected = [("feature map", f"{config.width} features per {h}×{w} pixels", stem.proj, "out")]
            return [
                ("ResNet root", root, backbone.stem, "out"),
                *pooling,
                *(
                    (f"ResNet stage {number}", "1 block" if depth == 1 else f"{depth} blocks", module, "out")
                    for number, (depth, module) in enumerate(zip(depths, backbone.stages, strict=True), start=1)
                ),
                *projected,
            ]
        case _:
            meaning = f"each {h}×{w} patch as {config.width} features, by a convolution with stride = kernel size"
            return [("feature map", meaning, stem.proj, "out")]  # type: ignore[list-item]


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


# ── cost ──


class Cost(NamedTuple):
    """Parameters, tokens and FLOPs of a model."""

    parameters: int
    tokens: int
    flops: int
    """FLOPs per image; a multiply-add counts as two."""


def cost(config: ViTConfig) -> Cost:
    """Count the parameters of a model and the FLOPs of its matmuls, convolutions and attention.

    All blocks are identical, so only the first one is built and counted, or as many as the head reads.
    """
    built = min(config.depth, max(1, len(config.head_layers)))
    read = tuple(range(built)) if config.head_layers else ()
    with torch.device("meta"):
        model = ViT(config.replace(depth=built, head_layers=read)).eval().to("meta")  # also moves computed buffers
        image = torch.empty(1, config.channels, *config.image_size)
    counter, more = _FlopCounter(), config.depth - built
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: counter.start())
        block.register_forward_hook(lambda *_: counter.stop())
    with torch.no_grad(), counter:
        model(image)
    return Cost(
        parameters=_parameters(model) + more * _parameters(model.blocks) // max(1, built),
        tokens=config.tokens,
        flops=counter.total + more * counter.in_block // max(1, built),
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _FlopCounter(TorchDispatchMode):
    """Counts FLOPs by torch's formulas. Its own counter also tries to decompose every other operator, which is slow."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.in_block = 0

    def start(self) -> None:
        self.in_block -= self.total

    def stop(self) -> None:
        self.in_block += self.total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (flops := flop_registry.get(func.overloadpacket)) is not None:
            self.total += flops(*args, **(kwargs or {}), out_val=result)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it, which takes seconds
