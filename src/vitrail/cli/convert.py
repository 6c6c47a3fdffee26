"""`vitrail convert`: convert a checkpoint to another library's format."""

from pathlib import Path
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo
from vitrail.cli.overrides import Overrides, read_overrides


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="Folder or file to write.")],
    to: Annotated[
        str,
        typer.Option(
            help="Format: bundle, google, timm, torchvision, transformers, "
            "lucidrains, dinov2, dinov2-transformers, timm-rope, or own (your tensor names; needs --keys)."
        ),
    ] = "bundle",
    override: Overrides = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Key table (TOML) of a custom ViT. It describes the source, or with --to own the target."),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Replace the head by a new one with this many classes.")] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Change the image size: 384, or 192x384 (height first).")
    ] = None,
    patch_size: Annotated[str | None, typer.Option(help="Change the patch size: 8, or 8x16 (height first).")] = None,
    channels: Annotated[int | None, typer.Option(help="Change the number of input channels.")] = None,
    position: Annotated[
        str, typer.Option(help="Resampling of position embeddings: google, timm, torchvision, transformers or dinov2.")
    ] = "timm",
    dtype: Annotated[
        str, typer.Option(help="dtype to write: float32, bf16, fp16, float64, or keep (that of the source).")
    ] = "keep",
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Allow a target format that changes the outputs slightly.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing target.")] = False,
) -> None:
    """Convert a checkpoint to another format, and verify that the logits stay the same."""
    done = vitrail.convert(
        source,
        target,
        to=to,  # type: ignore[arg-type]  # checked there
        overrides=read_overrides(override),
        keys=keys,
        dtype=dtype,  # type: ignore[arg-type]  # checked there
        classes=classes,
        image_size=_size(image_size, "--image-size"),
        patch_size=_size(patch_size, "--patch-size"),
        channels=channels,
        position_method=position,  # type: ignore[arg-type]  # checked there
        approximate=approximate,
        overwrite=overwrite,
    )
    echo(f"{source}: {done.coverage}")
    for note in [*done.source_notes, *done.notes]:
        echo(f"note: {note}")
    for difference in done.differences:
        echo(f"approximated: {difference}")
    echo(
        f"{done.target}: {done.family}, {done.tensors} tensors, {done.parameters / 1e6:.2f} M parameters; "
        f"opened again, its logits differ by at most {done.change:.1e} of the largest one"
    )


def _size(text: str | None, option: str) -> int | tuple[int, int] | None:
    """Parse 384 or 192x384."""
    if text is None:
        return None
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isdecimal() and len(side) < 8 for side in sides):
        raise typer.BadParameter(f"{text!r} is not a size; write 384, or 192x384 (height first)", param_hint=option)
    numbers = [int(side) for side in sides]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
