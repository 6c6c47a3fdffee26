"""Batches decoded on a GPU: close to those of the CPU, the same again, and without leaks."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.jpeg_files import MixedFiles, jpeg, photo

import vitrail
from vitrail.data.augmentation.augment import Augmentation, preset
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.batches import Batch, Evaluation, Training, evaluation_batches, training_batches
from vitrail.data.decode import decode, open_image
from vitrail.data.device_resize import Window, evaluation_window
from vitrail.data.encoded import encoded, pack_images
from vitrail.data.gpu_batches import evaluation_output, gpu_evaluation_batches, gpu_training_batches
from vitrail.data.gpu_decoding import GpuDecoder, is_installed
from vitrail.data.packing import PackedArrays
from vitrail.data.preprocess import Preprocess
from vitrail.data.stream import Stream
from vitrail.training.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not is_installed(), reason="needs nvImageCodec and nvJPEG"),
]

CUDA = torch.device("cuda")
PREPROCESS = Preprocess(size=(224, 224), resize="cover", resize_to=(256, 256), interpolation="bicubic")
AUGMENTATIONS = {
    "light": preset("light"),
    "all": Augmentation(
        interpolation="bicubic", rotation=20, erasing=0.5, grey=0.3, randaugment=RandAugment(layers=2, magnitude=9)
    ),
}


class Photos(MixedFiles):
    """Larger files, most of them photos."""

    def __init__(self, folder: Path, each: int) -> None:
        super().__init__(folder, each)
        for number, file in enumerate(self.files):
            if file.name.endswith("plain.jpg"):
                file.write_bytes(jpeg(photo(375 + number, 500, number)))
            elif file.name.endswith("full.jpg"):
                file.write_bytes(jpeg(photo(300, 420 + number, number), subsampling=number % 3))


def difference(actual: list[Batch], expected: list[Batch]) -> torch.Tensor:
    """Check that all but the pixels is equal; return the mean difference of each image, in grey levels."""
    means = []
    for one, other in zip(actual, expected, strict=True):
        for name in ("labels", "indices", "lam", "box"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name).cpu()), name
        assert one.bad == other.bad
        means.append((one.pixels.cpu().int() - other.pixels.cpu().int()).abs().float().mean((1, 2, 3)))
    return torch.cat(means)


@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_is_close_to_the_cpu(tmp_path: Path, channels: int) -> None:
    source = Photos(tmp_path, 20)
    mean = (0.5,) * channels
    data = Evaluation(source, PREPROCESS.replace(channels=channels, mean=mean, std=mean), 200, bad_files="skip")
    actual = list(gpu_evaluation_batches(data, CUDA, workers=2))
    assert all(batch.pixels.is_cuda for batch in actual)
    means = difference(actual, list(evaluation_batches(data, workers=2)))
    print(f"\nevaluation, {channels} channels: {means.mean():.3f} grey levels on average, {means.max():.3f} at most")
    assert means.mean() < 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_regions_of_turned_images(orientation: int) -> None:
    content = jpeg(photo(147, 261, seed=1), orientation=orientation)
    image = open_image(content)
    top, left, height, width = 25, 39, 71, 57
    rows, columns = evaluation_window(Preprocess(size=(height, width)), height, width)[4:]
    made = encoded(image, Window(top, left, height, width, rows, columns), 3)
    assert made is not None
    arrays = PackedArrays()
    batch = pack_images([made], (height, width), 3, arrays)
    failed: list[int] = []
    output = evaluation_output(Preprocess(size=(height, width)))
    pixels = GpuDecoder(CUDA).pixels(batch, arrays.memory(), output, lambda number, _: failed.append(number))
    assert failed == []
    expected = decode(content)[top : top + height, left : left + width].astype(int)
    assert np.abs(pixels[0].permute(1, 2, 0).cpu().numpy() - expected).mean() < 2


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_training_has_the_same_draws(tmp_path: Path, name: str) -> None:
    source = Photos(tmp_path, 10)
    data = Training(source, Stream(len(source), 50, 7), PREPROCESS, AUGMENTATIONS[name], Mixing(cutmix=1.0, mixup=0.3))
    actual = list(gpu_training_batches(data, 3, 7, CUDA, workers=2))
    means = difference(actual, list(training_batches(data, 3, 7, workers=2)))
    print(f"\ntraining, {name}: {means.median():.3f} grey levels (median), {means.max():.3f} at most")
    assert means.median() < 2
    other = list(training_batches(data, 4, 8, workers=2))
    pairs = zip(actual, other, strict=True)
    apart = torch.cat([(a.pixels.cpu().int() - b.pixels.int()).abs().float().mean((1, 2, 3)) for a, b in pairs])
    assert apart.median() > 20


def test_the_same_pixels_again_while_the_device_is_busy(tmp_path: Path) -> None:
    """Memory that a batch still uses is not decoded into."""
    source = Photos(tmp_path, 10)
    data = Training(source, Stream(len(source), 50, 7), PREPROCESS, AUGMENTATIONS["all"])
    expected = [batch.pixels.cpu() for batch in gpu_training_batches(data, 0, 20, CUDA, workers=2)]
    busy, actual = torch.randn(4096, 4096, device="cuda"), []
    for batch in gpu_training_batches(data, 0, 20, CUDA, workers=2):
        busy = (busy @ busy).clamp(-1, 1)
        actual.append(batch.pixels.clone())  # runs late on this stream
        del batch
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.slow
def test_a_stopped_run_resumes_exactly(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        Photos(tmp_path / "images" / name, 20)
    changes = (
        "steps=8", "batch=32", "evaluations=4", "model.width=64", "model.depth=2", "model.heads=2",
        "model.image_size=64", "model.patch_size=16", "data.decode=gpu", "augmentation.randaugment.layers=2",
        "save_minutes=0", "deterministic=true",
    )  # fmt: skip

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        run = train(tmp_path / "images", changes=changes, folder=folder, device="cuda", workers=2, quiet=True)
        return load_file(Path(run.folder) / "last" / "model.safetensors")

    decoded, count = GpuDecoder.pixels, 0

    def stop(self: GpuDecoder, *given: object) -> object:
        nonlocal count
        count += 1
        if count > 8:
            raise KeyboardInterrupt
        return decoded(self, *given)

    expected = weights(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuDecoder, "pixels", stop)
        with pytest.raises(KeyboardInterrupt):
            weights(tmp_path / "resumed")
    actual = weights(tmp_path / "resumed")
    assert "resuming from step" in (tmp_path / "resumed" / "log.txt").read_text()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_predictions(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Photos(tmp_path / "images", 5)
    model = vitrail.create("Ti/16", classes=10)
    bundle = vitrail.Bundle(model, PREPROCESS, tuple("abcdefghij"))
    on_cpu, on_gpu = (
        vitrail.predict(bundle, str(tmp_path / "images"), decode=decode, device="cuda", workers=2, batch=16)
        for decode in ("cpu", "gpu")
    )
    assert [(row.image, row.error) for row in on_gpu] == [(row.image, row.error) for row in on_cpu]


@pytest.mark.slow
def test_nothing_leaks_over_100_000_images() -> None:
    """Images of many sizes; memory is compared after the first 20,000."""
    decoder, output = GpuDecoder(CUDA), evaluation_output(PREPROCESS)
    contents = [jpeg(photo(120 + 37 * number % 500, 150 + 53 * number % 600, number)) for number in range(512)]
    packed = []
    for start in (0, 128, 256):
        images = []
        for content in contents[start : start + 256]:
            image = open_image(content)
            one = encoded(image, evaluation_window(PREPROCESS, image.height, image.width), 3)
            assert one is not None
            images.append(one)
        arrays = PackedArrays()
        packed.append((pack_images(images, PREPROCESS.size, 3, arrays), arrays.memory()))
    used = []
    for number in range(400):
        decoder.pixels(*packed[number % 3], output, lambda failed, _: pytest.fail(f"image {failed} was not decoded"))
        if number in (79, 399):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            used.append((total - free, resident))
    growth = [after - before for before, after in zip(*used, strict=True)]
    print(f"\ngrowth over 81,920 images: GPU {growth[0] / 2**20:.1f} MiB, host {growth[1] / 2**20:.1f} MiB")
    assert max(growth) < 64 * 2**20
