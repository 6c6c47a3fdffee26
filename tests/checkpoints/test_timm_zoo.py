"""Every Vision Transformer that timm has a name for: opened with the same logits, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.peers import import_peer, relative_error, scramble

from vitrail.checkpoints.load import load
from vitrail.errors import CheckpointError

OTHER_ARCHITECTURES = ("aimv2", "beit3", "18x2", "_rpn_", "_xp_", "vit_dlittle", "vit_dpwee", "vit_dwee", "vit_pwee")
"""RMSNorm, parallel or differential blocks, sub-norms: what our model does not have."""


@pytest.mark.slow
def test_every_architecture_of_timm(tmp_path: Path) -> None:
    timm = import_peer("timm")
    modules = ("timm.models.vision_transformer", "timm.models.deit")
    names = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__ in modules]
    assert len(names) > 150
    opened, refused = [], []
    for name in names:
        # The largest of a family stand for the smaller: what differs between them is the width.
        peer = scramble(timm.create_model(name, depth=1, num_classes=3)).eval()
        timm.models.save_for_hf(peer, tmp_path / name)
        try:
            model = load(tmp_path / name).model
        except CheckpointError:
            refused.append(name)
            continue
        assert relative_error(*answers(model, peer)) <= 1e-5, name
        opened.append(name)
        del peer, model
        for file in (tmp_path / name).iterdir():
            file.unlink()
    assert all(any(word in name for word in (*OTHER_ARCHITECTURES, "test_vit4")) for name in refused), refused
    assert len(opened) > 130


def answers(model: Any, peer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, model.config.channels, *model.config.image_size)
    # timm lets a picture hold a part of a patch, which it ignores.
    height, width = (there - here for there, here in zip(peer.patch_embed.img_size, x.shape[2:], strict=True))
    with torch.no_grad():
        return model(x), peer(torch.nn.functional.pad(x, (0, width, 0, height)))
