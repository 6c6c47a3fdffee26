"""Samples, sessions and model card metrics that a run writes for its report and the explorer."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.mask_data import SHAPES, write_shapes
from tests.support.metrics import classified
from tests.support.tiny_runs import CLASSES, images, tiny_run

import vitrail
from vitrail.acceleration.planner import hardware_of, usual_precision
from vitrail.data.sources.contents import digests_of, recorded_contents
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.selection import seen_in_training
from vitrail.data.sources.source import Arrays
from vitrail.text import percent
from vitrail.training import samples
from vitrail.training.criterion import save_in_run
from vitrail.training.samples import keep_samples, read_samples, samples_of_bundle
from vitrail.training.sessions import read_sessions
from vitrail.training.train import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("samples")
    return tiny_run(images(folder / "data"), folder / "run", "epochs=2")


def test_a_run_keeps_small_images_of_each_of_its_classes(run: Run) -> None:
    kept = read_samples(run.folder)
    assert {sample.label for sample in kept} == set(CLASSES)
    assert len(kept) == len(CLASSES) * samples.PER_CLASS
    assert [sample.label for sample in kept[:3]] == list(run.bundle.classes or ()), "each class comes before a second"
    for sample in kept:
        with Image.open(sample.file) as image:
            assert (image.format, max(image.size)) == ("JPEG", 20), "small images are not enlarged"
    assert samples_of_bundle(run.folder / "best") == kept
    assert not list((run.folder / "best").glob("**/*.jpg")), "a bundle is passed on without images of its data"


def test_samples_are_training_images(run: Run, tmp_path: Path) -> None:
    data = json.loads((run.folder / "origin.json").read_text())["data"]
    splits = open_data(data, record=json.loads((run.folder / "split.json").read_text()))
    again = keep_samples(tmp_path, splits.train)
    assert [one.file.read_bytes() for one in again] == [one.file.read_bytes() for one in read_samples(run.folder)]


def test_samples_of_many_classes_stay_small(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (400, 300, 200), np.uint8)
    source = Arrays(pixels, np.arange(400) % 200, tuple(f"class {n}" for n in range(200)))
    kept = keep_samples(tmp_path, source)
    sizes = [sample.file.stat().st_size for sample in kept]
    assert sum(sizes) <= samples.MOST_BYTES
    assert 40 <= len(kept) <= samples.MOST
    with Image.open(kept[0].file) as image:
        assert image.size == (128, 192)
    assert len({sample.label for sample in kept}) == len(kept), "another class each"


def test_samples_of_masks_have_small_masks(tmp_path: Path) -> None:
    data = write_shapes(tmp_path / "data", 30, (250, 200))
    source = open_data(data, val=0.0, test=0.0).train
    (tmp_path / "run").mkdir()
    kept = keep_samples(tmp_path / "run", source)
    assert {sample.label for sample in kept} <= set(SHAPES)
    assert len(kept) == samples.PER_CLASS * len(source.classes)
    for sample in kept:
        assert sample.mask is not None
        with Image.open(sample.mask) as mask, Image.open(sample.file) as image:
            assert mask.size == image.size == (154, 192)
            values, pixels = np.asarray(mask), np.asarray(image).astype(int)
        assert set(np.unique(values)) <= {0, 1, 2}
        assert SHAPES.index(sample.label) in values
        for value, channel in ((1, 0), (2, 2)):  # discs are red, and squares blue
            if (values == value).any():
                others = [place for place in range(3) if place != channel]
                assert (pixels[values == value][:, [channel]] > pixels[values == value][:, others]).mean() > 0.95


def test_images_whose_mask_has_gone_are_no_samples(tmp_path: Path) -> None:
    data = write_shapes(tmp_path / "data", 30, 20)
    source = open_data(data, val=0.0, test=0.0).train
    for number in range(0, 30, 2):
        (data / "masks" / f"{number:04}.png").unlink()
    (tmp_path / "run").mkdir()
    kept = keep_samples(tmp_path / "run", source)
    assert kept
    assert all(sample.mask is not None for sample in kept)


def test_unreadable_files_are_skipped_and_the_rest_is_upright(tmp_path: Path) -> None:
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.jpg").write_bytes(b"no image")
    image = Image.new("RGB", (60, 40), "orange")
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(folder / "4.jpg", exif=turned)
    (tmp_path / "photos" / "dog").mkdir()
    image.save(tmp_path / "photos" / "dog" / "5.jpg")
    source = open_data(tmp_path / "photos", val=0.0, test=0.0).train
    kept = keep_samples(tmp_path, source)
    assert kept
    with Image.open(kept[0].file) as result:
        assert result.size == (40, 60)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"label": 1}]', '{"a": 2}', "[" * 5000, '[{"label": "a", "file": "../x"}]']
)
def test_a_corrupt_index_is_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "x").write_bytes(b"not a sample")
    (tmp_path / "samples" / "samples.json").write_text(text)
    (tmp_path / "sessions.json").write_text(text)
    assert read_samples(tmp_path) == []
    assert read_sessions(tmp_path) == []


def test_a_run_records_its_time_and_hardware(run: Run) -> None:
    (session,) = read_sessions(run.folder)
    assert session.first_step == 0
    assert session.last_step == max(
        json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()
    )
    assert 0 < session.seconds < 600
    assert "threads" in session.device
    assert (session.ranks, session.precision) == (1, usual_precision(hardware_of(torch.device("cpu"))))


def test_the_card_of_the_best_model_has_the_metrics(run: Run) -> None:
    card = (run.folder / "best" / "README.md").read_text(encoding="utf-8")
    metrics = classified(run.metrics)
    low, high = metrics.top1_interval
    assert f"| accuracy | {percent(metrics.top1)}% (95% interval {percent(low)}–{percent(high)}%) |" in card
    low, high = metrics.macro_f1_interval
    assert f"| macro-F1 | {percent(metrics.macro_f1)}% (95% interval {percent(low)}–{percent(high)}%) |" in card
    assert f"| split | test, {run.metrics.images} images |" in card


def test_the_card_mentions_images_that_selected_the_checkpoint(tmp_path: Path) -> None:
    run = tiny_run(images(tmp_path / "data"), tmp_path / "run", "epochs=1", "data.test=0")
    card = (run.folder / "best" / "README.md").read_text(encoding="utf-8")
    assert f"| split | validation, {run.metrics.images} images, which also selected the checkpoint |" in card


def test_a_run_keeps_the_digests_of_its_images_and_its_bundles_carry_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads((run.folder / "origin.json").read_text())["data"]
    splits = open_data(data, record=json.loads((run.folder / "split.json").read_text()))
    alone = Path(shutil.copytree(run.folder / "best", tmp_path / "alone" / "model"))
    for place in (alone, run.folder / "last", run.folder / "best"):
        assert (place / "contents.index").exists()
        contents = recorded_contents(place)
        assert contents is not None
        assert contents.complete
        assert np.array_equal(contents.train, np.sort(digests_of(splits.train)))
        assert seen_in_training(splits.train, None, contents) == (0, len(splits.train), "content")
    assert "contents" not in json.loads((run.folder / "check.json").read_text())
    vitrail.load(alone).save(alone, overwrite=True)  # files of a checkpoint may be overwritten
    shutil.copy(run.folder / "contents.index", tmp_path / "contents.index")
    save_in_run(run.bundle, tmp_path / "last")
    assert (tmp_path / "last" / "contents.index").exists()
    monkeypatch.setattr("vitrail.data.sources.contents.MOST_IN_BUNDLE", 3)
    save_in_run(run.bundle, tmp_path / "last")
    assert not (tmp_path / "last" / "contents.index").exists()
