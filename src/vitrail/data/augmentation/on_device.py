"""`apply_all`: what was planned for a batch of small pictures, done to all of them at once, on the device they are on.

The plans are the same as for one picture (`augment.plan`); so is what is done, up to the rounding of a few pixels. It
is for pictures that have their size already, so that nothing has to be resized: crops by whole pixels or none.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augmentation.augment import MIDDLE_GREY, Augmentation, Plan
from vitrail.data.augmentation.colours import Matrix
from vitrail.data.augmentation.randaugment import Operation
from vitrail.errors import ConfigError

LUMA = (19595, 38470, 7471)
"""Pillow's weights of red, green and blue in grey, in 65536ths."""


def check_on_device(augmentation: Augmentation) -> None:
    """Refuse an augmentation that needs single pictures."""
    if augmentation.crop not in ("padded", "none"):
        raise ConfigError(
            f'augmentation.crop = "{augmentation.crop}" resizes each picture, which is not done on the device; '
            'use "padded" or "none", or data.on_device = false'
        )
    for name, wanted in (("blur", augmentation.blur > 0), ("three_augment", augmentation.three_augment)):
        if wanted:
            raise ConfigError(f"augmentation.{name} is not done on the device; leave it out, or data.on_device = false")
    if augmentation.jitter is not None and augmentation.jitter.hue:
        raise ConfigError("augmentation.jitter.hue is not done on the device; leave it out, or data.on_device = false")
    if augmentation.erasing_fill == "noise":
        raise ConfigError('augmentation.erasing_fill = "noise" is not done on the device; use "grey"')


def apply_all(plans: Sequence[Plan], pixels: Tensor) -> Tensor:
    """Do to each picture of (B, C, H, W), uint8, what was planned for it."""
    fill = plans[0].fill
    pixels = _moved(plans, pixels, fill)
    warped = [number for number, plan in enumerate(plans) if plan.warp is not None]
    if warped:
        matrices = [plan.warp for plan in plans if plan.warp is not None]
        pixels = _replaced(pixels, warped, lambda some: _bilinear(some, matrices, fill))
    for layer in range(max(len(plan.operations) for plan in plans)):
        pixels = _layer(plans, layer, pixels, fill)
    return _erased(plans, pixels)


def _layer(plans: Sequence[Plan], layer: int, pixels: Tensor, fill: int) -> Tensor:
    """Do one operation to each picture, the pictures of one operation together."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, plan in enumerate(plans):
        if layer < len(plan.operations):
            groups[_kind(plan.operations[layer])].append(number)
    for name, numbers in groups.items():
        operations = [plans[number].operations[layer] for number in numbers]
        if name == "nearest":
            matrices = [_matrix(operation, pixels.shape[2], pixels.shape[3]) for operation in operations]
            pixels = _replaced(pixels, numbers, lambda some, m=matrices: _nearest(some, m, fill))  # type: ignore[misc]
        elif name == "cutout":
            places = [operation.values for operation in operations]
            pixels = _replaced(pixels, numbers, lambda some, p=places: _cutout(some, p, fill))  # type: ignore[misc]
        elif name != "identity" and (pixels.shape[1] == 3 or name not in ("saturation", "grey")):
            values = [operation.values for operation in operations]
            change = COLOURS[name]
            pixels = _replaced(pixels, numbers, lambda some, v=values, c=change: c(some, v))  # type: ignore[misc]
    return pixels


def _kind(operation: Operation) -> str:
    return "nearest" if operation.name in MATRICES else operation.name


def _replaced(pixels: Tensor, numbers: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    at = torch.tensor(numbers, device=pixels.device)
    return pixels.index_copy(0, at, change(pixels[at]))


# ── what moves pixels ──


def _moved(plans: Sequence[Plan], pixels: Tensor, fill: int) -> Tensor:
    """Cut out and flip, by whole pixels."""
    B, _, H, W = pixels.shape
    tops = _column([0.0 if plan.box is None else plan.box.top for plan in plans], pixels).long()
    lefts = _column([0.0 if plan.box is None else plan.box.left for plan in plans], pixels).long()
    y, x = torch.arange(H, device=pixels.device), torch.arange(W, device=pixels.device)
    down = _column([plan.flip_vertical for plan in plans], pixels)
    across = _column([plan.flip for plan in plans], pixels)
    rows = torch.where(down, H - 1 - y, y) + tops
    columns = torch.where(across, W - 1 - x, x) + lefts
    return _taken(pixels, rows[:, :, None].expand(B, H, W), columns[:, None, :].expand(B, H, W), fill)


def _taken(pixels: Tensor, rows: Tensor, columns: Tensor, fill: int) -> Tensor:
    """Take each pixel from a place (B, H, W); what lies outside is filled."""
    B, C, H, W = pixels.shape
    there = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    places = (rows.clamp(0, H - 1) * W + columns.clamp(0, W - 1)).view(B, 1, -1).expand(B, C, H * W)
    taken = pixels.flatten(2).gather(2, places).view(B, C, H, W)
    return torch.where(there[:, None], taken, fill)


def _sources(matrices: Sequence[Matrix], pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the middle of each pixel comes from: x and y, (B, H, W)."""
    H, W = pixels.shape[2:]
    a, b, c, d, e, f = torch.tensor(matrices, device=pixels.device, dtype=torch.float64).T[:, :, None, None]
    y = torch.arange(H, device=pixels.device, dtype=torch.float64)[:, None] + 0.5
    x = torch.arange(W, device=pixels.device, dtype=torch.float64)[None, :] + 0.5
    return a * x + b * y + c, d * x + e * y + f


