"""The paper's figures: numbers against float64 references, and drawings of those numbers."""

import math
import weakref
from itertools import product
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, Diverged, InputError
from vitrail.explanations.figures import (
    Absent,
    Figure,
    attention_distance,
    distance_figure,
    even_distance,
    filters,
    filters_figure,
    position_similarity,
    positions_figure,
)
from vitrail.explanations.figures import distance as distance_module
from vitrail.explanations.figures.figure import TEXT, coloured
from vitrail.models.blocks import Attention
from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.vit import ViT

SMALL = {"image_size": (12, 20), "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "classes": 3, "init": "timm"}


def vit(**fields: Any) -> ViT:
    """Build a tiny model with random weights everywhere, so that nothing is zero by initialisation."""
    model = ViT(ViTConfig(**{**SMALL, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def bundle(**fields: Any) -> Bundle:
    model = vit(**fields)
    channels = model.config.channels
    half = (0.5,) * channels
    return Bundle(model, Preprocess(size=model.config.image_size, channels=channels, mean=half, std=half))


def pixels(config: ViTConfig, count: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, config.channels, *config.image_size), dtype=torch.uint8)


def drawn(made: Figure | Absent) -> Figure:
    assert isinstance(made, Figure)
    return made


# ── filters ──


def test_filters_are_eigenvectors_of_the_covariance() -> None:
    model = vit()
    actual = filters(model, 5)
    weight = model.patch_embed.proj.weight.detach().double().numpy()
    flat = weight.transpose(0, 2, 3, 1).reshape(16, -1)
    values, vectors = np.linalg.eigh(np.cov(flat, rowvar=False, bias=True))
    for number in range(5):
        expected, component = vectors[:, -1 - number], actual.components[number].ravel()
        assert abs(expected @ component) == pytest.approx(1, abs=1e-9)
        assert actual.explained[number] == pytest.approx(values[-1 - number] / values.sum(), abs=1e-9)
        assert component[np.abs(component).argmax()] > 0
    assert actual.components.shape == (5, 4, 4, 3)
    assert (actual.kernels, actual.of_patches) == (16, True)


def test_a_sign_does_not_depend_on_the_kernels_signs() -> None:
    model = vit()
    before = filters(model)
    with torch.no_grad():
        model.patch_embed.proj.weight.neg_()
    np.testing.assert_allclose(filters(model).components, before.components, atol=1e-8)


def test_components_are_limited_by_the_rank() -> None:
    model = vit(channels=1, patch_size=2, image_size=4)
    assert len(filters(model).components) == 4  # 2×2 pixels of one channel
    with torch.no_grad():
        model.patch_embed.proj.weight[:] = torch.rand(1, 1, 2, 2)
    assert len(filters(model).components) == 0
    made = filters_figure(Bundle(model, Preprocess(size=4, channels=1, mean=(0.5,), std=(0.5,))))
    assert isinstance(made, Absent)
    assert made.reason == "all kernels of the patch embedding are equal, so they have no principal components."


@pytest.mark.parametrize(
    ("fields", "shape", "words"),
    [
        ({"stem": "conv_stem"}, (3, 3, 3), "first convolution of its stem (this model has no single patch projection)"),
        ({"stem": "resnet", "resnet": ResNet(depths=())}, (7, 7, 3), "its ResNet's first convolution, standardised"),
        ({"stem": "linear"}, (4, 4, 3), "of the patch embedding, by decreasing"),
        ({"stem": "linear_norm"}, (4, 4, 3), "patch embedding, which follows a LayerNorm"),
        ({"channels": 1}, (4, 4, 1), "white is positive"),
        ({"channels": 2}, (4, 4, 2), "Of 2 channels the first is shown"),
        ({"channels": 5, "patch_size": (4, 2)}, (4, 2, 5), "Of 5 channels the first three"),
    ],
)
def test_every_stem_has_filters(fields: dict[str, Any], shape: tuple[int, ...], words: str) -> None:
    made = bundle(**fields)
    assert filters(made.model).components.shape[1:] == shape
    figure = drawn(filters_figure(made))
    assert words in figure.caption
    assert figure.image is not None


def test_a_hybrids_kernels_are_standardised_first() -> None:
    model = vit(stem="resnet", resnet=ResNet(depths=()))
    before = filters(model).components
    with torch.no_grad():  # the layer standardises its kernels, and so does the figure
        model.patch_embed.backbone.stem.conv.weight.mul_(torch.rand(64, 1, 1, 1) + 1).add_(torch.rand(64, 1, 1, 1))
    np.testing.assert_allclose(filters(model).components, before, atol=1e-3)


def test_the_first_filter_is_at_the_top_left() -> None:
    made = bundle()
    component = filters(made.model).components[0]
    image = drawn(filters_figure(made)).image
    assert image is not None
    tile = np.asarray(image)[16 : 16 + 96 : 24, 16 : 16 + 96 : 24]  # 4×4 pixels, each 24 wide, after the margin
    expected = 127.5 * (1 + component / np.abs(component).max())
    np.testing.assert_allclose(tile, expected, atol=0.51)


# ── positions ──


def naive_similarity(table: NDArray[np.float64], grid: tuple[int, int]) -> NDArray[np.float64]:
    rows, columns = grid
    result = np.zeros((rows, columns, rows, columns))
    for r, c, y, x in product(range(rows), range(columns), range(rows), range(columns)):
        one, other = table[r * columns + c], table[y * columns + x]
        result[r, c, y, x] = one @ other / math.sqrt((one @ one) * (other @ other))
    return result


@pytest.mark.parametrize(
    "special", [{}, {"class_token": "last", "registers": 2}, {"class_token": "none", "pool": "mean"}]
)
@pytest.mark.parametrize("covers", ["patches", "class", "all"])
def test_similarity_of_a_learned_table(special: dict[str, Any], covers: str) -> None:
    model = vit(position_covers=covers, **special)
    table = model.pos_embed.detach().double().numpy()[0]
    first = 0 if special.get("class_token") == "last" else len(table) - 15
    np.testing.assert_allclose(
        position_similarity(model), naive_similarity(table[first : first + 15], (3, 5)), atol=1e-12
    )


def test_similarity_of_rows_and_columns_and_of_blocks() -> None:
    model = vit(position="learned_2d")
    row, column = model.pos_embed_row.detach().double().numpy(), model.pos_embed_col.detach().double().numpy()
    table = np.stack([np.concatenate([column[c], row[r]]) for r in range(3) for c in range(5)])
    np.testing.assert_allclose(position_similarity(model), naive_similarity(table, (3, 5)), atol=1e-12)
    model = vit(position_at="every_block")
    for block in (0, 1, -1):
        table = model.blocks[block].pos_embed.detach().double().numpy()[0, 1:]
        np.testing.assert_allclose(position_similarity(model, block), naive_similarity(table, (3, 5)), atol=1e-12)


def test_sine_cosine_similarity_decreases_with_distance() -> None:
    similar = position_similarity(vit(position="sincos_2d", image_size=16, position_at="shared"))
    assert similar[0, 0, 0, 0] == pytest.approx(1)
    assert similar[0, 0, 0, 0] > similar[0, 0, 0, 1] > similar[0, 0, 1, 1]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_any_grid_can_be_drawn(rows: int, columns: int, height: int, width: int) -> None:
    fields = {"image_size": (rows * height, columns * width), "patch_size": (height, width), "channels": 1}
    made = bundle(**fields, width=8, depth=1)
    similar = position_similarity(made.model)
    assert similar.shape == (rows, columns, rows, columns)
    np.testing.assert_allclose(similar, similar.transpose(2, 3, 0, 1), atol=1e-12)
    assert np.abs(similar).max() <= 1
    np.testing.assert_allclose(np.einsum("rcrc->rc", similar), 1)
    figure = positions_figure(made)
    if rows * columns == 1:
        assert isinstance(figure, Absent)
        assert "one patch" in figure.reason
    else:
        image = drawn(figure).image
        assert image is not None
        # Every patch has similarity 1 with itself, and that colour is in the drawing.
        assert (np.asarray(image) == coloured(np.ones(1), -1, 1)).all(axis=2).any()
        assert f"{rows}×{columns} patches" in drawn(figure).caption


@pytest.mark.parametrize("size", [(1, 3000), (60, 60), (2000, 1)])
def test_a_large_grid_is_subsampled(size: tuple[int, int]) -> None:
    figure = drawn(positions_figure(bundle(image_size=size, patch_size=1, position="sincos_2d", depth=1)))
    assert figure.image is not None
    assert max(figure.image.size) < 1500
    assert "chosen evenly" in figure.caption


def test_per_block_tables_are_drawn_separately() -> None:
    one = drawn(positions_figure(bundle()))
    many = drawn(positions_figure(bundle(position_at="every_block", depth=6)))
    assert one.image is not None
    assert many.image is not None
    assert many.image.height > one.image.height
    assert "shown are blocks 1, 3, 4, 6 of 6" in many.caption


@pytest.mark.parametrize(
    ("position", "words"), [("none", "no position information"), ("rope_2d", "rotates"), ("relative", "offset")]
)
def test_a_model_without_a_table_gives_the_reason(position: str, words: str) -> None:
    made = bundle(position=position)
    figure = positions_figure(made)
    assert isinstance(figure, Absent)
    assert words in figure.reason
    assert figure.reason.count(".") == 1
    with pytest.raises(InputError, match=words):
        position_similarity(made.model)


def test_degenerate_position_embeddings() -> None:
    made = bundle()
    with torch.no_grad():
        made.model.pos_embed[:, 1] = 0
    similar = position_similarity(made.model)
    assert not similar[0, 0].any()
    assert similar[1, 1, 1, 1] == pytest.approx(1)
    torch.nn.init.zeros_(made.model.pos_embed)
    figure = positions_figure(made)
    assert isinstance(figure, Absent)
    assert "all zero" in figure.reason
    torch.nn.init.constant_(made.model.pos_embed, math.nan)
    with pytest.raises(Diverged, match="position embeddings"):
        positions_figure(made)
    with pytest.raises(InputError, match="layers 0 to 1"):
        position_similarity(vit(position_at="every_block"), 2)


# ── attention distance ──


def naive_distance(model: ViT, images: Tensor) -> NDArray[np.float64]:
    """Compute every distance in a loop, from `trace` in float64."""
    model, config = model.double().eval(), model.config
    (rows, columns), (height, width) = config.grid, config.patch_size
    traced = model.trace(images.double(), attention=range(config.depth))
    result = np.zeros((config.depth, config.heads))
    for layer, head in product(range(config.depth), range(config.heads)):
        means = []
        for weights in traced.attention[layer][:, head].detach().numpy():
            for q in range(rows * columns):
                row = weights[config.layout.patches][q][config.layout.patches]
                row = row / row.sum()
                far = 0.0
                for k in range(rows * columns):
                    down, across = (q // columns - k // columns) * height, (q % columns - k % columns) * width
                    far += row[k] * math.sqrt(down**2 + across**2)
                means.append(far)
        result[layer, head] = np.mean(means)
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"patch_size": (4, 2), "registers": 2},
        {"class_token": "last", "registers": 1, "distillation_token": True},
        {"class_token": "none", "pool": "map", "norm_order": "post"},
        {"position": "rope_2d", "qk_norm": True},
        {"position": "relative"},
        {"position": "learned_2d", "position_at": "every_block"},
        {"position_at": "shared"},
    ],
)
def test_distance_matches_the_definition(fields: dict[str, Any]) -> None:
    model = vit(**fields)
    images = torch.randn(3, 3, 12, 20)
    result = attention_distance(model, images.split(2))
    np.testing.assert_allclose(result, naive_distance(model, images), rtol=1e-4)


def even(model: ViT) -> ViT:
    """Set all queries to zero, so that attention is uniform."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: model.config.width] = 0
            block.attn.qkv.bias[: model.config.width] = 0
    return model


@pytest.mark.parametrize("special", [{}, {"registers": 3}, {"class_token": "none", "pool": "mean"}])
def test_uniform_attention_on_a_grid_of_3_by_5(special: dict[str, Any]) -> None:
    # Between two of 15 patches, in steps of a patch: dy from 0 to 2, dx from 0 to 4. Of the ordered pairs,
    #   dy = 0: 3 of rows,  dy = 1: 2·2 = 4,  dy = 2: 2·1 = 2                 (together 9 = 3²)
    #   dx = 0: 5 of columns,  1: 2·4 = 8,  2: 2·3 = 6,  3: 2·2 = 4,  4: 2·1 = 2   (together 25 = 5²)
    # so a distance √(dy² + dx²) counts (rows at dy)·(columns at dx) times, of 225:
    #   dy = 0: 3·( 5·0  + 8·1  + 6·2  + 4·3   + 2·4  ) = 3·40
    #   dy = 1: 4·( 5·1  + 8·√2 + 6·√5 + 4·√10 + 2·√17) = 4·50.6254
    #   dy = 2: 2·( 5·2  + 8·√5 + 6·√8 + 4·√13 + 2·√20) = 2·68.2256
    # (120 + 202.5017 + 136.4512) / 225 = 2.03979
    by_hand = (
        3 * 40
        + 4 * (5 + 8 * 2**0.5 + 6 * 5**0.5 + 4 * 10**0.5 + 2 * 17**0.5)
        + 2 * (10 + 8 * 5**0.5 + 6 * 8**0.5 + 4 * 13**0.5 + 2 * 20**0.5)
    ) / 225
    assert by_hand == pytest.approx(2.03979, abs=1e-5)
    model = even(vit(**special))
    result = attention_distance(model, [torch.randn(2, 3, 12, 20)])
    np.testing.assert_allclose(result, np.full((2, 2), 4 * by_hand), rtol=1e-6)  # a patch is 4 pixels wide
    assert even_distance(model.config) == pytest.approx(4 * by_hand, rel=1e-12)


def test_patches_that_are_not_square() -> None:
    # A 1×2 grid of patches 6 high and 10 wide: half of the attention goes 10 pixels far. A 2×1 grid: 6 pixels.
    wide = even(vit(image_size=(6, 20), patch_size=(6, 10)))
    tall = even(vit(image_size=(12, 10), patch_size=(6, 10)))
    np.testing.assert_allclose(attention_distance(wide, [torch.randn(1, 3, 6, 20)]), 5, rtol=1e-6)
    np.testing.assert_allclose(attention_distance(tall, [torch.randn(1, 3, 12, 10)]), 3, rtol=1e-6)


def test_batching_does_not_matter_and_the_model_is_unchanged() -> None:
    model = vit(attention_dropout=0.5, patch_dropout=0.5).train()
    model.blocks[0].eval()
    images = torch.randn(5, 3, 12, 20)
    whole = attention_distance(model, [images])
    np.testing.assert_allclose(attention_distance(model, images.split(1)), whole, rtol=1e-5)
    assert model.training
    assert not model.blocks[0].training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_layers_attention_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    traced = Attention.traced

    def watched(self: Attention, x: Tensor, places: Any) -> tuple[Tensor, Tensor]:
        assert not any(weights() is not None for weights in alive), "an earlier layer's attention is still in memory"
        out, weights = traced(self, x, places)
        alive.append(weakref.ref(weights))
        return out, weights

    monkeypatch.setattr(Attention, "traced", watched)
    attention_distance(vit(depth=6), torch.randn(4, 3, 12, 20).split(2))
    assert len(alive) == 12


def test_a_query_without_attention_to_patches_is_ignored() -> None:
    model = vit(depth=1)
    with torch.no_grad():  # all keys are equal except the class token's, which gets all attention of head 0
        attn = model.blocks[0].attn
        attn.qkv.weight[:32] = 0
        attn.qkv.bias[:32] = 0
        attn.qkv.bias[:8] = 1e3
        attn.qkv.weight[16:24, 0] = 1e3
        model.blocks[0].norm1.weight.fill_(1)
        model.blocks[0].norm1.bias.fill_(0)
        model.pos_embed[:, 0, 0] = 1e3
        model.pos_embed[:, 1:, 0] = -1e3
    result = attention_distance(model, [torch.randn(2, 3, 12, 20)])
    assert math.isnan(result[0, 0])
    assert result[0, 1] == pytest.approx(even_distance(model.config), rel=1e-5)
    made = Bundle(model, Preprocess(size=(12, 20)))
    figure = drawn(distance_figure(made, pixels(model.config), device="cpu"))
    assert "1 of 2 heads do not attend to any patch" in figure.caption


def test_the_chart_has_a_point_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle(depth=5, heads=4)
    inputs = pixels(made.model.config, 130)
    monkeypatch.setattr(distance_module, "AT_ONCE", 4 * 16**2 * 7)  # seven images at a time
    figure = drawn(distance_figure(made, inputs, device="cpu"))
    assert figure.svg is not None
    root = ElementTree.fromstring(figure.svg)
    marks = [node for node in root.iter() if node.tag.endswith("circle") and len(node)]
    assert len(marks) == 5 * 4
    # Two lines, each also in the legend: uniform attention, dashed, and the mean of a block.
    lines = [node.get("class", "") for node in root.iter() if "curve" in node.get("class", "")]
    assert sorted("dashed" in line for line in lines) == [False, False, True, True]
    assert "4 heads in each of 5 blocks" in figure.caption
    assert "over all patches of 128 images;" in figure.caption
    # The height of a point is its distance.
    expected = attention_distance(made.model, [made.preprocess.normalise(inputs[:128])])
    heights = sorted(float(mark.get("cy") or 0) for mark in marks)
    slope, start = np.polyfit(sorted(expected.ravel().tolist(), reverse=True), heights, 1)
    np.testing.assert_allclose(start + slope * np.sort(expected.ravel())[::-1], heights, atol=0.06)


def test_few_images_and_none() -> None:
    made = bundle()
    assert "of 1 image (the paper uses 128)" in drawn(distance_figure(made, pixels(made.model.config, 1))).caption
    with pytest.raises(InputError, match="at least one image"):
        distance_figure(made, pixels(made.model.config, 0))
    with pytest.raises(InputError, match="at least one image"):
        attention_distance(made.model, [])
    with pytest.raises(InputError, match="12×20 pixels"):
        distance_figure(made, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with torch.no_grad():
        made.model.blocks[1].mlp.fc2.weight[0] = math.inf
    with pytest.raises(Diverged, match="the output of block 2 is not finite"):
        distance_figure(made, pixels(made.model.config))
    assert isinstance(distance_figure(bundle(image_size=4), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)), Absent)


def test_a_count_of_zero_filters() -> None:
    with pytest.raises(ConfigError, match="count is 0"):
        filters(vit(), 0)
    made = bundle()
    torch.nn.init.constant_(made.model.patch_embed.proj.weight, math.nan)
    with pytest.raises(Diverged, match="the kernels of the patch embedding are not finite"):
        filters_figure(made)


@pytest.mark.parametrize("size", [32, 224, 512])
def test_position_labels_are_legible_on_a_phone(size: int) -> None:
    """The sheet is 354 pixels wide on a phone of 390; its text is then at least 9 pixels high."""
    config = ViTConfig(image_size=size, patch_size=16 if size > 32 else 4, width=24, depth=1, heads=1, classes=2)
    figure = positions_figure(Bundle(ViT(config), Preprocess(size=(size, size))))
    assert isinstance(figure, Figure)
    assert figure.image is not None
    assert TEXT * min(1.0, 354 / figure.image.width) >= 9
