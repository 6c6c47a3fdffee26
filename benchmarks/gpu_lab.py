"""Every kernel of the fast encoder by itself, predicted vs. measured time; `benchmarks/gpu.py --lab`.

A prediction is the larger of two times: bytes moved over the GPU's copy rate, which is measured when a run starts, and
operations over the rate that matmuls of these shapes reached before (benchmarks/lab-gpu.md).
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.support.peers import scramble
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.acceleration.accelerate import Accelerated
from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.fp8.matmul import Fp8Matmul
from vitrail.acceleration.cuda.fp8.quantisation import InputCalibration, to_fp8
from vitrail.acceleration.cuda.inference import elementwise
from vitrail.acceleration.cuda.inference.encoder import MATMULS, EncoderPrecision, FastEncoder
from vitrail.acceleration.cuda.inference.matmul import Matmul
from vitrail.acceleration.cuda.inference.model import FastModel, PatchStem
from vitrail.acceleration.folding import Affine
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

BF16 = torch.bfloat16
SEEN = {"bf16": 584e12, "fp8": 990e12}
"""FLOP/s at a ViT's shapes: midpoints of earlier measurements (532 to 635, and 808 to 1,172)."""
ATTENTION = {"cudnn": 0.37, "flash": 0.48, "efficient": 0.84}
"""Milliseconds of one layer's attention, B/16, 512 images, from earlier measurements."""


class Candidate(NamedTuple):
    """An operation to time."""

    name: str
    run: Callable[[], object]
    moved: float = 0.0
    """Bytes."""
    flops: float = 0.0
    kind: str = "bf16"
    predicted: float | None = None
    """Milliseconds, if the prediction comes from elsewhere."""


