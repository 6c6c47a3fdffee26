"""What a thread takes ahead is what the iterator gives, and the thread ends with its caller."""

import multiprocessing
import threading
from collections.abc import Generator, Iterator
from contextlib import closing

import pytest
import torch
from torch.utils.data import Dataset

from vitrail.data.ahead import ahead
from vitrail.data.batches import made_ahead


class MakingError(Exception):
    """Something that goes wrong while things are made."""


class Squares(Dataset[torch.Tensor]):
    """What workers make."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(number**2)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "ahead"] == []
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("length", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_everything_in_order(length: int, most: int) -> None:
    assert list(ahead(iter(range(length)), most)) == list(range(length))


def test_it_is_made_by_another_thread() -> None:
    made_by = (threading.current_thread() for _ in range(3))
    assert threading.current_thread() not in list(ahead(made_by))


def test_so_many_are_taken_ahead_and_no_more() -> None:
    taken, enough = list[int](), threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            if number == 3:
                enough.set()
            yield number

    with closing(ahead(numbers(), 2)) as found:
        assert next(found) == 0
        assert enough.wait(60)  # one was given, two wait, and one waits for room
        assert next(found) == 1
    assert len(taken) <= 6


def test_an_exception_comes_in_its_place() -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2)
        raise MakingError("the third")

    found = ahead(numbers(), 5)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(MakingError, match="the third"):
        next(found)
    assert list(found) == []


@pytest.mark.parametrize("given", [0, 1, 4])
def test_leaving_early(given: int) -> None:
    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 7
        finally:
            closed.set()

    def interrupted() -> None:
        with closing(endless()) as source, closing(ahead(source)) as found:
            assert [next(found) for _ in range(given)] == [7] * given
            raise KeyboardInterrupt

    closed = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert closed.is_set() == (given > 0)  # one that was never asked has nothing to end


@pytest.mark.parametrize("given", [1, 5])
def test_workers_end_with_the_caller(given: int) -> None:
    with closing(made_ahead(Squares(), range(1000), workers=2)) as source, closing(ahead(source)) as found:
        assert [int(next(found)) for _ in range(given)] == [number**2 for number in range(given)]


def test_workers_to_the_end() -> None:
    assert [int(one) for one in ahead(made_ahead(Squares(), range(20), workers=2))] == [n**2 for n in range(20)]
