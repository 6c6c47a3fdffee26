"""`embed`: the features of many images, in memory or in a file."""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from vitrail._version import __version__
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.checkpoints.writing import atomic_file, check_target
from vitrail.data.batches import BadImage
from vitrail.data.decoder_choice import check_decode
from vitrail.data.sources.given import Data
from vitrail.data.sources.selection import choose_images, recorded_split
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import label_texts
from vitrail.errors import CheckpointError, ConfigError
from vitrail.inference.feature_files import (
    DType,
    FeatureRows,
    as_written,
    check_dtype,
    check_suffix,
    has_sidecar,
    open_rows,
    sidecar,
)
from vitrail.inference.features import (
    DEFAULT_COMPUTE,
    ComputeOptions,
    FeatureBatch,
    FeatureKind,
    FeatureRequest,
    Features,
    feature_batches,
    gather,
    nothing_to_read,
)
from vitrail.inference.ray_cluster import RayOptions
from vitrail.quantisation import NO_INT8_ON_RAY
from vitrail.runtime import OnPlan, OnProgress, PrecisionChoice, on_stage


class EmbedResult(NamedTuple):
    """What `embed` wrote."""

    output: Path
    names: Path | None
    """The file with names and labels; None if they are in the output itself."""
    shape: tuple[int, ...]
    """Shape of all features: (images, …)."""
    bad: tuple[BadImage, ...]
    """Images that could not be read; they have no row."""


