"""`--override`, `--keys` and `--calibrate`, options of several commands that open a model."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="NAME=VALUE",
        help="Set a field that the checkpoint does not define, such as heads=6, pool=mean or "
        "preprocess.mean=0.5. Can be repeated.",
    ),
]
Keys = Annotated[Path | None, typer.Option("--keys", help="Key table (TOML) of a custom ViT.")]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="IMAGES",
        help="Images to calibrate int8 on: a folder, a manifest, tar shards or digits. By default the images that the "
        "model was trained with, if it is in the folder of its run.",
    ),
]


def read_overrides(fields: Sequence[str] | None) -> dict[str, Any]:
    """Parse name=value; a value is a number, a list (0.5,0.5,0.5), a size (192x384), true, false, none, or a word."""
    overrides = {}
    for field in fields or ():
        name, equals, value = field.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(
                f"{field!r} is not NAME=VALUE; write, for example, pool=mean", param_hint="--override"
            )
        overrides[name] = _value(value)
    return overrides


def _value(text: str) -> Any:
    if size := re.fullmatch(r"(\d{1,7})[x×](\d{1,7})", text):
        return int(size[1]), int(size[2])
    if text.lower() in ("none", "true", "false"):
        return {"none": "none", "true": True, "false": False}[text.lower()]
    if re.fullmatch(r"[-\d.eE]+(,[-\d.eE]+)*", text):
        text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)  # JSON has no .5
        text = f"[{text}]" if "," in text else text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, too many digits, or nested too deeply
        return text
    return value if isinstance(value, int | float | list) else text
