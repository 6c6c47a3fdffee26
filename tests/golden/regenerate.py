"""Rewrite the golden files: `make golden`. Users notice changes in them, so read the diff."""

import json
from pathlib import Path

import torch

from vitrail.models.config import ViTConfig
from vitrail.models.stages import sample_image
from vitrail.models.vit import ViT

HERE = Path(__file__).parent

# Every option that adds parameters, spread over models that can combine them.
NAMED = {
    "plain": ViTConfig(depth=1),
    "everything": ViTConfig(
        depth=1,
        registers=4,
        distillation_token=True,
        norm_before_blocks=True,
        qk_norm=True,
        layer_scale=1e-5,
        representation=64,
        position_at="every_block",
    ),
    "map": ViTConfig(depth=1, class_token="none", pool="map", position="relative", final_norm="after_pool"),
    "learned_2d": ViTConfig(depth=1, position="learned_2d", stem="linear_norm"),
    "conv_stem": ViTConfig(depth=1, stem="conv_stem", position="sincos_2d"),
    "resnet": ViTConfig(depth=1, stem="resnet", resnet={"depths": (1, 2)}, patch_size=(8, 8), position="rope_2d"),
    "patches": ViTConfig(depth=2, pool="patches", head_layers=(0, 1)),
}

TINY = ViTConfig(image_size=(16, 24), patch_size=(8, 8), width=24, depth=2, heads=3, classes=4)


def parameter_names() -> str:
    """List the name and shape of every tensor in each model's checkpoint: the contract with saved files."""
    lines = []
    for title, config in NAMED.items():
        with torch.device("meta"):
            model = ViT(config)
        lines.append(f"# {title}")
        lines += [f"{name} {'×'.join(map(str, tensor.shape))}" for name, tensor in model.state_dict().items()]
    return "\n".join(lines) + "\n"


def config_fields() -> str:
    """List every option with its default: the contract with saved configs."""
    return json.dumps(json.loads(ViTConfig().to_json()), indent=2) + "\n"


def logits() -> str:
    """Run a tiny model on the sample image; its weights follow a formula, because random draws differ between CPUs."""
    model = ViT(TINY).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            wave = torch.sin(torch.arange(parameter.numel()) * 0.7 + i).reshape(parameter.shape)
            parameter.copy_(wave * (0.3 if parameter.ndim > 1 else 0.5) + (1 if parameter.ndim == 1 else 0))
        output = model(sample_image(3, TINY.image_size))
    return json.dumps([round(float(x), 6) for x in output[0]]) + "\n"


GOLDEN = {"parameter_names.txt": parameter_names, "config_fields.json": config_fields, "logits.json": logits}

if __name__ == "__main__":
    for name, make in GOLDEN.items():
        (HERE / name).write_text(make(), encoding="utf-8")
