"""Fields of a model, as they are written on the command line: pool=mean, image_size=192x384, norm_eps=1e-5."""

import json
import re
from collections.abc import Sequence
from typing import Any

import typer


def read_known(fields: Sequence[str] | None) -> dict[str, Any]:
    """Read name=value; a value is a number, a size (192x384), true, false, none, or a word."""
    found = {}
    for field in fields or ():
        name, equals, value = field.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(f"{field!r} is no field with a value; write pool=mean", param_hint="--known")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if size := re.fullmatch(r"(\d{1,7})[x×](\d{1,7})", text):
        return int(size[1]), int(size[2])
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float) else text
