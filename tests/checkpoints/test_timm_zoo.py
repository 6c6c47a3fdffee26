"""Every Vision Transformer in timm: opened with the same logits, or an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.peers import import_peer, relative_error, scramble

from vitrail.checkpoints.load import load
from vitrail.checkpoints.timm_config import _NAMES, fields_from_name
from vitrail.errors import CheckpointError

MODULES = ("timm.models.vision_transformer", "timm.models.deit", "timm.models.vision_transformer_hybrid")
WITH_ROPE = "timm.models.eva"
OTHER_ARCHITECTURES = (
    *("aimv2", "beit3", "18x2", "_rpn_", "_xp_", "vit_dlittle", "vit_dpwee", "vit_dwee", "vit_pwee", "test_vit4"),
    *("_resnet", "_mci_"),
)
"""Unsupported: RMSNorm, parallel or differential blocks, sub-norms, other stems."""
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "gelu"}
"""Our activations by timm's class names; a gated MLP is inferred from shapes."""


def zoo() -> list[str]:
    timm = import_peer("timm")
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__ in (*MODULES, WITH_ROPE)]


def test_all_names_are_timms() -> None:
    assert len(zoo()) > 240
    assert set(_NAMES) <= set(zoo())


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_every_name_matches_the_timm_model(every: int) -> None:
    """Built on the meta device: heads, activation, eps and pooled tokens of every supported name."""
    timm = import_peer("timm")
    for name in zoo()[::every]:
        if name not in _NAMES:
            eva = timm.model_entrypoint(name).__module__ == WITH_ROPE
            assert eva or any(word in name for word in OTHER_ARCHITECTURES), name
            with pytest.raises(CheckpointError, match="is not a plain ViT"):
                fields_from_name(name)
            continue
        with torch.device("meta"):
            peer = timm.create_model(name, depth=1)
        block, fields = peer.blocks[0], fields_from_name(name)
        result = (block.attn.num_heads, ACTIVATIONS[type(block.mlp.act).__name__], block.norm1.eps)
        assert (fields["heads"], fields["activation"], fields["norm_eps"]) == result, name
        assert (fields.get("pool_over") == "all") == bool(getattr(peer, "pool_include_prefix", False)), name


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_every_architecture_of_timm(shard: int, tmp_path: Path) -> None:
    timm = import_peer("timm")
    for name in sorted(_NAMES)[shard::4]:
        # Skip the largest models: they differ from the smaller ones only in size.
        peer = scramble(timm.create_model(name, depth=1, num_classes=3)).eval()
        timm.models.save_for_hf(peer, tmp_path / name)
        model = load(tmp_path / name).model
        assert relative_error(*outputs(model, peer)) <= tolerance(name), name
        for file in (tmp_path / name).iterdir():
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_every_bare_file_of_timm(shard: int, tmp_path: Path) -> None:
    """Without the config, with heads set: the same logits, an error, or a difference among the assumptions."""
    for name in zoo()[shard::4]:
        peer = scramble(one_block(name)).eval()
        torch.save(peer.state_dict(), tmp_path / "vit.pth")
        heads = getattr(getattr(peer.blocks[0], "attn", None), "num_heads", 1)
        try:
            bundle = load(tmp_path / "vit.pth", heads=heads)
        except CheckpointError:
            continue
        assert name in _NAMES, name
        if relative_error(*outputs(bundle.model, peer)) > tolerance(name):
            assumed = {assumption.field for assumption in bundle.assumptions}
            pool = {"token": "cls", "avg": "mean", "map": "map"}[peer.global_pool]
            fields = {
                field: value for field, value in {**fields_from_name(name), "pool": pool}.items() if field in assumed
            }
            fixed = load(tmp_path / "vit.pth", heads=heads, overrides=fields)
            assert relative_error(*outputs(fixed.model, peer)) <= tolerance(name), name


def tolerance(name: str) -> float:
    """Return the tolerance of the logits; dozens of convolutions in another summation order differ a little more."""
    return 1e-4 if any(part.startswith("r") and part[1:].isdigit() for part in name.split("_")) else 1e-5


def one_block(name: str) -> Any:
    timm = import_peer("timm")
    try:
        return timm.create_model(name, depth=1, num_classes=3)
    except AssertionError:  # a list with one entry per block
        return timm.create_model(name, depth=1, num_classes=3, num_kv_heads=1)


@torch.no_grad()
def outputs(model: Any, peer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, model.config.channels, *model.config.image_size)
    size = getattr(peer.patch_embed, "img_size", None) or x.shape[2:]
    # timm allows partial patches at the border, and ignores them.
    height, width = (there - here for there, here in zip(size, x.shape[2:], strict=True))
    return model(x), peer(torch.nn.functional.pad(x, (0, width, 0, height)))
