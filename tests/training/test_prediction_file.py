"""test_predictions.parquet: the prediction for each image behind the result."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from vitrail.data.batches import BadImage
from vitrail.data.sources.source import Arrays
from vitrail.errors import CheckpointError
from vitrail.tasks.classification_metrics import classification_metrics
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.tasks.task import Predictions
from vitrail.training.split_predictions import write_test_predictions
from vitrail.training.train import train


def source_of(classes: int, images: int) -> Arrays:
    labels = np.arange(images) % classes
    return Arrays(np.zeros((images, 2, 2), np.uint8), labels, tuple(f"class {i}" for i in range(classes)))


@pytest.mark.parametrize("classes", [2, 7])
def test_every_column(classes: int, tmp_path: Path) -> None:
    rng, source = np.random.default_rng(0), source_of(classes, 40)
    order = rng.permutation(40)[:37]  # three are unreadable, and batches arrive in any order
    probabilities = rng.dirichlet(np.ones(classes), 37).astype(np.float32)
    predictions = Predictions(probabilities, source.labels[order], order)
    write_test_predictions(predictions, source, tmp_path / "test_predictions.parquet", CLASSIFICATION)

    table = pq.read_table(tmp_path / "test_predictions.parquet")
    rows = table.to_pylist()
    assert [row["index"] for row in rows] == sorted(order.tolist())
    by_index = dict(zip(order.tolist(), probabilities, strict=True))
    for row in rows:
        row_probabilities, label = by_index[row["index"]], int(source.labels[row["index"]])
        ranked = sorted(
            range(classes), key=lambda number, row_probabilities=row_probabilities: -row_probabilities[number]
        )[:5]
        assert row["name"] == f"image {row['index']}"
        assert (row["true"], row["predicted"]) == (f"class {label}", f"class {ranked[0]}")
        assert row["correct"] == (label == ranked[0])
        assert (row["confidence"], row["true_probability"]) == (row_probabilities[ranked[0]], row_probabilities[label])
        assert row["log_loss"] == pytest.approx(-np.log(row_probabilities[label]), rel=1e-5)
        assert row["top_classes"] == [f"class {number}" for number in ranked]
        assert row["top_probabilities"] == [row_probabilities[number] for number in ranked]
    assert json.loads(table.schema.metadata[b"classes"]) == list(source.classes)
    assert classification_metrics(predictions, source).loss == pytest.approx(np.mean(table["log_loss"].to_numpy()))
    compressed = pq.ParquetFile(tmp_path / "test_predictions.parquet").metadata.row_group(0).column(0).compression
    assert (compressed, [path.name for path in tmp_path.iterdir()]) == ("ZSTD", ["test_predictions.parquet"])


def test_it_agrees_with_the_summary(tmp_path: Path) -> None:
    changes = ["epochs=1", "evaluations=1", "model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4"]
    run = train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    table = pq.read_table(tmp_path / "run" / "test_predictions.parquet")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (table.num_rows, table["correct"].to_numpy().mean()) == (result["images"], result["top1"])
    assert table["log_loss"].to_numpy().mean() == pytest.approx(result["loss"])
    first = result["worst"][0]
    row = table.filter([index == first["index"] for index in table["index"].to_pylist()]).to_pylist()[0]
    assert {name: row[name] for name in first} == first
    assert {"curves.svg", "tensorboard", "test_predictions.parquet"} <= {path.name for path in run.folder.iterdir()}
    assert "vitrail[train]" not in (run.folder / "log.txt").read_text()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(2, 4)
    predictions = Predictions(
        np.full((4, 2), 0.5, np.float32), source.labels, np.arange(4), (BadImage("image 5", "empty"),)
    )
    path = tmp_path / "test_predictions.parquet"
    path.write_text("as it was")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pyarrow.parquet.write_table", full_disk)
    with pytest.raises(CheckpointError, match=r"test_predictions\.parquet could not be written"):
        write_test_predictions(predictions, source, path, CLASSIFICATION)
    assert path.read_text() == "as it was"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
