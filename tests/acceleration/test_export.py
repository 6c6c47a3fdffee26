"""Exported models give the model's outputs in their own runtime."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from tests.support.commands import run_command
from tests.support.peers import relative_error, scramble
from tests.support.tiny_models import KINDS, bundle, eager, pixels
from torch import Tensor, nn

import vitrail
from vitrail import Bundle, CheckpointError, ConfigError, ViT, exporting
from vitrail.acceleration.export.check import check_outputs
from vitrail.acceleration.export.graph import Graph, trace
from vitrail.acceleration.export.openvino import core
from vitrail.exporting import FORMATS, SUFFIXES, Export, export

NAMES = {"onnx": "model.onnx", "torch": "model.pt2", "openvino": "model.xml"}
FRESH = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
numpy.save(sys.argv[3], session.run(["logits"], {"pixels": numpy.load(sys.argv[2])})[0])
assert not {"vitrail", "torch"} & set(sys.modules)
"""


def outputs(path: Path, inputs: Tensor) -> Tensor:
    """Run an exported file with only its runtime."""
    match path.suffix:
        case ".onnx":
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            return torch.from_numpy(session.run(None, {"pixels": inputs.numpy()})[0])
        case ".pt2":
            program = torch.export.load(path)
            with torch.no_grad():
                output: Tensor = program.module()(inputs)
            return output
        case _:
            compiled = core().compile_model(core().read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            return torch.from_numpy(compiled([inputs.numpy()])[0])


@pytest.fixture(scope="module")
def made() -> Bundle:
    return bundle("relative", depth=1)


@pytest.fixture(scope="module")
def onnx_file(made: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export(made, tmp_path_factory.mktemp("onnx") / "model.onnx", preprocess=True)


# ── formats ──


def test_onnx(onnx_file: Export, made: Bundle) -> None:
    assert (onnx_file.check.images, onnx_file.check.agreement.changed) == (32, 0)
    assert 0 < onnx_file.check.relative < 1e-5
    assert 0 < onnx_file.check.agreement.change < 1e-5
    path = onnx_file.files[0]
    for count in (1, 5):
        images = pixels(count).contiguous()
        assert relative_error(outputs(path, images), eager(made, images)) < 1e-4
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(inputs.name, inputs.shape, inputs.type) for inputs in session.get_inputs()] == [
        ("pixels", ["batch", 3, 16, 32], "tensor(uint8)")
    ]
    notes = session.get_modelmeta().custom_metadata_map
    assert json.loads(notes["classes"]) == list("abcde")
    assert json.loads(notes["preprocess"]) == json.loads(made.preprocess.to_json())
    assert json.loads(notes["input"])["normalised"] == "inside"
    assert notes["written_by"] == f"vitrail {vitrail.__version__}"


@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("sincos", marks=pytest.mark.slow), pytest.param("linear", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_onnx_can_be_quantised(kind: str, tmp_path: Path) -> None:
    """ONNX Runtime's quantiser accepts the file, and the int8 model's outputs are close."""
    made = bundle(kind)
    path, quantised = export(made, tmp_path / "model.onnx", preprocess=True).files[0], tmp_path / "int8.onnx"
    quantize_dynamic(path, quantised)
    stored = {tensor.data_type for tensor in onnx.load(quantised).graph.initializer}
    assert {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} & stored, "nothing was quantised"
    images = pixels(16).contiguous()
    ours, theirs = eager(made, images), outputs(quantised, images)
    assert relative_error(theirs, ours) < 0.1
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() >= 0.75


def test_onnx_without_vitrail(onnx_file: Export, made: Bundle, tmp_path: Path) -> None:
    import numpy as np

    images = pixels(4).contiguous()
    np.save(tmp_path / "inputs.npy", images.numpy())
    words = (onnx_file.files[0], tmp_path / "inputs.npy", tmp_path / "found.npy")
    subprocess.run([sys.executable, "-c", FRESH, *map(str, words)], check=True, timeout=120)
    assert relative_error(torch.from_numpy(np.load(tmp_path / "found.npy")), eager(made, images)) < 1e-4


def test_torch_takes_normalised_images_by_default(made: Bundle, tmp_path: Path) -> None:
    done = export(made, tmp_path / "model.pt2", to="torch")
    assert [file.name for file in done.files] == ["model.pt2", "model.pt2.json"]
    for count in (1, 5):
        images = pixels(count)
        result = outputs(tmp_path / "model.pt2", made.preprocess.normalise(images).contiguous())
        assert relative_error(result, eager(made, images)) < 1e-4
    notes = json.loads((tmp_path / "model.pt2.json").read_text())
    assert notes["classes"] == list("abcde")
    assert notes["input"] == {
        "name": "pixels",
        "type": "float32",
        "shape": ["batch", 3, 16, 32],
        "normalised": "outside: (pixels / 255 - mean) / std",
    }
    assert notes["preprocess"]["mean"] == [0.485, 0.456, 0.406]


@pytest.mark.slow
def test_openvino_with_channels_last(made: Bundle, tmp_path: Path) -> None:
    done = export(made, tmp_path / "model.xml", to="openvino", preprocess=True, channels_last=True)
    assert {file.name for file in done.files} == {"model.xml", "model.bin", "model.xml.json"}
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in done.files}
    for count in (1, 5):
        images = pixels(count)
        result = outputs(tmp_path / "model.xml", images.permute(0, 2, 3, 1).contiguous())
        assert relative_error(result, eager(made, images)) < 1e-4
    assert json.loads((tmp_path / "model.xml.json").read_text())["input"]["shape"] == ["batch", 16, 32, 3]
    # The weights stay float32.
    parameters = sum(parameter.numel() for parameter in made.model.parameters())
    assert (tmp_path / "model.bin").stat().st_size > 4 * parameters


@pytest.mark.slow
@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, to: Any, tmp_path: Path) -> None:
    model = bundle(kind)
    done = export(model, tmp_path / NAMES[to], to=to, preprocess=True)
    assert done.check.agreement.changed == 0
    images = pixels(5, model.preprocess.channels)
    assert relative_error(outputs(done.files[0], images.contiguous()), eager(model, images)) < 1e-4


