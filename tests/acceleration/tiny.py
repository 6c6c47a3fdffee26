"""Tiny models of every kind, images for them, and the command line without a new process."""

import sys
from typing import Any, NamedTuple

import pytest
import torch
from tests.models.test_compile_export import KINDS as MODELS
from tests.models.test_compile_export import TINY
from tests.peers import scramble
from torch import Tensor

import vitrail.__main__
from vitrail import Bundle, Preprocess, ViT, ViTConfig

KINDS: dict[str, dict[str, Any]] = {
    **MODELS,
    "no_position": {"position": "none", "activation": "quick_gelu", "norm_before_blocks": True},
    "mean_of_all": {"pool": "mean", "pool_over": "all", "final_norm": "after_pool", "class_token": "none"},
    "every_token": {"pool": "none", "activation": "gelu_tanh"},
    "no_head": {"classes": 0, "activation": "relu", "out_proj": False},
    "grey": {"channels": 1, "head_dim": 4},
}
"""Every stem, token, position type, pool and activation; all can be exported."""
CPU = torch.device("cpu")


def bundle(kind: str = "plain", **changes: Any) -> Bundle:
    """Return a tiny model with random parameters and an asymmetric preprocessing."""
    config = ViTConfig(**{**TINY, **KINDS[kind], **changes})
    model = scramble(ViT(config))
    size = Preprocess(size=config.image_size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    names = tuple("abcde") if config.classes else None
    return Bundle(model, size.with_channels(config.channels), names)


def pixels(count: int, channels: int = 3, seed: int = 1) -> Tensor:
    """Return images in channels-last memory format, like batches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 16, 32, channels), dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)


@torch.inference_mode()
def eager(made: Bundle, images: Tensor) -> Tensor:
    """Return the model's output in float32."""
    outputs: Tensor = made.model(made.preprocess.normalise(images))
    return outputs


class CommandOutput(NamedTuple):
    """The output of a command."""

    code: int
    out: str
    err: str


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> CommandOutput:
    """Run a CLI command in this process, which has already imported torch."""
    monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        vitrail.__main__.main()
    output = capsys.readouterr()
    return CommandOutput(int(left.value.code or 0), output.out, output.err)
