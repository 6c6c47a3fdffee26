"""`vitrail serve`: serve models over HTTP, with the explorer page."""

import atexit
import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vitrail.cli.overrides import read_overrides

_ENV = "VITRAIL_SERVE_"
_NEEDED = ("starlette", "uvicorn", "prometheus_client", "python_multipart")


def serve(
    bundles: Annotated[
        list[str],
        typer.Argument(
            help="Anything that `vitrail predict` opens; NAME=BUNDLE names it. The first is the default model.",
            envvar=f"{_ENV}BUNDLES",
        ),
    ],
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="NAME=VALUE",
            help="Set a field that the file does not record: heads=6, pool=mean; may be repeated. For all models.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="A key table (TOML) for a custom ViT.", envvar=f"{_ENV}KEYS")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to bind to; 0.0.0.0 for all.", envvar=f"{_ENV}HOST")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to bind to; 0 picks a free one.", envvar=f"{_ENV}PORT")] = 8000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", envvar=f"{_ENV}DEVICE")] = "auto",
    engine: Annotated[str, typer.Option(help="torch, onnx or openvino.", envvar=f"{_ENV}ENGINE")] = "torch",
    precision: Annotated[str, typer.Option(help="float32, bf16, fp16 or auto.", envvar=f"{_ENV}PRECISION")] = "auto",
    batch: Annotated[int, typer.Option(help="Maximum batch size.", envvar=f"{_ENV}BATCH")] = 32,
    wait: Annotated[
        float, typer.Option(help="Milliseconds that an image waits for a batch to fill.", envvar=f"{_ENV}WAIT")
    ] = 5.0,
    queue: Annotated[
        int, typer.Option(help="Maximum images in the queue; above it, requests get 503.", envvar=f"{_ENV}QUEUE")
    ] = 256,
    deadline: Annotated[
        float, typer.Option(help="Seconds until a request times out with 504.", envvar=f"{_ENV}DEADLINE")
    ] = 30.0,
    decoders: Annotated[int, typer.Option(help="Decoder processes.", envvar=f"{_ENV}DECODERS")] = 2,
    decode_time: Annotated[
        float, typer.Option(help="Maximum seconds to decode one image.", envvar=f"{_ENV}DECODE_TIME")
    ] = 10.0,
    connections: Annotated[int, typer.Option(help="Maximum connections.", envvar=f"{_ENV}CONNECTIONS")] = 512,
    client_connections: Annotated[
        int, typer.Option(help="Maximum connections per client.", envvar=f"{_ENV}CLIENT_CONNECTIONS")
    ] = 128,
    head_time: Annotated[
        float, typer.Option(help="Maximum seconds to receive a request's headers.", envvar=f"{_ENV}HEAD_TIME")
    ] = 10.0,
    body_limit: Annotated[
        float, typer.Option(help="Maximum size of a request, in MB.", envvar=f"{_ENV}BODY_LIMIT")
    ] = 32.0,
    uploads_limit: Annotated[
        float, typer.Option(help="Maximum size of all requests in flight, in MB.", envvar=f"{_ENV}UPLOADS_LIMIT")
    ] = 512.0,
    upload_time: Annotated[
        float, typer.Option(help="Maximum seconds to receive a request.", envvar=f"{_ENV}UPLOAD_TIME")
    ] = 60.0,
    pixel_limit: Annotated[
        float, typer.Option(help="Maximum image size, in megapixels.", envvar=f"{_ENV}PIXEL_LIMIT")
    ] = 50.0,
    images_limit: Annotated[int, typer.Option(help="Maximum images per request.", envvar=f"{_ENV}IMAGES_LIMIT")] = 64,
    formats: Annotated[
        str, typer.Option(help="Accepted image formats; tiff is available too.", envvar=f"{_ENV}FORMATS")
    ] = "jpeg,png,webp,gif,bmp",
    token: Annotated[
        str | None,
        typer.Option(
            help="The bearer token that clients must send. Other users of this machine can see it on the command line; "
            "prefer the environment variable or --token-file.",
            envvar=f"{_ENV}TOKEN",
            show_envvar=True,
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file that contains the token.", envvar=f"{_ENV}TOKEN_FILE")
    ] = None,
    allow_host: Annotated[
        str,
        typer.Option(
            help="Allowed Host headers, besides the address and localhost; '*' allows any.",
            envvar=f"{_ENV}ALLOW_HOST",
        ),
    ] = "",
    origins: Annotated[str, typer.Option(help="Allowed CORS origins.", envvar=f"{_ENV}ORIGINS")] = "",
    grace: Annotated[
        float,
        typer.Option(help="Seconds that requests have to finish after SIGTERM.", envvar=f"{_ENV}GRACE"),
    ] = 30.0,
    log_requests: Annotated[bool, typer.Option(help="Log every request.", envvar=f"{_ENV}LOG_REQUESTS")] = True,
) -> None:
    """Serve models over HTTP: /v1/predict, /v1/embed, /v1/explain, and the explorer page at /.

    Concurrent requests are batched. SIGTERM shuts down gracefully; SIGHUP reloads the bundles.
    """
    started = time.time()
    _check_extra()
    from vitrail.serving.settings import Settings, name_models

    settings = Settings(
        models=name_models(bundles),
        overrides=read_overrides(override),
        keys=keys,
        host=host,
        port=port,
        device=device,
        engine=engine,
        precision=precision,  # type: ignore[arg-type]  # checked there
        batch=batch,
        wait=wait,
        queue=queue,
        deadline=deadline,
        decoders=decoders,
        decode_time=decode_time,
        connections=connections,
        client_connections=client_connections,
        head_time=head_time,
        body_limit=body_limit,
        uploads_limit=uploads_limit,
        upload_time=upload_time,
        pixel_limit=pixel_limit,
        images_limit=images_limit,
        formats=_words(formats),  # type: ignore[arg-type]
        token=_token(token, token_file),
        allow_hosts=_words(allow_host),
        origins=_words(origins),
        grace=grace,
        log_requests=log_requests,
    )
    from vitrail.serving.run import serve as run

    run(settings, started=started)
    _end()


def _end() -> NoReturn:
    """Exit at once: "stopped" is logged, and a normal interpreter shutdown would take seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(0)


def _check_extra() -> None:
    from vitrail.errors import ConfigError

    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed; install with pip install 'vitrail[serve]'")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _token(token: str | None, file: Path | None) -> str | None:
    """Return the token; a file keeps it out of the process list and the environment."""
    from vitrail.errors import ConfigError

    for name in ("TOKEN", "TOKEN_FILE"):  # typer ignores an empty variable, and the server would need no token
        if token is None and file is None and os.environ.get(_ENV + name) == "":
            raise ConfigError(f"{_ENV}{name} is empty; set it, or unset it to serve without a token")
    if file is None:
        return token
    if token is not None:
        raise ConfigError("both --token and --token-file are set; use one of them")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the token cannot be read from {file}: {error}") from None
