"""A Google checkpoint gives the logits of a reference implementation of Google's code.

Google's packages are not available here, so the forward pass of vision_transformer and big_vision is written below in
NumPy float64, on the arrays as they are in the files: same names, channels last, a separate axis for heads. It shares
nothing with our model or key table; random files of each format must give the same logits in both. Only the key biases
are not tested: softmax cancels them, in Google's code as in ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.peers import relative_error

import vitrail

Array = NDArray[np.floating[Any]]
Arrays = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]

ORIGINAL = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
LINEN = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
INSIDE, ON_TOP = "Transformer/posembed_input/pos_embedding", "pos_embedding"
CLASSES = 7
STREAM = 0.1
"""The scale of the embeddings: small, so that LayerNorm's eps affects the logits."""


@dataclass(frozen=True)
class Form:
    """One format in which Google's code writes a ViT."""

    numbering: tuple[str, str, str, str] = ORIGINAL
    prefix: str = ""
    scanned: bool = False
    position: str = INSIDE
    pool: str = "cls"
    representation: int | None = None
    resnet: tuple[int, ...] | None = None
    group_norm_axes: int = 1
    image: int = 32
    patch: int = 8
    grid: int = 4
    width: int = 48
    heads: int = 3
    depth: int = 2


# ── a random file ──


