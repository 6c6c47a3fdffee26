"""Batches of images with masks: the masks go where the images go, whoever makes a batch."""

import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.support.mask_data import write_shapes

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Affine, Augmentation
from vitrail.data.augmentation.draws import draws
from vitrail.data.augmentation.masks import apply_to_mask
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.batches import Batch, Evaluation, Training, evaluation_batches, training_batches
from vitrail.data.cache import CacheSize, cached
from vitrail.data.decoder_choice import choose_for_source
from vitrail.data.preprocess import Preprocess
from vitrail.data.resident import Resident
from vitrail.data.sources.masks import IGNORED_PIXEL, mask_at
from vitrail.data.sources.opening import open_data, open_source
from vitrail.data.sources.source import Source
from vitrail.data.sources.splits import split_of
from vitrail.data.stream import RankSlice, Stream
from vitrail.errors import ConfigError, DataError

SIZE = (24, 32)
PRE = Preprocess(size=SIZE)
STRONG = Augmentation(
    crop="padded", rotation=30, affine=Affine(translate=(0.2, 0.2)), flip_vertical=0.5, erasing=0.5,
    randaugment=RandAugment(layers=2, magnitude=10),
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Images of two sizes, the first of them large JPEGs."""
    folder = write_shapes(tmp_path_factory.mktemp("shapes"), 14, (40, 52))
    other = write_shapes(tmp_path_factory.mktemp("large"), 3, (300, 200), seed=1)
    for number in range(3):
        with Image.open(other / "images" / f"{number:04}.png") as image:
            image.save(folder / "images" / f"large{number}.jpg")
        shutil.copy(other / "masks" / f"{number:04}.png", folder / "masks" / f"large{number}.png")
    return open_source(folder)


def training(source: Source, batch: int = 8, preprocess: Preprocess = PRE, **fields: Any) -> Training:
    given = {"augmentation": Augmentation(), **fields}
    return Training(source, Stream(len(source), batch, seed=3), preprocess, **given)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:5], other[:5], strict=True)) and one.bad == other.bad


def by_hand(data: Training, step: int) -> NDArray[np.uint8]:
    """Return the masks of a step: each with the plan of its image."""
    positions = data.stream.positions(step)
    masks = []
    for index, position in zip(data.stream.images_at(positions).tolist(), positions.tolist(), strict=True):
        mask = mask_at(data.source, index)
        (height, width), size = mask.shape, data.preprocess.size
        plan = augment.plan(data.augmentation, height, width, size, draws(data.stream.seed, position))
        masks.append(apply_to_mask(plan, mask, data.preprocess.size, IGNORED_PIXEL))
    return np.stack(masks)


@given(
    augmentation=st.builds(
        Augmentation,
        crop=st.sampled_from(["inception", "inception_tf", "simple", "padded", "none"]),
        flip_vertical=st.sampled_from([0.0, 0.5]),
        rotation=st.sampled_from([0.0, 20.0]),
        erasing=st.sampled_from([0.0, 1.0]),
        randaugment=st.sampled_from([None, RandAugment(layers=2, magnitude=10)]),
    ),
    step=st.integers(0, 1000),
)
@settings(deadline=None, derandomize=True, max_examples=25)
def test_masks_follow_the_plans_of_their_images(source: Source, augmentation: Augmentation, step: int) -> None:
    data = training(source, augmentation=augmentation)
    batch = data[step]
    assert isinstance(batch, Batch)
    assert (batch.labels.shape, batch.labels.dtype) == ((8, *SIZE), torch.uint8)
    assert (batch.labels.numpy() == by_hand(data, step)).all()


def test_images_are_those_without_masks(source: Source, tmp_path: Path) -> None:
    """Masks change nothing about the pixels of a batch."""
    shutil.copytree(Path(source.name(0)).parent, tmp_path / "images")
    plain = training(open_source(tmp_path), augmentation=STRONG)
    masked = training(source, augmentation=STRONG)
    for step in range(3):
        one, other = plain[step], masked[step]
        assert isinstance(one, Batch)
        assert isinstance(other, Batch)
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.indices, other.indices)


def test_a_mask_covers_its_object(tmp_path: Path) -> None:
    """Images that show their masks still do, whatever is done to both."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(8):
        mask = np.zeros((80, 100), np.uint8)
        mask[10 + number : 50, 20 : 70 + number] = 1
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
        Image.fromarray(np.where(mask, 250, 100).astype(np.uint8)).save(tmp_path / "images" / f"{number}.png")
    shown = open_source(tmp_path)
    augmentation = Augmentation(rotation=30, flip_vertical=0.5, affine=Affine(translate=(0.2, 0.2)), fill=0)
    grey = Preprocess(size=SIZE, channels=1, mean=(0.5,), std=(0.5,))
    for step in range(4):
        batch = training(shown, preprocess=grey, augmentation=augmentation)[step]
        assert isinstance(batch, Batch)
        pixels, masks = batch.pixels[:, 0].numpy(), batch.labels.numpy()
        assert (pixels[masks == 1] > 175).mean() > 0.95  # all but the edges
        assert (abs(pixels[masks == 0].astype(int) - 100) < 75).mean() > 0.97
        assert (pixels[masks == IGNORED_PIXEL] < 110).mean() > 0.95
    for resize in ("squash", "cover", "contain"):
        preprocess = grey.replace(resize=resize)
        (batch,) = evaluation_batches(Evaluation(shown, preprocess, 8), workers=0)
        pixels, masks = batch.pixels[:, 0].numpy(), batch.labels.numpy()
        assert ((pixels > 175) == (masks == 1)).mean() > 0.98


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_make_the_same_batches(source: Source, workers: int) -> None:
    data = training(source, augmentation=STRONG)
    made = list(training_batches(data, 2, 8, workers=workers))
    for step, batch in enumerate(made, start=2):  # all of them: each slot was used several times
        expected = data[step]
        assert isinstance(expected, Batch)
        assert same(batch, expected)
    assert data.batch_bytes == 8 * 4 * SIZE[0] * SIZE[1]
    evaluation = Evaluation(source, PRE, 5)
    for one, other in zip(
        evaluation_batches(evaluation, workers=workers), evaluation_batches(evaluation, workers=0), strict=True
    ):
        assert same(one, other)


def test_resuming_and_slicing_change_nothing(source: Source) -> None:
    data = training(source, augmentation=STRONG)
    straight = list(training_batches(data, 0, 4, workers=0))
    assert same(next(iter(training_batches(data, 3, 4, workers=0))), straight[3])
    parts = [training(source, augmentation=STRONG, rank_slice=RankSlice(rank, 2))[1] for rank in range(2)]
    assert all(isinstance(part, Batch) for part in parts)
    assert torch.equal(torch.cat([part.labels for part in parts]), straight[1].labels)
    micros = [straight[1].micro(number, 4) for number in range(4)]
    assert all(micro.labels.shape == (2, *SIZE) for micro in micros)
    assert torch.equal(torch.cat([micro.labels for micro in micros]), straight[1].labels)
    assert torch.equal(torch.cat([part.labels for part in straight[1].slices(3)]), straight[1].labels)
    assert (straight[1].lam == 1).all()


@pytest.mark.parametrize("resize", ["squash", "cover", "contain"])
@pytest.mark.parametrize("resize_to", [None, (30, 44)])
@pytest.mark.parametrize("half", ["even", "down"])
def test_evaluation_resizes_masks_as_images(
    source: Source, resize: Literal["squash", "cover", "contain"], resize_to: tuple[int, int] | None, half: Any
) -> None:
    """With the nearest filter, an image of the mask itself has the mask's pixels, and the mean colour around it."""
    preprocess = Preprocess(
        size=SIZE, resize=resize, resize_to=resize_to, half=half, interpolation="nearest", channels=1, mean=(1.0,),
        std=(0.5,),
    )  # fmt: skip
    (batch,) = evaluation_batches(Evaluation(source, preprocess, len(source)), workers=0)
    for index in range(len(source)):
        mask = mask_at(source, index)
        expected = preprocess.fit(mask[:, :, None])[:, :, 0]
        assert (batch.labels[index].numpy() == expected).all()
    # Without a crop, training starts from the same mask.
    data = training(source, preprocess=preprocess, augmentation=Augmentation(crop="none", flip=0))
    trained = data[0]
    assert isinstance(trained, Batch)
    for row, index in enumerate(trained.indices.tolist()):
        assert torch.equal(trained.labels[row], batch.labels[index])


@pytest.mark.parametrize("resize", ["contain", "squash"])
def test_padding_is_ignored(source: Source, resize: Literal["contain", "squash"]) -> None:
    smaller = PRE.replace(resize=resize, resize_to=(12, 16))
    (batch,) = evaluation_batches(Evaluation(source, smaller, len(source)), workers=0)
    assert (batch.labels[:, 6:18, 8:24] < 3).any(dim=(1, 2)).all()
    assert (batch.labels[:, :6] == IGNORED_PIXEL).all()
    assert (batch.labels[:, :, 24:] == IGNORED_PIXEL).all()


def test_a_subset_has_its_own_masks(source: Source) -> None:
    part = split_of(source, np.array([5, 2, 9]))
    (batch,) = evaluation_batches(Evaluation(part, PRE, 3), workers=0)
    (whole,) = evaluation_batches(Evaluation(source, PRE, len(source)), workers=0)
    assert torch.equal(batch.labels, whole.labels[[5, 2, 9]])


def test_ranks_evaluate_every_image_once(source: Source) -> None:
    slices = [Evaluation(source, PRE, 4, rank_slice=RankSlice(rank, 3)) for rank in range(3)]
    labels = [batch.labels for one in slices for batch in evaluation_batches(one, workers=0)]
    (whole,) = evaluation_batches(Evaluation(source, PRE, len(source)), workers=0)
    assert torch.equal(torch.cat(labels), whole.labels)


def test_an_image_whose_mask_is_gone_is_replaced_or_refused(tmp_path: Path) -> None:
    source = open_source(write_shapes(tmp_path, 8, 20))
    (tmp_path / "masks" / "0003.png").unlink()
    with Image.open(tmp_path / "masks" / "0005.png") as mask:
        smaller = mask.resize((10, 10))
    smaller.save(tmp_path / "masks" / "0005.png")
    reasons = {
        "0003.png": r"the mask .*0003.png cannot be read: No such file",
        "0005.png": r"its mask has 10×10 pixels, but the image 20×20; run vitrail check",
    }
    batch = training(source)[0]
    assert isinstance(batch, Batch)
    assert sorted(bad.name[-8:] for bad in batch.bad) == sorted(reasons)
    assert not set(batch.indices.tolist()) & {3, 5}
    assert (batch.labels[batch.indices == 4][0].numpy() < 3).all()
    (kept,) = evaluation_batches(Evaluation(source, PRE, 8, bad_files="skip"), workers=0)
    assert kept.indices.tolist() == [0, 1, 2, 4, 6, 7]
    expected = [PRE.fit_mask(mask_at(source, index), IGNORED_PIXEL) for index in kept.indices.tolist()]
    assert (kept.labels.numpy() == np.stack(expected)).all()
    for name, reason in reasons.items():
        one = split_of(source, np.array([int(name[:4])]))
        with pytest.raises(DataError, match=reason):
            list(evaluation_batches(Evaluation(one, PRE, 1), workers=0))


def test_what_masks_do_not_support(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixup and CutMix do not mix masks; turn mixing off"):
        training(source, mixing=Mixing(mixup=0.2))
    with pytest.raises(ConfigError, match="images with masks cannot be cached: a mask has the size of its image"):
        cached(source, CacheSize(16), folder=tmp_path)
    with pytest.raises(ConfigError, match="images with masks are augmented on the CPU, so they cannot be kept on the"):
        Resident(training(source), torch.device("cpu"), 0)


def test_masks_are_decoded_on_the_cpu(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.decoder_choice.DEVICES", ("cuda", "cpu"))
    auto = choose_for_source("auto", torch.device("cpu"), PRE, source)
    assert (auto.name, auto.reason) == ("cpu", "masks are cropped and moved with their images on the CPU")
    with pytest.raises(
        ConfigError, match="decode is gpu, but masks are cropped and moved with their images on the CPU"
    ):
        choose_for_source("gpu", torch.device("cpu"), PRE, source)


def test_splits_give_batches(tmp_path: Path) -> None:
    splits = open_data(write_shapes(tmp_path, 20, 16))
    batch = training(splits.train)[0]
    assert isinstance(batch, Batch)
    assert set(batch.labels.unique().tolist()) == {0, 1, 2}
