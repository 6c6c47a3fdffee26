"""`apply_packed`: augment a whole batch of small images at once, on their own device; and the padding of batches.

The plans are those of `augment.plan`, and so is the result, up to the rounding of a few pixels. Images must already
have their final size: crops are by whole pixels, or none, and nothing is resized.

Padding images give every batch the same count of each operation, so a CUDA graph captured for one batch fits the next.
How often each group of operations occurs is estimated once; a batch in which one occurs far more often than usual is
not padded.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import MIDDLE_GREY, Augmentation, AugmentationPlan
from vitrail.data.augmentation.device_operations import (
    BatchOperations,
    Blends,
    PixelMoves,
    ValueMaps,
    Warps,
    operation_group,
)
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.randaugment import Operation
from vitrail.errors import ConfigError

LUMA = (19595, 38470, 7471)
"""Pillow's weights of red, green and blue in grey, in 65536ths."""


def check_on_device(augmentation: Augmentation) -> None:
    """Raise if an augmentation is not implemented for batches on the device."""
    if augmentation.crop not in ("padded", "none"):
        raise ConfigError(
            f'augmentation.crop = "{augmentation.crop}" resizes each image, which is not implemented on the device; '
            'use "padded" or "none", or data.on_device = false'
        )
    if (missing := not_on_device(augmentation)) is not None:
        raise ConfigError(f"{missing} is not implemented on the device; remove it, or use data.on_device = false")


def not_on_device(augmentation: Augmentation) -> str | None:
    """Return the setting after the crop that is not implemented for batches on the device; None if all are."""
    for name, enabled in (("blur", augmentation.blur > 0), ("three_augment", augmentation.three_augment)):
        if enabled:
            return f"augmentation.{name}"
    if augmentation.jitter is not None and augmentation.jitter.hue:
        return "augmentation.jitter.hue"
    return 'augmentation.erasing_fill = "noise"' if augmentation.erasing_fill == "noise" else None


def apply_packed(operations: BatchOperations, memory: Tensor, pixels: Tensor) -> Tensor:
    """Apply packed operations to images (B, C, H, W), uint8; `memory` is on the same device.

    Nothing here synchronises with the device.
    """
    sources = operations.rows.of(memory)[:, :, None].long() + operations.columns.of(memory)[:, None, :]
    pixels = _gathered(pixels, sources.flatten(1).clamp_(max=pixels.shape[2] * pixels.shape[3]), operations.fill)
    if operations.warps is not None:
        _warp(operations.warps, memory, pixels, operations.fill)
    for layer in operations.layers:
        if layer.moves is not None:
            _move(layer.moves, memory, pixels, operations.fill)
        if layer.maps is not None:
            _map(layer.maps, memory, pixels)
        if layer.grey is not None and pixels.shape[1] == 3:
            _blend_with_grey(layer.grey, memory, pixels)
        if layer.smooth is not None:
            _blend_with_smooth(layer.smooth, memory, pixels)
    if operations.erased is not None:
        rows, columns = (slot.of(memory) for slot in operations.erased)
        pixels.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], MIDDLE_GREY)
    return pixels


# ── geometry ──


def _gathered(pixels: Tensor, sources: Tensor, fill: int) -> Tensor:
    """Gather each pixel from a source index (B, H·W); H·W means outside the image, and is filled."""
    B, C, H, W = pixels.shape
    with_outside = F.pad(pixels.flatten(2), (0, 1), value=fill)
    return with_outside.gather(2, sources[:, None].expand(B, C, H * W)).view(B, C, H, W)


def _move(moves: PixelMoves, memory: Tensor, pixels: Tensor, fill: int) -> None:
    at = moves.images.of(memory)
    sources = moves.sources.of(memory).long().index_select(0, moves.map_of.of(memory))
    pixels.index_copy_(0, at, _gathered(pixels.index_select(0, at), sources, fill))


