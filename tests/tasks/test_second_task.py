"""The task interface is complete: a second task in this one file trains, resumes, evaluates, predicts and reports.

The toy task reads the class names as numbers and learns the number: one output, mean squared error. It touches nothing
of the package but the table of tasks.
"""

import csv
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from tests.support.browser import chromium
from tests.support.html_page import Page
from tests.support.memory_jobs import job
from tests.support.page_visit import DESKTOP, service, visit
from tests.support.service_in_process import PNG, settings_for, with_client
from torch import Tensor

import vitrail
from vitrail.data.sources.source import Source
from vitrail.errors import CheckpointError, ConfigError, Diverged, InputError
from vitrail.inference.bulk_prediction import predict_files
from vitrail.metrics.intervals import Interval, bootstrap_mean
from vitrail.serving.app import Service
from vitrail.tasks import lookup
from vitrail.tasks.metrics import Metric, Metrics, MetricSpec, ResultTable
from vitrail.tasks.objective import Objective
from vitrail.tasks.task import FieldType, Prediction, Predictions, RowFormat, Task, TrainingLoss
from vitrail.training.curves import curve_charts
from vitrail.training.defaults import resolve_defaults
from vitrail.training.memory import forecast
from vitrail.training.plan import DataFacts
from vitrail.training.recipe_files import read_recipe
from vitrail.training.sessions import Stopped
from vitrail.training.train import Run

SETTINGS = ["task=counting", "model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4",
            "model.stem=conv", "batch=64", "epochs=4", "evaluations=2", "optimizer.lr=0.02",
            "precision=float32"]  # fmt: skip


# ── the task ──

ERROR = MetricSpec("mean absolute error", "number", lower_is_better=True, ends=(0.0, None))
LOSS = MetricSpec("loss", "number", lower_is_better=True, key="val_loss")


@dataclass(frozen=True, eq=False, kw_only=True)
class CountingMetrics(Metrics):
    task: ClassVar[str] = "counting"
    error: float
    error_interval: Interval
    errors: dict[str, float]

    @property
    def headline(self) -> Metric:
        return Metric(ERROR, self.error, self.error_interval)

    @property
    def numbers(self) -> list[Metric]:
        return [self.headline]

    @property
    def details(self) -> dict[str, Any]:
        return {"error": self.error, "error_interval": list(self.error_interval), "errors": self.errors}

    @property
    def clauses(self) -> list[str]:
        return [f"the largest error is that of {max(self.errors, key=self.errors.__getitem__)}"]

    @property
    def tables(self) -> list[ResultTable]:
        rows = [(name, f"{error:.2f}") for name, error in self.errors.items()]
        return [ResultTable("Errors", ("number", "error"), rows, ("error",))]


@dataclass(frozen=True)
class Count(Prediction):
    value: float | None = None

    def fields(self) -> dict[str, Any]:
        return {"value": self.value}

    def response(self) -> dict[str, Any]:
        return {"value": self.value}


class CountRows(RowFormat):
    types: ClassVar[Mapping[str, FieldType]] = {"value": "float"}
    schema: ClassVar[Mapping[str, Any]] = {"value": {"type": "number"}}
    title: ClassVar[tuple[str, str, str]] = ("value", "", "")

    def csv_header(self, top: int) -> list[str]:
        return ["value"]

    def csv_cells(self, fields: Mapping[str, Any], top: int) -> list[Any]:
        return [fields["value"]]

    def table_cells(self, fields: Mapping[str, Any]) -> tuple[str, str, str]:
        return f"{fields['value']:.2f}", "", ""


