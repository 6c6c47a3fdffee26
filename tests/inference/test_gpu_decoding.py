"""predict, embed and evaluate with decoding by nvImageCodec, which runs here on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.jpeg_files import MixedFiles
from tests.support.tiny_models import bundle as tiny_bundle

import vitrail
from vitrail.data import decoder_choice, gpu_decoding, item_batches
from vitrail.errors import ConfigError, DataError
from vitrail.tasks.classification import ClassPrediction


@pytest.fixture(autouse=True)
def _decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_choice, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(item_batches, "DECODED_AT_ONCE", 16)  # several batches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abcde":
        (tmp_path / "images" / name).mkdir(parents=True)
        MixedFiles(tmp_path / "images" / name, 1)
    return tmp_path / "images"


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions(folder: Path, tmp_path: Path, workers: int) -> None:
    bundle, rows, lines = tiny_bundle(), {}, list[str]()
    for decode in ("cpu", "gpu"):
        out = tmp_path / f"{decode}.jsonl"
        done = vitrail.predict(
            bundle, str(folder), output=out, decode=decode, workers=workers, batch=7, device="cpu", on_plan=lines.append
        )
        rows[decode] = [json.loads(line) for line in out.read_text().splitlines()]
        assert (done.images, done.bad) == (50, 10)
    assert "decoding on the GPU: as asked" in lines
    for one, other in zip(rows["gpu"], rows["cpu"], strict=True):
        assert (one["path"], one["error"]) == (other["path"], other["error"])
        if other["error"] is None:
            assert one["probabilities"] == pytest.approx(other["probabilities"], abs=0.02)


def test_a_resumed_job_decodes_as_before(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the choice would now be another one."""
    bundle, out = tiny_bundle(), tmp_path / "out.jsonl"
    monkeypatch.setattr(decoder_choice, "FEWEST", 1)

    def stop(_: str, done: int, __: int | None) -> None:
        if done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vitrail.predict(bundle, str(folder), output=out, batch=7, workers=1, device="cpu", on_progress=stop)
    assert json.loads(Path(f"{out}.job.json").read_text())["decoder"] == "gpu"
    monkeypatch.setattr(decoder_choice, "FEWEST", 1000)
    with pytest.raises(DataError, match="was started with another decoder"):
        vitrail.predict(bundle, str(folder), output=out, decode="cpu", device="cpu", resume=True)
    lines: list[str] = []
    vitrail.predict(
        bundle, str(folder), output=out, batch=7, workers=1, device="cpu", resume=True, on_plan=lines.append
    )
    assert any(line.startswith("decoding on the GPU") for line in lines)
    assert len(out.read_text().splitlines()) == 50


def test_a_file_that_cannot_be_decoded_after_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nvImageCodec fails, we decode, and the rest of the batch keeps its rows."""
    bundle = tiny_bundle()
    expected = vitrail.predict(bundle, str(folder), decode="gpu", workers=0, device="cpu")
    decode = gpu_decoding.GpuDecoder.decode
    monkeypatch.setattr(gpu_decoding.GpuDecoder, "decode", lambda self, jpegs: [None, *decode(self, jpegs)[1:]])
    actual = vitrail.predict(bundle, str(folder), decode="gpu", workers=0, device="cpu")
    for one, other in zip(actual, expected, strict=True):
        assert (one.image, one.error) == (other.image, other.error)
        if one.error is None:
            assert isinstance(one, ClassPrediction)
            assert isinstance(other, ClassPrediction)
            assert one.probabilities == pytest.approx(other.probabilities, abs=0.02)


def test_features(folder: Path) -> None:
    bundle = tiny_bundle()
    on_cpu, on_gpu = (vitrail.embed(bundle, str(folder), decode=decode, device="cpu") for decode in ("cpu", "gpu"))
    assert on_gpu.bad == on_cpu.bad
    assert np.array_equal(on_gpu.indices, on_cpu.indices)
    assert np.abs(on_gpu.features - on_cpu.features).mean() < 0.02


def test_evaluation(folder: Path) -> None:
    bundle = tiny_bundle()
    on_cpu, on_gpu = (
        vitrail.evaluate(bundle, str(folder), split="all", decode=decode, device="cpu") for decode in ("cpu", "gpu")
    )
    assert on_gpu.bad == on_cpu.bad
    assert on_gpu.numbers[0].value == pytest.approx(on_cpu.numbers[0].value, abs=0.1)


def test_not_with_ray(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with Ray images are decoded on the CPU"):
        vitrail.predict(tiny_bundle(), str(folder), output=tmp_path / "rows", ray="local", decode="gpu")
