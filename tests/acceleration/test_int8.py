"""int8 agrees with float32 on held-out images, says how well, and is refused otherwise."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.support.commands import run_command
from tests.support.tiny_models import CPU, bundle, eager
from torch import Tensor

import vitrail
from vitrail import Bundle, ConfigError, DataError, quantisation
from vitrail.acceleration.engine import open_engine
from vitrail.acceleration.int8.check import compare_directions, compare_predictions
from vitrail.quantisation import calibration_images, open_int8
from vitrail.tasks.lookup import CLASSIFICATION

Data = tuple[NDArray[np.uint8], NDArray[np.int64]]


def images(count: int, seed: int = 0) -> Data:
    """Return noisy images of five colours."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % 5)
    colours = np.random.default_rng(9).integers(0, 256, (5, 1, 1, 3))
    return (colours[labels] + random.integers(-40, 40, (count, 16, 32, 3))).clip(0, 255).astype(np.uint8), labels


def as_pixels(data: Data) -> Tensor:
    return torch.from_numpy(data[0]).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def fitted() -> Bundle:
    """A model whose head was fitted to the colours by least squares, so that its predictions are certain."""
    made = bundle()
    data = images(400, seed=1)
    with torch.no_grad():
        x = made.model.eval().features(made.preprocess.normalise(as_pixels(data))).pooled
        x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        weights = torch.linalg.lstsq(x, 10 * torch.eye(5)[torch.from_numpy(data[1])]).solution
        made.model.head.weight.copy_(weights[:-1].T)
        made.model.head.bias.copy_(weights[-1])
    assert (eager(made, as_pixels(data)).argmax(1).numpy() == data[1]).mean() > 0.99
    return made


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "int8-cache"))


# ── the bound ──


@given(st.integers(64, 300), st.data())
def test_at_most_one_prediction_in_a_hundred_may_change(count: int, data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, 6))
    exact = torch.eye(3)[torch.arange(count) % 3]
    quick = exact.clone()
    quick[:changed] = quick[:changed].roll(1, dims=1)
    check = compare_predictions(exact, quick, CLASSIFICATION.agreement, 32)
    assert check.passed == (changed / count <= 0.01)
    assert f"the same for {count - changed} of {count} held-out images" in check.text
    if not check.passed:
        with pytest.raises(ConfigError, match=r"^int8 is too inaccurate for this model: .*, and 99\.0% is the least"):
            check.require()


def test_outputs_that_are_not_finite_are_refused() -> None:
    exact, broken = torch.eye(64), torch.eye(64)
    broken[3, 4] = float("nan")
    assert not compare_predictions(exact, broken, CLASSIFICATION.agreement, 32).passed
    assert not compare_directions(exact, broken, 32).passed


@given(st.floats(0, 0.5))
def test_features_are_compared_by_their_direction(angle: float) -> None:
    """Their length may change; the cosine is that of the angle between them."""
    exact = torch.tensor([[1.0, 0.0]]).expand(70, 2)
    quick = 3 * torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float32).expand(70, 2)
    check = compare_directions(exact, quick, 32)
    assert check.agreement == pytest.approx(np.cos(angle), abs=1e-5)
    assert check.passed == (check.agreement >= 0.99)


# ── images ──


def test_calibration_and_held_out_images_are_different(fitted: Bundle) -> None:
    chosen = calibration_images(fitted, images(120))
    assert (len(chosen.calibration), len(chosen.held_out)) == (40, 80)
    seen = [row.tobytes() for part in chosen for row in part.numpy()]
    assert len(set(seen)) == 120
    assert seen == [row.tobytes() for part in calibration_images(fitted, images(120)) for row in part.numpy()]
    assert [len(part) for part in calibration_images(fitted, images(900))] == [256, 512]


def test_too_few_images(fitted: Bundle) -> None:
    with pytest.raises(DataError, match=r"^int8 needs 32 images for calibration and 64 to compare .* found 20 and 40"):
        calibration_images(fitted, images(60))