class Counting(Task):
    name = "counting"
    activation = "none"
    training_metric = ERROR._replace(key="absolute_error")
    criteria: ClassVar[Mapping[str, MetricSpec]] = {"error": ERROR._replace(key="val_absolute_error"), "loss": LOSS}
    rows = CountRows()
    sections = ("tables", "curves", "model", "inside", "data", "reproduce")
    metrics = CountingMetrics

    def outputs(self, classes: Sequence[str]) -> int:
        return 1

    def output_names(self, classes: Sequence[str]) -> None:
        return None

    def match(self, source: Source, names: object, outputs: int, *, by_number: bool = False) -> Source:
        return source

    def targets(self, labels: NDArray[np.int64], classes: Sequence[str]) -> NDArray[np.float32]:
        return np.array([float(name) for name in classes], np.float32)[labels]

    def training_loss(
        self,
        objective: Objective,
        labels: object,
        classes: Sequence[str],
        device: torch.device,
    ) -> TrainingLoss:
        values = torch.from_numpy(self.targets(np.arange(len(classes)), classes)).to(device)

        def loss(outputs: Tensor, labels: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor]:
            assert lam is None
            apart = outputs.float()[:, 0] - values[labels]
            return apart.square().mean(), apart.detach().abs().sum()

        return loss

    def default_criterion(self, *, class_balanced: bool) -> str:
        return "error"

    def _apart(self, predictions: Predictions, classes: Sequence[str]) -> NDArray[np.float64]:
        wanted = self.targets(predictions.labels, classes)
        return np.asarray(predictions.outputs[:, 0].astype(np.float64) - wanted)

    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:
        apart = self._apart(predictions, classes)
        return {"val_absolute_error": float(np.abs(apart).mean()), "val_loss": float(np.square(apart).mean())}

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs

    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> CountingMetrics:
        errors = np.abs(self._apart(predictions, source.classes))
        return CountingMetrics(
            images=len(errors), kind=kind, bad=predictions.bad, error=float(errors.mean()),
            error_interval=bootstrap_mean(errors),
            errors={source.classes[c]: float(errors[predictions.labels == c].mean()) for c in set(predictions.labels)},
        )  # fmt: skip

    def predict(self, outputs: Tensor, names: object, top: int) -> list[Count]:
        return [Count(round(value, 4)) for value in outputs[:, 0].tolist()]

    def unread(self, error: str) -> Count:
        return Count(error=error)

    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        return {"value": predictions.outputs[:, 0], "absolute_error": np.abs(self._apart(predictions, classes))}


# ── the proof ──


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """Add the task to the table."""
    lookup.TASKS["counting"] = Counting()
    yield
    del lookup.TASKS["counting"]


