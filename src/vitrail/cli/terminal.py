"""What a command says on the terminal. Nothing else in the commands prints, so that no text from a file commands it."""

import typer

from vitrail.terminal import printable


def echo(text: str = "", *, err: bool = False, bold: bool = False) -> None:
    """Print a text on stdout or stderr, with whatever would command the terminal written out."""
    safe = printable(text)
    typer.echo(typer.style(safe, bold=True) if bold else safe, err=err)
