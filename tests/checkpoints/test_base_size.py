"""Full-size models of every peer, saved by the peer, opened with the same logits, and written back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import assert_same_logits, assert_writes_back
from tests.support.peers import import_peer, scramble
from torch import nn

from vitrail.checkpoints.formats import lucidrains, timm, torchvision, transformers
from vitrail.checkpoints.load import load

pytestmark = pytest.mark.slow


def build(kind: str) -> nn.Module:
    match kind:
        case "timm":
            model = import_peer("timm").create_model("vit_base_patch16_224")
        case "torchvision":
            model = import_peer("torchvision.models").vit_b_16(weights=None)
        case "transformers":
            module = import_peer("transformers")
            model = module.ViTForImageClassification(module.ViTConfig(num_labels=1000))
        case _:
            model = import_peer("vit_pytorch").ViT(
                image_size=224, patch_size=16, num_classes=1000, dim=768, depth=12, heads=12, mlp_dim=3072
            )
    peer: nn.Module = scramble(model)
    return peer


FAMILIES: dict[str, Any] = {
    "timm": timm.FAMILY,
    "torchvision": torchvision.FAMILY,
    "transformers": transformers.FAMILY,
    "lucidrains": lucidrains.FAMILY,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_base(kind: str, tmp_path: Path) -> None:
    peer = build(kind)
    if kind == "transformers":
        peer.save_pretrained(tmp_path)
        bundle = load(tmp_path)
    else:
        torch.save(peer.state_dict(), tmp_path / "vit.pth")
        bundle = load(tmp_path / "vit.pth")
    assert bundle.provenance["family"] == kind
    assert bundle.model.config.heads == 12
    assert_same_logits(bundle, peer)
    assert_writes_back(bundle, FAMILIES[kind], peer)
