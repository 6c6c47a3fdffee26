"""`vitrail bench`: how fast a model answers on this machine."""

import json
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from vitrail.cli.overrides import Keys, Overrides, open_model
from vitrail.cli.tables import print_table, progress
from vitrail.cli.terminal import echo

if TYPE_CHECKING:
    from vitrail.acceleration.bench import Bench, Cell

Word = TypeVar("Word")


def bench(
    bundle: Annotated[str, typer.Argument(help="A folder, a weight file of any family, or hf:org/name.")],
    engine: Annotated[
        list[str] | None, typer.Option(help="torch, onnx or openvino; may be repeated. As a rule all.")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="float32, bf16 or fp16; may be repeated. As a rule all that make sense.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Images at a time; may be repeated. As a rule 1, 4, 16 and 64.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="Time for each line of the table.")] = 2.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    override: Overrides = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure images per second and latency of every engine, precision and batch size on this machine."""
    from vitrail.acceleration.bench import BATCHES, run_benchmark
    from vitrail.acceleration.engine import Kind
    from vitrail.runtime import Precision, choose_device

    kinds = _known(engine, get_args(Kind), "engine")
    precisions = _known(precision, get_args(Precision), "precision") if precision else None
    place = choose_device(device)
    opened = open_model(bundle, override, keys)
    opened.announce()
    with progress("measuring") as on_measured:
        found = run_benchmark(
            opened.model,
            opened.preprocess,
            device=place,
            engines=kinds,
            precisions=precisions,
            batches=batch or BATCHES,
            seconds=seconds,
            on_progress=on_measured,
        )
    if as_json:
        echo(json.dumps({**_machine(place), "seconds": seconds, **found.as_dict()}, indent=2))
    else:
        _print_bench(found, _machine(place))
    if not found.cells:  # why is said above
        raise typer.Exit(2)


def _known(words: list[str] | None, valid: tuple[Word, ...], what: str) -> list[Word]:
    """Return the words that were given, or all, and refuse one that means nothing."""
    from vitrail.errors import ConfigError, suggest

    for word in words or ():
        if word not in valid:
            names = [str(name) for name in valid]
            raise ConfigError(f"no {what} is called {word!r}; there are {', '.join(names)}{suggest(word, names)}")
    return [word for word in valid if not words or word in words]


def _machine(device: Any) -> dict[str, Any]:
    """Say where it was measured."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _print_bench(found: "Bench", machine: dict[str, Any]) -> None:
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    echo(f"{machine['device']}, {threads}, torch {machine['torch']}")
    if found.cells:
        echo("")
        plain = {cell.batch: cell for cell in found.cells if (cell.engine, cell.precision) == ("torch", "float32")}
        print_table(
            ("batch", "engine", "precision", "images/s", "median, ms", "p95, ms", "speed", "probabilities within"),
            [_row(cell, plain.get(cell.batch)) for cell in sorted(found.cells, key=lambda cell: cell.batch)],
            numbers=("batch", "images/s", "median, ms", "p95, ms", "speed", "probabilities within"),
        )
        best = max(found.cells, key=lambda cell: cell.images_per_second)
        quick = min(found.cells, key=lambda cell: (cell.batch, cell.median))
        echo(
            f"\nMost images/s: {best.engine} in {best.precision}, {best.batch} at a time. Quickest with a batch of "
            f"{quick.batch}: {quick.engine} in {quick.precision}. Speed and probabilities are beside torch in float32."
        )
    if found.left_out:
        echo("\nNot measured", bold=True)
    for left in found.left_out:
        where = [left.engine, left.precision, None if left.batch is None else f"batch {left.batch}"]
        echo(f"{' '.join(word for word in where if word)}: {left.reason}")


def _row(cell: "Cell", plain: "Cell | None") -> tuple[str, ...]:
    rate = f"{cell.images_per_second:,.0f}" if cell.images_per_second >= 100 else f"{cell.images_per_second:.3g}"
    return (
        str(cell.batch),
        cell.engine,
        cell.precision,
        rate,
        f"{cell.median:.2f}",
        f"{cell.p95:.2f}",
        "–" if plain is None else f"{cell.images_per_second / plain.images_per_second:.2f}×",
        f"{cell.change:.1e}",
    )
