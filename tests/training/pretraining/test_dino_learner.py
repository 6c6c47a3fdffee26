"""DINO in a run: defaults, views by position, micro-batches and ranks as one batch, and how a collapse is noticed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from vitrail.data.batches import Evaluation, evaluation_batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_unlabelled
from vitrail.data.stream import Stream
from vitrail.data.views import MultiCropTraining
from vitrail.errors import Diverged
from vitrail.metrics.neighbours import leave_one_out
from vitrail.training.plan import DataFacts, TrainingPlan
from vitrail.training.pretraining.defaults import resolve_pretraining
from vitrail.training.pretraining.dino import DinoSettings, centre_momentum_for, momentum_for
from vitrail.training.pretraining.dino_learner import SelfDistillation
from vitrail.training.recipe_files import read_recipe

SMALL = ("compile=false", "steps=6", "batch=16", "evaluations=1", "model.width=32", "model.depth=1", "model.heads=2",
         "precision=float32")  # fmt: skip
DIGITS = DataFacts(1700, tuple("0123456789"), side=8, grey=True)
PHOTOS = DataFacts(100_000, (), side=300, grey=False, device="cuda")


def planned(facts: DataFacts, *changes: str) -> TrainingPlan:
    return resolve_pretraining(read_recipe("dino", changes), facts, None)


def settings_of(plan: TrainingPlan) -> DinoSettings:
    assert plan.recipe.dino is not None
    return plan.recipe.dino


def pretrained(folder: Path, *changes: str) -> vitrail.Run:
    return vitrail.pretrain(
        "digits", method="dino", changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0, quiet=True
    )


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


# ── defaults ──


@given(st.integers(1, 10**7))
@settings(max_examples=50, deadline=None)
def test_the_teacher_leaves_its_start_and_the_centre_keeps_up(steps: int) -> None:
    momentum = momentum_for(steps)
    assert 0.99 <= momentum <= 0.996
    assert momentum in (0.99, 0.996) or 1 / (1 - momentum) == pytest.approx(steps / 10, rel=1e-3)
    assert momentum <= momentum_for(steps + 1)
    centre = centre_momentum_for(momentum)
    assert 0 <= centre <= 0.9
    assert 1 - centre >= min(1, 50 * (1 - momentum)) - 1e-6


def test_small_images_get_gentler_views_and_sharper_targets() -> None:
    tiny, photos = planned(DIGITS), planned(PHOTOS)
    assert settings_of(tiny).teacher_temperature < settings_of(photos).teacher_temperature == 0.04
    assert settings_of(tiny).global_area[0] > settings_of(photos).global_area[0]
    assert (settings_of(tiny).colours, settings_of(photos).colours) == ("jitter", "full")
    assert tiny.recipe.data.on_device
    assert not photos.recipe.data.on_device
    assert photos.model.pool == "cls"
    assert settings_of(photos).prototypes == 4096
    reasons = {default.field: default.reason for default in tiny.defaults}
    assert "uniform" in reasons["dino.teacher_temperature"]


def test_the_momenta_of_a_plan_are_those_for_its_steps() -> None:
    for steps in (500, 1574, 100_000):
        plan = planned(DIGITS, f"steps={steps}")
        chosen = settings_of(plan)
        assert chosen.momentum == momentum_for(steps)
        assert chosen.centre_momentum == centre_momentum_for(momentum_for(steps))
        assert {"dino.momentum", "dino.centre_momentum"} <= {default.field for default in plan.defaults}
        assert resolve_pretraining(plan.recipe, DIGITS, None).recipe == plan.recipe
    given = settings_of(planned(DIGITS, "steps=500", "dino.centre_momentum=0.7"))
    assert (given.momentum, given.centre_momentum) == (0.99, 0.7)


def test_what_the_recipe_sets_stays() -> None:
    chosen = settings_of(planned(DIGITS, "dino.momentum=0.5", "dino.prototypes=99", "dino.colours=none"))
    assert (chosen.momentum, chosen.prototypes, chosen.colours) == (0.5, 99, "none")
    assert not planned(DIGITS, "data.on_device=false").recipe.data.on_device


# ── views ──


def test_views_depend_on_seed_and_position_only() -> None:
    learner = SelfDistillation(planned(DIGITS, "dino.local_crops=2"), labelled=False)
    pixels = torch.rand(6, 1, 8, 8) * 2 - 1
    whole, part = learner.inputs(pixels, 40), learner.inputs(pixels[4:], 44)
    for all_views, some_views in zip(whole[:2], part[:2], strict=True):
        torch.testing.assert_close(all_views[4:], some_views, rtol=0, atol=1e-6)
    assert not torch.equal(whole[0], learner.inputs(pixels, 41)[0])
    assert whole[0].shape == (6, 2, 1, 8, 8)
    assert whole[1].shape == (6, 2, 1, 4, 4)


def test_the_temperature_follows_the_position() -> None:
    plan = planned(DIGITS, "steps=10", "batch=16", "dino.teacher_temperature=0.07", "dino.warmup_fraction=0.5")
    learner = SelfDistillation(plan, labelled=False)
    pixels = torch.rand(2, 1, 8, 8)
    found = [float(learner.inputs(pixels, position)[2]) for position in (0, 15, 16, 16 * 5)]
    assert found[0] == found[1] == pytest.approx(0.03)
    assert found[2] == pytest.approx(0.038)
    assert found[3] == pytest.approx(0.07)


@pytest.mark.slow
def test_images_from_files_are_cut_by_workers(tmp_path: Path) -> None:
    """Both ways make the same number of views; draws differ, so only the course of the loss is compared."""
    on_device, from_files = tmp_path / "device", tmp_path / "files"
    pretrained(on_device)
    pretrained(from_files, "data.on_device=false")
    first = [losses(folder)[0] for folder in (on_device, from_files)]
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], rel=0.2)


@pytest.mark.slow
def test_micro_batches_update_centre_and_teacher_once(tmp_path: Path) -> None:
    """From files too, where every micro-batch is cut out of a batch of views."""
    runs = [tmp_path / name for name in ("one", "two")]
    for folder, changes in zip(runs, ((), ("gradient_accumulation=2",)), strict=True):
        pretrained(folder, "data.on_device=false", *changes)
    torch.testing.assert_close(*(torch.tensor(losses(folder)) for folder in runs), rtol=0, atol=1e-4)


def test_a_batch_of_views_is_a_dataset_by_step() -> None:
    plan, train = planned(DIGITS), open_unlabelled("digits").train
    size = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,), resize="cover")
    data = MultiCropTraining(train, Stream(len(train), 4, 0), size, settings_of(plan).crops(plan.model))
    again: Any = data[3]
    assert torch.equal(data[3].globals, again.globals)
    assert not torch.equal(data[4].globals, again.globals)


# ── training ──


@pytest.mark.slow
def test_the_features_of_the_digits_improve(tmp_path: Path) -> None:
    """The loss leaves the logarithm of the prototypes, and the teacher's features beat those of a new model."""
    changes = ["compile=false", "steps=600", "batch=64", "evaluations=1"]
    run = vitrail.pretrain(
        "digits", method="dino", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True
    )
    last = losses(run.folder)[-50:]
    assert sum(last) / len(last) < math.log(1024) - 1
    torch.manual_seed(0)
    untrained, images = vitrail.ViT(run.bundle.model.config), open_unlabelled("digits").train
    accuracies = []
    for model in (untrained.eval(), run.bundle.model.eval()):
        batches = list(evaluation_batches(Evaluation(images, run.bundle.preprocess, 256), workers=0))
        with torch.no_grad():
            features = torch.cat([model(run.bundle.preprocess.normalise(batch.pixels)) for batch in batches])
        accuracies.append(leave_one_out(features, torch.cat([batch.labels for batch in batches]), 10))
    assert accuracies[1] > accuracies[0] + 0.08


# ── collapse ──


def test_uniform_outputs_stop_the_run(tmp_path: Path) -> None:
    sentence = r"outputs have collapsed after step 6: they are uniform .* lower dino\.teacher_temperature"
    with pytest.raises(Diverged, match=sentence):
        pretrained(tmp_path / "run", "dino.teacher_temperature=10", "dino.warmup_teacher_temperature=10")


def test_a_new_model_is_not_collapsed(tmp_path: Path) -> None:
    run = pretrained(tmp_path / "run", "steps=1")
    row = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["val_entropy"] < math.log(1024) - 0.1
