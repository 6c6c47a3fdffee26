"""`vitrail convert`: convert a checkpoint to another library's format."""

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.overrides import Overrides, read_overrides
from vitrail.cli.terminal import echo


def convert(
    source: Annotated[str, typer.Argument(help="A folder, a weight file of any family, or hf:org/name.")],
    target: Annotated[Path, typer.Argument(help="The folder or file to write.")],
    to: Annotated[
        str,
        typer.Option(
            help="bundle, google, timm, torchvision, transformers, "
            "lucidrains, dinov2, dinov2-transformers, timm-rope, or own (by --keys)."
        ),
    ] = "bundle",
    override: Overrides = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="A key table (TOML) for a custom ViT: for the source, or with --to own for the target."),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Replace the head with a new one for this many classes.")] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Resize to another image size: 384, or 192x384 (height first).")
    ] = None,
    patch_size: Annotated[str | None, typer.Option(help="Resize to another patch size: 8, or 8x16.")] = None,
    channels: Annotated[int | None, typer.Option(help="Change the number of input channels.")] = None,
    position: Annotated[
        str, typer.Option(help="How to resample position embeddings: google, timm, torchvision, transformers, dinov2.")
    ] = "timm",
    dtype: Annotated[
        str, typer.Option(help="The dtype to write: float32, bf16, fp16, float64, or keep (the source's).")
    ] = "keep",
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Allow a target whose outputs differ slightly.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
) -> None:
    """Convert a checkpoint to another format, open the result again, and compare the logits."""
    from vitrail.checkpoints.adapt import adapt
    from vitrail.checkpoints.convert import check_format
    from vitrail.checkpoints.convert import convert as run
    from vitrail.checkpoints.load import open_checkpoint

    own, size = to == "own", _size(image_size, "--image-size")
    check_format(to, keys if own else None)  # before the model is opened
    bundle = open_checkpoint(
        source,
        overrides=read_overrides(override),
        keys=None if own else keys,
        dtype=dtype,  # type: ignore[arg-type]
        target_size=size,
    )
    adapt(
        bundle,
        classes=classes,
        image_size=size,
        patch_size=_size(patch_size, "--patch-size"),
        channels=channels,
        position_method=position,  # type: ignore[arg-type]
    )
    done = run(
        bundle,
        target,
        to=to,  # type: ignore[arg-type]
        keys=keys if own else None,
        approximate=approximate,
        overwrite=overwrite,
    )
    echo(f"{source}: {bundle.coverage}")
    for note in [*bundle.provenance.get("notes", []), *done.notes]:
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
