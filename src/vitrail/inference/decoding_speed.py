"""How many images/s are read, decoded and resized for a model on this machine, on the CPU and on the GPU."""

from collections.abc import Iterator
from contextlib import closing
from time import perf_counter
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from vitrail.data.batches import Batch, Evaluation, default_workers
from vitrail.data.decoder_choice import DEVICES, Decoder, check_decode, choose_for_source
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, DataError

BATCH = 256
LONGEST = 200_000
"""Most images that are read; few are read again and again."""


class DecodingSpeed(NamedTuple):
    """How fast images are decoded, or why that was not measured."""

    decode: Literal["cpu", "gpu"]
    images_per_second: float | None
    """From files to batches of pixels; without the start of the workers."""
    workers: int
    reason: str = ""
    """Why it was not measured."""


def decoding_speeds(
    source: Source, preprocess: Preprocess, device: torch.device, decode: str, seconds: float
) -> tuple[DecodingSpeed, ...]:
    """Measure for some seconds each: with `auto`, the CPU and, on a CUDA device, the GPU."""
    check_decode(decode)
    both = decode == "auto" and device.type in DEVICES
    made, workers = [], default_workers()
    for name in ("cpu", "gpu") if both else ("cpu" if decode == "auto" else decode,):
        try:
            decoder = choose_for_source(name, device, preprocess, source)
        except ConfigError as error:
            if not both:
                raise
            made.append(DecodingSpeed("gpu", None, workers, str(error)))
            continue
        made.append(DecodingSpeed(decoder.name, _speed(decoder, source, preprocess, device, workers, seconds), workers))
    return tuple(made)


def _speed(
    decoder: Decoder, source: Source, preprocess: Preprocess, device: torch.device, workers: int, seconds: float
) -> float:
    repeated = Subset(source, np.arange(LONGEST, dtype=np.int64) % len(source))
    batches = decoder.batches(Evaluation(repeated, preprocess, BATCH, bad_files="skip"), device, workers)
    done, started, now = 0, None, 0.0
    with closing(cast("Any", batches)) as coming:
        for batch in cast("Iterator[Batch]", coming):
            now = perf_counter()
            if started is None:
                started = now
                continue
            done += len(batch.indices)
            if now - started >= seconds:
                break
    if started is None or not done:
        raise DataError("none of the images can be read; run vitrail check to see why")
    return done / (now - started)
