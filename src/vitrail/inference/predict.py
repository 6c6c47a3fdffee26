"""`predict`: the predictions for any images, in memory or in a file."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, overload

from vitrail.acceleration.engine import Engine
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.decoder_choice import check_decode
from vitrail.data.inputs import ImageInput, Item, is_one, item_of, name_of, no_image
from vitrail.data.sources.given import Data, given_data, lists_images
from vitrail.data.sources.items import items_of
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.inference.bulk_prediction import SAMPLE, Quantise, Summary, predict_files, resolve_precision
from vitrail.inference.classifier import BATCH, Predictor, check_counts, check_precision
from vitrail.inference.ray_cluster import RayOptions
from vitrail.inference.writing import PredictionRow, Sink
from vitrail.quantisation import NO_INT8_ON_RAY, check_calibration, open_int8
from vitrail.runtime import OnPlan, OnProgress, Precision, choose_device, on_stage
from vitrail.tasks.lookup import task_of
from vitrail.tasks.task import Prediction

Paths = str | os.PathLike[str]
STDOUT = "-"
_log = logging.getLogger("vitrail")


@overload
def predict(
    model: Bundle | str | Path,
    images: Data | ImageInput | Iterable[ImageInput],
    *,
    top: int = 5,
    output: None = None,
    format: None = None,
    batch: int = BATCH,
    workers: int | None = None,
    device: str = "auto",
    engine: str = "torch",
    precision: str = "auto",
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    null: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    masks: str | Path | None = None,
    window: float | None = None,
    ray: str | RayOptions | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> list[Prediction]: ...


@overload
def predict(
    model: Bundle | str | Path,
    images: Paths | Iterable[Paths],
    *,
    top: int = 5,
    output: str | Path,
    format: str | None = None,
    batch: int = BATCH,
    workers: int | None = None,
    device: str = "auto",
    engine: str = "torch",
    precision: str = "auto",
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    null: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    masks: str | Path | None = None,
    window: float | None = None,
    ray: str | RayOptions | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> Summary: ...


def predict(
    model: Bundle | str | Path,
    images: Data | ImageInput | Iterable[ImageInput],
    *,
    top: int = 5,
    output: str | Path | None = None,
    format: str | None = None,
    batch: int = BATCH,
    workers: int | None = None,
    device: str = "auto",
    engine: str = "torch",
    precision: str = "auto",
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    null: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    masks: str | Path | None = None,
    window: float | None = None,
    ray: str | RayOptions | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> list[Prediction] | Summary:
    """Predict images: `predict("runs/pets/best", "new/")` returns a `Prediction` per image, in order.

    `images` are paths, one or several: files, folders, patterns, manifests, tar shards, "digits", or "-" for paths on
    stdin (NUL-separated with `null`). Or they are images in memory: Pillow images, arrays, tensors, bytes of files, or
    a dataset as `train` takes it (`Data`), whose labels are ignored. An unreadable image has an `error` instead; if no
    image can be read, `DataError` is raised. Files without an image suffix are skipped, with a warning (logger
    "vitrail"). `model` is a bundle or anything that `load` opens, with the same `overrides` and `keys`. To ask one
    model many times, open it once with `Classifier`.

    `decode` is where the JPEGs of paths are decoded: "cpu", "gpu" (nvImageCodec), or "auto", the faster one.
    `precision` "int8" needs images to calibrate on, `calibrate` (`Data`); by default those of the model's run. It is
    refused if it changes too many predictions.

    With `output`, the rows of paths are written to a file as they come (.jsonl, .csv, .parquet or .txt, or `format`),
    and a summary is returned; "-" is stdout. `resume` continues an interrupted job, `overwrite` replaces a file.

    A segmentation model writes a mask of every image to the folder `masks`: masks/….png, whose pixels are class
    indices, and overlays/….jpg, to look at; names mirror the paths of the images. In Python, the mask is
    `prediction.mask(height, width)`. With `window`, the model sees large images in overlapping windows at this scale
    (1: every pixel), instead of resized to its input.

    With `ray`, workers of a Ray cluster predict, and `output` is a folder of Parquet files. It is "local", "auto", an
    address, or `RayOptions`.
    """
    check_counts(top, batch)
    check_decode(decode, on_ray=ray is not None)
    check_calibration(precision, engine, calibrate)
    if output is None and format is not None:
        raise ConfigError("a format needs an output; name a file, or '-' for stdout")
    paths, others = _sorted_by_kind(_listed(images))
    if ray is not None and (others is not None or output is None):
        raise ConfigError("Ray writes the predictions of images with paths to a folder; name it as output")
    if others is not None and output is not None:
        raise ConfigError("only images with paths are written to a file; save these first, or omit output")
    if others is not None and masks is not None:
        raise ConfigError("masks of images in memory have no names; leave out masks, and use .mask() of a prediction")
    if ray is not None and (masks is not None or window is not None):
        raise ConfigError("Ray workers do not write masks and use no windows; leave out --masks and --window, or --ray")
    if precision == "int8" and ray is not None:
        raise ConfigError(NO_INT8_ON_RAY)
    opened = ready_bundle(model, overrides=overrides, keys=keys)
    quantise: Quantise | None = None
    if precision == "int8":
        quantise = partial(open_int8, data=calibrate, device=choose_device(device), on_progress=on_progress)
    if others is None and not paths and output is None:
        return []
    if others is not None:
        return _in_memory(opened, others, top, batch, device, engine, precision, quantise, window, on_progress, on_plan)
    if ray is not None:
        from vitrail.inference.ray_jobs import predict_on_ray  # only here: it imports much that others do not need

        return predict_on_ray(
            opened, paths, None if str(output) == STDOUT else output, ray, format=format, top=top, batch=batch,
            workers=workers, device=device, engine=engine, precision=precision, null=null, resume=resume,
            overwrite=overwrite, on_progress=on_stage(on_progress, "predicting"), on_plan=on_plan,
        )  # fmt: skip
    rows = _Rows()
    done = predict_files(
        opened,
        paths,
        output=None if output is None or str(output) == STDOUT else output,
        format=format,
        top=top,
        batch=batch,
        workers=workers,
        device=device,
        engine=engine,
        precision=precision,
        decode=decode,
        quantise=quantise,
        null=null,
        resume=resume,
        overwrite=overwrite,
        masks=masks,
        window=window,
        sink=rows if output is None else None,
        on_progress=on_stage(on_progress, "predicting"),
        on_plan=on_plan,
    )
    if output is not None:
        return done
    for message in done.skipped.messages():
        _log.warning("%s", message)
    return rows.predictions


class _Rows(Sink):
    """Keeps the rows in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions: list[Prediction] = []

    def write(self, rows: Sequence[PredictionRow]) -> None:
        self.predictions += [replace(row.prediction, image=os.fsdecode(row.path)) for row in rows]
        super().write(rows)


