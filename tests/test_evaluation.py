"""Evaluating a model: every image once, with classes matched by name."""

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tests.support.metrics import classified
from torch import Tensor, nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Evaluation as EvaluationData
from vitrail.data.batches import evaluation_batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays, digits
from vitrail.data.sources.splits import split_of
from vitrail.errors import CheckpointError, ConfigError, DataError, Diverged
from vitrail.evaluation import check_finite, evaluate, evaluate_bundle, predict_all
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.tasks.classification_metrics import ClassificationMetrics, classification_metrics
from vitrail.tasks.metrics import Metrics
from vitrail.tasks.task import Predictions
from vitrail.text import percent

CPU = torch.device("cpu")
PRE = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
ALL_DIGITS = digits()
DIGITS = split_of(ALL_DIGITS, np.arange(0, 1797, 9))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """A small model trained briefly on digits, so that some predictions are right and some wrong."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViT(
            ViTConfig(image_size=8, patch_size=4, channels=1, width=24, depth=1, heads=2, classes=10, mlp_dropout=0.1)
        )
        images = PRE.normalise(torch.from_numpy(ALL_DIGITS.images)[:, None])
        labels = torch.from_numpy(ALL_DIGITS.labels)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(40):
            chosen = torch.randint(0, len(labels), (128,))
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Bundle(model, PRE, ALL_DIGITS.classes)


class Corrupt:
    """Digits with some unreadable images."""

    classes = DIGITS.classes
    labels = DIGITS.labels

    def __init__(self, *corrupt: int) -> None:
        self.corrupt = corrupt

    def __len__(self) -> int:
        return len(DIGITS)

    def name(self, index: int) -> str:
        return f"digits/{index}.png"

    def read(self, index: int) -> bytes | np.ndarray:
        return b"" if index in self.corrupt else DIGITS.read(index)

    def stamp(self, index: int) -> tuple[int, int]:
        return index, 0


def same(one: Metrics, other: Metrics) -> bool:
    return one.as_dict() == other.as_dict()


def test_metrics_agree_with_the_model(bundle: Bundle) -> None:
    result = classified(evaluate_bundle(bundle, DIGITS, device="cpu", workers=0))
    images = np.stack([DIGITS.read(index) for index in range(len(DIGITS))])
    bundle.model.eval()
    with torch.no_grad():
        outputs = bundle.model(PRE.normalise(torch.from_numpy(images)[:, None]))
    labels, predicted = torch.from_numpy(DIGITS.labels), outputs.argmax(1)
    right = predicted == labels
    assert result.images == len(DIGITS) == 200
    assert 0.5 < result.top1 < 1
    assert result.top1 == pytest.approx(right.float().mean().item())
    assert result.top1_interval.low < result.top1 < result.top1_interval.high
    assert result.top5 == pytest.approx((outputs.topk(5).indices == labels[:, None]).any(1).float().mean().item())
    assert result.loss == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert result.loss_interval.low < result.loss < result.loss_interval.high
    assert np.trace(result.confusion) == right.sum()
    recalls = [right[labels == digit].float().mean().item() for digit in range(10)]
    assert [row.recall for row in result.per_class] == pytest.approx(recalls)
    assert result.balanced_accuracy == pytest.approx(np.mean(recalls))
    assert result.weakest is not None
    assert result.weakest.recall == pytest.approx(min(recalls))
    assert result.macro_f1_interval.low <= result.macro_f1 <= result.macro_f1_interval.high
    confidence = outputs.softmax(1).max(1).values
    most = int(torch.where(right, 0, confidence).argmax())
    assert (result.worst[0].index, result.worst[0].name) == (most, DIGITS.name(most))
    assert (result.worst[0].true, result.worst[0].predicted) == (str(int(labels[most])), str(int(predicted[most])))
    assert result.worst[0].confidence == pytest.approx(confidence[most].item(), rel=1e-5)
    assert [row.confidence for row in result.worst] == sorted((row.confidence for row in result.worst), reverse=True)


def test_workers_and_batch_size_do_not_matter(bundle: Bundle) -> None:
    one, two = (classified(evaluate_bundle(bundle, DIGITS, device="cpu", workers=n)) for n in (0, 2))
    assert same(one, two)
    other = classified(evaluate_bundle(bundle, DIGITS, device="cpu", batch=7, workers=0))
    assert (other.confusion == one.confusion).all()
    assert other.loss == pytest.approx(one.loss, rel=1e-5)


def test_progress_is_reported(bundle: Bundle) -> None:
    calls: list[tuple[int, int]] = []
    evaluate_bundle(bundle, Corrupt(3), device="cpu", workers=0, on_progress=lambda *done: calls.append(done))
    assert calls == [(64, 200), (128, 200), (192, 200), (200, 200)]


def test_as_dict_is_json(bundle: Bundle) -> None:
    result = classified(evaluate_bundle(bundle, Corrupt(3), device="cpu", workers=0))
    again = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert again == result.as_dict()
    assert ClassificationMetrics.from_dict(again).as_dict() == again
    assert np.array(again["confusion"]).sum() == again["images"] == 199
    assert len(again["reliability"]) == 15
    assert again["worst"][0].keys() == {"index", "name", "true", "predicted", "confidence"}


def test_classes_in_another_order_are_renumbered(bundle: Bundle) -> None:
    straight = evaluate_bundle(bundle, DIGITS, device="cpu", workers=0)
    turned = Arrays(ALL_DIGITS.images, 9 - ALL_DIGITS.labels, tuple(str(9 - digit) for digit in range(10)))
    assert same(evaluate_bundle(bundle, split_of(turned, DIGITS.indices), device="cpu", workers=0), straight)
    wrong = classified(
        evaluate_bundle(bundle, split_of(turned, DIGITS.indices), device="cpu", workers=0, by_number=True)
    )
    assert wrong.top1 < 0.5


def test_a_subset_of_the_classes(bundle: Bundle) -> None:
    some = np.isin(ALL_DIGITS.labels, (3, 8))
    source = Arrays(ALL_DIGITS.images[some], (ALL_DIGITS.labels[some] == 8).astype(np.int64), ("3", "8"))
    result = classified(evaluate_bundle(bundle, source, device="cpu", workers=0))
    assert [row.name for row in result.per_class if row.images] == ["3", "8"]
    assert {row.name for row in result.weakest_first} == {"3", "8"}
    assert result.per_class[0].recall is None
    assert result.confusion.shape == (10, 10)


def test_classes_that_do_not_match(bundle: Bundle) -> None:
    other = Arrays(ALL_DIGITS.images[:2], np.array([0, 1]), ("7", "cat"))
    with pytest.raises(DataError, match="the data has the class 'cat', which the model does not have; its 10 classes"):
        evaluate_bundle(bundle, other, device="cpu", workers=0)
    nameless = Bundle(bundle.model, PRE)
    with pytest.raises(DataError, match="the data has 2 classes and the model 10"):
        evaluate_bundle(nameless, other, device="cpu", workers=0)
    assert evaluate_bundle(nameless, DIGITS, device="cpu", workers=0).images == 200
    without = Arrays(ALL_DIGITS.images[:2], np.array([-1, 1]), ("7", "8"))
    with pytest.raises(DataError, match="image 0 has no class"):
        evaluate_bundle(bundle, without, device="cpu", workers=0)
    headless = Bundle(ViT(bundle.model.config.replace(classes=0)), PRE)
    with pytest.raises(CheckpointError, match="the model has no head, so it makes no predictions"):
        evaluate_bundle(headless, DIGITS, device="cpu", workers=0)
    batches = evaluation_batches(EvaluationData(other, PRE, 2), workers=0)
    with pytest.raises(DataError, match="the model has 10 classes and the data 2"):
        evaluate(bundle.model, batches, other, preprocess=PRE, device=CPU)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_listed_and_skipped(bundle: Bundle, workers: int) -> None:
    corrupt = (0, *range(64, 128), 199)  # the second batch has none that can be read
    result = classified(evaluate_bundle(bundle, Corrupt(*corrupt), device="cpu", workers=workers))
    assert [bad.name for bad in result.bad] == [f"digits/{index}.png" for index in corrupt]
    assert result.images == 200 - len(corrupt)
    assert result.summary.endswith("; 66 more could not be read")
    assert not {mistake.index for mistake in result.worst} & set(corrupt)


def test_no_readable_images(bundle: Bundle) -> None:
    with pytest.raises(DataError, match=r"none of the 200 can be read; the first, digits/0.png: "):
        evaluate_bundle(bundle, Corrupt(*range(200)), device="cpu", workers=0)
    with pytest.raises(DataError, match="no images to evaluate"):
        evaluate(bundle.model, [], DIGITS, preprocess=PRE, device=CPU)


class Odd(nn.Module):
    """Returns NaN for images that start with a bright row."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Dropout(0.5).eval()
        self.inner = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        flat = self.inner(self.frozen(images.flatten(1)))
        return torch.where(flat[:, :1] > 0.9, torch.nan, flat[:, :10])


