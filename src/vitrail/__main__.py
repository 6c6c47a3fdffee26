"""The command `vitrail`, also as `python -m vitrail`."""

import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO


def main() -> None:
    """Run the command line. A user error prints one sentence on stderr and exits with code 2."""
    stdout = _identity(sys.stdout)
    try:
        code = _run()
        _settle(sys.stdout)
        sys.exit(code)
    except BrokenPipeError:
        sys.exit(_after_closed_pipe(stdout))
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's exit code for Ctrl-C


def _run() -> int:
    import typer

    from vitrail.cli.app import app
    from vitrail.errors import VitrailError
    from vitrail.io import full_disk_hint
    from vitrail.text import printable

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer's error for a wrong option; not public
    try:
        code = _run_app(app)
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is already printed
            return 2
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        print(printable(f"vitrail: {message}{_recipe_hint(error) or _help_hint(error)}"), file=sys.stderr)
    except typer.Abort:
        return 130
    except VitrailError as error:
        rank = os.environ.get("RANK", "0")  # set by torchrun
        if rank == "0" or not error.everywhere:
            print(printable(f"vitrail: {'' if rank == '0' else f'rank {rank}: '}{error}"), file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a closed terminal
        print(printable(f"vitrail: {error.strerror or error}{full_disk_hint(error)}"), file=sys.stderr)
    else:
        return code if isinstance(code, int) else 0
    return 2


def _run_app(app: Callable[..., object]) -> object:
    """Run the command and flush its output. A closed pipe is a `BrokenPipeError`; typer and rich would exit with 1."""
    try:
        code = app(standalone_mode=False)
    except SystemExit as error:
        raise (error.__context__ if isinstance(error.__context__, BrokenPipeError) else error) from None
    from vitrail.io import writing_to_stdout

    with writing_to_stdout():
        sys.stdout.flush()
    return code


def _after_closed_pipe(stdout: tuple[int, int] | None) -> int:
    """Return the exit code if a pipe is closed: nobody wants more output, or reads messages, or it is another pipe."""
    if _reader_gone(sys.stderr):
        return 1
    replaced = _identity(sys.stdout) != stdout  # by rich, which discards all further output
    if replaced or _reader_gone(sys.stdout):
        _settle(sys.stdout)
        return 0
    print(f"vitrail: {os.strerror(errno.EPIPE)}", file=sys.stderr)
    return 2


def _identity(stream: TextIO) -> tuple[int, int] | None:
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # not a file
        return None
    return status.st_dev, status.st_ino


def _reader_gone(stream: TextIO) -> bool:
    """Return whether a stream is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))  # an error condition is always reported
    except (AttributeError, OSError, ValueError):  # no poll on this system, or not a file
        return False


def _settle(stream: TextIO) -> None:
    """Discard what cannot be written, or Python would try again when it exits, and complain."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _recipe_hint(error: Exception) -> str:
    """Suggest `--set` for a recipe field that was passed as an option of `train`."""
    option = getattr(error, "option_name", None)
    if not isinstance(option, str) or sys.argv[1:2] != ["train"]:
        return ""
    from vitrail.training.recipe_files import full_name

    name, _, value = option.lstrip("-").partition("=")
    full = full_name(name.replace("-", "_"))
    if full is None:
        return ""
    words = sys.argv[1:]
    inline = next((word for word in words if word.startswith(f"{option.partition('=')[0]}=")), "").partition("=")[2]
    place = words.index(option) + 1 if option in words else len(words)
    after = words[place] if place < len(words) and not words[place].startswith("--") else "…"
    return f". Set it in the recipe: --set {full}={value or inline or after}"


def _help_hint(error: Exception) -> str:
    """Point to the help of the command."""
    context = getattr(error, "ctx", None)
    return f" (see {getattr(context, 'command_path', 'vitrail')} --help)"


if __name__ == "__main__":
    main()
