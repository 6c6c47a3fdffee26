"""Segmentation as a task: its loss, counts, predictions and metrics."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitrail.data.sources.source import Arrays
from vitrail.data.sources.targets import Labelling, Targets
from vitrail.errors import CheckpointError, ConfigError, DataError, InputError
from vitrail.metrics.segmentation import count_pixels
from vitrail.models.config import ViTConfig
from vitrail.tasks import segmentation
from vitrail.tasks.lookup import task_named, task_of_kind, unsuited_head
from vitrail.tasks.objective import Objective
from vitrail.tasks.segmentation import MaskPrediction, Segmentation, pixel_weights, upsampled
from vitrail.tasks.segmentation_metrics import SegmentationMetrics, counts_of, losses_of
from vitrail.tasks.task import Predictions

CPU = torch.device("cpu")
TASK = Segmentation()
NAMES = ("background", "disc", "square")
IGNORED = 255


def masks(images: int, size: tuple[int, int], seed: int, *, ignored: float = 0.1) -> Tensor:
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(NAMES), (images, *size))
    drawn[generator.random(drawn.shape) < ignored] = IGNORED
    return torch.from_numpy(drawn.astype(np.uint8))


def logits(images: int, grid: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(images, len(NAMES), *grid, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicted(outputs: Tensor, truth: Tensor) -> Predictions:
    kept, labels = TASK.kept(outputs, truth)
    return Predictions(kept.numpy(), labels.numpy(), np.arange(len(truth)))


class Shapes:
    """A source of which only names are asked."""

    classes, targets = ("all",), Targets("masks", NAMES, np.ones((100, 3), np.int64))
    labels = np.zeros(100, np.int64)

    def __len__(self) -> int:
        return 100

    def name(self, index: int) -> str:
        return f"{index}.png"


# ── the loss ──


@pytest.mark.parametrize("weights", ["none", "balanced", (1.0, 0.5, 3.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_plain_torch(weights: Any, smoothing: float) -> None:
    truth, pixels = masks(4, (12, 10), 0), np.array([[70, 20, 10], [50, 30, 20]])
    objective = Objective(class_weights=weights, label_smoothing=smoothing)
    compute = TASK.training_loss(objective, pixels, NAMES, CPU)
    ours, plain = (logits(4, (3, 5), 1).requires_grad_() for _ in range(2))
    actual, total = compute(ours, truth, None)
    by_class = None
    if weights == "balanced":
        by_class = torch.tensor([200 / 3 / n for n in (120, 50, 30)], dtype=torch.float64)
    elif weights != "none":
        by_class = torch.tensor(weights, dtype=torch.float64)
    losses, right = [], 0.0
    for image in range(4):
        grown = F.interpolate(plain[image : image + 1], (12, 10), mode="bilinear", align_corners=False)[0]
        labelled = truth[image] != IGNORED
        chosen, wanted = grown[:, labelled].T, truth[image][labelled].long()
        summed = F.cross_entropy(chosen, wanted, weight=by_class, label_smoothing=smoothing, reduction="sum")
        losses.append(summed / labelled.sum())
        right += float((chosen.argmax(dim=1) == wanted).double().mean())
    expected = torch.stack(losses).mean()
    actual.backward()
    expected.backward()
    assert ours.grad is not None
    assert plain.grad is not None
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(ours.grad, plain.grad, atol=1e-8)
    assert float(total) == pytest.approx(right)


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    truth, compute = masks(4, (8, 8), 3, ignored=0.5), TASK.training_loss(Objective(), np.ones((1, 3)), NAMES, CPU)
    whole, parts = (logits(4, (2, 2), 4).requires_grad_() for _ in range(2))
    compute(whole, truth, None)[0].backward()
    for half in (slice(0, 2), slice(2, 4)):
        (compute(parts[half], truth[half], None)[0] / 2).backward()
    assert whole.grad is not None
    assert parts.grad is not None
    assert torch.allclose(whole.grad, parts.grad, atol=1e-12)


def test_an_image_without_labelled_pixels_changes_nothing() -> None:
    truth, compute = masks(2, (8, 8), 0), TASK.training_loss(Objective(), np.ones((1, 3)), NAMES, CPU)
    truth[1] = IGNORED
    outputs = logits(2, (2, 2), 1).requires_grad_()
    loss, total = compute(outputs, truth, None)
    loss.backward()
    assert loss.isfinite()
    assert 0 <= float(total) <= 1
    assert outputs.grad is not None
    assert not outputs.grad[1].any()


def test_balanced_weights_have_a_mean_of_one_and_skip_absent_classes() -> None:
    pixels = np.array([[90, 10, 0], [80, 20, 0]])
    weights = pixel_weights(pixels, NAMES, Objective(class_weights="balanced"))
    assert weights is not None
    assert weights.tolist() == pytest.approx([200 / 2 / 170, 200 / 2 / 30, 0.0])
    with pytest.raises(ConfigError, match="2 numbers, but there are 3 classes"):
        pixel_weights(pixels, NAMES, Objective(class_weights=(1.0, 2.0)))


# ── counts and metrics ──


@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 9), st.integers(0, 2**16))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_what_is_kept_equals_counting_each_image(images: int, grid: int, side: int, seed: int) -> None:
    truth, outputs = masks(images, (side, side + 1), seed), logits(images, (grid, grid + 1), seed)
    made = predicted(outputs, truth)
    grown = upsampled(outputs, (side, side + 1))
    for image in range(images):
        expected = count_pixels(grown[image].argmax(dim=0).numpy(), truth[image].numpy(), len(NAMES), IGNORED)
        assert np.array_equal(counts_of(made)[image], expected)
        labelled = truth[image] != IGNORED
        if labelled.any():
            loss = F.cross_entropy(grown[image][:, labelled].T, truth[image][labelled].long())
            assert losses_of(made)[image] == pytest.approx(float(loss))
        else:
            assert losses_of(made)[image] == 0


def test_what_is_kept_does_not_depend_on_how_many_images_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, outputs = masks(7, (9, 8), 3), logits(7, (3, 4), 3)
    whole = TASK.kept(outputs, truth)
    for most in (1, 2 * len(NAMES) * 72, 6 * len(NAMES) * 72):
        largest: list[int] = []

        def spied(some: Tensor, size: tuple[int, int], largest: list[int] = largest) -> Tensor:
            largest.append(len(some))
            return upsampled(some, size)

        monkeypatch.setattr(segmentation, "upsampled", spied)
        monkeypatch.setattr(segmentation, "MOST_LOGITS", most)
        parts = TASK.kept(outputs, truth)
        assert all(torch.equal(ours, expected) for ours, expected in zip(parts, whole, strict=True))
        assert max(largest) == max(1, most // (len(NAMES) * 72))


def test_metrics_return_from_json() -> None:
    truth = masks(40, (8, 8), 0)
    made = TASK.evaluate(predicted(logits(40, (4, 4), 1), truth), Shapes(), kind="held-out images")
    back = SegmentationMetrics.from_dict(json.loads(json.dumps(made.as_dict())))
    assert back.as_dict() == made.as_dict()
    assert [row.name for row in made.per_class] == list(NAMES)
    ious = [row.mean_iou for row in made.worst]
    assert ious == sorted(ious)
    assert made.worst[0].mean_iou <= made.median[0].mean_iou <= made.best[0].mean_iou
    assert made.mean_iou_interval.low < made.mean_iou < made.mean_iou_interval.high
    assert made.largest_class == pytest.approx(max(row.fraction for row in made.per_class) / 3)
    assert made.summary.startswith("mean IoU ")


def test_a_perfect_prediction() -> None:
    truth = masks(20, (6, 6), 0, ignored=0.2)
    exact = F.one_hot(truth.clamp(max=2).long(), 3).permute(0, 3, 1, 2).double() * 50
    made = TASK.evaluate(predicted(exact, truth), Shapes(), kind="held-out images")
    assert (made.mean_iou, made.mean_dice, made.pixel_accuracy, made.class_accuracy) == (1, 1, 1, 1)
    assert made.loss < 1e-9
    assert made.warnings == ()


def test_a_class_that_is_never_found_is_warned_of() -> None:
    truth = masks(20, (6, 6), 0)
    outputs = torch.zeros(20, 3, 6, 6, dtype=torch.float64)
    outputs[:, 0] = 1
    made = TASK.evaluate(predicted(outputs, truth), Shapes(), kind="held-out images")
    assert made.warnings[0].startswith("no pixel of the classes disc, square is predicted right; add images with them")
    values = TASK.validation(predicted(outputs, truth), NAMES)
    assert values["val_mean_iou"] == pytest.approx(made.mean_iou)
    assert set(values) == {spec.key for spec in TASK.criteria.values()}


def test_images_without_labelled_pixels_cannot_be_evaluated() -> None:
    nothing = torch.full((2, 4, 4), IGNORED, dtype=torch.uint8)
    with pytest.raises(DataError, match="none of the 2 images has a labelled pixel"):
        TASK.evaluate(predicted(logits(2, (2, 2), 0), nothing), Shapes(), kind="held-out images")


# ── predictions ──


def test_a_prediction_makes_masks_of_any_size() -> None:
    outputs = torch.full((1, 3, 4, 4), -5.0)
    outputs[0, 0, :, :2] = 5.0
    outputs[0, 2, :, 2:] = 5.0
    (made,) = TASK.predict(outputs, NAMES, 5)
    assert made.classes == ("background", "square")
    assert made.fractions == (0.5, 0.5)
    assert made.fields() == {"classes": ("background", "square"), "fractions": (0.5, 0.5), "mask": None}
    assert made.response()["classes"][1] == {"name": "square", "index": 2, "fraction": 0.5}
    for height, width in ((8, 8), (5, 30)):
        mask = made.mask(height, width)
        assert mask.dtype == np.uint8
        assert mask.shape == (height, width)
        assert (mask[:, : width // 2 - 2] == 0).all()
        assert (mask[:, width // 2 + 2 :] == 2).all()
    assert repr(made) == "MaskPrediction(background 50.0%, square 50.0%)"
    with pytest.raises(InputError, match="give the size of the image"):
        made.mask(0, 4)
    with pytest.raises(InputError, match="there is no mask: gone"):
        MaskPrediction(error="gone").mask(4, 4)


def test_fractions_do_not_depend_on_how_many_logits_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = logits(3, (5, 7), 4).float()
    expected = TASK.predict(outputs, NAMES, 3)
    monkeypatch.setattr(segmentation, "MOST_LOGITS", 1)
    sizes: list[tuple[int, ...]] = []

    def spied(some: Tensor, size: tuple[int, int]) -> Tensor:
        sizes.append(tuple(some.shape))
        return upsampled(some, size)

    monkeypatch.setattr(segmentation, "upsampled", spied)
    assert TASK.predict(outputs, NAMES, 3) == expected
    assert set(sizes) == {(1, 1, 5, 7)}


def test_rows() -> None:
    (made,) = TASK.predict(torch.tensor([5.0, 0.0, 0.0])[None, :, None, None].expand(1, 3, 2, 2), None, 2)
    assert made.classes == ("0",)
    rows = TASK.row_format(NAMES)
    assert rows.csv_header(2) == ["class_1", "fraction_1", "class_2", "fraction_2", "mask"]
    assert rows.csv_cells(made.fields(), 2) == ["0", 1.0, "", "", None]
    assert rows.csv_cells(TASK.unread("gone").fields(), 1) == ["", "", None]
    assert rows.table_cells(made.fields()) == ("0", "100.0%", "")


def test_agreement_is_the_fraction_of_patches_with_another_class() -> None:
    exact = logits(2, (10, 10), 0)
    quick = exact.clone()
    assert TASK.agreement(exact, quick).fault is None
    quick[1, :, 0, :5] = -quick[1, :, 0, :5]
    differs = (exact[1].argmax(dim=0) != quick[1].argmax(dim=0)).double().mean()
    found = TASK.agreement(exact, quick)
    assert found.change == pytest.approx(float(differs))
    assert found.fault == f"changes the mask of the first 2 images by {found.change:.3f}"
    quick[0, 0, 0, 0] = torch.nan
    assert TASK.agreement(exact, quick).fault is not None


# ── the model ──


def test_the_task_needs_logits_per_patch() -> None:
    assert task_of_kind("masks") == task_named("segmentation") == TASK
    config = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, classes=3)
    assert "set model.pool=patches" in unsuited_head(TASK, config)
    assert unsuited_head(TASK, config.replace(pool="patches")) == ""
    assert "for the image" in unsuited_head(task_named("classification"), config.replace(pool="patches"))


def test_arrays_have_no_masks() -> None:
    images = Arrays(np.zeros((3, 4, 4), np.uint8), np.zeros(3, np.int64), ("all",))
    with pytest.raises(DataError):
        TASK.match(images, NAMES, 3)


# ── constants ──


def test_ignored_values_return_from_the_bundle() -> None:
    assert TASK.constants == {}
    task = TASK.fitted(np.ones((2, 3)), Labelling(ignore=(0, 3)))
    assert task.labelling(NAMES) == Labelling("masks", ignore=(0, 3))
    assert task_named("segmentation").with_constants(json.loads(json.dumps(task.constants)), 3) == task
    for wrong in ({"ignored_values": [-1]}, {"ignored_values": "3"}, {"thresholds": [0.5]}):
        with pytest.raises(CheckpointError, match="ignored_values, a list of whole numbers, found"):
            TASK.with_constants(wrong, 3)
