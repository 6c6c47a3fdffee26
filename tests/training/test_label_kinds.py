"""Training on several labels and on numbers: learned, resumed, evaluated, predicted, exported, reported."""

import csv
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tests.support.digit_tasks import LARGEST_ANGLE, MadeData, pairs_of_digits, turned_digits
from tests.support.html_page import Page
from torch import Tensor

import vitrail
from vitrail.errors import ConfigError, DataError
from vitrail.tasks.multilabel import LabelsPrediction, Multilabel
from vitrail.tasks.multilabel_metrics import MultilabelMetrics
from vitrail.tasks.regression import ValuePrediction
from vitrail.tasks.regression_metrics import RegressionMetrics
from vitrail.training.sessions import Stopped
from vitrail.training.train import Run

LEARNING = ("model.width=64", "model.depth=2", "model.heads=2", "augmentation.crop=none", "augmentation.flip=0",
            "evaluations=4", "optimizer.lr=0.003")  # fmt: skip
QUICK = ["model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4", "model.stem=conv", "batch=64",
         "precision=float32"]  # fmt: skip


def write(made: MadeData, folder: Path, column: str) -> Path:
    """Write images and a manifest, whose labels are joined by semicolons."""
    (folder / "images").mkdir(parents=True)
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", column])
        for number, (pixels, label) in enumerate(zip(made.images, made.labels, strict=True)):
            Image.fromarray(pixels).save(folder / "images" / f"{number:04d}.png")
            writer.writerow([f"images/{number:04d}.png", ";".join(label) if isinstance(label, list) else label])
    return folder / "list.csv"


