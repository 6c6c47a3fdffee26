"""Reading a request: never more than is allowed, in any of the three ways in which images are sent."""

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitrail.errors import ConfigError
from vitrail.serving.http_errors import ClientDisconnected, HttpError
from vitrail.serving.options import EmbedOptions, ExplainOptions, PredictOptions
from vitrail.serving.settings import MEGABYTE, Settings

Kind = TypeVar("Kind", PredictOptions, EmbedOptions, ExplainOptions)
MOST_OPTIONS, LONGEST_OPTION = 50, 100
MORE_PARTS = 1000
"""How many values JSON may have beside its images. Each takes a hundred times the memory of its bytes."""
WAYS = "an image as the body (image/*), multipart/form-data with fields 'image', or JSON with 'images'"


class ParsedRequest(NamedTuple):
    """What a request holds."""

    images: list[bytes]
    fields: dict[str, Any]
    """Its options, not checked yet."""


class Uploads:
    """How much memory all requests hold together."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._held = settings, 0
        self._most = round(settings.uploads_limit * MEGABYTE)

    @contextmanager
    def reading(self) -> Iterator["Upload"]:
        """Give a request its account, and close it at the end."""
        upload = Upload(self)
        try:
            yield upload
        finally:
            self._held -= upload.size

    def hold(self, size: int) -> None:
        """Count bytes, or refuse them."""
        if self._held + size > self._most:
            raise HttpError(503, "too much is being uploaded already; try again soon", retry_after=1, reason="uploads")
        self._held += size


class Upload:
    """The memory that one request holds."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads, self.size = uploads, 0

    def grow(self, size: int) -> None:
        """Count more bytes."""
        self._uploads.hold(size)
        self.size += size


async def read_request(request: Request, upload: Upload, settings: Settings) -> ParsedRequest:
    """Read the body and take the images and the options out of it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind in ("multipart/form-data", "application/json", "")):
        raise HttpError(415, f"a body of type {kind[:80]!r} is not taken; send {WAYS}")
    try:
        async with asyncio.timeout(settings.upload_time):
            body = await _read_body(request, upload, settings.body_bytes)
    except TimeoutError:
        raise HttpError(408, f"the request did not arrive within {settings.upload_time:g} s", reason="slow") from None
    if not body:
        raise HttpError(400, f"the request has no body; send {WAYS}")
    fields: dict[str, Any] = dict(request.query_params)
    if kind == "":
        raise HttpError(415, f"the request does not say what its body is; set Content-Type, and send {WAYS}")
    if kind == "application/json":
        # Much text takes long to read, and nobody else is answered meanwhile.
        most = settings.images_limit
        images, more = (
            await asyncio.to_thread(_from_json, body, most) if len(body) > MEGABYTE else _from_json(body, most)
        )
        asked = ParsedRequest(images, {**fields, **more})
    elif kind == "multipart/form-data":
        images, more = await _from_multipart(request, body, settings)
        asked = ParsedRequest(images, {**fields, **more})
    else:
        asked = ParsedRequest([body], fields)
    if len(asked.images) > settings.images_limit:
        raise HttpError(413, f"{len(asked.images)} images in one request; at most {settings.images_limit} are taken")
    return asked


def read_options(kind: type[Kind], fields: dict[str, Any]) -> Kind:
    """Check the options of a request."""
    # A name that is not known is compared with all that are, which takes long for many names and for long ones.
    if len(fields) > MOST_OPTIONS or any(len(name) > LONGEST_OPTION for name in fields):
        raise HttpError(422, f"the request has {len(fields)} options, or one with a very long name; see /openapi.json")
    try:
        return kind.model_validate(fields)
    except ConfigError as error:
        raise HttpError(422, str(error).replace(kind.__name__, "the request")[:500]) from None


async def _read_body(request: Request, upload: Upload, most: int) -> bytes:
    too_large = HttpError(413, f"the request is larger than {most / MEGABYTE:g} MB, which is the limit; send less")
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said[:20]) > most:
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
    """Starlette's parser, which writes nothing to disk: the whole body is in memory and has been measured."""

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
            raise HttpError(413, f"more than {most} images in one request; send fewer at a time") from None
        raise HttpError(400, f"the multipart body cannot be read: {error.message.rstrip('.')}") from None
    except Exception:  # headers of parts can be damaged in ways that the parser does not foresee
        raise HttpError(400, "the multipart body cannot be read; is its boundary the one in Content-Type?") from None
    try:
        found = form.getlist("image")
        if not found:
            raise HttpError(400, "the form has no field 'image'; send one for each image")
        if not all(isinstance(part, UploadFile) for part in found):
            raise HttpError(400, "the field 'image' is text; send it as a file, with a file name")
        options = {name: value for name, value in form.multi_items() if name != "image"}
        for name, value in options.items():
            if isinstance(value, UploadFile):
                raise HttpError(400, f"the form has a file in the field {name[:80]!r}; images are fields 'image'")
        return [await part.read() for part in found if isinstance(part, UploadFile)], options
    finally:
        await form.close()


def _from_json(body: bytes, most: int) -> tuple[list[bytes], dict[str, Any]]:
    # None of these signs is in base64, so few of them are in a body that is meant well.
    if sum(body.count(sign) for sign in (b",", b"[", b"{")) > most + MORE_PARTS:
        raise HttpError(400, 'the body is not JSON like {"images": ["<base64>", …]}: it has far too many parts')
    try:
        asked = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise HttpError(400, 'the body is not JSON; send {"images": ["<base64>", …]}') from None
    if not isinstance(asked, dict):
        raise HttpError(400, "the JSON should be an object with a list 'images' of base64 texts")
    given = asked.pop("images", None)
    if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given):
        raise HttpError(400, "'images' should be a list of one or more base64 texts")
    images = []
    for number, one in enumerate(given):
        try:
            images.append(base64.b64decode(one, validate=True))
        except (binascii.Error, ValueError):
            raise HttpError(
                400, f"image {number} is not base64; send that alone, without 'data:' before it or line breaks in it"
            ) from None
    return images, asked


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
