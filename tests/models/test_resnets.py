"""Plain ResNets: the `resnet` stem without encoder blocks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.peers import import_peer, relative_error, scramble

import vitrail
from vitrail.errors import CheckpointError, ConfigError, InputError
from vitrail.explanations.request import Method
from vitrail.models.config import ResNet, ViTConfig
from vitrail.models.variants import resnet_config, variant_config
from vitrail.models.vit import ViT


def of_timm(depths: tuple[int, ...], classes: int, **more: Any) -> Any:
    """Build timm's ResNet with weight-standardised convolutions and GroupNorm, in post-activation form."""
    resnetv2 = import_peer("timm.models.resnetv2")
    layers = import_peer("timm.layers")
    return resnetv2.ResNetV2(
        layers=depths, num_classes=classes, preact=False, stem_type="same",
        conv_layer=partial(layers.StdConv2dSame, eps=1e-8), **more,
    )  # fmt: skip


def test_the_same_logits_as_timm() -> None:
    peer = scramble(of_timm((1, 2, 1, 1), 7)).eval()
    resnet = ResNet(depths=(1, 2, 1, 1), numerics="timm")
    model = ViT(resnet_config(resnet).replace(image_size=(64, 96), classes=7)).eval()
    state = {}
    for name, tensor in peer.state_dict().items():
        ours = name.replace("stem.", "patch_embed.backbone.stem.").replace("stages.", "patch_embed.backbone.stages.")
        state[ours.replace("head.fc.", "head.")] = tensor.flatten(1) if name == "head.fc.weight" else tensor
    model.load_state_dict(state)
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        assert relative_error(model(images), peer(images)) < 1e-5


def test_r50_has_as_many_parameters_as_those_of_timm_and_torchvision() -> None:
    """GroupNorm has as many parameters as BatchNorm, and standardised weights have none of their own."""
    timm, torchvision = import_peer("timm"), import_peer("torchvision.models")
    ours = vitrail.create("R50")
    counts = [
        sum(parameter.numel() for parameter in model.parameters())
        for model in (ours, timm.create_model("resnet50_gn"), torchvision.resnet50())
    ]
    assert len(set(counts)) == 1


def test_a_root_without_stride_keeps_small_images_large() -> None:
    model = vitrail.create("R26/8", image_size=32, classes=10)
    assert model.features(torch.randn(1, 3, 32, 32), as_grid=True).tokens.shape == (1, 1024, 4, 4)
    assert [stage.shape[-2:] for stage in vitrail.describe("R26/8").stages[1:6]] == [
        (64, 64), (64, 64), (32, 32), (16, 16), (8, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(("stride", "side"), [(4, 4), (2, 8), (1, 16)])
def test_the_stride_of_the_root(stride: int, side: int) -> None:
    config = resnet_config(ResNet.model_validate({"depths": (1, 1), "width_factor": 0.5, "root_stride": stride}))
    model = vitrail.create(config, image_size=32, classes=2)
    assert config.patch_size == (2 * stride, 2 * stride)
    assert model.features(torch.randn(1, 3, 32, 32), as_grid=True).tokens.shape == (1, 256, side, side)


def test_any_image_size_of_whole_strides_fits() -> None:
    model = vitrail.create("R26/8", image_size=32, classes=10).eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.resize((48, 64))
    assert model(torch.randn(1, 3, 48, 64)).shape == (1, 10)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem": "conv", "resnet": None}, "depth=0 leaves only the stem, which must be 'resnet', not 'conv'"),
        ({"position": "learned_1d"}, "a plain ResNet, which needs position='none'"),
        ({"class_token": "first", "pool": "cls"}, "which needs class_token='none'"),
        ({"width": 512}, "which needs width=2048"),
        ({"patch_size": (64, 64), "image_size": (64, 64)}, r"needs patch_size=\(32, 32\)"),
        ({"final_norm": "after_pool", "registers": 2}, "needs registers=0, final_norm='none'"),
    ],
)
def test_what_a_resnet_cannot_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variant_config("R50").replace(**changes)


def test_layers_that_are_not_there() -> None:
    model = vitrail.create(resnet_config(ResNet(depths=(1,), width_factor=0.5)).replace(image_size=16, classes=2))
    with pytest.raises(InputError, match="this model has no layers; it is a ResNet without encoder blocks"):
        model.features(torch.randn(1, 3, 16, 16), layer=-1)
    with pytest.raises(InputError, match="this model has no layers"):
        model.trace(torch.randn(1, 3, 16, 16), attention=(0,))
    assert model.trace(torch.randn(1, 3, 16, 16)).logits.shape == (1, 2)


@pytest.mark.parametrize("method", ["attention", "rollout", "relevance"])
def test_attention_cannot_be_explained(method: Method) -> None:
    config = resnet_config(ResNet(depths=(1,), width_factor=0.5)).replace(image_size=16, classes=2)
    bundle = vitrail.Bundle(ViT(config), vitrail.Preprocess(size=(16, 16)), ("a", "b"))
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    with pytest.raises(
        ConfigError, match=f"this model is a ResNet, so {method} has no attention to show; use gradcam or pca"
    ):
        vitrail.explain(bundle, image, method=method, device="cpu")
    assert vitrail.explain(bundle, image, method="gradcam", device="cpu").map.shape == (4, 4)


def test_heads_matter_only_with_attention() -> None:
    assert variant_config("R26/8").replace(heads=7).heads == 7
    with pytest.raises(ConfigError, match="width 1024 is not a multiple of heads 7"):
        variant_config("R26/8").replace(heads=7, pool="map")
    assert isinstance(variant_config("R26/8"), ViTConfig)


def test_no_format_holds_a_resnet(tmp_path: Path) -> None:
    bundle = vitrail.Bundle(ViT(resnet_config(ResNet(depths=(1,), width_factor=0.5)).replace(image_size=16, classes=2)),
                            vitrail.Preprocess(size=(16, 16)), ("a", "b"))  # fmt: skip
    for to in ("timm", "google", "transformers"):
        with pytest.raises(CheckpointError, match=f"{to} has no ResNet without encoder blocks; vitrail export"):
            vitrail.convert(bundle, tmp_path / to, to=to)


def test_the_papers_options_are_not_for_a_resnet(tmp_path: Path) -> None:
    changes = ["model.name=R26/8", "model.image_size=8", "model.paper=true"]
    with pytest.raises(ConfigError, match="asks for the ViT paper's model, but R26/8 is a ResNet"):
        vitrail.train("digits", changes=changes, folder=tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "parquet"])
def test_features_of_a_resnet_are_written(suffix: str, tmp_path: Path) -> None:
    config = resnet_config(ResNet(depths=(1,), width_factor=0.5, root_stride=1)).replace(
        image_size=(8, 8), channels=1, classes=2
    )
    bundle = vitrail.Bundle(ViT(config), vitrail.Preprocess(size=(8, 8)).with_channels(1), ("a", "b"))
    target = tmp_path / f"features.{suffix}"
    vitrail.embed(bundle, "digits", target, device="cpu", workers=0)
    assert target.exists()
