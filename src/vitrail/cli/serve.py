"""`vitrail serve`: serve models over HTTP, with the explorer page."""

import atexit
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import vitrail
from vitrail.cli.overrides import read_overrides

_ENV = "VITRAIL_SERVE_"


def serve(
    bundles: Annotated[
        list[str],
        typer.Argument(
            help="The models: anything that vitrail predict opens, or NAME=BUNDLE to name it. The first is "
            "the default.",
            envvar=f"{_ENV}BUNDLES",
        ),
    ],
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="NAME=VALUE",
            help="Set a field that the checkpoints do not define, such as heads=6 or pool=mean. Can be "
            "repeated; applies to all models.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Key table (TOML) of a custom ViT; applies to all models.", envvar=f"{_ENV}KEYS")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind to; 0.0.0.0 binds to all.", envvar=f"{_ENV}HOST")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind to; 0 picks a free one.", envvar=f"{_ENV}PORT")] = 8000,
    device: Annotated[
        str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.", envvar=f"{_ENV}DEVICE")
    ] = "auto",
    engine: Annotated[str, typer.Option(help="Engine: torch, onnx or openvino.", envvar=f"{_ENV}ENGINE")] = "torch",
    precision: Annotated[
        str,
        typer.Option(
            help="Precision: float32, bf16, fp16, int8 (on a CPU, see --calibrate) or auto.", envvar=f"{_ENV}PRECISION"
        ),
    ] = "auto",
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGES",
            help="Images to calibrate int8 on: a folder, a manifest, tar shards or digits. By default the images that "
            "each model was trained with, if it is in the folder of its run.",
            envvar=f"{_ENV}CALIBRATE",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Maximum batch size.", envvar=f"{_ENV}BATCH")] = 32,
    wait: Annotated[
        float, typer.Option(help="Milliseconds that an image waits for others to join its batch.", envvar=f"{_ENV}WAIT")
    ] = 5.0,
    queue: Annotated[
        int,
        typer.Option(help="Maximum number of images in the queue; further requests get 503.", envvar=f"{_ENV}QUEUE"),
    ] = 256,
    deadline: Annotated[
        float,
        typer.Option(help="Maximum seconds until a response; then the request gets 504.", envvar=f"{_ENV}DEADLINE"),
    ] = 30.0,
    decoders: Annotated[
        int | None,
        typer.Option(
            help="Number of decoder processes; by default 2, or on a GPU one per core except one.",
            envvar=f"{_ENV}DECODERS",
        ),
    ] = None,
    decode: Annotated[
        str,
        typer.Option(
            help="Where JPEGs are decoded: cpu (in processes that can be killed), gpu (nvImageCodec, in the service "
            "itself), or auto: the GPU if it can.",
            envvar=f"{_ENV}DECODE",
        ),
    ] = "cpu",
    decode_time: Annotated[
        float, typer.Option(help="Maximum seconds to decode one image.", envvar=f"{_ENV}DECODE_TIME")
    ] = 10.0,
    connections: Annotated[int, typer.Option(help="Maximum number of connections.", envvar=f"{_ENV}CONNECTIONS")] = 512,
    client_connections: Annotated[
        int, typer.Option(help="Maximum number of connections per client.", envvar=f"{_ENV}CLIENT_CONNECTIONS")
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
        float, typer.Option(help="Maximum seconds to receive the body of a request.", envvar=f"{_ENV}UPLOAD_TIME")
    ] = 60.0,
    pixel_limit: Annotated[
        float, typer.Option(help="Maximum image size, in megapixels.", envvar=f"{_ENV}PIXEL_LIMIT")
    ] = 50.0,
    images_limit: Annotated[
        int, typer.Option(help="Maximum number of images per request.", envvar=f"{_ENV}IMAGES_LIMIT")
    ] = 64,
    formats: Annotated[
        str,
        typer.Option(help="Accepted image formats, separated by commas; you can add tiff.", envvar=f"{_ENV}FORMATS"),
    ] = "jpeg,png,webp,gif,bmp",
    token: Annotated[
        str | None,
        typer.Option(
            help="Bearer token that clients must send. Other users of this machine can see the command line, so "
            "prefer the environment variable or --token-file.",
            envvar=f"{_ENV}TOKEN",
            show_envvar=True,
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File that contains the token.", envvar=f"{_ENV}TOKEN_FILE")
    ] = None,
    allow_host: Annotated[
        str,
        typer.Option(
            help="Further host names to accept, besides the bound address and localhost; '*' accepts any.",
            envvar=f"{_ENV}ALLOW_HOST",
        ),
    ] = "",
    origins: Annotated[
        str,
        typer.Option(
            help="Web origins whose pages may call the API (CORS), separated by commas.", envvar=f"{_ENV}ORIGINS"
        ),
    ] = "",
    grace: Annotated[
        float,
        typer.Option(help="Maximum seconds to finish requests after SIGTERM.", envvar=f"{_ENV}GRACE"),
    ] = 30.0,
    log_requests: Annotated[
        bool, typer.Option(help="Log every request as a JSON line on stderr.", envvar=f"{_ENV}LOG_REQUESTS")
    ] = True,
) -> None:
    """Serve models over HTTP: /v1/predict, /v1/embed, /v1/explain, and an explorer page at /.

    Concurrent requests share a batch. SIGTERM shuts the server down gracefully; SIGHUP loads the bundles again.
    """
    started = time.time()
    settings = vitrail.ServeSettings(
        models=bundles,  # type: ignore[arg-type]  # named there
        overrides=read_overrides(override),
        keys=keys,
        host=host,
        port=port,
        device=device,
        engine=engine,
        precision=precision,  # type: ignore[arg-type]  # checked there
        calibrate=calibrate,
        batch=batch,
        wait=wait,
        queue=queue,
        deadline=deadline,
        decoders=decoders,
        decode=decode,  # type: ignore[arg-type]  # checked there
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
    vitrail.serve(settings, started=started)
    _end()


def _end() -> NoReturn:
    """Exit at once: "stopped" is logged, and a normal interpreter shutdown would take seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(0)


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
