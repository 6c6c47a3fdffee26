"""A killable process that decodes one image at a time: `python -m vitrail.serving.decoder_process`.

Image libraries can misbehave on hostile files. Here they run with a memory limit, and the parent kills the process
when it takes too long. It exits when its stdin is closed.
"""

import contextlib
import json
import os
import struct
import sys
from typing import BinaryIO

TASK_HEADER = struct.Struct(">IQ")
"""Task header: length of the JSON settings, length of the file."""
RESULT_HEADER = struct.Struct(">BIIIII")
"""Result header: 1, height, width, channels, and height and width of the original; or 0, 0, 0, the length of a JSON
error, 0, 0."""
READY = b"R"
"""Written once after the imports; from then on, time counts against the image."""
MEMORY, MEMORY_PER_PIXEL = 512 * 2**20, 24
"""Bytes of address space on top of the process's initial size: a constant, and per allowed pixel for all copies."""
NICE = 5
"""On few cores, reading requests and running models take precedence over decoding."""


def main() -> None:
    """Decode images from stdin until it is closed; write results to stdout."""
    tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output out of the results
    from vitrail.data.preprocess import Preprocess
    from vitrail.serving.decoding import decode_upload
    from vitrail.serving.http_errors import HttpError

    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    at_start = _address_space()
    _write(results, READY)
    while head := tasks.read(TASK_HEADER.size):
        settings_size, size = TASK_HEADER.unpack(head)
        settings = json.loads(tasks.read(settings_size))
        content = tasks.read(size)
        _limit_memory(at_start + MEMORY + MEMORY_PER_PIXEL * settings["pixels"])
        try:
            upload = decode_upload(
                content, Preprocess(**settings["preprocess"]), settings["formats"], settings["pixels"]
            )
        except HttpError as error:
            body = json.dumps({"status": error.status, "message": error.message}).encode()
            _write(results, RESULT_HEADER.pack(0, 0, 0, len(body), 0, 0), body)
        else:
            _write(results, RESULT_HEADER.pack(1, *upload.pixels.shape, *upload.size), upload.pixels.tobytes())
        del content


def _write(results: BinaryIO, *chunks: bytes) -> None:
    for chunk in chunks:
        results.write(chunk)
    results.flush()


def _address_space() -> int:
    """Return the address space in use; libraries may reserve memory per core."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 2**30


def _limit_memory(limit: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
    sys.exit(0)
