"""LoRA adapters: the same numbers as peft, an unchanged model before training, and merging."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.peer_models import SMALL, TRANSFORMERS
from tests.support.peers import import_peer, relative_error, rename, scramble
from torch import Tensor, nn

from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.engine import prepare
from vitrail.acceleration.planner import ExecutionPlan
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.lora import LoRA, LoRALinear, add_adapters, check_lora, has_adapters, merged
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT

ALL = LoRA(rank=4, alpha=6.0, on=("qkv", "proj", "fc1", "fc2"))


def build(**options: Any) -> ViT:
    model = ViT(ViTConfig(**{**SMALL, **options}))
    scramble(model)
    return model


def adapted(settings: LoRA = ALL, seed: int = 1, **options: Any) -> ViT:
    """Return a model whose adapters are not zero, as after training."""
    model = build(**options)
    add_adapters(model, settings, seed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))


# ── peft ──


def fused_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a transformers ViT, and concatenate query, key and value."""
    state = rename(state, TRANSFORMERS)
    for name in [name for name in state if ".attn.q." in name]:
        parts = [state.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        state[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return state


def peft_model(settings: LoRA) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return peft's adapted ViT in float64, with random adapters, and the plain weights under our names."""
    transformers = import_peer("transformers")
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96,
        num_labels=7, hidden_act="gelu",
    )  # fmt: skip
    plain = scramble(transformers.ViTForImageClassification(config)).double()
    weights = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    names = {"qkv": ["q_proj", "k_proj", "v_proj"], "proj": ["o_proj"], "fc1": ["fc1"], "fc2": ["fc2"]}
    targets = [target for layer in settings.on for target in names[layer]]
    peft = import_peer("peft")
    theirs = peft.get_peft_model(
        plain, peft.LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets)
    ).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return theirs, fused_names(weights)


def their_adapters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack tensors named as peft's adapters, under our names."""
    pattern = r".*layers\.(\d+)\.(?:attention|mlp)\.(\w+)\.(lora_[AB])\.default\.weight"
    found: dict[tuple[int, str, str], list[Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(pattern, name):
            layer = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "proj"}.get(match[2], match[2])
            found.setdefault((int(match[1]), layer, match[3]), []).append(tensor)
    owner = {"qkv": "attn", "proj": "attn", "fc1": "mlp", "fc2": "mlp"}
    return {
        f"blocks.{block}.{owner[layer]}.{layer}.{matrix}": torch.stack(parts)
        for (block, layer, matrix), parts in found.items()
    }


@pytest.mark.parametrize("settings", [LoRA(rank=4, alpha=8.0), ALL], ids=["qkv", "all"])
def test_logits_gradients_and_merged_weights_match_peft(settings: LoRA) -> None:
    theirs, plain = peft_model(settings)
    ours = ViT(ViTConfig(**SMALL, mlp_width=96, norm_eps=1e-12)).double().eval()
    ours.load_state_dict(plain)
    add_adapters(ours, settings, seed=0)
    adapters = their_adapters(dict(theirs.named_parameters()))
    assert adapters.keys() == {name for name in ours.state_dict() if "lora_" in name}
    ours.load_state_dict({**plain, **adapters})

    x, labels = images(4).double(), torch.tensor([0, 3, 6, 3])
    expected, actual = theirs(x).logits, ours(x)
    assert relative_error(actual.detach(), expected.detach()) <= 1e-10
    with torch.no_grad(), theirs.disable_adapter():
        assert relative_error(theirs(x).logits, expected.detach()) > 0.1  # the adapters matter
    F.cross_entropy(expected, labels).backward()
    F.cross_entropy(actual, labels).backward()
    gradients = their_adapters({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    assert gradients.keys() == adapters.keys()
    for name, gradient in gradients.items():
        grown = ours.get_parameter(name).grad
        assert grown is not None
        torch.testing.assert_close(grown, gradient, atol=1e-10, rtol=1e-8)

    weights = fused_names(theirs.merge_and_unload().state_dict())
    result = merged(ours).state_dict()
    assert result.keys() == weights.keys()
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-12, rtol=0)


def test_a_is_drawn_as_in_peft() -> None:
    theirs = import_peer("peft").get_peft_model(
        nn.Sequential(nn.Linear(4096, 8)), import_peer("peft").LoraConfig(r=64, target_modules=["0"])
    )
    drawn = next(parameter for name, parameter in theirs.named_parameters() if "lora_A" in name)
    generator = torch.Generator().manual_seed(0)
    ours = LoRALinear(nn.Linear(4096, 8), rank=64, scale=1.0, stacked=1, generator=generator).lora_A
    bound = 4096**-0.5
    for matrix in (drawn.detach(), ours.detach()):
        assert 0.99 * bound < matrix.abs().max() <= bound
        assert matrix.std() == pytest.approx(bound / 3**0.5, rel=0.01)


# ── a model with adapters ──


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False, "mlp_bias": False}, {"activation": "swiglu"}])
def test_new_adapters_change_nothing(options: dict[str, Any]) -> None:
    model = build(**options)
    with torch.no_grad():
        before = model(images())
        add_adapters(model, ALL, seed=1)
        assert torch.equal(model(images()), before)
    assert sum(isinstance(module, LoRALinear) for module in model.modules()) == 4 * 3


