"""Batches decoded by nvImageCodec are those decoded by us: the same images, draws and unreadable files.

nvImageCodec runs here on the CPU; tests/data/test_gpu_decoding_gpu.py has the same on a GPU.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.jpeg_files import ENDINGS, MixedFiles, jpeg, photo

from vitrail.data import gpu_decoding
from vitrail.data.augmentation.augment import Augmentation, preset
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.batches import Batch, Evaluation, Training, evaluation_batches, training_batches
from vitrail.data.decode import decode, open_image
from vitrail.data.device_resize import FILTERS, Window, evaluation_window, resize
from vitrail.data.encoded import EncodedBatch, encoded, end_of_baseline, pack_images
from vitrail.data.gpu_batches import evaluation_output, gpu_evaluation_batches, gpu_training_batches
from vitrail.data.gpu_decoding import GpuDecoder
from vitrail.data.packing import PackedArrays
from vitrail.data.preprocess import Preprocess
from vitrail.data.stream import RankSlice, Stream
from vitrail.errors import DataError

CPU = torch.device("cpu")
SIZE = (32, 40)


@pytest.fixture(scope="module")
def decoder() -> GpuDecoder:
    return GpuDecoder(CPU)


# ── resizing ──


@settings(max_examples=60, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    resize_to=st.none() | st.tuples(st.integers(8, 60), st.integers(8, 60)),
    how=st.sampled_from(["squash", "cover", "contain"]),
    interpolation=st.sampled_from(sorted(FILTERS)),
    half=st.sampled_from(["even", "down"]),
    seed=st.integers(0, 99),
)
def test_resizes_as_pillow(
    sides: tuple[int, int], resize_to: tuple[int, int] | None, how: str, interpolation: str, half: str, seed: int
) -> None:
    preprocess = Preprocess(size=(24, 31), resize=how, resize_to=resize_to, interpolation=interpolation, half=half)
    pixels = np.random.default_rng(seed).integers(90, 166, (*sides, 3), np.uint8)  # without overshoots
    window = evaluation_window(preprocess, *sides)
    axes = torch.tensor([[*window.rows, *window.columns]])
    fill = preprocess.padding() if window.is_padded(preprocess.size) else None
    made = resize([torch.from_numpy(pixels).permute(2, 0, 1)], axes, preprocess.size, interpolation, fill)
    difference = np.abs(made[0].permute(1, 2, 0).numpy().astype(int) - preprocess.fit(pixels))
    assert difference.max() <= 2  # each axis rounds once, and a sum near the middle may round either way
    assert difference.mean() < 0.5


def test_images_of_a_batch_do_not_affect_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (3, h, w), dtype=torch.uint8, generator=generator) for h, w in ((9, 50), (70, 12))]
    preprocess = Preprocess(size=SIZE, resize="contain")
    windows = [evaluation_window(preprocess, *image.shape[1:]) for image in images]
    axes = torch.tensor([[*window.rows, *window.columns] for window in windows])
    together = resize(images, axes, SIZE, "bicubic", (1, 2, 3))
    for number, image in enumerate(images):
        assert torch.equal(resize([image], axes[[number]], SIZE, "bicubic", (1, 2, 3))[0], together[number])


# ── decoding ──


def packed(contents: list[Any], preprocess: Preprocess) -> tuple[EncodedBatch, torch.Tensor]:
    images = []
    for content in contents:
        image = open_image(content)
        made = encoded(image, evaluation_window(preprocess, image.height, image.width), preprocess.channels)
        assert made is not None
        images.append(made)
    arrays = PackedArrays()
    return pack_images(images, preprocess.size, preprocess.channels, arrays), arrays.memory()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_regions_of_turned_images(decoder: GpuDecoder, orientation: int, mode: str) -> None:
    content = jpeg(photo(47, 61, seed=1).convert(mode), orientation=orientation)
    image = open_image(content)
    top, left, height, width = 5, 9, 21, 17
    rows, columns = evaluation_window(Preprocess(size=(height, width)), height, width)[4:]
    made = encoded(image, Window(top, left, height, width, rows, columns), 3)
    assert made is not None
    arrays = PackedArrays()
    batch = pack_images([made], (height, width), 3, arrays)
    pixels = decoder.pixels(batch, arrays.memory(), evaluation_output(Preprocess(size=(height, width))), failing)
    expected = decode(content)[top : top + height, left : left + width]
    assert np.array_equal(pixels[0].permute(1, 2, 0).numpy(), expected)


def failing(number: int, _: object) -> None:
    raise AssertionError(f"image {number} was not decoded")


def test_what_is_left_to_the_cpu() -> None:
    image = photo(40, 60)
    whole = jpeg(image)
    assert end_of_baseline(whole) == len(whole)
    assert end_of_baseline(whole + b"a video of a phone") == len(whole)
    for other in (
        whole[:-1],
        whole[: len(whole) // 2],
        jpeg(image, progressive=True),
        jpeg(image.convert("CMYK")),
        whole.replace(b"\xff\xc4", b"\xff\xe5"),  # without its Huffman tables
    ):
        assert end_of_baseline(other) is None or encoded(open_image(other), failing_window(), 3) is None
    png = io.BytesIO()
    image.save(png, "PNG")
    assert encoded(open_image(png.getvalue()), failing_window(), 3) is None
    assert encoded(open_image(whole), failing_window(), 4) is None


def failing_window() -> Window:
    return evaluation_window(Preprocess(size=SIZE), 40, 60)


def test_large_batches_are_decoded_in_groups(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [jpeg(photo(20 + 7 * n, 90 - 5 * n, seed=n)) for n in range(9)]
    preprocess = Preprocess(size=SIZE)
    batch, memory = packed(contents, preprocess)
    expected = decoder.pixels(batch, memory, evaluation_output(preprocess), failing)
    monkeypatch.setattr(gpu_decoding, "PADDED_PIXELS", 3 * 80 * 90)
    groups = [len(group) for group in gpu_decoding._groups(batch.jpegs(memory))]
    assert len(groups) > 2
    assert torch.equal(decoder.pixels(batch, memory, evaluation_output(preprocess), failing), expected)


# ── batches ──


def same(actual: list[Batch], expected: list[Batch]) -> None:
    """Everything is equal, and pixels almost."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        for name in ("labels", "indices", "lam", "box"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert one.bad == other.bad


