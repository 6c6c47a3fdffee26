"""The base class of every config."""

import pytest

from vitrail.errors import ConfigError, DataError, VitrailError, suggest
from vitrail.schema import Count, Frozen, Pair, Positive


class Inner(Frozen):
    size: Positive = 1


class Outer(Frozen):
    name: str
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    pair: Pair = (1, 1)
    count: Count = 0


def test_errors_in_nested_configs_have_their_path() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer.model_validate({"name": "x", "inner": {"size": 0}, "many": ({"size": 1}, {"siz": 2})})
    assert "inner.size is 0: input should be greater than 0" in str(caught.value)
    assert "no option 'many.1.siz'; did you mean 'size'?" in str(caught.value)


def test_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match="Outer needs name"):
        Outer.model_validate({})


def test_a_failed_check_leaves_no_trace() -> None:
    """After an error in a nested config, validation starts at the outer level again."""
    for _ in range(2):
        with pytest.raises(ConfigError, match="count is -1"):
            Outer(name="x", count=-1)
    with pytest.raises(ConfigError):
        Inner(size=0)


def test_pairs() -> None:
    assert Outer.model_validate({"name": "x", "pair": 3}).pair == (3, 3)
    assert Outer.model_validate({"name": "x", "pair": [3, 4]}).pair == (3, 4)
    for bad in (True, "3", (1,), (1, 2, 3), (1, -1), None, 2.0):
        with pytest.raises(ConfigError, match="pair"):
            Outer.model_validate({"name": "x", "pair": bad})


def test_replace_and_equality() -> None:
    outer = Outer(name="x")
    assert outer.replace(count=2) == Outer(name="x", count=2)
    assert outer == Outer(name="x")
    assert hash(outer) == hash(Outer(name="x"))


def test_suggestions() -> None:
    assert suggest("widht", ["width", "depth"]) == "; did you mean 'width'?"
    assert suggest("zzz", ["width"]) == ""


def test_the_error_tree_is_not_swallowed_by_pydantic() -> None:
    assert issubclass(DataError, VitrailError)
    assert not issubclass(VitrailError, ValueError)
