"""Pretraining runs: data with and without labels, exact resume, ranks, and what the bundle can be used for."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from tests.support import forked_commands
from tests.support.commands import run_command

import vitrail
from vitrail.data.sources.opening import open_unlabelled
from vitrail.errors import ConfigError, DataError, Diverged
from vitrail.metrics.neighbours import leave_one_out
from vitrail.training.plan import DataFacts
from vitrail.training.pretraining.defaults import resolve_pretraining
from vitrail.training.pretraining.dino_learner import SelfDistillation
from vitrail.training.pretraining.draws import uniform
from vitrail.training.pretraining.learner import Pretraining
from vitrail.training.recipe_files import default_recipe, read_recipe, recipe_for

METHODS = ("mae", "masked-patches", "dino")
SMALL = ("compile=false", "steps=12", "batch=32", "evaluations=2", "model.width=32", "model.depth=2", "model.heads=2",
         "data.val=0.1", "precision=float32")  # fmt: skip
CPU = torch.device("cpu")


def pretrained(folder: Path, method: str = "mae", *changes: str, data: Any = "digits") -> vitrail.Run:
    return vitrail.pretrain(
        data, method=method, changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0, quiet=True
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "state").glob("[0-9]*")) / "state.safetensors")


@pytest.fixture(scope="module", params=METHODS)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, vitrail.Run]:
    return request.param, pretrained(tmp_path_factory.mktemp("pretrained") / "run", request.param)


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder of images without classes."""
    rng, folder = np.random.default_rng(0), tmp_path / "flat"
    folder.mkdir()
    for number in range(24):
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(folder / f"{number}.png")
    return folder


def test_the_loss_falls_and_the_features_are_watched(straight: tuple[str, vitrail.Run]) -> None:
    method, run = straight
    losses = [row["loss"] for row in rows(run.folder) if "loss" in row]
    assert len(losses) == 12
    assert np.isfinite(losses).all()
    if method != "dino":  # its targets change in the first steps; test_dino_learner.py trains longer
        assert losses[-1] < losses[0]
    checks = [row for row in rows(run.folder) if "val_loss" in row]
    assert [row["best"] for row in checks] == [6, 12]  # the last one is kept, whatever its loss
    assert checks[-1].keys() >= {"val_knn", "val_rank", "val_spread"}
    result = json.loads((run.folder / "result.json").read_text())
    assert result["task"] == "pretraining"
    assert result["loss"] == pytest.approx(checks[-1]["val_loss"])
    assert result["knn"] == checks[-1]["val_knn"]
    assert "kNN accuracy" in run.summary


def test_the_bundle_is_the_encoder_alone(straight: tuple[str, vitrail.Run]) -> None:
    method, run = straight
    bundle = vitrail.load(run.folder / "best")
    assert bundle.model.config.classes == 0
    assert set(bundle.model.state_dict()) == set(vitrail.ViT(bundle.model.config).state_dict())
    kept = "teacher" if method == "dino" else "encoder"
    inside = {name.removeprefix(f"model/{kept}."): tensor for name, tensor in state(run.folder).items()}
    assert all(torch.equal(tensor, inside[name]) for name, tensor in bundle.model.state_dict().items())


def test_the_bundle_is_used_by_other_commands(straight: tuple[str, vitrail.Run], tmp_path: Path) -> None:
    method, run = straight
    best = run.folder / "best"
    changes = ["steps=3", "batch=32", "evaluations=1"]
    tuned = vitrail.train(
        "digits", pretrained=best, changes=changes, folder=tmp_path / "tuned", device="cpu", workers=0, quiet=True
    )
    assert tuned.bundle.model.config.classes == 10
    if method == "mae":
        vitrail.convert(best, tmp_path / "timm", to="timm")
        assert vitrail.load(tmp_path / "timm").model.config.width == 32
        assert vitrail.embed(best, "digits", device="cpu", workers=0).features.shape == (1797, 32)


