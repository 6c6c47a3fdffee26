"""Sweeps of named candidates: what is trained, selected and tested, resuming, and several runs at once."""

import itertools
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.support import forked_commands
from tests.support.commands import run_command

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, Diverged
from vitrail.training.candidate_results import CandidateSweep
from vitrail.training.recipe import Recipe
from vitrail.training.sweep_pool import _Processes
from vitrail.training.sweep_run import PlannedRun, SweepTraining
from vitrail.training.sweep_worker import SavedModels

SHARED = {
    "steps": 10, "batch": 32, "evaluations": 2, "model": {"width": 16, "depth": 1, "heads": 1, "patch_size": 4},
    "optimizer": {"kind": "sgd", "max_grad_norm": "none"}, "schedule.kind": "constant",
}  # fmt: skip
CANDIDATES: dict[str, Any] = {
    "seeds": [0, 3],
    "set": SHARED,
    "over": {"optimizer.lr": [0.01, 0.1]},
    "candidate": {
        "plain": {},
        "mean": {"model.pool": "mean", "model.class_token": "none", "over": {"optimizer.lr": [0.05, 0.2, 1000.0]}},
        "fixed": {"model.depth": 2, "optimizer": {"lr": 0.1}},
        "wild": {"optimizer.lr": 1000.0},
    },
}


def compared(folder: Path, content: dict[str, Any] | Path = CANDIDATES, **more: Any) -> CandidateSweep:
    options = {"device": "cpu", "workers": 0, "quiet": True, **more}
    return vitrail.sweep("digits", candidates=content, folder=folder, **options)


def as_toml(content: dict[str, Any], path: Path) -> Path:
    """Write candidates as the TOML that a person could write."""
    lines = [f"seeds = {content['seeds']}"]
    flat = {"set": content["set"], "over": content.get("over", {})}
    for name, table in content["candidate"].items():
        flat[f"candidate.{name}"] = {key: value for key, value in table.items() if key != "over"}
        flat[f"candidate.{name}.over"] = table.get("over", {})
    for name, table in flat.items():
        lines.append(f"[{name}]")
        for key, value in table.items():
            pairs = [(key, value)] if not isinstance(value, dict) else [(f"{key}.{k}", v) for k, v in value.items()]
            lines += [f'"{key}" = {json.dumps(value)}' for key, value in pairs]
    path.write_text("\n".join(lines))
    return path