def odd_source(*bright: int) -> Arrays:
    images = np.zeros((6, 8, 8), np.uint8)
    images[list(bright)] = 255
    return Arrays(images, np.zeros(6, np.int64), ALL_DIGITS.classes)


@pytest.fixture
def odd() -> Iterator[Callable[..., Predictions]]:
    model = Odd()

    def predict(source: Arrays, **options: str) -> Predictions:
        batches = evaluation_batches(EvaluationData(source, PRE, 4), workers=0)
        return predict_all(model, batches, PRE, CPU, name=source.name, **options)

    yield predict
    # In any case, every submodule has its previous mode again.
    assert [module.training for module in model.modules()] == [True, False, True]


def test_modes_are_restored_and_dropout_is_off(odd: Callable[..., Predictions]) -> None:
    result = odd(odd_source())
    assert result.indices.tolist() == list(range(6))
    assert result.outputs.dtype == np.float32
    assert result.outputs.tolist() == [pytest.approx([0.1] * 10)] * 6


def test_outputs_that_are_not_finite_name_the_image(odd: Callable[..., Predictions]) -> None:
    with pytest.raises(Diverged, match="the model's output for image 5 is not finite; its weights"):
        odd(odd_source(5))
    with pytest.raises(Diverged, match="image 2 is not finite; evaluate in float32"):
        odd(odd_source(2, 5), precision="bf16")