def test_resumed_exactly(straight: tuple[str, vitrail.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, run = straight
    learner = SelfDistillation if method == "dino" else Pretraining
    made, taken = learner.loss, []

    def stopping(self: Pretraining, *arguments: Any) -> Any:
        taken.append(1)
        if len(taken) == 9:
            raise KeyboardInterrupt
        return made(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(learner, "loss", stopping)
        with pytest.raises(KeyboardInterrupt):
            pretrained(tmp_path / "run", method)
    pretrained(tmp_path / "run", method)  # from step 6, the last validation
    actual, expected = state(tmp_path / "run"), state(run.folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    images = [
        {path.name: path.read_bytes() for path in (one / "previews").iterdir()}
        for one in (tmp_path / "run", run.folder)
    ]
    assert images[0] == images[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed(method: str, tmp_path: Path) -> None:
    """SIGKILL at any moment, also while a state is saved, leaves no trace."""
    changes = ("steps=40", "save_minutes=0")
    words = [word for change in (*SMALL, *changes) for word in ("--set", change)]

    def command(folder: Path) -> list[str]:
        return ["pretrain", "digits", "--method", method, "--run", str(folder), "--device", "cpu", "--workers", "0",
                *words]  # fmt: skip

    def start(folder: Path) -> forked_commands.Process:
        return forked_commands.start(*command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "straight").wait() == 0
    folder = tmp_path / "run"
    for seen in (5, 15, 25):
        process = start(folder)
        while process.poll() is None and max((int(p.name) for p in folder.glob("state/[0-9]*")), default=0) < seen:
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert start(folder).wait() == 0
    actual, expected = state(folder), state(tmp_path / "straight")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_pretrain_like_one(method: str, tmp_path: Path) -> None:
    losses = []
    for processes in (1, 2):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes == 2 else []
        rest = ["--"] if processes == 2 else []
        words = [word for change in SMALL for word in ("--set", change)]
        folder = tmp_path / str(processes)
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", *rest, "vitrail", "pretrain", "digits", "--method", method, "--run",
             str(folder), "--device", "cpu", "--workers", "0", *words],
            capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in rows(folder) if "loss" in row])
        checks = [row["val_loss"] for row in rows(folder) if "val_loss" in row]
        losses[-1] += checks
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_rank_without_validation_images(flat: Path, tmp_path: Path) -> None:
    words = [word for change in (*SMALL, "batch=8", "steps=2", "data.val=0.05") for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "vitrail",
         "pretrain", str(flat), "--run", str(tmp_path / "run"), "--device", "cpu", "--workers", "0", *words],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on 1 held-out image" in done.stdout


def test_validation_images_that_cannot_be_read(flat: Path, tmp_path: Path) -> None:
    held_out = open_unlabelled(flat, val=0.05).val
    assert held_out is not None
    assert len(held_out) == 1
    (flat / held_out.name(0)).write_bytes(b"not an image")
    with pytest.raises(DataError, match="none of the validation images can be read; run vitrail check"):
        pretrained(tmp_path / "run", "mae", "batch=8", "steps=1", "data.val=0.05", data=flat)


def labelled_images(folder: Path, images: int) -> Path:
    """Write a folder of images in two classes."""
    rng = np.random.default_rng(0)
    for number in range(images):
        file = folder / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(file)
    return folder


def test_one_labelled_image_to_validate_on(tmp_path: Path) -> None:
    """A class cannot be predicted from neighbours if there are none."""
    data = labelled_images(tmp_path / "data", 20)
    run = pretrained(tmp_path / "run", "mae", "batch=8", "steps=2", "data.val=0.05", data=data)
    assert run.summary.startswith("loss ")
    assert "on 1 held-out image" in run.summary


def test_one_labelled_image_that_can_be_read(tmp_path: Path) -> None:
    data = labelled_images(tmp_path / "data", 20)
    held_out = open_unlabelled(data, val=0.1).val
    assert held_out is not None
    assert len(held_out) == 2
    Path(held_out.name(1)).write_bytes(b"not an image")
    run = pretrained(tmp_path / "run", "mae", "batch=8", "steps=2", data=data)
    assert run.metrics.details["knn"] is None
    assert run.summary.startswith("loss ")
    assert run.report is not None


def test_the_column_of_the_classes_may_have_any_name(tmp_path: Path) -> None:
    data = labelled_images(tmp_path / "data", 40)
    files = sorted(data.rglob("*.png"))
    lines = [f"{file},{file.parent.name},x" for file in files]
    (tmp_path / "list.csv").write_text("\n".join(["path,species,label", *lines]))
    run = pretrained(tmp_path / "run", "mae", "batch=8", "steps=2", "data.labels=species", data=tmp_path / "list.csv")
    assert run.metrics.details["knn"] is not None
    assert "data of the run cannot be opened" not in (run.folder / "report.html").read_text()
    frame = pd.DataFrame({"path": list(map(str, files)), "species": [file.parent.name for file in files], "label": "x"})
    same = pretrained(tmp_path / "frame", "mae", "batch=8", "steps=2", "data.labels=species", data=frame)
    assert same.metrics.details["knn"] == run.metrics.details["knn"]


@pytest.mark.slow
def test_gradient_accumulation_changes_nothing(straight: tuple[str, vitrail.Run], tmp_path: Path) -> None:
    method, run = straight
    pretrained(tmp_path / "run", method, "gradient_accumulation=2")
    one, two = ([row["loss"] for row in rows(place) if "loss" in row] for place in (run.folder, tmp_path / "run"))
    np.testing.assert_allclose(one, two, atol=1e-4, rtol=0)


def test_a_flat_folder(flat: Path, tmp_path: Path) -> None:
    run = pretrained(tmp_path / "run", "mae", "batch=8", data=flat)
    assert "val_knn" not in rows(run.folder)[-1]
    assert run.summary.startswith("loss ")


def test_only_the_training_split_is_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 6), ("test", 6)):
        for number in range(count):
            file = tmp_path / split / ("cat", "dog")[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(file)
    splits = open_unlabelled(tmp_path, val=0.2)
    names = {source.name(index) for source in (splits.train, splits.val) if source for index in range(len(source))}
    assert len(names) == 20
    assert all(f"{os.sep}train{os.sep}" in name for name in names)
    assert splits.test is None
    assert splits.train.classes == ("cat", "dog")


@pytest.mark.parametrize("labelled", [True, False])
def test_only_the_training_split_of_data_in_memory_is_used(labelled: bool) -> None:
    pixels, labels = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2
    pixels[:, 0, 0] = np.arange(20)
    train, test = ((pixels[some], labels[some]) if labelled else pixels[some] for some in (slice(12), slice(12, 20)))
    splits = open_unlabelled({"train": train, "test": test}, val=0.25)
    seen = [
        int(np.asarray(source.read(index)).flat[0]) for source in splits[:2] if source for index in range(len(source))
    ]
    assert sorted(seen) == list(range(12))
    assert splits.test is None


@pytest.mark.parametrize("method", ["mae", "masked-patches"])
def test_a_model_that_does_not_pool_is_refused_before_it_is_trained(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"but model\.pool is 'none'; use model\.pool=mean, cls or map"):
        pretrained(tmp_path / "run", method, "model.pool=none")
    assert not (tmp_path / "run").exists()


# ── draws ──


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**62), st.integers(0, 2**40), st.integers(1, 40), st.integers(1, 300))
def test_draws_depend_on_seed_and_position_only(seed: int, first: int, images: int, count: int) -> None:
    drawn = uniform(seed, "masks", first, images, count, CPU)
    assert drawn.shape == (images, count)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    one = uniform(seed, "masks", first + images - 1, 1, count, CPU)
    assert torch.equal(drawn[-1:], one)