def record(folder: Path) -> Any:
    """Return sweep.json without times and hardware."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(inner) for key, inner in value.items() if key not in ("seconds", "device")}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    return without(json.loads((folder / "sweep.json").read_text()))


def runs(folder: Path) -> list[str]:
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob("*/*/outcome.json"))


def results(folder: Path) -> list[str]:
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob("*/*/result.json"))


def moments(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/*/state/*/*")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> CandidateSweep:
    return compared(tmp_path_factory.mktemp("sweeps") / "straight")


def test_the_grid_is_tried_with_the_first_seed_and_the_best_is_repeated(straight: CandidateSweep) -> None:
    plain, mean, fixed, _ = straight.candidates
    assert [run.values["optimizer.lr"] for run in mean.tried] == [0.05, 0.2, 1000.0]
    assert [run.values for run in fixed.tried] == [{}]
    for row in (plain, mean, fixed):
        reached = [run.outcome.metrics.get("val_top1", -1.0) for run in row.tried]
        assert row.values == row.tried[reached.index(max(reached))].values
        assert [run.seed for run in row.seeds] == [0, 3]
    lr = {row.name: (row.values or {}).get("optimizer.lr") for row in straight.candidates}
    assert runs(straight.folder) == sorted(
        [
            "fixed/seed=0", "fixed/seed=3", "mean/lr=0.05,seed=0", "mean/lr=0.2,seed=0", "mean/lr=1000,seed=0",
            f"mean/lr={lr['mean']:g},seed=3", "plain/lr=0.01,seed=0", "plain/lr=0.1,seed=0",
            f"plain/lr={lr['plain']:g},seed=3", "wild/seed=0",
        ]
    )  # fmt: skip


def test_only_selected_runs_are_tested(straight: CandidateSweep) -> None:
    selected = [run.folder for row in straight.candidates for run in row.seeds]
    assert results(straight.folder) == sorted(path.relative_to(straight.folder).as_posix() for path in selected)
    for row in straight.candidates[:3]:
        values = [run.test["top1"] for run in row.seeds if run.test]
        expected = scipy.stats.t.interval(0.95, 1, np.mean(values), scipy.stats.sem(values))
        assert row.test is not None
        assert row.test.runs == 2
        assert row.test.mean == pytest.approx(np.mean(values))
        assert (row.test.low, row.test.high) == pytest.approx(np.clip(expected, 0, 1))
        validation = [run.outcome.metrics["val_top1"] for run in row.seeds]
        assert row.validation is not None
        assert row.validation.mean == pytest.approx(np.mean(validation))


def test_a_candidate_that_diverges_is_recorded(straight: CandidateSweep) -> None:
    _, mean, _, wild = straight.candidates
    assert mean.diverged == [straight.folder / "mean" / "lr=1000,seed=0"]
    assert (wild.values, wild.seeds, wild.test) == (None, [], None)
    assert wild.diverged == [straight.folder / "wild" / "seed=0"]
    assert "the gradient norm nan" in (wild.tried[0].outcome.diverged or "")


def test_the_edge_of_a_grid_is_noted(straight: CandidateSweep) -> None:
    plain, mean, fixed, _ = straight.candidates
    assert plain.at_edge == ["optimizer.lr"]  # of two values, each is at an edge
    assert mean.at_edge == ([] if mean.values == {"optimizer.lr": 0.2} else ["optimizer.lr"])
    assert fixed.at_edge == []


def test_the_record(straight: CandidateSweep) -> None:
    text = (straight.folder / "sweep.json").read_text()
    content = json.loads(text)
    assert str(straight.folder) not in text
    assert (content["headline"], content["criterion"], content["seeds"]) == ("accuracy", "accuracy", [0, 3])
    assert (content["vitrail"], content["torch"]) == (vitrail.__version__, torch.__version__)
    assert "threads" in content["device"]
    assert content["seconds"] == pytest.approx(sum(row["seconds"] for row in content["candidates"]))
    assert content["settings"]["model.width"] == 16
    rows = {row["name"]: row for row in content["candidates"]}
    assert [list(row) for row in rows.values()] == [list(rows["plain"])] * 4
    assert rows["fixed"]["settings"] == {"model.depth": 2, "optimizer.lr": 0.1}
    assert rows["wild"]["diverged"] == ["wild/seed=0"]
    first = rows["plain"]["seeds"][0]
    assert first["test"]["top1"] == straight.candidates[0].seeds[0].test["top1"]
    assert "confusion" not in first["test"]
    assert "confusion" in straight.candidates[0].seeds[0].test


def test_the_chart(straight: CandidateSweep) -> None:
    root = ET.parse(straight.folder / "sweep.svg").getroot()
    words = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"plain", "mean", "fixed", "wild", "diverged", "Accuracy on the test split"} <= set(words)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 6


def test_finished_runs_are_not_repeated(straight: CandidateSweep, capsys: pytest.CaptureFixture[str]) -> None:
    before, known = moments(straight.folder), record(straight.folder)
    again = compared(straight.folder, quiet=False)
    assert again == straight
    assert moments(straight.folder) == before
    assert record(straight.folder) == known
    shown = capsys.readouterr().err
    assert "4 candidates, 11 runs, each trained in full for 10 steps" in shown
    assert shown.count("is already finished") == 10
    assert "10 of 10: " in shown


def test_the_table(
    straight: CandidateSweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = as_toml(CANDIDATES, tmp_path / "candidates.toml")
    words = ("train", "digits", "--sweep", file, "--run", straight.folder, "--device", "cpu", "--workers", 0)
    shown = run_command(monkeypatch, capsys, *words)
    assert shown.code == 0, shown.err
    header, *rows = shown.out.splitlines()
    assert header.split("  ")[0] == "candidate"
    assert " ".join(header.split()) == "candidate chosen val accuracy test accuracy 95% interval minutes note"
    assert [row.split()[0] for row in rows[:4]] == ["plain", "mean", "fixed", "wild"]
    assert straight.candidates[0].test is not None
    assert f"{100 * straight.candidates[0].test.mean:.1f}%" in rows[0]
    assert "optimizer.lr at the edge of its values" in rows[0]
    assert "1 diverged" in rows[3]
    assert str(straight.folder / "sweep.svg") in shown.out
    assert "plain: the best optimizer.lr is the lowest or highest that was tried" in shown.err
    assert "every seed draws its own" in shown.err


@pytest.mark.slow
def test_some_candidates_first(tmp_path: Path) -> None:
    content = {**CANDIDATES, "seeds": [0], "over": {}}
    first = compared(tmp_path / "sweep", content, only=["fixed"])
    assert runs(first.folder) == ["fixed/seed=0"]
    assert [row.values for row in first.candidates] == [None, None, {}, None]
    fixed = first.candidates[2]
    assert fixed.test is not None
    assert (fixed.test.runs, fixed.test.low) == (1, None)
    rest = compared(tmp_path / "sweep", content, only=["plain"])
    assert rest.candidates[2] == fixed
    with pytest.raises(ConfigError, match="has no candidate 'plane'; did you mean 'plain'"):
        compared(tmp_path / "sweep", content, only=["plane"])


@pytest.mark.slow
def test_the_default_folder_is_found_by_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = {**CANDIDATES, "seeds": [0], "candidate": {"a": {"optimizer.lr": 0.1}, "b": {"optimizer.lr": 0.2}}}
    changes = ["steps=2", "evaluations=1"]
    for only in (["a"], ["b"], []):
        vitrail.sweep("digits", candidates=content, changes=changes, only=only, device="cpu", workers=0, quiet=True)
    assert [path.name[-6:] for path in (tmp_path / "runs").iterdir()] == ["-sweep"]


@pytest.mark.slow
def test_a_changed_candidate_is_refused(straight: CandidateSweep) -> None:
    changed = {**CANDIDATES, "candidate": {**CANDIDATES["candidate"], "fixed": {"model.depth": 3, "optimizer.lr": 0.1}}}
    with pytest.raises(ConfigError, match="holds a run with another recipe"):
        compared(straight.folder, changed)
    with pytest.raises(ConfigError, match="holds a sweep of another kind"):
        vitrail.sweep("digits", over={"seed": [0]}, folder=straight.folder, device="cpu", quiet=True)


def test_when_all_diverge(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="every run of the sweep"):
        compared(tmp_path / "sweep", {**CANDIDATES, "over": {}, "candidate": {"wild": {"optimizer.lr": 1000.0}}})
    assert record(tmp_path / "sweep")["candidates"][0]["diverged"] == ["wild/seed=0"]


@pytest.mark.slow
def test_without_a_test_split(tmp_path: Path) -> None:
    content = {**CANDIDATES, "seeds": [0], "over": {}, "candidate": {"a": {"optimizer.lr": 0.1}}}
    done = compared(tmp_path / "sweep", content, changes=["data.test=0.0"])
    assert done.candidates[0].test is None
    assert done.candidates[0].validation is not None
    assert "on the validation split" in (done.folder / "sweep.svg").read_text()


# ── several runs at once ──


def weights(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {
        path.parent.parent.relative_to(folder).as_posix(): load_file(path)
        for path in folder.glob("*/*/best/model.safetensors")
    }


def assert_same(one: Path, other: Path) -> None:
    """Two sweeps have the same results, to the last bit of the weights."""
    actual, expected = record(one), record(other)
    assert actual == expected
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensors in ours.items():
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in tensors.items()), name


LONGER: dict[str, Any] = {
    "seeds": [0, 1],
    "set": {**SHARED, "steps": 40, "evaluations": 4},
    "candidate": {"tried": {"over": {"optimizer.lr": [0.01, 0.1]}}},
}


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("longer") / "straight", LONGER).folder


@pytest.mark.slow
def test_two_jobs_stopped_and_resumed_are_one_job(longer: Path, tmp_path: Path) -> None:
    """A signal to the command stops the processes of all runs; they save their state and resume from it."""
    folder, file = tmp_path / "sweep", as_toml(LONGER, tmp_path / "candidates.toml")
    words = ["train", "digits", "--sweep", file, "--run", folder, "--jobs", 2, "--device", "cpu", "--workers", 0]
    process = forked_commands.start(*words, stdout=subprocess.DEVNULL, new_session=True)
    while len(list(folder.glob("*/*/state/[0-9]*"))) < 1:
        time.sleep(0.001)
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, shown = process.communicate()
    assert process.wait() == 128 + signal.SIGTERM
    assert "stopped; the run is saved, rerun the same command to resume it" in shown
    assert "started tried, optimizer.lr=0.01, seed=0; its log is " in shown
    assert results(folder) == []
    done = compared(folder, LONGER, jobs=2)
    assert [len(row.seeds) for row in done.candidates] == [2]
    assert_same(folder, longer)
    log = (folder / "tried" / "lr=0.01,seed=0" / "log.txt").read_text()
    assert "evaluated on the validation split" in log


@pytest.mark.slow
def test_stopped_and_resumed(longer: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "sweep", as_toml(LONGER, tmp_path / "candidates.toml")
    words = ["train", "digits", "--sweep", file, "--run", folder, "--device", "cpu", "--workers", 0]
    process = forked_commands.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = folder / "tried" / "lr=0.1,seed=0"
    while not list(second.glob("state/[0-9]*")):
        time.sleep(0.001)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    first = {path: when for path, when in moments(folder).items() if "lr=0.01" in path.parts[-4]}
    assert first
    compared(folder, LONGER)
    assert first.items() <= moments(folder).items()
    assert_same(folder, longer)


def images(folder: Path) -> Path:
    """Write images whose test split cannot be read."""
    rng = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val", "test"), ("cat", "dog"), range(4)):
        file = folder / split / label / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if split == "test":
            file.write_text("no image")
        else:
            Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(file)
    return folder


@pytest.mark.slow
def test_selection_does_not_read_the_test_split_and_errors_of_a_process_are_reported(tmp_path: Path) -> None:
    content = {"set": {**SHARED, "batch": 4, "steps": 2}, "candidate": {"a": {"over": {"optimizer.lr": [0.1, 0.2]}}}}
    with pytest.raises(DataError, match=r"a, optimizer\.lr=.*, seed=0: "):
        vitrail.sweep(
            images(tmp_path / "data"), candidates=content, folder=tmp_path / "sweep", device="cpu", workers=0, jobs=2,
            quiet=True,
        )  # fmt: skip
    assert runs(tmp_path / "sweep") == ["a/lr=0.1,seed=0", "a/lr=0.2,seed=0"]


@pytest.mark.slow
def test_a_pretrained_model_reaches_the_processes(tmp_path: Path) -> None:
    config = vitrail.ViTConfig(image_size=(8, 8), patch_size=(4, 4), width=16, depth=1, heads=1, channels=1, classes=3)
    preprocess = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
    bundle = vitrail.Bundle(vitrail.ViT(config.replace(init="timm")), preprocess)
    content = {"set": {"steps": 5, "batch": 32, "evaluations": 1}, "candidate": {"a": {}, "b": {"optimizer.lr": 0.01}}}
    for jobs in (1, 2):
        compared(tmp_path / str(jobs), content, pretrained=bundle, jobs=jobs)
    assert_same(tmp_path / "1", tmp_path / "2")
    origins = [(tmp_path / jobs / "a" / "seed=0" / "origin.json").read_text() for jobs in ("1", "2")]
    assert origins[0] == origins[1]


def test_processes_share_the_cores() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        pool = _Processes(SweepTraining("digits", None, "cpu", None, quiet=True), 2, SavedModels())
        assert (pool.threads, _Processes(pool.training, 8, SavedModels()).threads) == (2, 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_process_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes train all runs of a sweep, those that select and those that repeat."""
    started: list[subprocess.Popen[bytes]] = []

    class Counted(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **options: Any) -> None:
            super().__init__(words, **options)
            started.append(self)

    monkeypatch.setattr("vitrail.training.sweep_pool.subprocess.Popen", Counted)
    compared(tmp_path, LONGER, jobs=2)
    assert len(runs(tmp_path)) == 3
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    for folder in tmp_path.glob("*/*/"):  # each run has its own messages in its log
        others = [str(other) for other in tmp_path.glob("*/*/") if other != folder]
        log = (folder / "log.txt").read_text()
        assert f"run folder {folder}" in log
        assert not any(other in log for other in others)


