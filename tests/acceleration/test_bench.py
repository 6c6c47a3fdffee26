"""The benchmark of engines."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tests.support.commands import PLAN, run_command
from tests.support.jpeg_files import MixedFiles
from tests.support.tiny_models import CPU, bundle
from torch import Tensor

import vitrail
from vitrail.acceleration import bench
from vitrail.acceleration.bench import ROUNDS, run_benchmark
from vitrail.data import decoder_choice
from vitrail.errors import ConfigError, DataError
from vitrail.inference import decoding_speed
from vitrail.models.vit import ViT


class Clock:
    """A clock that advances by 5 ms for every call of the model, because a busy machine is slower."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_cells_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle()
    requested: list[int] = []
    forward, clock = ViT.forward, Clock()

    def remembering(self: ViT, x: Tensor) -> Tensor:
        requested.append(len(x))
        clock.now += 0.005
        return forward(self, x)

    monkeypatch.setattr(ViT, "forward", remembering)
    monkeypatch.setattr(bench, "time", clock)
    calls: list[tuple[int, int]] = []
    result = run_benchmark(
        made.model,
        made.preprocess,
        device=CPU,
        engines=("torch",),
        precisions=("float32",),
        batches=(7, 1),  # too few to be split between threads, so each is one call
        seconds=0.2,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert [(cell.engine, cell.precision, cell.batch) for cell in result.cells] == [
        ("torch", "float32", 1),
        ("torch", "float32", 7),
    ]
    for cell in result.cells:
        spent = cell.calls * cell.batch / cell.images_per_second
        assert 0.1 < spent < 2
        assert 0 < cell.median <= cell.p95
        assert cell.change == 0
    # The two alternate: each round starts with the batch of 1.
    assert sum(before == 7 and after == 1 for before, after in itertools.pairwise(requested)) >= ROUNDS // 2
    assert calls[-1] == (2 * ROUNDS, 2 * ROUNDS)
    assert not result.skipped


def test_missing_engines_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    made = bundle()
    result = run_benchmark(
        made.model, made.preprocess, device=CPU, precisions=("float32", "bf16"), batches=(1,), seconds=0.01
    )
    assert [(cell.engine, cell.precision) for cell in result.cells] == [("torch", "float32"), ("torch", "bf16")]
    assert result.cells[1].change > 0
    assert [(left.engine, left.precision) for left in result.skipped] == [
        ("onnx", "float32"),
        ("onnx", "bf16"),
        ("openvino", None),
    ]
    assert result.skipped[2].reason == "openvino is not installed; install it with pip install 'vitrail[openvino]'"


def test_a_batch_beyond_memory_is_not_created() -> None:
    made = bundle()
    result = run_benchmark(
        made.model,
        made.preprocess,
        device=CPU,
        engines=("torch",),
        precisions=("float32",),
        batches=(10**12,),
        seconds=0.1,
    )
    assert not result.cells
    assert result.skipped[0].batch == 10**12
    assert "a batch of 1,000,000,000,000 would take about" in result.skipped[0].reason


def test_an_engine_with_non_finite_output_is_skipped() -> None:
    made = bundle()
    made.model.head.weight.data.mul_(1e6)
    result = run_benchmark(
        made.model,
        made.preprocess,
        device=CPU,
        engines=("torch",),
        precisions=("float32", "fp16"),
        batches=(1,),
        seconds=0.01,
    )
    assert [cell.precision for cell in result.cells] == ["float32"]
    (left,) = result.skipped
    assert (left.precision, left.batch, left.reason) == ("fp16", None, "its output is not finite")


def test_slow_cells_are_skipped() -> None:
    made = bundle()
    result = run_benchmark(
        made.model,
        made.preprocess,
        device=CPU,
        engines=("torch",),
        precisions=("float32",),
        batches=(1, 4096),
        seconds=0.001,
    )
    assert [cell.batch for cell in result.cells] == [1]
    assert result.skipped[0].batch == 4096
    assert result.skipped[0].reason.startswith("a batch of 4,096 would take about ")


def test_the_model_is_not_modified() -> None:
    made = bundle()
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    run_benchmark(made.model, made.preprocess, device=CPU, engines=("torch",), batches=(1,), seconds=0.01)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.model.state_dict().items())


