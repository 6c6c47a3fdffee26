"""A matmul with fused GELU that also returns the pre-activation, for the backward pass.

cuBLASLt has such a kernel, but torch, which ships cuBLASLt, does not expose it. So the C functions are called directly.
Its GELU is the tanh approximation. cuBLASLt is column-major: a row-major matrix appears transposed, and Y = X·Wᵀ is
Yᵀ = W·Xᵀ. Elsewhere plain torch is used, with the exact GELU. Axes: M rows, N outputs, K inputs.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WORKSPACE = 32 * 2**20
"""Workspace bytes of a matmul: NVIDIA's recommendation for Hopper GPUs."""


@torch.library.custom_op("vitrail::gelu_matmul", mutates_args=())
def gelu_matmul(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU(x · weightᵀ + bias) and the pre-activation, for x (M, K), weight (N, K), bias (N,) of one dtype."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if can_multiply(x, weight, bias):
        output, pre_activation = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
        _multiply(x, weight, bias, output, pre_activation)
        return output, pre_activation
    pre_activation = torch.addmm(bias, x, weight.t())
    return F.gelu(pre_activation), pre_activation


@gelu_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - as the operator itself
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


def can_multiply(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether cuBLASLt has a kernel for these matrices: bf16, sizes divisible by 8, 16-byte aligned."""
    (M, K), N = x.shape, weight.shape[0]
    return (
        x.is_cuda
        and all(tensor.dtype == torch.bfloat16 and tensor.device == x.device for tensor in (x, weight, bias))
        and (weight.shape, bias.shape) == ((N, K), (N,))
        and M > 0
        and N % 8 == K % 8 == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, bias))
        and _library() is not None
        and _plan(x.get_device(), M, N, K) is not None
    )


# ── cuBLASLt ──

# Constants from cublasLt.h.
CUDA_R_32F, CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_OP_T = 0, 14, 68, 1
MATMUL_DESC_TRANSA, MATMUL_DESC_EPILOGUE, MATMUL_DESC_BIAS_POINTER = 3, 7, 8
MATMUL_DESC_EPILOGUE_AUX_POINTER, MATMUL_DESC_EPILOGUE_AUX_LD = 11, 12
EPILOGUE_GELU_AUX_BIAS, MATMUL_PREF_MAX_WORKSPACE_BYTES = 164, 1


class _Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: a kernel and its requirements."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _MatmulPlan(NamedTuple):
    """The matrix layouts for some sizes, and the kernel that multiplies them."""

    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    output: ctypes.c_void_p
    heuristic: _Heuristic


def _multiply(x: Tensor, weight: Tensor, bias: Tensor, output: Tensor, pre_activation: Tensor) -> None:
    device, (N, K) = x.get_device(), weight.shape
    plan = _plan(device, x.shape[0], N, K)
    if plan is None:  # `can_multiply` was not checked
        raise RuntimeError("cuBLASLt has no kernel for this matmul with GELU")
    with torch.cuda.device_of(x):
        workspace = x.new_empty(plan.heuristic.workspace, dtype=torch.uint8)
        descriptor = _descriptor(N, bias.data_ptr(), pre_activation.data_ptr())
        try:
            _call(
                "cublasLtMatmul", _handle(device), descriptor, ctypes.byref(ctypes.c_float(1)), _pointer(weight),
                plan.weight, _pointer(x), plan.x, ctypes.byref(ctypes.c_float(0)), _pointer(output), plan.output,
                _pointer(output), plan.output,
                ctypes.byref(plan.heuristic.algorithm), _pointer(workspace), ctypes.c_size_t(plan.heuristic.workspace),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulDescDestroy", descriptor)


@functools.lru_cache(maxsize=256)
def _plan(device: int, rows: int, outputs: int, inputs: int) -> _MatmulPlan | None:
    """Return the kernel that cuBLASLt's heuristic ranks first, or None."""
    weight, x, output = _layout(inputs, outputs), _layout(inputs, rows), _layout(outputs, rows)
    preference, heuristic, number = ctypes.c_void_p(), _Heuristic(), ctypes.c_int()
    with torch.cuda.device(device):
        # Placeholder addresses: only their alignment matters.
        descriptor = _descriptor(outputs, 256, 256)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            limit = ctypes.c_uint64(WORKSPACE)
            _set("cublasLtMatmulPreferenceSetAttribute", preference, MATMUL_PREF_MAX_WORKSPACE_BYTES, limit)
            status = _require_library().cublasLtMatmulAlgoGetHeuristic(
                _handle(device), descriptor, weight, x, output, output, preference, ctypes.c_int(1),
                ctypes.byref(heuristic), ctypes.byref(number),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
            _call("cublasLtMatmulDescDestroy", descriptor)
    return None if status or number.value == 0 or heuristic.state else _MatmulPlan(weight, x, output, heuristic)


def _descriptor(outputs: int, bias: int, pre_activation: int) -> ctypes.c_void_p:
    """Create the matmul descriptor with its epilogue."""
    descriptor = ctypes.c_void_p()
    _call(
        "cublasLtMatmulDescCreate", ctypes.byref(descriptor), ctypes.c_int(CUBLAS_COMPUTE_32F), ctypes.c_int(CUDA_R_32F)
    )
    for name, value in (
        (MATMUL_DESC_TRANSA, ctypes.c_int32(CUBLAS_OP_T)),
        (MATMUL_DESC_EPILOGUE, ctypes.c_uint32(EPILOGUE_GELU_AUX_BIAS)),
        (MATMUL_DESC_BIAS_POINTER, ctypes.c_void_p(bias)),
        (MATMUL_DESC_EPILOGUE_AUX_POINTER, ctypes.c_void_p(pre_activation)),
        (MATMUL_DESC_EPILOGUE_AUX_LD, ctypes.c_int64(outputs)),
    ):
        _set("cublasLtMatmulDescSetAttribute", descriptor, name, value)
    return descriptor


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    """Create the layout of a column-major matrix."""
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), ctypes.c_int(CUDA_R_16BF), ctypes.c_uint64(rows),
        ctypes.c_uint64(columns), ctypes.c_int64(rows),
    )  # fmt: skip
    return layout


def _set(function: str, what: ctypes.c_void_p, name: int, value: Any) -> None:
    _call(function, what, ctypes.c_int(name), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:  # noqa: ARG001 - each device has its own
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    function: Callable[..., int] = getattr(_require_library(), name)
    if status := function(*arguments):
        raise RuntimeError(f"{name} failed with cuBLASLt status {status}")


def _require_library() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("cuBLASLt is not available")
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library shipped with torch, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
