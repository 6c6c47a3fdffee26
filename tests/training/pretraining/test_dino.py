"""DINO: loss and head against lightly and against a plain reference; teacher, centre, schedules and refusals."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import import_peer, scramble
from torch import Tensor

from vitrail import ViT, ViTConfig
from vitrail.errors import ConfigError, InputError
from vitrail.training.pretraining.dino import (
    Dino,
    DinoHead,
    DinoSettings,
    dino_loss,
    last_layer_frozen,
    teacher_momentum,
    teacher_temperature_at,
)

TINY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 24, "depth": 2, "heads": 3, "classes": 0}
SMALL = DinoSettings(prototypes=13, hidden=20, bottleneck=8, local_crops=3)
TOLERANCE = 1e-5


def build(changes: DinoSettings = SMALL, **config: Any) -> Dino:
    model = Dino(ViT(ViTConfig(**{**TINY, **config})), changes)
    scramble(model)
    return model.train()


def views(images: int = 2, local: int = 3, size: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(images, 2, 3, 32, 32, dtype=dtype), torch.randn(images, local, 3, size, size, dtype=dtype)


# ── the loss ──


def plain_loss(student: Tensor, teacher: Tensor, centre: Tensor, cold: float, warm: float) -> Tensor:
    """Return the loss as the paper's pseudocode has it: a mean over pairs of different views, image by image."""
    terms = []
    for t in range(len(teacher)):
        for s in range(len(student)):
            if s != t:
                for image in range(student.shape[1]):
                    target = ((teacher[t, image] - centre) / warm).exp()
                    logits = student[s, image] / cold
                    terms.append(-(target / target.sum() * (logits - logits.exp().sum().log())).sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("count", [2, 5])
def test_loss_equals_the_formula(count: int) -> None:
    student = torch.randn(count, 3, 7, dtype=torch.float64, requires_grad=True)
    teacher, centre = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    actual, expected = dino_loss(student, teacher, centre, 0.1, 0.04), plain_loss(student, teacher, centre, 0.1, 0.04)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, student)[0] for loss in (actual, expected)))


@pytest.mark.parametrize("count", [2, 5])
def test_loss_and_centre_equal_lightlys(count: int) -> None:
    pytest.importorskip("lightly", reason="the extra `test` is not installed completely")
    peer = import_peer("lightly.loss").DINOLoss(output_dim=7, student_temp=0.1, center_momentum=0.9).double()
    peer.center.normal_()
    centre = peer.center.flatten().clone()
    student = torch.randn(count, 3, 7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 3, 7, dtype=torch.float64)
    actual = dino_loss(student, teacher, centre, 0.1, 0.05)
    expected = peer(list(teacher), list(student), teacher_temp=0.05)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=TOLERANCE, atol=TOLERANCE)

    model = build(SMALL.replace(prototypes=7)).double()
    model.centre.copy_(centre)
    model.after_step(9, 20, teacher.mean(dim=(0, 1)))  # the first steps follow another rule
    torch.testing.assert_close(model.centre, peer.center.flatten())


def test_head_equals_lightlys() -> None:
    pytest.importorskip("lightly", reason="the extra `test` is not installed completely")
    with pytest.warns(FutureWarning, match="weight_norm"):  # torch's, about how lightly normalises
        peer = import_peer("lightly.models.modules.heads").DINOProjectionHead(24, 20, 8, 13).double()
    head = DinoHead(24, SMALL).double()
    ours = dict(head.named_parameters())
    theirs = {
        "fc1": peer.layers[0],
        "fc2": peer.layers[2],
        "fc3": peer.layers[4],
    }
    pairs = [(ours[f"{n}.{kind}"], getattr(layer, kind)) for n, layer in theirs.items() for kind in ("weight", "bias")]
    pairs.append((ours["last_layer.weight"], peer.last_layer.weight_v))
    assert len(pairs) == len(ours)
    with torch.no_grad():
        for own, other in pairs:
            own.normal_()
            other.copy_(own)
    x = torch.randn(5, 24, dtype=torch.float64)
    weights = torch.randn(5, 13, dtype=torch.float64)
    outputs = head(x), peer(x)
    torch.testing.assert_close(*outputs, rtol=TOLERANCE, atol=TOLERANCE)
    for output in outputs:
        (output * weights).sum().backward()
    for own, other in pairs:
        torch.testing.assert_close(own.grad, other.grad, rtol=TOLERANCE, atol=TOLERANCE)