def test_the_seed_draws_the_adapters() -> None:
    one, same, other = (adapted(seed=seed).state_dict() for seed in (1, 1, 2))
    drawn = [name for name in one if name.endswith("lora_A")]
    assert all(torch.equal(one[name], same[name]) for name in drawn)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert len({float(one[name][0, 0, 0]) for name in drawn}) == len(drawn)
    first = one["blocks.0.attn.qkv.lora_A"]
    assert not torch.equal(first[0], first[1])


def test_adding_adapters_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    model = build()
    torch.set_rng_state(before)
    add_adapters(model, ALL, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"activation": "swiglu"}, {"norm_order": "post"}])
def test_merging_keeps_the_logits(options: dict[str, Any]) -> None:
    model = adapted(**options)
    plain = merged(model)
    with torch.no_grad():
        assert relative_error(plain(images()), model(images())) < 1e-5
        assert relative_error(plain(images()), build(**options)(images())) > 1e-2
    assert plain.state_dict().keys() == build(**options).state_dict().keys()
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in build(**options).named_modules()]
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert has_adapters(model)
    assert not has_adapters(plain)


def test_a_merged_model_shares_nothing_with_the_adapted_one() -> None:
    model = adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in merged(model).parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_plain_model_merges_into_itself() -> None:
    model = build()
    weights = merged(model).state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_rank_0_adds_nothing() -> None:
    model = build()
    add_adapters(model, LoRA(), seed=0)
    assert not has_adapters(model)


def test_gradient_checkpointing_and_tracing_see_the_adapters() -> None:
    model = adapted().train()
    expected = model(images())
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing = True
    model(images()).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    traced = model.trace(images(), attention=(0, 1, 2)).logits
    torch.testing.assert_close(traced, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradients() -> None:
    model = adapted(depth=1).train()
    expected = model(images())
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    actual = torch.compile(model, backend="aot_eager", fullgraph=True)(images())
    actual.sum().backward()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-4)


# ── what is refused ──


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": -1}, "rank is -1: input should be greater than or equal to 0"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"rank": 2, "alpha": 0.0}, "alpha is 0.0: input should be greater than 0"),
        ({"rank": 2, "on": ("fc3",)}, "on.0 is 'fc3', which is not one of 'qkv', 'proj', 'fc1' or 'fc2'"),
    ],
)
def test_invalid_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        LoRA(**options)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (LoRA(rank=49), {}, "lora.rank is 49, but the matrices of qkv are 48×48; use a rank of at most 48"),
        (
            LoRA(rank=33, on=("fc2",)),
            {"mlp_width": 32},
            "lora.rank is 33, but the matrices of fc2 are 48×32; use a rank of at most 32",
        ),
        (LoRA(rank=2, on=()), {}, "lora.on is empty, so nothing would be adapted; name at least one of qkv"),
        (
            LoRA(rank=2, on=("proj",)),
            {"out_proj": False, "heads": 1},
            "lora.on names proj, but the attention of this model has no output projection; leave it out",
        ),
    ],
)
def test_models_that_cannot_be_adapted(settings: LoRA, options: dict[str, Any], words: str) -> None:
    config = ViTConfig(**{**SMALL, **options})
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_lora(settings, config)
    with pytest.raises(ConfigError, match=re.escape(words)):
        add_adapters(ViT(config), settings, seed=0)


def test_a_model_without_blocks_cannot_be_adapted() -> None:
    words = "LoRA adapts the matrices of encoder blocks, but this model has none; set lora.rank=0"
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_lora(LoRA(rank=2), variant_config("R26"))


def test_the_largest_rank_is_that_of_the_matrix() -> None:
    check_lora(LoRA(rank=48), ViTConfig(**SMALL))


def test_what_cannot_see_adapters_refuses_them() -> None:
    model = adapted()
    with pytest.raises(ConfigError, match="the fused path does not support LoRA adapters; train the model itself"):
        FusedTraining(model)
    with pytest.raises(ConfigError, match="the model has LoRA adapters; merge them first"):
        prepare(model, ExecutionPlan("eager", "float32"))
    with pytest.raises(ConfigError, match="the model already has LoRA adapters; merge them first"):
        add_adapters(model, ALL, seed=0)


@pytest.mark.parametrize(("alpha", "scale", "recorded"), [(None, 2.0, 16.0), (4.0, 0.5, 4.0)])
def test_the_scale_is_alpha_over_rank(alpha: float | None, scale: float, recorded: float) -> None:
    settings = LoRA(rank=8, alpha=alpha, on=("qkv", "fc1"))
    assert settings.scale == scale
    assert settings.record() == {"rank": 8, "alpha": recorded, "on": ["qkv", "fc1"]}
