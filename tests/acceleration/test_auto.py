"""Automatic precision: which one is chosen, and the reason."""

import time
from collections.abc import Callable

import pytest
import torch
from tests.support.tiny_models import CPU, bundle, pixels
from torch import Tensor

from vitrail.acceleration import auto
from vitrail.acceleration.auto import AutoPrecisionEngine, choose_precision
from vitrail.acceleration.engine import Engine, Kind, open_engine
from vitrail.acceleration.planner import ExecutionPlan, Hardware
from vitrail.errors import ConfigError
from vitrail.runtime import Precision
from vitrail.tasks.lookup import CLASSIFICATION

COMPARE = CLASSIFICATION.agreement


class Clock:
    """A clock with simulated durations, because real ones are unreliable on a busy machine."""

    skipped = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return time.perf_counter() + cls.skipped


class Fake:
    """An engine with given logits and a given duration on the fake clock."""

    kind: Kind = "torch"

    def __init__(self, precision: Precision, outputs: Tensor, seconds: float) -> None:
        self.precision, self.outputs, self.seconds = precision, outputs, seconds
        self.plan = ExecutionPlan("eager", precision)
        self.images = 0

    def __call__(self, pixels: Tensor) -> Tensor:
        Clock.skipped += self.seconds
        self.images += len(pixels)
        return self.outputs[pixels[:, 0, 0, 0].long()]  # the first pixel is the image's index


def numbered(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)


