"""Multi-label classification as a task: its loss, thresholds, predictions and metrics."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitrail.data.sources.matching import Retargeted
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.targets import Targets
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.tasks.lookup import task_named
from vitrail.tasks.multilabel import LabelsPrediction, Multilabel, positive_weights
from vitrail.tasks.multilabel_metrics import MultilabelMetrics
from vitrail.tasks.objective import Objective
from vitrail.tasks.task import Predictions

NAMES = ("cat", "dog", "outdoor")
CPU = torch.device("cpu")


def source(values: Any, names: tuple[str, ...] = NAMES) -> Retargeted:
    truth = np.asarray(values, np.uint8)
    images = Arrays(np.zeros((len(truth), 4, 4), np.uint8), np.zeros(len(truth), np.int64), ("other",))
    return Retargeted(images, Targets("labels", names, truth))


def predictions(probabilities: Any, truth: Any) -> Predictions:
    indices = np.arange(len(truth))
    return Predictions(np.asarray(probabilities, np.float32), np.asarray(truth, np.uint8), indices)


def loss_of(objective: Objective, truth: np.ndarray[Any, Any], outputs: Tensor, lam: Tensor | None = None) -> Tensor:
    compute = Multilabel().training_loss(objective, truth, NAMES, CPU)
    return compute(outputs, torch.from_numpy(truth), lam)[0]


# ── the loss ──


def test_loss_and_gradient_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    truth = np.random.default_rng(0).integers(0, 2, (8, 3)).astype(np.uint8)
    ours, plain = (torch.randn(8, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    plain.data.copy_(ours.data)
    actual = loss_of(Objective(), truth, ours)
    expected = -(
        torch.from_numpy(truth) * plain.sigmoid().log() + (1 - torch.from_numpy(truth)) * (1 - plain.sigmoid()).log()
    ).mean()
    actual.backward()
    expected.backward()
    assert torch.allclose(actual, expected, atol=1e-12)
    assert ours.grad is not None
    assert plain.grad is not None
    assert torch.allclose(ours.grad, plain.grad, atol=1e-12)


def test_smoothing_and_mixing_change_the_targets() -> None:
    truth = np.array([[1, 0, 0], [0, 1, 1]], np.uint8)
    outputs, lam = torch.zeros(2, 3).double() + 0.3, torch.full((2,), 0.75).double()
    mixed = torch.tensor([[0.75, 0.25, 0.25], [0.25, 0.75, 0.75]]).double()
    expected = F.binary_cross_entropy_with_logits(outputs, mixed * 0.9 + 0.05)
    assert torch.allclose(loss_of(Objective(label_smoothing=0.1), truth, outputs, lam), expected)


def test_balanced_weights_are_negatives_over_positives() -> None:
    truth = np.array([[1, 0, 0]] * 1 + [[0, 0, 1]] * 3, np.uint8)
    weights = positive_weights(truth, NAMES, Objective(class_weights="balanced"))
    assert weights is not None
    assert weights.tolist() == pytest.approx([3.0, 4.0, 1 / 3])
    outputs = torch.randn(4, 3)
    expected = F.binary_cross_entropy_with_logits(outputs, torch.from_numpy(truth).float(), pos_weight=weights)
    assert torch.allclose(loss_of(Objective(class_weights="balanced"), truth, outputs), expected)
    with pytest.raises(ConfigError, match="class_weights has 2 numbers, but there are 3 labels"):
        positive_weights(truth, NAMES, Objective(class_weights=(1.0, 2.0)))


def test_other_losses_are_refused() -> None:
    (fault,) = Multilabel().check(Objective(loss="softmax"), None, balance=False)
    assert fault == "objective.loss is softmax, but the task multilabel does not support it; choose sigmoid"
    assert Multilabel().resolved(Objective()).loss == "sigmoid"
    assert "data.balance is True" in Multilabel().check(Objective(), None, balance=True)[0].replace("true", "True")


# ── thresholds ──


def test_thresholds_come_from_the_validation_split_and_return_from_the_bundle() -> None:
    probabilities = np.array([[0.9, 0.1, 0.2], [0.8, 0.3, 0.1], [0.1, 0.2, 0.6], [0.2, 0.05, 0.7]])
    truth = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1]])
    task = Multilabel().tuned(predictions(probabilities, truth))
    assert task.thresholds == pytest.approx((0.5, 0.15, 0.4))
    recorded = json.loads(json.dumps(task.constants))
    assert task_named("multilabel").with_constants(recorded, 3) == task
    made = task.predict(torch.logit(torch.from_numpy(probabilities)), NAMES, 2)
    assert [one.labels for one in made] == [("cat",), ("cat", "dog"), ("outdoor", "dog"), ("outdoor",)]
    assert made[1].names == ("cat", "dog")
    assert made[1].probabilities == pytest.approx((0.8, 0.3), abs=1e-6)


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.5, 0.5, 1.0], [0.5, 0.5, "high"], "0.5", [0.1, 0.2, None]])
def test_thresholds_that_do_not_fit_are_refused(values: object) -> None:
    with pytest.raises(CheckpointError, match="should have 3 thresholds between 0 and 1, found"):
        Multilabel().with_constants({"thresholds": values}, 3)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_tuned_thresholds_never_lower_macro_f1(labels: int, images: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    probabilities = generator.random((images, labels)).round(2)
    truth = generator.integers(0, 2, (images, labels))
    truth[0] = 1
    names = tuple(map(str, range(labels)))
    made, own = predictions(probabilities, truth), source(truth, names)
    tuned = Multilabel().tuned(made).evaluate(made, own, kind="images")
    assert tuned.macro_f1 >= Multilabel().evaluate(made, own, kind="images").macro_f1 - 1e-12
    assert MultilabelMetrics.from_dict(json.loads(json.dumps(tuned.as_dict()))).as_dict() == tuned.as_dict()


# ── predictions and metrics ──


def test_rows() -> None:
    (made,) = Multilabel().predict(torch.tensor([[2.0, 1.0, -3.0]]), NAMES, 2)
    assert made.fields() == {
        "labels": ("cat", "dog"),
        "top_labels": ("cat", "dog"),
        "probabilities": made.probabilities,
    }
    rows = Multilabel().row_format(NAMES)
    assert rows.csv_header(2) == ["labels", "label_1", "probability_1", "label_2", "probability_2"]
    assert rows.csv_cells(made.fields(), 3)[0] == "cat;dog"
    assert len(rows.csv_cells(made.fields(), 3)) == 7
    assert rows.csv_cells(LabelsPrediction(error="gone").fields(), 1) == ["", "", ""]
    assert rows.table_cells(made.fields()) == ("cat, dog", "88.1%", "cat 88.1%, dog 73.1%")
    (none,) = Multilabel().predict(torch.tensor([[-2.0, -1.0, -3.0]]), None, 1)
    assert none.labels == ()
    assert none.response() == {"labels": [], "top_labels": [{"name": "1", "index": 1, "probability": 0.268941}]}
    assert "no label" in repr(none)


def test_metrics_name_the_weakest_label_and_its_mistakes() -> None:
    truth = [[1, 0, 0], [1, 0, 1], [0, 1, 1], [0, 1, 0]]
    probabilities = [[0.9, 0.1, 0.9], [0.9, 0.2, 0.1], [0.2, 0.9, 0.2], [0.1, 0.8, 0.8]]
    metrics = Multilabel().evaluate(predictions(probabilities, truth), source(truth), kind="held-out images")
    assert metrics.summary.startswith("mean average precision ")
    assert "weakest label outdoor" in metrics.summary
    assert metrics.exact_match == 0.0
    assert metrics.per_label[0].average_precision == 1.0
    assert (metrics.confused, metrics.worst[0].true) == ((), ("cat", "outdoor"))
    assert "outdoor is ranked no better than by chance (50.0%)" in metrics.warnings[0]
    assert [table.title for table in metrics.tables] == ["Labels, the weakest first", "The worst predictions"]


def test_images_without_any_label_cannot_be_evaluated() -> None:
    with pytest.raises(DataError, match="none of the 2 images has a label"):
        Multilabel().evaluate(
            predictions([[0.1, 0.2, 0.3]] * 2, [[0, 0, 0]] * 2), source([[0, 0, 0]] * 2), kind="images"
        )


def test_labels_are_matched_by_name() -> None:
    data = source([[1, 0], [0, 1]], ("outdoor", "cat"))
    matched = Multilabel().match(data, NAMES, 3)
    assert isinstance(matched, Retargeted)
    assert matched.targets.values.tolist() == [[0, 0, 1], [1, 0, 0]]
    with pytest.raises(DataError, match="the data has the label 'bird', which the model lacks; its labels are 'cat'"):
        Multilabel().match(source([[1, 0]], ("bird", "cat")), NAMES, 3)
    with pytest.raises(DataError, match="the data has 2 labels and the model 3"):
        Multilabel().match(data, None, 3)
    with pytest.raises(DataError, match="predicts several labels per image, but the data has one class per image"):
        Multilabel().match(data.base, NAMES, 3)
