"""Export a bundle for another runtime. The exported file is opened again and its outputs are compared."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from vitrail._version import __version__
from vitrail.acceleration.export.check import TOLERANCE, Check, check_outputs
from vitrail.acceleration.export.graph import BATCH, INPUT, Archive, Graph, output_name, require, trace, write_archive
from vitrail.acceleration.export.onnx import OPSET, OnnxFile, check_opset, onnx_program, write_onnx
from vitrail.acceleration.export.openvino import Compiled, openvino_model, write_openvino
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.checkpoints.writing import atomic_file
from vitrail.errors import CheckpointError, ConfigError, suggest
from vitrail.tasks.lookup import compare_for, task_of

Form = Literal["onnx", "torch", "openvino"]
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


def export(
    bundle: str | Path | Bundle,
    output: str | Path,
    *,
    to: Form = "onnx",
    preprocess: bool = False,
    channels_last: bool = False,
    opset: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    overwrite: bool = False,
) -> Export:
    """Export a model as a graph for another runtime, with a dynamic batch size, and verify it before renaming it.

    With `preprocess` the graph takes uint8 pixels (0…255) and normalises them; without, it takes the output of
    `Preprocess.normalise`. With `channels_last` it takes (B, H, W, C), as decoders return images. Decoding and
    resizing are not part of the graph. Classes and preprocessing are written into the ONNX file, or to a .json file
    next to the other formats. `opset` is the ONNX opset version. `overrides` and `keys` are those of `load`.
    """
    target = check_request(Path(output), to, opset, overwrite=overwrite)
    opened = ready_bundle(bundle, overrides=overrides, keys=keys)
    graph = Graph(opened.model, opened.preprocess if preprocess else None, channels_last=channels_last)
    metadata = describe_graph(graph, opened)
    with atomic_file(target, overwrite=overwrite) as temporary:
        _write(graph, to, temporary, metadata, OPSET if opset is None else opset)
        check = check_outputs(graph, opened.preprocess, _opened(to, temporary), compare_for(opened))
        if not check.passed:
            raise CheckpointError(
                f"the outputs of the exported {to} file differ by {check.relative:.1e} of the largest output (allowed: "
                f"{TOLERANCE:.0e}), so it was deleted; this is a bug in vitrail or in the runtime, please report it"
            )
        extra = _move_extra(temporary, target)
    opened.announce()
    return Export([target, *extra], to, check, metadata)


def describe_graph(graph: Graph, bundle: Bundle) -> dict[str, Any]:
    """Return the metadata needed to use the graph on its own."""
    config = bundle.model.config
    height, width, channels = *config.image_size, config.channels
    sides = [height, width, channels] if graph.channels_last else [channels, height, width]
    inside = graph.preprocess is not None
    return {
        "written_by": f"vitrail {__version__}",
        "input": {
            "name": INPUT,
            "type": "uint8" if inside else "float32",
            "shape": [BATCH, *sides],
            "normalised": "inside" if inside else "outside: (pixels / 255 - mean) / std",
        },
        "output": output_name(bundle.model),
        **(
            {"task": bundle.task, "activation": task_of(bundle).activation}
            if config.classes and config.pool != "none"
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
        made = onnx_program(program, output_name(graph.model), opset, extra=to)
        if to == "onnx":
            write_onnx(made, path, {key: _as_text(value) for key, value in metadata.items()})
            return
        write_openvino(openvino_model(made), path)
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