def test_a_model_outside_of_a_run_needs_images(fitted: Bundle) -> None:
    with pytest.raises(ConfigError, match="needs calibration images, and the model is not in the folder of a run"):
        open_int8(fitted, device=CPU)


def test_other_devices_are_refused(fitted: Bundle) -> None:
    with pytest.raises(ConfigError, match="int8 runs on the CPU only, not on mps; use --device cpu"):
        open_int8(fitted, images(120), device=torch.device("mps"))


# ── mistakes ──


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("predict", "MODEL", "x.png", "--calibrate", "photos"),
            "calibration images are for int8; add --precision int8",
        ),
        (("predict", "MODEL", "x.png", "--precision", "int8", "--engine", "onnx"), "int8 runs in OpenVINO, not in"),
        (("predict", "MODEL", "x.png", "--precision", "int8"), "name some with --calibrate"),
        (("embed", "MODEL", "photos", "--calibrate", "photos"), "calibration images are for int8"),
        (("embed", "MODEL", "photos", "--precision", "int8", "--calibrate", "photos"), "int8 needs 32 images"),
        (("bench", "MODEL", "--calibrate", "photos"), "calibration images are for int8"),
        (("export", "MODEL", "a.onnx", "--calibrate", "photos"), "calibration images are for int8"),
        (("export", "MODEL", "a.onnx", "--precision", "int8", "--calibrate", "nowhere"), "nowhere"),
        (("export", "MODEL", "a.onnx", "--precision", "bf16"), "cannot export in 'bf16'; the precisions are float32"),
        (("export", "MODEL", "a.pt2", "--to", "torch", "--precision", "int8"), "int8 is exported as onnx or openvino"),
        (("export", "MODEL", "a.onnx", "--precision", "int8", "--dynamic-size"), "an int8 graph has one image size"),
    ],
)
def test_mistakes(
    words: tuple[str, ...],
    message: str,
    fitted: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fitted.save("model")
    for number in range(2):
        folder = tmp_path / "photos" / f"class{number}"
        folder.mkdir(parents=True)
        Image.fromarray(images(1)[0][0]).save(folder / "a.png")
    (tmp_path / "photos" / "class0" / "a.png").rename(tmp_path / "x.png")
    (tmp_path / "photos" / "class0").rmdir()
    output = run_command(monkeypatch, capsys, *("model" if word == "MODEL" else word for word in words))
    assert (output.code, output.out) == (2, "")
    assert message in output.err
    assert len(output.err.splitlines()) == 1


def test_a_missing_package(fitted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ConfigError) as error:
        open_int8(fitted, images(120), device=CPU)
    assert str(error.value) == "nncf is not installed; install it with pip install 'vitrail[int8]'"


# ── predictions and features ──


@pytest.mark.slow
def test_predict(fitted: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The predictions are those of float32, other images than the calibration's; a second job opens the cache."""
    said: list[str] = []
    new = images(200, seed=3)
    options: dict[str, Any] = {"precision": "int8", "calibrate": images(300), "device": "cpu", "on_plan": said.append}
    rows = vitrail.predict(fitted, list(new[0]), **options)
    exact = eager(fitted, as_pixels(new)).softmax(1)
    assert sum(row.name == "abcde"[int(best)] for row, best in zip(rows, exact.argmax(1), strict=True)) >= 198
    values = torch.tensor([row.probability for row in rows])
    assert 1e-6 < (values - exact.max(1).values).abs().max() < 0.1, "float32 would be equal"
    assert re.fullmatch(
        r"OpenVINO, int8: the top class is the same for \d+ of 200 held-out images \([\d.]+%\), probabilities within "
        r"0\.\d+; calibrated on 100 images(; .*)?",
        said[0],
    )
    assert capfd.readouterr().out == ""

    monkeypatch.setattr(quantisation, "quantise", _fail)
    again = vitrail.predict(fitted, list(new[0]), **options)
    assert [row.fields() for row in again] == [row.fields() for row in rows]
    assert said[1] == said[0]
    with pytest.raises(AssertionError, match="quantised again"):  # other images are another model
        vitrail.predict(fitted, list(new[0]), **{**options, "calibrate": images(301)})


def _fail(*_: object) -> None:
    raise AssertionError("quantised again")


@pytest.mark.slow
def test_a_corrupt_cache_is_rebuilt(fitted: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    first = open_int8(fitted, images(120), device=CPU)
    file = tmp_path / "int8" / first.digest / "model.onnx"
    file.write_bytes(file.read_bytes()[:-100])
    second = open_int8(fitted, images(120), device=CPU)
    pixels = as_pixels(images(7))
    assert torch.equal(first(pixels), second(pixels))
    assert second.check == first.check


@pytest.mark.slow
def test_batches_give_the_outputs_of_single_images(fitted: Bundle) -> None:
    """Also from several threads, and with more images than cores."""
    engine = open_int8(fitted, images(120), device=CPU)
    assert (engine.kind, engine.precision, engine.plan.path) == ("openvino", "int8", "int8")
    pixels = as_pixels(images(70))
    alone = torch.cat([engine(image) for image in pixels.split(1)])
    assert torch.allclose(engine(pixels), alone, atol=1e-4)
    assert torch.allclose(torch.cat(list(engine.cpu_threads.each(engine, pixels.split(9)))), alone, atol=1e-4)
    exact = open_engine(fitted.model, fitted.preprocess, device=CPU)(pixels)
    assert not torch.allclose(alone, exact, atol=1e-4)


@pytest.mark.slow
def test_a_resumed_job_needs_the_same_calibration(fitted: Bundle, tmp_path: Path) -> None:
    for number, pixels in enumerate(images(10)[0]):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    output = tmp_path / "rows.jsonl"

    def predict(data: Data) -> Any:
        return vitrail.predict(
            fitted, tmp_path, output=output, precision="int8", calibrate=data, device="cpu", resume=True, workers=0
        )

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vitrail.predict(
            fitted, tmp_path, output=output, precision="int8", calibrate=images(120), device="cpu", on_plan=interrupt
        )
    with pytest.raises(DataError, match="was started with other calibration images; use the same"):
        predict(images(121))
    assert predict(images(120)).images == 10


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["pooled", "patches"])
def test_embed(tokens: Any, fitted: Bundle) -> None:
    said: list[str] = []
    new, options = images(50, seed=3), {"tokens": tokens, "workers": 0, "device": "cpu", "normalise": True}
    found = vitrail.embed(fitted, new, precision="int8", calibrate=images(120), on_plan=said.append, **options).features
    exact = vitrail.embed(fitted, new, precision="float32", **options).features
    assert found.shape == exact.shape
    assert np.allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-5)
    assert 0.99 < (found * exact).sum(-1).mean() < 1 - 1e-7
    assert said[0].startswith(
        "OpenVINO, int8: the features of 80 held-out images have a mean cosine similarity of 0.99"
    )


@pytest.mark.slow
def test_a_model_that_int8_changes_too_much_is_refused(fitted: Bundle, tmp_path: Path) -> None:
    """Classes that hardly differ; nothing is predicted, and nothing written."""
    similar = Bundle(copy.deepcopy(fitted.model), fitted.preprocess, fitted.classes)
    with torch.no_grad():
        head = similar.model.head
        head.weight.copy_(head.weight[:1] + 1e-4 * torch.randn_like(head.weight))
        head.bias.zero_()
    data = images(300)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ConfigError, match="int8 is too inaccurate for this model: the top class is the same for"):
            vitrail.predict(similar, list(data[0][:4]), precision="int8", calibrate=data, device="cpu")
    with pytest.raises(ConfigError, match="int8 is too inaccurate"):
        vitrail.export(similar, tmp_path / "model.onnx", precision="int8", calibrate=data)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bench(fitted: Bundle) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"batches": [2], "seconds": 0.05, "device": "cpu", "on_plan": said.append}
    done = vitrail.bench(fitted, precisions=["float32", "int8"], calibrate=images(120), **options)
    assert [cell.engine for cell in done.cells if cell.precision == "int8"] == ["openvino"]
    assert {(left.engine, left.reason) for left in done.skipped} == {
        ("torch", "int8 runs in OpenVINO"),
        ("onnx", "int8 runs in OpenVINO"),
    }
    assert said[1].startswith("OpenVINO, int8: the top class is the same for")
    without = vitrail.bench(fitted, precisions=["int8"], engines=["openvino"], **options)
    assert (without.cells, len(without.skipped)) == ([], 1)
    assert "name some with --calibrate" in without.skipped[0].reason


