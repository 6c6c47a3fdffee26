"""`vitrail models`: list the named models, or describe one."""

import json
import math
from typing import Annotated

import typer

from vitrail.cli.output import echo, print_table, with_progress


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
    from vitrail.models.stages import cost
    from vitrail.models.variants import DEFAULT_IMAGE_SIZE, VARIANTS, variant_config

    costs = [(v, cost(variant_config(v.paper))) for v in with_progress(VARIANTS, "counting")]
    if as_json:
        rows = [{"name": f"{v.name}_{DEFAULT_IMAGE_SIZE}", "paper": v.paper, **spent._asdict()} for v, spent in costs]
        echo(json.dumps(rows, indent=2))
        return
    print_table(
        ("name", "paper", "parameters", "tokens", "GFLOPs"),
        [
            (f"{v.name}_{DEFAULT_IMAGE_SIZE}", v.paper, f"{c.parameters:,}", str(c.tokens), f"{c.flops / 1e9:,.2f}")
            for v, c in costs
        ],
        numbers=("parameters", "tokens", "GFLOPs"),
    )
    echo(
        f"\nAt {DEFAULT_IMAGE_SIZE}×{DEFAULT_IMAGE_SIZE} pixels and 1,000 classes. GFLOPs are for one image; a "
        "multiply-add\ncounts as two, so tables that count it as one show half.\n"
        "Other image sizes: vit_base_patch16_384. One model in detail: vitrail models B/16."
    )


def _show_one(name: str, as_json: bool) -> None:
    from vitrail.api import describe

    description = describe(name)
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