def _listed(images: object) -> object:
    """Return the images of a dataset, a table or a list of pairs; anything else as it is."""
    if not lists_images(images):
        return images
    data = given_data(images)
    return data if isinstance(data, str) else items_of(data)


def _sorted_by_kind(images: object) -> tuple[list[str], Iterator[Any] | None]:
    """Return paths, or images in memory, which may be mixed with paths of single images."""
    if is_one(images):
        images = [images]
    if not isinstance(images, Iterable):
        raise no_image(images)
    remaining = iter(images)
    paths: list[str] = []
    for image in remaining:
        if not isinstance(image, str | os.PathLike):
            return [], chain(paths, [image], remaining)
        paths.append(os.fspath(image))
    return paths, None


def _in_memory(
    bundle: Bundle,
    images: Iterator[Any],
    top: int,
    batch: int,
    device: str,
    engine: str,
    precision: str,
    quantise: Quantise | None,
    window: float | None,
    on_progress: OnProgress | None,
    on_plan: OnPlan | None,
) -> list[Prediction]:
    if quantise is None:
        check_precision(precision)
    task_of(bundle)  # raises without a head
    first = list(islice(images, SAMPLE if precision == "auto" else 0))
    place, report = choose_device(device), on_stage(on_progress, "predicting")
    resolved: Precision | Engine
    if quantise is not None:
        resolved = quantise(bundle)
    else:
        items = _items(first, bundle.preprocess.channels)
        resolved, _, _ = resolve_precision(precision, bundle, engine, place, items)
    predictor: Predictor[Any] = (
        Predictor(bundle, engine=engine, precision=resolved, device=device, window=window)
        if isinstance(resolved, str)
        else Predictor(bundle, engine=resolved, device=device, window=window)
    )
    if on_plan is not None:
        on_plan(str(predictor.engine.plan))
    predictions: list[Prediction] = []
    remaining = chain(first, images)
    while some := list(islice(remaining, batch)):
        names = [name_of(image, len(predictions) + number) for number, image in enumerate(some)]
        made = predictor.predict(some, top=top, errors="keep", batch=batch)
        predictions += [replace(one, image=name) for one, name in zip(made, names, strict=True)]
        if report is not None:
            report(len(predictions))
    if all(one.error is not None for one in predictions):
        if len(predictions) == 1:
            raise DataError(f"the only image cannot be read: {predictions[0].error}")
        first_bad = f"{predictions[0].image}: {predictions[0].error}"
        raise DataError(f"none of the {len(predictions):,} images can be read; the first, {first_bad}")
    return predictions


def _items(images: Sequence[object], channels: int) -> Iterator[Item]:
    """Yield the images that can be read, to choose a precision on."""
    for image in images:
        try:
            yield item_of(image, channels)
        except VitrailError:
            continue
