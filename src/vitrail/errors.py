"""Everything that can go wrong because of what a person gave us.

    VitrailError
    ├── ConfigError       a setting is impossible, or contradicts another
    ├── InputError        a tensor, image or argument does not fit the model
    ├── DataError         a data set, or a file in it, cannot be used
    ├── CheckpointError   a weight file cannot be opened, understood or written
    └── Diverged          training produced numbers that are not finite

Each message is one sentence or two: what was found, and what to do. The command line prints it and exits
with code 2, the server answers with a 4xx status; neither shows a traceback. An exception outside this tree
is a bug of ours. The classes do not derive from ValueError, because pydantic would catch them.
"""

import difflib
from collections.abc import Callable, Iterable
from inspect import Parameter, signature


class VitrailError(Exception):
    """Base of every error that a user can cause."""

    everywhere: bool = False
    """Whether all processes of a run raise it, so that one of them need say it."""


class ConfigError(VitrailError):
    """A setting is impossible, or contradicts another one."""


class InputError(VitrailError):
    """A tensor, an image or an argument does not fit what it was given to."""


class DataError(VitrailError):
    """A data set, or a file in it, cannot be used."""


class CheckpointError(VitrailError):
    """A weight file cannot be opened, understood or written."""


class Diverged(VitrailError):  # noqa: N818 - named for what happened to the run
    """Training produced numbers that are not finite."""


def suggest(word: object, valid: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the nearest valid words, or nothing where none is near.

    >>> suggest("widht", ["width", "depth"])
    "; did you mean 'width'?"
    """
    choices = list(valid)
    # Compared without case, answered in the right one.
    near = difflib.get_close_matches(str(word).lower(), {choice.lower() for choice in choices}, n=3, cutoff=0.6)
    found = [choice for match in near for choice in choices if choice.lower() == match]
    return "; did you mean " + " or ".join(map(repr, found)) + "?" if found else ""


def unknown_argument(function: Callable[..., object], name: str, hint: str = "") -> ConfigError:
    """Return the error for an argument that a function does not have, with `hint` or the nearest that it has.

    A function that people call by another library's names takes `**unknown: Never`, which type checkers refuse as they
    would without it, and raises this: Python's own TypeError could not say what the argument is called here.
    """
    kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    valid = [parameter.name for parameter in signature(function).parameters.values() if parameter.kind not in kinds]
    return ConfigError(f"{function.__name__} has no argument {name!r}{f'; {hint}' if hint else suggest(name, valid)}")
