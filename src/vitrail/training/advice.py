"""What is said before a run that is likely to disappoint."""

from vitrail.metrics.baselines import PRETRAINED
from vitrail.training.defaults import SMALL_SIDE, DataFacts

FEW = 5_000
"""Fewer photographs than this do not teach a fresh Vision Transformer much."""


def before_training(facts: DataFacts, *, fresh: bool) -> list[str]:
    """Say what to expect of training from scratch on few photographs, and what to do instead; else nothing."""
    if not fresh or facts.images >= FEW or facts.side <= SMALL_SIDE:
        return []
    repository = PRETRAINED.removeprefix("timm:")
    return [
        f"few photographs: {facts.images:,} images to train on, from scratch. Expect far less than a pretrained "
        "model gives: a Vision Transformer knows nothing of images beforehand, and has to learn edges, textures and "
        "shapes from these alone",
        f"better: start from a pretrained model, --from {PRETRAINED} (on a CPU add --recipe linear-probe). Without a "
        f"network: elsewhere, hf download timm/{repository} --local-dir vit-small; copy the folder here; --from "
        "vit-small",
    ]
