"""Position embeddings: added tables, rotary embeddings, relative offsets; and resampling them to another grid.

Axes: T tokens of the sequence, N patches, D width, d width of a head. Every table below covers the whole sequence,
special tokens included, so that callers need not know where the patches start. Special tokens get neutral entries: a
row of zeros, a rotation by zero, an offset whose bias is zero.

Position tables are resampled by the *shape* of the grid: 14×14 and 7×28 both have 196 patches, so copying a table
because the counts match would give every patch the wrong position.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, suggest
from vitrail.models.config import ViTConfig

Method = Literal["google", "timm", "torchvision", "transformers", "dinov2"]
"""How to resample a position table:

- `google`: bilinear with aligned corners, as scipy's order-1 zoom in Google's fine-tuning code;
- `timm`: bicubic with antialiasing;
- `torchvision`: bicubic with aligned corners;
- `transformers`: bicubic;
- `dinov2`: bicubic, with a scale that is too large by a tenth of a patch, as the published models were trained.
"""

Grid = tuple[int, int]


class TokenPositions(NamedTuple):
    """The position information that the blocks need for this batch; None where the config does not use it."""

    table: Tensor | None = None
    """(1 or B, T, D), added before every block if all blocks share one table."""
    rotation: Tensor | None = None
    """(2, 1 or B, 1, T, d): cosines and sines for `rope_2d`."""
    offsets: Tensor | None = None
    """(1 or B, 1, T, T): for each query and key, the row of the `relative` table."""
    kept: Tensor | None = None
    """(B, kept T): indices of the tokens that patch dropout kept. None: all tokens."""


# ── added tables ──


def add_table(owner: nn.Module, config: ViTConfig) -> None:
    """Add the learned position table that `read_table` reads to `owner` (the model or a block)."""
    rows, columns = config.grid
    match config.position:
        case "learned_1d":
            owner.pos_embed = nn.Parameter(torch.empty(1, table_rows(config), config.width))
        case "learned_2d":
            owner.pos_embed_row = nn.Parameter(torch.empty(rows, config.width // 2))
            owner.pos_embed_col = nn.Parameter(torch.empty(columns, config.width // 2))


def read_table(owner: nn.Module, config: ViTConfig) -> Tensor:
    """Return the table of `owner` for the whole sequence, (1, T, D)."""
    # Plain attributes, not get_parameter(): torch.func.functional_call and parametrisations replace them with tensors.
    match config.position:
        case "learned_1d":
            table = cast("Tensor", owner.pos_embed)
        case "learned_2d":
            table = outer(cast("Tensor", owner.pos_embed_row), cast("Tensor", owner.pos_embed_col))
        case _:
            table = cast("Tensor", owner.pos_embed_fixed)
    return _fill_gap(table, config)


def table_rows(config: ViTConfig) -> int:
    """Return the number of rows of the `learned_1d` table."""
    return {
        "all": config.tokens,
        "class": config.tokens - config.registers,
        "patches": config.patches,
    }[config.covers]


def outer(row: Tensor, column: Tensor) -> Tensor:
    """Combine a row table (rows, D/2) and a column table (columns, D/2) to (1, N, D): x, then y (appendix D.4)."""
    rows, columns = row.shape[0], column.shape[0]
    x = column[None, :, :].expand(rows, -1, -1)
    y = row[:, None, :].expand(-1, columns, -1)
    return torch.cat([x, y], dim=-1).reshape(1, rows * columns, -1)


def sincos_2d(grid: tuple[int, int], width: int, temperature: float = 10_000.0) -> Tensor:
    """Return the fixed table (1, N, D) of the plain baseline (arXiv 2205.01580): sin x, cos x, sin y, cos y."""
    quarter = width // 4
    # Always on the CPU: a model built on the meta device still needs these values.
    steps = torch.arange(quarter, dtype=torch.float64, device="cpu") / max(1, quarter - 1)
    x, y = (angles[..., None] * temperature**-steps for angles in _coordinates(grid))
    table = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)
    return table.reshape(1, -1, width).float()


def _fill_gap(table: Tensor, config: ViTConfig) -> Tensor:
    """Insert rows of zeros for the tokens that the table does not cover."""
    missing = config.tokens - table.shape[1]
    if not missing:
        return table
    if config.covers == "class":
        start = config.layout.registers.start
    else:
        start = config.patches if config.class_token == "last" else 0
    zeros = table.new_zeros(1, missing, config.width)
    return torch.cat([table[:, :start], zeros, table[:, start:]], dim=1)


# ── rotary and relative positions ──


def rope_2d(config: ViTConfig) -> Tensor:
    """Return cosines and sines, (2, 1, 1, T, d): features 2i and 2i+1 of a head rotate together, by x, then by y."""
    pairs = config.head_width // 4
    steps = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
    x, y = (angles[..., None] * config.rope_theta**-steps for angles in _coordinates(config.grid))
    angles = torch.cat([x, y], dim=-1).reshape(config.patches, 2 * pairs).repeat_interleave(2, dim=-1)
    by_token = torch.zeros(config.tokens, config.head_width, dtype=torch.float64, device="cpu")
    by_token[config.layout.patches] = angles
    return torch.stack([by_token.cos(), by_token.sin()]).float()[:, None, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply rotary embeddings to queries or keys (B, heads, T, d)."""
    cosine, sine = rotation.to(x.dtype).unbind(0)
    rotated: Tensor = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cosine + rotated * sine


