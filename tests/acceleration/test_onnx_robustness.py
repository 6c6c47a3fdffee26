"""An exported ONNX file survives what people do with it, and takes images of any size if it was exported so."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import onnxsim
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import relative_error
from tests.support.tiny_models import KINDS, bundle, eager, pixels
from torch import Tensor

from vitrail import Bundle, ConfigError
from vitrail.acceleration.export.dynamic_size import check_dynamic_size, outputs_of_any_size
from vitrail.acceleration.export.openvino import core
from vitrail.exporting import export

QUICK = "relative"
ALL = [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.slow) for kind in KINDS]
ANY_SIZE = [
    "plain", "conv_stem", "resnet", "distilled", "every_rate", "no_position", "mean_of_all", "no_head", "grey", "cnn"
]  # fmt: skip
SIZES = ((16, 32), (24, 40), (64, 16), (8, 8))


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def simplified(model: onnx.ModelProto) -> onnx.ModelProto:
    made, checked = onnxsim.simplify(model)
    assert checked
    return made


def unchanged(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


CHANGES: tuple[Callable[[onnx.ModelProto], onnx.ModelProto], ...] = (unchanged, inferred, simplified)


def run(model: onnx.ModelProto, images: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"pixels": images.contiguous().numpy()})[0])


def shape_of(value: onnx.ValueInfoProto) -> list[Any]:
    return [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("kind", ALL)
def test_shape_inference_and_onnxsim(kind: str, tmp_path: Path) -> None:
    """Afterwards the file is valid, its batch is still dynamic and its outputs are those of the model."""
    made = bundle(kind)
    model = onnx.load(export(made, tmp_path / "model.onnx", preprocess=True).files[0])
    for change in CHANGES:
        changed = change(model)
        # A full check infers the shapes again, which onnx 1.23 cannot do for a slice with a step that it has inferred.
        onnx.checker.check_model(changed, full_check=change is not inferred)
        assert shape_of(changed.graph.input[0]) == ["batch", made.preprocess.channels, 16, 32]
        assert shape_of(changed.graph.output[0])[0] == "batch"
        for count in (1, 5):
            images = pixels(count, made.preprocess.channels)
            assert relative_error(run(changed, images), eager(made, images)) < 1e-4


# ── any image size ──


def resized(kind: str, size: tuple[int, int]) -> Bundle:
    made = bundle(kind)
    made.model.resize(size)
    return Bundle(made.model.eval(), made.preprocess.replace(size=size), made.classes)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(ANY_SIZE), st.integers(1, 9), st.integers(1, 9))
def test_positions_of_any_grid_are_those_of_resize(kind: str, rows: int, columns: int) -> None:
    made = bundle(kind).model.eval()
    size = rows * made.config.patch_size[0], columns * made.config.patch_size[1]
    images = torch.rand(2, made.config.channels, *size)
    with torch.no_grad():
        expected = resized(kind, size).model(images)
        assert relative_error(outputs_of_any_size(made, images), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ANY_SIZE)
def test_dynamic_size(kind: str, tmp_path: Path) -> None:
    """A simplified file, too, gives the outputs of the resized model at every size."""
    made = bundle(kind)
    done = export(made, tmp_path / "model.onnx", preprocess=True, dynamic_size=True)
    assert (done.check.images, done.check.passed) == (4 * 32, True)
    model = onnx.load(done.files[0])
    assert done.metadata["input"]["multiples_of"] == list(made.model.config.patch_size)
    for change in CHANGES:
        changed = change(model)
        assert shape_of(changed.graph.input[0]) == ["batch", made.preprocess.channels, "height", "width"]
        for size in SIZES:
            other = resized(kind, size)
            images = torch.randint(0, 256, (3, made.preprocess.channels, *size), dtype=torch.uint8)
            assert relative_error(run(changed, images), eager(other, images)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("to", "name"), [("torch", "model.pt2"), ("openvino", "model.xml")])
def test_dynamic_size_in_other_formats(to: Any, name: str, tmp_path: Path) -> None:
    made = resized("plain", (32, 64))  # torch's programs need more than one row of patches
    file = export(made, tmp_path / name, to=to, channels_last=True, dynamic_size=True).files[0]
    if to == "openvino":
        compiled = core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    else:
        module = torch.export.load(file).module()
    for size in SIZES if to == "openvino" else SIZES[:3]:
        other = copy.deepcopy(made.model)
        other.resize(size)
        x = torch.rand(3, 3, *size)
        inputs = x.permute(0, 2, 3, 1).contiguous()
        with torch.no_grad():
            outputs = torch.from_numpy(compiled([inputs.numpy()])[0]) if to == "openvino" else module(inputs)
            assert relative_error(outputs, other(x)) < 1e-4


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(ANY_SIZE)))
def test_models_of_one_size_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--dynamic-size "):
        export(bundle(kind), tmp_path / "model.onnx", dynamic_size=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ANY_SIZE)
def test_models_of_any_size_are_accepted(kind: str) -> None:
    check_dynamic_size(bundle(kind).model.config)
