"""Whole runs: interrupted at any moment and resumed, a run equals one that was never interrupted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.support import forked_commands

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.writing import recover
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_data
from vitrail.errors import CheckpointError, ConfigError, DataError, Diverged
from vitrail.io import file_digest
from vitrail.models.config import ViTConfig
from vitrail.runtime import Processes
from vitrail.training.console import RunConsole
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import learning_rate
from vitrail.training.recipe_files import preset_names, read_recipe, write_toml
from vitrail.training.run_folder import MetricsFile, default_folder, locked, origin_of
from vitrail.training.state import Progress, Setting, State
from vitrail.training.state_files import content_digest, load_state, save_state
from vitrail.training.step import compiler_errors
from vitrail.training.train import train

TINY = [
    "epochs=1.5",
    "batch=64",
    "evaluations=3",
    "model.width=32",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=4",
    "model.mlp_dropout=0.1",
    "mixing.mixup=0.2",
    "mixing.cutmix=1.0",
]


def command(folder: Path, *more: str) -> list[str]:
    changes = [word for change in TINY for word in ("--set", change)]
    return ["train", "digits", "--run", str(folder), "--device", "cpu", *changes, *more]


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return forked_commands.run(*command(folder, *more), timeout=300)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "state").glob("[0-9]*"))[-1]
    return load_file(newest / "state.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    done = run(folder, "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "held-out images" in done.stdout
    return folder


def test_files_of_a_run(straight: Path) -> None:
    there = {path.name for path in straight.iterdir()}
    assert {"recipe.toml", "split.json", "check.json", "metrics.jsonl", "log.txt", "best", "last", "state"} <= there
    assert len(list((straight / "state").iterdir())) == 2
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))
    assert len([row for row in rows if "val_top1" in row]) == 3
    bundle = vitrail.load(straight / "best")
    assert bundle.classes == tuple("0123456789")
    assert read_recipe(straight / "recipe.toml").optimizer.lr == 5e-3


def test_a_finished_run_changes_nothing(straight: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (straight / "state").rglob("*")}
    done = run(straight, "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in (straight / "state").rglob("*")} == before


@pytest.mark.parametrize("workers", ["1", pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_workers_change_nothing(workers: str, straight: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "run", "--workers", workers).returncode == 0
    assert same(weights(tmp_path / "run"), weights(straight))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Each run is killed shortly after it saved a state; as it saves after every step, some are killed while saving."""
    folder, straight = tmp_path / "run", tmp_path / "straight"
    often = ("--set", "save_minutes=0", "--set", "epochs=5")
    assert run(straight, "--workers", "0", *often).returncode == 0
    generator = torch.Generator().manual_seed(seed)
    kills = 0
    for _ in range(40):
        words = command(folder, "--workers", str(seed), *often)
        process = forked_commands.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = _steps(folder)
        while process.poll() is None and _steps(folder) <= before:
            time.sleep(0.005)
        time.sleep(float(torch.rand((), generator=generator)) * 0.3)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    assert kills >= 2
    assert run(folder, "--workers", "0", *often).returncode == 0
    actual, expected = weights(folder), weights(straight)
    assert same(actual, expected)
    assert (folder / "metrics.jsonl").read_text() == (straight / "metrics.jsonl").read_text()


def _steps(folder: Path) -> int:
    return max((int(path.name) for path in (folder / "state").glob("[0-9]*")), default=0)


