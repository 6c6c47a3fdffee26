"""The list of commands. Nothing here imports torch, so that `--help` answers at once."""

from typing import Annotated

import typer

from vitrail._version import __version__
from vitrail.cli.check import check
from vitrail.cli.convert import convert
from vitrail.cli.inspect import inspect
from vitrail.cli.models import models

app = typer.Typer(
    name="vitrail",
    help="Vision Transformers: check data; inspect and convert checkpoints of every library; build the named models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


for command in (check, inspect, convert, models):
    app.command()(command)
