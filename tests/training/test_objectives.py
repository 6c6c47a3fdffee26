"""Targets and losses against torch and against their definitions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitrail.errors import ConfigError, InputError
from vitrail.tasks.objective import Objective, balanced_weights, class_weights, loss, targets

LABELS = torch.tensor([0, 2, 1, 4, 4, 3])
CLASSES = 5


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(len(LABELS), CLASSES)


def test_hard_labels_give_torchs_cross_entropy(logits: Tensor) -> None:
    objective = Objective()
    result = loss(logits, targets(LABELS, CLASSES, objective), objective)
    torch.testing.assert_close(result, F.cross_entropy(logits, LABELS), rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_matches_torch(logits: Tensor, smoothing: float) -> None:
    objective = Objective(label_smoothing=smoothing)
    result = loss(logits, targets(LABELS, CLASSES, objective), objective)
    torch.testing.assert_close(result, F.cross_entropy(logits, LABELS, label_smoothing=smoothing), rtol=1e-6, atol=0)


def test_sigmoid_sums_binary_losses_over_classes(logits: Tensor) -> None:
    objective = Objective(loss="sigmoid")
    total = 0.0
    for row, label in zip(logits.double(), LABELS, strict=True):
        for number, logit in enumerate(row):
            chance = torch.sigmoid(logit)
            total -= float(torch.log(chance if number == label else 1 - chance))
    result = loss(logits, targets(LABELS, CLASSES, objective), objective)
    assert float(result) == pytest.approx(total / len(LABELS), rel=1e-6)


def test_class_weights_scale_each_image(logits: Tensor) -> None:
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0])
    alone = F.cross_entropy(logits, LABELS, reduction="none")
    result = loss(logits, targets(LABELS, CLASSES, Objective()), Objective(), weights)
    torch.testing.assert_close(result, (alone * weights[LABELS]).mean(), rtol=1e-6, atol=0)
    sigmoid = Objective(loss="sigmoid")
    one_hot = F.one_hot(LABELS, CLASSES).float()
    alone = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum(1)
    result = loss(logits, one_hot, sigmoid, weights)
    torch.testing.assert_close(result, (alone * weights[LABELS]).mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_micro_batches_have_the_gradient_of_the_whole_batch(logits: Tensor, kind: str) -> None:
    objective, weights = Objective(loss=kind, class_weights="balanced"), balanced_weights(LABELS, CLASSES)
    goal = targets(LABELS, CLASSES, objective)
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss(whole, goal, objective, weights).backward()
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        (loss(parts[part], goal[part], objective, weights) / 3).backward()
    torch.testing.assert_close(parts.grad, whole.grad)


@given(
    smoothing=st.floats(0, 0.99),
    shares=st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3),
    mixed=st.booleans(),
)
@settings(derandomize=True, deadline=None, max_examples=50)
def test_target_rows_sum_to_one(smoothing: float, shares: list[float], mixed: bool) -> None:
    share = torch.tensor(shares).repeat_interleave(2) if mixed else None
    result = targets(LABELS, CLASSES, Objective(label_smoothing=smoothing), share)
    assert result.dtype == torch.float32
    assert (result >= 0).all()
    torch.testing.assert_close(result.sum(dim=1), torch.ones(len(LABELS)))


def test_neighbours_are_mixed() -> None:
    share = torch.tensor([0.75, 0.75, 1.0, 1.0, 0.25, 0.25])
    actual = targets(LABELS, CLASSES, Objective(), share)
    one_hot = torch.eye(CLASSES)
    expected = [
        0.75 * one_hot[0] + 0.25 * one_hot[2],
        0.75 * one_hot[2] + 0.25 * one_hot[0],
        one_hot[1],
        one_hot[4],
        0.25 * one_hot[4] + 0.75 * one_hot[3],
        0.25 * one_hot[3] + 0.75 * one_hot[4],
    ]
    assert torch.equal(actual, torch.stack(expected))


def test_mixing_targets_is_mixing_losses(logits: Tensor) -> None:
    share = torch.full((6,), 0.3)
    partners = LABELS.view(-1, 2).flip(1).flatten()
    expected = 0.3 * F.cross_entropy(logits, LABELS) + 0.7 * F.cross_entropy(logits, partners)
    actual = loss(logits, targets(LABELS, CLASSES, Objective(), share), Objective())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_computed_in_float32_whatever_the_logits(logits: Tensor, kind: str) -> None:
    objective = Objective(loss=kind)
    goal = targets(LABELS, CLASSES, objective)
    coarse = logits.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = loss(coarse, goal, objective, torch.ones(CLASSES))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, loss(coarse.float(), goal, objective), rtol=1e-6, atol=0)


def test_balanced_weights_make_classes_count_equally() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [3] * 1)
    weights = balanced_weights(labels, 4)
    torch.testing.assert_close(weights, torch.tensor([10 / 18, 10 / 9, 0.0, 10 / 3]))
    assert float(weights[torch.from_numpy(labels)].mean()) == pytest.approx(1)
    assert torch.equal(balanced_weights(torch.from_numpy(labels), 4), weights)


def test_class_weights_follow_the_objective() -> None:
    assert class_weights(LABELS, CLASSES, Objective()) is None
    balanced = class_weights(LABELS, CLASSES, Objective(class_weights="balanced"))
    assert balanced is not None
    assert torch.equal(balanced, balanced_weights(LABELS, CLASSES))
    inputs = class_weights(LABELS, 3, Objective(class_weights=[1, 2, 0.5]))
    assert inputs is not None
    assert inputs.tolist() == [1, 2, 0.5]
    with pytest.raises(ConfigError, match="class_weights has 3 numbers, but there are 5 classes"):
        class_weights(LABELS, CLASSES, Objective(class_weights=(1, 2, 3)))


@pytest.mark.parametrize("value", ["balance", [], [1, "a"], [-1.0, 1.0], [0, 0], [float("nan")], [True, 1.0], 3])
def test_invalid_class_weights_give_one_sentence(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^class_weights is .*: it should be 'none', 'balanced', or a list"
    ) as caught:
        Objective(class_weights=value)
    assert ";" not in str(caught.value)


def test_an_objective_round_trips_through_json() -> None:
    objective = Objective(loss="sigmoid", label_smoothing=0.1, class_weights=(1.0, 2.5))
    assert Objective.from_json(objective.to_json()) == objective


def test_logits_of_another_shape_raise(logits: Tensor) -> None:
    with pytest.raises(InputError, match=r"\(6, 7, 5\), but targets have shape \(6, 5\)"):
        loss(logits[:, None].expand(-1, 7, -1), targets(LABELS, CLASSES, Objective()), Objective())
