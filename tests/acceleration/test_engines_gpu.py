"""The torch engine on a CUDA device: CUDA graphs, chunks, threads. Run by hand with `make test-gpu`."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.peers import relative_error
from tests.support.tiny_models import CPU, KINDS, bundle, pixels
from torch import Tensor

from vitrail.acceleration.cuda.graphs import SIZES
from vitrail.acceleration.engine import CHUNK, TorchEngine
from vitrail.errors import InputError
from vitrail.runtime import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda")
ROUNDING: dict[Precision, float] = {"float32": 2e-3, "bf16": 0.1, "fp16": 0.02}
"""Tolerance of the outputs of a tiny random model; float32 allows for TF32."""


def engine(kind: str = "plain", precision: Precision = "bf16", **changes: object) -> TorchEngine:
    made = bundle(kind, **changes)
    return TorchEngine(made.model, made.preprocess, CUDA, precision)


def expected(kind: str, images: Tensor) -> Tensor:
    made = bundle(kind)
    return TorchEngine(made.model, made.preprocess, CPU, "float32")(images)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ROUNDING)
def test_every_kind_of_model_can_be_captured(kind: str, precision: Precision) -> None:
    made, target = engine(kind, precision), bundle(kind)
    for count in (3, 1, 4):
        images = pixels(count, target.preprocess.channels, seed=count)
        actual = made(images)
        assert (actual.dtype, actual.device) == (torch.float32, CPU)
        assert relative_error(actual, expected(kind, images)) < ROUNDING[precision]
    assert made.graphs is not None
    assert sorted(key.shape[0] for key in made.graphs.captured) == [1, 4]


@pytest.mark.parametrize("precision", ROUNDING)
def test_padding_does_not_change_the_output(precision: Precision) -> None:
    made, images = engine(precision=precision), pixels(8)
    alone = made(images[:5])  # padded to eight with zeros
    assert torch.equal(made(images)[:5], alone)
    assert torch.equal(made(images[:5]), alone)  # padded with the previous images


@pytest.mark.parametrize("count", [0, 1, 7, 64, 65, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("pinned", [False, True])
def test_batches_of_every_size(count: int, pinned: bool) -> None:
    made, images = engine(), pixels(count)
    inputs = images.pin_memory() if pinned and count else images
    actual = made(inputs)
    assert actual.shape == (count, 5)
    if count:
        assert relative_error(actual, expected("plain", images)) < ROUNDING["bf16"]
        assert torch.equal(made(inputs), actual)


def test_the_memory_format_changes_no_bit() -> None:
    made, images = engine(), pixels(4)
    assert torch.equal(made(images.contiguous()), made(images))


def test_all_graphs_share_their_memory() -> None:
    made = engine()
    images = pixels(64)
    outputs = {size: made(images[:size]) for size in SIZES}
    assert made.graphs is not None
    assert len(made.graphs.captured) == len(SIZES)
    for size in (64, 1, 16, 2, 32, 8, 4):
        assert torch.equal(made(images[:size]), outputs[size])


def test_the_number_of_graphs_is_bounded() -> None:
    """Also if the memory format varies; a size of images that the model does not take is not captured at all."""
    made = engine()
    assert made.graphs is not None
    for size in SIZES:
        for images in (pixels(size).contiguous(), pixels(size).contiguous(memory_format=torch.channels_last)):
            made(images)
    assert len(made.graphs.captured) == 2 * len(SIZES) <= made.graphs.most
    with pytest.raises(InputError):
        made(pixels(2)[..., :16])
    assert len(made.graphs.captured) <= made.graphs.most
    assert made(pixels(2)).isfinite().all()


@pytest.mark.parametrize(("batch", "size"), [(100, 100), (CHUNK, CHUNK), (2 * CHUNK, CHUNK), (2 * CHUNK + 88, 200)])
def test_the_batch_size_of_a_job_is_captured(batch: int, size: int) -> None:
    made, images = engine(), pixels(batch)
    first = made(images)
    assert torch.equal(made(images), first)
    assert torch.equal(made(images), first)
    assert made.graphs is not None
    assert [key.shape[0] for key in made.graphs.captured] == [size]


def test_the_engine_follows_its_plan() -> None:
    assert str(engine().plan) == "fused CUDA path, bf16, CUDA graphs"
    assert engine(precision="fp16").plan.path == "eager"


def test_several_threads() -> None:
    made = engine(depth=6)
    batches = [pixels(1 + number % 9, seed=number) for number in range(64)]
    expected = [made(batch) for batch in batches]

    def ask(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            return all(torch.equal(made(batches[i]), expected[i]) for i in range(number, 64, 4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))


def test_two_models_are_captured_concurrently() -> None:
    def output(seed: int) -> Tensor:
        return engine(depth=4)(pixels(3, seed=seed))

    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(output, [1] * 8))
    assert all(torch.equal(other, result[0]) for other in result)


def test_a_graph_keeps_the_weights_of_a_moved_model() -> None:
    made = bundle()
    ready = TorchEngine(made.model, made.preprocess, CUDA, "float32")
    expected = ready(pixels(2))
    made.model.cpu()
    taken = [torch.full((1000, 1000), float("nan"), device="cuda") for _ in range(8)]
    assert torch.equal(ready(pixels(2)), expected)
    del taken


def test_an_engine_is_freed_with_its_last_reference() -> None:
    """Without waiting for the garbage collector: the next engine needs the memory."""
    ready = engine(width=384, heads=6, depth=6)
    ready(pixels(2))
    with_it = torch.cuda.memory_allocated()
    del ready
    assert torch.cuda.memory_allocated() < with_it - 2**20
