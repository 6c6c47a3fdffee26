"""Graphs for images of any size: the position table is resampled inside the graph, as `ViT.resize` does it.

Bicubic resampling with antialiasing is linear and separable, so it is two matmuls: rows @ table @ columnsᵀ. The
matrices follow from the size of the grid by elementwise operations, which every runtime has.
"""

import copy

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.position import TokenPositions, read_table
from vitrail.models.vit import ViT

SIZES = ((3, 2), (1, 2), (4, 3))
"""Factors of the number of rows and columns at which an exported graph is checked."""


def check_dynamic_size(config: ViTConfig) -> None:
    """Raise if a model supports one image size only."""
    at_stem = config.table_owner == "model" and config.position_at == "stem"
    if config.position != "none" and not (config.position in ("learned_1d", "learned_2d") and at_stem):
        raise ConfigError(
            "--dynamic-size supports models with learned positions that are added at the stem; export one file per size"
        )
    if not config.has_pool:
        each = "token" if config.pool == "none" else "patch"
        raise ConfigError(f"--dynamic-size needs a model with one output per image, and this one has one per {each}")
    if config.stem in ("linear", "linear_norm"):
        raise ConfigError("--dynamic-size does not support a linear stem; convert the model to stem conv first")


def outputs_of_any_size(model: ViT, x: Tensor) -> Tensor:
    """Return the model's output for images (B, C, H, W) whose sides are multiples of the patch size."""
    config = model.config
    rows, columns = x.shape[2] // config.patch_size[0], x.shape[3] // config.patch_size[1]
    tokens = model._join(model.patch_embed(x))
    if config.position != "none":
        tokens = tokens + resampled(read_table(model, config), config, rows, columns)
    return model._classify(model.run_blocks(model.norm_pre(tokens), TokenPositions()))


def resampled(table: Tensor, config: ViTConfig, rows: int, columns: int) -> Tensor:
    """Return a position table (1, T, D) for another grid; rows of special tokens stay as they are."""
    patches = config.layout.patches
    grid = table[0, patches].reshape(*config.grid, -1)
    made = torch.einsum("ra,abd->rbd", _matrix(config.grid[0], rows).to(grid), grid)
    made = torch.einsum("cb,rbd->rcd", _matrix(config.grid[1], columns).to(grid), made)
    return torch.cat([table[:, : patches.start], made.flatten(0, 1)[None], table[:, patches.stop :]], dim=1)


def _matrix(old: int, new: int) -> Tensor:
    """Return the matrix (new, old) of torch's antialiased bicubic interpolation along one axis."""
    numbers = torch.arange(new, dtype=torch.float32)
    scale = old / torch.ones_like(numbers).sum()  # a tensor: tracing would fix the value of a Python number
    centres = (numbers[:, None] + 0.5) * scale
    width = scale.clamp(min=1.0)
    x = ((torch.arange(old, dtype=torch.float32) + 0.5 - centres) / width).abs()
    near = (1.5 * x - 2.5) * x * x + 1  # Keys' kernel with a = -0.5
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return weights / weights.sum(dim=1, keepdim=True)


def resized_copy(model: ViT, factors: tuple[int, int]) -> ViT:
    """Return a copy of the model for half as many rows and columns, times `factors`, at least one of each."""
    config = model.config
    grid = (max(1, side * factor // 2) for side, factor in zip(config.grid, factors, strict=True))
    made = copy.deepcopy(model)
    height, width = (side * patch for side, patch in zip(grid, config.patch_size, strict=True))
    made.resize((height, width))
    return made.eval()
