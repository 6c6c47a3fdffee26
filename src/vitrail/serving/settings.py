"""The service's settings, validated once, and the names of the models on the command line."""

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


def _as_sources(value: Any) -> Any:
    """Name the models that are given as paths."""
    models = [value] if isinstance(value, str | os.PathLike | NamedSource) else value
    if not isinstance(models, Sequence):
        return value
    return tuple(_named_source(os.fspath(m)) if isinstance(m, str | os.PathLike) else m for m in models)


Seconds = Annotated[float, BeforeValidator(_as_number), Field(gt=0, le=86_400)]
Amount = Annotated[float, BeforeValidator(_as_number), Field(gt=0, le=100_000)]


class NamedSource(NamedTuple):
    """A model to serve."""

    name: str
    source: str
    """Anything `vitrail.load` accepts."""


class Settings(Frozen):
    """Settings of a service. The token never appears in a repr, dump or log."""

    models: Annotated[tuple[NamedSource, ...], AsTuple, BeforeValidator(_as_sources)]
    """A path or a name on a hub, or NAME=MODEL; the first is the default for requests without a model name."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields missing from the checkpoint files, as in `vitrail.load`; applied to all models."""
    keys: Path | None = None
    """A key table for custom ViT checkpoints."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """0 picks any free port."""
    device: str = "auto"
    engine: str = "torch"
    precision: Literal["float32", "bf16", "fp16", "int8", "auto"] = "auto"
    """`auto` tries bf16 on the first images from clients and keeps it if it is faster and the predictions agree."""
    calibrate: str | None = None
    """Images to calibrate int8 on; by default those of each model's run."""

    batch: Annotated[int, Field(gt=0, le=4096)] = 32
    """Maximum batch size."""
    wait: Annotated[float, BeforeValidator(_as_number), Field(ge=0, le=10_000)] = 5.0
    """Milliseconds an image waits for others to join its batch when the model is idle."""
    queue: Positive = 256
    """Maximum number of queued images per model; beyond it, requests get 503."""
    deadline: Seconds = 30.0
    """Seconds from a request's last byte to its response; after that, 504."""
    decoders: Annotated[int, Field(gt=0, le=256)] | None = None
    """Number of decoder processes. By default 2 if the model runs on the CPU, and on a GPU one per core, except one."""
    decode: Literal["auto", "cpu", "gpu"] = "cpu"
    """Where JPEGs are decoded: `cpu`, in the decoder processes; `gpu` (nvImageCodec), in the service itself; or `auto`,
    the GPU if it can."""
    decode_time: Seconds = 10.0
    """Seconds one image may take to decode; after that its decoder is killed and the response is 422."""

    connections: Positive = 512
    """Maximum number of connections; lower if there are not enough file descriptors."""
    client_connections: Positive = 128
    """Maximum number of connections per client."""
    head_time: Seconds = 10.0
    """Seconds in which the request headers must arrive."""
    body_limit: Amount = 32.0
    """Maximum size of one request in megabytes."""
    uploads_limit: Amount = 512.0
    """Maximum total size in megabytes of all requests being read or queued."""
    upload_time: Seconds = 60.0
    """Seconds in which a request body must arrive."""
    pixel_limit: Amount = 50.0
    """Maximum megapixels per image, checked in its header before decoding."""
    images_limit: Positive = 64
    """Maximum number of images in one request."""
    formats: Annotated[tuple[Format, ...], AsTuple, Field(min_length=1)] = ("jpeg", "png", "webp", "gif", "bmp")
    """Accepted image formats."""
    token: str | None = Field(default=None, repr=False, exclude=True)
    """Bearer token that clients must send in `Authorization`; None disables authentication."""
    allow_hosts: Annotated[tuple[str, ...], AsTuple] = ()
    """Accepted `Host` names besides the bound address and localhost; '*' accepts any."""
    origins: Annotated[tuple[str, ...], AsTuple] = ()
    """Web origins allowed to call the service (CORS), such as https://example.org."""
    grace: Seconds = 30.0
    """Seconds that fully received requests have to finish after SIGTERM."""
    log_requests: bool = True
    """Whether to log every request."""

    @model_validator(mode="after")
    def _check_model_names(self) -> Self:
        if not self.models:
            raise ConfigError("no model to serve; pass at least one bundle")
        names = [model.name for model in self.models]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is not a valid model name: use up to 64 letters, digits, '.', '_' and '-', starting "
                    f"with a letter or digit; set it with NAME=BUNDLE"
                )
            if names.count(name) > 1:
                raise ConfigError(f"two models are named {name!r}; give them different names with NAME=BUNDLE")
        return self

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        token = self.token
        if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
            raise ConfigError("the token must be printable ASCII without spaces, and not empty")
        return self

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        for host in self.allow_hosts:
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", host):
                raise ConfigError(f"{host!r} is not a host name; write it as example.org, without port or path, or '*'")
        return self

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(
                    f"{origin!r} is not an origin; write it as https://example.org, without a path, or '*'"
                )
        return self

    @property
    def body_bytes(self) -> int:
        """Maximum size of a request in bytes."""
        return round(self.body_limit * MEGABYTE)

    @property
    def pixels(self) -> int:
        """Maximum number of pixels per image."""
        return round(self.pixel_limit * 1_000_000)

    def redacted(self) -> dict[str, Any]:
        """Return the settings for the log, with the token redacted."""
        models = {model.name: model.source for model in self.models}
        return {**self.model_dump(), "models": models, "token": "set" if self.token is not None else "none"}


def _named_source(argument: str) -> NamedSource:
    """Parse NAME=BUNDLE, or name a bundle after its folder or file."""
    named = _NAMED.fullmatch(argument)
    if named is not None and not os.path.exists(argument):
        return NamedSource(named[1], named[2])
    path = PurePath(os.path.abspath(argument) if ":" not in argument else argument.partition(":")[2].partition("@")[0])
    name = path.parent.name if path.name == "best" and path.parent.name else path.name
    if os.path.isfile(argument):
        name = PurePath(name).stem
    return NamedSource(re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:64] or "model", argument)
