"""Feature distillation: targets, loss, every kind of teacher, exact resume, and what is refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.support import forked_commands, tiny_models
from tests.support.commands import run_command
from tests.support.memory_jobs import job
from torch import Tensor

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Batch
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.memory import forecast
from vitrail.training.pretraining.distill import (
    DistillSettings,
    FeatureStudent,
    FeatureTeacher,
    PairedFeatures,
    check_distill,
    distillation_loss,
    feature_loss,
    resampled,
)
from vitrail.training.pretraining.feature_learner import FeatureDistillation
from vitrail.training.teacher import Teacher

SMALL = ("compile=false", "steps=12", "batch=32", "evaluations=2", "model.width=32", "model.depth=2", "model.heads=2",
         "data.val=0.1", "precision=float32")  # fmt: skip
CPU = torch.device("cpu")
STUDENT = ViTConfig(
    image_size=8, patch_size=2, channels=1, width=16, depth=1, heads=2, classes=0, class_token="none", pool="mean",
    final_norm="after_pool",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved teacher: of colour images, with another grid and width than the student."""
    return tiny_models.bundle().save(tmp_path_factory.mktemp("teacher") / "bundle")


def pretrained(teacher: Any, folder: Path, *changes: str) -> vitrail.Run:
    return vitrail.pretrain(
        "digits", method="distill", teacher=teacher, changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0,
        quiet=True,
    )  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(max((folder / "state").glob("[0-9]*")) / "state.safetensors")


