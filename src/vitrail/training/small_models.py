"""What the default models of small data have in common, with and without labels: patches, image size and heads."""

from typing import Any


def patch_of(fields: dict[str, Any], default: int) -> tuple[int, int]:
    """Return height and width of a patch, of the fields that a recipe sets, or by default.

    What is not a size is left to the config's validation.
    """
    size: Any = fields.get("patch_size")
    sides = (size, size) if isinstance(size, int) else size
    fits = isinstance(sides, (list, tuple)) and len(sides) == 2 and all(isinstance(s, int) and s > 0 for s in sides)
    return (sides[0], sides[1]) if fits else (default, default)


def width_of(fields: dict[str, Any], default: int) -> int:
    """Return the width that a recipe sets, or the default."""
    width = fields.get("width")
    return width if isinstance(width, int) else default


def image_size_for(patch: tuple[int, int], side: int, largest: int) -> tuple[int, int]:
    """Return the size of images that are `side` wide and high, but at most `largest`: whole patches."""
    height, width = (max(one, min(side, largest) // one * one) for one in patch)
    return height, width


def heads_for(width: int, head_width: int) -> int:
    """Return a number of heads that divides the width, each at least as wide as asked for if there are several."""
    return next(heads for heads in range(max(1, width // head_width), 0, -1) if width % heads == 0)
