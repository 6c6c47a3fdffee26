"""`vitrail serve`: models behind HTTP, and the explorer page."""

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
            help="Whatever `vitrail predict` opens; NAME=BUNDLE names it. The first answers where none is asked for.",
            envvar=f"{_ENV}BUNDLES",
        ),
    ],
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="NAME=VALUE",
            help="A field that a model's file does not tell: heads=6, pool=mean; may be repeated. For all models.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="A key table (TOML) for a home-made ViT.", envvar=f"{_ENV}KEYS")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 is all.", envvar=f"{_ENV}HOST")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.", envvar=f"{_ENV}PORT")] = 8000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", envvar=f"{_ENV}DEVICE")] = "auto",
    engine: Annotated[str, typer.Option(help="torch, onnx or openvino.", envvar=f"{_ENV}ENGINE")] = "torch",
    precision: Annotated[str, typer.Option(help="float32, bf16, fp16 or auto.", envvar=f"{_ENV}PRECISION")] = "auto",
    batch: Annotated[int, typer.Option(help="Most images computed at once.", envvar=f"{_ENV}BATCH")] = 32,
    wait: Annotated[
        float, typer.Option(help="Milliseconds for which an image waits for others.", envvar=f"{_ENV}WAIT")
    ] = 5.0,
    queue: Annotated[
        int, typer.Option(help="Most images that wait; more are refused with 503.", envvar=f"{_ENV}QUEUE")
    ] = 256,
    deadline: Annotated[
        float, typer.Option(help="Seconds until an answer is due; then it is 504.", envvar=f"{_ENV}DEADLINE")
    ] = 30.0,
    decoders: Annotated[int, typer.Option(help="Processes that decode images.", envvar=f"{_ENV}DECODERS")] = 2,
    decode_time: Annotated[
        float, typer.Option(help="Seconds that one image may take to decode.", envvar=f"{_ENV}DECODE_TIME")
    ] = 10.0,
    connections: Annotated[int, typer.Option(help="Most connections.", envvar=f"{_ENV}CONNECTIONS")] = 512,
    client_connections: Annotated[
        int, typer.Option(help="Most connections of one client.", envvar=f"{_ENV}CLIENT_CONNECTIONS")
    ] = 128,
    head_time: Annotated[
        float, typer.Option(help="Seconds that a request's head may take to arrive.", envvar=f"{_ENV}HEAD_TIME")
    ] = 10.0,
    body_limit: Annotated[
        float, typer.Option(help="Most megabytes of one request.", envvar=f"{_ENV}BODY_LIMIT")
    ] = 32.0,
    uploads_limit: Annotated[
        float, typer.Option(help="Most megabytes of all requests together.", envvar=f"{_ENV}UPLOADS_LIMIT")
    ] = 512.0,
    upload_time: Annotated[
        float, typer.Option(help="Seconds that a request may take to arrive.", envvar=f"{_ENV}UPLOAD_TIME")
    ] = 60.0,
    pixel_limit: Annotated[
        float, typer.Option(help="Most millions of pixels of an image.", envvar=f"{_ENV}PIXEL_LIMIT")
    ] = 50.0,
    images_limit: Annotated[int, typer.Option(help="Most images in one request.", envvar=f"{_ENV}IMAGES_LIMIT")] = 64,
    formats: Annotated[
        str, typer.Option(help="Kinds of files that are opened; also tiff.", envvar=f"{_ENV}FORMATS")
    ] = "jpeg,png,webp,gif,bmp",
    token: Annotated[
        str | None,
        typer.Option(
            help="What clients send as 'Authorization: Bearer …'. Others on this machine may see it here, so rather "
            "use the environment or --token-file.",
            envvar=f"{_ENV}TOKEN",
            show_envvar=True,
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file that holds the token.", envvar=f"{_ENV}TOKEN_FILE")
    ] = None,
    allow_host: Annotated[
        str,
        typer.Option(
            help="Host names to answer for, beside the address and localhost; '*' is any.",
            envvar=f"{_ENV}ALLOW_HOST",
        ),
    ] = "",
    origins: Annotated[
        str, typer.Option(help="Web origins whose pages may call the service (CORS).", envvar=f"{_ENV}ORIGINS")
    ] = "",
    grace: Annotated[
        float,
        typer.Option(help="Seconds that SIGTERM leaves to requests that have arrived whole.", envvar=f"{_ENV}GRACE"),
    ] = 30.0,
    log_requests: Annotated[
        bool, typer.Option(help="Write a line for every request.", envvar=f"{_ENV}LOG_REQUESTS")
    ] = True,
) -> None:
    """Serve models over HTTP: /v1/predict, /v1/embed, /v1/explain, and the explorer page at /.

    Images that arrive together are computed together. SIGTERM finishes what was accepted, SIGHUP opens the
    bundles again.
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
    """End now: the log has said "stopped", and taking every library down would take seconds more."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            stream.flush()
    os._exit(0)


def _check_extra() -> None:
    from vitrail.errors import ConfigError

    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed; get it with pip install 'vitrail[serve]'")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _token(token: str | None, file: Path | None) -> str | None:
    """Return the token; a file keeps it out of the list of processes and of the environment."""
    from vitrail.errors import ConfigError

    for name in ("TOKEN", "TOKEN_FILE"):  # an empty variable is left out without a word, and the door would be open
        if token is None and file is None and os.environ.get(_ENV + name) == "":
            raise ConfigError(f"{_ENV}{name} is empty; give it a value, or unset it to serve without a token")
    if file is None:
        return token
    if token is not None:
        raise ConfigError("the token is given twice, by --token and by --token-file; give one of them")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the token cannot be read from {file}: {error}") from None
