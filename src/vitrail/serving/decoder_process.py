"""A process that decodes one image at a time, as `python -m vitrail.serving.decoder_process`, and can be killed.

What a decoder of images does with a hostile file is not in our hands: here it has its own memory, with a limit, and
whoever started it ends it when it takes too long. It ends by itself when nobody writes to it any more.
"""

import contextlib
import json
import os
import struct
import sys
from typing import BinaryIO

HEAD = struct.Struct(">IQ")
"""Before a task: how long its settings are, as JSON, and its file."""
MADE = struct.Struct(">BIII")
"""Before a result: whether there is one, then height, width and channels; or 0, 0 and the length of a JSON."""
READY = b"R"
"""Said once, when everything is imported: from then on it is the image that takes the time."""
ROOM, ROOM_PER_PIXEL = 512 * 2**20, 24
"""Bytes of address space beside what the program has at its start: for every image, and for every pixel that one may
have, in all the copies made of it."""
NICE = 5
"""Requests are read and models compute before images are decoded, where there are too few cores for all."""


def main() -> None:
    """Decode what comes on stdin until it ends; results go to stdout."""
    tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no result
    from vitrail.data.preprocess import Preprocess
    from vitrail.serving.decoding import decode_upload
    from vitrail.serving.http_errors import HttpError

    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    at_start = _address_space()
    _write(results, READY)
    while head := tasks.read(HEAD.size):
        words, size = HEAD.unpack(head)
        asked = json.loads(tasks.read(words))
        content = tasks.read(size)
        _limit_memory(at_start + ROOM + ROOM_PER_PIXEL * asked["pixels"])
        try:
            made = decode_upload(content, Preprocess(**asked["preprocess"]), asked["formats"], asked["pixels"])
        except HttpError as refusal:
            said = json.dumps({"status": refusal.status, "sentence": refusal.sentence}).encode()
            _write(results, MADE.pack(0, 0, 0, len(said)), said)
        else:
            _write(results, MADE.pack(1, *made.shape), made.tobytes())
        del content


def _write(results: BinaryIO, *parts: bytes) -> None:
    for part in parts:
        results.write(part)
    results.flush()


def _address_space() -> int:
    """Return how many bytes the program has: more where a library makes room for every core."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 2**30


def _limit_memory(most: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has none
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
    sys.exit(0)
