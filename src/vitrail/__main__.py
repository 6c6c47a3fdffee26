"""The command `vitrail`, also as `python -m vitrail`."""

import os
import sys


def main() -> None:
    """Run the command line. A user error prints one sentence on stderr and exits with code 2."""
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's exit code for Ctrl-C


def _run() -> int:
    import typer

    from vitrail.cli.app import app
    from vitrail.errors import VitrailError
    from vitrail.text import printable

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer's error for a wrong option; not public
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
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
    except OSError as error:  # a full disk, a closed terminal
        print(printable(f"vitrail: {error.strerror or error}"), file=sys.stderr)
    else:
        return code if isinstance(code, int) else 0
    return 2


def _recipe_hint(error: Exception) -> str:
    """Suggest `--set` for a recipe field that was passed as an option of `train`."""
    option = getattr(error, "option_name", None)
    if not isinstance(option, str) or sys.argv[1:2] != ["train"]:
        return ""
    from vitrail.training.recipe import full_name

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
