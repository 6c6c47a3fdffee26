"""Request options besides the images: query parameters, form fields or JSON fields."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from vitrail.errors import ConfigError
from vitrail.explanations.request import ExplanationRequest, Method
from vitrail.inference.features import FeatureRequest
from vitrail.schema import Frozen
from vitrail.serving.operations import Embed, Explain, Predict

Fuse = Literal["mean", "max", "min"]
EVERY_TOKEN = "all"
MAX_NUMBER = 1_000_000
"""Largest integer a request may contain."""
MAX_TEXT = 200


def _or_none(value: Any) -> Any:
    """Treat an empty query parameter as missing."""
    return None if value == "" else value


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _expected(what: str) -> WrapValidator:
    """Replace pydantic's error text with one a client understands."""

    def checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("option", f"it should be {what}") from None

    return WrapValidator(checked)


Text = Annotated[
    Annotated[str, Field(max_length=MAX_TEXT)] | None,
    BeforeValidator(_or_none),
    _expected(f"text of at most {MAX_TEXT} characters"),
]
Whole = Annotated[
    Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)] | None,
    BeforeValidator(_or_none),
    _expected(f"an integer from {-MAX_NUMBER:,} to {MAX_NUMBER:,}"),
]
Top = Annotated[int, Field(ge=1, le=MAX_NUMBER), _expected(f"an integer from 1 to {MAX_NUMBER:,}")]
Switch = Annotated[bool, _expected("true or false")]


class _Options(Frozen):
    """Common options; values may arrive as text, so "5" is accepted as 5."""

    model_config = ConfigDict(strict=False)

    model: Text = None


class PredictOptions(_Options):
    """Options of /v1/predict."""

    top: Top = 5

    def operation(self) -> Predict:
        """Return the operation to run."""
        return Predict(self.top)


class EmbedOptions(_Options):
    """Options of /v1/embed."""

    normalise: Switch = False
    layer: Whole = None

    def operation(self) -> Embed:
        """Return the operation to run."""
        return Embed(FeatureRequest("pooled", None if self.layer in (None, -1) else self.layer, self.normalise))


class ExplainOptions(_Options):
    """Options of /v1/explain."""

    method: Text = "relevance"
    layer: Whole = None
    head: Whole = None
    query: Text = None
    target: Annotated[Text, BeforeValidator(_as_text)] = None
    fuse: Text = None

    def operation(self) -> Explain:
        """Return the operation to run."""
        every_token = self.query == EVERY_TOKEN
        request = ExplanationRequest(
            _one_of("method", self.method or "relevance", get_args(Method)),
            self.layer,
            self.head,
            None if every_token else self.query,
            _one_of("fuse", self.fuse or "mean", get_args(Fuse)),
        )
        return Explain(request, self.target, every_token)


Options = PredictOptions | EmbedOptions | ExplainOptions


def _one_of(what: str, word: str, valid: tuple[Any, ...]) -> Any:
    if word not in valid:
        raise ConfigError(f"{what} is {word!r}; choose {', '.join(valid[:-1])} or {valid[-1]}")
    return word