def _warp(warps: Warps, memory: Tensor, pixels: Tensor, fill: int) -> None:
    """As Pillow: fill where the sampled point is outside, repeat the edge where only its neighbours are."""
    at, H, W = warps.images.of(memory), *pixels.shape[2:]
    a, b, c, d, e, f = warps.matrices.of(memory).T[:, :, None, None]
    down = torch.arange(H, device=pixels.device, dtype=torch.float64)[:, None] + 0.5
    right = torch.arange(W, device=pixels.device, dtype=torch.float64)[None, :] + 0.5
    x, y = a * right + b * down + c, d * right + e * down + f
    inside = (x >= 0) & (x < W) & (y >= 0) & (y < H)
    grid = torch.stack([2 * x / W - 1, 2 * y / H - 1], dim=-1).float()
    some = pixels.index_select(0, at).float()
    mixed = F.grid_sample(some, grid, mode="bilinear", padding_mode="border", align_corners=False)
    made = torch.where(inside[:, None], (mixed + 0.5).floor().clamp(0, 255), float(fill)).to(torch.uint8)
    pixels.index_copy_(0, at, made)


# ── values ──


def _map(maps: ValueMaps, memory: Tensor, pixels: Tensor) -> None:
    """Map values through a lookup table per image and channel."""
    at, ramp, lookup = maps.images.of(memory), maps.ramp.of(memory), maps.tables.of(memory)
    factors = maps.contrasts.of(memory)
    some = pixels.index_select(0, at)
    values = some.flatten(2).long()
    counts = (len(lookup), len(factors), maps.autocontrasts, maps.equalizes)
    _, contrasts, autocontrasts, equalizes = some.split(counts)
    tables = [lookup[:, None].expand(-1, pixels.shape[1], -1)]
    if len(contrasts):
        tables.append(_contrast(contrasts, factors, ramp))
    if len(autocontrasts):
        tables.append(_autocontrast(autocontrasts, ramp))
    if len(equalizes):
        tables.append(_equalize(values[-len(equalizes) :], ramp))
    pixels.index_copy_(0, at, torch.cat(tables).gather(2, values).view(some.shape))


def _contrast(pixels: Tensor, factors: Tensor, ramp: Tensor) -> Tensor:
    """Blend with the image's mean grey, rounded to the nearest integer."""
    count = pixels.shape[2] * pixels.shape[3]
    mean = (2 * _luma(pixels).sum(dim=(1, 2)) + count) // (2 * count)
    table = mean[:, None] + factors[:, None] * (ramp - mean[:, None])
    return table.clamp(0, 255).to(torch.uint8)[:, None].expand(-1, pixels.shape[1], -1)


def _autocontrast(pixels: Tensor, ramp: Tensor) -> Tensor:
    """Stretch each channel until its darkest value is 0 and its brightest 255."""
    low, high = (edge.double() for edge in pixels.flatten(2).aminmax(dim=2, keepdim=True))
    scale = 255.0 / (high - low).clamp(min=1e-9)
    stretched = (ramp * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high <= low, ramp, stretched)


