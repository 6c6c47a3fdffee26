"""benchmarks/gpu.py: option errors and loss curves; end_to_end, pretraining and ddp_step: all rows are measured."""

import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import ddp_step, end_to_end, gpu, pretraining
from PIL import Image
from tests.support.peers import import_peer

from vitrail.data import decoder_choice
from vitrail.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch is 0; give 1 or more"),
        (["--seconds", "nan"], "--seconds is nan; give 0 or more"),
        (["--contestants", "("], "'(' is not a regular expression"),
        (["--only", "inference:Q/16"], "unknown row 'inference:Q/16'"),
        (["--curve", "0"], "--curve is 0; give 1 or more steps"),
        (["--curve", "5", "--seeds", "0"], "--seeds is 0; give 1 or more"),
        (["--small"], "give --curve and a number of steps, too"),
        (["--starts", "2"], "--starts are those of a loss curve; give --curve"),
        (["--curve", "5", "--starts", "2", "--seeds", "3"], "leave --seeds out"),
        (["--curve", "5", "--nudges", "3"], "--nudges is how often runs from --starts are repeated; give those"),
        (["--curve", "5", "--nudge", "1e-3"], "--nudge is the size of --nudges; give those"),
        (["--curve", "5", "--starts", "2", "--nudges", "3", "--nudge", "0"], "and a fraction between 0 and 1"),
        (["--curve", "5", "--small", "--batch", "3"], "--small is a model of its own"),
        (["--json", "no/such/folder/file.json"], "create no/such/folder first"),
        (["--images", "nothing.npy"], "give an existing .npy file"),
        (["--carried", "nothing"], "--carried nothing is not a folder"),
    ],
)
def test_invalid_options_are_rejected(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.parse()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_device_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cuda:77"])
    with pytest.raises(ConfigError, match="is not available on this machine"):
        gpu.parse()


def test_an_invalid_size_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'B/16@x' is not a size"):
        gpu.config_of("B/16@x")
    assert gpu.config_of("B/16@384").image_size == (384, 384)


@pytest.fixture
def _recompile_limit() -> Iterator[None]:
    """Restore torch's recompile limit, which the program raises; monkeypatch cannot restore it."""
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_recompile_limit")
def test_loss_curves_can_be_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "curve.json"
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--device", "cpu", "--curve", "2", "--small", "--seeds", "2", "--json", str(kept)]
    )
    gpu.main()
    losses = json.loads(kept.read_text(encoding="utf-8"))["curve"]
    assert {way: [len(run) for run in runs] for way, runs in losses.items()} == {
        way: [2, 2] for way in ("plain", "other batches", "nudged", "fast")
    }
    plain, nudged, fast = losses["plain"][0], losses["nudged"][0], losses["fast"][0]
    assert plain == gpu.learned(gpu.small_row(torch.device("cpu")), 2, 0, "plain")
    assert plain != losses["plain"][1]
    assert plain != nudged == pytest.approx(plain, rel=1e-3)
    assert plain != fast == pytest.approx(plain, rel=1e-2)
    assert plain != pytest.approx(losses["other batches"][0], rel=1e-4)
    assert re.search(r"step    1  plain 2\.\d+  other batches [+-]\d\.\d+ ± \d", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures("_recompile_limit")
def test_one_initialisation_can_be_perturbed_many_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "scatter.json"
    arguments = ["--curve", "2", "--small", "--starts", "3", "--nudges", "2", "--nudge", "1e-4", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *arguments])
    gpu.main()
    runs = json.loads(kept.read_text(encoding="utf-8"))["scatter"]
    assert [run["way"] for run in runs] == ["plain", "fast"] * 3
    assert [run["nudge"] for run in runs] == [0, 0, 1, 1, 2, 2]
    assert runs[0]["losses"] == gpu.learned(gpu.small_row(torch.device("cpu")), 2, 3, "plain")
    assert len({tuple(run["losses"]) for run in runs}) == 6
    assert "start 3, fast, nudge 2: never below 2, 2." in capsys.readouterr().out


