"""Every error that a user can cause.

    VitrailError
    ├── ConfigError       a setting is impossible, or contradicts another
    ├── InputError        a tensor, image or argument does not fit the model
    ├── DataError         a dataset, or a file in it, cannot be used
    │   └── StorageError  remote storage does not respond, refuses access, or has changed during a run
    ├── CheckpointError   a weight file cannot be opened, recognised or written
    └── Diverged          the loss or the outputs are not finite

Each message is one or two sentences: what was found, and what to do. The command line prints it and exits with
code 2; the server responds with a 4xx status. Neither shows a traceback. Any other exception is a bug in vitrail.
The classes do not derive from ValueError, because pydantic would catch them.
"""

import difflib
from collections.abc import Callable, Iterable
from inspect import Parameter, signature


class VitrailError(Exception):
    """Base of every error that a user can cause."""

    everywhere: bool = False
    """Whether every rank raises it, so that only rank 0 prints it."""


class ConfigError(VitrailError):
    """A setting is impossible, or contradicts another one."""


class InputError(VitrailError):
    """A tensor, an image or an argument does not fit the model or function."""


class DataError(VitrailError):
    """A dataset, or a file in it, cannot be used."""


class StorageError(DataError):
    """Remote storage does not respond, refuses access, or has changed during a run; no image is skipped for it."""


class CheckpointError(VitrailError):
    """A weight file cannot be opened, recognised or written."""


class Diverged(VitrailError):  # noqa: N818 - named for what happened to the run
    """The loss or the outputs are not finite."""


def suggest(word: object, valid: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the closest valid words, or "" if none is close.

    >>> suggest("widht", ["width", "depth"])
    "; did you mean 'width'?"
    """
    choices = list(valid)
    # Match case-insensitively, suggest the original spelling.
    near = difflib.get_close_matches(str(word).lower(), {choice.lower() for choice in choices}, n=3, cutoff=0.6)
    matches = [choice for match in near for choice in choices if choice.lower() == match]
    return "; did you mean " + " or ".join(map(repr, matches)) + "?" if matches else ""


def unknown_argument(function: Callable[..., object], name: str, hint: str = "") -> ConfigError:
    """Return the error for an unknown argument, with `hint` or the closest valid argument.

    Functions that people may call with another library's argument names take `**unknown: Never` and raise this, so
    that the message can name our argument. Type checkers still reject unknown arguments.
    """
    kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    valid = [parameter.name for parameter in signature(function).parameters.values() if parameter.kind not in kinds]
    return ConfigError(f"{function.__name__} has no argument {name!r}{f'; {hint}' if hint else suggest(name, valid)}")
