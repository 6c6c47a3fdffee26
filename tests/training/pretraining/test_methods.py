"""What all pretraining modules have in common: several ranks need a gradient for every parameter that trains."""

from typing import Any

import pytest
import torch

from vitrail import ViT, ViTConfig
from vitrail.training.pretraining.dino import Dino, DinoSettings
from vitrail.training.pretraining.mae import MaeSettings, MaskedAutoencoder
from vitrail.training.pretraining.masked_patches import MaskedPatchesSettings, MaskedPatchPrediction

POOLING: list[dict[str, Any]] = [
    {"pool": "map"},
    {"pool": "cls", "representation": 24},
    {"pool": "mean", "class_token": "none", "final_norm": "after_pool"},
]


def loss_of(method: str, model: ViT) -> tuple[torch.nn.Module, torch.Tensor]:
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16, 3)
    if method == "mae":
        mae = MaskedAutoencoder(model, MaeSettings(decoder_width=16, decoder_depth=1, decoder_heads=2))
        return mae, mae(images, noise[..., 0])
    if method == "masked_patches":
        half = (0.5,) * 3
        predicting = MaskedPatchPrediction(model, MaskedPatchesSettings(), half, half)
        return predicting, predicting(images, noise)
    dino = Dino(model, DinoSettings(prototypes=13, hidden=20, bottleneck=8, local_crops=3))
    return dino, dino(torch.randn(2, 2, 3, 32, 32), torch.randn(2, 3, 3, 16, 16), 0.04).loss


@pytest.mark.parametrize("method", ["mae", "masked_patches", "dino"])
@pytest.mark.parametrize("pooling", POOLING, ids=lambda options: options["pool"])
def test_every_trained_parameter_has_a_gradient(method: str, pooling: dict[str, Any]) -> None:
    """DistributedDataParallel raises in the second step if one has none."""
    config = ViTConfig(image_size=32, patch_size=8, width=24, depth=2, heads=3, classes=0, stem="conv", **pooling)
    module, loss = loss_of(method, ViT(config).train())
    loss.backward()
    assert [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None] == []
