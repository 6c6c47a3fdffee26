"""The command `vitrail`, also as `python -m vitrail`."""

import os
import sys


def main() -> None:
    """Run the command line. What a user caused is one sentence on stderr and exit code 2."""
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)  # as the shell does for a program that Ctrl-C ended


def _run() -> int:
    import typer

    from vitrail.cli.app import app
    from vitrail.errors import VitrailError
    from vitrail.terminal import printable

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # what typer raises for a wrong option; not public
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it has printed the help already
            return 2
        said = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        print(printable(f"vitrail: {said}{_recipe_hint(error) or _help_hint(error)}"), file=sys.stderr)
    except typer.Abort:
        return 130
    except VitrailError as error:
        rank = os.environ.get("RANK", "0")  # among the processes that torchrun started
        if rank == "0" or not error.everywhere:
            print(printable(f"vitrail: {'' if rank == '0' else f'process {rank}: '}{error}"), file=sys.stderr)
    except OSError as error:  # a full disk, a closed terminal
        print(printable(f"vitrail: {error.strerror or error}"), file=sys.stderr)
    else:
        return code if isinstance(code, int) else 0
    return 2


def _recipe_hint(error: Exception) -> str:
    """Say how an option that is no option of `train` is set in the recipe, where the recipe has it."""
    option = getattr(error, "option_name", None)
    if not isinstance(option, str) or sys.argv[1:2] != ["train"]:
        return ""
    from vitrail.training.recipe import full_name

    name, _, value = option.lstrip("-").partition("=")
    full = full_name(name.replace("-", "_"))
    if full is None:
        return ""
    words = sys.argv[1:]
    given = next((word for word in words if word.startswith(f"{option.partition('=')[0]}=")), "").partition("=")[2]
    place = words.index(option) + 1 if option in words else len(words)
    after = words[place] if place < len(words) and not words[place].startswith("--") else "…"
    return f". It is set in the recipe: --set {full}={value or given or after}"


def _help_hint(error: Exception) -> str:
    """Name the help of the command that was called."""
    context = getattr(error, "ctx", None)
    return f" (see {getattr(context, 'command_path', 'vitrail')} --help)"


if __name__ == "__main__":
    main()
