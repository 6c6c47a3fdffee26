"""Compact names, and the index on disk."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sources.index_files import Names, cache_folder, index_file, load_index, save_index, settled
from vitrail.text import printable_path

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)


@PROPERTY
@given(st.lists(st.binary(max_size=30), max_size=40))
def test_names_round_trip(names: list[bytes]) -> None:
    held = pickle.loads(pickle.dumps(Names.of(names)))
    assert len(held) == len(names)
    assert [held[number] for number in range(len(held))] == names
    assert [held[number] for number in range(-len(held), 0)] == names
    for outside in (len(names), -len(names) - 1):
        with pytest.raises(IndexError):
            held[outside]


def test_a_million_names_take_little_memory() -> None:
    names = Names.of(b"image_%07d.jpg" % number for number in range(100_000))
    assert len(pickle.dumps(names)) < 30 * len(names)


@PROPERTY
@given(st.binary(max_size=40))
def test_any_path_is_shown_on_one_line(path: bytes) -> None:
    assert printable_path(path).isprintable()


def test_printable_names_are_unchanged() -> None:
    assert printable_path("photos/Straße/猫 1.jpg") == "photos/Straße/猫 1.jpg"
    assert printable_path(b"caf\xe9/new\nline.jpg") == "caf�/new\\nline.jpg"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VITRAIL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "vitrail"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "vitrail"
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert index_file("folder", ["a"]) == index_file("folder", [os.path.abspath("a")])
    assert len({index_file(kind, [place]) for kind in ("folder", "shards") for place in ("a", "b")}) == 4


def test_index_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "index.npz"
    assert load_index(file, ()) is None
    save_index(file, {"numbers": np.arange(5), "bytes": np.zeros(0, np.uint8)})
    arrays = load_index(file)
    assert load_index(file, ("others",)) is None
    assert arrays is not None
    assert {name: array.tolist() for name, array in arrays.items()} == {"numbers": [0, 1, 2, 3, 4], "bytes": []}
    assert list(file.parent.iterdir()) == [file]


def test_corruption_anywhere_in_an_index_is_noticed(tmp_path: Path) -> None:
    """If a flipped byte is harmless (such as a timestamp in the archive), the arrays are those that were saved."""
    file = tmp_path / "index.npz"
    save_index(file, {"numbers": np.arange(3)})
    good = file.read_bytes()
    for place in range(0, len(good), 3):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        arrays = load_index(file, ("numbers",))
        assert arrays is None or arrays["numbers"].tolist() == [0, 1, 2]
    for length in range(0, len(good), 31):
        file.write_bytes(good[:length])
        assert load_index(file, ("numbers",)) is None


def test_an_unwritable_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    save_index(tmp_path / "file" / "index.npz", {"numbers": np.arange(3)})
    (tmp_path / "index.npz").mkdir()
    save_index(tmp_path / "index.npz", {"numbers": np.arange(3)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "index.npz"]


def test_recent_changes_are_not_settled() -> None:
    second = 1_000_000_000
    assert settled(np.array([10 * second]), 13 * second)
    assert not settled(np.array([10 * second, 12 * second]), 13 * second)
    assert not settled(np.array([20 * second]), 13 * second)  # a clock that is ahead
    assert settled(np.zeros(0, np.int64), 0)
