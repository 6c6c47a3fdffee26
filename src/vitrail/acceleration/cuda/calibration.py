"""What the numbers of a model look like, so that fp8 can be scaled before the first picture rather than for each."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.acceleration.cuda.encoder import Numbers
from vitrail.acceleration.cuda.model import FastModel
from vitrail.acceleration.cuda.passes import FP8_MAX
from vitrail.errors import InputError
from vitrail.models.vit import ViT

MARGIN = 1.25
"""How much larger than all that was seen a number may be before it is cut off."""


@torch.inference_mode()
def calibrate(model: ViT, pictures: Tensor | Iterable[Tensor], *, margin: float = MARGIN) -> dict[str, float]:
    """Return what 1 in fp8 shall stand for, for the input of each product: `{"0.qkv": 0.03, …}`.

    `pictures` is a normalised batch (B, C, H, W), or several; they should look like those to be answered later.
    """
    like = next(model.parameters())
    watched = FastModel(model, Numbers(torch.bfloat16 if like.is_cuda else like.dtype, exact=True))
    record: dict[str, Tensor] = {}
    watched.encoder.watch(record)
    for batch in (pictures,) if isinstance(pictures, Tensor) else pictures:
        if len(batch):
            watched(batch.to(like.dtype) if batch.is_floating_point() else batch)  # others are refused by the model
    if not record:
        raise InputError("there are no pictures to calibrate fp8 with; give a batch of normalised pictures")
    largest = {name: float(value) for name, value in record.items()}
    for name, value in largest.items():
        if not 0 < value < float("inf"):
            raise InputError(f"what goes into {name} is {value} at most, which fp8 cannot be scaled by; use bf16")
    return {name: value * margin / FP8_MAX for name, value in largest.items()}
