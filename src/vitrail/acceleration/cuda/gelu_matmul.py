"""A product with GELU in the same kernel that also keeps what GELU was taken of, for the way back.

cuBLASLt has such a kernel, and torch, which brings cuBLASLt along, has no name for it. So the library's C functions are
called as they are. Its GELU is the tanh form. It thinks in columns: a matrix of rows is to it the same matrix on its
side, and Y = X·Wᵀ is Yᵀ = W·Xᵀ. Elsewhere plain torch does it, in the exact form. Axes: M rows, N outputs, K inputs.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WORKSPACE = 32 * 2**20
"""Bytes that a product may use meanwhile: what NVIDIA advises for Hopper GPUs."""


@torch.library.custom_op("vitrail::gelu_product", mutates_args=())
def gelu_matmul(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU of x (M, K) times weight (N, K) transposed plus bias (N,), and that sum itself; all of one dtype."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if can_multiply(x, weight, bias):
        made, kept = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
        _multiply(x, weight, bias, made, kept)
        return made, kept
    kept = torch.addmm(bias, x, weight.t())
    return F.gelu(kept), kept


@gelu_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - as the operator itself
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


def can_multiply(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Say whether cuBLASLt is there and has a kernel for these matrices: bf16, sizes in eights, each 16 bytes whole."""
    (M, K), N = x.shape, weight.shape[0]
    return (
        x.is_cuda
        and all(given.dtype == torch.bfloat16 and given.device == x.device for given in (x, weight, bias))
        and (weight.shape, bias.shape) == ((N, K), (N,))
        and M > 0
        and N % 8 == K % 8 == 0
        and all(given.data_ptr() % 16 == 0 for given in (x, weight, bias))
        and _library() is not None
        and _plan(x.get_device(), M, N, K) is not None
    )


# ── cuBLASLt ──

# Names from its header file, cublasLt.h, and their values there.
CUDA_R_32F, CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_OP_T = 0, 14, 68, 1
MATMUL_DESC_TRANSA, MATMUL_DESC_EPILOGUE, MATMUL_DESC_BIAS_POINTER = 3, 7, 8
MATMUL_DESC_EPILOGUE_AUX_POINTER, MATMUL_DESC_EPILOGUE_AUX_LD = 11, 12
EPILOGUE_GELU_AUX_BIAS, MATMUL_PREF_MAX_WORKSPACE_BYTES = 164, 1


class _Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: a kernel, and what it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Plan(NamedTuple):
    """How matrices of some sizes lie, and the kernel that multiplies them."""

    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    made: ctypes.c_void_p
    found: _Found


def _multiply(x: Tensor, weight: Tensor, bias: Tensor, made: Tensor, kept: Tensor) -> None:
    device, (N, K) = x.get_device(), weight.shape
    plan = _plan(device, x.shape[0], N, K)
    if plan is None:  # `can_multiply` was not asked
        raise RuntimeError("cuBLASLt has no kernel for this product with GELU")
    with torch.cuda.device_of(x):
        workspace = x.new_empty(plan.found.workspace, dtype=torch.uint8)
        product = _product(N, bias.data_ptr(), kept.data_ptr())
        try:
            _call(
                "cublasLtMatmul", _handle(device), product, ctypes.byref(ctypes.c_float(1)), _at(weight), plan.weight,
                _at(x), plan.x, ctypes.byref(ctypes.c_float(0)), _at(made), plan.made, _at(made), plan.made,
                ctypes.byref(plan.found.algorithm), _at(workspace), ctypes.c_size_t(plan.found.workspace),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulDescDestroy", product)


@functools.lru_cache(maxsize=256)
def _plan(device: int, rows: int, outputs: int, inputs: int) -> _Plan | None:
    """Return the kernel that cuBLASLt holds for the fastest, or None where it has none."""
    weight, x, made = _layout(inputs, outputs), _layout(inputs, rows), _layout(outputs, rows)
    wishes, found, number = ctypes.c_void_p(), _Found(), ctypes.c_int()
    with torch.cuda.device(device):
        # Addresses that stand for those to come: what counts is by how much they can be divided.
        product = _product(outputs, 256, 256)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(wishes))
        try:
            most = ctypes.c_uint64(WORKSPACE)
            _set("cublasLtMatmulPreferenceSetAttribute", wishes, MATMUL_PREF_MAX_WORKSPACE_BYTES, most)
            status = _loaded().cublasLtMatmulAlgoGetHeuristic(
                _handle(device), product, weight, x, made, made, wishes, ctypes.c_int(1), ctypes.byref(found),
                ctypes.byref(number),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulPreferenceDestroy", wishes)
            _call("cublasLtMatmulDescDestroy", product)
    return None if status or number.value == 0 or found.state else _Plan(weight, x, made, found)


def _product(outputs: int, bias: int, kept: int) -> ctypes.c_void_p:
    """Describe the product, and what happens to it on its way to memory."""
    product = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(product), ctypes.c_int(CUBLAS_COMPUTE_32F), ctypes.c_int(CUDA_R_32F))
    for name, value in (
        (MATMUL_DESC_TRANSA, ctypes.c_int32(CUBLAS_OP_T)),
        (MATMUL_DESC_EPILOGUE, ctypes.c_uint32(EPILOGUE_GELU_AUX_BIAS)),
        (MATMUL_DESC_BIAS_POINTER, ctypes.c_void_p(bias)),
        (MATMUL_DESC_EPILOGUE_AUX_POINTER, ctypes.c_void_p(kept)),
        (MATMUL_DESC_EPILOGUE_AUX_LD, ctypes.c_int64(outputs)),
    ):
        _set("cublasLtMatmulDescSetAttribute", product, name, value)
    return product


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    """Describe a matrix that lies column behind column."""
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), ctypes.c_int(CUDA_R_16BF), ctypes.c_uint64(rows),
        ctypes.c_uint64(columns), ctypes.c_int64(rows),
    )  # fmt: skip
    return layout


def _set(function: str, what: ctypes.c_void_p, name: int, value: Any) -> None:
    _call(function, what, ctypes.c_int(name), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:  # noqa: ARG001 - each device has its own
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _call(name: str, *given: Any) -> None:
    function: Callable[..., int] = getattr(_loaded(), name)
    if status := function(*given):
        raise RuntimeError(f"{name} of cuBLASLt failed with status {status}")


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("cuBLASLt is not there")
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library that came with torch, or None where there is none of that name."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
