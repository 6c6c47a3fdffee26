"""What goes into a model's products, seen on some pictures, so that fp8 is chosen well before the first answer."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.acceleration.cuda.encoder import Numbers
from vitrail.acceleration.cuda.model import FastModel
from vitrail.acceleration.cuda.passes import FP8_MAX
from vitrail.acceleration.cuda.products import Known
from vitrail.acceleration.cuda.rounding import Seen
from vitrail.errors import InputError
from vitrail.models.vit import ViT

MARGIN = 1.25
"""How much larger than all that was seen a number may be before it is cut off."""


@torch.inference_mode()
def calibrate(model: ViT, pictures: Tensor | Iterable[Tensor]) -> dict[str, Known]:
    """Return what is known of the inputs of each product after some pictures: `{"0.qkv": …}`.

    `pictures` is a normalised batch (B, C, H, W), or several; they should look like those to be answered later. A
    thousand are plenty. From few, only the scales are found well, and weights are rounded to the nearest number.
    """
    like = next(model.parameters())
    watched = FastModel(model, Numbers(torch.bfloat16 if like.is_cuda else like.dtype, exact=True))
    record: dict[str, Seen] = {}
    watched.encoder.watch(record)
    for batch in (pictures,) if isinstance(pictures, Tensor) else pictures:
        if len(batch):
            watched(batch.to(like.dtype) if batch.is_floating_point() else batch)  # others are refused by the model
    if not record:
        raise InputError("there are no pictures to calibrate fp8 with; give a batch of normalised pictures")
    for name, seen in record.items():
        value = float(seen.largest)
        if not 0 < value < float("inf"):
            raise InputError(f"what goes into {name} is {value} at most, which fp8 cannot be scaled by; use bf16")
    scales = {name: float(seen.largest) * MARGIN / FP8_MAX for name, seen in record.items()}
    return {name: Known(scale, record.pop(name).damped()) for name, scale in scales.items()}  # which may be large
