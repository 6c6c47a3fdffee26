"""`vitrail bench`: throughput and latency of a model on this machine."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

import vitrail
from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Calibrate, Keys, Overrides, read_overrides

if TYPE_CHECKING:
    from vitrail.acceleration.bench import Cell
    from vitrail.inference.benchmark import Benchmark


def bench(
    bundle: Annotated[
        str,
        typer.Argument(
            help="The model: a bundle, a folder or weight file of another library, hf:org/name or timm:name.tag."
        ),
    ],
    engine: Annotated[
        list[str] | None, typer.Option(help="Engine: torch, onnx or openvino. Can be repeated; by default all.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision: float32, bf16, fp16, or int8 in OpenVINO (see --calibrate). Can be repeated; by default "
            "all that the engine supports, without int8."
        ),
    ] = None,
    calibrate: Calibrate = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size. Can be repeated; by default 1, 4, 16 and 64.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to measure per row of the table.")] = 2.0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    images: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGES",
            help="Also measure how fast these are decoded: a folder, a manifest, tar shards or digits.",
        ),
    ] = None,
    decode: Annotated[
        str, typer.Option(help="Where JPEGs of --images are decoded: cpu, gpu (nvImageCodec), or auto: both.")
    ] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the throughput and latency of a model on this machine, per engine, precision and batch size."""
    with progress() as bar:
        result = vitrail.bench(
            bundle,
            engines=engine,
            precisions=precision,
            batches=batch,
            seconds=seconds,
            device=device,
            images=images,
            decode=decode,
            calibrate=calibrate,
            overrides=read_overrides(override),
            keys=keys,
            on_progress=bar,
            on_plan=bar.say,
        )
    if as_json:
        echo(json.dumps(result.as_dict(), indent=2))
    else:
        _print_bench(result)
    if not result.cells:  # the reasons are printed above
        raise typer.Exit(2)


def _print_bench(result: "Benchmark") -> None:
    threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
    echo(f"{result.device}, {threads}, torch {result.torch}")
    if result.cells:
        echo("")
        within = f"{result.compared} within"
        plain = {cell.batch: cell for cell in result.cells if (cell.engine, cell.precision) == ("torch", "float32")}
        print_table(
            ("batch", "engine", "precision", "images/s", "median, ms", "p95, ms", "speed", within),
            [_row(cell, plain.get(cell.batch)) for cell in sorted(result.cells, key=lambda cell: cell.batch)],
            numbers=("batch", "images/s", "median, ms", "p95, ms", "speed", within),
        )
        best = max(result.cells, key=lambda cell: cell.images_per_second)
        quick = min(result.cells, key=lambda cell: (cell.batch, cell.median))
        echo(
            f"\nMost images/s: {best.engine} in {best.precision}, batch {best.batch}. Lowest latency at batch "
            f"{quick.batch}: {quick.engine} in {quick.precision}. Speed and {result.compared}: relative to torch "
            "float32."
        )
    measured = [one for one in result.decoding if one.images_per_second is not None]
    if measured:
        speeds = ", ".join(f"{one.images_per_second:,.0f} on the {one.decode.upper()}" for one in measured)
        workers = f"{measured[0].workers} {'worker' if measured[0].workers == 1 else 'workers'}"
        echo(f"\nDecoding, with {workers}, in images/s: {speeds}. The slower of this and the model limits predict.")
    missing = [one for one in result.decoding if one.images_per_second is None]
    if result.skipped or missing:
        echo("\nNot measured", bold=True)
    for one in missing:
        echo(f"decoding on the {one.decode.upper()}: {one.reason}")
    for left in result.skipped:
        where = [left.engine, left.precision, None if left.batch is None else f"batch {left.batch}"]
        echo(f"{' '.join(word for word in where if word)}: {left.reason}")


def _row(cell: "Cell", plain: "Cell | None") -> tuple[str, ...]:
    speed = f"{cell.images_per_second:,.0f}" if cell.images_per_second >= 100 else f"{cell.images_per_second:.3g}"
    return (
        str(cell.batch),
        cell.engine,
        cell.precision,
        speed,
        f"{cell.median:.2f}",
        f"{cell.p95:.2f}",
        "–" if plain is None else f"{cell.images_per_second / plain.images_per_second:.2f}×",
        f"{cell.change:.1e}",
    )
