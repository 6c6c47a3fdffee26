"""What the checkpoint tests share: a tiny bundle, peers' arrays, and comparisons with a peer's model."""

from typing import Any

import numpy as np
import torch
from tests.support.peers import relative_error, scramble
from torch import nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 128, "depth": 2, "heads": 2, "classes": 3}
TIMM_SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 128,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 7,
}


def tiny_bundle(**fields: Any) -> Bundle:
    model = ViT(ViTConfig(**{**TINY, **fields}))
    scramble(model)
    preprocess = Preprocess(size=(32, 32), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return Bundle(model.eval(), preprocess, ("cat", "dog", "newt") if model.config.classes else None)


def assert_same_logits(bundle: Bundle, peer: nn.Module) -> None:
    config = bundle.model.config
    x = torch.randn(2, config.channels, *config.image_size)
    with torch.no_grad():
        expected = peer.eval()(x)
        expected = getattr(expected, "logits", expected)
        assert relative_error(bundle.model(x), expected) <= 1e-5


def assert_writes_back(bundle: Bundle, family: Any, peer: nn.Module, strict: bool = True) -> None:
    """Our weights in the family's format are bit-identical to the peer's tensors."""
    written = family.write(bundle.model.state_dict(), bundle.model.config)
    theirs = {name: tensor for name, tensor in peer.state_dict().items() if tensor.numel()}
    assert set(written) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(written[name], tensor), name
    peer.load_state_dict(written, strict=strict)


def google_arrays(model: ViT) -> dict[str, np.ndarray[Any, Any]]:
    """Write a model as Google's code would, from the published table and by hand."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    config = model.config
    D, H, h = config.width, config.heads, config.head_width
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        **({"cls": state["cls_token"]} if "cls_token" in state else {}),
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    if config.representation:
        arrays |= {"pre_logits/kernel": state["pre_logits.fc.weight"].T, "pre_logits/bias": state["pre_logits.fc.bias"]}
    for i in range(config.depth):
        ours, theirs = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        attention = f"{theirs}MultiHeadDotProductAttention_1/"
        for j, part in enumerate(("query", "key", "value")):
            arrays[f"{attention}{part}/kernel"] = state[f"{ours}attn.qkv.weight"][j * D : (j + 1) * D].T.reshape(
                D, H, h
            )
            arrays[f"{attention}{part}/bias"] = state[f"{ours}attn.qkv.bias"][j * D : (j + 1) * D].reshape(H, h)
        arrays[f"{attention}out/kernel"] = state[f"{ours}attn.proj.weight"].T.reshape(H, h, D)
        arrays[f"{attention}out/bias"] = state[f"{ours}attn.proj.bias"]
        for number, leaf in ((0, "norm1"), (2, "norm2")):
            arrays[f"{theirs}LayerNorm_{number}/scale"] = state[f"{ours}{leaf}.weight"]
            arrays[f"{theirs}LayerNorm_{number}/bias"] = state[f"{ours}{leaf}.bias"]
        for number, leaf in ((0, "mlp.fc1"), (1, "mlp.fc2")):
            arrays[f"{theirs}MlpBlock_3/Dense_{number}/kernel"] = state[f"{ours}{leaf}.weight"].T
            arrays[f"{theirs}MlpBlock_3/Dense_{number}/bias"] = state[f"{ours}{leaf}.bias"]
    return arrays
