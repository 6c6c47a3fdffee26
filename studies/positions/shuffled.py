"""Evaluate the runs of a sweep on images whose patches are shuffled: how much does a model use their order?

    python studies/positions/shuffled.py runs/positions cifar10/

Every test image gets its own permutation of its patches, the same for all models. Writes shuffled.json next to
sweep.json: for each candidate, the accuracy of each seed on the shuffled images.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import vitrail
from vitrail.data.batches import Evaluation, evaluation_batches
from vitrail.evaluation import predict_all
from vitrail.models.stems import patchify, unpatchify
from vitrail.models.vit import ViT
from vitrail.runtime import choose_device

BATCH = 500


class Shuffled(nn.Module):
    """A model that sees every image with its patches in random order."""

    def __init__(self, model: ViT, seed: int = 0) -> None:
        super().__init__()
        self.model = model
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """Shuffle the patches of each image, and classify it."""
        config = self.model.config
        patches = patchify(x, config.patch_size)
        order = torch.rand(patches.shape[:2], generator=self.generator).argsort(dim=1).to(x.device)
        shuffled = patches.gather(1, order[..., None].expand_as(patches))
        logits: Tensor = self.model(unpatchify(shuffled, config.grid, config.patch_size, config.channels))
        return logits


def accuracy(bundle: vitrail.Bundle, data: Path, device: torch.device) -> float:
    """Return the accuracy on the shuffled test images."""
    source = vitrail.open_data(data).test
    if source is None:
        raise SystemExit(f"{data} has no test split")
    batches = evaluation_batches(Evaluation(source, bundle.preprocess, BATCH))
    predictions = predict_all(Shuffled(bundle.model.to(device)), batches, bundle.preprocess, device)
    return float(np.mean(predictions.outputs.argmax(axis=1) == predictions.labels))


def main() -> None:
    """Evaluate every selected run of the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the folder of the sweep")
    parser.add_argument("data", type=Path, help="the data of the sweep")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = choose_device(args.device)
    results = {}
    for candidate in json.loads((args.sweep / "sweep.json").read_text())["candidates"]:
        folders = [args.sweep / run["folder"] / "best" for run in candidate["seeds"]]
        results[candidate["name"]] = [accuracy(vitrail.load(folder), args.data, device) for folder in folders]
        print(candidate["name"], *(f"{value:.4f}" for value in results[candidate["name"]]), flush=True)
    (args.sweep / "shuffled.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
