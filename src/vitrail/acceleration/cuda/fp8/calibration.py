"""Calibration of fp8 on sample images."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.acceleration.cuda.fp8.quantisation import FP8_MAX, InputCalibration, InputStatistics
from vitrail.acceleration.cuda.inference.encoder import LOW, SPARED, EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.errors import InputError
from vitrail.models.vit import ViT

BATCH = 64
"""Images per forward pass."""
MARGIN = 1.25
"""How far a value may exceed the calibrated maximum before it saturates."""


@torch.inference_mode()
def calibrate(
    model: ViT, images: Tensor | Iterable[Tensor], *, low: frozenset[str] = LOW, spared: int = SPARED
) -> dict[str, InputCalibration]:
    """Return the calibration of each matmul's input: `{"0.qkv": …}`.

    `images` is a normalised batch (B, C, H, W), or several, similar to those in use. A thousand images are enough. With
    few, scales may be too small, and weights are rounded almost to nearest. `low` and `spared` must match the
    `EncoderPrecision` it is used with.
    """
    like = next(model.parameters())
    observed = FastModel(model, EncoderPrecision(torch.bfloat16 if like.is_cuda else like.dtype, exact=True))
    statistics: dict[str, InputStatistics] = {}
    observed.encoder.observe(statistics, low, spared)
    for batch in (images,) if isinstance(images, Tensor) else images:
        for chunk in batch.split(BATCH) if len(batch) else ():
            observed(chunk.to(like.dtype) if chunk.is_floating_point() else chunk)  # the model rejects other dtypes
    if not statistics:
        raise InputError("no images to calibrate fp8; pass a batch of normalised images")
    for name, observation in statistics.items():
        value = float(observation.largest)
        if not 0 < value < float("inf"):
            raise InputError(f"the input of {name} has maximum {value}, which cannot be scaled to fp8; use bf16")
    scales = {name: float(observation.largest) * MARGIN / FP8_MAX for name, observation in statistics.items()}
    return {name: InputCalibration(scale, _correlation(statistics.pop(name))) for name, scale in scales.items()}


def _correlation(observation: InputStatistics) -> Tensor | None:
    """Return the damped correlation of the inputs on the CPU; the matrices of all matmuls may not fit on the device."""
    correlation = observation.damped()
    return None if correlation is None else correlation.cpu()