def trained(folder: Path) -> Run:
    return vitrail.train("digits", changes=SETTINGS, folder=folder, device="cpu", workers=0, quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, known: None) -> Run:
    return trained(tmp_path_factory.mktemp("counting") / "run")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two digits and a file that is not an image."""
    from PIL import Image

    from vitrail.data.sources.source import digits

    folder, source = tmp_path_factory.mktemp("images"), digits()
    for index in (0, 1):
        Image.fromarray(np.asarray(source.read(index))).save(folder / f"{index}.png")
    (folder / "x.png").write_text("not an image")
    return folder


def test_it_trains(run: Run) -> None:
    assert isinstance(run.metrics, CountingMetrics)
    assert run.metrics.error < 2.2, "always predicting the mean gives 2.5"
    assert run.summary.startswith("mean absolute error ")
    assert (run.bundle.task, run.bundle.classes, run.bundle.model.config.classes) == ("counting", None, 1)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "absolute_error"} <= rows[0].keys()
    validations = {row["step"]: row for row in rows if "val_loss" in row}
    best = min(validations.values(), key=lambda row: row["val_absolute_error"])
    assert rows[-1]["best"] == best["step"], "the lowest error selects the checkpoint"
    log = (run.folder / "log.txt").read_text()
    assert "error " in log
    assert "accuracy" not in log
    assert "mean absolute error" in (run.folder / "best" / "README.md").read_text()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, known: None) -> Run:
    """The same run, stopped in its fifth step and resumed."""
    folder, made, steps = tmp_path_factory.mktemp("resumed") / "run", Counting.training_loss, []

    def stopping(self: Counting, *arguments: Any) -> TrainingLoss:
        loss = made(self, *arguments)

        def stop_in_fifth_step(outputs: Tensor, labels: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor]:
            steps.append(len(labels))
            if len(steps) == 5:
                signal.raise_signal(signal.SIGTERM)
            return loss(outputs, labels, lam)

        return stop_in_fifth_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counting, "training_loss", stopping)
        with pytest.raises(Stopped):
            trained(folder)
    assert len(steps) == 5
    return trained(folder)


def test_it_resumes(run: Run, resumed: Run) -> None:
    assert (resumed.folder / "metrics.jsonl").read_text() == (run.folder / "metrics.jsonl").read_text()
    for name, tensor in run.bundle.model.state_dict().items():
        assert torch.equal(tensor, resumed.bundle.model.state_dict()[name])


def test_it_evaluates(run: Run) -> None:
    metrics = vitrail.evaluate(run.folder / "best", "digits", device="cpu", workers=0)
    assert isinstance(metrics, CountingMetrics)
    assert isinstance(run.metrics, CountingMetrics)
    assert metrics.error == pytest.approx(run.metrics.error, rel=1e-5)
    assert "evaluated on the test split" in metrics.summary
    assert CountingMetrics.from_dict(json.loads(json.dumps(metrics.as_dict()))).as_dict() == metrics.as_dict()


def test_it_predicts(run: Run, images: Path, tmp_path: Path) -> None:
    for suffix in ("jsonl", "csv", "parquet", "txt"):
        predict_files(run.folder / "best", [str(images)], output=tmp_path / f"rows.{suffix}", device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [os.path.basename(row["path"]) for row in rows] == ["0.png", "1.png", "x.png"]
    assert [isinstance(row["value"], float) for row in rows] == [True, True, False]
    assert rows[2]["error"]
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [row["value"] for row in csv.DictReader(file)] == [str(row["value"] or "") for row in rows]
    values = pq.read_table(tmp_path / "rows.parquet")["value"].to_pylist()
    assert values == pytest.approx([rows[0]["value"], rows[1]["value"], None])
    assert f"{rows[0]['value']:.2f}" in (tmp_path / "rows.txt").read_text()
    with pytest.raises(ConfigError, match="the model's task is counting, not classification"):
        vitrail.Classifier(run.folder / "best", device="cpu")


def test_it_reports(run: Run, resumed: Run, tmp_path: Path) -> None:
    page = Page(run.folder / "report.html")
    assert re.search(r"<h1>Mean absolute error \d\.\d+ on 359 held-out images</h1>", page.html)
    assert list(page.sections) == ["", "result", "tables", "curves", "model", "inside", "data", "reproduce"]
    assert "The largest error is that of" in page.html
    assert "<caption>Errors" in page.html
    assert "label smoothing" not in page.html
    assert "Accuracy" not in page.html
    both = Page(vitrail.report(run.folder, resumed.folder, tmp_path / "both.html"))
    assert "Mean absolute error" in both.html
    assert "pairs" not in both.sections, "only classifiers are compared image by image"
    columns = pq.read_table(run.folder / "test_predictions.parquet").column_names
    assert columns == ["index", "name", "digest", "value", "absolute_error"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, known: None) -> Run:
    changes = [*(change for change in SETTINGS if "task" not in change and "epochs" not in change), "steps=2"]
    folder = tmp_path_factory.mktemp("classifier") / "run"
    return vitrail.train("digits", changes=changes, folder=folder, device="cpu", workers=0, quiet=True)


def test_runs_of_two_tasks_have_no_winner(run: Run, classifier: Run, tmp_path: Path) -> None:
    page = Page(vitrail.report(run.folder, classifier.folder, tmp_path / "both.html"))
    assert "Different tasks: A is counting, B is classification" in page.html
    assert "is better" not in page.html
    assert list(page.sections) == ["", "result", "settings", "reproduce"]
    assert "Mean absolute error" in page.html
    assert "Macro-F1" in page.html


# ── explanations ──


def test_it_explains(run: Run, images: Path) -> None:
    explanation = vitrail.explain(run.folder / "best", images / "0.png", device="cpu")
    (prediction,) = vitrail.predict(run.folder / "best", [images / "0.png"], device="cpu")
    assert isinstance(prediction, Count)
    assert prediction.value is not None
    assert (explanation.target, explanation.probability, explanation.confidence) == ("output 0", None, None)
    assert explanation.value is not None
    assert float(explanation.value) == pytest.approx(prediction.value, abs=0.001)
    assert explanation.caption == f"relevance for output 0, {explanation.value}"
    assert "%" not in repr(explanation)
    assert explanation.notes == {
        "method": "relevance", "target": "output 0", "output": "output 0", "target_value": explanation.value,
        "value": explanation.value,
    }  # fmt: skip
    attended = vitrail.explain(run.folder / "best", images / "0.png", method="rollout", device="cpu")
    assert attended.caption == f"rollout; predicted output 0, {explanation.value}"
    with pytest.raises(InputError, match="output 5 does not exist: this model has outputs 0 to 0"):
        vitrail.explain(run.folder / "best", images / "0.png", target=5, device="cpu")


@pytest.mark.slow
def test_the_explorer_page_shows_no_classes(run: Run, images: Path) -> None:
    with (
        chromium() as browser,
        service({"counting": run.folder / "best"}) as address,
        visit(browser, DESKTOP) as seen,
    ):
        seen.open(f"{address}#model=counting&method=relevance")
        seen.page.set_input_files("#file", images / "0.png")
        seen.until("image=own")
        seen.settle()
        assert seen.part("bars").locator("li").count() == 0
        assert seen.part("predictions-note").inner_text() == "This model does not classify whole images."
        assert re.fullmatch(r"Evidence for output 0: [\d.]+\.", seen.part("readout").inner_text())
        assert seen.complaints == []


# ── at the border of the package ──


def test_it_refuses_settings_about_classes(tmp_path: Path) -> None:
    for change, name in {
        "objective.loss=sigmoid": "objective.loss is sigmoid",
        "objective.label_smoothing=0.2": "objective.label_smoothing is 0.2",
        "objective.class_weights=balanced": "objective.class_weights is balanced",
        "data.balance=true": "data.balance is true",
        "mixing.mixup=0.2": "mixing is on",
    }.items():
        with pytest.raises(ConfigError, match=f"^{name}, but the task counting does not support it; leave it out$"):
            vitrail.train("digits", changes=[*SETTINGS, change], folder=tmp_path / "run", device="cpu", quiet=True)
    recipe = read_recipe("cifar10", ["task=counting"])
    assert recipe.mixing is None, "what a bundled recipe says about classes is dropped"
    assert recipe.objective == Objective()
    plan = resolve_defaults(read_recipe("scratch-small", ["task=counting"]), facts("cuda"), None)
    assert not plan.mixing.on, "also by default on a GPU"
    assert resolve_defaults(read_recipe("scratch-small"), facts("cuda"), None).mixing.on


def facts(device: str) -> DataFacts:
    return DataFacts(10_000, tuple("0123456789"), 32, grey=False, device=device)


def test_the_memory_forecast_uses_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made, called = Counting.training_loss, []

    def remembering(self: Counting, *arguments: Any) -> TrainingLoss:
        called.append(arguments[2])
        return made(self, *arguments)

    monkeypatch.setattr(Counting, "training_loss", remembering)
    assert forecast(job(task="counting", objective=Objective())).total > 0
    assert called == [tuple("0123456789")]


def test_a_classifiers_head_is_not_kept(run: Run, classifier: Run, tmp_path: Path) -> None:
    def tuned(*changes: str, pretrained: Run) -> Run:
        return vitrail.train(
            "digits", changes=["task=counting", "steps=1", *changes], pretrained=pretrained.bundle,
            folder=tmp_path / str(len(list(tmp_path.iterdir()))), device="cpu", workers=0, quiet=True,
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"head is 'keep', but the model's task is classification and .* is counting"):
        tuned("pretrained.head=keep", pretrained=classifier)
    other = tuned(pretrained=classifier)
    assert (other.bundle.task, other.bundle.model.config.classes) == ("counting", 1)
    assert 'head = "fresh"' in (other.folder / "recipe.toml").read_text()
    assert "adapted" not in tuned("pretrained.head=keep", pretrained=run).bundle.provenance, "its own head is kept"


def test_other_formats_lose_the_task(run: Run, tmp_path: Path) -> None:
    done = vitrail.convert(run.folder / "best", tmp_path / "model.pth", to="timm")
    assert done.notes[0] == "timm does not record the task, counting: it opens the model as a classifier"
    assert not vitrail.convert(run.folder / "best", tmp_path / "copy").notes
    with pytest.raises(ConfigError, match="the model's task is counting, so its outputs are not classes"):
        vitrail.load(run.folder / "best", classes=5)
    card = (run.folder / "best" / "README.md").read_text()
    assert "tags: [vision-transformer]" in card
    assert "- Task: counting" in card
    assert "- Outputs: 1, without names" in card
    assert "lass" not in card


# ── the criterion ──


@pytest.mark.slow
def test_a_criterion_that_is_not_finite_selects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validation, given = Counting.validation, []

    def first_is_nan(self: Counting, *arguments: Any) -> dict[str, float]:
        rows = validation(self, *arguments)
        given.append(rows["val_absolute_error"])
        return rows if len(given) > 1 else {**rows, "val_absolute_error": float("nan")}

    asked: list[float] = []

    def standard_error(self: Counting, criterion: str, value: float, images: int) -> None:
        asked.append(value)

    monkeypatch.setattr(Counting, "validation", first_is_nan)
    monkeypatch.setattr(Counting, "standard_error", standard_error)
    run = trained(tmp_path / "first")
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    best = [row["best"] for row in rows if "best" in row]
    assert best[0] == 0
    assert best[1] > 0
    assert len(given) == len(best)
    assert set(asked) <= set(given), "the metric itself, not negated"

    def always_nan(self: Counting, *arguments: Any) -> dict[str, float]:
        return {**validation(self, *arguments), "val_absolute_error": float("nan")}

    monkeypatch.setattr(Counting, "validation", always_nan)
    with pytest.raises(Diverged, match="the mean absolute error on the validation split was never finite"):
        trained(tmp_path / "never")


def test_it_exports_and_is_served(run: Run, images: Path, tmp_path: Path) -> None:
    done = vitrail.export(run.folder / "best", tmp_path / "model.pt2", to="torch")
    assert (done.metadata["task"], done.metadata["activation"]) == ("counting", "none")
    assert done.check.agreement.prediction == ""
    assert done.check.agreement.change == done.check.relative
    measured = vitrail.bench(run.folder / "best", engines=["torch"], batches=[1], seconds=0.01, device="cpu")
    assert measured.compared == "outputs"

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        model = (await client.get("/v1/models")).json()["models"][0]
        assert (model["task"], model["classes"]) == ("counting", None)
        body = (images / "0.png").read_bytes()
        response = (await client.post("/v1/predict", content=body, headers=PNG)).json()
        assert isinstance(response["results"][0]["value"], float)
        explained = (await client.post("/v1/explain", content=body, headers=PNG)).json()["results"][0]["target"]
        assert explained == {
            "name": "output 0",
            "index": 0,
            "value": pytest.approx(response["results"][0]["value"], abs=1e-4),
        }

    with_client(settings_for(run.folder / "best"), ask)


def test_an_unknown_task(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(lookup.TASKS, "counting")
    with pytest.raises(CheckpointError, match="trained for the task 'counting', which this version"):
        vitrail.evaluate(run.folder / "best", "digits", device="cpu")
    with pytest.raises(ConfigError, match=r"no task is called 'clasification'.*did you mean 'classification'"):
        vitrail.train("digits", changes=["task=clasification"], folder=tmp_path / "run", device="cpu", quiet=True)


# ── metrics ──


def test_a_percentage_is_named() -> None:
    """Only "93.1% on 359 held-out images" of a classifier is understood as its accuracy."""

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Overlap(Metrics):
        @property
        def headline(self) -> Metric:
            return Metric(MetricSpec("mIoU"), 0.631)

        @property
        def numbers(self) -> list[Metric]:
            return [self.headline]

        @property
        def details(self) -> dict[str, Any]:
            return {}

    assert Overlap(images=500, kind="held-out images").summary == "mIoU 63.1% on 500 held-out images"


def test_numbers_have_significant_digits() -> None:
    shown = [Metric(ERROR, value, Interval(value, 2 * value)) for value in (0.00042, 0.117, 253412.7)]
    assert [metric.text for metric in shown] == ["0.00042", "0.117", "253,413"]
    assert shown[0].interval_text == "95% interval 0.00042–0.00084"


def test_a_criterion_says_where_its_axis_ends() -> None:
    class Signed(Counting):
        criteria: ClassVar[Mapping[str, MetricSpec]] = {"r2": MetricSpec("R²", "number", key="val_r2"), "loss": LOSS}

    rows = [{"step": step, "loss": 1.0, "absolute_error": -4.0} for step in (1, 2)]
    rows += [{"step": 2, "val_r2": -3.5, "val_loss": 1.0, "best": 2}]
    _, chart, *_ = curve_charts(rows, Signed())
    ticks = [float(tick) for tick in re.findall(r">(-\d\.\d+)</text>", chart)]
    assert -4.5 < min(ticks) < max(ticks) < -3, "the axis does not reach up to 0"
    assert "kept: -3.500" in chart
    assert Counting.criteria["error"].axis == (0.0, None)
    assert MetricSpec("accuracy").axis == (0.0, 1.0)
