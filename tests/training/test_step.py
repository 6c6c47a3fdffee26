"""Training steps against a plain reference loop (`tests/support/reference_training.py`), to 1e-6 and mostly better.

Both run in float64, so that rounding does not hide a wrong formula; pixels, shares and smoothing are chosen so that
what ours does in float32, before the model and to the targets, is exact.
"""

import math
from pathlib import Path

import pytest
import torch
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import (
    CASES,
    EXACT,
    IMAGES,
    RATES,
    SIDE,
    Case,
    Reference,
    batches,
    begin,
    reference,
    tiny,
)
from torch import Tensor, nn

from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import Diverged
from vitrail.models.vit import ViT
from vitrail.runtime import Processes
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import freeze
from vitrail.training.state import Setting, State
from vitrail.training.state_files import load_state, save_state
from vitrail.training.step import Stepper, StepResult

CPU = torch.device("cpu")
ALONE = Ranks(Processes(), CPU)


class Double(nn.Module):
    """Casts pixels for a float64 model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        result: Tensor = self.model(pixels.double())
        return result


def ours(model: ViT, case: Case, data: list[Batch]) -> tuple[State, list[StepResult]]:
    recipe = case.recipe()
    weights = None if case.weights is None else torch.tensor(case.weights, dtype=torch.float64)
    stepper, state = Stepper(recipe, EXACT, CPU, "float32", plain_loss(recipe, weights), ALONE), begin(model, recipe)
    forward = Double(model) if next(model.parameters()).dtype == torch.float64 else model
    return state, [stepper.step(state, forward, batch, rate) for batch, rate in zip(data, RATES, strict=False)]


# ── against the reference loop ──


def assert_same(state: State, stepped: list[StepResult], expected: Reference, atol: float = 1e-9) -> None:
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(
            parameter.detach().double(), expected.weights[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert (state.average is None) is (expected.average is None)
    if state.average is not None and expected.average is not None:
        actual = state.average.state()
        for name, tensor in expected.average.items():
            torch.testing.assert_close(actual[name].double(), tensor, rtol=0, atol=atol)
    assert [step.loss for step in stepped] == pytest.approx(expected.losses, rel=max(1e-9, atol))
    assert [step.gradient_norm for step in stepped] == pytest.approx(expected.norms, rel=max(1e-8, 10 * atol))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_step_matches_the_reference(name: str, steps: int) -> None:
    case, model, data = CASES[name], tiny().double(), batches(steps, CASES[name].mixed)
    expected = reference(model, case, data)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state, stepped = ours(model, case, data)
    # torch clips by max_norm / (norm + 1e-6).
    assert_same(state, stepped, expected, atol=1e-9 if case.optimizer.max_grad_norm is None else 1e-6)
    assert state.progress.step == steps
    # The weights have changed, so that doing nothing would fail.
    assert all(float((p.detach() - before[name]).abs().max()) > 1e-5 for name, p in model.named_parameters())


def test_the_clipping_cases_do_clip() -> None:
    """The maximum norm is below every gradient of its case, and changes the final weights."""
    data = batches(4)
    clipped, free = (reference(tiny().double(), CASES[name], data) for name in ("clipped", "sgd"))
    assert min(clipped.norms) > 0.5
    assert float((clipped.weights["head.weight"] - free.weights["head.weight"]).abs().max()) > 1e-4


@pytest.mark.parametrize("mixed", ["none", "both"])
@pytest.mark.parametrize("gradient_accumulation", [2, 4])
def test_gradient_accumulation_equals_the_whole_batch(gradient_accumulation: int, mixed: str) -> None:
    case = CASES["adamw"]._replace(mixed=mixed, weights=(2.0, 0.5, 0.25, 3.0))
    data = batches(3, mixed)
    expected = reference(tiny().double(), case, data)
    assert_same(*ours(tiny().double(), case._replace(gradient_accumulation=gradient_accumulation), data), expected)


@pytest.mark.parametrize("name", ["adamw", "sgd", "clipped", "everything"])
def test_single_precision_is_close(name: str) -> None:
    """As in a run. Adam divides by the root of the squared gradient, so a large eps limits rounding errors."""
    case, data = CASES[name], batches(3, CASES[name].mixed)
    if case.optimizer.kind == "adamw":
        case = case._replace(optimizer=case.optimizer.replace(eps=1e-2))
    expected = reference(tiny(), case, data)
    assert_same(*ours(tiny(), case, data), expected, atol=1e-6)


def test_the_model_gets_normalised_pixels() -> None:
    seen: list[Tensor] = []

    class Recorder(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            seen.append(pixels)
            result: Tensor = model(pixels)
            return result

    model, recipe, batch = tiny(), CASES["sgd"].recipe(), batches(1)[0]
    usual = Preprocess(size=(SIDE, SIDE), mean=(0.1, 0.5, 0.2), std=(0.5, 0.25, 0.4))
    Stepper(recipe, usual, CPU, "float32", plain_loss(recipe), ALONE).step(
        begin(model, recipe), Recorder(), batch, 0.01
    )
    mean, std = (torch.tensor(numbers, dtype=torch.float64)[:, None, None] for numbers in (usual.mean, usual.std))
    torch.testing.assert_close(seen[0].double(), (batch.pixels.double() / 255 - mean) / std, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mixed", ["none", "mixup"])
def test_correct_predictions_are_counted(mixed: str) -> None:
    case, batch = CASES["sgd"]._replace(mixed=mixed), batches(1, mixed)[0]
    model = tiny().double()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    _, (stepped,) = ours(model, case, [batch])
    larger = [
        batch.labels[i] if batch.lam[i] > 0.5 else min(batch.labels[i], batch.labels[i ^ 1])
        if batch.lam[i] == 0.5 else batch.labels[i ^ 1]
        for i in range(IMAGES)
    ]  # fmt: skip
    assert stepped.total == sum(int(label) == 2 for label in larger)


# ── invariants ──


def test_frozen_parameters_have_no_updates_and_no_state() -> None:
    model, data = tiny().double(), batches(3)
    frozen = set(freeze(model, ("*", "!blocks.1.*", "!head.*")))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state, _ = ours(model, CASES["adamw"], data)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), before[name]) is (name in frozen), name
        assert (parameter in state.optimizer.state) is (name not in frozen), name
        assert (parameter.grad is None) is (name in frozen), name


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    model = tiny(stem="conv_stem")
    freeze(model, ("*", "!head.*"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours(model, CASES["sgd"], batches(2))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"head.weight", "head.bias"}


def test_gradient_checkpointing_changes_no_step() -> None:
    """Also with dropout and stochastic depth, which are redrawn in the backward pass."""
    results = []
    for checkpointing in (False, True):
        model = tiny(mlp_dropout=0.3, embed_dropout=0.2, stochastic_depth=0.4).double()
        model.gradient_checkpointing = checkpointing
        results.append(ours(model, CASES["adamw"], batches(3)))
    (state, stepped), (other, other_stepped) = results
    assert stepped == other_stepped
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter, other.model.get_parameter(name)), name


def test_dropout_depends_on_the_position_in_the_run() -> None:
    data = [batches(1)[0]] * 2
    losses = []
    for chance in (7, 8):
        model = tiny(mlp_dropout=0.5).double()
        torch.manual_seed(chance)
        losses.append([step.loss for step in ours(model, CASES["sgd"]._replace(gradient_accumulation=2), data)[1]])
    assert losses[0] == losses[1]
    still = [step.loss for step in ours(tiny().double(), CASES["sgd"]._replace(gradient_accumulation=2), data)[1]]
    assert losses[0] != still


class RecordingDouble(Double):
    """Records the model's outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.outputs: list[Tensor] = []

    def forward(self, pixels: Tensor) -> Tensor:
        result = super().forward(pixels)
        self.outputs.append(result.detach())
        return result