@overload
def embed(
    bundle: Bundle | str | Path,
    data: Data,
    output: None = None,
    *,
    tokens: FeatureKind = "pooled",
    layer: int | None = None,
    normalise: bool = False,
    raw: bool = False,
    split: str = "all",
    dtype: DType = "float32",
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    precision: PrecisionChoice | Literal["int8"] = "auto",
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    ray: str | RayOptions | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> Features: ...


@overload
def embed(
    bundle: Bundle | str | Path,
    data: Data,
    output: str | Path,
    *,
    tokens: FeatureKind = "pooled",
    layer: int | None = None,
    normalise: bool = False,
    raw: bool = False,
    split: str = "all",
    dtype: DType = "float32",
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    precision: PrecisionChoice | Literal["int8"] = "auto",
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    ray: str | RayOptions | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> EmbedResult: ...


def embed(
    bundle: Bundle | str | Path,
    data: Data,
    output: str | Path | None = None,
    *,
    tokens: FeatureKind = "pooled",
    layer: int | None = None,
    normalise: bool = False,
    raw: bool = False,
    split: str = "all",
    dtype: DType = "float32",
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    precision: PrecisionChoice | Literal["int8"] = "auto",
    decode: str = "auto",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    ray: str | RayOptions | None = None,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> EmbedResult | Features:
    """Compute the features of images: arrays in memory, or with `output` a .parquet, .npy or .safetensors file.

    There is one row per image, in order. An unreadable image has no row and is listed in the result as `bad`. Memory
    does not grow with the number of images that are written to a file.

    `tokens` selects the features: "pooled" is the input of the head; "class", "patches" and "registers" are tokens.
    With `layer` (0-based, negative from the end) the model is treated as if it ended there: its final norm follows,
    unless `raw` is set. `normalise` scales every vector to length 1. `dtype` is that of the file; arrays are float32.
    `overrides` and `keys` are those of `load`; `decode` is that of `predict`.

    `precision` "int8" needs images to calibrate on, `calibrate`; by default those of the model's run. It is refused if
    the features differ too much from those in float32.

    With `ray`, workers of a Ray cluster compute, and `output` is a folder of Parquet files, which `resume` completes.
    It is "local", "auto", an address, or `RayOptions`.
    """
    if resume and ray is None:
        raise ConfigError("without Ray, the file appears only when it is complete, so there is nothing to resume")
    target = None if output is None or ray is not None else check_output(output, overwrite=overwrite)
    check_dtype(dtype)
    check_decode(decode, on_ray=ray is not None)
    how = ComputeOptions(
        device, precision, batch, workers, on_stage(on_progress, "embedding"), on_plan, decode, calibrate, on_progress
    )
    if ray is None:  # the workers check their own device
        how.check()  # before anything is read
    bundle, request = (
        ready_bundle(bundle, overrides=overrides, keys=keys),
        FeatureRequest(tokens, layer, normalise, raw),
    )
    request.check(bundle.model.config)
    record = recorded_split(bundle.origin)
    chosen = choose_images(data, split, record=record, on_progress=on_stage(on_progress, "listing"))
    if ray is not None:
        if precision == "int8":
            raise ConfigError(NO_INT8_ON_RAY)
        from vitrail.inference.ray_jobs import embed_on_ray  # which imports this module

        return embed_on_ray(
            bundle, chosen.source, output, ray, request, dtype=dtype, batch=batch, workers=workers, device=device,
            precision=precision, resume=resume, overwrite=overwrite, on_progress=how.on_progress, on_plan=on_plan,
        )  # fmt: skip
    if target is None:
        bundle.announce()
        return gather(bundle, chosen.source, request, how)
    return embed_source(bundle, chosen.source, target, request, how, dtype=dtype, overwrite=overwrite)


def _is_there(folder: Path) -> bool:
    """Return whether a path exists, also where we lack permission to look."""
    try:
        return folder.exists()
    except PermissionError:
        return True


def check_output(output: str | Path, *, overwrite: bool) -> Path:
    """Raise, before anything is computed, if a file cannot or should not be written."""
    target = Path(output)
    check_suffix(target)
    for file in (target, sidecar(target)) if has_sidecar(target) else (target,):
        check_target(file, overwrite=overwrite, folder=False)
    around = next(folder for folder in target.absolute().parents if _is_there(folder))
    if not os.access(around, os.W_OK):
        raise CheckpointError(f"{target} cannot be written: no write permission for {around}; choose another folder")
    if not around.is_dir():
        raise CheckpointError(f"{target} cannot be written, because {around} is a file; choose another folder")
    return target


def embed_source(
    bundle: Bundle,
    source: Source,
    output: Path,
    request: FeatureRequest,
    how: ComputeOptions = DEFAULT_COMPUTE,
    *,
    dtype: DType = "float32",
    overwrite: bool = False,
) -> EmbedResult:
    """Write the features of a source's images."""
    check_dtype(dtype)
    config = bundle.model.config
    request.check(config)
    shape, names = request.shape(config), sidecar(output) if has_sidecar(output) else None
    bad: list[BadImage] = []
    written = 0
    batches = feature_batches(bundle, source, request, how)
    bundle.announce()
    with ExitStack() as files:
        # In this order, so that a disk error names the output.
        sidecar_path = None if names is None else files.enter_context(atomic_file(names, overwrite=overwrite))
        temporary = files.enter_context(atomic_file(output, overwrite=overwrite))
        file = open_rows(
            temporary,
            sidecar_path,
            output.suffix.lower(),
            len(source),
            shape,
            dtype,
            facts_of(request, config.depth, source),
        )
        try:
            for some in batches:
                bad += some.bad
                rows = feature_rows(some, source, dtype)
                if rows.indices:
                    file.add(rows)
                written += len(rows.indices)
            if not written:
                raise nothing_to_read(bad)
            file.close()
        except BaseException:  # also Ctrl-C
            file.abandon()
            raise
    return EmbedResult(output, names, (written, *shape), tuple(bad))


def feature_rows(some: FeatureBatch, source: Source, dtype: DType) -> FeatureRows:
    """Return the rows of a batch as they are written."""
    indices = some.indices.tolist()
    names = [source.name(index) for index in indices]
    return FeatureRows(as_written(some.features, dtype, names), indices, names, label_texts(source, some.indices))


def facts_of(request: FeatureRequest, depth: int, source: Source) -> str:
    """Describe the features in JSON, for file formats with metadata."""
    # A ResNet has no layers.
    layer = (depth - 1 if request.layer is None else request.layer) % depth if depth else None
    facts = {
        "tokens": request.tokens,
        "layer": layer,
        "layers": depth,
        "normalised": request.normalise,
        "raw": request.raw,
        "classes": list(source.classes),
        "written_by": f"vitrail {__version__}",
    }
    return json.dumps(facts, ensure_ascii=False)