def planned(model: dict[str, Any], *, compiled: bool = True) -> PlannedRun:
    return PlannedRun(Recipe(model=model, compile=compiled), 1, Path("run"), "run")


def test_a_process_prefers_runs_of_the_model_it_has_compiled() -> None:
    pool = _Processes(SweepTraining("digits", None, "cpu", None, quiet=True), 2, SavedModels())
    small, large = planned({"depth": 1}), planned({"depth": 2})
    assert pool._suitable([small, small, large], None) == 0
    pool.workers = [SimpleNamespace(model=small.compiled_model)]  # type: ignore[list-item]
    assert pool._suitable([small, small, large], None) == 2  # a new process starts with another model
    assert pool._suitable([small, large, large], large.compiled_model) == 1
    assert pool._suitable([small, small], large.compiled_model) == 0
    assert planned({"depth": 1}).compiled_model == small.compiled_model != large.compiled_model


@pytest.mark.slow
def test_a_killed_sweep_takes_its_processes_along(tmp_path: Path) -> None:
    folder, file = tmp_path / "sweep", as_toml(LONGER, tmp_path / "candidates.toml")
    words = ["--sweep", str(file), "--run", str(folder), "--jobs", "2", "--device", "cpu", "--set", "steps=100000"]
    process = subprocess.Popen([sys.executable, "-m", "vitrail", "train", "digits", *words], stderr=subprocess.DEVNULL)
    while sum(path.stat().st_size > 0 for path in folder.glob("*/*/metrics.jsonl")) < 2:  # both are training
        time.sleep(0.01)
        assert process.poll() is None
    process.kill()
    process.wait()
    end = time.monotonic() + 120
    while len(list(folder.glob("*/*/state/[0-9]*"))) < 2:  # each process notices it, and saves its state
        time.sleep(0.05)
        assert time.monotonic() < end