def batch(channels: int = 1) -> Batch:
    pixels = torch.randint(0, 256, (3, channels, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Batch(pixels, torch.zeros(3), torch.arange(3), torch.ones(3), torch.zeros(3, 4))


# ── targets and loss ──


def test_the_loss_in_float64() -> None:
    mapped, target = torch.randn(3, 5, 7, dtype=torch.float64), 4 + 3 * torch.randn(3, 5, 7, dtype=torch.float64)
    expected = []
    for own, row in zip(mapped.flatten(0, 1).tolist(), target.flatten(0, 1).tolist(), strict=True):
        mean, variance = np.mean(row), np.var(row)
        for a, b in zip(own, (np.array(row) - mean) / np.sqrt(variance + 1e-5), strict=True):
            error = abs(a - b)
            expected.append(error**2 / 4 if error < 2 else error - 1)
    assert float(feature_loss(mapped, target)) == pytest.approx(np.mean(expected), rel=1e-12)
    assert float(feature_loss(mapped.float(), target.float())) == pytest.approx(np.mean(expected), rel=1e-5)
    # The scale of a teacher's features does not matter.
    assert float(feature_loss(mapped, 1000 * target - 3)) == pytest.approx(np.mean(expected), rel=1e-4)


def test_the_weights_of_the_losses() -> None:
    mapped, target = torch.randn(2, 4), torch.randn(2, 4)
    tokens, others = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    both = distillation_loss((mapped, tokens), PairedFeatures(target, others), DistillSettings(patch_weight=0.25))
    assert torch.allclose(both, feature_loss(mapped, target) + 0.25 * feature_loss(tokens, others))
    one = distillation_loss((None, tokens), PairedFeatures(target, others), DistillSettings(pooled_weight=0))
    assert torch.allclose(one, feature_loss(tokens, others))


def test_grids_are_resampled() -> None:
    columns = torch.arange(4.0).expand(1, 4, 4).reshape(1, 16, 1)
    assert torch.equal(resampled(columns, (4, 4), (4, 4)), columns)
    halved = resampled(columns, (4, 4), (2, 2)).reshape(2, 2)
    assert torch.allclose(halved[0], halved[1])
    assert torch.allclose(halved.sum(dim=1), torch.tensor(3.0))  # symmetric about the centre
    doubled = resampled(columns, (4, 4), (4, 8)).reshape(4, 8)
    expected = F.interpolate(columns.reshape(1, 1, 4, 4), (4, 8), mode="bilinear")[0, 0]
    assert torch.allclose(doubled, expected)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_every_kind_of_teacher(kind: str) -> None:
    bundle = tiny_models.bundle(kind)
    teacher, settings = Teacher(bundle, kind), DistillSettings(pooled_weight=int(bundle.model.config.has_pool))
    check_distill(STUDENT, settings, teacher)
    student = FeatureStudent(ViT(STUDENT), settings, bundle.model.config)
    target = FeatureTeacher(teacher, STUDENT.grid, CPU, "float32")(batch())
    assert target.patches.shape == (3, 16, bundle.model.config.width)
    mapped = student(torch.randn(3, 1, 8, 8))
    loss = distillation_loss(mapped, target, settings)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in bundle.model.parameters())


def test_the_teacher_has_its_own_preprocessing() -> None:
    """Its features are those that `vitrail.load` and `features` give for the resized image."""
    bundle = tiny_models.bundle()
    pixels = F.interpolate(batch(3).pixels.float(), (16, 32), mode="bilinear")
    with torch.no_grad():
        expected = bundle.model.eval().features(bundle.preprocess.normalise(pixels))
    target = FeatureTeacher(Teacher(bundle, "teacher"), bundle.model.config.grid, CPU, "float32")(batch(3))
    assert torch.allclose(target.pooled, expected.pooled, atol=1e-5)
    assert torch.allclose(target.patches, expected.tokens[:, 1:], atol=1e-5)


# ── runs ──


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> vitrail.Run:
    return pretrained(folder, tmp_path_factory.mktemp("run") / "run")


def test_the_loss_falls_and_the_bundle_is_the_encoder_alone(straight: vitrail.Run, folder: Path) -> None:
    losses = [row["loss"] for row in rows(straight.folder) if "loss" in row]
    assert losses[-1] < losses[0]
    checks = [row for row in rows(straight.folder) if "val_loss" in row]
    assert checks[-1].keys() >= {"val_knn", "val_rank", "val_spread"}
    bundle = vitrail.load(straight.folder / "best")
    assert bundle.model.config.classes == 0
    assert set(bundle.model.state_dict()) == set(ViT(bundle.model.config).state_dict())
    assert bundle.provenance["teacher"]["name"] == str(folder)
    others = {name for name in state(straight.folder) if name.startswith("model/") and "/encoder." not in name}
    assert others == {f"model/{map}.{kind}" for map in ("to_pooled", "to_patches") for kind in ("weight", "bias")}


def test_resumed_exactly(straight: vitrail.Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, taken = FeatureDistillation.inputs, []

    def stopping(self: FeatureDistillation, *arguments: Any) -> Any:
        taken.append(1)
        if len(taken) == 9:
            raise KeyboardInterrupt
        return made(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureDistillation, "inputs", stopping)
        with pytest.raises(KeyboardInterrupt):
            pretrained(folder, tmp_path / "run")
    pretrained(folder, tmp_path / "run")
    actual, expected = state(tmp_path / "run"), state(straight.folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.slow
def test_gradient_accumulation_changes_nothing(straight: vitrail.Run, folder: Path, tmp_path: Path) -> None:
    pretrained(folder, tmp_path / "run", "gradient_accumulation=2")
    one, two = ([row["loss"] for row in rows(place) if "loss" in row] for place in (straight.folder, tmp_path / "run"))
    np.testing.assert_allclose(one, two, atol=1e-4, rtol=0)


def test_another_teacher_is_refused(straight: vitrail.Run) -> None:
    with pytest.raises(ConfigError, match="was trained with another teacher; choose another --run"):
        pretrained(tiny_models.bundle("rope"), straight.folder)


def test_the_forecast_counts_the_teacher(straight: vitrail.Run) -> None:
    made, teacher = job(batch=2), Teacher(tiny_models.bundle(), "teacher")
    without = forecast(made)
    taught = forecast(made._replace(plan=made.plan._replace(teacher=teacher)))
    numbers = sum(parameter.numel() for parameter in teacher.bundle.model.parameters())
    assert taught.total - without.total == taught.teacher == 4 * numbers
    assert "memory: about" in (straight.folder / "log.txt").read_text()


def words(folder: Path, run: Path, *changes: str) -> list[str]:
    settings = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    return ["pretrain", "digits", "--method", "distill", "--teacher", str(folder), "--run", str(run), "--device", "cpu",
            "--workers", "0", *settings]  # fmt: skip


@pytest.mark.slow
def test_killed_and_resumed(folder: Path, tmp_path: Path) -> None:
    """SIGKILL at any moment, also while a state is saved, leaves no trace."""

    def start(run: Path) -> forked_commands.Process:
        command = words(folder, run, "steps=40", "save_minutes=0")
        return forked_commands.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "straight").wait() == 0
    run = tmp_path / "run"
    for seen in (5, 15, 25):
        process = start(run)
        while process.poll() is None and max((int(p.name) for p in run.glob("state/[0-9]*")), default=0) < seen:
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert start(run).wait() == 0
    actual, expected = state(run), state(tmp_path / "straight")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.slow
def test_two_ranks_pretrain_like_one(folder: Path, tmp_path: Path) -> None:
    runs = []
    for processes in (1, 2):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes == 2 else []
        rest, run = ["--"] if processes == 2 else [], tmp_path / str(processes)
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", *rest, "vitrail", *words(folder, run, "precision=float32")],
            capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append([row[key] for key in ("loss", "val_loss") for row in rows(run) if key in row])
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_student_learns_the_features_of_a_trained_teacher(tmp_path: Path) -> None:
    """Without labels, the nearest neighbours of the student's features vote for the right digit."""
    teacher = vitrail.train("digits", changes=["epochs=10"], folder=tmp_path / "teacher", device="cpu", quiet=True)
    # A higher learning rate than the default, for a run this short; after one step the accuracy is 0.21.
    changes = ["epochs=20", "optimizer.lr=2e-3", "compile=false", "evaluations=1", "model.depth=2", "data.val=0.3"]
    student = vitrail.pretrain(
        "digits", method="distill", teacher=teacher.bundle, changes=changes, folder=tmp_path / "student", device="cpu",
        quiet=True,
    )  # fmt: skip
    assert student.metrics.knn > 0.9  # type: ignore[attr-defined]


# ── what is refused ──


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "distill"], "distill learns the features of a teacher; pass one with --teacher"),
        (["--teacher", "{}"], "mae learns without --teacher; leave it out, or use --method distill"),
        (["--method", "distill", "--teacher", "nowhere"], "nowhere does not exist; pass a folder or a weight file"),
        (
            ["--method", "distill", "--teacher", "{}", "--set", "distill.pooled_weight=0", "--set",
             "distill.patch_weight=0"],
            "are 0, so there is no loss; set one above 0",
        ),
        (
            ["--method", "distill", "--teacher", "{}", "--set", "model.patch_dropout=0.5"],
            "compares all patches, but patch_dropout is 0.5",
        ),
        (
            ["--method", "distill", "--teacher", "{}", "--set", "model.pool=none"],
            "pretraining measures one vector per image, but model.pool is 'none'; use model.pool=mean, cls or map",
        ),
        (
            ["--method", "distill", "--teacher", "{}", "--set", "model.pool=map", "--set", "distill.pooled_weight=0"],
            "the model's pooling layers would not be trained",
        ),
        (
            ["--method", "distill", "--teacher", "{}", "--set", "teacher.weight=0.5"],
            "[teacher] is for training with labels, and distill has none; leave one of them out",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    options: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, run = [word.format(folder) for word in options], tmp_path / "run"
    done = run_command(monkeypatch, capsys, "pretrain", "digits", "--run", run, "--device", "cpu", *made)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not run.exists()


def test_channels_that_cannot_be_converted() -> None:
    teacher = Teacher(tiny_models.bundle(channels=5), "five")
    with pytest.raises(ConfigError, match="the teacher five takes images of 5 channels, and the model 1"):
        check_distill(STUDENT, DistillSettings(), teacher)
    unpooled = Bundle(tiny_models.bundle("every_token").model, tiny_models.bundle().preprocess)
    with pytest.raises(ConfigError, match="the teacher tokens does not pool its tokens"):
        check_distill(STUDENT, DistillSettings(), Teacher(unpooled, "tokens"))
