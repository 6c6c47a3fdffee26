"""`vitrail bench`: throughput and latency of a model on this machine."""

import json
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from vitrail.cli.output import echo, print_table, progress
from vitrail.cli.overrides import Keys, Overrides, open_model

if TYPE_CHECKING:
    from vitrail.acceleration.bench import Bench, Cell

Word = TypeVar("Word")


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
            help="Precision: float32, bf16 or fp16. Can be repeated; by default all that the engine supports."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size. Can be repeated; by default 1, 4, 16 and 64.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to measure per row of the table.")] = 2.0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the throughput and latency of a model on this machine, per engine, precision and batch size."""
    from vitrail.acceleration.bench import BATCHES, run_benchmark
    from vitrail.acceleration.engine import Kind
    from vitrail.runtime import Precision, choose_device

    kinds = _selected(engine, get_args(Kind), "engine")
    precisions = _selected(precision, get_args(Precision), "precision") if precision else None
    target = choose_device(device)
    opened = open_model(bundle, override, keys)
    opened.announce()
    with progress("measuring") as on_measured:
        result = run_benchmark(
            opened.model,
            opened.preprocess,
            device=target,
            engines=kinds,
            precisions=precisions,
            batches=batch or BATCHES,
            seconds=seconds,
            on_progress=on_measured,
        )
    if as_json:
        echo(json.dumps({**_machine(target), "seconds": seconds, **result.as_dict()}, indent=2))
    else:
        _print_bench(result, _machine(target))
    if not result.cells:  # the reasons are printed above
        raise typer.Exit(2)


def _selected(words: list[str] | None, valid: tuple[Word, ...], what: str) -> list[Word]:
    """Return the requested values, or all of them; raise on an unknown one."""
    from vitrail.errors import ConfigError, suggest

    for word in words or ():
        if word not in valid:
            names = [str(name) for name in valid]
            raise ConfigError(f"no {what} is called {word!r}; there are {', '.join(names)}{suggest(word, names)}")
    return [word for word in valid if not words or word in words]


def _machine(device: Any) -> dict[str, Any]:
    """Describe the device and the versions."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _print_bench(result: "Bench", machine: dict[str, Any]) -> None:
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    echo(f"{machine['device']}, {threads}, torch {machine['torch']}")
    if result.cells:
        echo("")
        plain = {cell.batch: cell for cell in result.cells if (cell.engine, cell.precision) == ("torch", "float32")}
        print_table(
            ("batch", "engine", "precision", "images/s", "median, ms", "p95, ms", "speed", "probabilities within"),
            [_row(cell, plain.get(cell.batch)) for cell in sorted(result.cells, key=lambda cell: cell.batch)],
            numbers=("batch", "images/s", "median, ms", "p95, ms", "speed", "probabilities within"),
        )
        best = max(result.cells, key=lambda cell: cell.images_per_second)
        quick = min(result.cells, key=lambda cell: (cell.batch, cell.median))
        echo(
            f"\nMost images/s: {best.engine} in {best.precision}, batch {best.batch}. Lowest latency at batch "
            f"{quick.batch}: {quick.engine} in {quick.precision}. Speed and probabilities: relative to torch float32."
        )
    if result.skipped:
        echo("\nNot measured", bold=True)
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