def difference(actual: list[Batch], expected: list[Batch]) -> torch.Tensor:
    """Return the mean difference of each image, in grey levels."""
    pairs = zip(actual, expected, strict=True)
    return torch.cat([(one.pixels.int() - other.pixels.int()).abs().float().mean((1, 2, 3)) for one, other in pairs])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation(tmp_path: Path, workers: int, channels: int) -> None:
    source = MixedFiles(tmp_path, 3)
    mean = (0.5,) * channels
    preprocess = Preprocess(size=SIZE, resize="cover", channels=channels, mean=mean, std=mean)
    data = Evaluation(source, preprocess, len(source), bad_files="skip")
    expected = list(evaluation_batches(data, workers=0))
    actual = list(gpu_evaluation_batches(data, CPU, workers=workers))
    same(actual, expected)
    assert len(expected[0].bad) == 3 * sum(ending.bad for ending in ENDINGS)
    assert difference(actual, expected).max() < 0.5


def test_evaluation_in_batches_of_the_size_asked_for(tmp_path: Path) -> None:
    source = MixedFiles(tmp_path, 2)
    data = Evaluation(source, Preprocess(size=SIZE), 4, RankSlice(1, 2), bad_files="skip")
    batches = list(gpu_evaluation_batches(data, CPU, workers=0))
    assert max(len(batch.labels) for batch in batches) == 4
    expected = list(evaluation_batches(data, workers=0))
    for name in ("indices", "labels"):
        one, other = (torch.cat([getattr(batch, name) for batch in some]) for some in (batches, expected))
        assert torch.equal(one, other)
    assert sum((batch.bad for batch in batches), ()) == sum((batch.bad for batch in expected), ())


