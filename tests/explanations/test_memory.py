"""Peak memory of explanations, from torch's profiler, at 384 pixels."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vitrail.explanations.request import ExplanationRequest, explain_pixels
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

HEADS = 2
ONE_MAP = HEADS * 577 * 577 * 4
"""Bytes of one layer's attention weights."""


def peak(run: Callable[[], object], folder: Path) -> int:
    """Return the peak memory growth while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    watched.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [(event["ts"], int(event["args"]["Bytes"])) for event in events if event.get("name") == "[memory]"]
    held, most = 0, 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    return most


def model(depth: int) -> ViT:
    return ViT(
        ViTConfig(image_size=384, patch_size=16, width=8, depth=depth, heads=HEADS, mlp_width=8, classes=3)
    ).eval()


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(1, 3, 384, 384)


@pytest.mark.parametrize("method", ["attention", "rollout", "relevance"])
def test_memory_does_not_grow_with_depth(method: str, image: Tensor, tmp_path: Path) -> None:
    few, many = model(2), model(8)
    shallow = peak(lambda: explain_pixels(few, image, ExplanationRequest(method), 0), tmp_path)
    deep = peak(lambda: explain_pixels(many, image, ExplanationRequest(method), 0), tmp_path)
    assert shallow > ONE_MAP, "the profiler does not see the maps"
    assert deep < shallow + ONE_MAP / 2


def test_the_profiler_sees_maps_that_are_kept(image: Tensor, tmp_path: Path) -> None:
    """Six more layers, all requested, are six more maps."""
    few, many = model(2), model(8)
    with torch.no_grad():
        shallow = peak(lambda: few.trace(image, attention=range(2)), tmp_path)
        deep = peak(lambda: many.trace(image, attention=range(8)), tmp_path)
    assert deep > shallow + 5.5 * ONE_MAP
