"""Resampling against the libraries it is named after."""

from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from tests.support.peers import import_peer

from vitrail.models.config import ViTConfig
from vitrail.models.position import resample_grid, resample_kernel, resample_line, resample_offsets
from vitrail.models.vit import ViT

GRIDS = [((14, 14), (24, 24)), ((14, 14), (7, 7)), ((14, 14), (7, 28)), ((7, 5), (12, 9)), ((3, 8), (8, 3))]


@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((4, 4), (1, 6))])
def test_google_is_scipys_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = np.random.default_rng(0).normal(size=(*old, 6))
    expected = scipy.ndimage.zoom(table, (new[0] / old[0], new[1] / old[1], 1), order=1)
    actual = resample_grid(torch.from_numpy(table).float().reshape(1, -1, 6), old, new, "google")
    assert np.abs(actual.numpy().reshape(*new, 6) - expected).max() <= 1e-6


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_timm(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = torch.randn(1, old[0] * old[1], 6)
    expected = import_peer("timm.layers").resample_abs_pos_embed(
        table, list(new), list(old), num_prefix_tokens=0, interpolation="bicubic", antialias=True
    )
    assert torch.allclose(resample_grid(table, old, new, "timm"), expected, atol=1e-6)


def test_torchvision() -> None:
    function = import_peer("torchvision.models.vision_transformer").interpolate_embeddings
    table = torch.randn(1, 1 + 14 * 14, 6)
    state = function(384, 16, {"encoder.pos_embedding": table})
    result = resample_grid(table[:, 1:], (14, 14), (24, 24), "torchvision")
    assert torch.allclose(result, state["encoder.pos_embedding"][:, 1:], atol=1e-6)


def test_transformers() -> None:
    module = import_peer("transformers.models.vit.modeling_vit")
    config = import_peer("transformers").ViTConfig(hidden_size=6, num_attention_heads=1, image_size=224)
    peer = module.ViTEmbeddings(config)
    peer.position_embeddings.data.normal_()
    expected = peer.interpolate_pos_encoding(torch.zeros(1, 197, 6), 112, 448)
    if torch.equal(expected, peer.position_embeddings):  # it may keep the table if the counts match
        expected = peer.interpolate_pos_encoding(torch.zeros(1, 1 + 7 * 27, 6), 112, 432)
        new = (7, 27)
    else:
        new = (7, 28)
    actual = resample_grid(peer.position_embeddings[:, 1:], (14, 14), new, "transformers")
    assert torch.allclose(actual, expected[:, 1:], atol=1e-6)


@pytest.mark.parametrize("new", [(16, 16), (37, 37), (10, 20)])
def test_dinov2(new: tuple[int, int]) -> None:
    """DINOv2's rule from its definition: the scale is a tenth of a patch too large, and used unchanged.

    Output cell i is at (i + 0.5) · old / (new + 0.1) − 0.5, read with torch's cubic kernel (a = −0.75).
    """
    table = torch.randn(1, 14 * 14, 3, dtype=torch.float64)

    def weights(n: int) -> torch.Tensor:
        matrix = torch.zeros(n, 14, dtype=torch.float64)
        for i in range(n):
            centre = (i + 0.5) * 14 / (n + 0.1) - 0.5
            left = int(np.floor(centre))
            for j in range(left - 1, left + 3):
                x, a = abs(centre - j), -0.75
                if x <= 1:
                    w = (a + 2) * x**3 - (a + 3) * x**2 + 1
                else:
                    w = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
                matrix[i, min(max(j, 0), 13)] += w
        return matrix

    grid = table.reshape(14, 14, 3)
    expected = torch.einsum("ri,cj,ijd->rcd", weights(new[0]), weights(new[1]), grid).reshape(1, -1, 3)
    actual = resample_grid(table.float(), (14, 14), new, "dinov2")
    assert torch.allclose(actual, expected.float(), atol=1e-4)


@pytest.mark.parametrize("size", [(8, 8), (16, 16), (32, 24), (14, 14)])
def test_patch_kernels_as_in_timm(size: tuple[int, int]) -> None:
    """timm has the same rule with another default interpolation; with ours it must agree."""
    kernel = torch.randn(5, 3, 12, 12)
    function = import_peer("timm.layers").resample_patch_embed
    expected = function(kernel, list(size), interpolation="bilinear", antialias=False)
    assert torch.allclose(resample_kernel(kernel, size), expected, atol=1e-4)


def test_resample_line_is_a_grid_of_one_column() -> None:
    line = torch.linspace(0, 1, 5)[:, None]
    assert torch.allclose(resample_line(line, 9, "google"), torch.linspace(0, 1, 9)[:, None], atol=1e-6)


def test_relative_offsets_keep_the_direction_of_a_step() -> None:
    """A table that encodes (rows down, columns right) still does so on a grid twice as large."""
    old, new = (5, 7), (10, 14)

    def steps(grid: tuple[int, int]) -> torch.Tensor:
        reach = grid[0] * grid[1] - 1
        offset = torch.arange(-reach, reach + 1).double()
        down = (offset / grid[1]).round()
        return torch.stack([down / grid[0], (offset - down * grid[1]) / grid[1]], dim=1)

    result = resample_offsets(steps(old), old, new)
    inner = steps(new).abs().amax(dim=1) < 0.4  # near the ends an offset is ambiguous
    assert inner.sum() > 50
    assert torch.allclose(result[inner], steps(new)[inner], atol=1e-6)


def test_a_resized_model_equals_timms() -> None:
    """224 -> 384 with timm's method, resized by each library's code."""
    options: dict[str, Any] = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    peer = import_peer("timm.models.vision_transformer").VisionTransformer(img_size=64, **options).eval()
    ours = ViT(ViTConfig(image_size=64, patch_size=8, width=24, depth=2, heads=3, classes=5)).eval()
    ours.load_state_dict(peer.state_dict())
    peer.set_input_size((96, 112))
    ours.resize((96, 112), method="timm")
    x = torch.randn(2, 3, 96, 112)
    with torch.no_grad():
        assert torch.allclose(ours(x), peer(x), atol=1e-6)
