"""Regression as a task: its losses, constants, predictions and metrics."""

import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sources.matching import Retargeted
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.targets import Targets
from vitrail.errors import CheckpointError, DataError
from vitrail.tasks.lookup import task_named
from vitrail.tasks.objective import Objective
from vitrail.tasks.regression import Regression, ValuePrediction, ValueRows
from vitrail.tasks.regression_metrics import RegressionMetrics
from vitrail.tasks.task import Predictions

CPU = torch.device("cpu")
NAMES = ("age", "height")


def source(values: Any, names: tuple[str, ...] = NAMES) -> Retargeted:
    numbers = np.asarray(values, np.float64)
    images = Arrays(np.zeros((len(numbers), 4, 4), np.uint8), np.zeros(len(numbers), np.int64), ("all",))
    return Retargeted(images, Targets("values", names, numbers))


def predictions(predicted: Any, true: Any) -> Predictions:
    return Predictions(np.asarray(predicted, np.float64), np.asarray(true, np.float64), np.arange(len(true)))


# ── the loss ──


@pytest.mark.parametrize("kind", ["l2", "l1", "huber"])
def test_loss_and_gradient_are_those_of_plain_torch(kind: Literal["l2", "l1", "huber"]) -> None:
    torch.manual_seed(0)
    labels = np.random.default_rng(0).normal((30, 1.7), (9, 0.2), (16, 2))
    task = Regression().fitted(labels)
    wanted = torch.from_numpy((labels - labels.mean(axis=0)) / labels.std(axis=0))
    plain_loss = {"l2": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}[kind]
    ours, plain = (torch.zeros(16, 2, dtype=torch.float64).requires_grad_() for _ in range(2))
    for tensor in (ours, plain):
        tensor.data.copy_(torch.randn(16, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    compute = task.training_loss(Objective(loss=kind), labels, NAMES, CPU)
    actual, total = compute(ours, torch.from_numpy(labels), None)
    expected = plain_loss(plain, wanted)
    actual.backward()
    expected.backward()
    assert torch.allclose(actual, expected, atol=1e-12)
    assert ours.grad is not None
    assert plain.grad is not None
    assert torch.allclose(ours.grad, plain.grad, atol=1e-12)
    assert float(total) == pytest.approx(float((ours - wanted).abs().mean(dim=1).sum().detach()))


def test_the_error_of_one_column_is_in_its_unit() -> None:
    labels = np.array([[1000.0], [1100.0], [1200.0]])
    compute = Regression().fitted(labels).training_loss(Objective(), labels, ("year",), CPU)
    _, total = compute(torch.zeros(3, 1), torch.from_numpy(labels), None)  # 0 is the mean, 1100
    assert float(total) == pytest.approx(200.0, rel=1e-6)


def test_a_year_keeps_its_digits() -> None:
    labels = np.array([[1990.0], [1990.25], [1991.0]])
    task = Regression().fitted(labels)
    outputs = torch.from_numpy((labels - labels.mean()) / labels.std()).float()
    assert task.activate(outputs).numpy() == pytest.approx(labels, abs=1e-5)
    assert [one.value for one in task.predict(outputs, ("year",), 5)] == [1990.0, 1990.25, 1991.0]


def test_a_constant_column_is_not_divided_by_zero() -> None:
    task = Regression().fitted(np.array([[0.1, 3.0], [0.1, 5.0]] * 3))
    assert task.std == (1.0, 1.0)
    assert task.mean == pytest.approx((0.1, 4.0))


# ── constants ──


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), st.integers(1, 3))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_constants_return_from_the_bundle(values: list[float], columns: int) -> None:
    task = Regression().fitted(np.repeat(np.array(values)[:, None], columns, axis=1))
    assert task_named("regression").with_constants(json.loads(json.dumps(task.constants)), columns) == task
    outputs = torch.randn(3, columns)
    back = (task.activate(outputs).numpy() - np.array(task.mean)) / np.array(task.std)
    assert back == pytest.approx(outputs.numpy(), abs=1e-3)


