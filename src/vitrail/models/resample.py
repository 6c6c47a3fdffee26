"""Resample learned position tables and patch kernels to another grid or patch size.

Position tables are resampled by the *shape* of the grid: 14×14 and 7×28 both have 196 patches, so copying a table
because the counts match would give every patch the wrong position.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, suggest

Method = Literal["google", "timm", "torchvision", "transformers", "dinov2"]
"""How to resample a position table:

- `google`: bilinear with aligned corners, as scipy's order-1 zoom in Google's fine-tuning code;
- `timm`: bicubic with antialiasing;
- `torchvision`: bicubic with aligned corners;
- `transformers`: bicubic;
- `dinov2`: bicubic, with a scale that is too large by a tenth of a patch, as the published models were trained.
"""

Grid = tuple[int, int]


def _dinov2(x: Tensor, new: Grid) -> Tensor:
    rows, columns = x.shape[-2:]
    scale = ((new[0] + 0.1) / rows, (new[1] + 0.1) / columns)
    return F.interpolate(x, scale_factor=scale, mode="bicubic", recompute_scale_factor=False)


# Each takes (1, D, rows, columns) and the new grid.
METHODS: dict[Method, Callable[[Tensor, Grid], Tensor]] = {
    "google": lambda x, new: F.interpolate(x.double(), new, mode="bilinear", align_corners=True),  # as scipy computes
    "timm": lambda x, new: F.interpolate(x, new, mode="bicubic", antialias=True),
    "torchvision": lambda x, new: F.interpolate(x, new, mode="bicubic", align_corners=True),
    "transformers": lambda x, new: F.interpolate(x, new, mode="bicubic"),
    "dinov2": _dinov2,
}


def check_method(method: str) -> None:
    """Raise if the method does not exist."""
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"no resampling method {method!r}; choose one of {', '.join(get_args(Method))}" + suggest(method, METHODS)
        )


def resample_grid(table: Tensor, old: Grid, new: Grid, method: Method = "timm") -> Tensor:
    """Resample (1, old rows · old columns, D) to (1, new rows · new columns, D); a no-op for equal grids."""
    check_method(method)
    if old == new:
        return table
    x = table.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    x = METHODS[method](x, new)
    return x.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], -1).to(table.dtype)


def resample_line(table: Tensor, new: int, method: Method = "timm") -> Tensor:
    """Resample the (n, D/2) table of rows or of columns to (new, D/2)."""
    return resample_grid(table[None], (table.shape[0], 1), (new, 1), method)[0]


def resample_offsets(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample the relative table (2·old N − 1, d) to (2·new N − 1, d).

    An offset counts patches in row-major order, so it is a step of some rows and columns. Of its two readings (with 14
    columns: 2 right, or 1 down and 12 left) the one with fewer columns is used. The step is scaled to the old grid,
    where the table is interpolated.
    """
    if old == new:
        return table
    largest = new[0] * new[1] - 1
    offset = torch.arange(-largest, largest + 1, device=table.device, dtype=torch.float64)
    down = (offset / new[1]).round()
    right = offset - down * new[1]
    down, right = down * old[0] / new[0], right * old[1] / new[1]
    low_down, low_right = down.floor(), right.floor()
    result = table.new_zeros(len(offset), table.shape[1], dtype=torch.float64)
    limit = old[0] * old[1] - 1
    for r, weight_r in ((low_down, 1 - (down - low_down)), (low_down + 1, down - low_down)):
        for c, weight_c in ((low_right, 1 - (right - low_right)), (low_right + 1, right - low_right)):
            row = (r * old[1] + c).clamp(-limit, limit).long() + limit
            result += table.double()[row] * (weight_r * weight_c)[:, None]
    return result.to(table.dtype)


def resample_kernel(kernel: Tensor, new: Grid) -> Tensor:
    """Resize patch kernels (D, C, h, w) by FlexiViT's pseudo-inverse (arXiv 2212.08013).

    If B resizes a patch bilinearly, the new kernel is pinv(Bᵀ) times the old one: an enlarged patch then gets exactly
    the embedding of the small one, unlike with an interpolated kernel.
    """
    old = (kernel.shape[-2], kernel.shape[-1])
    if old == new:
        return kernel
    basis: Tensor = torch.eye(old[0] * old[1], dtype=torch.float64, device="cpu").reshape(-1, 1, *old)
    enlarge = F.interpolate(basis, new, mode="bilinear", align_corners=False).flatten(1)  # (old, new) = Bᵀ
    inverse = torch.linalg.pinv(enlarge).to(kernel.device)  # (new, old)
    flat: Tensor = kernel.double().flatten(2) @ inverse.T
    return flat.reshape(*kernel.shape[:2], *new).to(kernel.dtype)