def relative_offsets(config: ViTConfig) -> Tensor:
    """Return the row of the relative table for each query and key: (1, 1, T, T).

    Two patches q and k have row q − k + N − 1. A pair with a special token has row 2N − 1, one past the end.
    """
    patches = torch.arange(config.patches, device="cpu")
    offsets = torch.full((config.tokens, config.tokens), 2 * config.patches - 1, device="cpu")
    span = config.layout.patches
    offsets[span, span] = patches[:, None] - patches[None, :] + config.patches - 1
    return offsets[None, None]


def relative_term(query: Tensor, table: Tensor, offsets: Tensor) -> Tensor:
    """Return the relative position bias (B, heads, T, T) of the queries (B, heads, T, d) (appendix D.4)."""
    by_offset = F.pad(query @ table.transpose(0, 1), (0, 1))
    return by_offset.gather(-1, offsets.expand(*query.shape[:2], -1, -1))


def _coordinates(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return x and y of every patch, each (rows, columns)."""
    rows, columns = (torch.arange(n, dtype=torch.float64, device="cpu") for n in grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return x, y


# ── a subset of the patches ──


def drop_patches(config: ViTConfig, batch: int, device: torch.device) -> Tensor:
    """Sample the indices of the tokens to keep, per image: all special tokens and a random subset of the patches."""
    keep = max(1, round(config.patches * (1 - config.patch_dropout)))
    order = torch.rand(batch, config.patches, device=device).argsort(dim=1)
    return with_special_tokens(config, order[:, :keep].sort(dim=1).values)


def with_special_tokens(config: ViTConfig, patches: Tensor) -> Tensor:
    """Return the indices in the sequence of the patches (B, kept N) and of all special tokens: (B, kept T)."""
    span = config.layout.patches
    every_token = torch.arange(config.tokens, device=patches.device).expand(len(patches), -1)
    return torch.cat([every_token[:, : span.start], patches + span.start, every_token[:, span.stop :]], dim=1)


def gather_tokens(table: Tensor, kept: Tensor | None) -> Tensor:
    """Gather the kept tokens of (1 or B, T, D) for each image: (B, kept T, D)."""
    if kept is None:
        return table
    B, D = kept.shape[0], table.shape[-1]
    return table.expand(B, -1, -1).gather(1, kept[..., None].expand(-1, -1, D))


def keep_positions(positions: TokenPositions, kept: Tensor) -> TokenPositions:
    """Restrict all position information to the kept tokens."""
    table, rotation, offsets = positions.table, positions.rotation, positions.offsets
    if table is not None:
        table = gather_tokens(table, kept)
    if rotation is not None:
        rotation = torch.stack([gather_tokens(term[:, 0], kept)[:, None] for term in rotation])
    if offsets is not None:
        offsets = offsets[0, 0][kept[:, :, None], kept[:, None, :]][:, None]
    return TokenPositions(table, rotation, offsets, kept)


# ── resampling to another grid ──


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


TABLES = ("pos_embed", "pos_embed_row", "pos_embed_col", "rel_pos")
"""Names of the learned tables, in the model, a block or its attention."""


def resized_tables(owner: nn.Module, old: ViTConfig, new: ViTConfig, method: Method) -> dict[str, nn.Parameter]:
    """Return the learned tables of `owner` for another grid, by name. Rows of special tokens do not change."""
    resized: dict[str, nn.Parameter] = {}
    for name, parameter in owner.named_parameters(recurse=False):
        if name in TABLES:
            table = resample_table(name, parameter.detach(), old, new, method)
            resized[name] = nn.Parameter(table, requires_grad=parameter.requires_grad)
    return resized


def resample_table(name: str, table: Tensor, old: ViTConfig, new: ViTConfig, method: Method) -> Tensor:
    """Resample one of the learned `TABLES` to another grid: a linear function of the table."""
    match name:
        case "pos_embed":
            start = 0 if old.class_token == "last" else table.shape[1] - old.patches
            before, patches, after = table.split([start, old.patches, table.shape[1] - old.patches - start], dim=1)
            return torch.cat([before, resample_grid(patches, old.grid, new.grid, method), after], dim=1)
        case "pos_embed_row":
            return resample_line(table, new.grid[0], method)
        case "pos_embed_col":
            return resample_line(table, new.grid[1], method)
        case "rel_pos":
            return resample_offsets(table, old.grid, new.grid)
        case _:
            raise LookupError(f"{name} is not a position table; the tables are {', '.join(TABLES)}")


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
