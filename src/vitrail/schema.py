"""The base class of every config: frozen, strictly typed; an error for an unknown key suggests the closest one."""

import operator
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError
from pydantic import model_validator as _model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from vitrail.errors import ConfigError, suggest
from vitrail.text import short_repr

# True while a config is being validated: a nested config leaves its errors to the outer one, which knows the full
# path ("resnet.depths.0") and reports all errors at once.
_inside: ContextVar[bool] = ContextVar("_inside", default=False)


class Frozen(BaseModel):
    """An immutable, validated config. Invalid values raise `ConfigError`, never a pydantic error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    aliases: ClassVar[Mapping[str, str]] = {}
    """Field names of other libraries, mapped to ours."""

    @_model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if _inside.get():
            return validate(data)
        token = _inside.set(True)
        try:
            return validate(data)
        except ValidationError as invalid:
            raise ConfigError("; ".join(_sentence(cls, error) for error in invalid.errors())) from None
        finally:
            _inside.reset(token)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"a {type(self).__name__} is immutable; make a copy with replace({name}={value!r})")

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"a {type(self).__name__} is immutable; {name} cannot be deleted")

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed."""
        return type(self).model_validate({**dict(self), **changes})

    def to_json(self) -> str:
        """Return the config as JSON, which `from_json` reads."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a config that `to_json` wrote."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as invalid:  # not JSON, so the validator above never ran
            raise ConfigError(f"{cls.__name__}: {invalid.errors()[0]['msg']}") from None


def _sentence(cls: type[BaseModel], error: ErrorDetails) -> str:
    """Turn a validation error into a sentence: the path, the value, what would be valid."""
    path = ".".join(str(item) for item in error["loc"]) or cls.__name__
    value = error.get("input")
    match error["type"]:
        case "extra_forbidden":
            *parents, key = error["loc"]
            return f"{cls.__name__} has no option {path!r}" + _suggested(_config_at(cls, parents), str(key))
        case "literal_error":
            expected = error["ctx"]["expected"]
            words = expected.replace(" or ", ", ").split(", ")
            return f"{path} is {short_repr(value)}, which is not one of {expected}" + suggest(
                str(value), [word.strip("'") for word in words]
            )
        case "missing":
            return f"{cls.__name__} needs {path}"
        case _:
            return f"{path} is {short_repr(value)}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _suggested(cls: type[BaseModel], key: str) -> str:
    """Suggest the field for another library's name, else the closest field names."""
    ours = cls.aliases.get(key) if issubclass(cls, Frozen) else None
    return suggest(key, cls.model_fields) if ours is None else f"; did you mean {ours!r}?"


def _config_at(cls: type[BaseModel], parents: list[int | str]) -> type[BaseModel]:
    """Return the config class at the path `parents` inside `cls`."""
    for parent in parents:
        if not isinstance(parent, str) or parent not in cls.model_fields:
            continue  # a list index, or a branch of a union
        cls = next(_configs_in(cls.model_fields[parent].annotation), cls)
    return cls


def _configs_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Find the configs in an annotation such as `tuple[ConvLayer, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _configs_in(inner)


def _as_integer(value: Any) -> Any:
    """Convert anything with `__index__`, such as a NumPy integer, to int; leave bool alone."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _as_pair(value: Any) -> Any:
    """Read 16 as (16, 16), and accept a list from JSON or TOML."""
    value = _as_integer(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return tuple(value)
    raise PydanticCustomError("pair", "expected one integer, or two (height, width)")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_integers(value: Any) -> Any:
    return (value,) if isinstance(value, int) else _as_tuple(value)


def _as_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


LIMIT = 1_000_000
"""The largest size allowed for a model or an image; a larger one is a typo that would run out of memory."""
Positive = Annotated[int, BeforeValidator(_as_integer), Field(gt=0, le=LIMIT)]
Count = Annotated[int, BeforeValidator(_as_integer), Field(ge=0, le=LIMIT)]
Index = Annotated[int, BeforeValidator(_as_integer), Field(ge=-LIMIT, le=LIMIT)]
"""A place in a list, which may be counted from the end."""
Rate = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[tuple[Positive, Positive], BeforeValidator(_as_pair)]
"""Height and width; one integer sets both."""
Sequence = BeforeValidator(_as_tuple)
"""Accepts a list for a tuple field."""
Integers = BeforeValidator(_as_integers)
"""Accepts a list, or one integer, for a tuple of integers."""
Names = BeforeValidator(_as_names)
"""Accepts a list, or one string, for a tuple of strings."""