def test_head_outputs_are_cosines() -> None:
    head = DinoHead(24, SMALL)
    head.last_layer.weight.data.mul_(1000)
    assert head(torch.randn(50, 24)).abs().max() <= 1 + 1e-6


# ── the model ──


def test_forward_equals_a_resized_student_view_by_view() -> None:
    model = build().double()
    large, small = views(dtype=torch.float64)
    resized = copy.deepcopy(model.encoder)
    resized.resize(16)
    student = [model.encoder(large[:, v]) for v in range(2)] + [resized(small[:, v]) for v in range(3)]
    teacher = [model.teacher(large[:, v]) for v in range(2)]
    by_student, by_teacher = model.head(torch.stack(student)), model.teacher_head(torch.stack(teacher))
    output = model(large, small, torch.tensor(0.05))
    expected = plain_loss(by_student, by_teacher, model.centre, 0.1, 0.05)
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.teacher_mean, by_teacher.mean(dim=(0, 1)))


def test_gradients_reach_the_student_only() -> None:
    model = build()
    model(*views(), teacher_temperature=0.04).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"encoder", "head"}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == (name in trained), name


def test_no_local_views() -> None:
    model = build(SMALL.replace(local_crops=0))
    assert model(*views(local=0), teacher_temperature=0.04).loss.isfinite()


def test_the_teacher_has_no_dropout() -> None:
    model = build(stochastic_depth=0.5, embed_dropout=0.5)
    images = torch.randn(2, 3, 32, 32)
    assert model.encoder.training
    assert torch.equal(model.teacher(images), model.teacher(images))
    assert not torch.equal(model.encoder(images), model.encoder(images))


def test_teacher_is_the_closed_form_of_the_moving_average() -> None:
    steps, model = 7, build(SMALL.replace(momentum=0.9), stem="conv_stem").double()
    students = [{n: t.clone() for n, t in model.state_dict().items() if n.startswith(("encoder.", "head."))}]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(steps):
        for seed, module in enumerate((model.encoder, model.head)):
            scramble(module, seed=10 * step + seed)
        students.append({name: model.state_dict()[name].clone() for name in students[0]})
        model.after_step(step, steps, torch.zeros(13, dtype=torch.float64))
    momenta = [1 - 0.1 * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]
    for name, tensor in model.state_dict().items():
        own = name.replace("teacher_head.", "head.").replace("teacher.", "encoder.")
        if own == name or not tensor.is_floating_point():
            continue
        expected = start[name] * math.prod(momenta)
        for step in range(steps):
            expected += students[step + 1][own] * (1 - momenta[step]) * math.prod(momenta[step + 1 :])
        torch.testing.assert_close(tensor, expected)


def test_centre_is_a_mean_and_then_a_moving_average() -> None:
    model = build(SMALL.replace(centre_momentum=0.7)).double()
    means = torch.randn(6, 13, dtype=torch.float64)
    for step, mean in enumerate(means):
        model.after_step(step, 6, mean)
        if step == 2:
            torch.testing.assert_close(model.centre, means[:3].mean(dim=0))
    expected = means[:3].mean(dim=0)
    for mean in means[3:]:
        expected = 0.7 * expected + 0.3 * mean
    torch.testing.assert_close(model.centre, expected)


def test_a_state_dict_resumes_exactly() -> None:
    def train(model: Dino, batches: list[tuple[Tensor, Tensor]], start: int) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step, batch in enumerate(batches, start):
            output = model(*batch, teacher_temperature=teacher_temperature_at(model.settings, step, 4))
            optimizer.zero_grad()
            output.loss.backward()
            model.before_step(step, 4)
            optimizer.step()
            model.after_step(step, 4, output.teacher_mean)

    batches = [views() for _ in range(4)]
    straight, first, second = build(), build(), build()
    train(straight, batches, 0)
    train(first, batches[:2], 0)
    scramble(second, seed=9).load_state_dict(first.state_dict())
    train(second.train(), batches[2:], 2)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_the_frozen_last_layer_has_no_gradient() -> None:
    model = build(SMALL.replace(freeze_last_layer=0.25))
    for step in (0, 1):
        model(*views(), teacher_temperature=0.04).loss.backward()
        model.before_step(step, 4)
        assert (model.head.last_layer.weight.grad is None) == (step == 0)
        assert model.head.fc1.weight.grad is not None