def test_low_precision_is_close(bundle: Bundle) -> None:
    exact, low = (
        classified(evaluate_bundle(bundle, DIGITS, device="cpu", workers=0, precision=p)) for p in ("float32", "bf16")
    )
    assert low.loss == pytest.approx(exact.loss, abs=0.03)
    assert low.loss != exact.loss
    with pytest.raises(ConfigError, match="no precision is called"):
        evaluate_bundle(bundle, DIGITS, device="cpu", workers=0, precision="int3")


def predictions(right: int, wrong: int) -> Predictions:
    labels = np.array([0] * right + [1] * wrong)
    probabilities = np.tile(np.array([[0.8, 0.2]], np.float32), (len(labels), 1))
    return Predictions(probabilities, labels, np.arange(len(labels)))


def source_of(count: int) -> Arrays:
    return Arrays(np.zeros((count, 2, 2), np.uint8), np.zeros(count, np.int64), ("cat", "dog"))


def test_the_summary() -> None:
    result = classification_metrics(predictions(354, 6), source_of(360))
    assert result.summary == (
        "98.3% on 360 held-out images, 95% interval 96.4–99.2; always 'cat' gives 98.3%, chance 50.0%; "
        "weakest class dog"
    )
    assert result.as_dict()["baselines"] == {"majority_class": "cat", "majority": 354 / 360, "chance": 0.5}
    assert [text.split(":")[0] for text in result.as_dict()["warnings"]] == ["no better than guessing"]
    assert result.top5 is None
    assert result.ece == pytest.approx(354 / 360 - 0.8)
    perfect = classification_metrics(predictions(1, 0), source_of(1), kind="images")
    assert perfect.summary == "100.0% on 1 image, 95% interval 20.7–100.0"
    assert (perfect.weakest, perfect.worst) == (None, ())


def test_only_one_is_a_hundred_percent() -> None:
    assert [percent(fraction) for fraction in (1, 0.99999, 0.9994, 0.5, 0)] == ["100.0", "99.9", "99.9", "50.0", "0.0"]


def test_outputs_with_more_axes_are_checked_by_image() -> None:
    outputs = torch.zeros(3, 4, 5, 5)
    outputs[1, 2, 3, 4] = torch.nan
    with pytest.raises(Diverged, match="the model's output for image 8 is not finite"):
        check_finite(outputs, torch.tensor([7, 8, 9]), "image {}".format, "float32")
