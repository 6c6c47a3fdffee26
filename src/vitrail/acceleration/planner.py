"""The planner: which execution path computes a model, and why.

    config, hardware, precision, purpose  ->  ExecutionPlan(path, precision, CUDA graphs, reason)

`models/` is the only definition of the model, and every path computes the same. Which path supports a config and a
device is decided here and nowhere else. Hardware is a value, so a plan can be tested for machines that are not there.
"""

import functools
import threading
from typing import Literal, NamedTuple

import torch

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import InferencePrecision, Precision, faster_in_bf16

ExecutionPath = Literal[
    "eager", "onednn", "fused_encoder", "fp8_encoder", "compiled", "fused_training", "onnx", "openvino", "int8"
]
Purpose = Literal["predict", "evaluate", "features"]
"""What inference is for: an engine's logits, the logits of an evaluation, or the tokens of a layer."""
TITLES: dict[ExecutionPath, str] = {
    "eager": "eager",
    "onednn": "packed oneDNN path",
    "fused_encoder": "fused CUDA path",
    "fp8_encoder": "fused CUDA path",
    "compiled": "compiled",
    "fused_training": "fused CUDA path, compiled",
    "onnx": "ONNX Runtime",
    "openvino": "OpenVINO",
    "int8": "OpenVINO",
}
FP8_CAPABILITY = (8, 9)
"""Ada, the first GPUs with fp8 tensor cores."""
FP8_MULTIPLE = 16
"""The fp8 tensor cores need matrix sizes that are multiples of this."""
VERIFIED_TRITON = ("3.6.",)
"""Triton versions whose attention kernels were verified against torch on a GPU; verify before adding one."""
MAX_SHORT = 272
"""Sequence length up to which our attention kernels are used (benchmarks/lab-gpu.md, attempts 29 and 30)."""
SHORT_BY_HEAD_WIDTH = {16: 128, 32: 128, 64: 272, 128: 128}
"""The longest sequence that they support, for each supported head width."""

IN_PIECES = "in pieces without CUDA graphs, so that gradients are reduced during the backward pass"
"""How several ranks compile the fused training path."""


# ── hardware ──


class Hardware(NamedTuple):
    """The properties of a device that determine a plan."""

    kind: str
    """cpu, cuda or mps."""
    fast_bf16: bool = False
    """Matmuls are much faster in bf16: GPUs since Ampere, CPUs with AMX."""
    capability: tuple[int, int] = (0, 0)
    """The compute capability of a CUDA device."""
    kernels: bool = False
    """Our Triton kernels run on it."""
    kernel_error: str = ""
    """Why they do not, where they were tried."""
    onednn_bf16: bool = False
    """oneDNN packs weights and computes in bf16 on this CPU."""
    fast_int8: bool = False
    """A CPU with instructions for dot products of int8 (VNNI on x86)."""
    short_attention: bool = False
    """Our attention kernels for short sequences were verified on it; on a CPU plain torch computes the same."""


def hardware_of(device: torch.device) -> Hardware:
    """Return the hardware of a device on this machine."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        error = _kernel_error(device)
        short = not error and _attention_is_verified(capability)
        return Hardware("cuda", faster_in_bf16(device), capability, not error, error, short_attention=short)
    if device.type == "cpu":
        return Hardware(
            "cpu", faster_in_bf16(device), onednn_bf16=_onednn_packs_bf16(), fast_int8=_has_vnni(), short_attention=True
        )
    return Hardware(device.type)


@functools.cache
def _kernel_error(device: torch.device) -> str:
    """Return why the kernels do not run on a CUDA device, such as a missing C compiler; empty if they do."""
    try:
        from vitrail.acceleration.cuda.inference.kernels import norm

        norm(torch.zeros(1, 16, device=device, dtype=torch.bfloat16), 1e-6)
    except (
        torch.OutOfMemoryError
    ):  # says nothing about the kernels; an exception is not cached, so they are tried again
        raise
    except Exception as error:  # whatever fails in Triton, the model can run without it
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return ""


def _attention_is_verified(capability: tuple[int, int]) -> bool:
    """Return whether the attention kernels were verified: on Hopper, and not on an AMD GPU with the same number.

    On other GPUs shared memory is too small, or registers spill.
    """
    if torch.version.cuda is None or capability[0] != 9:
        return False
    from triton import __version__

    return str(__version__).startswith(VERIFIED_TRITON)


@functools.cache
def _onednn_packs_bf16() -> bool:
    """Return whether oneDNN can pack weights in bf16 on this CPU."""
    # Private names; if one is missing, assume no support.
    has_bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and has_bf16 is not None and bool(has_bf16())


def _has_vnni() -> bool:
    """Return whether this CPU has VNNI."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_vnni", "avx_vnni", "avx_vnni_int8"))


