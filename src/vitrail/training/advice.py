"""Warnings before a run that is unlikely to give a good model."""

from vitrail.metrics.baselines import PRETRAINED
from vitrail.training.defaults import SMALL_SIDE, DataFacts

FEW = 5_000
"""With fewer photos than this, a Vision Transformer trained from scratch stays weak."""


def before_training(facts: DataFacts, *, fresh: bool) -> list[str]:
    """Return warnings about training from scratch on few photos, with what to do instead; usually empty."""
    if not fresh or facts.images >= FEW or facts.side <= SMALL_SIDE:
        return []
    repository = PRETRAINED.removeprefix("timm:")
    return [
        f"few photos: training from scratch on {facts.images:,} images. Expect much lower accuracy than with a "
        "pretrained model: a Vision Transformer has no built-in knowledge of images and must learn edges, textures and "
        "shapes from these images alone",
        f"better: start from a pretrained model, --from {PRETRAINED} (on a CPU add --recipe linear-probe). Without a "
        f"network: run hf download timm/{repository} --local-dir vit-small elsewhere, copy the folder here and use "
        "--from vit-small",
    ]
