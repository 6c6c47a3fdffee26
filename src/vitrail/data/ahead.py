"""`ahead`: what an iterator gives, made by a thread while the caller is busy with what came before."""

import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, NamedTuple, TypeVar

Made = TypeVar("Made")


class _Ended(NamedTuple):
    """Takes the place of the next thing when there is none."""

    error: BaseException | None


def ahead(source: Iterator[Made], most: int = 2) -> Generator[Made, None, None]:
    """Give what `source` gives, in its order, while a thread takes up to `most` more from it.

    What `source` raises is raised here, in its place. When the caller leaves, the thread ends before this generator
    does, so whoever closes it may go on to close `source`.
    """
    made: Queue[Any] = Queue(maxsize=most)
    left = threading.Event()
    thread = threading.Thread(target=_take, args=(source, made, left), name="ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(one := made.get(), _Ended):
            yield one
            del one  # so that it is not kept while the next one is waited for
        if one.error is not None:
            raise one.error
    finally:
        left.set()
        with suppress(Empty):  # there may be a last thing that waits for room, and no more than one
            while True:
                made.get_nowait()
        thread.join()


def _take(source: Iterator[Any], made: "Queue[Any]", left: threading.Event) -> None:
    try:
        for one in source:
            made.put(one)
            if left.is_set():
                return
    except BaseException as error:  # whatever it is, the caller is to see it
        made.put(_Ended(error))
    else:
        made.put(_Ended(None))