def test_dropout_differs_between_steps_micro_batches_and_ranks() -> None:
    (batch,) = batches(1)
    same = batch._replace(pixels=batch.pixels[:4].repeat(2, 1, 1, 1), labels=batch.labels[:4].repeat(2))
    case = CASES["sgd"]._replace(gradient_accumulation=2)
    outputs: list[Tensor] = []
    for rank in (0, 1, 0):
        model = tiny(mlp_dropout=0.5).double()
        forward, state = RecordingDouble(model), begin(model, case.recipe())
        stepper = Stepper(
            case.recipe(), EXACT, CPU, "float32", plain_loss(case.recipe()), Ranks(Processes(rank=rank), CPU)
        )
        for _ in range(2):  # with a learning rate of 0 only dropout can differ
            stepper.step(state, forward, same, 0.0)
        outputs += forward.outputs
    first, again = outputs[:8], outputs[8:]
    for one, left in enumerate(first):
        assert all(not torch.equal(left, right) for right in first[one + 1 :])
    assert all(torch.equal(left, right) for left, right in zip(first[:4], again, strict=True))


def break_model(model: ViT, kind: str) -> None:
    with torch.no_grad():
        if kind == "gradient":  # the loss is finite, only the gradient is not
            model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
        else:
            model.head.bias[0] = math.nan if kind == "nan" else math.inf


