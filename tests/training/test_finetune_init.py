"""Adapting a pretrained model to other data: head, positions, dropout, and what stays untouched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.peers import scramble

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.position import resample_grid
from vitrail.models.vit import ViT
from vitrail.training.finetune_init import FinetuneInit, adapted, planned_config
from vitrail.training.recipe_files import read_recipe
from vitrail.training.train import train

DIGITS = tuple("0123456789")
OLD = ("cat", "dog")


def old_bundle(**options: Any) -> Bundle:
    fields = {"image_size": 8, "patch_size": 4, "width": 24, "depth": 2, "heads": 2, "classes": 2, "init": "timm"}
    model = ViT(ViTConfig(**fields | options))
    scramble(model)
    channels = model.config.channels
    half = (0.5,) * channels
    return Bundle(model, Preprocess(size=(8, 8), channels=channels, mean=half, std=half), OLD)


def fit(pretrained: Bundle, how: FinetuneInit, classes: tuple[str, ...] = DIGITS, **fields: Any) -> Bundle:
    return adapted(pretrained, how, planned_config(pretrained, how, fields, len(classes)), "classification", classes)


def weights(bundle: Bundle) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}


def test_a_zero_head_is_a_single_linear_layer() -> None:
    pretrained = old_bundle(representation=12)
    before = weights(pretrained)
    result = fit(pretrained, FinetuneInit(head="zero"))
    after = weights(result)
    assert (result.model.config.representation, result.classes) == (None, DIGITS)
    assert after["head.weight"].shape == (10, 24)
    assert not after["head.weight"].any()
    assert not after["head.bias"].any()
    rest = {name for name in before if not name.startswith(("head", "pre_logits"))}
    assert after.keys() == rest | {"head.weight", "head.bias"}
    assert all(torch.equal(after[name], before[name]) for name in rest)
    assert result.provenance["adapted"] == ["zero head for 10 classes"]
    with torch.no_grad():
        assert not result.model.eval()(torch.rand(2, 3, 8, 8)).any()


def test_both_heads_of_a_distilled_model_become_zero() -> None:
    result = fit(old_bundle(distillation_token=True), FinetuneInit(head="zero"))
    assert not any(tensor.any() for name, tensor in weights(result).items() if name.startswith("head"))


def test_a_head_is_kept_only_for_the_same_classes() -> None:
    pretrained = old_bundle(representation=12)
    before = weights(pretrained)
    kept = weights(fit(pretrained, FinetuneInit(), OLD))
    assert all(torch.equal(kept[name], before[name]) for name in before)
    other = weights(fit(pretrained, FinetuneInit(), ("dog", "cat")))
    assert not torch.equal(other["head.weight"], before["head.weight"])
    fresh = weights(fit(pretrained, FinetuneInit(head="fresh"), OLD))
    assert not torch.equal(fresh["head.weight"], before["head.weight"])
    assert torch.equal(fresh["pre_logits.fc.weight"], before["pre_logits.fc.weight"])


@pytest.mark.parametrize("positions", ["google", "timm"])
def test_positions_are_resampled_with_the_chosen_method(positions: Any) -> None:
    pretrained = old_bundle()
    result = fit(pretrained, FinetuneInit(positions=positions), image_size=16)
    grid = resample_grid(pretrained.model.pos_embed[:, 1:].detach(), (2, 2), (4, 4), positions)
    torch.testing.assert_close(result.model.pos_embed[:, 1:].detach(), grid)


def test_the_pretrained_bundle_is_not_changed() -> None:
    pretrained = old_bundle(representation=12)
    before, config, preprocess = weights(pretrained), pretrained.model.config, pretrained.preprocess
    result = fit(pretrained, FinetuneInit(head="zero"), image_size=16, channels=1, mlp_dropout=0.3)
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(pretrained).items())
    assert (pretrained.model.config, pretrained.preprocess, pretrained.classes, pretrained.provenance) == (
        config,
        preprocess,
        OLD,
        {},
    )


def test_metrics_of_the_pretrained_model_are_dropped() -> None:
    pretrained = old_bundle()
    pretrained.provenance.update({"source": "elsewhere", "metrics": {"accuracy": "99.0%"}})
    result = fit(pretrained, FinetuneInit(head="zero"))
    assert result.provenance["source"] == "elsewhere"
    assert "metrics" not in result.provenance
    assert "metrics" in pretrained.provenance


def test_fields_without_weights_can_be_changed() -> None:
    result = fit(
        old_bundle(mlp_dropout=0.5), FinetuneInit(), mlp_dropout=0.0, stochastic_depth=0.2, init="paper", pool="mean"
    )
    config = result.model.config
    assert (config.mlp_dropout, config.stochastic_depth, config.pool) == (0.0, 0.2, "mean")
    assert {module.p for module in result.model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    assert not result.model.head.weight.any()  # initialised as in the paper, not as in timm


def test_another_structure_raises() -> None:
    with pytest.raises(ConfigError, match=r"model.depth, model.mlp_width cannot be changed in a pretrained model"):
        fit(old_bundle(), FinetuneInit(), depth=3, mlp_width=7)


def test_another_structure_raises_before_a_run_is_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.width cannot be changed in a pretrained model"):
        train("digits", pretrained=old_bundle(), changes=["model.width=48"], folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_half_precision_weights_are_trained_in_float32() -> None:
    pretrained = old_bundle()
    pretrained.model.to(torch.bfloat16)
    assert {tensor.dtype for tensor in weights(fit(pretrained, FinetuneInit())).values()} == {torch.float32}


# ── whole runs ──


def run(recipe: str, pretrained: Bundle, folder: Path, *changes: str) -> Bundle:
    few = ["batch=64", "evaluations=1", *changes]
    return train("digits", recipe=recipe, pretrained=pretrained, changes=few, folder=folder, device="cpu", workers=0,
                 quiet=True).bundle  # fmt: skip


def test_a_linear_probe_changes_only_the_head(tmp_path: Path) -> None:
    pretrained = old_bundle(channels=1, stem="conv_stem", mlp_dropout=0.5)
    result = run("linear-probe", pretrained, tmp_path / "run", "epochs=none", "steps=3")
    before, after = weights(pretrained), weights(result)
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("head"))
    assert after["head.weight"].shape == (10, 24)
    assert result.model.config.mlp_dropout == 0


def test_two_runs_start_with_the_same_new_head(tmp_path: Path) -> None:
    changes = ("steps=1", "schedule.warmup_fraction=0.0", "optimizer.lr=1e-9")
    results: list[torch.Tensor] = []
    for name in ("one", "other"):
        torch.manual_seed(len(results))
        results.append(weights(run("finetune", old_bundle(), tmp_path / name, *changes))["head.weight"])
    assert results[0].any()
    assert torch.equal(results[0], results[1])


def test_the_papers_fine_tuning_runs(tmp_path: Path) -> None:
    pretrained = old_bundle(representation=12, patch_dropout=0.0)
    changes = ("steps=3", "gradient_accumulation=2", "model.image_size=16", "schedule.warmup_steps=1")
    result = run("finetune-paper", pretrained, tmp_path / "run", *changes)
    assert result.model.config.image_size == result.preprocess.size == (16, 16)
    assert result.model.head.weight.any()
    assert result.provenance["adapted"] == ["position 2x2 -> 4x4 by google", "image 8x8 -> 16x16",
                                           "zero head for 10 classes"]  # fmt: skip
    kept = read_recipe(tmp_path / "run" / "recipe.toml")
    assert (kept.steps, kept.epochs, kept.pretrained) == (3, None, FinetuneInit(head="zero", positions="google"))
