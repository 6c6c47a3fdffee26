"""Muon against torch's implementation, matrix by matrix, with AdamW for the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Processes
from vitrail.training.distributed import Ranks
from vitrail.training.muon import Muon, orthogonalised
from vitrail.training.optimizers import Optimizer, can_skip_step, make_optimizer, set_learning_rate, step_unless
from vitrail.training.state import Progress, Setting, State
from vitrail.training.state_files import load_state, save_state

CONFIG = Optimizer(kind="muon", lr=0.01, weight_decay=0.1, momentum=0.95)

SETTING = Setting(threads=1, processes=1, precision="float32")


def small(**options: Any) -> ViT:
    fields = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 3, "init": "timm"}
    return ViT(ViTConfig(**fields | options))


def with_gradients(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    return [tensor.clone() for tensor in (*model.parameters(), *kept)]


def of_torch(matrix: Tensor) -> tuple[nn.Parameter, torch.optim.Muon]:
    own = nn.Parameter(matrix.detach().clone())
    return own, torch.optim.Muon([own], 0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def test_each_matrix_matches_torch() -> None:
    model = small()
    optimizer = make_optimizer(model, CONFIG)
    peers: dict[str, list[tuple[nn.Parameter, torch.optim.Muon]]] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            peers[name] = [of_torch(part) for part in parameter.chunk(3 if "qkv" in name else 1)]
    assert len(peers) == 8
    others = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if name not in peers}
    kernels = {"patch_embed.proj.weight", "head.weight"}
    adamw = torch.optim.AdamW(
        [
            {"params": [others[name] for name in others if name in kernels], "weight_decay": 0.1},
            {"params": [others[name] for name in others if name not in kernels], "weight_decay": 0.0},
        ],
        0.01,
    )
    for step in range(4):
        with_gradients(model, step)
        for name, parts in peers.items():
            gradient = model.get_parameter(name).grad
            for (own, peer), part in zip(parts, gradient.chunk(len(parts)), strict=True):
                own.grad = part.clone()
                peer.step()
        for name, own in others.items():
            own.grad = model.get_parameter(name).grad.clone()
        adamw.step()
        optimizer.step()
    for name, parts in peers.items():
        expected = torch.cat([own for own, _ in parts])
        # torch's computes in bf16.
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=0, atol=1e-3)
    for name, own in others.items():
        torch.testing.assert_close(model.get_parameter(name), own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (3, 16, 48)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    made = orthogonalised(torch.randn(shape, generator=generator)).float()
    assert made.shape == torch.Size(shape)
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.4
    assert not orthogonalised(torch.zeros(shape)).any()


@pytest.mark.filterwarnings("error")  # including torch's bf16 warning, which the suite ignores
def test_a_cpu_computes_in_float32() -> None:
    assert orthogonalised(torch.randn(2, 8, 16)).dtype == torch.float32


def test_a_bad_step_changes_nothing() -> None:
    model = small()
    optimizer = make_optimizer(model, CONFIG)
    with_gradients(model)
    step_unless(torch.tensor(False), optimizer)
    before = everything(model, optimizer)
    with_gradients(model)
    model.blocks[0].attn.qkv.weight.grad[0, 0] = torch.nan
    model.head.weight.grad[0, 0] = torch.inf
    assert can_skip_step(optimizer)
    step_unless(torch.tensor(True), optimizer)
    after = everything(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with_gradients(model)  # a skipped step does not affect the next one
    optimizer.step()
    changed = zip(before, [p.detach() for p in model.parameters()], strict=False)
    assert all(now.isfinite().all() and not torch.equal(was, now) for was, now in changed)


def test_a_good_step_is_taken() -> None:
    torch.manual_seed(0)
    one = small()
    other = small()
    other.load_state_dict(one.state_dict())
    for model, judged in ((one, False), (other, True)):
        optimizer = make_optimizer(model, CONFIG)
        for step in range(3):
            with_gradients(model, step)
            if judged:
                step_unless(torch.tensor(False), optimizer)
            else:
                optimizer.step()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=1e-6, atol=1e-6)


def test_learning_rates_reach_matrices_and_the_rest() -> None:
    model = small()
    optimizer = make_optimizer(model, CONFIG.replace(layer_decay=0.5))
    assert isinstance(optimizer, Muon)
    names = [group["name"] for group in optimizer.param_groups]
    assert names[:5] == ["stem.decay", "stem.no_decay", "blocks.0.matrices", "blocks.0.no_decay", "blocks.1.matrices"]
    set_learning_rate(optimizer, 0.0)
    with_gradients(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_frozen_parameters_and_missing_gradients_are_left_alone() -> None:
    model = small()
    model.blocks[0].requires_grad_(False)
    optimizer = make_optimizer(model, CONFIG)
    with_gradients(model)
    model.blocks[1].attn.qkv.weight.grad = None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {"blocks.1.attn.qkv.weight", *(name for name in before if name.startswith("blocks.0."))}


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    states = []
    for _ in range(2):
        model = small()
        states.append(State(model, make_optimizer(model, CONFIG), None, Progress()))
    straight, again = states
    with_gradients(straight.model, 0)
    straight.optimizer.step()
    straight.progress.step = 1
    save_state(tmp_path / "state", straight, SETTING)
    assert load_state(tmp_path / "state", again, SETTING, Ranks(Processes(), torch.device("cpu"))) == []
    for state in states:
        with_gradients(state.model, 1)
        state.optimizer.step()
    pairs = zip(*(everything(state.model, state.optimizer) for state in states), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
