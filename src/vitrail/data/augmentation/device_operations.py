"""`pack_operations`: the plans of a batch as a few arrays, grouped by operation, for a device that runs them batched.

Whatever follows from the plans alone is computed here, on the CPU: source pixel indices and lookup tables. What
depends on the images is left to `on_device`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data.augmentation.augment import AugmentationPlan
from vitrail.data.augmentation.colours import Matrix
from vitrail.data.augmentation.randaugment import Operation
from vitrail.data.packing import PackedArrays, Slot

Values = Sequence[tuple[float, ...]]
MAP_MULTIPLE = 16
"""The number of pixel maps is rounded up to a multiple of this, so that it is the same for most batches."""
RAMP = np.arange(256, dtype=np.uint8)
"""The identity lookup table."""


class PixelMoves(NamedTuple):
    """Images whose pixels are gathered from elsewhere in the image."""

    images: Slot
    """(n,), int64."""
    sources: Slot
    """(k, H·W), int32: distinct pixel maps, source index by target pixel; H·W means outside the image."""
    map_of: Slot
    """(n,), int64: which of the maps each image uses."""


class ValueMaps(NamedTuple):
    """Images whose values go through a lookup table: first with precomputed tables, then the rest by operation."""

    images: Slot
    """(n,), int64."""
    tables: Slot
    """(precomputed, 256), uint8."""
    contrasts: Slot
    """(c,), float32: contrast factors, around the image's own mean."""
    autocontrasts: int
    equalizes: int
    ramp: Slot
    """(256,), uint8."""


class Blends(NamedTuple):
    """Images that are blended with a grey or smoothed version of themselves."""

    images: Slot
    """(n,), int64."""
    factors: Slot
    """(n, 1, 1, 1), float32: 0 is the other version, 1 the image."""


class OperationLayer(NamedTuple):
    """At most one operation per image."""

    moves: PixelMoves | None
    maps: ValueMaps | None
    grey: Blends | None
    smooth: Blends | None


class Warps(NamedTuple):
    """Images under an interpolated affine transform."""

    images: Slot
    """(n,), int64."""
    matrices: Slot
    """(n, 6), float64."""


class BatchOperations(NamedTuple):
    """All operations on a batch, applied in the order of the fields; the slots refer to packed memory."""

    rows: Slot
    """(B, H), int32: source row by target row, times W; H·W means outside the image."""
    columns: Slot
    """(B, W), int32."""
    warps: Warps | None
    layers: tuple[OperationLayer, ...]
    erased: tuple[Slot, Slot] | None
    """(B, H) and (B, W), bool: the rows and columns of the erased rectangle."""
    fill: int


def pack_operations(plans: Sequence[AugmentationPlan], size: tuple[int, int], packed: PackedArrays) -> BatchOperations:
    """Pack the plans for images of `size`."""
    layers = max(len(plan.operations) for plan in plans)
    return BatchOperations(
        *_crops(plans, size, packed),
        _warps(plans, packed),
        tuple(_layer(plans, number, size, packed) for number in range(layers)),
        _erased(plans, size, packed),
        plans[0].fill,
    )


def operation_group(operation: Operation) -> str | None:
    """Return the group of a layer that an operation is batched in; None for the identity."""
    name = operation.name
    if name == "identity":
        return None
    if name in MATRICES or name == "cutout":
        return "moves"
    if name in TABLES or (name == "contrast" and len(operation.values) > 1):
        return "tables"
    return "saturation" if name == "grey" else name


def _layer(
    plans: Sequence[AugmentationPlan], layer: int, size: tuple[int, int], packed: PackedArrays
) -> OperationLayer:
    images: dict[str, list[int]] = defaultdict(list)
    values: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for number, plan in enumerate(plans):
        if layer < len(plan.operations):
            operation = plan.operations[layer]
            name = operation.name
            if name == "contrast" and len(operation.values) > 1:
                name = "contrast_to_level"
            images[name].append(number)
            values[name].append(operation.values)
    if unknown := images.keys() - KNOWN:
        raise ValueError(f"not implemented on the device: {', '.join(sorted(unknown))}")
    return OperationLayer(
        _moves(images, values, size, packed),
        _maps(images, values, packed),
        # Grey is an image without saturation.
        _blends(images["saturation"] + images["grey"], values["saturation"] + [(0.0,)] * len(images["grey"]), packed),
        _blends(images["sharpness"], values["sharpness"], packed),
    )


def _blends(images: list[int], values: Values, packed: PackedArrays) -> Blends | None:
    if not images:
        return None
    return Blends(_numbers(images, packed), packed.put(_single(values).reshape(-1, 1, 1, 1)))


def _numbers(numbers: Sequence[int], packed: PackedArrays) -> Slot:
    return packed.put(np.array(numbers, dtype=np.int64))


def _single(values: Values, column: int = 0) -> NDArray[np.float32]:
    return np.array([row[column] for row in values], dtype=np.float32)


# ── geometry ──


def _crops(plans: Sequence[AugmentationPlan], size: tuple[int, int], packed: PackedArrays) -> tuple[Slot, Slot]:
    """Crop and flip, by whole pixels."""
    height, width = size
    tops = [0 if plan.box is None else int(plan.box.top) for plan in plans]
    lefts = [0 if plan.box is None else int(plan.box.left) for plan in plans]
    rows = _line(tops, [plan.flip_vertical for plan in plans], height)
    columns = _line(lefts, [plan.flip for plan in plans], width)
    outside = height * width
    rows = np.where((rows >= 0) & (rows < height), rows * width, outside)
    columns = np.where((columns >= 0) & (columns < width), columns, outside)
    return packed.put(rows.astype(np.int32)), packed.put(columns.astype(np.int32))


