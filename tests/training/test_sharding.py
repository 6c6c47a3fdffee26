"""Sharded training: the same weights as with whole models, resumed on any number of ranks."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.torchrun import kill_all, losses, newest, run, start_and_wait, steps
from torch import Tensor

from vitrail.checkpoints.load import load
from vitrail.errors import ConfigError
from vitrail.training.recipe_files import read_recipe
from vitrail.training.run_folder import default_folder, origin_of
from vitrail.training.state_shards import load_whole

SHARDED = "distributed.shard=true"
CHANGES = (
    "batch=48", "steps=24", "save_minutes=0", "averaging.kind=ema", "gradient_accumulation=2",
    "optimizer.max_grad_norm=0.5",
)  # fmt: skip


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return the newest training state of a run, whole."""
    return load_whole(newest(folder))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    done = run(folder, 2, SHARDED, *CHANGES)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were killed after some steps: sharded, and with whole models."""
    folders = {}
    for name, changes in {"sharded": (SHARDED, *CHANGES), "whole": CHANGES}.items():
        folders[name] = tmp_path_factory.mktemp("runs") / name
        process = start_and_wait(folders[name], 2, 6, *changes)
        kill_all(folders[name])
        process.communicate()
        assert 6 <= steps(folders[name]) < 24
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_weights_are_those_of_whole_models(optimizer: str, tmp_path: Path) -> None:
    changes = (*CHANGES, f"optimizer.kind={optimizer}", "steps=12", "evaluations=1")
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    for folder, shard in ((sharded, SHARDED), (whole, "distributed.shard=false")):
        done = run(folder, 2, shard, *changes)
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(sharded), losses(whole), rtol=1e-5)
    actual, expected = tensors(sharded), tensors(whole)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    models = [load(folder / "best").model.state_dict() for folder in (sharded, whole)]
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def whole_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "start"
    done = run(folder, 1, "steps=6", "evaluations=1")
    assert done.returncode == 0, done.stderr
    return folder / "best"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "changes", "tolerance"),
    [
        pytest.param("train", ("optimizer.kind=adam",), 1e-5, id="adam"),
        pytest.param("train", ("lora.rank=4",), 1e-5, id="lora"),
        pytest.param("train", ("compile=true",), 1e-5, id="compile"),
        pytest.param("train", ("precision=bf16",), 1e-3, id="bf16"),
        pytest.param("pretrain", (), 1e-5, id="mae"),
    ],
)
def test_losses_and_bundles_are_those_of_whole_models(
    whole_bundle: Path, verb: str, changes: tuple[str, ...], tolerance: float, tmp_path: Path
) -> None:
    options = ("--from", str(whole_bundle)) if verb == "train" else ("--method", "mae")
    folders = tmp_path / "sharded", tmp_path / "whole"
    for folder, shard in zip(folders, (SHARDED, "distributed.shard=false"), strict=True):
        done = run(folder, 2, shard, "steps=8", "evaluations=1", *changes, verb=verb, options=options)
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(folders[0]), losses(folders[1]), rtol=tolerance)
    actual, expected = (load(folder / "best").model.state_dict() for folder in folders)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(straight: Path, interrupted: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(interrupted["sharded"], tmp_path / "run")
    done = run(folder, 2, SHARDED, *CHANGES)
    assert done.returncode == 0, done.stderr
    actual, expected = tensors(folder), tensors(straight)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [("sharded", 1, "distributed.shard=false"), ("sharded", 3, SHARDED), ("whole", 2, SHARDED)],
)
def test_a_state_opens_on_any_number_of_ranks(
    straight: Path, interrupted: dict[str, Path], before: str, ranks: int, after: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(interrupted[before], tmp_path / "run")
    done = run(folder, ranks, after, *CHANGES)
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stderr
    np.testing.assert_allclose(losses(folder), losses(straight), rtol=1e-4)


@pytest.mark.slow
def test_a_corrupt_slice_is_noticed(interrupted: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(interrupted["sharded"], tmp_path / "run")
    file = sorted(newest(folder).glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = run(folder, 2, SHARDED, *CHANGES)
    assert done.returncode == 0, done.stderr
    assert "is corrupt (its checksum does not match), so the previous one is used" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((SHARDED, "precision=fp16"), "has no loss scaling for fp16"),
        (("distributed.shard=sometimes",), "it should be true, false or 'auto'"),
    ],
)
def test_what_cannot_be_sharded(changes: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = run(tmp_path / "run", 2, *changes)
    messages = [line for line in done.stderr.splitlines() if line.startswith("vitrail: ")]
    assert (done.returncode != 0, len(messages)) == (True, 1), done.stderr
    assert words in messages[0]


def test_one_process_has_nothing_to_share(tmp_path: Path) -> None:
    done = run(tmp_path / "run", 1, SHARDED)
    assert done.returncode == 2
    assert "start the command with torchrun" in done.stderr


def test_the_result_does_not_depend_on_sharding() -> None:
    recipes = [read_recipe("scratch-small", [f"distributed.shard={value}"]) for value in ("true", "false", "auto")]
    assert len({recipe.fingerprint() for recipe in recipes}) == 1
    assert len({default_folder(origin_of("digits", None), [recipe]) for recipe in recipes}) == 1


def test_values_of_shard() -> None:
    with pytest.raises(ConfigError, match=r"distributed.shard is 'no': it should be true, false or 'auto'"):
        read_recipe("scratch-small", ["distributed.shard=no"])
