"""Runs with LoRA: what is trained and saved, resuming, the memory forecast, and what is refused."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked_commands
from tests.support.memory_jobs import job
from tests.support.peers import relative_error, scramble
from torch import Tensor

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.lora import has_adapters
from vitrail.models.vit import ViT
from vitrail.tasks.classification import ClassPrediction
from vitrail.training.defaults import resolve_defaults
from vitrail.training.memory import forecast
from vitrail.training.plan import DataFacts
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import read_recipe
from vitrail.training.sweep import sweep
from vitrail.training.train import Run, train

TINY: dict[str, Any] = {"image_size": 8, "patch_size": 4, "width": 24, "depth": 2, "heads": 2, "classes": 2}
CHANGES = ["lora.rank=2", "steps=12", "batch=32", "evaluations=3", "model.mlp_dropout=0.1", "precision=float32"]
ADAPTED = {f"blocks.{block}.attn.qkv.weight" for block in range(2)}
HEAD = {"head.weight", "head.bias"}
ADAMW = {"kind": "adamw"}


def pretrained(**options: Any) -> Bundle:
    model = ViT(ViTConfig(**{"channels": 1, "init": "timm", **TINY, **options}))
    scramble(model)
    half = (0.5,) * model.config.channels
    preprocess = Preprocess(size=model.config.image_size, channels=len(half), mean=half, std=half)
    return Bundle(model, preprocess, ("cat", "dog"))


def run(folder: Path, *changes: str, bundle: Bundle | None = None) -> Run:
    return train(
        "digits", pretrained=bundle or pretrained(), changes=[*CHANGES, *changes], folder=folder, device="cpu",
        workers=0, quiet=True,
    )  # fmt: skip


def state(folder: Path, kind: str = "model") -> dict[str, Tensor]:
    """Return the weights in the newest training state, or their average."""
    newest = sorted((folder / "state").glob("[0-9]*"))[-1]
    tensors = load_file(newest / "state.safetensors")
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}


def whole_state(folder: Path) -> dict[str, Tensor]:
    return load_file(sorted((folder / "state").glob("[0-9]*"))[-1] / "state.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ── what is trained and saved ──


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with torch.random.fork_rng():
        return run(tmp_path_factory.mktemp("runs") / "run")


def test_only_adapters_and_head_are_trained(trained: Run) -> None:
    before = pretrained().model.state_dict()
    for kind in ("model", "average"):
        after = state(trained.folder, kind)
        adapters = {name for name in after if "lora_" in name}
        assert after.keys() == before.keys() | adapters
        assert len(adapters) == 4
        assert {name for name in before if not torch.equal(after[name], before[name])} == HEAD
        assert all(after[name].any() for name in adapters)
    optimizer = {name.rpartition("/")[0].removeprefix("optimizer/") for name in whole_state(trained.folder)}
    assert {name for name in optimizer if name.startswith(("blocks", "head", "patch"))} == adapters | HEAD


@pytest.mark.parametrize("place", ["best", "last"])
def test_the_saved_model_is_a_plain_one(place: str, trained: Run) -> None:
    bundle, before = vitrail.load(trained.folder / place), pretrained().model.state_dict()
    after = bundle.model.state_dict()
    assert not has_adapters(bundle.model)
    assert after.keys() == before.keys()
    assert {name for name in before if not torch.equal(after[name], before[name])} == ADAPTED | HEAD
    assert bundle.provenance["lora"] == {"rank": 2, "alpha": 4.0, "on": ["qkv"]}
    assert not has_adapters(trained.bundle.model)


def test_the_best_model_scores_as_its_validation_did(trained: Run) -> None:
    """Validation evaluates the adapted model; best/ holds the merged one."""
    rows = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    (best,) = [row for row in rows if "val_loss" in row and row["step"] == rows[-1]["best"]]
    metrics = vitrail.evaluate(trained.folder / "best", "digits", split="val", workers=0, device="cpu")
    assert metrics.as_dict()["loss"] == pytest.approx(best["val_loss"], abs=1e-5)


def test_every_command_takes_the_saved_model(trained: Run, tmp_path: Path) -> None:
    image = np.zeros((8, 8), np.uint8)
    (row,) = vitrail.predict(trained.folder / "best", [image], workers=0, device="cpu")
    assert isinstance(row, ClassPrediction)
    assert row.fields()["classes"][0] in "0123456789"
    vitrail.convert(trained.folder / "best", tmp_path / "timm", to="timm")
    x = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        actual = vitrail.load(tmp_path / "timm").model.eval()(x)
        assert relative_error(actual, trained.bundle.model.cpu().eval()(x)) <= 1e-5


def test_training_further_without_lora_drops_its_record(trained: Run, tmp_path: Path) -> None:
    further = run(tmp_path / "run", "lora.rank=0", "steps=1", bundle=vitrail.load(trained.folder / "best"))
    assert "lora" not in further.bundle.provenance
    assert read_recipe(trained.folder / "recipe.toml").lora.rank == 2


def test_frozen_batchnorm_keeps_its_statistics(tmp_path: Path) -> None:
    bundle = pretrained(stem="conv_stem")
    before = copy.deepcopy(bundle.model.state_dict())
    after = run(tmp_path / "run", "steps=2", bundle=bundle).bundle.model.state_dict()
    names = [name for name in before if "running" in name]
    assert names
    assert all(torch.equal(after[name], before[name]) for name in names)


def test_a_lost_best_model_is_restored_from_the_training_state(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "evaluations=1")
    expected = load_file(tmp_path / "run" / "best" / "model.safetensors")
    (tmp_path / "run" / "best" / "model.safetensors").unlink()
    run(tmp_path / "run", "evaluations=1")
    assert done.bundle.provenance["trained"]["step"] == 12
    assert same(load_file(tmp_path / "run" / "best" / "model.safetensors"), expected)


def test_the_bundled_recipe_trains(tmp_path: Path) -> None:
    done = train(
        "digits", recipe="lora", pretrained=pretrained(), changes=["steps=2", "batch=32", "evaluations=1"],
        folder=tmp_path / "run", device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    assert done.bundle.provenance["lora"] == {"rank": 8, "alpha": 16.0, "on": ["qkv"]}


@pytest.mark.slow
def test_lora_learns_a_new_dataset(tmp_path: Path) -> None:
    """Even on random frozen weights, adapters learn what the head alone cannot."""
    accuracies = []
    for name, settings in {"lora": ["lora.rank=4"], "head": ["lora.rank=0", 'freeze=["*","!head*"]']}.items():
        changes = [*settings, "steps=60", "optimizer.lr=0.01", "evaluations=1", 'lora.on=["qkv","fc1","fc2"]']
        done = run(tmp_path / name, *changes, "batch=64")
        accuracies.append(float(done.metrics.as_dict()["top1"]))
    assert accuracies[0] > accuracies[1] + 0.1


# ── stopping and resuming ──


def saved_steps(folder: Path) -> int:
    return max((int(path.name) for path in (folder / "state").glob("[0-9]*")), default=0)


def command(folder: Path, start: Path, *changes: str) -> list[str]:
    settings = (*CHANGES, "steps=24", "evaluations=2", "gradient_checkpointing=true", *changes)
    words = [word for change in settings for word in ("--set", change)]
    return ["train", "digits", "--from", str(start), "--run", str(folder), "--device", "cpu", "--workers", "0", *words]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was never stopped; the model it started from is next to it."""
    folder = tmp_path_factory.mktemp("straight")
    start = pretrained().save(folder / "start")
    done = forked_commands.run(*command(folder / "run", start), timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_resumed_run_is_bit_identical(how: signal.Signals, straight: Path, tmp_path: Path) -> None:
    words = command(tmp_path / "run", straight.parent / "start", "save_minutes=0")
    process = forked_commands.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while saved_steps(tmp_path / "run") < 3:
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(how)
    process.wait()
    assert 3 <= saved_steps(tmp_path / "run") < 24
    resumed = forked_commands.run(*words, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step" in resumed.stderr
    assert same(whole_state(tmp_path / "run"), whole_state(straight))
    for place in ("best", "last"):
        weights = load_file(tmp_path / "run" / place / "model.safetensors")
        assert same(weights, load_file(straight / place / "model.safetensors"))


@pytest.mark.slow
def test_the_same_seed_trains_the_same(trained: Run, tmp_path: Path) -> None:
    torch.manual_seed(99)
    run(tmp_path / "again")
    assert same(whole_state(tmp_path / "again"), whole_state(trained.folder))
    run(tmp_path / "other", "seed=1")
    name = "blocks.0.attn.qkv.lora_A"
    assert not torch.equal(state(tmp_path / "other")[name], state(trained.folder)[name])


@pytest.mark.slow
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    start = pretrained().save(tmp_path / "start")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "vitrail"]
    for name, program in {"one": ["-m", "vitrail"], "two": torchrun}.items():
        # Every rank draws its own dropout.
        words = command(tmp_path / name, start, "model.mlp_dropout=0.0", "precision=float32")
        done = subprocess.run(
            [sys.executable, *program, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
    one, two = (state(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=0)
    weights = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys() == pretrained().model.state_dict().keys()


# ── memory ──


def test_frozen_weights_need_no_gradients_and_no_optimizer_state() -> None:
    whole, lora = forecast(job(optimizer=ADAMW)), forecast(job(optimizer=ADAMW, lora={"rank": 4}))
    adapters = 4 * 2 * 3 * 4 * (64 + 64)  # bytes, blocks, q k v, rank, in and out
    head = 4 * 10 * (64 + 1)
    assert lora.gradients == adapters + head
    assert lora.optimizer == 2 * lora.gradients
    assert lora.weights == whole.weights + adapters
    assert lora.total < whole.total


def test_adapting_more_matrices_keeps_more_activations() -> None:
    """The input of a frozen matrix is needed only for the gradient of its adapter."""
    few, many = (forecast(job(optimizer=ADAMW, lora={"rank": 4, "on": on})) for on in (("qkv",), ("qkv", "fc2")))
    assert few.in_flight < many.in_flight


def test_the_learning_rate_is_chosen_for_adapters() -> None:
    facts = DataFacts(3_000, ("a", "b"), 224, grey=False)
    wide = pretrained(width=320, heads=4, channels=3)
    rates = {
        rank: resolve_defaults(read_recipe("finetune", [f"lora.rank={rank}"]), facts, wide).peak_lr for rank in (0, 8)
    }
    assert rates == {0: 1e-4, 8: 1e-3}


# ── what is refused ──


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["lora.rank=25"], "lora.rank is 25, but the matrices of qkv are 24×24; use a rank of at most 24"),
        (["lora.rank=-1"], "lora.rank is -1: input should be greater than or equal to 0"),
        (["lora.on=['qkw']"], "lora.on.0 is 'qkw', which is not one of 'qkv', 'proj', 'fc1' or 'fc2'; did you mean"),
        (["lora.on=[]"], "lora.on is empty, so nothing would be adapted; name at least one of qkv, proj, fc1, fc2"),
        (["lora.alpha=0"], "lora.alpha is 0: input should be greater than 0"),
        (["lora.ranks=2"], "Recipe has no option 'lora.ranks'; did you mean 'rank'?"),
        (
            ["freeze=['blocks.0.*']"],
            "lora.rank is 2 and freeze is ['blocks.0.*'], but LoRA already freezes everything except its adapters and "
            "the head; leave one of them out",
        ),
        (["optimizer.kind=muon"], "but Muon trains the matrices that LoRA freezes; set optimizer.kind=adamw"),
    ],
)
def test_refused_settings(changes: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        run(tmp_path / "run", *changes)
    assert not (tmp_path / "run").exists()


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    bundle = pretrained(
        stem="resnet", resnet={"depths": (1, 1), "width_factor": 0.5, "root_stride": 1}, patch_size=2, depth=0,
        width=256, class_token="none", position="none", pool="mean", final_norm="none",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="LoRA adapts the matrices of encoder blocks, but this model has none"):
        run(tmp_path / "run", bundle=bundle)


def test_lora_needs_a_pretrained_model(tmp_path: Path) -> None:
    words = "lora.rank is 2, but LoRA freezes the weights, and without --from they are random; pass a pretrained model"
    with pytest.raises(ConfigError, match=re.escape(words)):
        train("digits", changes=["lora.rank=2"], folder=tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(ConfigError, match=re.escape(words)):
        sweep("digits", over={"lora.rank": [0, 2]}, folder=tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_rank_can_be_swept(tmp_path: Path) -> None:
    """Rank 0 is full fine-tuning, so a sweep can compare both."""
    found = sweep(
        "digits", over={"lora.rank": [0, 2]}, changes=["steps=2", "batch=32", "evaluations=1"],
        folder=tmp_path / "sweep", pretrained=pretrained(), device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    assert [run.values for run in found.runs] == [{"lora.rank": 0}, {"lora.rank": 2}]


def test_a_rank_that_does_not_fit_is_refused_before_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.rank is 99"):
        sweep(
            "digits", over={"lora.rank": [2, 99]}, folder=tmp_path / "sweep", pretrained=pretrained(), device="cpu",
            quiet=True,
        )  # fmt: skip


def test_what_is_frozen() -> None:
    assert Recipe(freeze=("blocks.*",)).frozen == ("blocks.*",)
    assert Recipe.model_validate({"lora": {"rank": 2}}).frozen == ("*", "!*.lora_[AB]", "!head*")


def test_one_matrix_needs_no_list() -> None:
    assert read_recipe("lora", ["lora.on=fc1"]).lora.on == ("fc1",)
    assert read_recipe("lora", ['lora.on=["qkv", "proj"]']).lora.on == ("qkv", "proj")
    assert read_recipe("finetune", ["freeze=blocks.*"]).freeze == ("blocks.*",)
    with pytest.raises(ConfigError, match=r"lora\.on.* is 'qk'.*'qkv'"):
        read_recipe("lora", ["lora.on=qk"])
