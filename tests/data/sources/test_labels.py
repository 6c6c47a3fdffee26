"""Which labels are classes, and which are clearly not."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.labels import JOINTS, check_classes
from vitrail.errors import DataError

WORDS = st.lists(st.text("abcdefgh ", min_size=1).filter(str.strip), min_size=1, max_size=8, unique_by=str.strip)


def check(*labels: str, each: int = 3) -> None:
    check_classes(dict.fromkeys(labels, each), "list.csv", "say so")


@given(WORDS)
def test_words_are_classes(words: list[str]) -> None:
    check(*words)


@given(st.sampled_from(JOINTS), st.integers(2, 5))
def test_joined_labels_raise(joint: str, count: int) -> None:
    words = [f"word{number}" for number in range(count)]
    choices = [joint.join(some) for size in (1, 2) for some in itertools.combinations(words, size)]
    with pytest.raises(DataError, match="look like several joined by"):
        check(*choices)


@given(st.lists(st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer()), min_size=1, unique=True))
def test_fractional_numbers_raise(numbers: list[float]) -> None:
    with pytest.raises(DataError, match="regression is not supported yet"):
        check(*map(repr, numbers))


@given(st.sets(st.integers(-1000, 1000), min_size=1))
def test_integers_with_several_images_each_are_classes(numbers: set[int]) -> None:
    check(*map(str, numbers), each=2)
    check(*(f"{number}.0" for number in numbers), each=2)
    check("unknown", *(f"{number}.5" for number in numbers))  # not all are numbers, so they are names


def test_names_with_commas_are_classes() -> None:
    """As in ImageNet, where a piece of one name is sometimes the name of another class."""
    check("tench, Tinca tinca", "missile", "projectile, missile", "maillot", "maillot, tank suit", "organism, being")
    check("crane", "crane, lifting machine", "crane, wading bird", "ear, spike, capitulum", "spike")
