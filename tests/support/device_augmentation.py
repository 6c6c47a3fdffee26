"""Augmentation on the device, applied to plans that are not packed yet."""

import torch

from vitrail.data.augmentation.augment import AugmentationPlan
from vitrail.data.augmentation.device_operations import pack_operations
from vitrail.data.augmentation.on_device import apply_packed
from vitrail.data.packing import PackedArrays


def apply_all(plans: list[AugmentationPlan], pixels: torch.Tensor) -> torch.Tensor:
    """Apply to each image of (B, C, H, W), uint8, its plan."""
    packed = PackedArrays()
    operations = pack_operations(plans, (pixels.shape[2], pixels.shape[3]), packed)
    return apply_packed(operations, packed.memory().to(pixels.device), pixels)
