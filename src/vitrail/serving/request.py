"""Read a request within limits: its images (a raw image, multipart form data or JSON) and its options."""

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitrail.errors import ConfigError
from vitrail.explanations.request import ExplanationRequest, Method
from vitrail.inference.features import FeatureRequest
from vitrail.schema import Frozen
from vitrail.serving.http_errors import ClientDisconnected, HttpError
from vitrail.serving.operations import Embed, Explain, Predict
from vitrail.serving.settings import MEGABYTE, Settings

Fuse = Literal["mean", "max", "min"]
EVERY_TOKEN = "all"
MAX_NUMBER = 1_000_000
"""Largest integer a request may contain."""
MAX_TEXT = 200
MAX_OPTIONS, MAX_OPTION_NAME = 50, 100


# ── options ──


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
Kind = TypeVar("Kind", PredictOptions, EmbedOptions, ExplainOptions)


def read_options(kind: type[Kind], fields: dict[str, Any]) -> Kind:
    """Validate the options of a request."""
    # Suggestions for unknown names are slow to compute for many or long names.
    if len(fields) > MAX_OPTIONS or any(len(name) > MAX_OPTION_NAME for name in fields):
        raise HttpError(422, f"too many options ({len(fields)}) or a very long option name; see /openapi.json")
    try:
        return kind.model_validate(fields)
    except ConfigError as error:
        raise HttpError(422, str(error).replace(kind.__name__, "the request")[:500]) from None


def _one_of(what: str, word: str, valid: tuple[Any, ...]) -> Any:
    if word not in valid:
        raise ConfigError(f"{what} is {word!r}; choose {', '.join(valid[:-1])} or {valid[-1]}")
    return word


# ── body ──

MAX_JSON_VALUES = 1000
"""Maximum number of JSON values besides the images; a parsed value can take 100× the memory of its text."""
BODY_FORMS = "an image as the body (image/*), multipart/form-data with fields 'image', or JSON with 'images'"


class ParsedRequest(NamedTuple):
    """The contents of a request."""

    images: list[bytes]
    fields: dict[str, Any]
    """Options, not validated yet."""


class Uploads:
    """Memory accounting of all request bodies."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._held = settings, 0
        self._most = round(settings.uploads_limit * MEGABYTE)

    @contextmanager
    def reading(self) -> Iterator["Upload"]:
        """Account for one request and release its bytes at the end."""
        upload = Upload(self)
        try:
            yield upload
        finally:
            self._held -= upload.size

    def hold(self, size: int) -> None:
        """Reserve bytes, or raise 503."""
        if self._held + size > self._most:
            raise HttpError(503, "too many uploads in progress; try again soon", retry_after=1, reason="uploads")
        self._held += size


class Upload:
    """Memory held by one request."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads, self.size = uploads, 0

    def grow(self, size: int) -> None:
        """Count more bytes."""
        self._uploads.hold(size)
        self.size += size


async def read_request(request: Request, upload: Upload, settings: Settings) -> ParsedRequest:
    """Read the body and extract images and options."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind in ("multipart/form-data", "application/json", "")):
        raise HttpError(415, f"the content type {kind[:80]!r} is not supported; send {BODY_FORMS}")
    try:
        async with asyncio.timeout(settings.upload_time):
            body = await _read_body(request, upload, settings.body_bytes)
    except TimeoutError:
        raise HttpError(408, f"the request did not arrive within {settings.upload_time:g} s", reason="slow") from None
    if not body:
        raise HttpError(400, f"the request has no body; send {BODY_FORMS}")
    fields: dict[str, Any] = dict(request.query_params)
    if kind == "":
        raise HttpError(415, f"the request has no Content-Type; set it, and send {BODY_FORMS}")
    if kind == "application/json":
        # Parse large JSON in a thread, so that the event loop is not blocked.
        most = settings.images_limit
        images, more = (
            await asyncio.to_thread(_from_json, body, most) if len(body) > MEGABYTE else _from_json(body, most)
        )
        parsed = ParsedRequest(images, {**fields, **more})
    elif kind == "multipart/form-data":
        images, more = await _from_multipart(request, body, settings)
        parsed = ParsedRequest(images, {**fields, **more})
    else:
        parsed = ParsedRequest([body], fields)
    if len(parsed.images) > settings.images_limit:
        raise HttpError(
            413, f"{len(parsed.images)} images in one request; at most {settings.images_limit} are accepted"
        )
    return parsed


async def _read_body(request: Request, upload: Upload, most: int) -> bytes:
    too_large = HttpError(413, f"the request is larger than the limit of {most / MEGABYTE:g} MB")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > most:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise too_large
        upload.grow(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


class _InMemory(MultiPartParser):
    """Starlette's parser without spooling to disk: the body is already in memory and within the limit."""

    spool_max_size = 2**40


async def _from_multipart(request: Request, body: bytes, settings: Settings) -> tuple[list[bytes], dict[str, Any]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    most = settings.images_limit
    parser = _InMemory(request.headers, stream(), max_files=most + 1, max_fields=64, max_part_size=settings.body_bytes)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise HttpError(413, f"more than {most} images in one request; send fewer per request") from None
        raise HttpError(400, f"the multipart body cannot be read: {error.message.rstrip('.')}") from None
    except Exception:  # malformed part headers can raise anything in the parser
        raise HttpError(400, "the multipart body cannot be read; is its boundary the one in Content-Type?") from None
    try:
        files = form.getlist("image")
        if not files:
            raise HttpError(400, "the form has no 'image' field; send one per image")
        if not all(isinstance(part, UploadFile) for part in files):
            raise HttpError(400, "the 'image' field is text; send it as a file, with a file name")
        options = {name: value for name, value in form.multi_items() if name != "image"}
        for name, value in options.items():
            if isinstance(value, UploadFile):
                raise HttpError(400, f"the form has a file in the field {name[:80]!r}; send images as 'image' fields")
        return [await part.read() for part in files if isinstance(part, UploadFile)], options
    finally:
        await form.close()


def _from_json(body: bytes, most: int) -> tuple[list[bytes], dict[str, Any]]:
    # Base64 contains none of these characters, so a valid body has few of them.
    if sum(body.count(character) for character in (b",", b"[", b"{")) > most + MAX_JSON_VALUES:
        raise HttpError(400, 'the body is not JSON like {"images": ["<base64>", …]}: it has too many values')
    try:
        content = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise HttpError(400, 'the body is not JSON; send {"images": ["<base64>", …]}') from None
    if not isinstance(content, dict):
        raise HttpError(400, "the JSON should be an object with a list 'images' of base64 strings")
    encoded = content.pop("images", None)
    if not isinstance(encoded, list) or not encoded or not all(isinstance(image, str) for image in encoded):
        raise HttpError(400, "'images' should be a non-empty list of base64 strings")
    images = []
    for number, image in enumerate(encoded):
        try:
            images.append(base64.b64decode(image, validate=True))
        except (binascii.Error, ValueError):
            raise HttpError(
                400, f"image {number} is not valid base64; send it without a 'data:' prefix or line breaks"
            ) from None
    return images, content


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
