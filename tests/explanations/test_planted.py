"""A model trained to detect one patch among a hundred: its maps must find that patch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.explanations.request import ExplanationRequest, explain_pixels
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

SIDE, PATCH, CLASSES = 10, 4, 3
"""A hundred patches, so that the top 1% of a map is its maximum."""


def planted(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return noise with one patch, at a random position, whose pattern is the class; the classes; the positions.

    Every fourth image has none, and belongs to no class.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, PATCH * PATCH, generator=torch.Generator().manual_seed(3)).sign() * 2
    patches = 0.1 * torch.randn(count, SIDE * SIDE, PATCH * PATCH, generator=generator)
    labels = torch.arange(count) % (CLASSES + 1)
    places = torch.randint(SIDE * SIDE, (count,), generator=generator)
    has = labels < CLASSES
    patches[has, places[has]] = patterns[labels[has]]
    x = patches.reshape(count, SIDE, SIDE, PATCH, PATCH).transpose(2, 3)
    return x.reshape(count, 1, SIDE * PATCH, SIDE * PATCH), labels, places


def trained(pool: str) -> ViT:
    """Train with one sigmoid per class, so that a score rises only by evidence for its class."""
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(
            image_size=SIDE * PATCH, patch_size=PATCH, channels=1, width=16, depth=1, heads=1, mlp_width=16,
            classes=CLASSES, class_token="first" if pool == "cls" else "none", pool=pool, init="timm",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    for step in range(1500):  # usually about 300 are enough
        x, labels, _ = planted(24, 1000 + step)
        request = F.one_hot(labels, CLASSES + 1)[:, :CLASSES].float()
        loss = CLASSES * F.binary_cross_entropy_with_logits(model(x), request)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    return model.eval()


@pytest.mark.parametrize("pool", ["cls", *(pytest.param(pool, marks=pytest.mark.slow) for pool in ("mean", "map"))])
def test_the_decisive_patch_is_found(pool: str) -> None:
    model = trained(pool)
    x, labels, places = planted(96, 1)
    has = labels < CLASSES
    x, labels, places = x[has], labels[has], places[has]
    with torch.no_grad():
        assert ((model(x) > 0) == F.one_hot(labels, CLASSES)).all(), "the model has not learned it"
    for method in ("relevance", "gradcam"):
        maps = explain_pixels(model, x, ExplanationRequest(method), labels).flatten(1)
        assert torch.equal(maps.argmax(dim=1), places), method