def _equalize(values: Tensor, ramp: Tensor) -> Tensor:
    """Equalise each channel's histogram, with Pillow's arithmetic."""
    counts = values.new_zeros(*values.shape[:2], 256)
    counts.scatter_add_(2, values, values.new_ones(()).expand_as(values))
    step = (values.shape[2] - counts.gather(2, values.amax(dim=2, keepdim=True))) // 255
    before = counts.cumsum(dim=2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(0, 255).to(torch.uint8)
    return torch.where(step == 0, ramp, table)  # also for a single value


def _blend_with_grey(blends: Blends, memory: Tensor, pixels: Tensor) -> None:
    at = blends.images.of(memory)
    some = pixels.index_select(0, at)
    pixels.index_copy_(0, at, _blended(_luma(some)[:, None], some, blends.factors.of(memory)))


def _blend_with_smooth(blends: Blends, memory: Tensor, pixels: Tensor) -> None:
    """Smooth with Pillow's 3×3 kernel, ones around a five; edge pixels stay unchanged."""
    at = blends.images.of(memory)
    some = pixels.index_select(0, at)
    inner = some[:, :, 1:-1, 1:-1]
    # Integers until the division, so that the result does not depend on the device's convolution.
    sums = F.avg_pool2d(some.float(), 3, stride=1, divisor_override=1).add_(inner, alpha=4)
    inner.copy_(_blended(sums.add_(6.5).div_(13).floor_(), inner, blends.factors.of(memory)))
    pixels.index_copy_(0, at, some)


def _blended(first: Tensor, second: Tensor, factors: Tensor) -> Tensor:
    """Interpolate, or extrapolate, from the first to the second by a factor per image."""
    return (first + factors * (second - first)).clamp_(0, 255).to(torch.uint8)


def _luma(pixels: Tensor) -> Tensor:
    """Return Pillow's grey, (B, H, W), int32."""
    if pixels.shape[1] == 1:
        return pixels[:, 0].int()
    red, green, blue = pixels[:, :3].unbind(1)
    total = (red.int() * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return total.add_(0x8000).bitwise_right_shift_(16)


# ── padding of batches ──

SAMPLE = 2048
"""Images drawn to estimate how often each group occurs."""
SPREAD = 5.0
"""Standard deviations above the mean that still fit: all but one batch in hundreds of thousands."""
IDENTITY = Operation("identity", ())


class OperationCapacity(NamedTuple):
    """How many images of a padded batch have an operation of each group, by layer."""

    layers: tuple[dict[str, int], ...]
    added: int
    """Number of padding images."""


def operation_capacity(augmentation: Augmentation, size: tuple[int, int], batch: int) -> OperationCapacity:
    """Estimate the capacity that each group of operations needs in batches of this size."""
    sample = [augment.plan(augmentation, *size, size, draws(0, place, "rooms")) for place in range(SAMPLE)]
    layers, added = [], 0
    for layer in range(max(len(plan.operations) for plan in sample)):
        counts = Counter(_groups(sample, layer))
        capacities = {group: _capacity(count, batch) for group, count in sorted(counts.items())}
        others = _capacity(SAMPLE - counts.total(), batch)
        layers.append(capacities)
        # Enough for the batch with the fewest operations of these groups, which has the most without one.
        added = max(added, sum(capacities.values()) - batch + others)
    return OperationCapacity(tuple(layers), added)


def pad_plans(plans: Sequence[AugmentationPlan], capacity: OperationCapacity) -> list[AugmentationPlan]:
    """Append plans that fill every group to its capacity; plans that do not fit are returned unchanged."""
    columns: list[list[Operation]] = []
    for layer, sizes in enumerate(capacity.layers):
        present: dict[str, list[Operation]] = {group: [] for group in sizes}
        for plan in plans:
            group = operation_group(plan.operations[layer]) if layer < len(plan.operations) else None
            if group is not None:
                present.setdefault(group, []).append(plan.operations[layer])
        if not present.keys() <= sizes.keys() or any(not 0 < len(present[group]) <= sizes[group] for group in sizes):
            return list(plans)
        # Repeat operations that are present, so that padding needs no new lookup table or pixel map.
        column = [some[0] for group, some in present.items() for _ in range(sizes[group] - len(some))]
        if len(column) > capacity.added:
            return list(plans)
        columns.append(column + [IDENTITY] * (capacity.added - len(column)))
    if any(len(plan.operations) > len(capacity.layers) for plan in plans):
        return list(plans)
    padding = [plans[0]._replace(operations=operations) for operations in zip(*columns, strict=True)]
    return [*plans, *padding]


def _groups(plans: Sequence[AugmentationPlan], layer: int) -> list[str]:
    groups = (operation_group(plan.operations[layer]) for plan in plans if layer < len(plan.operations))
    return [group for group in groups if group is not None]


def _capacity(count: int, batch: int) -> int:
    rate = count / SAMPLE
    return min(batch, math.ceil(batch * rate + SPREAD * math.sqrt(batch * rate * (1 - rate))))
