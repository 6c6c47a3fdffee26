"""`vitrail models`: list the named models, or describe one."""

import json
import math
from typing import Annotated

import typer

import vitrail
from vitrail.cli.output import echo, print_table, progress


def models(
    name: Annotated[str | None, typer.Argument(help="Model to describe, such as B/16 or vit_base_patch16_384.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the named models, or show the shape of every tensor in one of them."""
    if name is None:
        _list_all(as_json)
    else:
        _show_one(name, as_json)


def _list_all(as_json: bool) -> None:
    with progress() as bar:
        listed = vitrail.list_models(on_progress=bar)
    if as_json:
        rows = [{"name": model.name, "paper": model.paper, **model.cost._asdict()} for model in listed]
        echo(json.dumps(rows, indent=2))
        return
    print_table(
        ("name", "paper", "parameters", "tokens", "GFLOPs"),
        [(m.name, m.paper, f"{m.cost.parameters:,}", str(m.cost.tokens), f"{m.cost.flops / 1e9:,.2f}") for m in listed],
        numbers=("parameters", "tokens", "GFLOPs"),
    )
    echo(
        "\nFor 1,000 classes, at the image size of the name. GFLOPs are for one image; a multiply-add\n"
        "counts as two, so tables that count it as one show half.\n"
        "Other image sizes: vit_base_patch16_384. One model in detail: vitrail models B/16."
    )


def _show_one(name: str, as_json: bool) -> None:
    description = vitrail.describe(name)
    spent = description.cost
    if as_json:
        report = {
            "name": name,
            **spent._asdict(),
            "stages": [stage._asdict() for stage in description.stages],
            "config": json.loads(description.config.to_json()),
        }
        echo(json.dumps(report, indent=2))
        return
    intro = "The shapes of a synthetic image on its way through the model, with random weights:"
    if not description.computed:
        intro = "The shapes of an image on its way through the model (inferred, since the model is large):"
    echo(
        f"{name}: {spent.parameters:,} parameters, {spent.tokens} tokens, {spent.flops / 1e9:,.2f} GFLOPs per image.\n"
        f"{intro}\n"
    )
    print_table(
        ("stage", "shape", "numbers", "what it is"),
        [(s.name, " × ".join(map(str, s.shape)), f"{math.prod(s.shape):,}", s.meaning) for s in description.stages],
        numbers=("numbers",),
    )