@pytest.mark.parametrize(("batches", "seconds"), [((), 1.0), ((0,), 1.0), ((1,), 0.0), ((1,), float("nan"))])
def test_invalid_options(batches: tuple[int, ...], seconds: float) -> None:
    made = bundle()
    with pytest.raises(ConfigError):
        run_benchmark(made.model, made.preprocess, device=CPU, batches=batches, seconds=seconds)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bundle().save(tmp_path / "bundle")
    words = ("bench", folder, "--engine", "torch", "--batch", 1, "--batch", 2, "--seconds", 0.05, "--device", "cpu")
    output = run_command(monkeypatch, capsys, *words)
    assert output.code == 0
    plans = output.err.splitlines()
    assert [PLAN.fullmatch(line)[2] for line in plans] == ["float32", "bf16"]
    assert "batch  engine  precision  images/s  median, ms  p95, ms  speed" in output.out
    assert "1.00×" in output.out
    assert "Most images/s: torch in " in output.out
    output = run_command(monkeypatch, capsys, *words, "--precision", "float32", "--json")
    result = json.loads(output.out)
    assert [(cell["engine"], cell["batch"]) for cell in result["cells"]] == [("torch", 1), ("torch", 2)]
    assert result["device"] == "cpu"


def words_for_decoding(folder: Path) -> tuple[object, ...]:
    for name in "ab":
        (folder / "images" / name).mkdir(parents=True)
        MixedFiles(folder / "images" / name, 1)
    made = bundle().save(folder / "bundle")
    words = ("bench", made, "--engine", "torch", "--precision", "float32", "--batch", 1, "--seconds", 0.05)
    return (*words, "--device", "cpu", "--images", folder / "images")


def test_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU and by nvImageCodec, here on the CPU, too."""
    words = words_for_decoding(tmp_path)
    output = run_command(monkeypatch, capsys, *words, "--decode", "gpu")
    assert (output.code, output.out) == (2, "")
    assert "decode is gpu, but the device is cpu, and only a CUDA device decodes" in output.err
    for module in (decoding_speed, decoder_choice):
        monkeypatch.setattr(module, "DEVICES", ("cpu",))
    rows = json.loads(run_command(monkeypatch, capsys, *words, "--json").out)["decoding"]
    assert [row["decode"] for row in rows] == ["cpu", "gpu"]
    assert all(row["images_per_second"] > 0 for row in rows)


@pytest.mark.slow
def test_the_lines_on_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_for_decoding(tmp_path)
    line = r"Decoding, with \d+ workers?, in images/s: [\d,]+ on the CPU\. The slower"
    output = run_command(monkeypatch, capsys, *words)
    assert re.search(line, output.out)
    assert "decoding on the GPU" not in output.out
    monkeypatch.setattr(decoding_speed, "DEVICES", ("cpu",))
    output = run_command(monkeypatch, capsys, *words)
    assert re.search(line, output.out)
    assert "Not measured\ndecoding on the GPU: decode is gpu, but the device is cpu" in output.out


def test_decoding_of_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match="none of the images can be read"):
        vitrail.bench(bundle(), engines=["torch"], batches=[1], seconds=0.02, device="cpu", images=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("BUNDLE", "--decode", "cpu"), "decode is cpu, and no images are decoded; name some with --images"),
        (("BUNDLE", "--decode", "cuda"), "decode is 'cuda'; choose one of 'auto', 'cpu', 'gpu'"),
        (("BUNDLE", "--images", "nowhere"), "nowhere"),
        (("nowhere",), "nowhere"),
        (("BUNDLE", "--engine", "tensorrt"), "no engine is called 'tensorrt'; there are torch, onnx, openvino"),
        (
            ("BUNDLE", "--precision", "bf61"),
            "no precision is called 'bf61'; there are float32, bf16, fp16, int8; did you",
        ),
        (("BUNDLE", "--batch", "0"), "--batch"),
        (("BUNDLE", "--seconds", "0"), "--seconds"),
        (("BUNDLE", "--device", "tpu"), "no device is called 'tpu'"),
    ],
)
def test_mistakes(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = bundle().save(tmp_path / "bundle")
    output = run_command(monkeypatch, capsys, "bench", *(str(folder) if word == "BUNDLE" else word for word in words))
    assert (output.code, output.out) == (2, "")
    assert message in output.err
    assert len(output.err.splitlines()) == 1


def test_nothing_to_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bundle().save(tmp_path / "bundle")
    words = ("bench", str(folder), "--engine", "torch", "--device", "cpu", "--batch", "100000000", "--seconds", "0.01")
    output = run_command(monkeypatch, capsys, *words)
    assert output.code == 2
    assert "a batch of 100,000,000 would take about" in output.out


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    made = bundle()
    result = run_benchmark(made.model, made.preprocess, device=torch.device("cuda"), batches=(1, 16), seconds=0.1)
    assert {(cell.engine, cell.precision) for cell in result.cells} == {
        ("torch", "float32"),
        ("torch", "bf16"),
        ("torch", "fp16"),
    }
    assert {left.engine for left in result.skipped} == {"onnx", "openvino"}, result.skipped
