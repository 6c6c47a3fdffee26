"""`vitrail export`: export a model for another runtime."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitrail
from vitrail.cli.output import echo, progress
from vitrail.cli.overrides import Calibrate, Keys, Overrides, read_overrides

if TYPE_CHECKING:
    from vitrail.exporting import Export


def export(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="File to write: .onnx, .pt2 (torch) or .xml (openvino).")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="onnx (.onnx, for ONNX Runtime), torch (.pt2, a torch.export archive) or openvino (.xml, .bin).",
        ),
    ] = "onnx",
    preprocess: Annotated[
        bool,
        typer.Option(
            "--preprocess", help="Include the normalisation in the graph, so that it takes uint8 pixels (0 to 255)."
        ),
    ] = False,
    channels_last: Annotated[
        bool,
        typer.Option("--channels-last", help="Make the graph take (batch, height, width, channels)."),
    ] = False,
    dynamic_size: Annotated[
        bool,
        typer.Option("--dynamic-size", help="Make the graph take images of any size, in multiples of the patch size."),
    ] = False,
    opset: Annotated[int | None, typer.Option(help="ONNX opset, 18 to 23.")] = None,
    precision: Annotated[
        str, typer.Option(help="Precision: float32, or for onnx and openvino int8 (see --calibrate).")
    ] = "float32",
    calibrate: Calibrate = None,
    override: Overrides = None,
    keys: Keys = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Export a model for ONNX Runtime, torch.export or OpenVINO, and verify that the outputs stay the same."""
    with progress() as bar:
        done = vitrail.export(
            bundle,
            output,
            to=to,  # type: ignore[arg-type]
            preprocess=preprocess,
            channels_last=channels_last,
            dynamic_size=dynamic_size,
            opset=opset,
            precision=precision,  # type: ignore[arg-type]  # checked there
            calibrate=calibrate,
            overrides=read_overrides(override),
            keys=keys,
            overwrite=overwrite,
            on_progress=bar,
        )
    inputs = done.metadata["input"]
    shape = " × ".join(map(str, inputs["shape"]))
    for file in done.files:
        echo(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
    echo(f"input {inputs['name']}: {shape}, {inputs['type']}; output: {done.metadata['output']}")
    echo(_check_text(done))
    if not done.check.varied:
        echo("note: the model gives the same output for every image, so the check proves little; is its head trained?")


def _check_text(done: "Export") -> str:
    """Return how well the file agrees with the model."""
    if done.int8 is not None:  # what it does on random images says little
        return f"int8: {done.int8.text}"
    check, agreement = done.check, done.check.agreement
    same = (
        f", {agreement.values} by {agreement.change:.1e}; the {agreement.prediction} is the same for "
        f"{check.images - agreement.changed} of {check.images}"
        if agreement.prediction
        else ""
    )
    return (
        f"checked on {check.images} random images: {done.metadata['output']} differ by at most {check.difference:.1e} "
        f"({check.relative:.1e} of the largest){same}"
    )
