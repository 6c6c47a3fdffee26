"""The criterion for the best checkpoint: from the recipe, or by default from its class weights."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.__main__ import _run
from vitrail.errors import ConfigError
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.task import Predictions
from vitrail.training.criterion import as_good, score, shared_criterion
from vitrail.training.grid import combine
from vitrail.training.recipe_files import read_recipe
from vitrail.training.state import Progress, Score
from vitrail.training.sweep import sweep
from vitrail.training.train import train

TINY = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4", "model.stem=conv", "batch=8"]
CRITERIA = ("accuracy", "balanced_accuracy", "macro_f1", "loss")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imbalanced noise, where accuracy and balanced accuracy differ."""
    folder, rng = tmp_path_factory.mktemp("uneven"), np.random.default_rng(0)
    for label, count in (("common", 60), ("rare", 16), ("scarce", 12)):
        (folder / label).mkdir()
        for number in range(count):
            shift = {"common": 0, "rare": 20, "scarce": 40}[label]
            pixels = rng.integers(0, 200, (8, 8)) + shift
            Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{number}.png")
    return folder


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "val_top1" in row]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.slow
def test_the_best_checkpoint_is_best_by_the_criterion(criterion: str, uneven: Path, tmp_path: Path) -> None:
    changes = [*TINY, "epochs=4", "evaluations=8", "data.val=0.3", f"criterion={criterion}", "optimizer.lr=0.01"]
    run = train(uneven, changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    rows = rows_of(run.folder)
    assert len(rows) == 8
    scores = {row["step"]: score(row, CLASSIFICATION.criteria[criterion]) for row in rows}
    images = 26  # three tenths of 60, 16 and 12
    highest = max(scores.values())
    error = CLASSIFICATION.standard_error("accuracy", highest.value, images)
    latest = max(step for step, reached in scores.items() if as_good(reached, highest, error))
    best = next(row for row in rows if row["step"] == rows[-1]["best"])
    lowest_loss = max(scores, key=lambda step: scores[step])
    assert best["step"] == (lowest_loss if criterion == "loss" else latest)
    assert run.bundle.provenance["trained"]["step"] == best["step"]


def tied(reached: float, highest: float, criterion: str, images: int) -> bool:
    error = CLASSIFICATION.standard_error(criterion, abs(highest), images)
    return as_good(Score(reached, 0.0), Score(highest, 0.0), error)


def test_scores_within_a_standard_error_are_tied() -> None:
    """37 images, one of each class: 4 right and 2 right are the same within a standard error, 20 and 14 are not."""
    assert tied(2.5 / 37, 4 / 37, "accuracy", 37)
    assert not tied(14 / 37, 20 / 37, "accuracy", 37)
    assert not tied(0.937, 0.94, "accuracy", 10_000)
    assert tied(0.938, 0.94, "accuracy", 10_000)
    assert tied(17 / 18, 1.0, "accuracy", 18), "18 of 18 is not certain"
    assert not tied(-0.51, -0.5, "loss", 10)


def test_the_default_criterion_follows_the_class_weights(uneven: Path, tmp_path: Path) -> None:
    for number, (change, expected) in enumerate(
        [
            ("data.balance=true", "balanced_accuracy"),
            ("objective.class_weights=balanced", "balanced_accuracy"),
            ("seed=0", "accuracy"),
        ]
    ):
        folder = tmp_path / str(number)
        run = train(
            uneven, changes=[*TINY, "steps=1", change], folder=folder, device="cpu", workers=0, quiet=True
        )  # fmt: skip
        assert read_recipe(folder / "recipe.toml").criterion == expected
        assert any(choice.field == "criterion" for choice in run.defaults) == (expected != "accuracy")
    weighted = read_recipe("scratch-small", ["data.balance=true", "criterion=loss"])
    assert weighted.resolved_criterion() == "loss"
    with pytest.raises(ConfigError, match=r"criterion is 'acuracy'; .*did you mean 'accuracy'"):
        read_recipe("scratch-small", ["criterion=acuracy"])


def test_a_sweep_selects_by_the_criterion(uneven: Path, tmp_path: Path) -> None:
    changes = [*TINY, "epochs=1", "evaluations=1", "data.val=0.3", "criterion=loss"]
    done = sweep(
        uneven, over={"optimizer.lr": [0.0001, 0.03]}, changes=changes, folder=tmp_path / "sweep",
        device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    losses = [run.outcome.metrics["val_loss"] for run in done.runs]
    assert (done.criterion, done.chosen.outcome.metrics["val_loss"]) == ("loss", min(losses))
    with pytest.raises(ConfigError, match=r"one criterion; set it with --set criterion"):
        combine({"criterion": ["loss", "accuracy"]}, ())


@pytest.mark.slow
def test_the_sweep_table_shows_the_criterion(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [*TINY, "epochs=1", "evaluations=1", "data.val=0.3", "criterion=macro_f1"]
    words = [word for change in changes for word in ("--set", change)]
    command = ["vitrail", "train", str(uneven), "--device", "cpu", "--workers", "0", "--run", str(tmp_path / "typed")]
    monkeypatch.setattr(sys, "argv", [*command, *words, "--sweep", "optimizer.lr=0.0001,0.03"])
    assert _run() == 0
    output = capsys.readouterr()
    assert "val macro-F1" in output.out
    assert "has the best macro-F1 on the validation split" in output.err


def test_runs_with_and_without_class_weights_are_compared_by_balanced_accuracy() -> None:
    assert shared_criterion(CLASSIFICATION, ["accuracy", "accuracy"]) == "accuracy"
    assert shared_criterion(CLASSIFICATION, ["accuracy", "balanced_accuracy"]) == "balanced_accuracy"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 40))
def test_scores_match_the_evaluation(seed: int, classes: int, images: int) -> None:
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(classes), images).astype(np.float32)
    predictions = Predictions(probabilities, rng.integers(0, classes, images), np.arange(images))
    result = CLASSIFICATION.validation(predictions, tuple(map(str, range(classes))))
    assert tuple(CLASSIFICATION.criteria) == CRITERIA
    for name, criterion in CLASSIFICATION.criteria.items():
        sign = -1 if name == "loss" else 1
        assert score(result, criterion).value == sign * result[criterion.key]
        worse = {**result, "val_loss": result["val_loss"] + 1}
        assert score(worse, criterion) < score(result, criterion), "the loss breaks ties"


R2 = MetricSpec("R²", "number", key="val_r2")


def test_the_loss_breaks_ties_only() -> None:
    """Whatever the scale of the loss: R² of .9 with a mean squared error of 4e6 is better than .6 with 1e6."""
    good, weak = ({"val_r2": r2, "val_loss": loss} for r2, loss in ((0.9, 4e6), (0.6, 1e6)))
    assert score(good, R2) > score(weak, R2)
    assert score({**good, "val_loss": 3e6}, R2) > score(good, R2)
    assert score({**good, "val_loss": math.nan}, R2) < score(good, R2)


def test_a_criterion_that_is_not_finite_is_never_the_highest() -> None:
    progress = Progress(step=1)
    for value, highest in ((math.nan, False), (-3.0, True), (math.inf, False), (math.nan, False), (-2.0, True)):
        assert progress.reach(Score(value, -1.0)) == highest
        progress.best_step = progress.best_step or int(highest)
    assert progress.highest == (-2.0, -1.0)
    assert Progress(best_step=1, highest=(0.5, -2.0)).reach(Score(0.5, -1.0)), "the loss breaks the tie"
    assert not Progress(best_step=1, highest=(0.5, -1.0)).reach(Score(0.5, -1.0))
