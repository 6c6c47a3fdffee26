"""`vitrail export`: export a model for another runtime."""

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.overrides import Keys, Overrides, open_model
from vitrail.cli.terminal import echo


def export(
    bundle: Annotated[str, typer.Argument(help="A folder, a weight file of any family, or hf:org/name.")],
    output: Annotated[Path, typer.Argument(help="The file to write: .onnx, .pt2 (torch) or .xml (openvino).")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="onnx (.onnx, for ONNX Runtime), torch (.pt2, a torch.export archive) or openvino (.xml, .bin).",
        ),
    ] = "onnx",
    preprocess: Annotated[
        bool,
        typer.Option("--preprocess", help="Include normalisation in the graph, which then takes uint8 pixels (0…255)."),
    ] = False,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="The graph takes (batch, height, width, channels).")
    ] = False,
    opset: Annotated[int | None, typer.Option(help="The ONNX opset version.")] = None,
    override: Overrides = None,
    keys: Keys = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
) -> None:
    """Export a model as a graph for another runtime, open the file again, and compare the outputs."""
    from vitrail.exporting import check_request
    from vitrail.exporting import export as run

    check_request(output, to, opset, overwrite=overwrite)  # before the model is opened
    done = run(
        open_model(bundle, override, keys),
        output,
        to=to,  # type: ignore[arg-type]
        preprocess=preprocess,
        channels_last=channels_last,
        opset=opset,
        overwrite=overwrite,
    )
    inputs = done.metadata["input"]
    shape = " × ".join(map(str, inputs["shape"]))
    for file in done.files:
        echo(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
    echo(f"input {inputs['name']}: {shape}, {inputs['type']}; output: {done.metadata['output']}")
    check = done.check
    echo(
        f"checked on {check.images} random images: {done.metadata['output']} differ by at most {check.logits:.1e} "
        f"({check.relative:.1e} of the largest), probabilities by {check.probabilities:.1e}; the top-1 class is the "
        f"same for {check.same_top1} of {check.images}"
    )
    if not check.varied:
        echo("note: the model gives the same output for every image, so the check proves little; is its head trained?")