def timed(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """Return the mean seconds per call."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / steps


def median_time(run: Callable[[], object], device: torch.device) -> float:
    """Warm up, then return the median of several timings."""
    for _ in range(3 if device.type == "cuda" else 1):
        run()
    steps = max(1, min(50, int(0.02 / max(timed(run, 1, device), 1e-6))))
    return statistics.median(timed(run, steps, device) for _ in range(7 if device.type == "cuda" else 2))


def device_rates(device: torch.device) -> dict[str, float]:
    """Measure the device's matmul and copy rates on random data."""
    side = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(side, side, device=device, dtype=BF16) for _ in range(2))
    for _ in range(20 if device.type == "cuda" else 1):  # long enough to reach a steady clock
        a @ b
    rates = {"bf16 TFLOP/s": 2 * side**3 / median_time(lambda: a @ b, device) / 1e12}
    source = torch.randn(2**30 if device.type == "cuda" else 2**16, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    rates["copy GB/s"] = moved / median_time(lambda: target.copy_(source), device) / 1e9
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = to_fp8(a.float(), 0.01), to_fp8(b.float(), 0.01)

        def matmul() -> Tensor:
            return torch._scaled_mm(a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=True)

        rates["fp8 TFLOP/s"] = 2 * side**3 / median_time(matmul, device) / 1e12
    return rates


def run_lab(
    config: ViTConfig, batch: int, device: torch.device, rates: dict[str, float]
) -> Iterator[dict[str, float | str | None]]:
    """Time every candidate, and print each result immediately."""
    print(f"\n{'candidate':44} {'predicted ms':>12} {'measured':>9} {'GB/s':>7} {'TFLOP/s':>8}")
    for make in (row_passes, activations, bf16_matmuls, fp8_matmuls, attentions, stems, copies, whole_models):
        try:
            for candidate in make(config, batch, device):
                yield measure(candidate, device, rates)
        except Exception as error:  # a failing group must not affect the others
            print(f"{make.__name__}: skipped from here on, {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(candidate: Candidate, device: torch.device, rates: dict[str, float]) -> dict[str, float | str | None]:
    predicted = candidate.predicted
    if predicted is None and (candidate.moved or candidate.flops):
        by_bytes = candidate.moved / (rates["copy GB/s"] * 1e9)
        predicted = 1e3 * max(by_bytes, candidate.flops / SEEN[candidate.kind])
    try:
        seconds = median_time(candidate.run, device)
    except Exception as error:
        print(f"{candidate.name:44} skipped, {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
        return {"name": candidate.name, "predicted_ms": predicted, "measured_ms": None, "why": str(error)[:500]}
    print(
        f"{candidate.name:44} {'-' if predicted is None else format(predicted, '.3f'):>12} {seconds * 1e3:9.3f}"
        f" {candidate.moved / seconds / 1e9:7,.0f} {candidate.flops / seconds / 1e12:8,.1f}",
        flush=True,
    )
    return {
        "name": candidate.name,
        "predicted_ms": predicted,
        "measured_ms": seconds * 1e3,
        "gigabytes_per_second": candidate.moved / seconds / 1e9,
        "teraflops": candidate.flops / seconds / 1e12,
    }


def predict(config: ViTConfig, batch: int, copied: float, numbers: EncoderPrecision) -> float:
    """Return the predicted milliseconds of the encoder: its elementwise kernels and matmuls in sequence.

    `copied` is the copy rate in bytes a second. For models of which the head reads one token.
    """
    low = numbers.low if numbers.inputs is not None else frozenset[str]()
    spared = min(numbers.spared, config.depth - 1) if low else 0
    seconds = spared * _block_seconds(config, batch, copied, numbers, frozenset())
    seconds += (config.depth - 1 - spared) * _block_seconds(config, batch, copied, numbers, low)
    # The last block: keys and values, its first norm, and attention of one token.
    M, D = batch * config.tokens, config.width
    matmuls = 2.0 * M * D * config.heads * config.head_width * 2 / SEEN["fp8" if "qkv" in low else "bf16"]
    return 1e3 * (seconds + matmuls + M * D * (_first_norm(low) + 4) / copied)


def _block_seconds(
    config: ViTConfig, batch: int, copied: float, numbers: EncoderPrecision, low: frozenset[str]
) -> float:
    M, D, H = batch * config.tokens, config.width, config.mlp_hidden
    flops = {name: 2.0 * M * outputs * inputs for name, (outputs, inputs) in shapes(config).items()}
    matmuls = sum(work / SEEN["fp8" if name in low else "bf16"] for name, work in flops.items())
    attended = batch * config.heads * config.tokens**2 * config.head_width
    attention = ATTENTION["cudnn"] / 1e3 * attended / (512 * 12 * 197**2 * 64)
    second = 2 + (4 if "proj" in low else 0) + (1 if "fc1" in low else 2)
    moved = M * D * (_first_norm(low) + second + (3 if "proj" in low else 0))
    if numbers.fused or (low and numbers.fused is None):
        pass
    elif low:
        moved += M * H * (3 if "fc2" in low else 4)
    elif numbers.exact:
        moved += M * H * 4
    return matmuls + attention + moved / copied


def _first_norm(low: frozenset[str]) -> int:
    """Return bytes per element: read in bf16, and written; a branch read and the stream written if there is one."""
    return 2 + (4 if "fc2" in low else 0) + (1 if "qkv" in low else 2)


# ── the groups ──


def random(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager")


def row_passes(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """LayerNorm in all its variants; bf16 moves two bytes per element, fp8 one."""
    M, D = batch * config.tokens, config.width
    x, branch, shift = random(M, D, device=device), random(M, D, device=device), torch.randn(D, device=device)
    weight, bias = (random(D, device=device) for _ in range(2))

    def usual(x: Tensor) -> Tensor:
        return F.layer_norm(x, (D,), weight, bias, 1e-6)

    def usual_added(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        x = x + branch
        return x, F.layer_norm(x, (D,), weight, bias, 1e-6)

    one, two = compiled(usual, device), compiled(usual_added, device)
    n = float(M * D)
    yield Candidate("norm, torch", lambda: usual(x), 4 * n)
    yield Candidate("norm, compiled", lambda: one(x), 4 * n)
    yield Candidate("norm with shift, kernel", lambda: elementwise.norm(x, 1e-6, shift=shift), 4 * n)
    yield Candidate("norm with shift to fp8, kernel", lambda: elementwise.norm(x, 1e-6, shift=shift, scale=0.01), 3 * n)
    yield Candidate("add and norm, compiled", lambda: two(x, branch), 8 * n)
    yield Candidate("add and norm, kernel", lambda: elementwise.norm(x, 1e-6, branch=branch), 8 * n)
    yield Candidate("add and norm to fp8, kernel", lambda: elementwise.norm(x, 1e-6, branch=branch, scale=0.01), 7 * n)
    yield Candidate("to fp8, kernel", lambda: elementwise.quantise(x, 0.01), 3 * n)


def activations(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """GELU as a separate kernel."""
    x = random(batch * config.tokens, config.mlp_hidden, device=device)
    n = float(x.numel())
    exact, tanh = compiled(F.gelu, device), compiled(lambda x: F.gelu(x, approximate="tanh"), device)
    yield Candidate("gelu, torch", lambda: F.gelu(x), 4 * n)
    yield Candidate("gelu, compiled", lambda: exact(x), 4 * n)
    yield Candidate("gelu tanh, compiled", lambda: tanh(x), 4 * n)
    yield Candidate("gelu, kernel", lambda: elementwise.activate(x, "gelu"), 4 * n)
    yield Candidate("gelu tanh, kernel", lambda: elementwise.activate(x, "gelu_tanh"), 4 * n)
    yield Candidate("gelu to fp8, kernel", lambda: elementwise.activate(x, "gelu", scale=0.01), 3 * n)
    yield Candidate("gelu tanh to fp8, kernel", lambda: elementwise.activate(x, "gelu_tanh", scale=0.01), 3 * n)


def shapes(config: ViTConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a block's four matmuls."""
    inner = config.heads * config.head_width
    sizes = ((3 * inner, config.width), (config.width, inner), (config.mlp_hidden, config.width))
    return dict(zip(MATMULS, (*sizes, (config.width, config.mlp_hidden)), strict=True))


def weights(outputs: int, inputs: int, device: torch.device) -> Affine:
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.float64) / inputs**0.5
    return Affine(weight, torch.randn(outputs, device=device, dtype=torch.float64))


def bf16_matmuls(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """The four matmuls, plain and fused with what follows them."""
    M = batch * config.tokens
    for name, (outputs, inputs) in shapes(config).items():
        matmul, x = Matmul(weights(outputs, inputs, device), BF16), random(M, inputs, device=device)
        flops = 2.0 * M * outputs * inputs
        yield Candidate(f"{name} bf16", partial(matmul, x), flops=flops)
        if name in ("proj", "fc2"):
            residual = random(M, outputs, device=device)
            yield Candidate(f"{name} bf16, added to the residual", partial(matmul.add_to, residual, x), flops=flops)
        if name == "fc1":
            activated = partial(matmul.activated, x)
            yield Candidate("fc1 bf16, gelu tanh in cuBLASLt", partial(activated, "gelu_tanh"), flops=flops)
            yield Candidate("fc1 bf16, then gelu, kernel", partial(activated, "gelu"), flops=flops)
            if device.type == "cuda":
                from vitrail.acceleration.cuda.inference.kernels import multiply

                multiplied = partial(multiply, x, matmul.weight, matmul.bias)
                yield Candidate("fc1 bf16 with exact gelu, Triton", partial(multiplied, "gelu"), flops=flops)
                yield Candidate("fc1 bf16, Triton", partial(multiplied, "none"), flops=flops)


def fp8_matmuls(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """The four matmuls in fp8, with one scale per matrix or per row."""
    M = batch * config.tokens
    for name, (outputs, inputs) in shapes(config).items():
        folded, x = weights(outputs, inputs, device), to_fp8(torch.randn(M, inputs, device=device), 0.01)
        flops = 2.0 * M * outputs * inputs
        for scales in ("tensor", "row"):
            matmul = Fp8Matmul(folded, BF16, InputCalibration(0.01), "row" if scales == "row" else "tensor")
            yield Candidate(f"{name} fp8, by {scales}", partial(matmul, x), flops=flops, kind="fp8")
        if name == "fc1" and device.type == "cuda":
            from vitrail.acceleration.cuda.inference.kernels import multiply

            matmul = Fp8Matmul(folded, BF16, InputCalibration(0.01))
            factor = float(matmul.input_scale * matmul.weight_scale)
            run = partial(multiply, x, matmul.weight, matmul.bias, "gelu", sum_scale=factor, scale=0.01)
            yield Candidate("fc1 fp8 with exact gelu to fp8, Triton", run, flops=flops, kind="fp8")


def attentions(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """Attention of one layer with each kernel, forward and backward, and for one token only."""
    shape = (batch, config.tokens, 3, config.heads, config.head_width)
    flops = 4.0 * batch * config.heads * config.tokens**2 * config.head_width
    qkv = random(*shape, device=device)
    learned = random(*shape, device=device).requires_grad_()
    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    measured = (config.width, config.tokens, batch) == (768, 197, 512)

    def attend(qkv: Tensor, tokens: int | None = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        return F.scaled_dot_product_attention(query[:, :, :tokens], key, value)

    for name, kernel in kernels.items():
        chosen = sdpa_kernel(kernel) if device.type == "cuda" else contextlib.nullcontext()
        with chosen:  # stays active during the timing, which happens before the next candidate is requested
            predicted = ATTENTION[name] if measured else None
            yield Candidate(f"attention, {name}", lambda: attend(qkv), flops=flops, predicted=predicted)
            yield Candidate(f"attention of one token, {name}", lambda: attend(qkv, 1), moved=4.0 * qkv.numel() / 3)

            def both() -> None:
                attend(learned).sum().backward()
                learned.grad = None

            yield Candidate(f"attention and gradient, {name}", both, flops=3.5 * flops)


def stems(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """From images to tokens."""
    model = ViT(config.replace(depth=1)).to(device).eval()
    images = random(batch, config.channels, *config.image_size, device=device)
    stem = PatchStem(model, BF16)
    tokens = float(batch * config.tokens * config.width)
    low = ViT(config.replace(depth=1)).to(device, BF16).eval()

    @torch.inference_mode()
    def usual() -> Tensor:
        return low.embed(images)[0]

    @torch.inference_mode()
    def ours() -> Tensor:
        return stem(images)  # type: ignore[no-any-return]

    yield Candidate("stem, the model's own", usual, moved=2.0 * images.numel() + 10 * tokens)
    # Images are read and written as patches; patches are read; tokens are written, read and written.
    yield Candidate("stem, one matmul", ours, moved=6.0 * images.numel() + 6 * tokens)
    cut = partial(elementwise.cut_patches, images, config.patch_size, BF16, before=config.layout.patches.start)
    yield Candidate("stem, patches cut", cut, moved=4.0 * images.numel())
    placed = random(batch, config.tokens, config.width, device=device)
    yield Candidate("stem, positions added", lambda: elementwise.add_table(placed, stem.common), moved=4 * tokens)


def copies(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """Copying images to the device: uint8, normalised there, or float32, normalised on the host."""
    shape = (batch, config.channels, *config.image_size)
    there = device.type == "cuda"
    small, large = torch.randint(0, 256, shape, dtype=torch.uint8), torch.randn(shape)
    if there:
        small, large = small.pin_memory(), large.pin_memory()
    mean, deviation = (torch.full((1, config.channels, 1, 1), value, device=device) for value in (127.5, 64.0))
    normalise = compiled(lambda x: ((x.float() - mean) / deviation).to(BF16), device)
    pcie = 50e9  # bytes/s over PCIe 5
    n = float(small.numel())
    yield Candidate(
        "copy of bytes, normalised there",
        lambda: normalise(small.to(device, non_blocking=True)),
        predicted=1e3 * n / pcie if there else None,
    )
    yield Candidate(
        "copy of float32",
        lambda: large.to(device, non_blocking=True).to(BF16),
        predicted=4e3 * n / pcie if there else None,
    )


def whole_models(config: ViTConfig, batch: int, device: torch.device) -> Iterator[Candidate]:
    """The encoder and the whole model at several batch sizes, with and without CUDA graphs."""
    copied = 4.2e12  # bytes/s, from earlier measurements
    model = ViT(config)
    scramble(model)
    model = model.to(device)
    images = random(batch, config.channels, *config.image_size, device=device)
    inputs = calibrate(model, images[:64].float(), low=frozenset(MATMULS), spared=0)
    kinds = {
        "bf16": EncoderPrecision(),
        "bf16 exact": EncoderPrecision(exact=True),
        "bf16 exact, fused": EncoderPrecision(exact=True, fused=True),
        "fp8": EncoderPrecision(inputs=inputs),
        "fp8, no block spared": EncoderPrecision(inputs=inputs, spared=0),
        "fp8, unfused": EncoderPrecision(inputs=inputs, fused=False),
        "fp8 with proj": EncoderPrecision(inputs=inputs, low=frozenset(MATMULS)),
        "fp8 by row": EncoderPrecision(inputs=inputs, weight_scales="row"),
    }
    tokens = random(batch, config.tokens, config.width, device=device)
    for name, numbers in kinds.items():
        encoder = FastEncoder(model, numbers)

        @torch.inference_mode()
        def encode(encoder: FastEncoder = encoder) -> Tensor:
            return encoder(tokens.clone())  # type: ignore[no-any-return]

        predicted = predict(config, batch, copied, numbers)
        yield Candidate(f"encoder, {name}, {batch} images", encode, predicted=predicted)
    for name in ("bf16", "fp8"):
        fast = FastModel(model, kinds[name])
        for graphs in (False, True):
            call = Accelerated(fast, device, graphs=graphs)
            for count in sorted({batch, min(batch, 64), min(batch, 8), 1}, reverse=True):
                run = partial(call, images[:count].clone())
                yield Candidate(f"model, {name}, {count} images{', graph' if graphs else ''}", run)