def trained(data: Any, folder: Path, *changes: str, **settings: Any) -> Run:
    return vitrail.train(
        data, changes=[*QUICK, *changes], folder=folder, device="cpu", workers=0, quiet=True, **settings
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(pairs_of_digits(300), tmp_path_factory.mktemp("pairs"), "labels")


@pytest.fixture(scope="module")
def angles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(turned_digits(300), tmp_path_factory.mktemp("angles"), "angle")


@pytest.fixture(scope="module")
def multilabel(pairs: Path) -> Run:
    return trained(str(pairs), pairs.parent / "run", "epochs=4", "evaluations=2")


@pytest.fixture(scope="module")
def regression(angles: Path) -> Run:
    return trained(str(angles), angles.parent / "run", "epochs=4", "evaluations=2")


# ── they learn ──


def test_two_digits_in_one_image_are_learned(tmp_path: Path) -> None:
    run = trained(tuple(pairs_of_digits(2000)), tmp_path / "run", *LEARNING, "epochs=16")
    assert isinstance(run.metrics, MultilabelMetrics)
    assert run.metrics.chance < 0.25
    assert run.metrics.mean_average_precision > 2 * run.metrics.chance
    assert len(run.bundle.task_constants["thresholds"]) == 10
    defaults = {default.field: default for default in run.defaults}
    assert defaults["task"].value == "multilabel"
    assert defaults["task"].reason


def test_the_angle_of_a_digit_is_learned(tmp_path: Path) -> None:
    run = trained(tuple(turned_digits(2000)), tmp_path / "run", *LEARNING, "epochs=16")
    assert isinstance(run.metrics, RegressionMetrics)
    (angle,) = run.metrics.per_column
    assert angle.baseline == pytest.approx(LARGEST_ANGLE / 2, rel=0.1)
    assert angle.mae < 0.7 * angle.baseline
    assert {default.field: default.value for default in run.defaults}["task"] == "regression"


# ── the run ──


@pytest.mark.parametrize("kind", ["pairs", "angles"])
def test_a_stopped_run_resumes_exactly(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vitrail.training import supervised

    data, straight = request.getfixturevalue(kind), {"pairs": "multilabel", "angles": "regression"}[kind]
    run: Run = request.getfixturevalue(straight)
    made, steps = supervised.Supervised.loss, []

    def stop_in_sixth_step(self: Any, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        steps.append(1)
        if len(steps) == 6:
            signal.raise_signal(signal.SIGTERM)
        return made(self, outputs, batch)

    monkeypatch.setattr(supervised.Supervised, "loss", stop_in_sixth_step)
    with pytest.raises(Stopped):
        trained(str(data), tmp_path / "run", "epochs=4", "evaluations=2")
    monkeypatch.undo()
    resumed = trained(str(data), tmp_path / "run", "epochs=4", "evaluations=2")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (run.folder / "metrics.jsonl").read_text()
    assert resumed.bundle.task_constants == run.bundle.task_constants
    for name, tensor in run.bundle.model.state_dict().items():
        assert torch.equal(tensor, resumed.bundle.model.state_dict()[name])
    assert resumed.metrics.as_dict() == run.metrics.as_dict()


def test_a_run_of_each_kind_says_what_it_learned(multilabel: Run, regression: Run) -> None:
    for run, task, first in ((multilabel, "multilabel", "val_map"), (regression, "regression", "val_mae")):
        assert (run.bundle.task, run.metrics.task) == (task, task)
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert first in rows[-1]
        assert f'task = "{task}"' in (run.folder / "recipe.toml").read_text()
        config = json.loads((run.folder / "best" / "config.json").read_text())["vitrail"]
        assert config["task"] == task
        assert config["task_constants"] == run.bundle.task_constants
        assert run.metrics.headline.name in (run.folder / "best" / "README.md").read_text()
        assert run.report is not None
        assert run.metrics.headline.name in Page(run.report).html
        assert "accuracy on" not in Page(run.report).html


def test_evaluation_gives_the_numbers_of_the_run(pairs: Path, angles: Path, multilabel: Run, regression: Run) -> None:
    for run, data in ((multilabel, pairs), (regression, angles)):
        again = vitrail.evaluate(run.folder / "best", str(data), device="cpu", workers=0, precision="float32")
        assert again.headline.value == pytest.approx(run.metrics.headline.value, rel=1e-5)
        assert "evaluated on the test split" in again.summary


def test_fine_tuning_keeps_a_head_of_the_same_outputs(regression: Run, angles: Path, tmp_path: Path) -> None:
    run = trained(str(angles), tmp_path / "run", "steps=1", "data.val=0.3", pretrained=regression.bundle)
    assert run.bundle.task_constants == regression.bundle.task_constants
    assert "fresh head" not in str(run.bundle.provenance)
    other = trained(tuple(pairs_of_digits(80)), tmp_path / "other", "steps=1", pretrained=regression.bundle)
    assert other.bundle.task == "multilabel"
    assert "fresh head" in str(other.bundle.provenance)


# ── predictions ──


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images and a file that is not an image."""
    folder = tmp_path_factory.mktemp("new")
    for number, pixels in enumerate(turned_digits(2, seed=9).images):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "x.png").write_text("not an image")
    return folder


def rows_of(run: Run, new: Path, folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the rows of every format."""
    for suffix in ("jsonl", "csv", "parquet", "txt"):
        vitrail.predict(run.folder / "best", [str(new)], output=folder / f"rows.{suffix}", device="cpu", top=2)
    yield "jsonl", [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    with (folder / "rows.csv").open(newline="") as file:
        yield "csv", list(csv.DictReader(file))
    yield "parquet", pq.read_table(folder / "rows.parquet").to_pylist()


def test_numbers_are_predicted(regression: Run, new: Path, tmp_path: Path) -> None:
    rows = dict(rows_of(regression, new, tmp_path))
    values = [row.get("angle") for row in rows["jsonl"]]
    assert values[2] is None
    assert rows["jsonl"][2]["error"]
    assert [row["angle"] for row in rows["parquet"][:2]] == pytest.approx(values[:2], rel=1e-6)
    assert [row["angle"] for row in rows["csv"]] == [str(value or "") for value in values]
    assert "angle" in (tmp_path / "rows.txt").read_text()
    made = vitrail.predict(regression.bundle, [new / "0.png"], device="cpu")[0]
    assert isinstance(made, ValuePrediction)
    assert made.value == pytest.approx(values[0], rel=1e-5)


def test_labels_are_predicted(multilabel: Run, new: Path, tmp_path: Path) -> None:
    rows = dict(rows_of(multilabel, new, tmp_path))
    first = rows["jsonl"][0]
    assert first.keys() == {"number", "path", "error", "labels", "top_labels", "probabilities"}
    assert rows["parquet"][0]["labels"] == first["labels"]
    assert rows["csv"][0]["labels"] == ";".join(first["labels"])
    assert rows["csv"][0]["label_1"] == first["top_labels"][0]
    limits = dict(zip(multilabel.bundle.classes or (), multilabel.bundle.task_constants["thresholds"], strict=True))
    (made,) = vitrail.predict(multilabel.bundle, [new / "0.png"], device="cpu", top=10)
    assert isinstance(made, LabelsPrediction)
    likely = {name for name, p in zip(made.names, made.probabilities, strict=True) if p >= limits[name]}
    assert set(made.labels) == likely


def test_a_classifier_is_another_thing(multilabel: Run) -> None:
    with pytest.raises(ConfigError, match="the model's task is multilabel, not classification"):
        vitrail.Classifier(multilabel.folder / "best", device="cpu")
    with pytest.raises(DataError, match="predicts several labels per image, but the data has one class per image"):
        vitrail.evaluate(multilabel.folder / "best", "digits", device="cpu", workers=0)


def test_exported_graphs_say_what_their_outputs_are(regression: Run, multilabel: Run, tmp_path: Path) -> None:
    import onnx

    for run in (regression, multilabel):
        target = tmp_path / f"{run.bundle.task}.onnx"
        done = vitrail.export(run.folder / "best", target)
        assert done.metadata["task"] == run.bundle.task
        assert done.metadata["task_constants"] == run.bundle.task_constants
        assert done.metadata["classes"] == list(run.bundle.classes or ())
        stored = {one.key: one.value for one in onnx.load(target).metadata_props}
        assert json.loads(stored["task_constants"]) == run.bundle.task_constants


def test_explanations_are_about_a_column_or_a_label(regression: Run, multilabel: Run, new: Path) -> None:
    angle = vitrail.explain(regression.folder / "best", new / "0.png", device="cpu")
    assert angle.target == "angle"
    assert angle.caption.startswith("relevance for angle, ")
    assert angle.probability is None
    label = vitrail.explain(multilabel.folder / "best", new / "0.png", target="3", device="cpu")
    assert label.target == "3"
    assert label.probability is not None


def test_a_sweep_compares_by_the_criterion(angles: Path, tmp_path: Path) -> None:
    swept = vitrail.sweep(
        str(angles), over={"objective.loss": ["l1", "huber"]}, changes=[*QUICK, "steps=2", "evaluations=1"],
        folder=tmp_path / "sweep", device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    assert swept.task.name == "regression"
    assert len(swept.runs) == 2
    assert swept.criterion == "mae"


# ── bad input ──


def test_settings_that_do_not_fit(pairs: Path, angles: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="criterion is 'accuracy'; choose from map, macro_f1, exact_match, loss"):
        trained(str(pairs), tmp_path / "a", "criterion=accuracy")
    with pytest.raises(ConfigError, match=r"objective\.loss is softmax, but the task regression does not support it"):
        trained(str(angles), tmp_path / "b", "task=regression", "objective.loss=softmax")
    with pytest.raises(ConfigError, match="the task regression cannot learn from a teacher"):
        trained(
            str(angles),
            tmp_path / "c",
            teacher=vitrail.Bundle(vitrail.create("Ti/16", classes=2), vitrail.Preprocess()),
        )
    assert not list(tmp_path.iterdir())


def test_thresholds_are_tuned_on_the_validation_split(multilabel: Run, pairs: Path) -> None:
    metrics = vitrail.evaluate(
        multilabel.folder / "best", str(pairs), split="val", device="cpu", workers=0, precision="float32"
    )
    assert isinstance(metrics, MultilabelMetrics)
    untuned = Multilabel().thresholds_of(10)
    thresholds = [row.threshold for row in metrics.per_label]
    assert thresholds == pytest.approx(multilabel.bundle.task_constants["thresholds"])
    assert thresholds != list(untuned)
    assert np.all(np.array(thresholds) > 0)