def test_refused_files_are_named_alike(tmp_path: Path) -> None:
    data = Evaluation(MixedFiles(tmp_path, 1), Preprocess(size=SIZE), 4, bad_files="refuse")
    messages = []
    for batches in (evaluation_batches(data, workers=0), gpu_evaluation_batches(data, CPU, workers=0)):
        with pytest.raises(DataError) as caught:
            list(batches)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


AUGMENTATIONS = {
    "light": preset("light"),
    "augreg": preset("augreg_medium1"),
    "none": Augmentation(crop="none", flip_vertical=0.5),
    "all": Augmentation(
        crop_area=(0.3, 1), interpolation="bicubic", rotation=20, erasing=0.5, grey=0.3,
        randaugment=RandAugment(layers=2, magnitude=9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_training(tmp_path: Path, name: str) -> None:
    """The same draws: each image differs by a little, where a different crop or operation differs by a lot."""
    source = MixedFiles(tmp_path, 3)
    stream, mixing = Stream(len(source), 10, 7), Mixing(cutmix=1.0, mixup=0.3)
    data = Training(source, stream, Preprocess(size=SIZE), AUGMENTATIONS[name], mixing)
    expected = list(training_batches(data, 3, 7, workers=0))
    actual = list(gpu_training_batches(data, 3, 7, CPU, workers=0))
    same(actual, expected)
    differences = difference(actual, expected)
    assert differences.median() < 1
    assert differences.max() < 20  # operations such as equalize amplify one grey level
    other = difference(actual, list(training_batches(data, 4, 8, workers=0)))
    assert other.median() > 30


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_has_the_same_batches(tmp_path: Path, workers: int) -> None:
    source = MixedFiles(tmp_path, 2)
    data = Training(source, Stream(len(source), 6, 7), Preprocess(size=SIZE), AUGMENTATIONS["all"])
    whole = list(gpu_training_batches(data, 0, 6, CPU, workers=workers))
    resumed = list(gpu_training_batches(data, 4, 6, CPU, workers=0))
    same(whole[4:], resumed)
    for one, other in zip(whole[4:], resumed, strict=True):
        assert torch.equal(one.pixels, other.pixels)


def without_tables(content: bytes) -> bytes:
    """Refer to Huffman tables that the file lacks, as only a decoder notices."""
    scan = content.index(b"\xff\xda")
    return content[: scan + 6] + b"\x33" + content[scan + 7 :]


def test_files_that_only_a_decoder_finds_broken(tmp_path: Path, decoder: GpuDecoder) -> None:
    """They are named and replaced as without a GPU, and the rest of the batch keeps its rows."""
    source, preprocess = MixedFiles(tmp_path, 3), Preprocess(size=SIZE)
    broken = [0, 1, 12]
    for index in broken:
        source.files[index].write_bytes(without_tables(source.files[index].read_bytes()))
    batch, memory = packed([source.read(0), source.read(10), source.read(12)], preprocess)
    numbers: list[int] = []
    decoder.pixels(batch, memory, evaluation_output(preprocess), lambda number, _: numbers.append(number))
    assert numbers == [0, 2]
    data = Evaluation(source, preprocess, len(source), bad_files="skip")
    actual, expected = list(gpu_evaluation_batches(data, CPU, workers=0)), list(evaluation_batches(data, workers=0))
    same(actual, expected)
    assert {source.name(index) for index in broken} <= {name for name, _ in expected[0].bad}
    assert difference(actual, expected).max() < 0.5
    training = Training(source, Stream(len(source), 6, 7), preprocess, AUGMENTATIONS["light"])
    actual, expected = list(gpu_training_batches(training, 0, 5, CPU)), list(training_batches(training, 0, 5))
    assert sum(len(batch.bad) for batch in expected) >= len(broken)
    same(actual, expected)
    assert difference(actual, expected).max() < 2


def test_stopping_early_leaves_nothing_behind(tmp_path: Path) -> None:
    data = Training(MixedFiles(tmp_path, 2), Stream(10, 5, 7), Preprocess(size=SIZE), preset("light"))
    batches = gpu_training_batches(data, 0, 1000, CPU, workers=0)
    next(batches)
    batches.close()
    assert [batch.pixels.shape for batch in gpu_training_batches(data, 0, 1, CPU, workers=0)] == [(5, 3, *SIZE)]
