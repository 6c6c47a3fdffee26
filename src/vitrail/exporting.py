"""Export a bundle for another runtime. The exported file is opened again and its outputs are compared."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from vitrail._version import __version__
from vitrail.acceleration.export.check import TOLERANCE, Check, check_outputs
from vitrail.acceleration.export.dynamic_size import check_dynamic_size
from vitrail.acceleration.export.graph import (
    BATCH,
    HEIGHT,
    INPUT,
    WIDTH,
    Archive,
    Graph,
    output_name,
    require,
    trace,
    write_archive,
)
from vitrail.acceleration.export.onnx import OPSET, OnnxFile, check_opset, onnx_program, write_onnx, write_quantised
from vitrail.acceleration.export.openvino import Compiled, openvino_model, write_openvino
from vitrail.acceleration.int8.check import Int8Check
from vitrail.acceleration.int8.quantise import require_packages
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.checkpoints.writing import atomic_file
from vitrail.data.sources.given import Data
from vitrail.errors import CheckpointError, ConfigError, suggest
from vitrail.quantisation import (
    CalibrationImages,
    calibration_images,
    check_calibration,
    check_int8,
    quantised_graph,
)
from vitrail.runtime import OnProgress
from vitrail.tasks.lookup import compare_for, task_of_head, unsuited_head

Form = Literal["onnx", "torch", "openvino"]
ExportPrecision = Literal["float32", "int8"]
SUFFIXES: dict[Form, str] = {"onnx": ".onnx", "torch": ".pt2", "openvino": ".xml"}
FORMATS = "the formats are onnx (.onnx), torch (.pt2) and openvino (.xml)"
PACKAGES: dict[Form, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "torch": (),
    "openvino": ("onnx", "onnxscript", "openvino"),
}


class Export(NamedTuple):
    """The result of an export."""

    files: list[Path]
    """The files written; the first one is the file to open."""
    form: Form
    check: Check
    metadata: dict[str, Any]
    """The input, output, classes and preprocessing, as recorded in the file."""
    int8: Int8Check | None = None
    """How well the predictions in int8 agree with float32; also in the metadata."""


def export(
    bundle: str | Path | Bundle,
    output: str | Path,
    *,
    to: Form = "onnx",
    preprocess: bool = False,
    channels_last: bool = False,
    dynamic_size: bool = False,
    opset: int | None = None,
    precision: ExportPrecision = "float32",
    calibrate: Data | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Export:
    """Export a model as a graph for another runtime, with a dynamic batch size, and verify it before renaming it.

    With `preprocess` the graph takes uint8 pixels (0…255) and normalises them; without, it takes the output of
    `Preprocess.normalise`. With `channels_last` it takes (B, H, W, C), as decoders return images. Decoding and
    resizing are not part of the graph. Classes and preprocessing are written into the ONNX file, or to a .json file
    next to the other formats. With `dynamic_size` it takes images of any size, in multiples of the patch size. `opset`
    is the ONNX opset version. `overrides` and `keys` are those of `load`.

    With `precision` "int8" the weights and matmuls of an ONNX or OpenVINO file are int8, calibrated on the images
    `calibrate`, by default those of the model's run. If that changes too many predictions, nothing is written.
    """
    target = check_request(Path(output), to, opset, overwrite=overwrite)
    _check_precision(precision, to, calibrate, dynamic_size=dynamic_size)
    opened = ready_bundle(bundle, overrides=overrides, keys=keys)
    if dynamic_size:
        check_dynamic_size(opened.model.config)
    images = calibration_images(opened, calibrate, on_progress) if precision == "int8" else None
    graph = Graph(
        opened.model,
        opened.preprocess if preprocess else None,
        channels_last=channels_last,
        dynamic_size=dynamic_size,
    )
    metadata = describe_graph(graph, opened)
    compare = compare_for(opened)
    with atomic_file(target, overwrite=overwrite) as temporary:
        int8 = None
        if images is None:
            _write(graph, to, temporary, metadata, OPSET if opset is None else opset)
        else:
            version = OPSET if opset is None else opset
            int8 = _write_int8(graph, opened, to, temporary, metadata, version, images, on_progress)
        check = check_outputs(graph, opened.preprocess, _opened(to, temporary), compare)
        if not check.passed and int8 is None:
            raise CheckpointError(
                f"the outputs of the exported {to} file differ by {check.relative:.1e} of the largest output (allowed: "
                f"{TOLERANCE:.0e}), so it was deleted; this is a bug in vitrail or in the runtime, please report it"
            )
        extra = _move_extra(temporary, target)
    opened.announce()
    return Export([target, *extra], to, check, metadata, int8)


def describe_graph(graph: Graph, bundle: Bundle) -> dict[str, Any]:
    """Return the metadata needed to use the graph on its own."""
    config, task = bundle.model.config, task_of_head(bundle)
    height, width, channels = *config.image_size, config.channels
    sides: list[int | str] = [HEIGHT, WIDTH] if graph.dynamic_size else [height, width]
    sides = [*sides, channels] if graph.channels_last else [channels, *sides]
    inside = graph.preprocess is not None
    return {
        "written_by": f"vitrail {__version__}",
        "input": {
            "name": INPUT,
            "type": "uint8" if inside else "float32",
            "shape": [BATCH, *sides],
            "normalised": "inside" if inside else "outside: (pixels / 255 - mean) / std",
            **({"multiples_of": list(config.patch_size)} if graph.dynamic_size else {}),
        },
        "output": output_name(bundle.model),
        **(
            {
                "task": bundle.task,
                "activation": task.activation,
                **({"task_constants": bundle.task_constants} if bundle.task_constants else {}),
            }
            if task is not None and not unsuited_head(task, config)
            else {}
        ),
        "classes": None if bundle.classes is None else list(bundle.classes),
        "preprocess": json.loads(bundle.preprocess.to_json()),
    }


def check_request(target: Path, to: str, opset: int | None, *, overwrite: bool) -> Path:
    """Validate the arguments before anything is opened or computed; return the target."""
    if to not in get_args(Form):
        raise ConfigError(f"cannot export to {to!r}; {FORMATS}{suggest(to, get_args(Form))}")
    form: Form = to  # type: ignore[assignment]
    if target.suffix.lower() != SUFFIXES[form]:
        other = next((name for name, suffix in SUFFIXES.items() if suffix == target.suffix.lower()), None)
        help = f"; use --to {other} (to={other!r})" if other else f"; {FORMATS}"
        raise CheckpointError(f"{to} files end in {SUFFIXES[form]}, and {target.name!r} does not{help}")
    if opset is not None and to == "torch":
        raise ConfigError("--opset applies to ONNX only; omit it for torch")
    check_opset(OPSET if opset is None else opset)
    for file in (target, *_extra_files(target, form)):
        if os.path.lexists(file) and not overwrite:
            raise CheckpointError(
                f"{file} exists already; choose another name, or replace it with --overwrite (overwrite=True)"
            )
    for package in PACKAGES[form]:
        require(package, "openvino" if form == "openvino" else "onnx")
    return target


def _extra_files(target: Path, form: Form) -> list[Path]:
    """Return the files that may be written next to the target."""
    match form:
        case "onnx":
            return [target.with_name(f"{target.name}.data")]
        case "torch":
            return [target.with_name(f"{target.name}.json")]
        case "openvino":
            return [target.with_suffix(".bin"), target.with_name(f"{target.name}.json")]


def _write(graph: Graph, to: Form, path: Path, metadata: dict[str, Any], opset: int) -> None:
    program = trace(graph)
    if to == "torch":
        write_archive(program, path)
    else:
        made = onnx_program(program, output_name(graph.model), opset, axes=graph.axes, extra=to)
        if to == "onnx":
            write_onnx(made, path, {key: _as_text(value) for key, value in metadata.items()})
            return
        write_openvino(openvino_model(made), path)
    _write_metadata(path, metadata)


def _write_int8(
    graph: Graph,
    bundle: Bundle,
    to: Form,
    path: Path,
    metadata: dict[str, Any],
    opset: int,
    images: CalibrationImages,
    on_progress: OnProgress | None,
) -> Int8Check:
    """Write a quantised graph and its check, which is added to the metadata; raise if int8 changes too much."""
    if on_progress is not None:
        on_progress("quantising to int8", 0, None)
    model = quantised_graph(graph, bundle, images.calibration, opset)
    if to == "onnx":
        write_quantised(model, path)
    else:
        write_openvino(openvino_model(model), path)
    check = check_int8(graph, bundle, _opened(to, path), images, compare_for(bundle), on_progress)
    check.require()
    metadata["int8"] = check.as_dict()
    if to == "onnx":
        write_quantised(model, path, {key: _as_text(value) for key, value in metadata.items()})
    else:
        _write_metadata(path, metadata)
    return check


def _check_precision(precision: str, to: str, calibrate: object, *, dynamic_size: bool) -> None:
    if precision not in get_args(ExportPrecision):
        raise ConfigError(f"cannot export in {precision!r}; the precisions are float32 and int8")
    check_calibration(precision, "torch", calibrate)
    if precision == "int8":
        if to == "torch":
            raise ConfigError("int8 is exported as onnx or openvino, not as torch; use --to onnx (to='onnx')")
        if dynamic_size:
            raise ConfigError("an int8 graph has one image size; omit --dynamic-size, or export in float32")
        require_packages()


def _write_metadata(path: Path, metadata: dict[str, Any]) -> None:
    text = json.dumps(metadata, indent=2, ensure_ascii=False)
    path.with_name(f"{path.name}.json").write_text(text + "\n", encoding="utf-8")


def _as_text(value: Any) -> str:
    """Return a value for ONNX metadata: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _opened(to: Form, path: Path) -> Callable[[Tensor], Tensor]:
    """Open the exported file with its runtime."""
    match to:
        case "onnx":
            return OnnxFile(path)
        case "torch":
            return Archive(path)
        case "openvino":
            return Compiled(path)


def _move_extra(temporary: Path, target: Path) -> list[Path]:
    """Move the extra files into place; the main file is moved last, so that it never exists without them."""
    made = sorted(file for file in temporary.parent.iterdir() if file != temporary)
    if made:
        target.unlink(missing_ok=True)  # never leave an old graph next to new weights
    for file in made:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.replace(target.parent / file.name)
    return [target.parent / file.name for file in made]