def test_bf16_autocast_is_close() -> None:
    model, batch = build(), views()
    exact = model(*batch, teacher_temperature=0.04)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*batch, teacher_temperature=0.04)
    assert rounded.loss.dtype == rounded.teacher_mean.dtype == torch.float32
    torch.testing.assert_close(rounded.loss, exact.loss, rtol=0.1, atol=0.1)


# ── schedules ──


@given(steps=st.integers(1, 1000), momentum=st.floats(0, 1), fraction=st.floats(0, 1))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_schedules_rise_from_the_first_to_the_last_value(steps: int, momentum: float, fraction: float) -> None:
    chosen = DinoSettings(momentum=momentum, teacher_temperature=0.07, warmup_fraction=fraction)
    momenta = [teacher_momentum(chosen, step, steps) for step in range(steps + 1)]
    temperatures = [teacher_temperature_at(chosen, step, steps) for step in range(steps + 1)]
    assert momenta == sorted(momenta)
    assert momenta[0] == pytest.approx(momentum)
    assert momenta[-1] == pytest.approx(1.0)
    assert temperatures == sorted(temperatures)
    assert temperatures[0] == (0.04 if fraction else 0.07)
    assert temperatures[-1] == 0.07


def test_the_last_layer_is_frozen_for_its_fraction() -> None:
    assert [last_layer_frozen(DinoSettings(freeze_last_layer=0.2), step, 10) for step in range(4)] == [
        True,
        True,
        False,
        False,
    ]


# ── sizes and refusals ──


@pytest.mark.parametrize(
    ("image", "patch", "expected"), [(224, 16, 96), (224, 32, 96), (32, 8, 16), (32, 4, 12), (28, 4, 12), (64, 16, 32)]
)
def test_default_size_of_local_views(image: int, patch: int, expected: int) -> None:
    config = ViTConfig(**{**TINY, "image_size": image, "patch_size": patch})
    assert DinoSettings().size_of_local_views(config) == (expected, expected)
    assert DinoSettings().crops(config).local_size == (expected, expected)


def test_local_views_may_be_oblong() -> None:
    config = ViTConfig(**{**TINY, "image_size": (32, 64)})
    assert DinoSettings().size_of_local_views(config) == (16, 24)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DinoSettings(prototypes=1), "prototypes is 1; .* use 2 or more"),
        (lambda: DinoSettings(local_area=(0.1, 1.5)), r"local_area is \(0.1, 1.5\); .* up to 1"),
        (lambda: DinoSettings(global_area=(0.9, 0.5)), "global_area .* put the smaller number first"),
        (lambda: build(patch_size=16), "32×32 in patches of 16×16 make local views of 1×1 patches.* smaller patches"),
        (lambda: build(SMALL.replace(local_size=(8, 16))), "local views of 1×2 patches"),
        (lambda: build(SMALL.replace(local_size=20)), "local_size is 20×20, .* multiples of the patch size"),
        (lambda: build(classes=5), r"one for 5 classes; .*reset_head\(0\)"),
        (lambda: build(pool="none"), "pool is 'none'; use pool='cls'"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_model_without_blocks_is_refused() -> None:
    config = ViTConfig(
        image_size=32, patch_size=2, stem="resnet", resnet={"depths": (1, 1), "width_factor": 0.5, "root_stride": 1},
        depth=0, width=256, class_token="none", position="none", pool="mean", final_norm="none", classes=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"depth = 0.*choose a ViT"):
        Dino(ViT(config), SMALL)


def test_views_of_other_settings_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected local views \(batch, 3, .* found \(2, 2, 3, 16, 16\)"):
        build()(*views(local=2), teacher_temperature=0.04)