def test_draws_are_uniform_and_independent() -> None:
    drawn = uniform(0, "masks", 0, 5000, 64, CPU).double()
    assert abs(float(drawn.mean()) - 0.5) < 0.002
    counts = torch.histc(drawn, 20, 0, 1)
    expected = drawn.numel() / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 50  # chi-squared with 19 degrees of freedom
    correlation = torch.corrcoef(drawn.T).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5 / 5000**0.5
    neighbours = torch.corrcoef(torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()]))
    assert abs(float(neighbours[0, 1])) < 0.01
    assert not torch.equal(drawn, uniform(1, "masks", 0, 5000, 64, CPU).double())
    assert not torch.equal(drawn, uniform(0, "other", 0, 5000, 64, CPU).double())


def test_leave_one_out() -> None:
    features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [1.0, 0.05]])
    assert leave_one_out(features, torch.tensor([0, 0, 1, 1, 0]), 2, k=1) == 1.0
    assert leave_one_out(features, torch.tensor([0, 1, 0, 1, 2]), 3, k=1) == 0.0  # nobody votes for itself


# ── errors ──


def test_collapsed_features_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vitrail.training.pretraining.learner.feature_diversity",
        lambda _: type("Same", (), {"rank": 1.0, "spread": 0.0}),
    )
    with pytest.raises(Diverged, match=r"the features have collapsed after step 6: .* smaller optimizer\.lr"):
        pretrained(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--method", "maee"],
            "method is 'maee'; choose mae or masked-patches or dino or distill; did you mean 'mae'?",
        ),
        (["--recipe", "cifar10"], "the recipe learns from labels; use vitrail train"),
        (["--method", "dino", "--recipe", "distill"], "the method is dino, but the recipe's is distill; leave out"),
        (["--set", "data.fraction=0.1"], "uses all images of the training split; leave out data.fraction=0.1"),
        (["--set", "model.stem=conv_stem"], "mixes the pixels of neighbouring patches"),
        (["--set", "model.patch_size=8"], "patch"),
        (["--set", "mae.mask_ratio=1"], "mask_ratio"),
        (["--set", "mixing.mixup=0.2"], "pretraining does not mix images; leave out mixing"),
        (
            ["--method", "dino", "--set", "model.patch_size=4", "--set", "dino.local_crops=2"],
            "make local views of 1×1 patches, but DINO needs 2×2",
        ),
        (
            ["--method", "dino", "--set", "dino.local_size=3", "--set", "dino.local_crops=2"],
            "which patches of 2×2 do not fill",
        ),
        (["--method", "dino", "--set", "model.pool=none"], "pretraining measures one vector per image"),
        (["--method", "dino", "--set", "augmentation.flip=0.5"], "DINO makes its own views; leave out augmentation"),
        (["--method", "dino", "--set", "averaging.kind=ema"], "which is an average already"),
        (["--method", "dino", "--set", "dino.prototypes=1"], "use 2 or more"),
        (["--set", "model.classes=3"], "pretraining learns without classes"),
        (["--method", "mae", "--recipe", "dino"], "the method is mae, but the recipe's is dino; leave out one of them"),
        (["--set", "task=regression"], "without labels, which task is about; leave it out"),
        (["--set", "data.balance=true"], "without labels, which data.balance is about; leave it out"),
        (["--set", "objective.label_smoothing=0.1"], "without labels, which objective is about; leave it out"),
        (["--set", "criterion=accuracy"], "criterion is 'accuracy', but pretraining keeps the last checkpoint"),
        (["--set", "lora.rank=4"], "lora.rank is 4, but pretraining trains all weights; set lora.rank=0"),
        (["--set", "masked_patches.mask_ratio=0.5"], "tables of several methods, mae and masked_patches; keep one"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "run"
    done = run_command(monkeypatch, capsys, "pretrain", "digits", "--run", place, "--device", "cpu", *words)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_recipe_needs_no_method() -> None:
    assert recipe_for("auto", "dino", ()).method == "dino"
    assert recipe_for("auto", default_recipe(None, "auto"), ()).method == "mae"
    assert recipe_for("masked-patches", "masked-patches", ()).method == "masked_patches"


@pytest.mark.parametrize(("method", "recipe"), [("mae", "dino"), ("dino", "mae")])
def test_a_recipe_of_another_method_is_refused(method: str, recipe: str) -> None:
    with pytest.raises(ConfigError, match=f"the method is {method}, but the recipe's is {recipe}; leave out one"):
        recipe_for(method, recipe, ())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", ["width=64", "width=256", "width=320", "patch_size=6", "patch_size=[6, 4]"])
def test_a_changed_width_or_patch_size_needs_no_other_change(method: str, change: str, device: str) -> None:
    facts = DataFacts(1000, ("image",), 64, grey=False, device=device)
    model = resolve_pretraining(read_recipe(method, [f"model.{change}"]), facts, None).model
    assert model.width % model.heads == 0
    assert all(side % patch == 0 for side, patch in zip(model.image_size, model.patch_size, strict=True))


@pytest.mark.parametrize(
    ("width", "decoder", "reason"),
    [
        (32, 32, "one head of 32"),
        (96, 32, "at most half of the encoder's 96, in heads of 32"),
        (384, 192, "at most half of the encoder's 384, in heads of 32"),
    ],
)
def test_the_decoder_of_a_small_encoder(width: int, decoder: int, reason: str) -> None:
    recipe = read_recipe("mae", [f"model.width={width}", "model.heads=1"])
    plan = resolve_pretraining(recipe, DataFacts(1_000, (), 64, grey=False, device="cpu"), None)
    assert plan.recipe.mae is not None
    assert plan.recipe.mae.decoder_width == decoder
    chosen = next(one for one in plan.defaults if one.field == "mae.decoder_width")
    assert (chosen.value, chosen.reason) == (decoder, reason)


def test_positions_of_a_masked_autoencoder_are_the_papers() -> None:
    facts = DataFacts(1_000, (), 64, grey=False, device="cpu")
    for changes, position in (
        ([], "sincos_2d"),
        (["model.name=S/16"], "sincos_2d"),
        (["model.name=S/16", "model.position=learned_1d"], "learned_1d"),
    ):
        plan = resolve_pretraining(read_recipe("mae", changes), facts, None)
        assert plan.model.position == position
        shown = "model.position" in {one.field for one in plan.defaults}
        assert shown == (position == "sincos_2d")
    assert resolve_pretraining(read_recipe("dino", ["model.name=S/16"]), facts, None).model.position == "learned_1d"


def test_train_refuses_a_pretraining_recipe() -> None:
    with pytest.raises(ConfigError, match="the recipe pretrains without labels \\(mae\\); use vitrail pretrain"):
        vitrail.train("digits", recipe="mae")


def test_one_image_is_too_few(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "one.png")
    with pytest.raises(DataError, match="has 1 image; pretraining needs at least two"):
        open_unlabelled(tmp_path)