# ── what a path does not support of a config; empty if it supports the model ──


def unsupported_by_fused_encoder(config: ViTConfig) -> str:
    """Return what the fused encoder lacks: it has the paper's blocks, with positions added at the stem."""
    return _first(
        (not config.depth, "models without encoder blocks"),
        (config.norm_order != "pre", "post-norm blocks"),
        (not config.out_proj, "attention without an output projection"),
        (config.qk_norm, "QK norm"),
        (config.activation == "swiglu", "SwiGLU"),
        (config.position_at != "stem", "positions added inside the encoder"),
        _several_layers(config),
    ) or _positions_in_attention(config)


def unsupported_by_fp8(config: ViTConfig) -> str:
    """Return what the fused encoder lacks in fp8."""
    sizes = (config.width, config.heads * config.head_width, config.mlp_hidden)
    odd = any(size % FP8_MULTIPLE for size in sizes)
    return unsupported_by_fused_encoder(config) or _first((odd, f"widths that are not multiples of {FP8_MULTIPLE}"))


def unsupported_by_fused_training(config: ViTConfig) -> str:
    """Return what the fused training path lacks."""
    without = (not config.depth, "models without encoder blocks")
    lacks = _first(without, (config.norm_order != "pre", "post-norm blocks"), _several_layers(config))
    return lacks or _positions_in_attention(config)


def unsupported_by_onednn(config: ViTConfig) -> str:
    """Return what the packed encoder lacks; tables of rotary or relative positions need more precision than bf16."""
    without = (not config.depth, "models without encoder blocks")
    lacks = _first(without, (not config.out_proj, "attention without an output projection"))
    return lacks or _positions_in_attention(config)


def _several_layers(config: ViTConfig) -> tuple[bool, str]:
    return len(config.head_layers) > 1, "heads that read several layers"


def _positions_in_attention(config: ViTConfig) -> str:
    return _first(
        (config.position == "rope_2d", "rotary positions"), (config.position == "relative", "relative positions")
    )


def _first(*cases: tuple[bool, str]) -> str:
    return next((name for applies, name in cases if applies), "")


# ── plans ──


class ExecutionPlan(NamedTuple):
    """How a model is computed."""

    path: ExecutionPath
    precision: InferencePrecision | Literal["fp8"]
    graphs: bool = False
    """Whether CUDA graphs are used: in training for the whole step, in inference for the batch sizes of
    `cuda/graphs.py`."""
    reason: str = ""
    """Why the model is not computed faster: what the model, the device or the precision lacks. Empty for the fastest
    path, apart from fp8, which needs calibration images, and from `compile`, which is the user's choice."""
    cpu_threads: bool = False
    """Whether batches are split between CPU threads."""
    pieces: bool = False
    """Whether the model is compiled in pieces, so that DDP reduces gradients during the backward pass."""

    def __str__(self) -> str:
        """Return the plan as one line."""
        graphs = ", CUDA graphs" if self.graphs else ""
        return f"{TITLES[self.path]}, {self.precision}{graphs}{f': {self.reason}' if self.reason else ''}"

    @property
    def autocast(self) -> Precision:
        """The precision of what autocast computes; fp8 is for matmuls of the fused encoder only, int8 for OpenVINO."""
        match self.precision:
            case "fp8":
                return "bf16"
            case "int8":
                return "float32"
            case precision:
                return precision


