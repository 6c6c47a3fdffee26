"""`vitrail inspect`: describe a checkpoint."""

import json
import math
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo, print_table
from vitrail.cli.overrides import Keys, Overrides, read_overrides


def inspect(
    source: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    override: Overrides = None,
    keys: Keys = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Describe a checkpoint: family, architecture, size, preprocessing, classes, tensors, anything unusual."""
    inspection = vitrail.inspect(source, overrides=read_overrides(override), keys=keys)
    bundle, config = inspection.bundle, inspection.bundle.model.config
    if as_json:
        report = {
            "variant": inspection.variant,
            "coverage": bundle.coverage,
            "provenance": bundle.provenance,
            "config": json.loads(config.to_json()),
            "preprocess": json.loads(bundle.preprocess.to_json()),
            "classes": bundle.classes,
            "assumptions": [assumption._asdict() for assumption in bundle.assumptions],
            "oddities": inspection.oddities,
            # JSON cannot represent NaN or infinity.
            "tensors": [
                row._replace(mean=_finite(row.mean), std=_finite(row.std))._asdict() for row in inspection.tensors
            ],
        }
        echo(json.dumps(report, indent=2, allow_nan=False))
        return
    parameters = sum(p.numel() for p in bundle.model.parameters())
    pre, names = bundle.preprocess, bundle.classes
    encoder = f"{config.norm_order}-norm, {config.activation}, LayerNorm eps {config.norm_eps:g}"
    rows = [
        ("from", ", ".join(f"{value}" for key, value in bundle.provenance.items() if key in ("family", "source"))),
        *([("teacher", bundle.taught_by)] if bundle.taught_by else []),
        ("variant", inspection.variant or "none of the named sizes"),
        ("size", f"{parameters:,} parameters: {config.encoder_text}"),
        ("images", f"{_by(config.image_size)}, {config.channels} channels, patches of {_by(config.patch_size)}"),
        ("stem and position", f"{config.stem}, {config.position}"),
        *([("encoder", encoder)] if config.depth else []),
        (
            "output",
            f"pool {config.pool}, {config.classes} classes" if config.classes else f"pool {config.pool}, no head",
        ),
        ("classes", "unknown" if names is None else ", ".join(names[:5]) + (", …" if len(names) > 5 else "")),
        (
            "preprocessing",
            f"{pre.resize} to {_by(pre.resize_to or pre.size)}, crop to {_by(pre.size)}, {pre.interpolation}, "
            f"mean {_numbers(pre.mean)}, std {_numbers(pre.std)}",
        ),
    ]
    print_table(("field", "value"), [*rows, ("loaded", bundle.coverage)])
    for oddity in inspection.oddities:
        echo(f"note: {oddity}")
    if tensors:
        echo("")
        print_table(
            ("tensor", "shape", "dtype", "mean", "std"),
            [
                (r.name, "×".join(map(str, r.shape)), r.dtype, f"{r.mean or 0:.4g}", f"{r.std or 0:.4g}")
                for r in inspection.tensors
            ],
            numbers=("mean", "std"),
        )


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"


def _numbers(numbers: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{n:.3g}" for n in numbers) + ")"
