"""Overrides: fields that the caller sets because the file does not record them, validated before anything is opened."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vitrail.checkpoints.family import Hints
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest
from vitrail.models.config import ViTConfig
from vitrail.schema import Frozen

IMAGES = "preprocess."
"""The prefix of preprocessing fields."""


def checked_overrides(fields: Mapping[str, Any]) -> Hints:
    """Validate the fields against `ViTConfig` and `Preprocess`: a size of 8 becomes (8, 8).

    An unknown field or an invalid value is an error.
    """
    return {name: _checked(name, value) for name, value in fields.items()}


def of_model(fields: Mapping[str, Any]) -> Hints:
    """Return the fields of the model."""
    return {name: value for name, value in fields.items() if not name.startswith(IMAGES)}


def of_images(fields: Mapping[str, Any]) -> Hints:
    """Return the fields of the preprocessing, without their prefix."""
    return {name.removeprefix(IMAGES): value for name, value in fields.items() if name.startswith(IMAGES)}


def spread(fields: Hints, channels: int) -> Hints:
    """Repeat a single mean or std for every channel."""
    return {
        name: value[:1] * channels if name in ("mean", "std") and len(set(value)) == 1 else value
        for name, value in fields.items()
    }


def _checked(name: str, value: Any) -> Any:
    kind: type[Frozen] = Preprocess if name.startswith(IMAGES) else ViTConfig
    field = name.removeprefix(IMAGES)
    if field not in kind.model_fields:
        names = [*ViTConfig.model_fields, *(IMAGES + valid for valid in Preprocess.model_fields)]
        raise ConfigError(f"{kind.__name__} has no option {field!r}{suggest(name, names)}")
    info = kind.model_fields[field]
    adapter: TypeAdapter[Any] = TypeAdapter(
        Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation,  # type: ignore[arg-type]
        config=ConfigDict(strict=True, allow_inf_nan=False),
    )
    if field in ("mean", "std") and isinstance(value, int | float):
        value = (float(value),) * 3  # one number for all channels
    try:
        if isinstance(value, str) and value == "none":  # the literal "none" in some fields, None in others
            with suppress(ValidationError):
                return adapter.validate_python(None)
        return adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{name} is {value!r}: {message[:1].lower()}{message[1:]}") from None
