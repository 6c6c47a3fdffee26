"""Any model that a family can express survives a round trip bit-identically."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.support.peers import scramble

from vitrail.checkpoints.family import ANY, Family
from vitrail.checkpoints.infer import infer_config
from vitrail.checkpoints.load import FAMILIES
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

FREE: dict[str, list[Any]] = {
    "registers": [0, 3],
    "patch_bias": [True, False],
    "norm_before_blocks": [True, False],
    "qkv_bias": [True, False],
    "proj_bias": [True, False],
    "mlp_bias": [True, False],
    "qk_norm": [True, False],
    "layer_scale": [None, 1e-5],
    "representation": [None, 20],
    "activation": ["gelu", "swiglu"],
}


@st.composite
def expressible(draw: st.DrawFn, /, family: Family) -> ViTConfig:
    """Draw a tiny model that the family can express."""
    fields: dict[str, Any] = {
        "width": draw(st.sampled_from([64, 128])),
        "depth": draw(st.integers(1, 3)),
        "channels": draw(st.sampled_from([1, 3])),
        "patch_size": draw(st.sampled_from([4, 8])),
        "classes": draw(st.sampled_from([0, 5])),
    }
    for name, allowed in family.needs.items():
        if name in ViTConfig.model_fields:
            fields[name] = draw(st.sampled_from(FREE[name] if allowed is ANY else list(allowed)))
    fields["heads"] = fields["width"] // 64
    if family.name == "dinov2-transformers" and fields["activation"] == "swiglu":
        fields["mlp_width"] = {64: 176, 128: 344}[fields["width"]]
    if "registers_placed" in family.needs and fields["registers"]:
        fields["position_covers"] = "class"
    if fields["stem"] == "resnet":
        depths = draw(st.sampled_from([(), (1,), (1, 2)]))
        numerics = family.needs["resnet_numerics"][1]
        fields |= {"patch_size": 8, "resnet": {"depths": depths, "width_factor": 0.5, "numerics": numerics}}
    side = fields["patch_size"] * draw(st.integers(2, 4))
    try:
        config = ViTConfig(**fields, image_size=side)
    except ConfigError:
        assume(False)
    assume(not family.unsupported(config))
    return config


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@given(data=st.data())
@settings(
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_round_trip(family: Family, data: st.DataObject) -> None:
    config = data.draw(expressible(family))
    model = ViT(config)
    scramble(model)
    before = model.state_dict()
    written = family.write(before, config)
    twice = {name: tensor.clone() for name, tensor in written.items()}
    assert family.recognise({name: tuple(tensor.shape) for name, tensor in written.items()})
    assert [other.name for other in FAMILIES if other.recognise({n: tuple(t.shape) for n, t in written.items()})] == [
        family.name
    ]
    hints = {"channels": config.channels, "patch_size": config.patch_size}
    reading = family.read(dict(written), hints)
    assert reading.unknown == []
    assert reading.weights.keys() == before.keys()
    assert all(torch.equal(reading.weights[name], tensor) for name, tensor in before.items())
    again = family.write(reading.weights, config)
    assert again.keys() == twice.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in twice.items())
    shapes = {name: tuple(tensor.shape) for name, tensor in reading.weights.items()}
    result = infer_config(shapes, {**reading.hints, "image_size": config.image_size})
    assert (result.width, result.depth, result.heads, result.grid) == (
        config.width,
        config.depth,
        config.heads,
        config.grid,
    )
    with torch.device("meta"):
        fresh = ViT(result)
    assert {n: tuple(t.shape) for n, t in fresh.state_dict().items()} == {n: tuple(t.shape) for n, t in before.items()}
