"""The stream does not depend on how it is sliced, and any step can be computed on its own."""

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
    """Draw a stream, and a world size that its batches can be split over."""
    world_size, repeats = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batch = world_size * repeats * draw(st.integers(1, 5))
    images = draw(st.integers(1, 60))
    balance = None
    if draw(st.booleans()):
        balance = np.array(draw(st.lists(st.integers(0, 4), min_size=images, max_size=images)), np.int64)
    return Stream(images, batch, draw(st.integers(0, 2**63 - 1)), repeats, balance), world_size


@given(made=streams(), steps=st.integers(1, 8), start=st.integers(0, 50))
@PURE
def test_any_slicing_gives_the_same_stream(made: tuple[Stream, int], steps: int, start: int) -> None:
    stream, world_size = made
    whole = stream.images_at(np.arange(start * stream.batch, (start + steps) * stream.batch))
    cut = [
        stream.images_at(stream.positions(step, RankSlice(rank, world_size)))
        for step in range(start, start + steps)
        for rank in range(world_size)
    ]
    assert np.array_equal(np.concatenate(cut), whole)
    assert whole.min() >= 0
    assert whole.max() < stream.images


@given(images=st.integers(1, 200), batch=st.integers(1, 64), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9))
@PURE
def test_an_epoch_has_every_image_once(images: int, batch: int, seed: int, epoch: int) -> None:
    shown = Stream(images, batch, seed).images_at(np.arange(epoch * images, (epoch + 1) * images))
    assert sorted(shown) == list(range(images))
    assert np.array_equal(shown, shuffle(seed, epoch, images))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(shuffle(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(shuffle(0, 0, 50)) != tuple(shuffle(0, 0, 50, "classes"))


def test_every_image_is_equally_likely_at_every_position() -> None:
    places = np.array([[shuffle(7, epoch, 4)[slot] for slot in range(4)] for epoch in range(4800)])
    for slot in range(4):
        frequency = np.bincount(places[:, slot], minlength=4)
        assert abs(frequency - 1200).max() < 5 * np.sqrt(4800 * 0.25 * 0.75)


@pytest.mark.slow
def test_shuffle_is_stable_across_processes_and_versions() -> None:
    """Raw Philox words are the same on every machine, so these numbers must never change."""
    code = "from vitrail.data.stream import shuffle; print(*shuffle(3, 1, 10))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(number) for number in shuffle(3, 1, 10)]
    assert list(shuffle(3, 1, 10)) == [2, 1, 6, 4, 0, 8, 5, 9, 3, 7]


def test_repeats_are_never_neighbours() -> None:
    stream = Stream(images=30, batch=12, repeats=3)
    for step in range(10):
        shown = stream.images_at(stream.positions(step))
        assert np.array_equal(shown[:4], shown[4:8])
        assert np.array_equal(shown[:4], shown[8:])
        assert all(shown[i] != shown[i + 1] for i in range(0, 12, 2))
    seen = np.concatenate([stream.images_at(stream.positions(step))[:4] for step in range(15)])
    assert sorted(seen) == sorted([*range(30), *range(30)])
    assert stream.epoch(15) == 2


def test_balance_samples_classes_equally_and_cycles_through_their_images() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [3], np.int64)
    stream = Stream(images=100, batch=9, seed=5, balance=labels)
    shown = stream.images_at(np.arange(900))
    assert np.bincount(labels[shown]).tolist() == [300, 300, 0, 300]
    for label, size in ((0, 90), (1, 9), (3, 1)):
        own = shown[labels[shown] == label]
        for lap in range(300 // size):
            assert len(set(own[lap * size : (lap + 1) * size])) == size
    assert len({tuple(labels[shown[i : i + 3]]) for i in range(0, 900, 3)}) == 6  # the classes come in every order


@given(images=st.integers(0, 500), world_size=st.integers(1, 9))
@PURE
def test_evaluation_slices_cover_every_image_once(images: int, world_size: int) -> None:
    slices = [evaluation_slice(images, RankSlice(rank, world_size)) for rank in range(world_size)]
    assert [number for indices in slices for number in indices] == list(range(images))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_invalid_settings() -> None:
    with pytest.raises(DataError, match="no images to train on"):
        Stream(0, 8)
    with pytest.raises(ConfigError, match="a batch of 8 cannot contain every image 3 times; use a multiple of 3"):
        Stream(10, 8, repeats=3)
    with pytest.raises(ConfigError, match="a batch of 8 cannot be split evenly over 3 processes"):
        Stream(10, 8).positions(0, RankSlice(0, 3))
    with pytest.raises(DataError, match="3 labels for 10 images"):
        Stream(10, 8, balance=np.zeros(3, np.int64))


def test_balancing_large_classes_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.repeat(np.arange(3), 110_000).astype(np.int64)
    stream = Stream(len(labels), 64, balance=labels)
    stream.images_at(stream.positions(0))
    lengths: list[int] = []
    original = module._shuffle

    def counted(seed: int, epoch: int, length: int, what: str) -> module.Positions:
        lengths.append(length)
        return original(seed, epoch, length, what)

    monkeypatch.setattr(module, "_shuffle", counted)
    for step in range(1, 20):
        stream.images_at(stream.positions(step))
    assert set(lengths) == {3}  # only the order of the classes, which changes with every round


def test_balance_skips_images_without_a_class() -> None:
    labels = np.array([-1, 0, 0, 1, -1], np.int64)
    shown = Stream(5, 4, balance=labels).images_at(np.arange(40))
    assert set(shown.tolist()) == {1, 2, 3}


def test_classes_and_epochs_are_shuffled_independently() -> None:
    labels = np.repeat(np.arange(2), 50).astype(np.int64)
    shown = Stream(100, 2, balance=labels).images_at(np.arange(400))
    first, second = (shown[labels[shown] == label] % 50 for label in range(2))
    assert first[:50].tolist() != second[:50].tolist()
    assert first[:50].tolist() != first[50:100].tolist()
