"""The stream is the same however it is cut up, and any step can be worked out by itself."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data import stream as module
from vitrail.data.stream import RankSlice, Stream, evaluation_slice, shuffle
from vitrail.errors import ConfigError, DataError

PURE = settings(deadline=None, derandomize=True, max_examples=150)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Stream, int]:
    """Draw a stream, and a number of parts its batches can be cut into."""
    parts, repeats = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batch = parts * repeats * draw(st.integers(1, 5))
    images = draw(st.integers(1, 60))
    balance = None
    if draw(st.booleans()):
        balance = np.array(draw(st.lists(st.integers(0, 4), min_size=images, max_size=images)), np.int64)
    return Stream(images, batch, draw(st.integers(0, 2**63 - 1)), repeats, balance), parts


@given(made=streams(), steps=st.integers(1, 8), start=st.integers(0, 50))
@PURE
def test_every_way_to_cut_it_gives_the_same_stream(made: tuple[Stream, int], steps: int, start: int) -> None:
    stream, parts = made
    whole = stream.images_at(np.arange(start * stream.batch, (start + steps) * stream.batch))
    cut = [
        stream.images_at(stream.positions(step, RankSlice(part, parts)))
        for step in range(start, start + steps)
        for part in range(parts)
    ]
    assert np.array_equal(np.concatenate(cut), whole)
    assert whole.min() >= 0
    assert whole.max() < stream.images


@given(images=st.integers(1, 200), batch=st.integers(1, 64), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9))
@PURE
def test_an_epoch_shows_every_image_once(images: int, batch: int, seed: int, epoch: int) -> None:
    shown = Stream(images, batch, seed).images_at(np.arange(epoch * images, (epoch + 1) * images))
    assert sorted(shown) == list(range(images))
    assert np.array_equal(shown, shuffle(seed, epoch, images))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(shuffle(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(shuffle(0, 0, 50)) != tuple(shuffle(0, 0, 50, "classes"))


def test_every_image_comes_everywhere_equally_often() -> None:
    places = np.array([[shuffle(7, epoch, 4)[slot] for slot in range(4)] for epoch in range(4800)])
    for slot in range(4):
        frequency = np.bincount(places[:, slot], minlength=4)
        assert abs(frequency - 1200).max() < 5 * np.sqrt(4800 * 0.25 * 0.75)


def test_the_same_in_another_process_and_for_ever() -> None:
    """Raw Philox words are the same on every machine, so these numbers never change."""
    code = "from vitrail.data.stream import shuffle; print(*shuffle(3, 1, 10))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(number) for number in shuffle(3, 1, 10)]
    assert list(shuffle(3, 1, 10)) == [2, 1, 6, 4, 0, 8, 5, 9, 3, 7]


def test_repeats_stand_apart_and_are_all_there() -> None:
    stream = Stream(images=30, batch=12, repeats=3)
    for step in range(10):
        shown = stream.images_at(stream.positions(step))
        assert np.array_equal(shown[:4], shown[4:8])
        assert np.array_equal(shown[:4], shown[8:])
        assert all(shown[i] != shown[i + 1] for i in range(0, 12, 2))
    seen = np.concatenate([stream.images_at(stream.positions(step))[:4] for step in range(15)])
    assert sorted(seen) == sorted([*range(30), *range(30)])
    assert stream.epoch(15) == 2


def test_balance_shows_every_class_equally_often_and_every_image_of_it_in_turn() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [3], np.int64)
    stream = Stream(images=100, batch=9, seed=5, balance=labels)
    shown = stream.images_at(np.arange(900))
    assert np.bincount(labels[shown]).tolist() == [300, 300, 0, 300]
    for label, size in ((0, 90), (1, 9), (3, 1)):
        own = shown[labels[shown] == label]
        for lap in range(300 // size):
            assert len(set(own[lap * size : (lap + 1) * size])) == size
    assert len({tuple(labels[shown[i : i + 3]]) for i in range(0, 900, 3)}) == 6  # the classes come in every order


@given(images=st.integers(0, 500), parts=st.integers(1, 9))
@PURE
def test_evaluation_scores_every_image_exactly_once(images: int, parts: int) -> None:
    shares = [evaluation_slice(images, RankSlice(part, parts)) for part in range(parts)]
    assert [number for share in shares for number in share] == list(range(images))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_cannot_be() -> None:
    with pytest.raises(DataError, match="no images"):
        Stream(0, 8)
    with pytest.raises(ConfigError, match="a batch of 8 cannot show every image 3 times; use a multiple of 3"):
        Stream(10, 8, repeats=3)
    with pytest.raises(ConfigError, match="a batch of 8 cannot be cut into 3 equal parts"):
        Stream(10, 8).positions(0, RankSlice(0, 3))
    with pytest.raises(DataError, match="3 labels for 10 images"):
        Stream(10, 8, balance=np.zeros(3, np.int64))


def test_balancing_large_classes_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.repeat(np.arange(3), 110_000).astype(np.int64)
    stream = Stream(len(labels), 64, balance=labels)
    stream.images_at(stream.positions(0))
    lengths: list[int] = []
    original = module._shuffle

    def counted(seed: int, epoch: int, length: int, what: str) -> module.Numbers:
        lengths.append(length)
        return original(seed, epoch, length, what)

    monkeypatch.setattr(module, "_shuffle", counted)
    for step in range(1, 20):
        stream.images_at(stream.positions(step))
    assert set(lengths) == {3}  # only the order of the classes, which changes with every round


def test_images_of_no_class_are_not_balanced() -> None:
    labels = np.array([-1, 0, 0, 1, -1], np.int64)
    shown = Stream(5, 4, balance=labels).images_at(np.arange(40))
    assert set(shown.tolist()) == {1, 2, 3}


def test_classes_and_laps_have_orders_of_their_own() -> None:
    labels = np.repeat(np.arange(2), 50).astype(np.int64)
    shown = Stream(100, 2, balance=labels).images_at(np.arange(400))
    first, second = (shown[labels[shown] == label] % 50 for label in range(2))
    assert first[:50].tolist() != second[:50].tolist()
    assert first[:50].tolist() != first[50:100].tolist()
