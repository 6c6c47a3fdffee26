"""Hints for people who use another library's names."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from vitrail.__main__ import _run
from vitrail.errors import ConfigError
from vitrail.models.config import FIELD_ALIASES, ViTConfig
from vitrail.models.variants import PAPER, variant_config
from vitrail.runtime import choose_device
from vitrail.training.defaults import resolve_defaults
from vitrail.training.plan import DataFacts
from vitrail.training.recipe_files import ALIASES, full_name, option_names, read_recipe


@pytest.mark.parametrize(
    ("change", "full"),
    [
        ("lr=0.1", "optimizer.lr=0.1"),
        ("image_size=224", "model.image_size=224"),
        ("weight_decay=0.05", "optimizer.weight_decay=0.05"),
        ("label_smoothing=0.1", "objective.label_smoothing=0.1"),
        ("batch_size=64", "batch=64"),
        ("learning_rate=1e-3", "optimizer.lr=1e-3"),
        ("training.lr=1e-3", "optimizer.lr=1e-3"),
        ("balance=true", "data.balance=true"),
    ],
)
def test_short_names_suggest_the_full_name(change: str, full: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_recipe("scratch-small", [change])
    assert str(error.value).endswith(f"; did you mean --set {full}?")
    path, _, value = change.partition("=")
    with pytest.raises(ConfigError, match="did you mean --set "):
        read_recipe("scratch-small", values={path: value})


def test_suggested_names_exist() -> None:
    names = option_names()
    assert set(ALIASES.values()) <= set(names)
    assert len(names) == len(set(names))
    assert full_name("lr") == "optimizer.lr"
    assert full_name("epochs") == "epochs"
    assert full_name("colour") is None
    assert read_recipe("scratch-small", ["optimizer.lr=0.1", "model.image_size=32"]).optimizer.lr == 0.1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--epochs", "3"], "--set epochs=3"),
        (["--epochs=3"], "--set epochs=3"),
        (["--lr", "0.1"], "--set optimizer.lr=0.1"),
        (["--batch-size", "64"], "--set batch=64"),
        (["--image-size", "224"], "--set model.image_size=224"),
        (["--compile"], "--set compile=…"),
        (["--colour", "red"], "(see vitrail train --help)"),
    ],
)
def test_recipe_fields_as_options_suggest_set(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitrail", "train", "digits", *words])
    assert _run() == 2
    error = capsys.readouterr().err
    assert error.startswith("vitrail: No such option: --")
    assert error.endswith(f"{hint}\n")
    assert len(error.splitlines()) == 1


def test_a_gpu_is_called_cuda() -> None:
    meant = "mps" if torch.backends.mps.is_available() else "cuda"
    for name in ("gpu", "GPU", "nvidia"):
        with pytest.raises(ConfigError, match=rf"no device is called '{name}'; did you mean '{meant}'\?"):
            choose_device(name)
    with pytest.raises(ConfigError, match="did you mean 'mps'" if meant == "mps" else "did you mean 'cuda:1'"):
        choose_device("gpu:1")


def test_the_paper_model_at_any_size() -> None:
    facts = DataFacts(1_000, ("cat", "dog"), 64, grey=False)
    model = resolve_defaults(read_recipe("scratch-small", ["model.paper=true"]), facts, None).model
    assert {name: getattr(model, name) for name in PAPER} == PAPER
    size = {name: getattr(model, name) for name in ("image_size", "patch_size", "width", "depth", "heads")}
    assert model == ViTConfig(**size, classes=2)
    # The plain stem alone does not give the paper's model: there is no class token.
    assert resolve_defaults(read_recipe("scratch-small", ["model.stem=conv"]), facts, None).model != model
    mean = resolve_defaults(read_recipe("scratch-small", ["model.paper=true", "model.pool=mean"]), facts, None).model
    assert mean == model.replace(pool="mean")
    named = resolve_defaults(
        read_recipe("scratch-small", ["model.paper=true", "model.name=R+Ti/16"]), facts, None
    ).model
    assert named == variant_config("R+Ti/16").replace(classes=2)
    assert PAPER.items() <= dict(variant_config("S/16")).items()
    with pytest.raises(ConfigError, match=r"model\.paper is 1"):
        resolve_defaults(read_recipe("scratch-small", ["model.paper=1"]), facts, None)


@pytest.mark.parametrize("changes", ["epochs=1", {"epochs": 1}])
def test_changes_are_a_list(changes: object) -> None:
    with pytest.raises(ConfigError, match=r"pass a list of strings: changes=\['optimizer.lr=3e-4'\]"):
        read_recipe("scratch-small", changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 10}, "create has no argument 'num_classes'; vitrail calls it classes: classes=10"),
        ({"img_size": 384}, "vitrail calls it image_size: image_size=384"),
        ({"in_chans": 1}, "vitrail calls it channels: channels=1"),
        ({"pretrained": True}, "vitrail.load opens a pretrained one"),
        ({"global_pool": "mean"}, "change it in the config: create(variant_config(…).replace(pool='mean'))"),
        ({"global_pool": "avg"}, "change it in the config: create(variant_config(…).replace(pool='mean'))"),
        ({"mlp_ratio": 4}, "change it in the config: create(variant_config(…).replace(mlp_width=…))"),
        ({"depth": 3}, "change it in the config: create(variant_config(…).replace(depth=3))"),
        ({"clases": 3}, "create has no argument 'clases'; did you mean 'classes'?"),
        ({"colour": "red"}, "create has no argument 'colour'"),
    ],
)
def test_create_with_timm_argument_names(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        vitrail.create("Ti/16", **arguments)


def test_suggested_calls_work() -> None:
    assert vitrail.create("Ti/16", classes=10).config.classes == 10
    assert vitrail.create(variant_config("Ti/16").replace(pool="mean")).config.pool == "mean"
    assert set(FIELD_ALIASES.values()) <= set(ViTConfig.model_fields)
    assert not set(FIELD_ALIASES) & set(ViTConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "ours"), [("embed_dim", "width"), ("global_pool", "pool"), ("num_classes", "classes")]
)
def test_config_fields_with_timm_names(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ViTConfig has no option '{name}'; did you mean '{ours}'\?$"):
        ViTConfig(**{name: 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 3}, "has no argument 'epochs'; settings go into the recipe: changes=['epochs=3'] (--set epochs=3)"),
        ({"lr": 0.1}, "changes=['optimizer.lr=0.1'] (--set optimizer.lr=0.1)"),
        ({"batch_size": 64}, "changes=['batch=64']"),
        ({"compile": True}, "changes=['compile=true']"),
        ({"num_workers": 2}, "vitrail calls it workers"),
        ({"weights": True}, "vitrail calls it pretrained"),
        ({"foldr": "runs"}, "did you mean 'folder'?"),
    ],
)
def test_settings_of_train_and_sweep_go_into_changes(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^train .*{re.escape(message)}"):
        vitrail.train("digits", folder=tmp_path / "run", **arguments)
    with pytest.raises(ConfigError, match=f"^sweep .*{re.escape(message)}"):
        vitrail.sweep("digits", over={"seed": [0]}, folder=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_pretrained_is_not_a_switch() -> None:
    with pytest.raises(vitrail.ConfigError, match="pretrained is True; use a bundle, a path or a name, such as"):
        vitrail.train("digits", pretrained=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 10}, "load has no argument 'num_classes'; vitrail calls it classes: classes=10"),
        ({"num_heads": 3}, "vitrail calls it heads: heads=3"),
        ({"global_pool": "mean"}, "with overrides={'pool': 'mean'}"),
        ({"overides": {}}, "did you mean 'overrides'?"),
    ],
)
def test_load_with_timm_argument_names(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        vitrail.load("anything.safetensors", **arguments)
