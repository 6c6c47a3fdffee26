"""Throughput of image loading, and the bottleneck."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Augmentation, preset
from vitrail.data.checking.speed import Speed, measure_speed
from vitrail.data.sources.folders import open_folder
from vitrail.data.sources.source import Arrays

SPEED = Speed(images=10, reading=1.0, decoding=6.0, decoding_full_size=9.0, augmenting=3.0)  # 100 images/s


def arrays(count: int, *shape: int) -> Arrays:
    images = np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)
    return Arrays(images, np.arange(count) % 2, ("a", "b"))


@pytest.mark.parametrize(
    ("images_per_second", "cores", "workers", "by", "reached"),
    [
        (50, 4, 1, "compute", 50),
        (100, 1, 1, "compute", 100),
        (101, 1, 2, "decoding", 100),
        (400, 4, 4, "compute", 400),
        (5000, 4, 50, "decoding", 400),
        (0.5, 1, 1, "compute", 0.5),
    ],
)
def test_the_bound(images_per_second: float, cores: int, workers: int, by: str, reached: float) -> None:
    assert SPEED.bound(images_per_second, cores) == (images_per_second, workers, cores, by, reached)


def test_the_slowest_step_is_the_bound() -> None:
    assert Speed(1, 9.0, 6.0, 9.0, 3.0).bound(1e6, 2).by == "reading"
    assert Speed(1, 1.0, 6.0, 99.0, 7.0).bound(1e6, 2).by == "augmenting"
    assert SPEED.as_dict()["images_per_second"] == 100


def test_steps_are_timed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowToRead(Arrays):
        def read(self, index: int) -> np.ndarray:
            time.sleep(0.02)
            return super().read(index)

    apply = augment.apply

    def slow(plan: augment.AugmentationPlan, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        time.sleep(0.01)
        return apply(plan, image, size)

    monkeypatch.setattr(augment, "apply", slow)
    source = SlowToRead(np.zeros((6, 40, 40), np.uint8), np.zeros(6, int), ("a",))
    speed = measure_speed(source, size=(32, 32))
    assert speed is not None
    assert speed.images == 6
    assert speed.reading >= 20
    assert speed.augmenting >= 10
    assert speed.decoding < 10
    assert speed.slowest == "reading"


def test_reduced_and_full_size_are_both_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for number in range(4):
        (tmp_path / "data" / "a").mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(noise).resize((2000, 1500)).save(tmp_path / "data" / "a" / f"{number}.jpg")
    (tmp_path / "data" / "a" / "bad.jpg").write_text("no image")
    seen: list[tuple[int, int]] = []
    whole = Augmentation(crop_area=(0.9, 1.0))
    source = open_folder(tmp_path / "data")
    speed = measure_speed(source, size=(64, 64), augmentation=whole, on_progress=lambda *now: seen.append(now))
    assert speed is not None
    assert speed.images == 4
    assert speed.decoding > 0
    assert speed.decoding_full_size > 0
    assert seen[-1][1] == 5


@pytest.mark.parametrize("shape", [(8, 8), (40, 30, 3), (40, 30, 4), (40, 30, 5)])
@pytest.mark.parametrize("name", ["light", "none"])
def test_any_number_of_channels(shape: tuple[int, ...], name: str) -> None:
    speed = measure_speed(arrays(3, *shape), size=(32, 32), augmentation=preset(name))
    assert speed is not None
    assert speed.images == 3


def test_the_sample_is_bounded_in_number_and_time() -> None:
    few = measure_speed(arrays(20, 8, 8), size=(32, 32), sample=5)
    assert few is not None
    assert few.images == 5
    brief = measure_speed(arrays(20, 8, 8), size=(32, 32), seconds=0)
    assert brief is not None
    assert brief.images == 1


def test_no_readable_images() -> None:
    strange = Arrays(np.full((3, 8, 8), np.nan), np.zeros(3, int), ("a",))
    assert measure_speed(strange) is None