# ── exports ──


@pytest.mark.slow
@pytest.mark.parametrize(("to", "name"), [("onnx", "model.onnx"), ("openvino", "model.xml")])
def test_export(to: Any, name: str, fitted: Bundle, tmp_path: Path) -> None:
    done = vitrail.export(
        fitted, tmp_path / name, to=to, precision="int8", calibrate=images(300), preprocess=True, channels_last=True
    )
    assert done.int8 is not None
    assert (done.int8.calibrated_on, done.int8.images, done.int8.bound) == (100, 200, 0.99)
    recorded: dict[str, Any]
    new = images(200, seed=3)
    if to == "onnx":
        file = onnx.load(done.files[0])
        recorded = json.loads({entry.key: entry.value for entry in file.metadata_props}["int8"])
        onnx.checker.check_model(file, full_check=True)
        onnx.shape_inference.infer_shapes(file, strict_mode=True, data_prop=True)
        outputs = onnxruntime.InferenceSession(done.files[0]).run(None, {"pixels": new[0]})[0]
        large = [weights for weights in file.graph.initializer if np.prod(weights.dims) >= 24 * 24]
        assert {weights.data_type for weights in large} == {onnx.TensorProto.INT8}
    else:
        from vitrail.acceleration.export.openvino import core

        recorded = json.loads((tmp_path / "model.xml.json").read_text())["int8"]
        outputs = core().compile_model(done.files[0], "CPU")([new[0]])[0]
        parameters = sum(parameter.numel() for parameter in fitted.model.parameters())
        assert (tmp_path / "model.bin").stat().st_size < 2 * parameters + 20_000
    assert recorded == done.int8.as_dict() == done.metadata["int8"]
    exact = eager(fitted, as_pixels(new)).argmax(1).numpy()
    assert (outputs.argmax(1) == exact).sum() >= 198


@pytest.mark.slow
def test_serve(fitted: Bundle, tmp_path: Path) -> None:
    """Predictions are in int8, features in float32."""
    from vitrail.serving.lifecycle import Counters
    from vitrail.serving.model_registry import ServedModel
    from vitrail.serving.operations import Predict
    from vitrail.serving.settings import Settings

    fitted.save(tmp_path / "model")
    pixels, labels = images(120)
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        (tmp_path / "photos" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / str(label) / f"{number}.png")
    settings = Settings.model_validate(
        {"models": str(tmp_path / "model"), "device": "cpu", "precision": "int8", "calibrate": str(tmp_path / "photos")}
    )
    served = ServedModel(settings.models[0], settings, Counters())
    assert (served.description["precision"], served.precision) == ("int8", "float32")
    assert str(served.plan).startswith("OpenVINO, int8: the top class is the same for")
    results: list[Any] = served.run(Predict(top=1), list(pixels[:20]))
    assert [row["classes"][0]["index"] for row in results] == labels[:20].tolist()
