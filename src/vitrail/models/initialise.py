"""Weight initialisation as in the paper's code, timm, torchvision or vit-pytorch.

A scheme maps the role of a parameter to its initialiser; the role follows from the parameter's name. A parameter
without a role is an error, and two schemes can be compared line by line.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.models.config import Initialisation, ViTConfig


class Fan(NamedTuple):
    """The fan-in and fan-out of a parameter's layer."""

    inputs: int
    outputs: int
    """Outputs of one sub-layer: a fused query-key-value kernel is initialised as three layers."""


Fill = Callable[[Tensor, Fan], Tensor]

# ── initialisers ──


def _constant(value: float) -> Fill:
    return lambda t, _: t.fill_(value)


def _normal(std: float) -> Fill:
    return lambda t, _: t.normal_(std=std)


def _truncated(std: float) -> Fill:
    """Truncated at ±2, not at two sigma: for a small sigma effectively a plain normal, as in timm."""
    return lambda t, _: t.normal_(std=std).clamp_(-2, 2)


def _within_two_sigma(t: Tensor, sigma: float) -> Tensor:
    """Sample a normal truncated at two sigma by inverse transform: in place, without torch's large temporaries."""
    bound = math.erf(math.sqrt(2))
    return t.uniform_(-bound, bound).erfinv_().mul_(math.sqrt(2) * sigma)


def _xavier(t: Tensor, fan: Fan) -> Tensor:
    """Uniform with variance 2 / (inputs + outputs)."""
    bound = math.sqrt(6 / (fan.inputs + fan.outputs))
    return t.uniform_(-bound, bound)


def _xavier_fused(t: Tensor, _: Fan) -> Tensor:
    """Xavier that treats a fused kernel as one layer, and so is too small (as torch's MultiheadAttention does)."""
    return nn.init.xavier_uniform_(t)


def _lecun(t: Tensor, fan: Fan) -> Tensor:
    """JAX's lecun_normal: truncated at two sigma, then scaled so that the variance is 1 / inputs."""
    return _within_two_sigma(t, math.sqrt(1 / fan.inputs) / 0.87962566103423978)


def _fan_in_truncated(t: Tensor, fan: Fan) -> Tensor:
    """Normal with standard deviation 1/√inputs, truncated at ±2."""
    return t.normal_(std=math.sqrt(1 / fan.inputs)).clamp_(-2, 2)


def _fan_out_normal(t: Tensor, fan: Fan) -> Tensor:
    return t.normal_(std=math.sqrt(2 / fan.outputs))


def _width_truncated(t: Tensor, _: Fan) -> Tensor:
    return _within_two_sigma(t, t.shape[-1] ** -0.5)


def _torch_default(t: Tensor, fan: Fan) -> Tensor:
    """Uniform in ±1/√inputs: the default of nn.Linear and nn.Conv2d, for weight and bias."""
    bound = 1 / math.sqrt(fan.inputs)
    return t.uniform_(-bound, bound)


def _kaiming_fan_out(t: Tensor, _: Fan) -> Tensor:
    """Kaiming normal for ReLU, by fan-out."""
    return nn.init.kaiming_normal_(t, mode="fan_out", nonlinearity="relu")


_ZERO, _ONE = _constant(0.0), _constant(1.0)

# ── the role of a parameter, by its name; the first match wins ──

_ROLES: tuple[tuple[str, str], ...] = (
    (r"ls[12]\.gamma", "layer_scale"),
    (r"blocks\.\d+\.norm3\.weight", "last_norm"),  # inside the hybrid's ResNet
    (r"\w*norm\w*\.weight", "norm_weight"),
    (r"\w*norm\w*\.bias", "norm_bias"),
    (r"cls_token", "class_token"),
    (r"dist_token", "distillation_token"),
    (r"reg_token", "register"),
    (r"pos_embed(_row|_col)?|rel_pos", "position"),
    (r"attn_pool\.latent", "latent"),
    (r"patch_embed\.backbone\..*conv\d?\.weight", "backbone"),
    (r"patch_embed\.proj\.weight", "patch"),
    (r"patch_embed\.proj\.bias", "patch_bias"),
    (r"attn\.qkv\.weight|attn_pool\.(q|kv)\.weight", "qkv"),
    (r"(attn|attn_pool)\.proj\.weight", "out"),
    (r"mlp\.fc[12]\.weight", "mlp"),
    (r"mlp\.fc[12]\.bias", "mlp_bias"),
    (r"pre_logits\.fc\.weight", "representation"),
    (r"head(_dist)?\.weight", "head"),
    (r"head(_dist)?\.bias", "head_bias"),
    (r"(qkv|q|kv)\.bias", "qkv_bias"),
    (r"proj\.bias", "out_bias"),
    (r"fc\.bias", "representation_bias"),
)

