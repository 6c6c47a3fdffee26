"""Sweeps: every candidate is an ordinary run, selection uses the validation split, and the test split is used once."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support import forked_commands

import vitrail
from vitrail.__main__ import _run
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, Diverged, VitrailError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.grid import combine, read_sweep
from vitrail.training.recipe_files import read_recipe, read_value
from vitrail.training.sweep import Sweep, sweep
from vitrail.training.train import train

MODEL = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4"]
SGD = ["optimizer.kind=sgd", "optimizer.max_grad_norm=none", "schedule.kind=constant"]
TINY = ["epochs=0.25", "batch=32", "evaluations=2", *MODEL, *SGD]
RATES: dict[str, list[Any]] = {"optimizer.lr": [0.01, 0.1, 1000.0]}


def tried(folder: Path, over: dict[str, list[Any]], *more: str, data: str | Path = "digits") -> Sweep:
    changes = [*TINY, *more]
    return sweep(data, over=over, changes=changes, folder=folder, device="cpu", workers=0, quiet=True)


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `vitrail train digits …` in this process."""
    changes = [word for change in TINY for word in ("--set", change)]
    command = ["vitrail", "train", "digits", "--device", "cpu", "--workers", "0", *changes, *words]
    monkeypatch.setattr(sys, "argv", command)
    return _run()


def record(folder: Path) -> dict[str, Any]:
    """Return sweep.json without times."""
    content: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    for row in content["runs"]:
        assert row.pop("seconds") > 0
    return content


