"""ViTConfig rejects invalid values, with errors that name the values and the fix."""

from typing import Any

import numpy as np
import pytest

from vitrail.errors import ConfigError
from vitrail.models.config import ConvLayer, ResNet, ViTConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"image_size": 225}, "image height 225 is not a multiple of patch height 16; use an image height of 224 or 240"),
    ({"image_size": (224, 8)}, "image width 8 is not a multiple of patch width 16; use an image width of 16"),
    ({"image_size": 0}, "image_size.0 is 0: input should be greater than 0"),
    ({"image_size": (1, 2, 3)}, "image_size is (1, 2, 3): expected one integer, or two (height, width)"),
    ({"image_size": "224"}, "image_size is '224': expected one integer, or two (height, width)"),
    ({"image_size": 48.0}, "expected one integer, or two"),
    ({"classes": 10**30}, "less than or equal to 1000000"),
    ({"image_size": 32_000, "patch_size": 16}, "make 4,000,001 tokens; at most 1,000,000 are allowed"),
    (
        {"image_size": 224, "patch_size": 2, "position": "relative"},
        "at most 10,000 are allowed with position 'relative'",
    ),
    ({"layer_scale": 1e300}, "layer_scale is 1e+300"),
    ({"heads": 7}, "width 768 is not a multiple of heads 7; change one, or set head_dim"),
    ({"heads": 7, "head_dim": 64, "out_proj": False}, "7 heads × 64 = 448; set out_proj=True"),
    ({"embed_dropout": -0.1}, "embed_dropout is -0.1: input should be greater than or equal to 0"),
    ({"mlp_dropout": 1.1}, "mlp_dropout is 1.1: input should be less than 1"),
    ({"stochastic_depth": 1.0}, "stochastic_depth is 1.0"),
    ({"patch_dropout": float("nan")}, "patch_dropout is nan"),
    ({"norm_eps": float("inf")}, "norm_eps is inf: input should be a finite number"),
    ({"layer_scale": float("-inf")}, "layer_scale is -inf"),
    ({"width": 768.5}, "width is 768.5"),
    ({"width": True}, "width is True"),
    ({"width": "768"}, "width is '768'"),
    ({"depth": -1}, "depth is -1: input should be greater than or equal to 0"),
    ({"widht": 8}, "no option 'widht'; did you mean 'width'?"),
    ({"positoin": "none"}, "no option 'positoin'; did you mean 'position' or"),
    (
        {"pool": "men"},
        "pool is 'men', which is not one of 'cls', 'mean', 'map', 'none' or 'patches'; did you mean 'mean'?",
    ),
    ({"activation": "GELU"}, "did you mean 'gelu'"),
    ({"stem": "resnet", "resnet": {"dephts": (1,)}}, "no option 'resnet.dephts'; did you mean 'depths'?"),
    ({"stem": "conv_stem", "conv_stem": [{"channels": 8, "strid": 4}]}, "'conv_stem.0.strid'; did you mean 'stride'?"),
    ({"conv_stem": (ConvLayer(channels=8),)}, "conv_stem is set but stem is 'conv'; set stem='conv_stem'"),
    ({"resnet": ResNet()}, "resnet is set but stem is 'conv'"),
    ({"stem": "resnet", "patch_size": 8}, "patch_size 8×8 is not a multiple of the ResNet's total stride 16"),
    ({"stem": "conv_stem", "patch_size": 14}, "the default conv_stem needs a square patch of 2, 4, 8, 16"),
    ({"stem": "conv_stem", "width": 36, "heads": 4}, "which is not a multiple of 8; set conv_stem to a list"),
    ({"stem": "conv_stem", "conv_stem": (ConvLayer(channels=8),)}, "multiply to 2, but patch_size is 16×16"),
    (
        {
            "stem": "conv_stem",
            "conv_stem": [{"channels": 8, "kernel": 16, "stride": 16}, {"channels": 8, "kernel": 2, "stride": 1}],
        },
        "even kernel 2 and stride 1",
    ),
    ({"position": "rope_2d", "position_at": "shared"}, "position_at='shared' needs a table"),
    ({"position": "sincos_2d", "position_covers": "all"}, "covers patches only"),
    ({"position": "sincos_2d", "width": 390, "heads": 6}, "needs a width that is a multiple of 4, not 390"),
    ({"position": "learned_2d", "width": 9, "heads": 3}, "needs a width that is a multiple of 2, not 9"),
    ({"position": "rope_2d", "head_dim": 6}, "needs a head width that is a multiple of 4, not 6"),
    ({"class_token": "none"}, "pool='cls' needs a class token"),
    ({"distillation_token": True, "pool": "mean"}, "a distillation token needs a class token"),
    ({"pool_over": "all"}, "pool_over='all' has no effect with pool='cls'"),
    ({"pool": "patches", "distillation_token": True}, "needs a class token and pool='cls'"),
    ({"pool": "patches", "patch_dropout": 0.5}, "pool='patches' needs every patch, but patch_dropout is 0.5"),
    ({"pool_over": "all", "pool": "patches"}, "pool_over='all' has no effect with pool='patches'"),
    ({"head_layers": (11,)}, "head_layers is for pool='patches', but pool is 'cls'; omit head_layers"),
    ({"pool": "patches", "head_layers": (2, 12)}, "names layer 12, but the model has layers 0 to 11 (or -1"),
    ({"pool": "patches", "head_layers": (-13, -1)}, "names layer -13"),
    ({"pool": "patches", "head_layers": (-1, 11)}, "must be different layers in ascending order; use (11,)"),
    ({"pool": "patches", "head_layers": (11, 5)}, "must be different layers in ascending order; use (5, 11)"),
    ({"pool": "patches", "head_layers": (2, 5)}, "would have no effect; add layer 11, or set depth=6"),
    ({"pool": "patches", "head_layers": (5, 11), "representation": 9}, "head_layers names 2; omit one of them"),
    ({"pool": "patches", "head_layers": (True,)}, "head_layers.0 is True"),
    ({"pool": "patches", "head_layers": 3}, "head_layers is 3"),
    (
        {
            "stem": "resnet",
            "depth": 0,
            "width": 1024,
            "class_token": "none",
            "position": "none",
            "final_norm": "none",
            "pool": "patches",
            "head_layers": (0,),
        },
        "head_layers names encoder blocks, but depth is 0; omit it",
    ),
    ({"classes": -1}, "classes is -1"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_bad_settings_are_explained(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ViTConfig(**fields)
    assert words in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"width is 0.*heads is 'x'.*no option 'foo'"):
        ViTConfig.model_validate({"width": 0, "heads": "x", "foo": 1})


@pytest.mark.parametrize("factor", [0.3, 0.001, 0.51, 1e308, 0.0])
def test_resnet_width_fills_the_groups(factor: float) -> None:
    with pytest.raises(ConfigError, match="width_factor is"):
        ResNet(width_factor=factor)


def test_a_config_cannot_change() -> None:
    config = ViTConfig()
    with pytest.raises(ConfigError, match=r"is immutable; make a copy with replace\(width=3\)"):
        config.width = 3
    with pytest.raises(ConfigError, match="width cannot be deleted"):
        del config.width
    assert config.replace(width=384, heads=6).width == 384
    assert config.width == 768
    with pytest.raises(ConfigError, match="did you mean 'depth'"):
        config.replace(depht=3)


def test_integers_become_pairs_and_lists_become_tuples() -> None:
    config = ViTConfig.model_validate({"image_size": 96, "patch_size": [8, 16]})
    assert (config.image_size, config.patch_size, config.grid) == ((96, 96), (8, 16), (12, 6))
    numpy = ViTConfig(width=np.int64(48), heads=np.int32(3), image_size=np.int64(32))
    assert (numpy.width, numpy.image_size) == (48, (32, 32))
    assert type(numpy.width) is int


def test_invalid_json() -> None:
    with pytest.raises(ConfigError, match="ViTConfig: Invalid JSON"):
        ViTConfig.from_json("{")
    with pytest.raises(ConfigError, match=r"ViTConfig is \[\]"):
        ViTConfig.from_json("[]")
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        ViTConfig.from_json('{"widths": 3}')


def test_the_layout_of_tokens() -> None:
    size: dict[str, Any] = {"image_size": 4, "patch_size": 2, "registers": 3}
    first = ViTConfig(**size, distillation_token=True).layout
    assert (first.class_token, first.distillation_token) == (0, 1)
    assert (first.registers, first.patches, first.total) == (slice(2, 5), slice(5, 9), 9)
    last = ViTConfig(**size, distillation_token=True, class_token="last").layout
    assert (last.patches, last.registers) == (slice(0, 4), slice(4, 7))
    assert (last.distillation_token, last.class_token) == (7, 8)
    none = ViTConfig(**size, class_token="none", pool="mean").layout
    assert (none.class_token, none.registers, none.patches) == (None, slice(0, 3), slice(3, 7))


def test_the_default_conv_stem_is_the_papers() -> None:
    """The early-convolutions paper gives its 4 GF model, 384 wide, the channels 48, 96, 192, 384."""
    config = ViTConfig(stem="conv_stem", width=384, heads=6)
    assert [layer.channels for layer in config.stem_layers] == [48, 96, 192, 384]
    assert all((layer.kernel, layer.stride) == (3, 2) for layer in config.stem_layers)