def _line(starts: list[int], backwards: list[bool], length: int) -> NDArray[np.int64]:
    along = np.arange(length)
    indices: NDArray[np.int64] = np.where(np.array(backwards)[:, None], along[::-1], along) + np.array(starts)[:, None]
    return indices


def _warps(plans: Sequence[AugmentationPlan], packed: PackedArrays) -> Warps | None:
    warped = [(number, plan.warp) for number, plan in enumerate(plans) if plan.warp is not None]
    if not warped:
        return None
    numbers, matrices = zip(*warped, strict=True)
    return Warps(_numbers(numbers, packed), packed.put(np.array(matrices, dtype=np.float64)))


def _moves(
    images: dict[str, list[int]],
    values: dict[str, list[tuple[float, ...]]],
    size: tuple[int, int],
    packed: PackedArrays,
) -> PixelMoves | None:
    moved, map_of, sources = list[int](), list[int](), list[NDArray[np.int32]]()
    seen: dict[tuple[str, tuple[float, ...]], int] = {}
    for name in (*MATRICES, "cutout"):
        for image, numbers in zip(images[name], values[name], strict=True):
            if (name, numbers) not in seen:
                seen[name, numbers] = len(sources)
                sources.append(_hole(numbers, *size) if name == "cutout" else _nearest(name, numbers, *size))
            moved.append(image)
            map_of.append(seen[name, numbers])
    if not moved:
        return None
    sources += sources[:1] * (-len(sources) % MAP_MULTIPLE)
    return PixelMoves(_numbers(moved, packed), packed.put(np.stack(sources)), _numbers(map_of, packed))


@lru_cache(maxsize=64)  # a recipe has one magnitude, hence few distinct maps
def _nearest(name: str, values: tuple[float, ...], height: int, width: int) -> NDArray[np.int32]:
    """Return the source pixel that contains the preimage of each pixel's centre."""
    a, b, c, d, e, f = MATRICES[name](values, height, width)
    y, x = np.arange(height)[:, None] + 0.5, np.arange(width)[None, :] + 0.5
    columns, rows = np.floor(a * x + b * y + c), np.floor(d * x + e * y + f)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return np.where(inside, rows * width + columns, height * width).astype(np.int32).reshape(-1)


def _hole(values: tuple[float, ...], height: int, width: int) -> NDArray[np.int32]:
    row, column, reach = values
    y, x = np.arange(height)[:, None], np.arange(width)[None, :]
    hole = (y >= row - reach) & (y < row + reach) & (x >= column - reach) & (x < column + reach)
    return np.where(hole, height * width, y * width + x).astype(np.int32).reshape(-1)


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


def _erased(plans: Sequence[AugmentationPlan], size: tuple[int, int], packed: PackedArrays) -> tuple[Slot, Slot] | None:
    if not any(plan.erased for plan in plans):
        return None
    boxes = np.array([(0, 0, 0, 0) if plan.erased is None else tuple(map(int, plan.erased)) for plan in plans])
    top, left, height, width = boxes.T[:, :, None]
    y, x = np.arange(size[0]), np.arange(size[1])
    return packed.put((y >= top) & (y < top + height)), packed.put((x >= left) & (x < left + width))


# ── values ──


def _maps(
    images: dict[str, list[int]], values: dict[str, list[tuple[float, ...]]], packed: PackedArrays
) -> ValueMaps | None:
    kinds = [*TABLES, "contrast", "autocontrast", "equalize"]
    numbers = [number for kind in kinds for number in images[kind]]
    if not numbers:
        return None
    tables = [table(values[kind]) for kind, table in TABLES.items() if images[kind]]
    return ValueMaps(
        _numbers(numbers, packed),
        packed.put(np.concatenate(tables) if tables else RAMP[None, :][:0]),
        packed.put(_single(values["contrast"])),
        len(images["autocontrast"]),
        len(images["equalize"]),
        packed.put(RAMP),
    )


def _to_level(values: Values, levels: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Interpolate, or extrapolate, from a grey level to each value by a factor."""
    first = levels[:, None]
    mixed = first + _single(values)[:, None] * (RAMP.astype(np.float32) - first)
    return mixed.clip(0, 255).astype(np.uint8)


def _posterize(values: Values) -> NDArray[np.uint8]:
    masks = [0xFF & ~(0xFF >> int(bits)) for (bits,) in values]
    return RAMP & np.array(masks, dtype=np.uint8)[:, None]


def _solarize(values: Values) -> NDArray[np.uint8]:
    return np.where(RAMP.astype(np.float32) < _single(values)[:, None], RAMP, 255 - RAMP)


def _solarize_add(values: Values) -> NDArray[np.uint8]:
    added = (RAMP.astype(np.float32) + _single(values)[:, None]).clip(0, 255).astype(np.uint8)
    return np.where(RAMP < 128, added, RAMP)


TABLES: dict[str, Callable[[Values], NDArray[Any]]] = {
    "brightness": lambda values: _to_level(values, np.zeros(len(values), np.float32)),
    "contrast_to_level": lambda values: _to_level(values, _single(values, 1)),
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "invert": lambda values: np.broadcast_to(255 - RAMP, (len(values), 256)),
}
KNOWN = frozenset(
    {
        *MATRICES,
        *TABLES,
        "cutout",
        "contrast",
        "autocontrast",
        "equalize",
        "saturation",
        "grey",
        "sharpness",
        "identity",
    }
)
