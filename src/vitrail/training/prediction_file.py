"""test_predictions.parquet: the best model's prediction for every image of the split it is evaluated on."""

import hashlib
import json
from pathlib import Path

import numpy as np

from vitrail.data.sources.source import Source
from vitrail.errors import DataError
from vitrail.evaluation import Predictions
from vitrail.metrics.classification import log_losses
from vitrail.training.run_folder import atomic_file

TOP = 5
"""Classes kept per image. All of them would take 200 MB for 50,000 images of 1,000 classes."""


def digest_of(source: Source, index: int) -> str:
    """Return a digest of an image's stored content, independent of its name."""
    try:
        stored = source.read(index)
    except DataError:  # deleted since it was predicted
        return ""
    content = stored if isinstance(stored, bytes) else np.ascontiguousarray(stored).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_test_predictions(predictions: Predictions, source: Source, path: Path) -> None:
    """Write a row for each readable image, in the order of the source."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = np.argsort(predictions.indices, kind="stable")
    probabilities, labels = predictions.probabilities[order], predictions.labels[order]
    indices, rows = predictions.indices[order], np.arange(len(order))
    ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :TOP]
    predicted, count = ranked[:, 0], ranked.shape[1]
    classes = pa.array(source.classes, pa.string())

    def named(numbers: np.ndarray) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(numbers.ravel(), pa.int32()), classes)

    table = pa.table(
        {
            "index": pa.array(indices, pa.int64()),
            "name": pa.array([source.name(int(index)) for index in indices], pa.string()),
            "true": named(labels),
            "predicted": named(predicted),
            "correct": pa.array(predicted == labels),
            "confidence": pa.array(probabilities[rows, predicted]),
            "true_probability": pa.array(probabilities[rows, labels]),
            "digest": pa.array([digest_of(source, int(index)) for index in indices], pa.string()),
            "log_loss": pa.array(log_losses(probabilities, labels), pa.float64()),
            "top_classes": pa.FixedSizeListArray.from_arrays(named(ranked), count),
            "top_probabilities": pa.FixedSizeListArray.from_arrays(
                pa.array(np.take_along_axis(probabilities, ranked, axis=1).ravel()), count
            ),
        },
        metadata={"classes": json.dumps(source.classes, ensure_ascii=False)},
    )
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
