"""Resolved defaults: they fit the data, respect explicit settings, and give their reasons."""

from typing import Any

import numpy as np
import pytest
import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays
from vitrail.models.stages import cost
from vitrail.models.vit import ViT
from vitrail.training.defaults import resolve_defaults
from vitrail.training.plan import DataFacts, TrainingPlan, describe_data
from vitrail.training.recipe_files import read_recipe

TEN = tuple("0123456789")
DIGITS = DataFacts(1_258, TEN, 8, True)
PHOTOS = DataFacts(1_443, TEN, 100, False)
CIFAR = DataFacts(45_000, TEN, 32, False, "cuda")
FASHION = DataFacts(54_000, TEN, 28, True, "cuda")


def planned(facts: DataFacts, *changes: str, pretrained: Bundle | None = None) -> TrainingPlan:
    return resolve_defaults(read_recipe("finetune" if pretrained else "scratch-small", changes), facts, pretrained)


@pytest.mark.parametrize(
    "facts", [DIGITS, PHOTOS, CIFAR, FASHION, PHOTOS._replace(device="cuda"), CIFAR._replace(side=3)]
)
def test_every_default_is_valid_and_has_a_reason(facts: DataFacts) -> None:
    plan = planned(facts)
    channels = 1 if facts.grey else 3
    with torch.no_grad():
        logits = ViT(plan.model.replace(depth=1)).eval()(torch.zeros(1, channels, *plan.model.image_size))
    assert logits.shape == (1, 10)
    assert max(plan.model.image_size) <= max(facts.side, plan.model.patch_size[0])
    assert all(choice.reason for choice in plan.defaults)
    # The resolved recipe is complete, so other data does not change it.
    again = resolve_defaults(plan.recipe, facts._replace(device="cuda" if facts.device == "cpu" else "cpu"), None)
    assert (again.recipe, again.model, again.defaults) == (plan.recipe, plan.model, [])


@pytest.mark.parametrize(("facts", "minutes"), [(DIGITS, 1.5), (PHOTOS, 10)])
def test_a_run_on_a_cpu_takes_minutes(facts: DataFacts, minutes: float) -> None:
    """Two slow cores reach about 30 GFLOP/s; a training step costs three forward passes."""
    plan = planned(facts)
    assert 3 * cost(plan.model).flops * plan.batch * plan.steps / 30e9 < 60 * minutes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["model.width=100"], {"width": 100, "heads": 2, "stem": "conv_stem"}),
        (["model.width=33"], {"width": 33, "heads": 1, "stem": "conv"}),
        (["model.patch_size=3"], {"image_size": (6, 6), "stem": "conv"}),
        (["model.patch_size=[2, 4]"], {"image_size": (8, 8), "stem": "conv"}),
        (["model.patch_size=4"], {"image_size": (8, 8), "stem": "conv_stem"}),
        (["model.stem=linear"], {"stem": "linear", "conv_stem": None}),
    ],
)
def test_defaults_respect_explicit_settings(changes: list[str], expected: dict[str, Any]) -> None:
    plan = planned(DIGITS, *changes)
    assert {name: getattr(plan.model, name) for name in expected} == expected
    requested = {change.split("=")[0] for change in changes}
    assert not requested & {choice.field for choice in plan.defaults}


def test_a_named_model_is_not_changed() -> None:
    plan = planned(PHOTOS, "model.name=Ti/16", "model.image_size=64", "epochs=1")
    assert resolve_defaults(plan.recipe, PHOTOS, None).model == plan.model


def test_muon_gets_a_higher_learning_rate() -> None:
    adamw, muon = (planned(PHOTOS, f"optimizer.kind={kind}").peak_lr for kind in ("adamw", "muon"))
    assert muon == pytest.approx(2.5 * adamw)


def test_few_photos_get_a_shallow_model_and_a_low_learning_rate() -> None:
    few, many = planned(PHOTOS), planned(PHOTOS._replace(images=20_000))
    assert (few.model.depth, many.model.depth) == (2, 4)
    assert few.peak_lr == many.peak_lr / 2
    assert planned(PHOTOS._replace(images=270)).recipe.epochs == 225


def test_wider_pretrained_models_get_a_lower_learning_rate() -> None:
    def rate(width: int) -> float:
        model = ViT(planned(CIFAR, f"model.width={width}", "model.depth=1").model)
        preprocess = Preprocess(size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
        return planned(CIFAR, pretrained=Bundle(model, preprocess, TEN, {})).peak_lr

    assert (rate(64), rate(512)) == (1e-3, 1e-4)


def test_describing_the_data() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (5, 12, 20), dtype=np.uint8)
    facts = describe_data(Arrays(grey, np.zeros(5, np.int64), ("a",)), "cuda")
    assert facts == DataFacts(5, ("a",), 12, True, "cuda")
    colours = np.random.default_rng(0).integers(0, 256, (5, 12, 20, 3), dtype=np.uint8)
    assert not describe_data(Arrays(colours, np.zeros(5, np.int64), ("a",))).grey


@pytest.mark.parametrize("recipe", ["cifar10", "mae", "masked-patches", "dino"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recipes_compile_on_a_gpu_only(recipe: str, device: str) -> None:
    plan = resolve_defaults(read_recipe(recipe), CIFAR._replace(device=device), None)
    assert plan.recipe.compile is (device == "cuda")
    assert [default.value for default in plan.defaults if default.field == "compile"] == [device == "cuda"]
    asked = resolve_defaults(read_recipe(recipe, ["compile=true"]), CIFAR._replace(device=device), None)
    assert asked.recipe.compile is True
