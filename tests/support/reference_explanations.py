"""A reference implementation of the model and the methods, in float64, sharing only the weights."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.support.peers import scramble
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.vit import ViT

NAMES = ("cat", "dog", "fox", "hen", "owl")
SMALL: dict[str, Any] = {
    "image_size": (12, 20), "patch_size": 4, "width": 24, "depth": 3, "heads": 3, "classes": 5, "norm_eps": 1e-5
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "class first": {},
    "class last": {"class_token": "last", "registers": 2},
    "registers": {"registers": 3},
    "distillation": {"distillation_token": True, "registers": 1},
    "distillation last": {"distillation_token": True, "registers": 1, "class_token": "last"},
    "mean": {"pool": "mean", "class_token": "none"},
    "mean over all": {"pool": "mean", "class_token": "first", "pool_over": "all", "final_norm": "after_pool"},
    "mean with a class token": {"pool": "mean", "registers": 1},
    "map": {"pool": "map", "class_token": "none"},
    "map over all": {"pool": "map", "class_token": "none", "registers": 2, "pool_over": "all"},
    "grey": {"channels": 1},
    "conv stem": {"stem": "conv_stem"},
    "hybrid": {"stem": "resnet", "resnet": ResNet(depths=())},
    "per token": {"pool": "none"},
    "post-norm": {"norm_order": "post", "layer_scale": 0.5},
}


def build(name: str, **changes: Any) -> ViT:
    model = ViT(ViTConfig(**{**SMALL, **CONFIGS[name], **changes}))
    scramble(model, seed=1)
    return model


def images(config: ViTConfig, count: int = 2) -> Tensor:
    return torch.randn(count, config.channels, *config.image_size, generator=torch.Generator().manual_seed(5))


def bundle(name: str = "class first", names: tuple[str, ...] | None = NAMES, **changes: Any) -> Bundle:
    model = build(name, **changes)
    channels = model.config.channels
    half = (0.5,) * channels
    preprocess = Preprocess(size=model.config.image_size, resize="cover", channels=channels, mean=half, std=half)
    return Bundle(model, preprocess, names if model.config.classes else None)


def noise(height: int = 30, width: int = 31, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@dataclass
class Pass:
    """A forward pass of one image."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    attention: list[Tensor] = field(default_factory=list)
    """(heads, T, T) per layer."""
    entering: list[Tensor] = field(default_factory=list)
    """(T, D) per layer, the input of its attention."""
    pooling: Tensor | None = None
    """(heads, pooled tokens)."""
    normed: Tensor = field(default_factory=lambda: torch.empty(0))


