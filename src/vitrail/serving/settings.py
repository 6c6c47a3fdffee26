"""Every setting of the service, checked once; and what the models on the command line are called."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from vitrail.errors import ConfigError
from vitrail.schema import Frozen, Positive
from vitrail.schema import Sequence as AsTuple

Format = Literal["jpeg", "png", "webp", "gif", "bmp", "tiff"]
MEGABYTE = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAMED = re.compile(r"([^=/\\:]*)=(.+)", re.DOTALL)


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Seconds = Annotated[float, BeforeValidator(_as_number), Field(gt=0, le=86_400)]
Amount = Annotated[float, BeforeValidator(_as_number), Field(gt=0, le=100_000)]


class NamedSource(NamedTuple):
    """A model that is to be served."""

    name: str
    source: str
    """Whatever `vitrail.load` opens."""


class Settings(Frozen):
    """How a service is run. The token is in no printed form of it."""

    models: Annotated[tuple[NamedSource, ...], AsTuple]
    """The first is the one that answers where a request names none."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields that the models' files do not tell, as for `vitrail.load`; for all models."""
    keys: Path | None = None
    """A key table for home-made ViTs."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """0 takes any that is free."""
    device: str = "auto"
    engine: str = "torch"
    precision: Literal["float32", "bf16", "fp16", "auto"] = "auto"
    """`auto` tries bf16 on the first images that clients send, and takes it where it is faster and agrees."""

    batch: Annotated[int, Field(gt=0, le=4096)] = 32
    """Most images that are computed at once."""
    wait: Annotated[float, BeforeValidator(_as_number), Field(ge=0, le=10_000)] = 5.0
    """Milliseconds for which an image waits for others, when nothing is being computed."""
    queue: Positive = 256
    """Most images of a model that wait; more are refused with 503."""
    deadline: Seconds = 30.0
    """Seconds from a request's last byte to its answer; later it is 504."""
    decoders: Annotated[int, Field(gt=0, le=256)] = 2
    """Processes that decode images."""
    decode_time: Seconds = 10.0
    """Seconds that one image may take to decode; then its decoder is ended, and it is 422."""

    connections: Positive = 512
    """Most connections; fewer where there are not as many file descriptors."""
    client_connections: Positive = 128
    """Most connections of one client."""
    head_time: Seconds = 10.0
    """Seconds that the head of a request may take to arrive."""
    body_limit: Amount = 32.0
    """Most megabytes of one request."""
    uploads_limit: Amount = 512.0
    """Most megabytes of all requests together that are being read or wait."""
    upload_time: Seconds = 60.0
    """Seconds that a request may take to arrive."""
    pixel_limit: Amount = 50.0
    """Most millions of pixels of an image, seen in its header before anything is decoded."""
    images_limit: Positive = 64
    """Most images in one request."""
    formats: Annotated[tuple[Format, ...], AsTuple, Field(min_length=1)] = ("jpeg", "png", "webp", "gif", "bmp")
    """The kinds of files that are opened at all."""
    token: str | None = Field(default=None, repr=False, exclude=True)
    """What a client has to send as `Authorization: Bearer …`; None: nothing."""
    allow_hosts: Annotated[tuple[str, ...], AsTuple] = ()
    """Host names for which it answers beside its address and localhost; '*' is any."""
    origins: Annotated[tuple[str, ...], AsTuple] = ()
    """Web origins whose pages may call the service (CORS), such as https://example.org."""
    grace: Seconds = 30.0
    """Seconds that SIGTERM leaves to requests that have arrived whole."""
    log_requests: bool = True
    """Whether every request is a line in the log."""

    @model_validator(mode="after")
    def _models_have_names(self) -> Self:
        if not self.models:
            raise ConfigError("there is no model to serve; name a bundle")
        names = [model.name for model in self.models]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} cannot be a model's name: up to 64 letters, digits, '.', '_' and '-', a letter or digit "
                    f"first; name it with NAME=BUNDLE"
                )
            if names.count(name) > 1:
                raise ConfigError(f"two models would be called {name!r}; name them apart with NAME=BUNDLE")
        return self

    @model_validator(mode="after")
    def _token_can_be_sent(self) -> Self:
        token = self.token
        if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
            raise ConfigError("the token should be ASCII letters, digits and signs without spaces, and not empty")
        return self

    @model_validator(mode="after")
    def _hosts_are_hosts(self) -> Self:
        for host in self.allow_hosts:
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", host):
                raise ConfigError(f"{host!r} is not a host name; write it as example.org, without port or path, or '*'")
        return self

    @model_validator(mode="after")
    def _origins_are_origins(self) -> Self:
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(f"{origin!r} is no origin; write it as https://example.org, without a path, or '*'")
        return self

    @property
    def body_bytes(self) -> int:
        """Most bytes of a request."""
        return round(self.body_limit * MEGABYTE)

    @property
    def pixels(self) -> int:
        """Most pixels of an image."""
        return round(self.pixel_limit * 1_000_000)

    def shown(self) -> dict[str, Any]:
        """Return the settings as they are printed: whether there is a token, not which."""
        models = {model.name: model.source for model in self.models}
        return {**self.model_dump(), "models": models, "token": "set" if self.token is not None else "none"}


def name_models(given: Sequence[str]) -> tuple[NamedSource, ...]:
    """Read what stands on the command line: NAME=BUNDLE, or a bundle that is called by its folder or file."""
    return tuple(_named(word) for word in given)


def _named(word: str) -> NamedSource:
    named = _NAMED.fullmatch(word)
    if named is not None and not os.path.exists(word):
        return NamedSource(named[1], named[2])
    path = PurePath(os.path.abspath(word) if ":" not in word else word.partition(":")[2].partition("@")[0])
    name = path.parent.name if path.name == "best" and path.parent.name else path.name
    if os.path.isfile(word):
        name = PurePath(name).stem
    return NamedSource(re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:64] or "model", word)
