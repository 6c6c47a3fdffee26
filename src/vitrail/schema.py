"""The base of every config: frozen, typed, finite; an unknown key is an error that names the nearest valid one."""

import operator
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError
from pydantic import model_validator as _model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from vitrail.errors import ConfigError, suggest

# True while a config is being validated: a config inside another one leaves its errors to the outer one,
# which knows the whole path ("resnet.depths.0") and reports every fault at once.
_inside: ContextVar[bool] = ContextVar("_inside", default=False)
LONGEST_SHOWN = 200


class Frozen(BaseModel):
    """A value that cannot change after it was checked. A fault raises `ConfigError`, never a pydantic error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    called_elsewhere: ClassVar[Mapping[str, str]] = {}
    """What other libraries call some of the fields, and what they are called here."""

    @_model_validator(mode="wrap")
    @classmethod
    def _explain_faults(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if _inside.get():
            return validate(data)
        token = _inside.set(True)
        try:
            return validate(data)
        except ValidationError as fault:
            raise ConfigError("; ".join(_sentence(cls, error) for error in fault.errors())) from None
        finally:
            _inside.reset(token)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"a {type(self).__name__} does not change; make another one with replace({name}={value!r})")

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"a {type(self).__name__} does not change; {name} stays")

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with some fields changed; the original stays as it was."""
        return type(self).model_validate({**dict(self), **changes})

    def to_json(self) -> str:
        """Return the config as JSON that `from_json` reads back to an equal config."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as fault:  # not JSON at all: the check above never ran
            raise ConfigError(f"{cls.__name__}: {fault.errors()[0]['msg']}") from None


def _sentence(cls: type[BaseModel], error: ErrorDetails) -> str:
    """Say one validation error: where, what was found, what would be valid."""
    path = ".".join(str(part) for part in error["loc"]) or cls.__name__
    found = error.get("input")
    match error["type"]:
        case "extra_forbidden":
            *parents, key = error["loc"]
            return f"{cls.__name__} has no option {path!r}" + _suggested(_config_at(cls, parents), str(key))
        case "literal_error":
            expected = error["ctx"]["expected"]
            words = expected.replace(" or ", ", ").split(", ")
            return f"{path} is {_shown(found)}, which is not one of {expected}" + suggest(
                str(found), [word.strip("'") for word in words]
            )
        case "missing":
            return f"{cls.__name__} needs {path}"
        case _:
            return f"{path} is {_shown(found)}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _shown(found: Any) -> str:
    """Write what was found, and not so much of it that what is wrong with it is lost."""
    text = repr(found)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _suggested(cls: type[BaseModel], key: str) -> str:
    """Name the field that is meant by another library's name, else those that are written alike."""
    known = cls.called_elsewhere.get(key) if issubclass(cls, Frozen) else None
    return suggest(key, cls.model_fields) if known is None else f"; did you mean {known!r}?"


def _config_at(cls: type[BaseModel], parents: list[int | str]) -> type[BaseModel]:
    """Return the config that lies at `parents` inside `cls`."""
    for parent in parents:
        if not isinstance(parent, str) or parent not in cls.model_fields:
            continue  # a list index, or a branch of a union
        cls = next(_configs_in(cls.model_fields[parent].annotation), cls)
    return cls


def _configs_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Find the configs in an annotation such as `tuple[ConvLayer, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _configs_in(part)


def _as_whole(value: Any) -> Any:
    """Accept whatever Python takes for an index (NumPy's integers, say) as a whole number; a truth value is none."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _as_pair(value: Any) -> Any:
    """Read 16 as (16, 16), and accept a list where JSON or TOML gave one."""
    value = _as_whole(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return tuple(value)
    raise PydanticCustomError("pair", "it should be one whole number, or two (height, width)")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


LIMIT = 1_000_000
"""No size of a model or an image is larger; a larger number is a slip that would end in a lack of memory."""
Positive = Annotated[int, BeforeValidator(_as_whole), Field(gt=0, le=LIMIT)]
Count = Annotated[int, BeforeValidator(_as_whole), Field(ge=0, le=LIMIT)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[tuple[Positive, Positive], BeforeValidator(_as_pair)]
"""Height and width; one number stands for both."""
Sequence = BeforeValidator(_as_tuple)
"""Lets a tuple field be given as a list."""
