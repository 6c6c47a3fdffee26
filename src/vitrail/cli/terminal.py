"""Terminal output. All commands print through `echo`, which escapes control characters in untrusted text."""

import typer

from vitrail.terminal import printable


def echo(text: str = "", *, err: bool = False, bold: bool = False) -> None:
    """Print text on stdout or stderr, with control characters escaped."""
    safe = printable(text)
    typer.echo(typer.style(safe, bold=True) if bold else safe, err=err)