def moments(folder: Path) -> dict[Path, int]:
    """Return the modification time of each file that training writes."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/state/*/*")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return tried(tmp_path_factory.mktemp("runs") / "straight", RATES)


def test_selection_uses_the_validation_split(straight: Sweep) -> None:
    slow, good, wild = straight.runs
    assert [candidate.folder.name for candidate in straight.runs] == ["lr=0.01", "lr=0.1", "lr=1000"]
    assert wild.outcome.metrics == {}
    assert "the loss is nan" in (wild.outcome.diverged or "")
    assert straight.chosen is good
    assert good.outcome.metrics["val_top1"] > slow.outcome.metrics["val_top1"]
    assert straight.best.folder == good.folder
    assert straight.seeds == []
    measured = [json.loads(line) for line in (good.folder / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in measured if row["step"] == good.outcome.best_step and "val_top1" in row)
    assert {name: value for name, value in row.items() if name.startswith("val_")} == good.outcome.metrics
    assert record(straight.folder)["best"] == "lr=0.1"


def test_only_the_selected_run_has_a_result(straight: Sweep) -> None:
    assert [c.folder.name for c in straight.runs if (c.folder / "result.json").exists()] == ["lr=0.1"]
    assert json.loads((straight.best.folder / "result.json").read_text())["images"] == 359
    assert "selected on these images" not in straight.best.summary


@pytest.mark.slow
def test_ties_are_broken_by_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """These learning rates are so low that all predictions are the same."""
    rates, changes = {"optimizer.lr": [1e-12, 1e-5]}, [*TINY, "epochs=0.1"]
    done = sweep("digits", over=rates, changes=changes, folder=tmp_path / "sweep", device="cpu", workers=0)
    output = " ".join(capsys.readouterr().err.split())
    assert (
        "has the best accuracy on the validation split (tied with 1 other, and has the lowest loss of them); it is"
        in output
    )
    first, second = (candidate.outcome for candidate in done.runs)
    assert first.metrics["val_top1"] == second.metrics["val_top1"]
    assert second.metrics["val_loss"] < first.metrics["val_loss"]
    assert done.chosen is done.runs[1]


def test_finished_candidates_are_not_repeated(straight: Sweep) -> None:
    before, known = moments(straight.folder), record(straight.folder)
    again = tried(straight.folder, RATES)
    assert again.chosen == straight.chosen
    assert moments(straight.folder) == before
    assert record(straight.folder) == known


@pytest.mark.slow
def test_killed_and_resumed(straight: Sweep, tmp_path: Path) -> None:
    folder, second = tmp_path / "sweep", tmp_path / "sweep" / "lr=0.1"
    changes = ["--device", "cpu", "--workers", "0", *(word for change in TINY for word in ("--set", change))]
    words = ["train", "--sweep", "optimizer.lr=.01,.1,1e3", "--run", folder, *changes]
    process = forked_commands.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(second.glob("state/[0-9]*")):
        time.sleep(0.001)
        assert process.poll() is None
    process.kill()
    process.wait()
    first = {path: when for path, when in moments(folder).items() if path.is_relative_to(folder / "lr=0.01")}
    assert [row["folder"] for row in record(folder)["runs"]] == ["lr=0.01"]
    tried(folder, RATES)
    assert {path: moments(folder)[path] for path in first} == first
    actual, expected = record(folder), record(straight.folder)
    for row in (*actual["runs"], *expected["runs"]):
        row["diverged"] = row["diverged"] and row["diverged"].split(";")[0]  # without the folder
    assert actual == expected
    assert (second / "metrics.jsonl").read_text() == (straight.best.folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_two_runs_at_once_give_the_same_numbers(straight: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sweep("digits", over=RATES, changes=TINY, folder=folder, device="cpu", workers=0, jobs=2, quiet=True)
    actual, expected = record(folder), record(straight.folder)
    for row in (*actual["runs"], *expected["runs"]):
        row["diverged"] = row["diverged"] and row["diverged"].split(";")[0]  # without the folder
    assert actual == expected


def test_a_sweep_takes_more_values_later(straight: Sweep) -> None:
    before = moments(straight.folder)
    more = tried(straight.folder, {"optimizer.lr": [0.1, 0.03]})
    assert [candidate.folder.name for candidate in more.runs] == ["lr=0.1", "lr=0.03"]
    assert before.items() <= moments(straight.folder).items()


@pytest.mark.slow
def test_the_spread_over_seeds(tmp_path: Path) -> None:
    done = tried(tmp_path / "sweep", {"seed": [0, 1], "optimizer.lr": [0.1, 0.2]})
    assert [candidate.values for candidate in done.runs] == [
        {"seed": seed, "optimizer.lr": rate} for seed in (0, 1) for rate in (0.1, 0.2)
    ]
    assert [spread.values for spread in done.seeds] == [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}]
    first = done.seeds[0]
    scores = [done.runs[number].outcome.metrics["val_top1"] for number in (0, 2)]
    assert (first.runs, first.lowest, first.highest) == (2, min(scores), max(scores))
    assert first.mean == pytest.approx(sum(scores) / 2)


@pytest.mark.slow
def test_every_candidate_starts_from_the_same_model(tmp_path: Path) -> None:
    """Training changes its model, and a new head depends on the seed, not on earlier runs."""
    config = ViTConfig(image_size=(8, 8), patch_size=(4, 4), width=16, depth=1, heads=1, channels=1, classes=3)
    torch.manual_seed(5)
    preprocess = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
    Bundle(ViT(config.replace(init="timm")), preprocess).save(tmp_path / "start")
    pretrained = vitrail.load(tmp_path / "start")
    weights = {name: tensor.clone() for name, tensor in pretrained.model.state_dict().items()}
    changes = [change for change in TINY if not change.startswith("model.")]
    sweep("digits", over={"optimizer.lr": [0.1, 0.05]}, recipe="finetune", changes=changes, pretrained=pretrained,
          folder=tmp_path / "sweep", device="cpu", workers=0, quiet=True)  # fmt: skip
    assert all(torch.equal(tensor, weights[name]) for name, tensor in pretrained.model.state_dict().items())
    train("digits", recipe="finetune", changes=[*changes, "optimizer.lr=0.05"], pretrained=tmp_path / "start",
          folder=tmp_path / "alone", device="cpu", workers=0, quiet=True)  # fmt: skip
    for name in ("recipe.toml", "metrics.jsonl"):
        assert (tmp_path / "sweep" / "lr=0.05" / name).read_text() == (tmp_path / "alone" / name).read_text()


def test_candidates_do_not_read_the_test_split(tmp_path: Path) -> None:
    """Its images are unreadable, which only the final evaluation notices."""
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label in ("cat", "dog"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            for number in range(4):
                file = tmp_path / "data" / split / label / f"{number}.png"
                Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(file)
                if split == "test":
                    file.write_text("no image")
    with pytest.raises(DataError):
        tried(tmp_path / "sweep", {"optimizer.lr": [0.01, 0.1]}, "batch=4", data=tmp_path / "data")
    assert ["val_top1" in row["metrics"] for row in record(tmp_path / "sweep")["runs"]] == [True, True]


def test_the_table(straight: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(monkeypatch, "--run", str(straight.folder), "--sweep", "optimizer.lr=.01,1e-1,.1,1000") == 0
    shown = capsys.readouterr()
    header, *rows = [line.split() for line in shown.out.splitlines()[:4]]
    assert " ".join(header) == "optimizer.lr val accuracy val loss best step minutes result"
    assert [row[0] for row in rows] == ["0.01", "0.1", "1000"]
    assert (rows[1][-1], rows[2][1:4], rows[2][-1]) == ("best", ["–"] * 3, "diverged")
    assert "held-out images" in shown.out
    assert str(straight.best.folder / "best") in shown.out
    assert "3 runs, each trained in full for 10 steps" in shown.err
    assert "1 duplicate is dropped" in shown.err
    assert "2 of 3: optimizer.lr=0.1 is already finished" in shown.err


def test_the_folder_is_found_by_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = [*TINY, "epochs=0.05", "evaluations=1"]
    for rates in ([0.1, 0.2], [0.2, 0.1], [0.3]):
        sweep("digits", over={"optimizer.lr": rates}, changes=short, device="cpu", workers=0, quiet=True)
    names = {path.name: {run.name for run in path.iterdir() if run.is_dir()} for path in (tmp_path / "runs").iterdir()}
    assert sorted(map(sorted, names.values())) == [["lr=0.1", "lr=0.2"], ["lr=0.3"]]
    assert all(name.startswith("digits-") and name.endswith("-sweep") for name in names)


# ── reading it ──


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("optimizer.lr=.003,.01, 1e-3,+.5,3", [0.003, 0.01, 0.001, 0.5, 3]),
        ("augmentation.crop_area=[0.2,1.0],[0.5,1.0]", [[0.2, 1.0], [0.5, 1.0]]),
        ("optimizer.kind=sgd,adamw", ["sgd", "adamw"]),
        ("optimizer.max_grad_norm=none,1.0", [None, 1.0]),
        ("compile=true,false", [True, False]),
        ("freeze=[],['a,b']", [[], ["a,b"]]),
        ("x='1,2',2020-01-01,{a=1,b=[2,3]}", ["1,2", "2020-01-01", {"a": 1, "b": [2, 3]}]),
        ("seed=7", [7]),
    ],
)
def test_values_are_read(text: str, values: list[Any]) -> None:
    assert read_sweep([text]) == {text.partition("=")[0]: values}


def test_a_leading_zero_may_be_omitted() -> None:
    assert read_recipe("scratch-small", ["optimizer.lr=.003"]).optimizer.lr == 0.003
    assert read_value("-.5") == -0.5


def test_settings_are_judged_together() -> None:
    """The momentum alone means nothing to AdamW, with which the recipe begins."""
    for values in combine({"optimizer.kind": ["sgd"]}, ["optimizer.momentum=0.8"]):
        assert read_recipe("scratch-small", ["optimizer.momentum=0.8"], values).optimizer.kind == "sgd"


# ── errors ──


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr"], "'optimizer.lr' has no values to try; write optimizer.lr=0.003,0.01,0.03"),
        (["optimizer.lr=.1,,.2"], "has no values to try"),
        (["optimizer.lr="], "has no values to try"),
        (["=1,2"], "has no values to try"),
        (["augmentation.crop_area=[0.2,1.0"], "unbalanced bracket or quote"),
        (["optimizer.lrr=.1,.2"], "has no option 'optimizer.lrr'; did you mean 'lr'?"),
        (["model.widht=16,32"], "widht"),
        (["optimizer.lr=.1,fast"], "optimizer.lr is 'fast'"),
        (["optimizer.lr=.1,nan"], "optimizer.lr"),
        (["gradient_accumulation=1,3"], "a batch of 32 is not a multiple of data.repeats 1 × gradient_accumulation 3"),
        (["freeze=[],['blokcs.*']"], "no parameter matches 'blokcs.*'"),
        (["epochs=1,2"], "epochs is swept, but epochs=0.25 sets it; leave one of them out"),
        (["model=1,2"], "model is swept, but model.width=16 sets it"),
        (["seed=1", "seed=2"], "seed is swept twice"),
        (["augmentation.flip=0.0,0.5", "augmentation=none"], "augmentation.flip and augmentation overlap"),
        (["data.val=.1,.2"], "would evaluate its runs on different images; use --set data.val="),
    ],
)
def test_invalid_sweeps(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [word for text in words for word in ("--sweep", text)]
    assert typed(monkeypatch, "--run", str(tmp_path / "sweep"), *options) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.startswith("vitrail: ")
    assert output.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("values", [[], "sgd", [object()], 3])
def test_values_that_are_not_a_list(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"the values of optimizer\.kind are"):
        combine({"optimizer.kind": values}, [])
    with pytest.raises(ConfigError, match="a sweep needs values to try"):
        combine({}, [])


def test_without_a_validation_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a sweep selects on the validation split"):
        tried(tmp_path / "sweep", RATES, "data.val=0.0")


def test_when_all_diverge(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"every run of the sweep in .* diverged; the first: step"):
        tried(tmp_path / "sweep", {"optimizer.lr": [1000.0]})
    assert record(tmp_path / "sweep")["best"] is None


def test_a_run_and_a_sweep_do_not_share_a_folder(straight: Sweep) -> None:
    with pytest.raises(ConfigError, match="holds a run, not a sweep; choose another --run"):
        tried(straight.best.folder, RATES)
    with pytest.raises(ConfigError, match="holds a sweep, not a run"):
        train("digits", changes=TINY, folder=straight.folder, device="cpu", workers=0, quiet=True)


def test_another_recipe_in_the_same_folder(straight: Sweep) -> None:
    with pytest.raises(ConfigError, match="holds a run with another recipe"):
        tried(straight.folder, RATES, "optimizer.weight_decay=0.3")


def test_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(VitrailError, match="a sweep runs in one process"):
        vitrail.sweep("digits", over=RATES, folder=tmp_path / "sweep")
