"""What goes into a model's products, seen on some images, so that fp8 is chosen well before the first answer."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.acceleration.cuda.elementwise import FP8_MAX
from vitrail.acceleration.cuda.encoder import LOW, SPARED, Numbers
from vitrail.acceleration.cuda.matmul import Known
from vitrail.acceleration.cuda.model import FastModel
from vitrail.acceleration.cuda.rounding import Seen
from vitrail.errors import InputError
from vitrail.models.vit import ViT

AT_ONCE = 64
"""Images that are looked at together, however many there are."""
MARGIN = 1.25
"""How much larger than all that was seen a number may be before it is cut off."""


@torch.inference_mode()
def calibrate(
    model: ViT, images: Tensor | Iterable[Tensor], *, low: frozenset[str] = LOW, spared: int = SPARED
) -> dict[str, Known]:
    """Return what is known of the inputs of each product after some images: `{"0.qkv": …}`.

    `images` is a normalised batch (B, C, H, W), or several; they should look like those to be answered later. A
    thousand are plenty. From few, scales may be too small, and weights are rounded more nearly to the nearest number.
    `low` and `spared` are those of the `Numbers` that it is for.
    """
    like = next(model.parameters())
    watched = FastModel(model, Numbers(torch.bfloat16 if like.is_cuda else like.dtype, exact=True))
    record: dict[str, Seen] = {}
    watched.encoder.watch(record, low, spared)
    for batch in (images,) if isinstance(images, Tensor) else images:
        for part in batch.split(AT_ONCE) if len(batch) else ():
            watched(part.to(like.dtype) if part.is_floating_point() else part)  # others are refused by the model
    if not record:
        raise InputError("there are no images to calibrate fp8 with; give a batch of normalised images")
    for name, seen in record.items():
        value = float(seen.largest)
        if not 0 < value < float("inf"):
            raise InputError(f"what goes into {name} is {value} at most, which fp8 cannot be scaled by; use bf16")
    scales = {name: float(seen.largest) * MARGIN / FP8_MAX for name, seen in record.items()}
    return {name: Known(scale, _kept(record.pop(name))) for name, scale in scales.items()}


def _kept(seen: Seen) -> Tensor | None:
    """Return what weights are rounded by, not on the device, where that of all products together may be too large."""
    together = seen.damped()
    return None if together is None else together.cpu()
