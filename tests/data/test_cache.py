"""The pixel cache returns decoded pixels and notices changes."""

import io
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.jpeg_source import JpegSource

from vitrail.data import cache as module
from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.batches import Training, training_batches
from vitrail.data.cache import CacheSize, cached
from vitrail.data.decode import decode
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.source import Arrays, Pixels
from vitrail.data.stream import Stream
from vitrail.errors import DataError
from vitrail.io import lock_file

SIZE = CacheSize(short_side=30)


def image(width: int, height: int, seed: int) -> bytes:
    file = io.BytesIO()
    smooth = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), np.uint8)
    Image.fromarray(smooth).resize((width, height)).save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.fixture
def files() -> JpegSource:
    """A large image, a small one, and a corrupt one."""
    made = JpegSource(3)
    made.contents = [image(120, 90, 0), image(40, 20, 1), image(64, 64, 2)[:300]]
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_pixels(files: JpegSource, workers: int, tmp_path: Path) -> None:
    seen: list[int] = []
    source = cached(files, SIZE, folder=tmp_path, workers=workers, on_progress=seen.append)
    assert seen == [1, 2, 3]
    assert (len(source), source.classes, source.name(1)) == (3, files.classes, files.name(1))
    assert np.array_equal(source.labels, files.labels)
    large = source.read(0)
    assert isinstance(large, np.ndarray)
    assert large.shape == (30, 40, 3)
    expected = np.asarray(Image.fromarray(decode(files.read(0))).resize((40, 30), Image.Resampling.BICUBIC))
    assert np.abs(large.astype(int) - expected).mean() < 3
    assert np.array_equal(source.read(1), decode(files.read(1)))  # small enough already
    assert source.read(2) == files.read(2)  # the file itself; the decoder then reports the error


def test_only_changed_images_are_decoded_again(files: JpegSource, tmp_path: Path) -> None:
    cached(files, SIZE, folder=tmp_path)
    seen: list[int] = []
    cached(files, SIZE, folder=tmp_path, on_progress=seen.append)
    assert seen == []
    files.contents[1] = image(44, 22, 9)
    files.contents[2] = image(64, 64, 2)
    again = cached(files, SIZE, folder=tmp_path, on_progress=seen.append)
    assert seen == [1, 2]
    assert np.array_equal(again.read(1), decode(files.read(1)))
    assert again.read(2).shape == (30, 30, 3)
    assert again.read(0).shape == (30, 40, 3)


def test_an_interrupted_build_resumes(files: JpegSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY", -1)

    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(files, SIZE, folder=tmp_path, on_progress=stop)
    seen: list[int] = []
    source = cached(files, SIZE, folder=tmp_path, on_progress=seen.append)
    assert len(seen) == 2
    assert np.array_equal(source.read(1), decode(files.read(1)))


def test_corruption_is_noticed(files: JpegSource, tmp_path: Path) -> None:
    source = cached(files, SIZE, folder=tmp_path)
    pixels = next(tmp_path.rglob("pixels.bin"))
    content = bytearray(pixels.read_bytes())
    content[100] ^= 1
    pixels.write_bytes(content)
    with pytest.raises(DataError, match=r"in the cache .* are corrupt; delete that folder"):
        cached(files, SIZE, folder=tmp_path).read(0)
    pixels.write_bytes(b"")  # truncated: rebuilt
    assert np.array_equal(cached(files, SIZE, folder=tmp_path).read(1), decode(files.read(1)))
    next(tmp_path.rglob("table.npz")).write_bytes(b"no table")
    assert np.array_equal(cached(files, SIZE, folder=tmp_path).read(1), decode(files.read(1)))
    assert source.name(0) == files.name(0)


def test_caches_are_separate_by_size_and_images(files: JpegSource, tmp_path: Path) -> None:
    folders = {
        cached(source, size, folder=tmp_path).folder
        for source in (files, JpegSource(4))
        for size in (SIZE, CacheSize(20), CacheSize(30, channels=1))
    }
    assert len(folders) == 6


def test_arrays_are_distinguished_by_content(tmp_path: Path) -> None:
    for value in (0, 200):
        source = Arrays(np.full((3, 8, 8), value, np.uint8), np.zeros(3, np.int64), ("x",))
        assert cached(source, CacheSize(8, 1), folder=tmp_path).read(0).mean() == value


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name, value in (("a", 10), ("b", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(folder / name / f"{number}.bmp")
            os.utime(folder / name / f"{number}.bmp", (1, 1))
    assert cached(open_folder(str(folder)), CacheSize(8), folder=tmp_path / "cache").read(0).mean() == 10
    (folder / "a/0.bmp").rename(folder / "spare")
    (folder / "b/0.bmp").rename(folder / "a/0.bmp")
    (folder / "spare").rename(folder / "b/0.bmp")
    assert cached(open_folder(str(folder)), CacheSize(8), folder=tmp_path / "cache").read(0).mean() == 200
    (folder / "a/1.bmp").unlink()
    source = open_folder(str(folder))
    assert cached(source, CacheSize(8), folder=tmp_path / "cache").read(0).mean() == 200


def test_stale_data_is_eventually_dropped(files: JpegSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.contents[2] = image(64, 64, 2)
    big = CacheSize(1000)
    sizes = []
    for seed in range(12):
        files.contents[0] = image(900 + seed, 700, seed)
        source = cached(files, big, folder=tmp_path)
        assert np.array_equal(source.read(0), decode(files.read(0)))
        sizes.append(next(tmp_path.rglob("pixels.bin")).stat().st_size)
    assert max(sizes) < 8 * sizes[0]


def test_other_channels(tmp_path: Path) -> None:
    five = np.random.default_rng(0).integers(0, 255, (2, 40, 50, 5), np.uint8)
    source = cached(Arrays(five, np.zeros(2, np.int64), ("x",)), CacheSize(20, 5), folder=tmp_path)
    assert source.read(1).shape == (20, 25, 5)


def test_training_from_the_cache(files: JpegSource, tmp_path: Path) -> None:
    files.contents[2] = image(64, 64, 2)
    source = cached(files, SIZE, folder=tmp_path)
    again = pickle.loads(pickle.dumps(source))
    assert np.array_equal(again.read(0), source.read(0))
    data = Training(source, Stream(3, 4), Preprocess(size=16), Augmentation())
    here = list(training_batches(data, 0, 3, workers=0))
    there = list(training_batches(data, 0, 3, workers=2))
    assert all((one.pixels == other.pixels).all() for one, other in zip(here, there, strict=True))


def test_an_unwritable_folder(files: JpegSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"the cache .* could not be written: Not a directory; train without a cache"):
        cached(files, SIZE, folder=tmp_path / "file")


def test_a_killed_worker_is_one_sentence(tmp_path: Path) -> None:
    class Deadly(JpegSource):
        def read(self, index: int) -> bytes | Pixels:
            if index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(index)

    with pytest.raises(DataError, match=r"^a data loading worker died .*, most often because memory ran out"):
        cached(Deadly(6), SIZE, folder=tmp_path, workers=2)


def test_two_processes_do_not_write_at_once(files: JpegSource, tmp_path: Path) -> None:
    cached(files, SIZE, folder=tmp_path)
    place = next(tmp_path.iterdir())
    child = os.fork()
    if child == 0:
        with lock_file(place / "lock", wait=True):
            (place / "inside").write_text("")
            time.sleep(1)
            (place / "inside").unlink()
        os._exit(0)
    while not (place / "inside").exists():
        time.sleep(0.01)
    cached(files, SIZE, folder=tmp_path)
    assert not (place / "inside").exists()
    os.waitpid(child, 0)