@pytest.mark.parametrize(
    "change",
    [{"mean": None}, {"std": [1.0]}, {"std": [1.0, 0.0]}, {"median": [1.0, "a"]}, {"mean": [1.0, float("nan")]}],
)
def test_constants_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="the bundle's task_constants"):
        Regression().with_constants({"mean": [1.0, 2.0], "std": [1.0, 1.0], "median": [1.0, 1.0], **change}, 2)


# ── predictions and metrics ──


def test_rows_have_a_field_for_each_column() -> None:
    task = Regression((10.0, 0.0), (2.0, 1.0), (10.0, 0.0))
    (made,) = task.predict(torch.tensor([[1.0, -0.5]]), ("age", "path"), 5)
    assert made.fields() == {"age": 12.0, "path (predicted)": -0.5}
    assert made.response() == {"values": [{"name": "age", "value": 12.0}, {"name": "path", "value": -0.5}]}
    rows = task.row_format(("age", "path"))
    assert rows.types == {"age": "float", "path (predicted)": "float"}
    assert rows.csv_cells(made.fields(), 1) == [12.0, -0.5]
    assert rows.csv_cells(ValuePrediction(error="gone").fields(), 1) == ["", ""]
    assert rows.table_cells(made.fields()) == ("age", "12.00", "path (predicted) -0.500")
    assert isinstance(task.row_format(None), ValueRows)
    assert repr(made) == "ValuePrediction(age 12.00, path -0.500)"
    with pytest.raises(DataError, match=r"the model predicts 2 numbers, age, path; use \.values"):
        _ = made.value


def test_metrics_of_one_column() -> None:
    true = np.arange(20.0)[:, None]
    task = Regression().fitted(true)
    metrics = task.evaluate(predictions(true + 0.5, true), source(true, ("age",)), kind="held-out images")
    assert metrics.summary.startswith("mean absolute error 0.500 on 20 held-out images")
    assert "always the median gives 5.000" in metrics.summary
    assert metrics.headline.name == "mean absolute error"
    assert metrics.warnings == ()
    assert RegressionMetrics.from_dict(json.loads(json.dumps(metrics.as_dict()))).as_dict() == metrics.as_dict()
    useless = task.evaluate(predictions(np.full_like(true, 3.0), true), source(true, ("age",)), kind="images")
    assert "the column age is predicted no better than by always giving the median" in useless.warnings[0]


def test_metrics_of_several_columns_are_in_standard_deviations() -> None:
    true = np.stack([np.arange(20.0), 100 * np.arange(20.0)], axis=1)
    predicted = true + np.array([1.0, 0.0])
    task = Regression().fitted(true)
    metrics = task.evaluate(predictions(predicted, true), source(true), kind="images")
    assert metrics.scaled_mae == pytest.approx(0.5 / np.arange(20.0).std())
    assert metrics.headline.name == "mean absolute error in standard deviations"
    assert [one.name for one in metrics.numbers][1] == "mean absolute error of age"
    assert task.validation(predictions(predicted, true), NAMES)["val_mae"] == pytest.approx(metrics.scaled_mae)
    assert "weakest column age" in metrics.summary
    assert metrics.tables[1].rows[0][1:3] == ("0.000", "1.000")


def test_columns_are_matched_by_name() -> None:
    data = source([[1.0, 2.0], [3.0, 4.0]], ("height", "age"))
    matched = Regression().match(data, ("age",), 1)
    assert isinstance(matched, Retargeted)
    assert matched.targets.values.tolist() == [[2.0], [4.0]]
    with pytest.raises(DataError, match="the model predicts the column 'weight', which the data does not have"):
        Regression().match(data, ("weight",), 1)
    with pytest.raises(DataError, match=r"image 1 has no value, so predictions cannot be evaluated"):
        Regression().match(source([[1.0, 2.0], [np.nan, np.nan]]), NAMES, 2)
    with pytest.raises(DataError, match="predicts numbers, but the data has several labels per image"):
        Regression().match(Retargeted(data.base, Targets("labels", ("a",), np.ones((2, 1), np.uint8))), NAMES, 2)