def test_a_signal_saves_first(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = forked_commands.start(*command(folder, "--workers", "0"))
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the run is saved, rerun the same command to resume it" in errors
    assert _steps(folder) > 0
    assert run(folder, "--workers", "0").returncode == 0
    assert same(weights(folder), weights(straight))


@pytest.mark.slow
def test_a_corrupt_state_falls_back_to_the_previous_one(straight: Path, tmp_path: Path) -> None:
    folder, often = tmp_path / "run", ("--workers", "0", "--set", "save_minutes=0")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = forked_commands.start(*command(folder, *often), **quiet)
    while _steps(folder) < 3:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    newest = sorted((folder / "state").glob("[0-9]*"))[-1]
    (newest / "state.safetensors").write_bytes(b"corrupt")
    done = run(folder, *often)
    assert done.returncode == 0, done.stderr
    assert f"the training state {newest.name} is corrupt" in done.stderr
    assert same(weights(folder), weights(straight))


def test_a_bad_image_is_named_in_the_summary(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 255, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{number}.png")
    shown = open_data(tmp_path / "data").train
    Path(shown.name(3)).write_text("no image")
    changes = ["epochs=2", "batch=8", "evaluations=1", "model.width=32", "model.depth=1", "model.heads=1"]
    done = train(tmp_path / "data", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert f"unreadable and skipped in training: {shown.name(3)}" in done.summary
    assert (
        f"{shown.name(3)} cannot be read and is skipped: it is not an image"
        in (tmp_path / "run" / "log.txt").read_text()
    )
    with pytest.raises(DataError, match="it is not an image"):
        train(tmp_path / "data", changes=[*changes, "data.bad_files=refuse"], folder=tmp_path / "other", device="cpu",
              workers=0, quiet=True)  # fmt: skip
    # That run took no step, so its recipe can be corrected.
    train(tmp_path / "data", changes=changes, folder=tmp_path / "other", device="cpu", workers=0, quiet=True)


# ── errors ──


@pytest.mark.slow
def test_a_machine_that_cannot_compile_says_so(tmp_path: Path) -> None:
    without = {"CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "vitrail", *command(tmp_path / "run", "--set", "compile=true", "--workers", "0")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **without})
    assert done.returncode == 2
    assert "vitrail: torch cannot compile the model on this machine (" in done.stderr
    assert done.stderr.rstrip().endswith("add --set compile=false")
    assert "Traceback" not in done.stderr


def test_errors_that_are_not_the_compilers_stay_as_they_are() -> None:
    with pytest.raises(KeyError), compiler_errors():
        raise KeyError("ours")


def test_another_recipe_in_the_same_folder(straight: Path) -> None:
    done = run(straight, "--set", "optimizer.lr=0.5")
    assert done.returncode == 2
    assert (
        "holds a run with another recipe (optimizer.lr is 0.005 there and 0.5 here); choose another --run"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.lrr=1", "has no option 'optimizer.lrr'; did you mean 'lr'?"),
        ("epochs=-1", "epochs is -1"),
        ("model.widht=3", "widht"),
        ("nonsense", "'nonsense' is not a change; write optimizer.lr=3e-4"),
        ("batch=7", "use a batch that is a multiple of 2"),
        ("batch=6 gradient_accumulation=2", "use a batch that is a multiple of 4"),
    ],
)
def test_invalid_settings(change: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train("digits", changes=[*TINY, *change.split()], folder=tmp_path / "run", device="cpu", quiet=True)
    assert words in str(caught.value)


def test_a_run_in_use(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        done = run(tmp_path / "run")
    assert (done.returncode, "is in use by another process" in done.stderr) == (2, True)


def test_a_loss_that_explodes_is_explained(tmp_path: Path) -> None:
    changes = [
        *TINY,
        "optimizer.lr=1000.0",
        "optimizer.kind=sgd",
        "optimizer.max_grad_norm=none",
        "schedule.kind=constant",
    ]
    with pytest.raises(Diverged, match=r"step \d+: the loss is .*; previous losses: .*; first module with"):
        train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)


def test_a_full_disk_keeps_the_previous_state(tmp_path: Path) -> None:
    setting = Setting(threads=1, processes=1, precision="float32")
    model = torch.nn.Linear(2, 2)
    state = State(model, torch.optim.SGD(model.parameters(), 0.1), None, Progress(step=1))
    save_state(tmp_path / "state", state, setting)
    state.progress.step = 2
    (tmp_path / "state").chmod(0o500)
    (tmp_path / "state" / f".00000002.{os.getpid()}").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be saved in .*; the one of step 1 is intact"):
        save_state(tmp_path / "state", state, setting)
    (tmp_path / "state" / f".00000002.{os.getpid()}").unlink(missing_ok=True)
    assert load_state(tmp_path / "state", state, setting, Ranks(Processes(), torch.device("cpu"))) == []
    assert state.progress.step == 1


def test_a_full_disk_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def refuse_as_text(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    end = "; free some space and rerun the same command to resume"
    with RunConsole(tmp_path, quiet=True) as console:
        file = SimpleNamespace(write=refuse, close=console.log.close)
        monkeypatch.setattr(console, "log", file)
        with pytest.raises(CheckpointError) as error:
            console.note("step 1")
    assert str(error.value) == f"{tmp_path / 'log.txt'} could not be written: No space left on device{end}"
    metrics = MetricsFile(tmp_path, 0)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=f"metrics.jsonl could not be written: No space left on device{end}$"):
        metrics.write({"step": 1})
    monkeypatch.undo()
    model = torch.nn.Linear(2, 2)
    state = State(model, torch.optim.SGD(model.parameters(), 0.1), None, Progress(step=1))
    monkeypatch.setattr("vitrail.training.state_files.save_file", refuse_as_text)
    with pytest.raises(CheckpointError, match=f"no earlier state was saved{end}$"):
        save_state(tmp_path / "state", state, Setting(threads=1, processes=1, precision="float32"))


def limited(limit: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run with restricted resources: `limit` is executed before the command."""
    code = f"{limit}\n{forked_commands.COMMAND}"
    return forked_commands.run(*command(folder, *more), code=code, timeout=300)


@pytest.mark.slow
def test_a_disk_that_fills_up_during_a_run(straight: Path, tmp_path: Path) -> None:
    """File size is limited to a few kB: the state cannot be written, and the run resumes from the previous one."""
    folder, often = tmp_path / "run", ("--workers", "0", "--set", "save_minutes=0")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = forked_commands.start(*command(folder, *often), **quiet)
    while _steps(folder) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    before = _steps(folder)
    full = limited("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))", folder, *often)
    output = full.stderr.splitlines()[-1]
    assert (full.returncode, full.stdout) == (2, "")
    assert "could not be saved" in output
    assert f"the one of step {before} is intact" in output
    assert "Traceback" not in full.stderr
    assert _steps(folder) == before
    assert run(folder, *often).returncode == 0
    assert same(weights(folder), weights(straight))


def test_a_run_folder_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    code = """
import os, sys
from pathlib import Path
from vitrail.errors import CheckpointError
from vitrail.training.run_folder import locked
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    with locked(Path(sys.argv[1])):
        print("locked")
except CheckpointError as error:
    print(error)
"""
    done = forked_commands.run(closed / "run", code=code)
    assert done.stdout == f"the run folder {closed / 'run'} cannot be written: Permission denied\n"
    (tmp_path / "file").write_text("in the way")
    refused = run(tmp_path / "file" / "run")
    assert (refused.returncode, refused.stdout) == (2, "")
    expected = f"vitrail: the run folder {tmp_path / 'file' / 'run'} cannot be written: Not a directory\n"
    assert refused.stderr == expected


def test_data_that_changed_since_the_run_started(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 255, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{number}.png")
    changes = ["epochs=1", "batch=8", "evaluations=1", "model.width=32", "model.depth=1", "model.heads=1"]

    def again() -> None:
        train(tmp_path / "data", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)

    again()
    (tmp_path / "data" / "cat" / "0.png").rename(tmp_path / "data" / "cat" / "other.png")
    with pytest.raises(DataError, match=r"the data has changed since the run in .* started"):
        again()


@pytest.mark.parametrize("name", preset_names())
def test_every_recipe_round_trips_through_toml(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name)
    (tmp_path / "again.toml").write_text(write_toml(recipe))
    assert read_recipe(tmp_path / "again.toml") == recipe


# ── ways to run ──


def metrics_file(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_a_compiled_run_trains_the_same(tmp_path: Path) -> None:
    for name in ("plain", "compiled"):
        changes = [
            *TINY,
            "model.mlp_dropout=0.0",
            "precision=float32",
            "steps=8",
            "epochs=none",
            f"compile={str(name == 'compiled').lower()}",
        ]
        train("digits", changes=changes, folder=tmp_path / name, device="cpu", workers=0, quiet=True)
    np.testing.assert_allclose(metrics_file(tmp_path / "compiled"), metrics_file(tmp_path / "plain"), rtol=0, atol=1e-4)


def test_none_is_a_string_where_it_is_a_literal() -> None:
    changes = [
        "averaging.kind=none",
        "model.class_token=none",
        "optimizer.max_grad_norm=none",
        "objective.class_weights=none",
    ]
    recipe = read_recipe("scratch-small", [*changes, "augmentation.crop=none", "augmentation.randaugment=none"])
    assert (recipe.averaging.kind, recipe.model["class_token"], recipe.optimizer.max_grad_norm) == (
        "none",
        "none",
        None,
    )
    assert recipe.objective.class_weights == "none"
    assert (recipe.augmentation.crop, recipe.augmentation.randaugment) == ("none", None)


def test_early_stopping(tmp_path: Path) -> None:
    """With a tiny learning rate the second validation is not better than the first."""
    changes = [*TINY, "optimizer.lr=1e-12", "evaluations=10", "patience=2", "averaging.kind=none"]
    done = train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert len(metrics_file(tmp_path / "run")) < 34
    again = train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert again.metrics.headline == done.metrics.headline


# ── consistency of a run's files ──


def test_metrics_average_and_best_model_agree(straight: Path) -> None:
    """The learning rate follows the schedule, and `best/` holds the averaged weights of its step."""
    recipe = read_recipe(straight / "recipe.toml")
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == [
        learning_rate(recipe.schedule, step, len(rates), recipe.optimizer.lr) for step in range(len(rates))
    ]
    assert len(set(rates)) > 20
    best = vitrail.load(straight / "best")
    step = [row for row in rows if "val_top1" in row][-1]["best"]
    assert best.provenance["trained"]["step"] == step
    state = load_file(straight / "state" / f"{step:08d}" / "state.safetensors")
    for name, tensor in best.model.state_dict().items():
        assert torch.equal(tensor, state[f"average/{name}"].to(tensor.dtype)), name
    assert any(not torch.equal(state[f"average/{name}"], state[f"model/{name}"]) for name in best.model.state_dict())
    splits = open_data("digits", val=recipe.data.val, test=recipe.data.test)
    assert json.loads((straight / "result.json").read_text())["images"] == len(splits.test) != len(splits.val)


def test_a_state_of_another_model(straight: Path, tmp_path: Path) -> None:
    """As happens if a run folder is deleted and recreated while the run is still saving."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for state in (folder / "state").iterdir():
        file = state / "state.safetensors"
        tensors = load_file(file)
        tensors["model/head.bias"] = torch.zeros(3)
        save_file(tensors, file)
        content = json.loads((state / "state.json").read_text())
        content["files"][file.name] = file_digest(file)
        del content["digest"]
        content["digest"] = content_digest(content)
        (state / "state.json").write_text(json.dumps(content))
    done = run(folder, "--workers", "0")
    assert done.returncode == 2
    assert f"the training state in {folder / 'state'} is of another model than the recipe's; delete" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_one_flipped_bit_is_detected(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    newest = sorted((folder / "state").glob("[0-9]*"))[-1] / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    done = run(folder, "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "is corrupt (its checksum does not match), so the previous one is used" in done.stderr
    assert same(weights(folder), weights(straight))


@pytest.mark.slow
def test_a_run_restarts_if_all_states_are_corrupt(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for file in (folder / "state").rglob("state.safetensors"):
        file.write_bytes(b"corrupt")
    done = run(folder, "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert "so training restarts" in done.stderr
    assert same(weights(folder), weights(straight))
    assert len(list((folder / "state").glob("[0-9]*"))) == 2


@pytest.mark.slow
def test_a_signal_to_all_processes_saves_first(straight: Path, tmp_path: Path) -> None:
    """As systemd, Slurm and `timeout` send it: the data workers get it, too."""
    folder = tmp_path / "run"
    process = forked_commands.start(*command(folder, "--workers", "1"), new_session=True)
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert _steps(folder) > 0
    assert run(folder, "--workers", "1").returncode == 0
    assert same(weights(folder), weights(straight))


def test_another_initialisation_is_another_run(tmp_path: Path) -> None:
    bundles = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = vitrail.create(
            ViTConfig(image_size=8, patch_size=4, width=32, depth=1, heads=2, channels=1, classes=10)
        )
        preprocess = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
        bundles.append(Bundle(model, preprocess, tuple("0123456789"), {}))
    changes = ["steps=2", "epochs=none", "batch=8", "evaluations=1"]
    for number, bundle in enumerate(bundles):
        folder = tmp_path / "run"
        if number == 0:
            train("digits", pretrained=bundle, changes=changes, folder=folder, device="cpu", workers=0, quiet=True)
        else:
            with pytest.raises(
                ConfigError, match="holds a run that was trained from other weights; choose another --run"
            ):
                train("digits", pretrained=bundle, changes=changes, folder=folder, device="cpu", workers=0, quiet=True)
    origins = [origin_of("digits", bundle) for bundle in bundles]
    recipe = read_recipe("finetune")
    assert default_folder(origins[0], [recipe]) != default_folder(origins[1], [recipe])
    assert default_folder(origins[0], [recipe]) == default_folder(origin_of("digits", bundles[0]), [recipe])
    assert re.fullmatch(
        r"p-0000..0001-.tar-[0-9a-f]{6}", default_folder(origin_of("p-{0000..0001}.tar", None), [recipe]).name
    )
    assert default_folder(origin_of("a/photos", None), [recipe]) != default_folder(
        origin_of("b/photos", None), [recipe]
    )


def test_an_interrupted_rename_of_best_is_recovered(tmp_path: Path) -> None:
    (tmp_path / ".best-old-1" / "best").mkdir(parents=True)
    (tmp_path / ".best-2").mkdir()
    recover(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    (tmp_path / ".best-old-1" / "best").mkdir(parents=True)
    recover(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.slow
def test_interrupted_just_before_early_stopping(tmp_path: Path) -> None:
    changes = [*TINY, "optimizer.lr=1e-12", "evaluations=10", "patience=2", "averaging.kind=none"]
    train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    ended = metrics_file(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "state").glob("[0-9]*"))[-1] / "state.json"
    content = json.loads(newest.read_text())
    newest.write_text(json.dumps({**content, "finished": False}))  # as if the last save did not happen
    train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert metrics_file(tmp_path / "run") == ended


@pytest.mark.parametrize("inside", ["", "best"])
def test_a_run_folder_that_holds_something_else(inside: str, straight: Path, tmp_path: Path) -> None:
    """A run does not write into a folder with other files, least of all a model."""
    folder = tmp_path / "mine"
    (folder / inside).mkdir(parents=True, exist_ok=True)
    (folder / inside / "thesis.txt").write_text("important")
    with pytest.raises(ConfigError, match="exists and is not a run; choose another --run"):
        train("digits", changes=TINY, folder=folder, device="cpu", workers=0, quiet=True)
    assert [path.name for path in folder.rglob("*.txt")] == ["thesis.txt"]
    assert not (folder / ".lock").exists()


def test_a_run_folder_inside_the_data(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "dog").mkdir()
    for label in ("cat", "dog"):
        for number in range(10):
            Image.new("RGB", (12, 12), (number, 0, 0)).save(tmp_path / "photos" / label / f"{number}.png")
    for folder in (tmp_path / "photos", tmp_path / "photos" / "runs" / "first"):
        with pytest.raises(ConfigError, match="is inside the data"):
            train(tmp_path / "photos", changes=TINY, folder=folder, device="cpu", workers=0, quiet=True)
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == ["cat", "dog"]


def test_a_run_folder_is_not_a_model(straight: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        vitrail.load(straight)
    assert str(caught.value) == f"{straight} is a run folder; its best model is {straight / 'best'}"
