"""The bundled recipes: their headers, and their values against the papers' tables."""

import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from vitrail.checkpoints.bundle import Bundle
from vitrail.cli.pretrain import METHODS
from vitrail.cli.train import RECIPES
from vitrail.data.augmentation.augment import preset
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.defaults import resolve_defaults
from vitrail.training.optimizers import learning_rate
from vitrail.training.plan import DataFacts, TrainingPlan
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import preset_names, read_recipe, write_toml
from vitrail.training.teacher import Teacher
from vitrail.training.train import train

IMAGENET = DataFacts(1_281_167, tuple(f"class {number}" for number in range(1000)), 375, False)
PETS = DataFacts(3_312, tuple(f"breed {number}" for number in range(37)), 333, False)
WITH_START = {"finetune", "finetune-paper", "linear-probe", "lora"}
WITH_TEACHER = {"distill"}


def old_model(**options: Any) -> Bundle:
    fields = {"width": 32, "depth": 1, "heads": 2, "classes": 5, "mlp_dropout": 0.1, "representation": 8} | options
    return Bundle(ViT(ViTConfig(**fields)), Preprocess())


TEACHER = Teacher(old_model(), "teacher")


def planned(name: str | Path, *changes: str, like: str | None = None, facts: DataFacts | None = None) -> TrainingPlan:
    """Return the plan of a recipe, with what the recipe called `like` needs."""
    like = like or str(name)
    facts = facts or (PETS if like in WITH_START else IMAGENET)
    pretrained, teacher = old_model() if like in WITH_START else None, TEACHER if like in WITH_TEACHER else None
    return resolve_defaults(read_recipe(name, changes), facts, pretrained, teacher)


def text_of(name: str) -> str:
    return files("vitrail.training").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")


def header_of(name: str) -> str:
    lines = text_of(name).splitlines()
    return "\n".join(lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))])


def changes_in(text: str) -> list[str]:
    return [result.rstrip(".") for result in re.findall(r"[a-z_]+(?:\.[a-z_]+)*=[^\s;,:)]+", text)]


# ── every recipe ──


def test_the_help_names_every_recipe() -> None:
    assert sorted([*RECIPES, *METHODS]) == preset_names()
    assert sorted(METHODS) == [name for name in preset_names() if read_recipe(name).method is not None]


@pytest.mark.parametrize("name", preset_names())
def test_the_header_has_command_cost_and_result(name: str) -> None:
    header = header_of(name)
    command = re.search(r"^# Command:\n#   (vitrail (?:pre)?train .*)$", header, re.MULTILINE)
    assert command is not None
    assert command[1].startswith("vitrail pretrain") is (name in METHODS)
    assert (" --from" in command[1].partition("(")[0]) is (name in WITH_START)
    assert (" --teacher" in command[1]) is (name in WITH_TEACHER)
    named = f"--recipe {name}" in command[1] or f"--method {name}" in command[1]
    assert named or name in ("scratch-small", "finetune", "mae")
    for part in ("Cost", "Expected"):
        assert re.search(rf"^# {part}: \S", header, re.MULTILINE), part
    assert all(len(line) <= 120 for line in text_of(name).splitlines())


@pytest.mark.parametrize("name", preset_names())
def test_every_change_in_the_header_is_valid(name: str) -> None:
    large = IMAGENET._replace(images=14_000_000)
    for line in header_of(name).splitlines():
        plan = planned(name, *changes_in(line), facts=large)
        for path, text in dict(change.split("=") for change in changes_in(line)).items():
            if path not in ("model.name", "model.image_size"):
                number = re.fullmatch(r"-?[0-9].*", text)
                expected = float(text) if number else None if text == "none" else text
                assert value_at(plan.recipe, path) == expected, path


@pytest.mark.parametrize("name", preset_names())
def test_a_plan_is_complete_and_reproducible(name: str, tmp_path: Path) -> None:
    plan = planned(name)
    settled = plan.recipe
    assert None not in (settled.batch, settled.optimizer.lr, settled.augmentation, settled.mixing)
    assert (settled.epochs is None) is (settled.steps is not None)
    assert (settled.pretrained is not None) is (name in WITH_START)
    (tmp_path / "again.toml").write_text(write_toml(settled))
    again = planned(tmp_path / "again.toml", like=name)
    assert again._replace(defaults=[]) == plan._replace(defaults=[])