def opener(exact: Tensor, quick: Tensor, seconds: tuple[float, float] = (2000.0, 100.0)) -> Callable[[Precision], Fake]:
    made = {"float32": Fake("float32", exact, seconds[0]), "bf16": Fake("bf16", quick, seconds[1])}
    return lambda precision: made[precision]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "time", Clock)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the CPU is faster in bf16."""
    monkeypatch.setattr(auto, "hardware_of", lambda _: Hardware("cpu", fast_bf16=True))


LOGITS = torch.randn(100, 5, generator=torch.Generator().manual_seed(0)) * 3


def swapped(number: int) -> Tensor:
    """The same logits, but the top two classes of one image are swapped by a tiny margin."""
    logits = LOGITS.clone()
    first, second = logits[number].topk(2).indices
    logits[number, second] = logits[number, first] + 1e-3
    return logits


def near_tie() -> Tensor:
    logits = LOGITS.clone()
    logits[3] = torch.tensor([2.0, 1.9999, 0.0, 0.0, 0.0])
    return logits


def turned() -> Tensor:
    logits = near_tie()
    logits[3, 1] = 2.0001
    return logits


@pytest.mark.usefixtures("fast")
def test_bf16_is_used_if_nothing_changes() -> None:
    engine, why = choose_precision(opener(LOGITS, LOGITS + 0.001 * torch.randn(100, 5)), numbered(100), CPU, COMPARE)
    assert engine.precision == "bf16"
    assert "× faster; the first 64 images have the same top class, probabilities within 0.00" in why
    assert why.startswith("bf16: ")
    assert float(why.split()[1].rstrip("×")) > 1.1
    assert isinstance(engine, Fake)
    assert engine.images == 16 + 64  # the first 64, and a warm-up chunk


@pytest.mark.usefixtures("fast")
def test_one_changed_top_class_rejects_bf16() -> None:
    engine, why = choose_precision(opener(near_tie(), turned()), numbered(64), CPU, COMPARE)
    assert (engine.precision, why) == ("float32", "float32: bf16 changes the top class of 1 of the first 64 images")


@pytest.mark.usefixtures("fast")
def test_only_the_first_64_images_count() -> None:
    assert choose_precision(opener(LOGITS, swapped(64)), numbered(100), CPU, COMPARE)[0].precision == "bf16"
    assert choose_precision(opener(LOGITS, swapped(63)), numbered(100), CPU, COMPARE)[0].precision == "float32"


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("fraction", "taken"), [(0.019, "bf16"), (0.021, "float32")])
def test_probabilities_may_change_by_0_02(fraction: float, taken: str) -> None:
    exact = LOGITS.softmax(dim=1).log()
    exact[7] = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]).log()
    quick = exact.clone()
    quick[7] = torch.tensor([0.5 + fraction, 0.3 - fraction, 0.1, 0.05, 0.05]).log()
    engine, why = choose_precision(opener(exact, quick), numbered(64), CPU, COMPARE)
    assert engine.precision == taken
    if taken == "float32":
        assert why == "float32: bf16 changes a probability of the first 64 images by 0.021"


@pytest.mark.usefixtures("fast")
def test_bf16_must_be_faster() -> None:
    engine, why = choose_precision(opener(LOGITS, LOGITS, (100.0, 2000.0)), numbered(64), CPU, COMPARE)
    assert engine.precision == "float32"
    assert why.startswith("float32: bf16 is only 0.")


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("factor", "taken"), [(1.01, "bf16"), (1.5, "float32")])
def test_one_output_is_compared_by_its_size(factor: float, taken: str) -> None:
    """The softmax of one output is always 1, so that probabilities would accept anything."""
    exact = 1000 * LOGITS[:, :1]
    engine, why = choose_precision(opener(exact, factor * exact), numbered(64), CPU)
    assert engine.precision == taken
    if taken == "float32":
        assert why == "float32: bf16 changes an output of the first 64 images by 0.500"
    else:
        assert why.endswith("faster; the first 64 images have outputs within 0.010")
    assert choose_precision(opener(exact, exact * torch.nan), numbered(64), CPU)[0].precision == "float32"


@pytest.mark.usefixtures("fast")
def test_nan_rejects_bf16() -> None:
    broken = torch.full_like(LOGITS, float("nan"))
    assert choose_precision(opener(LOGITS, broken), numbered(64), CPU, COMPARE)[0].precision == "float32"


@pytest.mark.usefixtures("fast")
def test_one_image_and_no_images() -> None:
    _, why = choose_precision(opener(LOGITS, LOGITS), numbered(1), CPU, COMPARE)
    assert "the first image has the same top class" in why
    engine, why = choose_precision(opener(LOGITS, LOGITS), numbered(0), CPU, COMPARE)
    assert (engine.precision, why) == ("float32", "float32: no images to try bf16 on")


@pytest.mark.usefixtures("fast")
def test_an_engine_that_cannot_compute_in_bf16() -> None:
    def refuse(precision: Precision) -> Engine:
        if precision == "bf16":
            raise ConfigError("it cannot")
        return Fake("float32", LOGITS, 0)

    engine, why = choose_precision(refuse, numbered(4), CPU, COMPARE)
    assert (engine.precision, why) == ("float32", "float32: it cannot")


def test_bf16_is_not_tried_if_the_cpu_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "hardware_of", lambda _: Hardware("cpu"))
    calls: list[str] = []

    def remember(precision: Precision) -> Engine:
        calls.append(precision)
        return Fake(precision, LOGITS, 0)

    engine, why = choose_precision(remember, numbered(4), CPU, COMPARE)
    assert (engine.precision, why) == ("float32", "float32: bf16 is not faster on this device")
    assert calls == ["float32"]


@pytest.mark.usefixtures("fast")
def test_with_a_real_model() -> None:
    """The choice depends on the CPU that runs the test."""
    made = bundle()
    engine, why = choose_precision(
        lambda precision: open_engine(made.model, made.preprocess, precision=precision, device=CPU), pixels(20), CPU
    )
    assert why.startswith(f"{engine.precision}: ")
    assert engine(pixels(3)).shape == (3, 5)


# ── services ──


@pytest.mark.usefixtures("fast")
def test_the_engine_chooses_after_64_images() -> None:
    messages: list[str] = []
    engine = AutoPrecisionEngine(opener(LOGITS, LOGITS + 0.001), CPU, messages.append, COMPARE)
    engine(numbered(40))  # warm-up
    engine.restart()
    for first in range(0, 60, 20):
        assert torch.equal(engine(numbered(100)[first : first + 20]), LOGITS[first : first + 20])
        assert (engine.precision, messages) == ("float32", [])
    assert torch.equal(engine(numbered(100)[60:70]), LOGITS[60:70])  # float32 also in the deciding batch
    assert engine.precision == "bf16"
    assert len(messages) == 1
    assert "the first 70 images have the same top class" in messages[0]
    assert torch.equal(engine(numbered(5)), LOGITS[:5] + 0.001)


@pytest.mark.usefixtures("fast")
def test_the_engine_stays_exact_if_predictions_differ() -> None:
    messages: list[str] = []
    broken = LOGITS.clone()
    broken[2] = float("nan")  # in the first batch, remembered in the others
    engine = AutoPrecisionEngine(opener(LOGITS, broken), CPU, messages.append, COMPARE)
    for first in range(0, 100, 10):
        assert torch.equal(engine(numbered(100)[first : first + 10]), LOGITS[first : first + 10])
    assert engine.precision == "float32"
    assert [why.split(":")[0] for why in messages] == ["float32"]


def test_an_engine_without_a_trial_reports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "hardware_of", lambda _: Hardware("cpu"))
    messages: list[str] = []
    engine = AutoPrecisionEngine(opener(LOGITS, LOGITS), CPU, messages.append, COMPARE)
    assert messages == ["float32: bf16 is not faster on this device"]
    engine.restart()
    assert torch.equal(engine(numbered(3)), LOGITS[:3])


@pytest.mark.usefixtures("fast")
def test_an_engine_whose_trial_fails_still_runs() -> None:
    class Failing(Fake):
        def __call__(self, pixels: Tensor) -> Tensor:
            raise RuntimeError("not enough memory\nand where")

    made: dict[str, Fake] = {"float32": Fake("float32", LOGITS, 0), "bf16": Failing("bf16", LOGITS, 0)}
    messages: list[str] = []
    engine = AutoPrecisionEngine(lambda precision: made[precision], CPU, messages.append, COMPARE)
    for _ in range(2):
        assert torch.equal(engine(numbered(3)), LOGITS[:3])
    assert messages == ["float32: bf16 could not be tried: not enough memory"]