def plan_inference(
    config: ViTConfig,
    hardware: Hardware,
    precision: InferencePrecision | Literal["fp8"],
    purpose: Purpose = "predict",
) -> ExecutionPlan:
    """Plan inference. Where fp8 does not run, bf16 is planned, where int8 does not, float32; the reason says why.

    On a GPU, logits are computed with CUDA graphs: a small model's kernels take less time than Python needs to launch
    them, also with hundreds of images, and a large model is as fast with them as without. Features are computed without
    graphs, since every request has its own function.
    """
    graphs = hardware.kind == "cuda" and purpose != "features"
    threads = hardware.kind == "cpu" and purpose == "predict"
    if precision == "fp8":
        if why := why_not_fp8(config, hardware):
            return plan_inference(config, hardware, "bf16", purpose)._replace(reason=why)
        return ExecutionPlan("fp8_encoder", "fp8", graphs)
    if precision == "int8":
        if why := why_not_int8(hardware):
            return plan_inference(config, hardware, "float32", purpose)._replace(reason=why)
        return ExecutionPlan("int8", "int8", reason=_why_slow_in_int8(hardware), cpu_threads=True)
    path, lacks = _fast_path(config, hardware, purpose)
    if precision != "bf16":
        name = "fused" if path == "fused_encoder" else "packed"
        needs = f"the {name} path needs bf16" if hardware.fast_bf16 and not lacks else ""
        reason = needs if precision == "fp16" else _why_not_low(hardware)
        return ExecutionPlan("eager", precision, graphs, reason, threads)
    return ExecutionPlan("eager" if lacks else path, "bf16", graphs, _why_slow(hardware) or lacks, threads)


def _fast_path(config: ViTConfig, hardware: Hardware, purpose: Purpose) -> tuple[ExecutionPath, str]:
    """Return the fast path of a device in bf16, and why it does not run; empty if it does."""
    if hardware.kind == "cuda":
        return "fused_encoder", _why_not_fused(hardware, unsupported_by_fused_encoder(config))
    unsupported = unsupported_by_onednn(config)
    return "onednn", _first(
        (hardware.kind != "cpu", f"there is no fused path for {hardware.kind}"),
        (purpose == "features", "the packed path does not compute features"),
        (bool(unsupported), f"the packed path does not support {unsupported}"),
        (not hardware.onednn_bf16, "oneDNN has no bf16 on this CPU"),
    )


def plan_of(model: ViT, precision: InferencePrecision | Literal["fp8"], purpose: Purpose = "predict") -> ExecutionPlan:
    """Plan inference for a model on its own device."""
    return plan_inference(model.config, hardware_of(next(model.parameters()).device), precision, purpose)


def usual_precision(hardware: Hardware) -> Precision:
    """Return the precision of training if the user sets none."""
    return "bf16" if hardware.fast_bf16 else "float32"