@pytest.mark.slow
def test_weights_too_large_for_one_file(
    made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vitrail.acceleration.export.onnx.MAX_FILE_BYTES", 1000)
    done = export(made, tmp_path / "model.onnx", preprocess=True)
    assert [file.name for file in done.files] == ["model.onnx", "model.onnx.data"]
    images = pixels(5).contiguous()
    assert relative_error(outputs(tmp_path / "model.onnx", images), eager(made, images)) < 1e-4


@pytest.mark.slow
def test_another_opset(made: Bundle, tmp_path: Path) -> None:
    import onnx

    export(made, tmp_path / "model.onnx", opset=18)
    assert [entry.version for entry in onnx.load(tmp_path / "model.onnx").opset_import] == [18]


# ── the check ──


def test_the_check_detects_tampered_weights(made: Bundle) -> None:
    """A single doubled weight among several thousand is detected."""
    other = ViT(made.model.config)
    other.load_state_dict(made.model.state_dict())
    for factor, right in ((1.0, True), (2.0, False)):
        with torch.no_grad():
            other.blocks[0].mlp.fc2.weight[0, 0] *= factor
        result = check_outputs(
            Graph(made.model, made.preprocess), made.preprocess, Graph(other, made.preprocess).eval()
        )
        assert result.passed == right
        assert (result.relative > 1e-4) != right


def test_the_check_detects_a_wrong_preprocessing(made: Bundle) -> None:
    other = made.preprocess.replace(mean=(0.485, 0.456, 0.407))
    result = check_outputs(Graph(made.model, made.preprocess), made.preprocess, Graph(made.model, other))
    assert not result.passed


def test_a_failed_export_is_deleted(made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of another model simulates a faulty exporter."""
    wrong = Bundle(scramble(ViT(made.model.config), seed=1), made.preprocess)
    monkeypatch.setattr(exporting, "trace", lambda graph: trace(Graph(wrong.model, graph.preprocess)))
    (tmp_path / "model.pt2").write_text("old")
    with pytest.raises(CheckpointError, match=r"the exported .* differ by .* so it was deleted"):
        export(made, tmp_path / "model.pt2", to="torch", overwrite=True)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"model.pt2": "old"}


@pytest.mark.slow
def test_an_existing_output_is_replaced_completely(made: Bundle, tmp_path: Path) -> None:
    first = export(made, tmp_path / "model.xml", to="openvino")
    second = export(bundle(), tmp_path / "model.xml", to="openvino", overwrite=True)
    assert [file.name for file in first.files] == [file.name for file in second.files]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.bin", "model.xml", "model.xml.json"]
    images = bundle().preprocess.normalise(pixels(2)).contiguous()
    assert relative_error(outputs(tmp_path / "model.xml", images), eager(bundle(), pixels(2))) < 1e-4


def test_a_model_with_non_finite_outputs(tmp_path: Path) -> None:
    broken = bundle(depth=1)
    with torch.no_grad():
        broken.model.head.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite, so nothing was written"):
        export(broken, tmp_path / "model.pt2", to="torch")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_traced(tmp_path: Path) -> None:
    class Doubting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    strange = bundle(depth=1)
    strange.model.head = Doubting()
    with pytest.raises(CheckpointError, match=r"^torch cannot trace this model into a graph \(.*\)$") as error:
        export(strange, tmp_path / "model.pt2", to="torch")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_in_training_mode_is_not_modified(tmp_path: Path) -> None:
    model = bundle("every_rate")
    model.model.train()
    export(model, tmp_path / "model.pt2", to="torch", preprocess=True)
    assert all(module.training for module in model.model.modules())
    images = pixels(3)
    model.model.eval()
    assert relative_error(outputs(tmp_path / "model.pt2", images), eager(model, images)) < 1e-5


# ── the command ──


@pytest.fixture(scope="module")
def folder(made: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save(tmp_path_factory.mktemp("made") / "bundle")


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("export", folder, tmp_path / "new" / "model.pt2", "--to", "torch", "--preprocess", "--channels-last")
    output = run_command(monkeypatch, capsys, *words)
    assert (output.code, output.err) == (0, "")
    assert "input pixels: batch × 16 × 32 × 3, uint8; output: logits" in output.out
    assert "checked on 32 random images: logits differ by at most " in output.out
    assert "the top class is the same for 32 of 32" in output.out
    assert "note:" not in output.out
    again = run_command(monkeypatch, capsys, *words)
    assert (again.code, again.out) == (2, "")
    assert "exists already; choose another name, or replace it with --overwrite" in again.err
    (tmp_path / "new" / "model.pt2").unlink()
    assert "model.pt2.json exists already" in run_command(monkeypatch, capsys, *words).err
    (tmp_path / "model.onnx.data").write_text("somebody's")  # the path of a large model's weights
    assert (
        "model.onnx.data exists already"
        in run_command(monkeypatch, capsys, "export", folder, tmp_path / "model.onnx").err
    )


@pytest.mark.slow
def test_a_head_that_was_never_trained_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = bundle()
    fresh.model.reset_head(5)
    folder = fresh.save(tmp_path / "bundle")
    output = run_command(monkeypatch, capsys, "export", folder, tmp_path / "model.pt2", "--to", "torch")
    assert "note: the model gives the same output for every image" in output.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "model.pt2", "--to", "torch"), "nowhere"),
        (
            ("BUNDLE", "model.onnx", "--to", "onxx"),
            "cannot export to 'onxx'; the formats are onnx (.onnx), torch (.pt2) and openvino (.xml); did "
            "you mean 'onnx'?",
        ),
        (
            ("nowhere", "model.mlmodel", "--to", "coreml"),
            "cannot export to 'coreml'; the formats are onnx (.onnx), torch (.pt2) and openvino (.xml)",
        ),
        (
            ("nowhere", "model.tflite"),
            "onnx files end in .onnx, and 'model.tflite' does not; the formats are onnx (.onnx), "
            "torch (.pt2) and openvino (.xml)",
        ),
        (("nowhere", "model.xml"), "and 'model.xml' does not; use --to openvino (to='openvino')"),
        (("BUNDLE", "model.pth", "--to", "torch"), "torch files end in .pt2, and 'model.pth'"),
        (("BUNDLE", "model", "--to", "openvino"), "openvino files end in .xml, and 'model' does"),
        (("BUNDLE", "model.onnx", "--opset", "9"), "opset is 9; choose one from 18 to 23"),
        (("BUNDLE", "model.pt2", "--to", "torch", "--opset", "18"), "--opset applies to ONNX only"),
        (("BUNDLE", "folder.pt2", "--to", "torch", "--overwrite"), "is a folder, and what would be written is a file"),
        (("BUNDLE", "file/model.pt2", "--to", "torch"), "could not be written: "),
    ],
)
def test_mistakes(
    words: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder.pt2").mkdir()
    output = run_command(monkeypatch, capsys, "export", *(str(folder) if word == "BUNDLE" else word for word in words))
    assert (output.code, output.out) == (2, "")
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"file", "folder.pt2"}


@pytest.mark.parametrize(
    ("to", "package"), [("onnx", "onnxruntime"), ("onnx", "onnx"), ("openvino", "openvino"), ("openvino", "onnxscript")]
)
def test_a_missing_package(to: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as error:
        export(bundle(), tmp_path / NAMES[to], to=to)
    assert str(error.value) == f"{package} is not installed; install it with pip install 'vitrail[{to}]'"


@pytest.mark.slow
@pytest.mark.parametrize("to", NAMES)
def test_a_full_disk_keeps_the_old_output(to: str, folder: Path, tmp_path: Path) -> None:
    """A file size limit simulates a full disk."""
    target = tmp_path / NAMES[to]
    target.write_text("old")
    code = (
        "import sys, resource, torch, onnx, onnxscript, onnxruntime, openvino, vitrail.api, vitrail.__main__ as m\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))\nm.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export", folder, target, "--to", to, "--overwrite"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path / "elsewhere")},
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "could not be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {target.name: "old"}


# ── a trained model ──


@pytest.mark.slow
@pytest.mark.parametrize("to", NAMES)
def test_a_trained_model_gives_the_same_predictions(to: Any, trained: Bundle, tmp_path: Path) -> None:
    """At least 999 of 1,000 images have the same top class."""
    from vitrail.data.batches import Evaluation, evaluation_batches
    from vitrail.data.sources.opening import open_data

    done = export(trained, tmp_path / NAMES[to], to=to, preprocess=True)
    data = Evaluation(open_data("digits").train, trained.preprocess, 250)
    images = torch.cat([batch.pixels for batch in evaluation_batches(data, workers=0)])[:1000].contiguous()
    expected = eager(trained, images).argmax(dim=1)
    actual = torch.cat([outputs(done.files[0], part) for part in images.split(333)]).argmax(dim=1)
    assert len(images) == 1000
    assert len(expected.unique()) == 10
    assert (actual == expected).sum() >= 999


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    changes = ("epochs=3", "batch=64", "model.width=32", "model.depth=2", "model.heads=2", "model.patch_size=4")
    done = vitrail.train(
        "digits", changes=changes, folder=tmp_path_factory.mktemp("run") / "run", device="cpu", workers=0, quiet=True
    )
    assert (done.metrics.headline.value or 0) > 0.3
    return done.bundle


def test_the_help_of_export_lists_the_formats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    help = run_command(monkeypatch, capsys, "export", "--help").out
    for form, suffix in SUFFIXES.items():
        assert f"{form} ({suffix}" in help
        assert f"{form} ({suffix}" in FORMATS
