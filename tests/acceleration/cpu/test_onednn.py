"""Packed blocks, and batches split between CPU threads, give the model's outputs."""

import threading

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import CPU, KINDS, bundle, eager, pixels
from torch import Tensor

from vitrail import Bundle
from vitrail.acceleration.cpu.onednn import PackedBlock, PackedStem, pack
from vitrail.acceleration.cpu.threads import LARGEST, SMALLEST, CpuThreads
from vitrail.acceleration.engine import open_engine, prepare
from vitrail.acceleration.planner import plan_of, unsupported_by_onednn
from vitrail.runtime import autocast

PACKED = [kind for kind in KINDS if not unsupported_by_onednn(bundle(kind).model.config)]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("changes", [{}, {"layer_scale": 0.5}, {"norm_order": "post"}], ids=["", "scaled", "post"])
def test_packed_blocks_compute_the_same(kind: str, changes: dict[str, object]) -> None:
    made, images = bundle(kind, **changes), pixels(3, bundle(kind).preprocess.channels)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    packed = pack(made.model, torch.float32)
    assert all(isinstance(block, PackedBlock) for block in packed.blocks)
    assert relative_error(eager(Bundle(packed, made.preprocess), images), eager(made, images)) < 1e-5
    assert all(torch.equal(before[name], value) for name, value in made.model.state_dict().items())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"])
def test_every_activation(activation: str) -> None:
    """The two kinds of GELU differ by more than the tolerance, so a mix-up would be detected."""
    made, images = bundle("plain", activation=activation), pixels(3)
    packed = Bundle(pack(made.model, torch.float32), made.preprocess)
    assert relative_error(eager(packed, images), eager(made, images)) < 1e-5


@pytest.mark.parametrize("stem", ["conv", "linear"])
@pytest.mark.parametrize("patch", [(4, 8), (8, 4), (1, 1), (16, 32)], ids=str)
def test_patches_of_every_shape_are_one_matmul(stem: str, patch: tuple[int, int]) -> None:
    made, images = bundle("plain", stem=stem, patch_size=patch, class_token="last", registers=2), pixels(3)
    packed = pack(made.model, torch.float32)
    assert isinstance(packed.patch_embed, PackedStem)
    assert relative_error(eager(Bundle(packed, made.preprocess), images), eager(made, images)) < 1e-5


def test_most_kinds_are_packed_and_the_others_are_not() -> None:
    assert {"plain", "no_position", "every_token", "grey"} <= set(PACKED)
    assert not {kind for kind in PACKED if bundle(kind).model.config.position in ("rope_2d", "relative")}
    assert unsupported_by_onednn(bundle("no_head").model.config)  # no output projection to fuse


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_close_to_float32(kind: str) -> None:
    """Packed if this CPU supports it, by autocast elsewhere."""
    made, images = bundle(kind), pixels(12, bundle(kind).preprocess.channels)
    engine = open_engine(made.model, made.preprocess, precision="bf16", device=CPU)
    result = engine(images)
    packed = any(isinstance(block, PackedBlock) for block in prepare(made.model, engine.plan).blocks)
    assert packed == (engine.plan.path == "onednn")
    assert result.dtype == torch.float32
    assert 1e-6 < relative_error(result, eager(made, images)) < 0.1


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16")
def test_packed_bf16_is_as_accurate_as_autocast() -> None:
    made, images = bundle("plain", depth=6), pixels(8)
    exact = eager(made, images)
    with autocast(CPU, "bf16"):
        usual = relative_error(eager(made, images).float(), exact)
        packed = relative_error(
            eager(Bundle(prepare(made.model, plan_of(made.model, "bf16")), made.preprocess), images).float(), exact
        )
    assert packed < 3 * usual


@pytest.mark.parametrize(("kind", "shape"), [("plain", 1), ("mean_of_all", 8)])
def test_the_last_block_computes_what_the_head_reads(kind: str, shape: int) -> None:
    made, images = bundle(kind), pixels(2)
    packed = pack(made.model, torch.float32)
    seen: list[int] = []
    packed.blocks[-1].register_forward_hook(lambda _, __, tokens: seen.append(tokens.shape[1]))
    result = eager(Bundle(packed, made.preprocess), images)
    assert seen == [shape]
    assert relative_error(result, eager(made, images)) < 1e-5


# ── CPU threads ──


@pytest.fixture
def _four_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_four_threads")
@pytest.mark.parametrize("count", [1, 2 * SMALLEST - 1, 2 * SMALLEST, 17, 40, 100])
def test_threads_keep_the_order(count: int) -> None:
    seen: list[tuple[int, str, int]] = []

    def compute(images: Tensor) -> Tensor:
        seen.append((len(images), threading.current_thread().name, torch.get_num_threads()))
        return images[:, 0, 0, 0].float() * 2

    images = torch.arange(count).view(-1, 1, 1, 1)
    cpu_threads = CpuThreads()
    assert torch.equal(cpu_threads(compute, images), torch.arange(count).float() * 2)
    if count < 2 * SMALLEST:
        assert seen == [(count, threading.current_thread().name, 4)]
    else:
        assert all(size <= LARGEST and name.startswith("compute") and threads == 1 for size, name, threads in seen)
        assert len(seen) > 1
    assert torch.get_num_threads() == 4
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [4]


@pytest.mark.usefixtures("_four_threads")
def test_an_error_in_a_thread_is_raised() -> None:
    def compute(images: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CpuThreads()(compute, torch.zeros(32, 1, 1, 1))


@pytest.mark.usefixtures("_four_threads")
def test_an_engine_with_threads_gives_the_models_outputs() -> None:
    made, images = bundle(), pixels(37)
    assert relative_error(open_engine(made.model, made.preprocess, device=CPU)(images), eager(made, images)) < 1e-5
