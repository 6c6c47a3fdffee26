"""A bundle as a file for another runtime, with proof: what was written is opened again and asked."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from vitrail._version import __version__
from vitrail.acceleration.export.check import TOLERANCE, Check, check_outputs
from vitrail.acceleration.export.graph import BATCH, INPUT, Graph, output_name, trace
from vitrail.acceleration.export.onnx import OPSET, OnnxFile, check_opset, onnx_program, write_onnx
from vitrail.acceleration.export.openvino import Compiled, openvino_model, write_openvino
from vitrail.acceleration.export.torch_export import Archive, write_archive
from vitrail.acceleration.packages import require
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.checkpoints.writing import whole_file
from vitrail.errors import CheckpointError, ConfigError, suggest

Form = Literal["onnx", "torch", "openvino"]
SUFFIXES: dict[Form, str] = {"onnx": ".onnx", "torch": ".pt2", "openvino": ".xml"}
FORMATS = "the formats are onnx (.onnx), torch (.pt2) and openvino (.xml)"
PACKAGES: dict[Form, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "torch": (),
    "openvino": ("onnx", "onnxscript", "openvino"),
}


class Export(NamedTuple):
    """What an export came to."""

    files: list[Path]
    """What was written, the file to open first."""
    form: Form
    check: Check
    metadata: dict[str, Any]
    """What the file says of its input, output, classes and preprocessing."""


def export(
    bundle: str | Path | Bundle,
    output: str | Path,
    *,
    to: Form = "onnx",
    preprocess: bool = False,
    channels_last: bool = False,
    opset: int | None = None,
    overwrite: bool = False,
) -> Export:
    """Write a model as a graph for another runtime, for batches of any size, and check it before it gets its name.

    With `preprocess` the graph takes pixels as they are, uint8 0…255, and normalises them itself; without, it takes
    what `Preprocess.normalise` makes of them. `channels_last` has it take (B, H, W, C), as decoders give images.
    Decoding and resizing stay outside. Classes and preprocessing are written along: into ONNX, and as a .json beside
    the others. `opset` is the version of ONNX's operators.
    """
    target = check_request(Path(output), to, opset, overwrite=overwrite)
    opened = ready_bundle(bundle)
    graph = Graph(opened.model, opened.preprocess if preprocess else None, channels_last=channels_last)
    metadata = describe_graph(graph, opened)
    with whole_file(target, overwrite=overwrite) as temporary:
        _write(graph, to, temporary, metadata, OPSET if opset is None else opset)
        check = check_outputs(graph, opened.preprocess, _opened(to, temporary))
        if not check.passed:
            raise CheckpointError(
                f"what was written as {to} answers differently (by {check.relative:.1e} of the largest answer, where "
                f"{TOLERANCE:.0e} is allowed), so it was thrown away; this is a fault of vitrail or of a runtime, "
                f"please report it"
            )
        beside = _settle_beside(temporary, target)
    opened.announce()
    return Export([target, *beside], to, check, metadata)


def describe_graph(graph: Graph, bundle: Bundle) -> dict[str, Any]:
    """Return what somebody who has only the graph needs to know."""
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
        "classes": None if bundle.classes is None else list(bundle.classes),
        "preprocess": json.loads(bundle.preprocess.to_json()),
    }


def check_request(target: Path, to: str, opset: int | None, *, overwrite: bool) -> Path:
    """Refuse before anything is opened or computed; return where to write."""
    if to not in get_args(Form):
        raise ConfigError(f"nothing can be exported to {to!r}; {FORMATS}{suggest(to, get_args(Form))}")
    form: Form = to  # type: ignore[assignment]
    if target.suffix.lower() != SUFFIXES[form]:
        other = next((name for name, suffix in SUFFIXES.items() if suffix == target.suffix.lower()), None)
        help = f"; say --to {other} (to={other!r})" if other else f"; {FORMATS}"
        raise CheckpointError(
            f"{to} is written as a file that ends in {SUFFIXES[form]}, and {target.name!r} does not{help}"
        )
    if opset is not None and to == "torch":
        raise ConfigError("an opset is ONNX's; leave --opset out for torch")
    check_opset(OPSET if opset is None else opset)
    for file in (target, *_beside(target, form)):
        if os.path.lexists(file) and not overwrite:
            raise CheckpointError(
                f"{file} exists already; choose another name, or replace it with --overwrite (overwrite=True)"
            )
    for package in PACKAGES[form]:
        require(package, "openvino" if form == "openvino" else "onnx")
    return target


def _beside(target: Path, form: Form) -> list[Path]:
    """Return the files that are written, or may be, beside the one that is named."""
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
    """Return a value as ONNX can hold it: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _opened(to: Form, path: Path) -> Callable[[Tensor], Tensor]:
    """Open what was written as somebody else would."""
    match to:
        case "onnx":
            return OnnxFile(path)
        case "torch":
            return Archive(path)
        case "openvino":
            return Compiled(path)


def _settle_beside(temporary: Path, target: Path) -> list[Path]:
    """Give the files beside the main one their names; the main one comes last, so that it never stands alone."""
    made = sorted(file for file in temporary.parent.iterdir() if file != temporary)
    if made:
        target.unlink(missing_ok=True)  # an old graph beside new weights would be worse than none
    for file in made:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.replace(target.parent / file.name)
    return [target.parent / file.name for file in made]