def usual_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions that are worth measuring on a device."""
    return ("float32", "bf16", "fp16") if device.type == "cuda" else ("float32", "bf16")


def why_not_fp8(config: ViTConfig, hardware: Hardware) -> str:
    """Return why a model cannot run in fp8 on a device; empty if it can."""
    if hardware.kind != "cuda":
        return f"fp8 needs an NVIDIA GPU (Ada or later), but the model is on {hardware.kind}"
    if hardware.capability < FP8_CAPABILITY:
        return "this GPU does not support fp8, which needs Ada or Hopper"
    if not hardware.kernels:
        found = f" ({hardware.kernel_error})" if hardware.kernel_error else ""
        return f"fp8 needs Triton, which comes with torch's CUDA builds for Linux, and a C compiler{found}"
    lacks = unsupported_by_fp8(config)
    return f"fp8 does not support {lacks}" if lacks else ""


def why_not_int8(hardware: Hardware) -> str:
    """Return why a model cannot run in int8 on a device; empty if it can."""
    return "" if hardware.kind == "cpu" else f"int8 runs on the CPU only, not on {hardware.kind}"


def _why_slow_in_int8(hardware: Hardware) -> str:
    """Return why another precision may be as fast on a CPU; empty if int8 is the fastest."""
    return _first(
        (hardware.fast_bf16, "bf16 is fast on this CPU too; compare them with vitrail bench"),
        (not hardware.fast_int8, "this CPU has no int8 dot products (VNNI), so int8 may not be faster than float32"),
    )


def plan_training(
    config: ViTConfig,
    hardware: Hardware,
    precision: Precision,
    *,
    compiled: bool,
    deterministic: bool = False,
    gradient_checkpointing: bool = False,
    gradient_accumulation: int = 1,
    adapters: bool = False,
    alone: bool = True,
    sharded: bool = False,
    wrapped: bool = False,
) -> ExecutionPlan:
    """Plan training; `alone`: one rank; `sharded`: each rank holds a slice of the model.

    `adapters`: the model has LoRA adapters; `wrapped`: the module is more than the model, as a pretraining method is.
    """
    if not compiled:
        low = {"float32": _why_not_low(hardware), "bf16": _why_slow(hardware), "fp16": ""}
        return ExecutionPlan("eager", precision, reason=low[precision])
    lacks = "LoRA adapters" if adapters else unsupported_by_fused_training(config)
    reason = _first(
        (hardware.kind != "cuda", "the fused path needs an NVIDIA GPU"),
        (precision == "bf16" and not hardware.fast_bf16, _why_slow(hardware)),
        (precision == "float32" and not hardware.fast_bf16, _why_not_low(hardware)),
        (not hardware.fast_bf16, "the fused path needs a GPU that is fast in bf16, Ampere or later"),
        (precision != "bf16", "the fused path needs bf16"),
        (deterministic, "the fused path is not deterministic"),
        (sharded, "the fused path does not support sharded models"),
        (wrapped and not alone, "on several ranks, the fused path trains classifiers with one head only"),
        (gradient_checkpointing and not can_checkpoint(), "torch before 2.12 cannot checkpoint the fused path"),
    ) or _why_not_fused(hardware, lacks)
    if reason:
        return ExecutionPlan("compiled", precision, reason=reason)
    if not alone:
        return ExecutionPlan("fused_training", precision, reason=IN_PIECES, pieces=True)
    # A small model's kernels take less time than Python needs to launch them. But a graph's outputs must be freed
    # before it runs again, which accumulated gradients are not; and torch captures graphs in the main thread only. With
    # pretraining they were not tried.
    graphs = gradient_accumulation == 1 and threading.current_thread() is threading.main_thread()
    return ExecutionPlan("fused_training", precision, graphs=graphs and not wrapped)


def is_short(tokens: int, head_width: int) -> bool:
    """Return whether our attention kernels are used for this many tokens, on hardware that has them.

    A program holds the gradients of all queries of a head in registers, and must not spill: NVIDIA's assembler
    miscompiled a spilling kernel (benchmarks/lab-gpu.md, attempt 30).
    """
    return tokens <= min(MAX_SHORT, SHORT_BY_HEAD_WIDTH.get(head_width, 0))


def can_checkpoint() -> bool:
    """Return whether checkpointing saves memory when compiled: torch 2.11 keeps the inputs of custom gradients."""
    return bool(torch.__version__ >= "2.12")


def _why_not_fused(hardware: Hardware, lacks: str) -> str:
    error = hardware.kernel_error
    return _first(
        (bool(lacks), f"the fused path does not support {lacks}"),
        (not hardware.kernels, f"the Triton kernels do not run ({error})" if error else "Triton is missing"),
    )


def _why_not_low(hardware: Hardware) -> str:
    """Return why float32 is not the fastest precision of a device, or why the device has no faster one."""
    match hardware.kind:
        case "cuda":
            return f"{'bf16' if hardware.fast_bf16 else 'fp16'} is faster on this GPU"
        case "cpu":
            return "bf16 is faster on this CPU" if hardware.fast_bf16 else "this CPU has no bf16 matrix units"
    return ""


def _why_slow(hardware: Hardware) -> str:
    """Return what to use on a device that is slow in bf16; empty if it is not, as far as we know."""
    slow = {"cuda": "this GPU is slow in bf16; use fp16", "cpu": "this CPU is slow in bf16; use float32"}
    return "" if hardware.fast_bf16 else slow.get(hardware.kind, "")
