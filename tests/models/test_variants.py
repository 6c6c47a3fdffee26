"""The table of named models: exact sizes, every spelling, and helpful errors."""

from typing import Any

import pytest
import torch

import vitrail
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.stages import cost
from vitrail.models.variants import VARIANTS, variant_config, variant_name
from vitrail.models.vit import ViT

PARAMETERS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/14": 304_203_752,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "g/14": 1_012_611_432,
    "G/14": 1_844_440_680,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "R26": 15_995_176,
    "R50": 25_557_032,
    "R26/8": 4_517_768,
}


def test_every_variant_has_a_known_size() -> None:
    assert {v.paper for v in VARIANTS} == set(PARAMETERS)


@pytest.mark.parametrize("paper", PARAMETERS)
def test_parameter_counts(paper: str) -> None:
    """Counted on the full model, not extrapolated as in `cost`; both must agree."""
    config = variant_config(paper)
    with torch.device("meta"):
        model = ViT(config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[paper]
    assert cost(config).parameters == PARAMETERS[paper]


def test_cost_is_that_of_the_whole_model() -> None:
    """The published figure for B/16 is 17.56 giga multiply-adds, and R50+B/16 keeps its 197 tokens."""
    spent = cost(variant_config("B/16"))
    assert spent.flops / 2e9 == pytest.approx(17.56, abs=0.01)
    assert spent.tokens == 197
    tokens = {v.paper: variant_config(v.paper).tokens for v in VARIANTS}
    assert tokens["R50+B/16"] == 197
    assert tokens["R+Ti/16"] == tokens["R26+S/32"] == tokens["R50+L/32"] == 50


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_spelling_means_the_same(variant: object) -> None:
    name, paper = variant.name, variant.paper  # type: ignore[attr-defined]
    assert variant_config(paper) == variant_config(name) == variant_config(f"{name}_{variant.image_size}")  # type: ignore[attr-defined]
    larger = variant_config(f"{name}_448" if variant.patch == 14 else f"{name}_384")  # type: ignore[attr-defined]
    assert larger.width == variant_config(paper).width
    assert larger.grid != variant_config(paper).grid


def test_create() -> None:
    model = vitrail.create("vit_tiny_patch16_224", classes=10)
    assert model.head.out_features == 10
    small = vitrail.create("Ti/16", image_size=(32, 64), patch_size=8, channels=1, classes=3)
    assert small(torch.randn(2, 1, 32, 64)).shape == (2, 3)
    assert vitrail.create(small.config).config == small.config


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vit_bas_patch16_224", "did you mean 'vit_base_patch16_224'"),
        ("b/16", "did you mean 'B/16'"),
        ("g/15", "'g/14' or 'G/14'"),
        ("swin", "for example 'B/16'"),
        ("resnet", "did you mean 'resnet50_224'"),
        ("vit_base_patch16_0", "no model is called"),
        ("", "no model is called ''"),
    ],
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"no model is called") as caught:
        vitrail.create(name)
    assert hint in str(caught.value)
    assert "vitrail models" in str(caught.value)


@pytest.mark.parametrize("thing", [None, 3, {}, ["Ti/16"], b"Ti/16", ViTConfig])
def test_names_that_are_not_strings(thing: Any) -> None:
    for function in (vitrail.create, vitrail.describe):
        with pytest.raises(ConfigError, match="expected a model name such as 'B/16', or a ViTConfig"):
            function(thing)
    with pytest.raises(ConfigError, match="expected a model name"):
        variant_config(thing)
    with pytest.raises(ConfigError, match="ViT takes a ViTConfig"):
        ViT(thing)


def test_large_models_are_described_without_computing() -> None:
    small, large = vitrail.describe("Ti/16"), vitrail.describe("L/16")
    assert (small.computed, large.computed) == (True, False)
    assert [stage.name for stage in small.stages][:5] == [stage.name for stage in large.stages][:5]
    assert large.stages[-1].shape == (1, 1000)


def test_a_size_that_does_not_fit_the_patch() -> None:
    with pytest.raises(ConfigError, match="image height 225 is not a multiple of patch height 16"):
        vitrail.create("vit_base_patch16_225")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.paper)
def test_a_config_knows_its_name(variant: Any) -> None:
    config = variant_config(variant.paper)
    assert variant_name(config) == variant.paper
    other = config.replace(image_size=448, classes=5, pool="mean", layer_scale=1e-5)
    assert variant_name(other) == variant.paper
    assert variant_name(config.replace(depth=config.depth + 1)) is None


def test_variant_names_for_unlisted_patch_sizes() -> None:
    small = variant_config("S/16").replace(patch_size=14)
    assert variant_name(small) == "S/14"
    assert variant_name(small.replace(patch_size=(14, 16))) is None
    hybrid = variant_config("R50+B/16")
    assert variant_name(hybrid.replace(patch_size=32)) is None
    assert variant_name(hybrid.replace(resnet={"depths": (3, 4, 9), "width_factor": 2.0})) is None
