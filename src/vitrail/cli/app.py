"""The `vitrail` command and its subcommands. No module here imports torch at import time, so `--help` is fast."""

from typing import Annotated

import typer

from vitrail._version import __version__
from vitrail.cli.bench import bench
from vitrail.cli.check import check
from vitrail.cli.convert import convert
from vitrail.cli.embed import embed
from vitrail.cli.eval import eval
from vitrail.cli.explain import explain
from vitrail.cli.export import export
from vitrail.cli.figures import figures
from vitrail.cli.inspect import inspect
from vitrail.cli.models import models
from vitrail.cli.output import echo
from vitrail.cli.predict import predict
from vitrail.cli.pretrain import pretrain
from vitrail.cli.probe import probe
from vitrail.cli.report import report
from vitrail.cli.serve import serve
from vitrail.cli.train import train

app = typer.Typer(
    name="vitrail",
    help="Train, evaluate, explain and deploy Vision Transformers; check data; inspect, convert and export "
    "checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        echo(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


for command in (
    train,
    pretrain,
    report,
    eval,
    predict,
    embed,
    probe,
    explain,
    figures,
    serve,
    export,
    bench,
    check,
    inspect,
    convert,
    models,
):
    app.command()(command)
