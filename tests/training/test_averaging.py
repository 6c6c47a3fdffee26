"""Weight averaging against a plain loop, its state bit for bit, and swapping it in and out."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.averaging import Average, Averaging

SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, classes=3, stem="conv_stem")


def stepped(model: nn.Module, steps: int) -> Iterator[int]:
    """Change every weight and running statistic at random, step by step."""
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
                else:
                    tensor.add_(1)
        yield step


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("start", [0, 4])
def test_ema_matches_the_plain_loop(warmup: bool, start: int) -> None:
    model = ViT(SMALL)
    average = Average(model, Averaging(kind="ema", decay=0.9, warmup=warmup, start=start))
    expected = {name: tensor.double() for name, tensor in values(model).items()}
    for step in stepped(model, 12):
        average.update(model, step)
        t = step - start
        decay = 0.0 if t < 1 else min(0.9, (1 + t) / (10 + t)) if warmup else 0.9
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * tensor.double()
            else:
                expected[name] = tensor.double()
    for name, tensor in average.state().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_polyak_is_the_mean_from_start_on() -> None:
    model = ViT(SMALL)
    average = Average(model, Averaging(kind="polyak", start=3))
    seen = []
    for step in stepped(model, 10):
        average.update(model, step)
        if step > 3:
            seen.append(values(model)["head.weight"].double())
    torch.testing.assert_close(average.state()["head.weight"].double(), torch.stack(seen).mean(0), rtol=1e-6, atol=1e-6)


def test_before_start_the_average_equals_the_weights() -> None:
    model = ViT(SMALL)
    average = Average(model, Averaging(kind="ema", start=100))
    for step in stepped(model, 3):
        average.update(model, step)
        assert equal(average.state(), values(model))


def test_the_average_of_bf16_weights_is_float32() -> None:
    model = nn.Linear(4, 4).bfloat16()
    average = Average(model, Averaging(kind="ema", decay=0.9999))
    before = average.state()["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    average.update(model, 1)
    assert average.state()["weight"].dtype == torch.float32
    torch.testing.assert_close(average.state()["weight"], before + 1e-4, rtol=0, atol=1e-5)
    assert not torch.equal(average.state()["weight"], before)


@pytest.mark.parametrize("kind", ["ema", "polyak"])
def test_a_resumed_average_is_bit_identical(kind: str) -> None:
    averaging = Averaging(kind=kind, decay=0.97, warmup=True, start=2)
    model = ViT(SMALL)
    whole = Average(model, averaging)
    resumed = Average(model, averaging)
    for step in stepped(model, 10):
        whole.update(model, step)
        resumed.update(model, step)
        if step == 5:
            saved = {name: tensor.clone() for name, tensor in resumed.state().items()}
            resumed = Average(ViT(SMALL), averaging)
            resumed.load(saved)
            assert equal(resumed.state(), saved)
    assert equal(resumed.state(), whole.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_in_and_out_is_bit_exact(dtype: torch.dtype) -> None:
    model = ViT(SMALL).to(dtype)
    average = Average(model, Averaging(kind="ema", decay=0.5))
    for step in stepped(model, 3):
        average.update(model, step)
    before, places = values(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    with average.swapped(model):
        assert equal(values(model), {name: tensor.to(before[name].dtype) for name, tensor in average.state().items()})
        assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    assert equal(values(model), before)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    with pytest.raises(RuntimeError, match="inside"), average.swapped(model):
        raise RuntimeError("inside")
    assert equal(values(model), before)


def test_copied_into_the_model() -> None:
    model = ViT(SMALL)
    average = Average(model, Averaging(kind="ema", decay=0.5))
    for step in stepped(model, 3):
        average.update(model, step)
    average.copy_to(model)
    assert equal(values(model), average.state())
    assert all(p.requires_grad for p in model.parameters())


def test_a_state_of_another_model_raises() -> None:
    model = ViT(SMALL)
    average = Average(model, Averaging(kind="ema"))
    before = {name: tensor.clone() for name, tensor in average.state().items()}
    state = average.state()
    with pytest.raises(CheckpointError, match=r"head\.weight is \(4, 8\) torch\.float32 in the file and \(3, 8\)"):
        average.load({**state, "head.weight": torch.zeros(4, 8)})
    with pytest.raises(CheckpointError, match="extra is missing in the model"):
        average.load({**state, "extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"norm\.bias is missing in the saved average"):
        average.load({name: tensor for name, tensor in state.items() if name != "norm.bias"})
    assert equal(average.state(), before)


def test_averaging_none_raises() -> None:
    assert not Averaging().on
    with pytest.raises(ConfigError, match=r"averaging\.kind is 'none', so no average is kept"):
        Average(nn.Linear(1, 1), Averaging())
