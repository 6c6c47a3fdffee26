"""The public functions: what `import vitrail` offers, each one call deep."""

from vitrail.models.config import ViTConfig
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT


def create(
    name: str | ViTConfig,
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
) -> ViT:
    """Build a fresh model: `create("B/16")`, `create("vit_small_patch16_224", classes=10)`, or from a `ViTConfig`.

    The arguments are the fields people change most. Any other is changed in the config:
    `create(variant_config("B/16").replace(pool="mean"))`.
    """
    config = name if isinstance(name, ViTConfig) else variant_config(name)
    changes = {"classes": classes, "image_size": image_size, "patch_size": patch_size, "channels": channels}
    return ViT(config.replace(**{field: value for field, value in changes.items() if value is not None}))