def dense_shapes(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def norm_shapes(name: str, width: int, axes: int = 1) -> Shapes:
    return {f"{name}/{leaf}": (1,) * (axes - 1) + (width,) for leaf in ("scale", "bias")}


def attention_shapes(name: str, width: int, heads: int) -> Shapes:
    D, H, h = width, heads, width // heads
    shapes: Shapes = {f"{name}/out/kernel": (H, h, D), f"{name}/out/bias": (D,)}
    for part in ("query", "key", "value"):
        shapes |= {f"{name}/{part}/kernel": (D, H, h), f"{name}/{part}/bias": (H, h)}
    return shapes


def mlp_shapes(name: str, width: int) -> Shapes:
    hidden = 2 * width + 8
    return {**dense_shapes(f"{name}/Dense_0", width, hidden), **dense_shapes(f"{name}/Dense_1", hidden, width)}


def resnet_shapes(depths: tuple[int, ...], axes: int) -> Shapes:
    shapes: Shapes = {"conv_root/kernel": (7, 7, 3, 64), **norm_shapes("gn_root", 64, axes)}
    inputs = 64
    for stage, depth in enumerate(depths, 1):
        f = 64 * 2 ** (stage - 1)
        for unit in range(1, depth + 1):
            kernels = {"1": (1, 1, inputs, f), "2": (3, 3, f, f), "3": (1, 1, f, 4 * f)}
            kernels |= {"_proj": (1, 1, inputs, 4 * f)} if unit == 1 else {}
            for part, shape in kernels.items():
                name = f"block{stage}/unit{unit}/"
                shapes |= {f"{name}conv{part}/kernel": shape, **norm_shapes(f"{name}gn{part}", shape[-1], axes)}
            inputs = 4 * f
    return shapes


def file_shapes(form: Form) -> Shapes:
    D, H = form.width, form.heads
    shapes: Shapes = {} if form.resnet is None else resnet_shapes(form.resnet, form.group_norm_axes)
    channels = 3 if form.resnet is None else 256 * 2 ** (len(form.resnet) - 1) if form.resnet else 64
    shapes |= {"embedding/kernel": (form.patch, form.patch, channels, D), "embedding/bias": (D,)}
    shapes |= {"cls": (1, 1, D)} if form.pool == "cls" else {}
    shapes[form.position] = (1, form.grid**2 + (form.pool == "cls" and form.position == INSIDE), D)
    norm_1, attention, norm_2, mlp = form.numbering
    block = {**norm_shapes(norm_1, D), **attention_shapes(attention, D, H), **norm_shapes(norm_2, D)}
    block |= mlp_shapes(mlp, D)
    for leaf, shape in block.items():
        if form.scanned:
            shapes[f"Transformer/encoderblock/{leaf}"] = (form.depth, *shape)
        else:
            shapes |= {f"Transformer/encoderblock_{i}/{leaf}": shape for i in range(form.depth)}
    shapes |= norm_shapes("Transformer/encoder_norm", D)
    if form.pool == "map":
        shapes |= {"MAPHead_0/probe": (1, 1, D), **norm_shapes("MAPHead_0/LayerNorm_0", D)}
        shapes |= attention_shapes("MAPHead_0/MultiHeadDotProductAttention_0", D, H)
        shapes |= mlp_shapes("MAPHead_0/MlpBlock_0", D)
    shapes |= dense_shapes("pre_logits", D, form.representation) if form.representation else {}
    return shapes | dense_shapes("head", form.representation or D, CLASSES)


def draw(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Draw an array that affects the logits, as does every epsilon, without saturating anything."""
    noise = random.standard_normal(shape)
    if name.endswith("scale"):
        noise = 1 + 0.3 * noise
    elif "conv" in name:
        # Standardisation removes scale and mean, except for its eps and GroupNorm's, visible only with small kernels.
        noise = (noise + random.standard_normal(shape[-1])) * 10 ** random.uniform(-9, -1, shape[-1])
    elif name.endswith("kernel"):
        axes = shape[1:] if "encoderblock/" in name else shape
        noise /= np.sqrt(axes[0] if name.split("/")[-2] in ("query", "key", "value") else np.prod(axes[:-1]))
    elif name.endswith("bias"):
        noise *= 0.2
    if name.endswith("Dense_0/bias"):
        noise -= 2  # where GELU and its tanh approximation differ most
    if name.endswith("Dense_1/kernel"):
        noise *= 3  # to compensate for GELU's small output
    adds_to_the_tokens = ("embedding/", "cls", "pos_embedding", "probe", "/out/", "Dense_1/")
    noise *= STREAM if any(part in name for part in adds_to_the_tokens) else 1
    return noise.astype(np.float32)


# ── Google's forward pass ──


def under(p: Arrays, name: str) -> Arrays:
    return {key.removeprefix(f"{name}/"): array for key, array in p.items() if key.startswith(f"{name}/")}


def normalise(x: Array, axes: int | tuple[int, ...]) -> Array:
    normal: Array = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-6)
    return normal


def layer_norm(p: Arrays, x: Array) -> Array:
    return normalise(x, -1) * p["scale"] + p["bias"]


def group_norm(p: Arrays, x: Array) -> Array:
    groups = x.reshape(*x.shape[:3], 32, -1)
    return normalise(groups, (1, 2, 4)).reshape(x.shape) * p["scale"] + p["bias"]


def gelu(x: Array) -> Array:
    bent: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + bent)


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def softmax(x: Array) -> Array:
    raised = np.exp(x - x.max(-1, keepdims=True))
    weights: Array = raised / raised.sum(-1, keepdims=True)
    return weights


def dense(p: Arrays, x: Array) -> Array:
    return x @ p["kernel"] + p["bias"]


def mlp(p: Arrays, x: Array) -> Array:
    return dense(under(p, "Dense_1"), gelu(dense(under(p, "Dense_0"), x)))


def attention(p: Arrays, queries: Array, keys: Array) -> Array:
    query, key, value = (
        np.einsum("bnd,dhk->bnhk", x, p[f"{part}/kernel"]) + p[f"{part}/bias"]
        for part, x in (("query", queries), ("key", keys), ("value", keys))
    )
    weights = softmax(np.einsum("bqhk,bnhk->bhqn", query, key) / np.sqrt(query.shape[-1]))
    mixed: Array = np.einsum("bhqn,bnhk,hkd->bqd", weights, value, p["out/kernel"])
    return mixed + p["out/bias"]


def encoder_block(p: Arrays, x: Array, numbering: tuple[str, str, str, str]) -> Array:
    norm_1, attend, norm_2, mlp_name = numbering
    y = layer_norm(under(p, norm_1), x)
    x = x + attention(under(p, attend), y, y)
    return x + mlp(under(p, mlp_name), layer_norm(under(p, norm_2), x))


def map_head(p: Arrays, x: Array) -> Array:
    probe = np.tile(p["probe"], (len(x), 1, 1))
    x = attention(under(p, "MultiHeadDotProductAttention_0"), probe, x)
    return (x + mlp(under(p, "MlpBlock_0"), layer_norm(under(p, "LayerNorm_0"), x)))[:, 0]


POOLS: dict[str, Callable[[Arrays, Array], Array]] = {
    "cls": lambda _, x: x[:, 0],
    "gap": lambda _, x: x.mean(1),
    "map": map_head,
}


def taps(x: Array, size: int, stride: int, padding: float = 0.0) -> Array:
    """Return the input of each kernel tap, (size, size, B, h, w, C), with TensorFlow's SAME padding."""
    out = [-(-side // stride) for side in x.shape[1:3]]
    lacking = [max((o - 1) * stride + size - side, 0) for o, side in zip(out, x.shape[1:3], strict=True)]
    before_after = [(n // 2, n - n // 2) for n in lacking]  # the odd pixel comes after
    x = np.pad(x, [(0, 0), *before_after, (0, 0)], constant_values=padding)
    reach = [(o - 1) * stride + 1 for o in out]
    rows = [x[:, i : i + reach[0] : stride] for i in range(size)]
    return np.stack([[row[:, :, j : j + reach[1] : stride] for j in range(size)] for row in rows])


def convolve(kernel: Array, x: Array, stride: int) -> Array:
    return np.tensordot(taps(x, len(kernel), stride).transpose(2, 3, 4, 0, 1, 5), kernel, axes=3)


def conv_norm(p: Arrays, part: str, x: Array, stride: int = 1) -> Array:
    kernel = p[f"conv{part}/kernel"]
    kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
    return group_norm(under(p, f"gn{part}"), convolve(kernel, x, stride))


def residual_unit(p: Arrays, x: Array, stride: int) -> Array:
    residual = conv_norm(p, "_proj", x, stride) if "conv_proj/kernel" in p else x
    y = relu(conv_norm(p, "1", x))
    y = relu(conv_norm(p, "2", y, stride))
    return relu(residual + conv_norm(p, "3", y))


def resnet(p: Arrays, x: Array, depths: tuple[int, ...]) -> Array:
    x = relu(conv_norm(p, "_root", x, 2))
    x = taps(x, 3, 2, -np.inf).max((0, 1))
    for stage, depth in enumerate(depths, 1):
        for unit in range(1, depth + 1):
            x = residual_unit(under(p, f"block{stage}/unit{unit}"), x, 2 if stage > 1 and unit == 1 else 1)
    return x


def forward(p: Arrays, x: Array, form: Form) -> Array:
    """Compute logits from an image (B, height, width, 3)."""
    x = x if form.resnet is None else resnet(p, x, form.resnet)
    x = convolve(p["embedding/kernel"], x, form.patch) + p["embedding/bias"]
    x = x.reshape(len(x), -1, form.width)
    x = x + p[ON_TOP] if form.position == ON_TOP else x  # big_vision adds it before the class token
    x = np.concatenate([np.tile(p["cls"], (len(x), 1, 1)), x], axis=1) if form.pool == "cls" else x
    x = x + p[INSIDE] if form.position == INSIDE else x
    for i in range(form.depth):
        stacked = under(p, "Transformer/encoderblock")
        block = {name: array[i] for name, array in stacked.items()} or under(p, f"Transformer/encoderblock_{i}")
        x = encoder_block(block, x, form.numbering)
    x = layer_norm(under(p, "Transformer/encoder_norm"), x)
    x = POOLS[form.pool](under(p, "MAPHead_0"), x)
    x = np.tanh(dense(under(p, "pre_logits"), x)) if form.representation else x
    return dense(under(p, "head"), x)


FORMS = {
    "original": Form(),
    "original, four heads": Form(width=32, heads=4, depth=3),
    "pre_logits": Form(representation=40, width=64, heads=2),
    "gap": Form(pool="gap", representation=24),
    "linen": Form(numbering=LINEN, prefix="params/"),
    "scanned, class token": Form(numbering=LINEN, scanned=True, position=ON_TOP, depth=3),
    "scanned, gap": Form(numbering=LINEN, scanned=True, position=ON_TOP, pool="gap", prefix="params/img/"),
    "scanned, map": Form(numbering=LINEN, scanned=True, position=ON_TOP, pool="map", depth=3),
    "hybrid, root alone": Form(resnet=(), image=64, patch=4),
    "hybrid, two stages": Form(resnet=(1, 2), image=48, patch=2, grid=3),
    "hybrid, three stages": Form(resnet=(1, 1, 1), image=48, patch=1, grid=3, representation=40),
    "hybrid, old GroupNorm": Form(resnet=(1, 2), patch=1, group_norm_axes=4, prefix="opt/target/"),
}


@pytest.mark.parametrize("name", FORMS)
def test_google_logits(name: str, tmp_path: Path) -> None:
    form, random = FORMS[name], np.random.default_rng(0)
    arrays = {key: draw(random, key, shape) for key, shape in file_shapes(form).items()}
    np.savez(tmp_path / "vit.npz", **{form.prefix + key: array for key, array in arrays.items()})
    image = random.standard_normal((2, form.image, form.image, 3)).astype(np.float32)
    expected = forward({key: array.astype(np.float64) for key, array in arrays.items()}, np.float64(image), form)
    bundle = vitrail.load(tmp_path / "vit.npz", heads=form.heads)
    with torch.no_grad():
        actual = bundle.model(torch.from_numpy(image).permute(0, 3, 1, 2))
    assert relative_error(actual.double(), torch.from_numpy(expected)) <= 1e-5