@pytest.mark.parametrize("name", sorted(WITH_START))
def test_a_fine_tuning_recipe_needs_a_pretrained_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fine-tunes a pretrained model; pass one with --from"):
        train("digits", recipe=name, folder=tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


# ── values against the papers' tables ──


def value_at(recipe: Recipe, path: str) -> Any:
    value: Any = json.loads(recipe.to_json())
    for part in path.split("."):
        value = value.get(part)  # None is omitted from a model
    return value


CROPS = {"augmentation.crop": "inception_tf", "augmentation.crop_area": [0.05, 1.0], "augmentation.flip": 0.5}
ADAM = {"optimizer.kind": "adamw", "optimizer.betas": [0.9, 0.999], "optimizer.max_grad_norm": 1.0}
WARM = {"schedule.kind": "cosine", "schedule.warmup_steps": 10_000}
PLAIN = {"objective.loss": "softmax", "objective.label_smoothing": 0.0, "averaging.kind": "none", "patience": 0}
BIG_VISION = {"augmentation.randaugment.layers": 2, "augmentation.randaugment.operations": "big_vision"}
VALUES: dict[str, dict[str, Any]] = {
    "scratch-paper": {
        **CROPS, **ADAM, **WARM, **PLAIN, "batch": 4096, "epochs": 300, "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.3, "augmentation.randaugment": None, "mixing.mixup": 0.0,
    },
    "finetune-paper": {
        **CROPS, **PLAIN, "batch": 512, "steps": 500, "gradient_accumulation": 8, "optimizer.kind": "sgd",
        "optimizer.momentum": 0.9, "optimizer.nesterov": False, "optimizer.weight_decay": 0.0,
        "optimizer.max_grad_norm": 1.0,
        "schedule.kind": "cosine", "augmentation.randaugment": None, "mixing.mixup": 0.0, "pretrained.head": "zero",
        "pretrained.positions": "google", "data.val": 0.1,
    },
    "augreg": {
        **CROPS, **ADAM, **WARM, **PLAIN, **BIG_VISION, "batch": 4096, "epochs": 300, "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.1, "augmentation.randaugment.magnitude": 15, "mixing.mixup": 0.2,
    },
    "plain-baseline": {
        **CROPS, **ADAM, **WARM, **PLAIN, **BIG_VISION, "batch": 1024, "epochs": 90, "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.1, "augmentation.randaugment.magnitude": 10, "mixing.mixup": 0.2,
        "mixing.cutmix": 0.0, "mixing.chance": 1.0, "data.val": 0.01,
    },
    "linear-probe": {**PLAIN, "freeze": ["*", "!head*"], "augmentation.randaugment": None, "mixing.mixup": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_match_the_tables(name: str) -> None:
    settled = planned(name).recipe
    assert {path: value_at(settled, path) for path in VALUES[name]} == VALUES[name]


def test_the_learning_rate_is_one_of_table_4() -> None:
    assert planned("finetune-paper").peak_lr in (0.001, 0.003, 0.01, 0.03)
    rows = re.findall(r"^#   \w.*steps=.*$", header_of("finetune-paper"), re.MULTILINE)
    tried = {row.split()[1].rstrip(","): [float(n) for n in re.findall(r"0\.0\d+(?=[, ])", row)] for row in rows}
    small = [0.001, 0.003, 0.01, 0.03]
    assert [
        (changes_in(row)[0], rates[: len(small)]) for row, rates in zip(rows[:3], tried.values(), strict=False)
    ] == [
        ("steps=500", small),
        ("steps=10000", small),
        ("steps=20000", [0.003, 0.01, 0.03, 0.06]),
    ]
    assert changes_in(rows[3]) == ["steps=2500", "optimizer.lr=0.01"]


def test_models_match_the_papers() -> None:
    model = planned("scratch-paper").model
    assert (model.width, model.depth, model.heads, model.patch_size) == (768, 12, 12, (16, 16))
    assert (model.representation, model.pool, model.init, model.image_size) == (768, "cls", "paper", (224, 224))
    assert (model.embed_dropout, model.proj_dropout, model.mlp_dropout, model.attention_dropout) == (0.1, 0.1, 0.1, 0)
    model = planned("plain-baseline").model
    assert (model.width, model.depth, model.heads, model.representation) == (384, 12, 6, 384)
    assert (model.pool, model.class_token, model.position, model.init) == ("mean", "none", "sincos_2d", "paper")
    assert model.classes == 1000
    assert planned("augreg").model.representation is None
    plan = planned("finetune-paper")
    assert (plan.model.image_size, plan.model.representation, plan.model.mlp_dropout) == ((384, 384), None, 0.0)
    assert plan.preprocess.size == (384, 384)


def test_the_plain_baseline_is_evaluated_at_256_and_224() -> None:
    result = planned("plain-baseline").preprocess
    assert (result.resize, result.resize_to, result.size) == ("cover", (256, 256), (224, 224))
    assert (result.mean, result.std) == ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("level", "magnitude", "mixup"),
    [
        ("none", None, 0.0),
        ("light1", 0, 0.0),
        ("light2", 10, 0.2),
        ("medium1", 15, 0.2),
        ("medium2", 15, 0.5),
        ("strong1", 20, 0.5),
        ("strong2", 20, 0.8),
    ],
)
def test_the_levels_of_augreg(level: str, magnitude: float | None, mixup: float) -> None:
    row = re.search(rf"^#   {level} .*$", header_of("augreg"), re.MULTILINE)
    assert row is not None
    plan = planned("augreg", *changes_in(row[0]))
    assert plan.mixing.mixup == mixup
    if magnitude is None:
        assert plan.augmentation.randaugment is None
    else:
        assert plan.augmentation.randaugment is not None
        assert plan.augmentation.randaugment.magnitude == magnitude
        assert plan.augmentation == preset(f"augreg_{level}")


def test_the_columns_of_table_3() -> None:
    rows = header_of("scratch-paper")
    i21k = changes_in(rows[rows.index("ImageNet-21k") : rows.index("JFT-300M")])
    plan = planned("scratch-paper", *i21k)
    assert (plan.peak_lr, plan.recipe.optimizer.weight_decay, plan.recipe.epochs) == (1e-3, 0.03, 90)
    assert (plan.recipe.schedule.kind, plan.recipe.optimizer.max_grad_norm, plan.model.mlp_dropout) == (
        "linear",
        None,
        0.1,
    )
    jft = changes_in(rows[rows.index("JFT-300M") : rows.index("Another model")])
    recipe = read_recipe("scratch-paper", [*jft, "epochs=14", "optimizer.lr=3e-4", "model.name=H/14"])
    plan = resolve_defaults(recipe, IMAGENET._replace(images=303_000_000), None)
    assert (plan.recipe.optimizer.weight_decay, plan.recipe.schedule.kind, plan.model.depth) == (0.1, "linear", 32)
    assert plan.model.embed_dropout == plan.model.proj_dropout == plan.model.mlp_dropout == 0
    extras = ("objective.loss=sigmoid", "model.head_bias=-10", "schedule.end_lr=1e-5", "schedule.kind=linear")
    assert all(extra in rows for extra in extras)
    plan = planned("scratch-paper", *extras)
    assert (plan.recipe.objective.loss, plan.model.head_bias, plan.recipe.schedule.end_lr) == ("sigmoid", -10, 1e-5)


# ── the learning rate over a run ──


def straight(step: int, total: int, warmup: int, peak: float) -> float:
    """Return the learning rate by definition: linear warm-up to the peak, then half a cosine to 0."""
    if step < warmup:
        return peak / warmup * (step + 1)
    angle = 180 * (step - warmup) / (total - warmup)
    return peak * (0.5 + 0.5 * math.cos(math.radians(angle)))


@pytest.mark.parametrize(
    ("name", "changes", "total", "warmup", "peak"),
    [
        ("scratch-paper", (), 93_836, 10_000, 3e-3),  # 300 × 1,281,167 / 4096, rounded up
        ("finetune-paper", (), 500, 100, 0.01),
        ("finetune-paper", ("steps=20000", "schedule.warmup_steps=500", "optimizer.lr=0.06"), 20_000, 500, 0.06),
        ("plain-baseline", (), 112_603, 10_000, 1e-3),
    ],
)
def test_the_learning_rate(name: str, changes: tuple[str, ...], total: int, warmup: int, peak: float) -> None:
    plan = planned(name, *changes)
    assert plan.steps == total
    for step in (0, 1, warmup // 2, warmup - 1, warmup, warmup + 1, (warmup + total) // 2, total - 2, total - 1):
        result = learning_rate(plan.recipe.schedule, step, plan.steps, plan.peak_lr)
        assert result == pytest.approx(straight(step, total, warmup, peak), rel=1e-9)


# ── the length of a run, and contradictions ──


def test_the_length_of_a_run() -> None:
    assert planned("scratch-small", "steps=77").steps == 77
    assert planned("scratch-small", "epochs=2", "batch=1000").steps == 2563  # 2 × 1,281,167 / 1000, rounded up
    assert planned("finetune-paper", "steps=none", "epochs=40").steps == 259  # 40 × 3,312 / 512, rounded up
    assert all(choice.field != "epochs" for choice in planned("scratch-small", "steps=77").defaults)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("scratch-paper", "steps=500", r"epochs is 300 and steps is 500; leave one of them out, or unset it with"),
        ("finetune-paper", "epochs=3", "epochs is 3 and steps is 500"),
        ("finetune-paper", "steps=0", "steps is 0"),
        ("finetune-paper", "steps=50", "a warm-up of 100 steps does not fit into a run of 50 steps"),
        ("finetune-paper", "model.classes=3", "model.classes is 3, but the data has 37 classes"),
        ("finetune-paper", "model.name=B/16", "model.name cannot be combined with a pretrained model"),
        ("finetune-paper", "pretrained.head=none", "pretrained.head is None"),
        ("finetune-paper", "pretrained.haed=zero", "did you mean 'head'"),
        ("plain-baseline", "preprocess.size=256", "preprocess.size follows from the model; set model.image_size"),
        ("plain-baseline", "preprocess.resise=cover", "did you mean 'resize'"),
    ],
)
def test_contradictions(name: str, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(name, change)


def test_a_warmup_that_does_not_fit_raises_before_anything_is_written(tmp_path: Path) -> None:
    changes = ["model.name=Ti/16", "model.image_size=16", "epochs=1", "batch=64"]
    with pytest.raises(ConfigError, match="a warm-up of 10,000 steps does not fit into a run of 20 steps"):
        train("digits", recipe="scratch-paper", changes=changes, folder=tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'cifar100'; .*, or pass a .toml file; did you mean 'cif"):
        read_recipe("cifar100")
    with pytest.raises(ConfigError, match=r"./mine.toml does not exist; pass an existing recipe file"):
        read_recipe("./mine.toml")