@pytest.mark.parametrize("kind", ["nan", "infinite", "gradient"])
def test_a_non_finite_step_changes_nothing(kind: str) -> None:
    case = CASES["everything"]
    model, data = tiny().double(), batches(3, "both")
    state, _ = ours(model, case, data[:2])
    break_model(model, kind)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = {name: tensor.clone() for name, tensor in state.average.state().items()}
    memory = {id(p): {key: value.clone() for key, value in kept.items()} for p, kept in state.optimizer.state.items()}
    stepper = Stepper(case.recipe(), EXACT, CPU, "float32", plain_loss(case.recipe()), ALONE)
    with pytest.raises(Diverged, match=r"step 2: the loss is .*, the gradient norm (nan|inf)"):
        stepper.step(state, Double(model), data[2], 0.01)
    assert state.progress.step == 2
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(tensor, average[name]) for name, tensor in state.average.state().items())
    for parameter, kept in state.optimizer.state.items():
        assert all(torch.equal(value, memory[id(parameter)][key]) for key, value in kept.items())


def test_in_fp16_a_step_with_overflow_is_skipped() -> None:
    case = CASES["adamw"]
    model, data = tiny(), batches(3, "none")
    state = begin(model, case.recipe())
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    stepper = Stepper(case.recipe(), EXACT, CPU, "fp16", plain_loss(case.recipe()), ALONE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stepped = stepper.step(state, model, data[0], 0.01)
    assert math.isfinite(stepped.loss)
    assert not math.isfinite(stepped.gradient_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert state.scaler.get_scale() == 2.0**126
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert math.isfinite(stepper.step(state, model, data[1], 0.01).gradient_norm)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_in_fp16_overflow_at_scale_1_raises() -> None:
    case, (batch,) = CASES["adamw"], batches(1)
    model = tiny()
    break_model(model, "gradient")
    state = begin(model, case.recipe())
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    stepper = Stepper(case.recipe(), EXACT, CPU, "fp16", plain_loss(case.recipe()), ALONE)
    stepper.step(state, model, batch, 0.01)
    assert state.scaler.get_scale() == 1  # cannot be reduced further
    with pytest.raises(Diverged, match=r"step 1: the loss is .*, the gradient norm nan"):
        stepper.step(state, model, batch, 0.01)


def test_gradients_are_clipped_after_unscaling() -> None:
    case, data = CASES["clipped"], batches(2)
    actual = []
    for enabled in (False, True):
        model = tiny()
        state = begin(model, case.recipe())
        state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        stepper = Stepper(case.recipe(), EXACT, CPU, "float32", plain_loss(case.recipe()), ALONE)
        actual.append((model, [stepper.step(state, model, batch, 0.01) for batch in data]))
    (plain, expected), (scaled, stepped) = actual
    assert min(step.gradient_norm for step in expected) > 0.5  # the maximum norm, so that something is clipped
    assert [step.gradient_norm for step in stepped] == pytest.approx([step.gradient_norm for step in expected])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(scaled.get_parameter(name), parameter, rtol=0, atol=1e-6)


def test_the_fp16_loss_scale_is_saved_with_the_state(tmp_path: Path) -> None:
    case, (batch,) = CASES["adamw"], batches(1)
    model, setting = tiny(), Setting(1, 1, "fp16")
    state = begin(model, case.recipe())
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=3)
    Stepper(case.recipe(), EXACT, CPU, "fp16", plain_loss(case.recipe()), ALONE).step(state, model, batch, 0.01)
    save_state(tmp_path, state, setting)
    other = begin(tiny(), case.recipe())
    other.scaler = torch.amp.GradScaler("cpu")
    assert load_state(tmp_path, other, setting, ALONE) == []
    assert other.scaler.state_dict() == state.scaler.state_dict()
    assert (other.scaler.get_scale(), other.scaler.state_dict()["_growth_tracker"]) == (2.0**7, 1)
