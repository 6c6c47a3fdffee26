"""Corrupt run folders: recoverable files are recovered, losses are reported, and no wrong result is given."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.support.corrupt_files import RECIPE, make_run, train_tiny

from vitrail.__main__ import main
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.runtime import Processes
from vitrail.training.criterion import Best, move_aside
from vitrail.training.distributed import Ranks
from vitrail.training.state import Progress, Setting, State
from vitrail.training.state_files import content_digest, save_state
from vitrail.training.train import Run, train

SETTING = Setting(threads=1, processes=1, precision="float32")
STILL = [*RECIPE, "optimizer.lr=1e-30", "criterion=loss", "evaluations=4"]
"""Learns nothing, so that the first validation stays the best, and its state is not among the last two."""


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def log(place: Path) -> str:
    return (place / "run" / "log.txt").read_text(encoding="utf-8")


def states(place: Path) -> list[Path]:
    return sorted((place / "run" / "state").glob("[0-9]*"))


def state(place: Path) -> dict[str, object]:
    results: dict[str, object] = json.loads((states(place)[-1] / "state.json").read_text(encoding="utf-8"))
    return results


def train_still(place: Path) -> Run:
    return train(place / "data", changes=STILL, folder=place / "run", device="cpu", workers=0, quiet=True)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("still")
    make_run(place)
    shutil.rmtree(place / "run")
    train_still(place)
    assert state(place)["best_step"] not in [int(result.name) for result in states(place)]
    return place


@pytest.mark.parametrize("harm", ["one bit", "cut", "config cut", "missing", "changed"])
def test_best_is_recovered_from_the_state(harm: str, tmp_path: Path) -> None:
    make_run(tmp_path)
    best = tmp_path / "run" / "best"
    # Cloned, because loaded tensors are memory-mapped.
    whole = {name: tensor.clone() for name, tensor in load_file(best / "model.safetensors").items()}
    result = train_tiny(tmp_path).metrics.headline.value
    match harm:
        case "one bit":
            flip(best / "model.safetensors")
        case "cut":
            (best / "model.safetensors").write_bytes((best / "model.safetensors").read_bytes()[:1000])
        case "config cut":
            (best / "config.json").write_text('{"vitrail": ')
        case "missing":
            shutil.rmtree(best)
        case _:
            text = (best / "config.json").read_text(encoding="utf-8")
            (best / "config.json").write_text(text.replace("0.5", "0.7"), encoding="utf-8")
    run = train_tiny(tmp_path)
    assert run.metrics.headline.value == result
    assert "nothing is lost" in log(tmp_path)
    assert str(best) in log(tmp_path)
    results = load_file(best / "model.safetensors")
    assert all(torch.equal(results[name], whole[name]) for name in whole)
    assert (tmp_path / "run" / "corrupt-best").is_dir() == (harm != "missing")
    before = log(tmp_path).count("nothing is lost")
    train_tiny(tmp_path)
    assert log(tmp_path).count("nothing is lost") == before


def test_a_lost_best_checkpoint_is_replaced_and_reported(still: Path, tmp_path: Path) -> None:
    shutil.copytree(still, tmp_path, dirs_exist_ok=True)
    lost, last = state(tmp_path)["best_step"], state(tmp_path)["step"]
    result = tmp_path / "run" / "result.json"
    result.write_text("{}", encoding="utf-8")
    flip(tmp_path / "run" / "best" / "model.safetensors")
    run = train_still(tmp_path)
    assert f"the best weights, from step {lost}, are lost and replaced by the" in log(tmp_path)
    assert f"weights of step {last}" in log(tmp_path)
    assert state(tmp_path)["best_step"] == last
    assert run.bundle.provenance["trained"]["step"] == last
    assert json.loads(result.read_text(encoding="utf-8"))["top1"] == run.metrics.headline.value
    times = log(tmp_path).count("are lost")
    train_still(tmp_path)
    assert log(tmp_path).count("are lost") == times


def test_a_lost_best_checkpoint_is_replaced_before_resuming(still: Path, tmp_path: Path) -> None:
    shutil.copytree(still, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(states(tmp_path)[-1])
    shutil.rmtree(tmp_path / "run" / "best")
    here = state(tmp_path)["step"]
    train_still(tmp_path)
    assert f"weights of step {here}" in log(tmp_path)


def test_a_lost_best_checkpoint_is_replaced_at_any_score(tmp_path: Path) -> None:
    """With the loss as criterion any score below 0 is possible, so none can mean "no best model yet"."""
    messages: list[str] = []
    state = tiny_state(4)
    state.progress.best_step, state.progress.highest = 2, (-0.5, -0.5)
    ranks = Ranks(Processes(), torch.device("cpu"))
    best = Best(tmp_path, state, ranks, messages.append, lambda *_: pytest.fail("there are no weights"))
    assert best.check() == "lost"
    assert messages == [
        f"{tmp_path / 'best'} is missing; the best weights, from step 2, are lost and replaced by the weights of step 4"
    ]
    assert state.progress.best_step == 0
    assert best.check() == "intact", "there is none to be lost any more"


def test_folders_moved_aside_are_not_overwritten(tmp_path: Path) -> None:
    for name in ("corrupt-best", "corrupt-best-2"):
        (tmp_path / "best").mkdir()
        (tmp_path / "best" / "file").write_text(name)
        assert move_aside(tmp_path / "best") == tmp_path / name
        assert (tmp_path / name / "file").read_text() == name
    assert move_aside(tmp_path / "best") is None


def test_best_of_a_run_killed_before_saving_is_intact(tmp_path: Path) -> None:
    make_run(tmp_path)
    shutil.rmtree(states(tmp_path)[-1])
    config = tmp_path / "run" / "best" / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content["vitrail"]["provenance"]["trained"]["step"] = 1 + int(states(tmp_path)[-1].name)
    config.write_text(json.dumps(content), encoding="utf-8")
    train_tiny(tmp_path)
    resumed = log(tmp_path).rindex("resuming from step")
    assert "corrupt-best" not in log(tmp_path)[: log(tmp_path).index("memory:", resumed)]


@pytest.mark.parametrize("file", ["recipe.toml", "split.json", "origin.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 200_000, b"a = " + b"9" * 5_000, b"[]"])
def test_a_corrupt_file_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError, DataError)) as result:
        train_tiny(tmp_path)
    assert file in str(result.value) or str(tmp_path / "run") in str(result.value)
    assert "\n" not in str(result.value)


def test_the_command_prints_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    (tmp_path / "run" / "recipe.toml").write_bytes(b"batch = ")
    changes = [word for change in RECIPE for word in ("--set", change)]
    words = ["train", str(tmp_path / "data"), "--run", str(tmp_path / "run"), "--device", "cpu", *changes]
    monkeypatch.setattr(sys, "argv", ["vitrail", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert "recipe.toml is not TOML" in output
    assert len(output.strip().splitlines()) == 1


def test_a_replaced_image_raises(tmp_path: Path) -> None:
    make_run(tmp_path)
    train_tiny(tmp_path)
    image = sorted((tmp_path / "data").rglob("*.png"))[3]
    Image.new("RGB", (9, 9), "red").save(image)
    with pytest.raises(DataError, match=rf"{image} has changed size since the run in .* started"):
        train_tiny(tmp_path)


def test_a_rewritten_image_is_reported_once(tmp_path: Path) -> None:
    make_run(tmp_path)
    train_tiny(tmp_path)
    images = sorted((tmp_path / "data").rglob("*.png"))[:2]
    times = log(tmp_path).count("been rewritten or copied")
    for image in images:
        flip(image)
    train_tiny(tmp_path)
    assert "and 1 more image have been rewritten or copied since the run started" in log(tmp_path)
    train_tiny(tmp_path)
    assert log(tmp_path).count("been rewritten or copied") == times + 1


def tiny_state(step: int) -> State:
    model = torch.nn.Linear(2, 2)
    return State(model, torch.optim.SGD(model.parameters(), 0.1), None, Progress(step=step))


def test_a_first_state_that_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / f".00000002.{os.getpid()}").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be saved in .*; no earlier state was saved"):
        save_state(tmp_path / "state", tiny_state(2), SETTING)


def test_a_state_follows_the_umask(tmp_path: Path) -> None:
    save_state(tmp_path, tiny_state(1), SETTING)
    mask = os.umask(0)
    os.umask(mask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.rglob("*.*")} == {0o666 & ~mask}


def test_a_state_of_another_version_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    make_run(tmp_path)
    for place in states(tmp_path):
        content = json.loads((place / "state.json").read_text(encoding="utf-8"))
        del content["digest"], content["highest"]
        content["digest"] = content_digest(content)
        (place / "state.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"another version of Vitrail \(it lacks highest\); .*--run NEW_FOLDER"):
        train_tiny(tmp_path)