def test_when_learned_finds_the_first_step_below_the_threshold() -> None:
    assert gpu.when_learned([4.0] * 7 + [1.0] * 20) == "below 2 from step 4 on"  # the ten-step mean falls below 2 there
    assert gpu.when_learned([4.0] * 30) == "never below 2"


def test_contestants_are_selected_by_regular_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--contestants", "^vitrail$", "timm graphs"])
    assert list(gpu.contestants(gpu.parse(), None)["training"]) == ["vitrail", "timm graphs"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--contestants", "nobody"])
    with pytest.raises(ConfigError, match="no contestant matches nobody; choose from vitrail bf16, timm compile"):
        gpu.contestants(gpu.parse(), None)


# ── benchmarks/pretraining.py ──


@pytest.mark.slow
def test_pretraining_steps_of_all_libraries_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_peer("torchvision")
    words = ["--tiny", "--device", "cpu", "--paths", "eager", "--rounds", "1", "--steps", "1"]
    words += ["--json", str(tmp_path / "rows")]
    monkeypatch.setattr(sys, "argv", ["pretraining.py", *words])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the other libraries
        pretraining.main()
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert [(row["method"], row["library"]) for row in rows] == [
        ("mae", "vitrail"),
        ("mae", "transformers"),
        ("dino", "vitrail"),
        ("dino", "lightly"),
    ]
    assert all(row["step_ms"] > 0 for row in rows)


def test_a_benchmark_of_no_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretraining.py", "--steps", "0"])
    with pytest.raises(ConfigError, match="--steps is 0; give 1 or more"):
        pretraining.main()


# ── benchmarks/ddp_step.py ──


@pytest.mark.slow
def test_steps_under_ddp_are_compared_with_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tiny", "--device", "cpu", "--eager", "--all", "--blocks", "1", "3", "--rounds", "2", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["ddp_step.py", *words, "--json", str(tmp_path / "rows")])
    ddp_step.main()
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows").read_text())["rows"]}
    assert list(rows) == [
        *("alone", "DDP 1", "DDP 3", "alone, no CUDA graphs", "pieces 1", "pieces 3", "standard model, DDP"),
    ]
    assert rows["alone"]["ratio"] == 1
    assert all(row["step_ms"] >= row["host_ms"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert not torch.distributed.is_initialized()


def test_pieces_without_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp_step.py", "--blocks", "2", "0"])
    with pytest.raises(ConfigError, match="--blocks is 0; give 1 or more"):
        ddp_step.main()


# ── benchmarks/end_to_end.py ──


@pytest.mark.slow
def test_predictions_and_steps_from_files_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_peer("torchvision")
    generator = np.random.default_rng(0)
    for number in range(3):
        pixels = generator.integers(0, 256, (48, 64, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg")
    words = [str(tmp_path), "--tiny", "--device", "cpu", "--images", "64", "--workers", "1"]
    words += ["--decode", "cpu", "gpu", "resident"]
    monkeypatch.setattr(decoder_choice, "DEVICES", decoder_choice.DEVICES)  # the program changes it
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *words, "--json", str(tmp_path / "rows")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm's
        end_to_end.main()
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    ours = ["vitrail, cpu decode", "vitrail, gpu decode"]
    libraries = {"predict": [*ours, "timm"], "train": [*ours, "vitrail, resident", "timm"]}
    assert [(row["task"], row["library"]) for row in rows] == [
        (task, library) for task, names in libraries.items() for library in names
    ]
    assert [row["images"] for row in rows] == [64] * 3 + [32] * 4
    for row in rows:
        assert row["images_per_second"] > 0
        assert row["total_s"] > row["first_s"] > 0
        assert all(0 <= row[share] <= 1 for share in ("waiting", "run_waiting") if share in row)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--workers", "0"], "--workers is 0; give 1 or more"), (["--only", "train:L/16"], "unknown row 'train:L/16'")],
)
def test_wrong_options_of_end_to_end(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", str(tmp_path), "--device", "cpu", *words])
    with pytest.raises(ConfigError, match=message):
        end_to_end.main()