def _nearest(pixels: Tensor, matrices: Sequence[Matrix], fill: int) -> Tensor:
    x, y = _sources(matrices, pixels)
    return _taken(pixels, y.floor().long(), x.floor().long(), fill)


def _bilinear(pixels: Tensor, matrices: Sequence[Matrix], fill: int) -> Tensor:
    """As Pillow: filled where the place itself is outside, the edge repeated for neighbours that are."""
    x, y = _sources(matrices, pixels)
    H, W = pixels.shape[2:]
    there = (x >= 0) & (x < W) & (y >= 0) & (y < H)
    grid = torch.stack([2 * x / W - 1, 2 * y / H - 1], dim=-1).float()
    mixed = F.grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return torch.where(there[:, None], (mixed + 0.5).floor().clamp(0, 255), float(fill)).to(torch.uint8)


def _rotation(values: tuple[float, ...], height: int, width: int) -> Matrix:
    angle = -torch.tensor(values[0] % 360.0, dtype=torch.float64) * torch.pi / 180
    cos, sin = float(angle.cos()), float(angle.sin())
    x, y = width / 2, height / 2
    return (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


MATRICES: dict[str, Callable[[tuple[float, ...], int, int], Matrix]] = {
    "rotate": _rotation,
    "shear_x": lambda values, _, __: (1.0, values[0], 0.0, 0.0, 1.0, 0.0),
    "shear_y": lambda values, _, __: (1.0, 0.0, 0.0, values[0], 1.0, 0.0),
    "translate_x": lambda values, _, __: (1.0, 0.0, -float(int(values[0])), 0.0, 1.0, 0.0),
    "translate_y": lambda values, _, __: (1.0, 0.0, 0.0, 0.0, 1.0, -float(int(values[0]))),
}


def _matrix(operation: Operation, height: int, width: int) -> Matrix:
    return MATRICES[operation.name](operation.values, height, width)


def _erased(plans: Sequence[Plan], pixels: Tensor) -> Tensor:
    boxes = [(0.0, 0.0, 0.0, 0.0) if plan.erased is None else tuple(map(int, plan.erased)) for plan in plans]
    if not any(plan.erased for plan in plans):
        return pixels
    top, left, height, width = torch.tensor(boxes, device=pixels.device).T[:, :, None, None]
    y = torch.arange(pixels.shape[2], device=pixels.device)[:, None]
    x = torch.arange(pixels.shape[3], device=pixels.device)[None, :]
    hole = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    return pixels.masked_fill(hole[:, None], MIDDLE_GREY)


# ── what changes colours ──

Values = Sequence[tuple[float, ...]]


def _brightness(pixels: Tensor, values: Values) -> Tensor:
    return _blended(torch.zeros_like(pixels), pixels, values)


def _contrast(pixels: Tensor, values: Values) -> Tensor:
    mean = (_luma(pixels).double().mean(dim=(1, 2)) + 0.5).floor()
    if len(values[0]) > 1:  # big_vision's level
        mean = torch.tensor([level for _, level in values], device=pixels.device).double()
    return _blended(mean.to(torch.uint8)[:, None, None, None].expand_as(pixels), pixels, values)


def _saturation(pixels: Tensor, values: Values) -> Tensor:
    return _blended(_luma(pixels)[:, None].expand_as(pixels), pixels, values)


def _sharpness(pixels: Tensor, values: Values) -> Tensor:
    kernel = torch.ones(3, 3, device=pixels.device)
    kernel[1, 1] = 5
    smooth = F.conv2d(pixels.float().flatten(0, 1)[:, None], kernel[None, None] / 13).add_(0.5).floor_().clamp_(0, 255)
    softened = pixels.clone()  # the edge stays as it is
    softened[:, :, 1:-1, 1:-1] = smooth.view(*pixels.shape[:2], *smooth.shape[2:]).to(torch.uint8)
    return _blended(softened, pixels, values)


def _posterize(pixels: Tensor, values: Values) -> Tensor:
    masks = [0xFF & ~(0xFF >> int(bits)) for (bits,) in values]
    return pixels & torch.tensor(masks, device=pixels.device, dtype=torch.uint8)[:, None, None, None]


def _solarize(pixels: Tensor, values: Values) -> Tensor:
    return torch.where(pixels < _numbers(values, pixels), pixels, 255 - pixels)


def _solarize_add(pixels: Tensor, values: Values) -> Tensor:
    added = (pixels.float() + _numbers(values, pixels)).clamp(0, 255).to(torch.uint8)
    return torch.where(pixels < 128, added, pixels)


def _cutout(pixels: Tensor, values: Values, fill: int) -> Tensor:
    row, column, reach = torch.tensor(values, device=pixels.device).T[:, :, None, None]
    y = torch.arange(pixels.shape[2], device=pixels.device)[:, None]
    x = torch.arange(pixels.shape[3], device=pixels.device)[None, :]
    hole = (y >= row - reach) & (y < row + reach) & (x >= column - reach) & (x < column + reach)
    return pixels.masked_fill(hole[:, None], fill)


def _autocontrast(pixels: Tensor, _: Values) -> Tensor:
    low, high = (find(pixels.flatten(2), dim=2)[..., None, None].double() for find in (torch.amin, torch.amax))
    scale = 255.0 / (high - low).clamp(min=1e-9)
    stretched = (pixels.double() * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high <= low, pixels, stretched)


def _equalize(pixels: Tensor, _: Values) -> Tensor:
    """Map each channel so that its values become about equally frequent, as Pillow counts it."""
    B, C, H, W = pixels.shape
    flat = pixels.view(B * C, -1).long()
    counts = torch.zeros(B * C, 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    brightest = flat.amax(dim=1, keepdim=True)
    step = (H * W - counts.gather(1, brightest)) // 255
    before = counts.cumsum(dim=1) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(0, 255)
    plain = (step == 0) | ((counts > 0).sum(dim=1, keepdim=True) <= 1)
    table = torch.where(plain, torch.arange(256, device=pixels.device), table)
    return table.gather(1, flat).view(B, C, H, W).to(torch.uint8)


COLOURS: dict[str, Callable[[Tensor, Values], Tensor]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": lambda pixels, _: 255 - pixels,
    "grey": lambda pixels, _: _luma(pixels)[:, None].expand_as(pixels),
}


def _blended(first: Tensor, second: Tensor, values: Values) -> Tensor:
    """Go from the first to the second by a factor for each picture, which may lie beyond them."""
    factor = _numbers([value[:1] for value in values], second)
    mixed = first.float() + factor * (second.float() - first.float())
    return mixed.clamp(0, 255).to(torch.uint8)


def _luma(pixels: Tensor) -> Tensor:
    """Return grey as Pillow makes it, (B, H, W)."""
    if pixels.shape[1] == 1:
        return pixels[:, 0]
    red, green, blue = (pixels[:, channel].int() * weight for channel, weight in enumerate(LUMA))
    return ((red + green + blue + 0x8000) >> 16).to(torch.uint8)


def _numbers(values: Values, like: Tensor) -> Tensor:
    return torch.tensor([value[0] for value in values], device=like.device, dtype=torch.float32)[:, None, None, None]


def _column(values: Sequence[float | bool], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)[:, None]
