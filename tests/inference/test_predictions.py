"""`vitrail.predict`: paths and images in memory, predictions and files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.prediction_jobs import read_rows, tiny_bundle, tiny_images

import vitrail
from vitrail.tasks.classification import ClassPrediction
from vitrail.tasks.task import Prediction


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return nine images in the folder p, next to a bundle."""
    monkeypatch.chdir(tmp_path)
    tiny_bundle().save("bundle")
    return [Path(path) for path in tiny_images(Path("p"), 9)]


def classes_of(rows: Sequence[Prediction]) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
    return [(row.names, row.probabilities) for row in rows if isinstance(row, ClassPrediction)]


def test_every_kind_of_input_gives_the_same_predictions(photos: list[Path]) -> None:
    classifier = vitrail.Classifier("bundle", device="cpu")
    expected = classes_of(classifier.predict(photos))
    arrays = [np.asarray(Image.open(path)) for path in photos]
    for images in (
        "p",
        Path("p"),
        "p/*.png",
        photos,
        list(map(str, photos)),
        iter(photos),
        arrays,
        iter(arrays),
        [Image.open(path) for path in photos],
        [path.read_bytes() for path in photos],
        [photos[0], *arrays[1:]],
    ):
        rows = vitrail.predict("bundle", images, device="cpu")
        assert [names for names, _ in classes_of(rows)] == [names for names, _ in expected]
        for (_, actual), (_, probabilities) in zip(classes_of(rows), expected, strict=True):
            assert actual == pytest.approx(probabilities, abs=1e-5)
    assert len(vitrail.predict(vitrail.load("bundle"), np.stack(arrays), device="cpu", top=1, batch=4)) == 9


def test_predictions_carry_the_name_of_their_image(photos: list[Path]) -> None:
    assert [row.image for row in vitrail.predict("bundle", "p", device="cpu")] == list(map(str, photos))
    array = np.asarray(Image.open(photos[0]))
    assert [row.image for row in vitrail.predict("bundle", [photos[1], array], device="cpu")] == [
        str(photos[1]),
        "image 1",
    ]
    assert [row.image for row in vitrail.predict("bundle", array, device="cpu")] == ["image 0"]
    assert vitrail.predict("bundle", []) == []


def test_the_file_has_the_same_rows(photos: list[Path]) -> None:
    rows = vitrail.predict("bundle", "p", device="cpu", top=2)
    done = vitrail.predict("bundle", "p", device="cpu", top=2, output="rows.jsonl")
    assert (done.images, done.bad, done.earlier) == (9, 0, 0)
    written = read_rows(Path("rows.jsonl"))
    assert [row["path"] for row in written] == [row.image for row in rows]
    assert [tuple(row["classes"]) for row in written] == [names for names, _ in classes_of(rows)]
    again = vitrail.predict("bundle", "p", device="cpu", top=2, output=Path("rows.jsonl"), resume=True)
    assert (again.images, again.earlier) == (9, 9)
    del photos


def test_rows_on_stdout(photos: list[Path], capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    done = vitrail.predict("bundle", photos[:2], device="cpu", output="-", format="csv")
    assert done.images == 2
    assert capfdbinary.readouterr().out.count(b"\n") == 3


@pytest.mark.parametrize("precision", ["float32", "auto"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_progress_and_plan(photos: list[Path], precision: str, in_memory: bool) -> None:
    calls: list[object] = []
    vitrail.predict(
        "bundle",
        [np.asarray(Image.open(path)) for path in photos] if in_memory else "p",
        device="cpu",
        batch=4,
        workers=0,
        precision=precision,
        on_progress=lambda *call: calls.append(call),
        on_plan=calls.append,
    )
    assert isinstance(calls[0], str), "the plan comes before the work"
    assert calls[1:] == [("predicting", 4, None), ("predicting", 8, None), ("predicting", 9, None)]


def test_unreadable_images(photos: list[Path]) -> None:
    photos[3].write_text("no image")
    for images in (photos, [path.read_bytes() for path in photos]):
        rows = vitrail.predict("bundle", images, device="cpu")
        assert [row.error is None for row in rows] == [number != 3 for number in range(9)]
    with pytest.raises(vitrail.DataError, match=r"the only image, .* cannot be read"):
        vitrail.predict("bundle", photos[3], device="cpu")
    with pytest.raises(vitrail.DataError, match="the only image cannot be read: it is not an image"):
        vitrail.predict("bundle", b"no image", device="cpu")
    with pytest.raises(vitrail.DataError, match="none of the 2 images can be read; the first, image 0: "):
        vitrail.predict("bundle", [b"no image", b""], device="cpu", precision="auto")


def test_skipped_files_are_logged(photos: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    Path("p/notes.md").write_text("no image")
    assert len(vitrail.predict("bundle", "p", device="cpu")) == len(photos)
    assert [record.message for record in caplog.records if record.name == "vitrail"] == [
        "1 file was skipped: no image suffix (p/notes.md)"
    ]


def test_wrong_arguments(photos: list[Path]) -> None:
    with pytest.raises(vitrail.ConfigError, match="only images with paths are written to a file"):
        vitrail.predict("bundle", np.zeros((8, 8, 3), np.uint8), output="rows.csv")
    with pytest.raises(vitrail.ConfigError, match="a format needs an output"):
        vitrail.predict("bundle", photos, format="csv")  # type: ignore[call-overload]
    with pytest.raises(vitrail.ConfigError, match="unknown precision 'int3'"):
        vitrail.predict("bundle", torch.zeros(3, 8, 8), precision="int3")
    with pytest.raises(vitrail.InputError, match="expected a path, the bytes of a file"):
        vitrail.predict("bundle", 7)  # type: ignore[call-overload]
    with pytest.raises(vitrail.CheckpointError, match="overrides and keys apply to weight files only"):
        vitrail.predict(vitrail.load("bundle"), photos, overrides={"heads": 2})
    with pytest.raises(vitrail.DataError, match="nowhere does not exist"):
        vitrail.predict("bundle", "nowhere")