class Naive:
    """A model's arithmetic, for one image at a time."""

    def __init__(self, model: ViT) -> None:
        self.config, self.stem = model.config, ViT(model.config).double().eval()
        self.stem.load_state_dict(model.state_dict())
        self.w = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
        config, count = self.config, self.config.patches
        order = [["class"] * (config.class_token != "none"), ["distillation"] * config.distillation_token]
        special = [*order[0], *order[1], *(f"register:{i}" for i in range(config.registers))]
        patches = [f"{i // config.grid[1]},{i % config.grid[1]}" for i in range(count)]
        # The registers keep their order when all special tokens come last.
        behind = [f"register:{i}" for i in range(config.registers)] + [*order[1], *order[0]]
        self.names = [*patches, *behind] if config.class_token == "last" else [*special, *patches]
        self.patches = [self.names.index(name) for name in patches]
        every = config.pool_over == "all"
        self.pooled_over = list(range(len(self.names))) if every else self.patches

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        normed: Tensor = scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]
        return normed

    def linear(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]
        return y

    def mlp(self, x: Tensor, name: str) -> Tensor:
        hidden = self.linear(x, f"{name}.fc1")
        return self.linear(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), f"{name}.fc2")

    def looks(self, query: Tensor, key: Tensor) -> Tensor:
        wide = self.config.head_width
        heads = [
            (query[:, h * wide : (h + 1) * wide] @ key[:, h * wide : (h + 1) * wide].T / math.sqrt(wide)).softmax(-1)
            for h in range(self.config.heads)
        ]
        return torch.stack(heads)

    def gathered(self, weights: Tensor, value: Tensor) -> Tensor:
        wide = self.config.head_width
        return torch.cat([weights[h] @ value[:, h * wide : (h + 1) * wide] for h in range(self.config.heads)], dim=1)

    def __call__(self, image: Tensor) -> Pass:
        result, config, D = Pass(), self.config, self.config.width
        patches = self.stem.patch_embed(image[None].double())[0].detach()
        special = {"class": "cls_token", "distillation": "dist_token"}
        rows = [
            self.w["reg_token"][0, int(name[9:])] if name.startswith("register")
            else self.w[special[name]][0, 0] if name in special
            else patches[self.patches.index(place)]
            for place, name in enumerate(self.names)
        ]  # fmt: skip
        x = (torch.stack(rows) + self.w["pos_embed"][0]).requires_grad_()
        for i in range(config.depth):
            at = f"blocks.{i}."
            read = self.norm(x, at + "norm1") if config.norm_order == "pre" else x
            result.entering.append(read)
            query, key, value = self.linear(read, at + "attn.qkv").split(D, dim=1)
            weights = self.looks(query, key)
            result.attention.append(weights)
            y = self.linear(self.gathered(weights, value), at + "attn.proj")
            scale = [self.w.get(f"{at}ls{j}.gamma", torch.tensor(1.0)) for j in (1, 2)]
            if config.norm_order == "pre":
                x = x + y * scale[0]
                x = x + self.mlp(self.norm(x, at + "norm2"), at + "mlp") * scale[1]
            else:
                x = self.norm(x + y * scale[0], at + "norm1")
                x = self.norm(x + self.mlp(x, at + "mlp") * scale[1], at + "norm2")
        if config.final_norm == "before_pool":
            x = self.norm(x, "norm")
        result.normed, result.logits = x, self.classify(x, result)
        return result

    def classify(self, x: Tensor, run: Pass) -> Tensor:
        match self.config.pool:
            case "none":
                return self.linear(x, "head")
            case "cls":
                by_class = self.linear(x[self.names.index("class")], "head")
                if "distillation" not in self.names:
                    return by_class
                return (by_class + self.linear(x[self.names.index("distillation")], "head_dist")) / 2
            case "mean":
                pooled = x[self.pooled_over].mean(0)
            case _:
                query = self.linear(self.w["attn_pool.latent"][0], "attn_pool.q")
                key, value = self.linear(x[self.pooled_over], "attn_pool.kv").split(self.config.width, dim=1)
                weights = self.looks(query, key)
                run.pooling = weights
                pooled = self.linear(self.gathered(weights, value), "attn_pool.proj")
                pooled = (pooled + self.mlp(self.norm(pooled, "attn_pool.norm"), "attn_pool.mlp"))[0]
        if self.config.final_norm == "after_pool":
            pooled = self.norm(pooled, "fc_norm")
        return self.linear(pooled, "head")

    # ── the methods ──

    def row(self, matrix: Tensor, query: str | None, pool_row: Tensor | None) -> Tensor:
        """Return the row of (T, T) for a query: by default, what the head reads."""
        if query not in (None, "mean", "pool"):
            return matrix[self.names.index(query)]
        if query is None and self.config.pool in ("cls", "none"):
            return matrix[self.names.index("class")]
        if pool_row is not None and query != "mean":
            return torch.stack([pool_row[i] * matrix[place] for i, place in enumerate(self.pooled_over)]).sum(0)
        return matrix[self.pooled_over].mean(0)

    def grid(self, row: Tensor) -> Tensor:
        return torch.stack([row[place] for place in self.patches]).reshape(self.config.grid).detach()

    def attention(self, image: Tensor, layer: int, query: str | None) -> Tensor:
        """Return the map of each head."""
        return torch.stack([self.grid(self.row(head, query, None)) for head in self(image).attention[layer]])

    def rollout(self, image: Tensor, query: str | None, fuse: str, discard: float) -> Tensor:
        result = self(image)
        product = torch.eye(len(self.names), dtype=torch.float64)
        for weights in result.attention:
            layer = self.without_smallest(self.fused(weights, fuse), discard)
            layer = (layer + torch.eye(len(layer))) / 2
            product = torch.stack([line / line.sum() for line in layer]) @ product
        pool_row = None
        if result.pooling is not None:
            pool_row = self.without_smallest(self.fused(result.pooling, fuse), discard)[0]
            pool_row = pool_row / pool_row.sum()
        return self.grid(self.row(product, query, pool_row))

    def fused(self, weights: Tensor, fuse: str) -> Tensor:
        return {"mean": weights.mean(0), "max": weights.max(0).values, "min": weights.min(0).values}[fuse].detach()

    def without_smallest(self, matrix: Tensor, fraction: float) -> Tensor:
        numbers = sorted((float(number), i) for i, number in enumerate(matrix.flatten()))
        flat = matrix.flatten().clone()
        for _, i in numbers[: int(fraction * len(numbers))]:
            flat[i] = 0
        return flat.reshape(matrix.shape)

    def relevance(self, image: Tensor, target: int, query: str | None) -> Tensor:
        result = self(image)
        layers = [*result.attention, *([] if result.pooling is None else [result.pooling])]
        slopes = torch.autograd.grad(self.score(result, target, query), layers)
        R = torch.eye(len(self.names), dtype=torch.float64)
        for weights, slope in list(zip(layers, slopes, strict=True))[: self.config.depth]:
            R = R + (weights * slope).clamp(min=0).mean(0) @ R
        if "distillation" in self.names:
            return self.grid((self.row(R, "class", None) + self.row(R, "distillation", None)) / 2)
        pool_row = None if result.pooling is None else (layers[-1] * slopes[-1]).clamp(min=0).mean(0)[0]
        return self.grid(self.row(R, query, pool_row))

    def gradcam(self, image: Tensor, target: int, layer: int | None, query: str | None) -> Tensor:
        result = self(image)
        features = result.entering[-1 if layer is None else layer]
        if layer is None and self.config.pool in ("mean", "map"):
            features = result.normed
        (slope,) = torch.autograd.grad(self.score(result, target, query), features)
        importance = sum(slope[place] for place in self.patches) / len(self.patches)
        return self.grid((features @ importance).clamp(min=0))

    def score(self, run: Pass, target: int, query: str | None) -> Tensor:
        if self.config.pool != "none":
            return run.logits[target]
        return run.logits[self.names.index(query or "class"), target]
