"""What labels look like: classes, several labels per image, or numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.cells import Cell, Reading, cell_of
from vitrail.data.sources.kinds import JOINTS, candidates, decide, decide_columns
from vitrail.data.sources.targets import AUTOMATIC, Labelling
from vitrail.errors import DataError

WORDS = st.lists(st.text("abcdefgh ", min_size=1).filter(str.strip), min_size=1, max_size=8, unique_by=str.strip)


def read(*labels: object, each: int = 3, labelling: Labelling = AUTOMATIC, many: bool = True) -> Reading:
    cells: dict[Cell, int] = dict.fromkeys((cell_of(label, "here") for label in labels), each)
    return decide(cells, labelling, "label", many=many)


@given(WORDS)
def test_words_are_classes(words: list[str]) -> None:
    assert read(*words) == Reading()


@given(st.sampled_from(JOINTS), st.integers(2, 5))
def test_joined_words_are_labels(joint: str, count: int) -> None:
    words = [f"word{number}" for number in range(count)]
    choices = [joint.join(some) for size in (1, 2) for some in itertools.combinations(words, size)]
    reading = read(*choices)
    assert reading[:3] == ("labels", "cells", joint)
    assert reading.reason == f"label holds several labels per image, such as 'word0{joint}word1'"
    assert read(*choices, labelling=Labelling("classes")) == Reading()


@given(st.lists(st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer()), min_size=1, unique=True))
def test_fractions_are_numbers(numbers: list[float]) -> None:
    reading = read(*map(repr, numbers))
    assert reading[:3] == ("values", "cells", None)
    assert reading.reason == f"label has numbers with fractions ({numbers[0]!r})"
    assert read(*numbers) == reading


@given(st.sets(st.integers(-1000, 1000), min_size=1))
def test_integers_with_several_images_each_are_classes(numbers: set[int]) -> None:
    assert read(*map(str, numbers), each=2) == Reading()
    assert read(*(f"{number}.0" for number in numbers), each=2) == Reading()
    assert read("unknown", *(f"{number}.5" for number in numbers)) == Reading()  # not all are numbers


def test_many_integers_with_few_images_each_are_numbers() -> None:
    assert read(*range(30), each=1).reason == "label has 30 different numbers for 30 images"
    assert read(*range(30), each=1, many=False) == Reading()  # of few images to evaluate
    assert read(*range(19), each=1) == Reading()


def test_names_with_commas_are_classes() -> None:
    """As in ImageNet, where a piece of one name is sometimes the name of another class."""
    for names in (
        ("tench, Tinca tinca", "missile", "projectile, missile", "maillot", "maillot, tank suit", "organism, being"),
        ("crane", "crane, lifting machine", "crane, wading bird", "ear, spike, capitulum", "spike"),
    ):
        assert read(*names) == Reading()
        assert read(*names, labelling=Labelling("labels")).separator == ","


def test_lists() -> None:
    assert read(["cat"], ["cat", "dog"], []) == Reading(
        "labels", "cells", None, "label holds several labels per image, such as ['cat', 'dog']"
    )
    assert read([0, 1], [1, 1])[:2] == ("labels", "vectors")
    assert read([0.5, 1], [2, 3])[:2] == ("values", "vectors")
    assert read([3, 1], [2])[:2] == ("labels", "cells")
    assert read([0.5])[:2] == ("values", "vectors")
    with pytest.raises(DataError, match="label has one-hot labels, one 1 per image; give one label per image"):
        read([0, 0, 1], [0, 1, 0])
    assert read([0, 0, 1], [0, 1, 0], labelling=Labelling("labels"))[:2] == ("labels", "vectors")


@pytest.mark.parametrize(
    ("text", "cell"), [("['a', 'b']", ("a", "b")), ('["a",  "b "]', ("a", "b")), ("[1, 2.0]", ("1", "2")), ("[]", ())]
)
def test_lists_in_texts(text: str, cell: Cell) -> None:
    assert cell_of(text, "here") == cell


@pytest.mark.parametrize("text", ["[a]", "[" * 5000 + "]" * 5000, "[['a']]", "[None]", "['a' for a in b]"])
def test_texts_that_are_not_lists(text: str) -> None:
    with pytest.raises(DataError, match=r"^here has "):
        cell_of(text, "here")


def test_columns() -> None:
    def several(*rows: tuple[object, ...], labelling: Labelling = AUTOMATIC, strict: bool = False) -> Reading | None:
        return decide_columns(rows, tuple("abcd"[: len(rows[0])]), labelling, strict=strict)

    assert several((0, "1"), (True, "False"), ("1.0", 0)) == Reading("labels", "columns", None, "2 columns of 0 and 1")
    assert several((0, 1), (2, 1)) == Reading("values", "columns", None, "2 columns of numbers")
    assert several((0, 1), (2, "x")) is None
    assert several((0, 1), (0, "")) == Reading("labels", "columns", None, "2 columns of 0 and 1")
    assert several((0, 1), (0, ""), strict=True) is None
    assert several((0,), (1,)) is None
    assert several((3,), (1,)) is None  # a class_id, perhaps
    assert several((0.5,), (1,)) == Reading("values", "columns", None, "a has numbers with fractions (0.5)")
    assert several((0,), (1,), labelling=Labelling("labels")) == Reading("labels", "columns", None, "a holds 0 and 1")
    assert several((0, 1), labelling=Labelling("values"))[:2] == ("values", "columns")
    assert several((0, 1), labelling=Labelling("classes")) is None
    assert candidates(["id", "Unnamed: 0", "", "cat", "dog", "cat"]) == ("cat", "dog")


def test_a_column_named_labels_may_hold_several() -> None:
    cells: dict[Cell, int] = {"cat;dog": 5, "dog;outdoor": 5}
    assert decide(cells, AUTOMATIC, "label") == Reading(), "dog is shared, but cat and outdoor are not"
    assert decide(cells, AUTOMATIC, "Labels")[:3] == ("labels", "cells", ";")
