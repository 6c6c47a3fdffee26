"""Attention weights compared to timm and transformers, with the same weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.peer_models import SMALL, TRANSFORMERS, timm_vit
from tests.support.peers import import_peer, rename, scramble
from torch import Tensor, nn

from vitrail.explanations.attention import attention_maps, attention_rows
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

TOLERANCE = 1e-5


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert expected.std() > 1e-3, "uniform attention proves nothing"
    assert float((actual - expected).abs().max()) <= TOLERANCE


@torch.no_grad()
def test_transformers() -> None:
    module = import_peer("transformers")
    config = module.ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8,
        num_labels=7, attn_implementation="eager",
    )  # fmt: skip
    peer = scramble(module.ViTForImageClassification(config))
    state = rename(peer.state_dict(), TRANSFORMERS)
    for i in range(3):
        for kind in ("weight", "bias"):
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([state.pop(f"blocks.{i}.attn.{p}.{kind}") for p in "qkv"])
    ours = ViT(ViTConfig(**SMALL, mlp_width=96, norm_eps=1e-12)).eval()
    ours.load_state_dict(state)
    x = torch.randn(2, 3, 32, 32)
    expected = peer(x, output_attentions=True).attentions
    for layer in range(3):
        assert_same(attention_rows(ours, x, layer), expected[layer])
        assert_same(attention_maps(ours, x, layer, "3,1"), expected[layer][:, :, 1 + 13, 1:].unflatten(2, (4, 4)))


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param(
            {"img_size": (32, 48), "patch_size": (8, 16)}, {"image_size": (32, 48), "patch_size": (8, 16)}, id="oblong"
        ),
        pytest.param(
            {"reg_tokens": 4, "no_embed_class": True}, {"registers": 4, "position_covers": "patches"}, id="registers"
        ),
    ],
)
@torch.no_grad()
def test_timm(options: dict[str, Any], fields: dict[str, Any]) -> None:
    peer = timm_vit(**options)
    ours = ViT(ViTConfig(**{**SMALL, **fields})).eval()
    ours.load_state_dict(peer.state_dict())
    # Its eager attention passes the weights through a dropout, where they can be captured.
    seen: list[Tensor] = []

    class Capture(nn.Module):
        def forward(self, weights: Tensor) -> Tensor:
            seen.append(weights)
            return F.dropout(weights, 0.0)

    for block in peer.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop = Capture()
    x = torch.randn(2, 3, *ours.config.image_size)
    peer(x)
    assert len(seen) == 3
    special = 1 + ours.config.registers
    for layer, expected in enumerate(seen):
        assert_same(attention_rows(ours, x, layer), expected)
        assert_same(attention_maps(ours, x, layer), expected[:, :, 0, special:].unflatten(2, ours.config.grid))