_EVERYWHERE: dict[str, Fill] = {"last_norm": _ONE, "norm_weight": _ONE, "norm_bias": _ZERO}
_ZERO_BIASES: dict[str, Fill] = dict.fromkeys(
    ("patch_bias", "mlp_bias", "head_bias", "qkv_bias", "out_bias", "representation_bias"), _ZERO
)
_TORCH: dict[str, Fill] = dict.fromkeys(
    ("backbone", "patch", "qkv", "out", "mlp", "representation", "head", *_ZERO_BIASES), _torch_default
)

SCHEMES: dict[Initialisation, Mapping[str, Fill]] = {
    # Flax's defaults, as in the paper's code; query, key and value are three layers.
    "paper": _EVERYWHERE
    | _ZERO_BIASES
    | {
        "last_norm": _ZERO,
        "class_token": _ZERO,
        "distillation_token": _normal(0.02),
        "register": _normal(0.02),
        "position": _normal(0.02),
        "latent": _xavier,
        "backbone": _lecun,
        "patch": _lecun,
        "qkv": _xavier,
        "out": _xavier,
        "mlp": _xavier,
        "mlp_bias": _normal(1e-6),
        "representation": _lecun,
        "head": _ZERO,
    },
    "timm": _EVERYWHERE
    | _ZERO_BIASES
    | {
        "last_norm": _ZERO,
        "class_token": _normal(1e-6),
        "distillation_token": _truncated(0.02),
        "register": _normal(1e-6),
        "position": _truncated(0.02),
        "latent": _width_truncated,
        "backbone": _kaiming_fan_out,
        "patch": _torch_default,
        "patch_bias": _torch_default,
        "qkv": _truncated(0.02),
        "out": _truncated(0.02),
        "mlp": _truncated(0.02),
        "representation": _truncated(0.02),
        "head": _truncated(0.02),
    },
    "torchvision": _EVERYWHERE
    | _ZERO_BIASES
    | {
        "class_token": _ZERO,
        "distillation_token": _normal(0.02),
        "register": _normal(0.02),
        "position": _normal(0.02),
        "latent": _xavier,
        "backbone": _torch_default,
        "patch": _fan_in_truncated,
        "qkv": _xavier_fused,
        "out": _torch_default,
        "mlp": _xavier,
        "mlp_bias": _normal(1e-6),
        "representation": _fan_in_truncated,
        "head": _ZERO,
    },
    "lucidrains": _EVERYWHERE
    | _TORCH
    | {
        "class_token": _normal(1.0),
        "distillation_token": _normal(1.0),
        "register": _normal(1.0),
        "position": _normal(1.0),
        "latent": _normal(1.0),
    },
}


@torch.no_grad()
def initialise(model: nn.Module, config: ViTConfig, *, only: Sequence[str] = ()) -> None:
    """Initialise the parameters of `model` by `config.init`, with torch's global generator.

    `only` names the submodules to initialise; by default all.
    """
    scheme = SCHEMES[config.init]
    sizes = dict(model.named_parameters())
    for name, parameter in sizes.items():
        if only and name.partition(".")[0] not in only:
            continue
        role = role_of(name)
        if parameter.is_meta:  # nothing to fill, and torch would import its compiler for it
            continue
        if role == "layer_scale":
            parameter.fill_(config.layer_scale or 0.0)
            continue
        if role == "head_bias" and config.head_bias is not None:
            parameter.fill_(config.head_bias)
            continue
        kernel = sizes.get(name.removesuffix(".bias") + ".weight", parameter)
        fill = scheme[role]
        if config.init == "torchvision" and role == "patch" and config.stem == "conv_stem":
            fill = _fan_out_normal  # torchvision's rule for the 1×1 convolution of the conv stem
        fill(parameter, _fan(name, kernel, gated=config.activation == "swiglu"))


def role_of(name: str) -> str:
    """Return the role of a parameter from its name."""
    for pattern, role in _ROLES:
        if re.search(rf"(^|\.)({pattern})$", name):
            return role
    raise LookupError(f"parameter {name} has no role in initialise.py")


def _fan(name: str, kernel: Tensor, gated: bool) -> Fan:
    sublayers = 1
    if ".qkv." in name:
        sublayers = 3
    elif ".kv." in name or (gated and ".fc1." in name):
        sublayers = 2
    inputs = kernel[0].numel() if kernel.ndim > 1 else kernel.numel()
    return Fan(inputs, kernel.shape[0] // sublayers)
