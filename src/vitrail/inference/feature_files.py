"""Feature files, written row by row, so that memory does not grow with the number of images.

.parquet       one row per image: index, name, label, features
.npy           one array (images, …); names and labels in a sidecar file
.safetensors   the same array as the tensor "features"; names and labels in a sidecar file
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError, InputError

DType = Literal["float32", "float16"]
SUFFIXES = (".parquet", ".npy", ".safetensors")
ROW_GROUP = 16 * 2**20
"""Bytes of features per Parquet row group, which is buffered in memory."""


class FeatureRows(NamedTuple):
    """Rows of a feature file."""

    features: NDArray[np.floating[Any]]
    """(B, …), in the dtype that is written."""
    indices: list[int]
    names: list[str]
    labels: list[str | None]


class FeatureFile(Protocol):
    """A file to append rows to."""

    def add(self, rows: FeatureRows) -> None:
        """Add rows."""

    def close(self) -> None:
        """Flush and complete the file."""

    def abandon(self) -> None:
        """Close an incomplete file, ignoring errors."""


def has_sidecar(path: Path) -> bool:
    """Return whether names and labels go into a sidecar file."""
    return path.suffix.lower() != ".parquet"


def sidecar(path: Path) -> Path:
    """Return the sidecar file: features.npy.jsonl, one line per row."""
    return path.with_name(path.name + ".jsonl")


def check_suffix(path: Path) -> None:
    """Raise for a file type that is unknown or cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"features cannot be written to {path}; give a file that ends with {', '.join(SUFFIXES)}")
    if path.suffix.lower() == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ConfigError(f"{path} needs pyarrow to be written: pip install 'vitrail[parquet]'") from None


def check_dtype(dtype: str) -> None:
    """Raise for an unsupported dtype."""
    if dtype not in get_args(DType):
        raise ConfigError(f"features are written as {' or '.join(get_args(DType))}, not as {dtype!r}")


def as_written(features: NDArray[np.float32], dtype: DType, names: Sequence[str]) -> NDArray[np.floating[Any]]:
    """Cast features to the dtype of the file; raise if they overflow."""
    with np.errstate(over="ignore"):
        written = features.astype("<f4" if dtype == "float32" else "<f2")
    wrong = ~np.isfinite(written).all(axis=tuple(range(1, written.ndim)))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"the features of {names[first]} reach {np.abs(features[first]).max():.3g}, which float16 cannot hold; "
            f"write float32"
        )
    return written


def open_rows(
    path: Path, sidecar_path: Path | None, kind: str, images: int, shape: tuple[int, ...], dtype: DType, facts: str
) -> FeatureFile:
    """Open a file of a type (a suffix) for about `images` rows of a shape; `facts` is metadata, stored if possible."""
    if sidecar_path is None:
        return _Parquet(path, shape, dtype, facts)
    if kind == ".npy":
        return _Npy(path, sidecar_path, images, shape, dtype)
    return _Safetensors(path, sidecar_path, images, shape, dtype, {"format": "pt", "vitrail": facts})


class _Npy:
    """One array. The number of rows is known at the end and then written into the header, which is padded for it."""

    def __init__(self, path: Path, sidecar_path: Path, images: int, shape: tuple[int, ...], dtype: DType) -> None:
        self._shape, self._dtype = shape, np.dtype("<f4" if dtype == "float32" else "<f2")
        self._header_rows, self._rows = images, 0
        self._file = path.open("w+b")
        self._names = sidecar_path.open("w", encoding="utf-8")
        self._write_header(images)

    def _write_header(self, rows: int) -> None:
        self._file.seek(0)
        kind = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": kind, "fortran_order": False, "shape": (rows, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def add(self, rows: FeatureRows) -> None:
        """Add rows."""
        self._file.write(np.ascontiguousarray(rows.features).data)
        for index, name, label in zip(rows.indices, rows.names, rows.labels, strict=True):
            row = {"index": index, "name": name, "label": label}
            self._names.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._rows += len(rows.indices)

    def close(self) -> None:
        """Correct the number of rows in the header."""
        if self._rows != self._header_rows:
            self._write_header(self._rows)
        self._file.close()
        self._names.close()

    def abandon(self) -> None:
        """Close it, ignoring errors."""
        for file in (self._file, self._names):
            with suppress(OSError):
                file.close()


class _Safetensors:
    """The format starts with the sizes of its tensors, so the array goes to a temporary file first.

    The library then writes it from there, memory-mapped: for a while it is on disk twice.
    """

    def __init__(
        self,
        path: Path,
        sidecar_path: Path,
        images: int,
        shape: tuple[int, ...],
        dtype: DType,
        metadata: Mapping[str, str],
    ) -> None:
        self._path, self._metadata = path, dict(metadata)
        self._array = path.with_name(path.name + ".npy")
        self._rows = _Npy(self._array, sidecar_path, images, shape, dtype)

    def add(self, rows: FeatureRows) -> None:
        """Add rows."""
        self._rows.add(rows)

    def close(self) -> None:
        """Write the tensor."""
        from safetensors.numpy import save_file

        self._rows.close()
        save_file({"features": np.load(self._array, mmap_mode="r")}, self._path, metadata=self._metadata)
        os.unlink(self._array)

    def abandon(self) -> None:
        """Close it, ignoring errors."""
        self._rows.abandon()


class _Parquet:
    """A table, written in groups of rows."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: DType, facts: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._numbers = pa.float32() if dtype == "float32" else pa.float16()
        self._shape = shape
        kind = self._numbers
        for size in reversed(shape):
            kind = pa.list_(kind, size)
        self._schema = pa.schema(
            [
                pa.field("index", pa.int64(), nullable=False),
                pa.field("name", pa.string(), nullable=False),
                pa.field("label", pa.string()),
                pa.field("features", kind, nullable=False),
            ],
            metadata={"vitrail": facts},
        )
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=["label"])
        self._waiting: list[Any] = []
        self._bytes = 0

    def add(self, rows: FeatureRows) -> None:
        """Add rows."""
        import pyarrow as pa

        values = pa.array(rows.features.reshape(-1), self._numbers)
        for size in reversed(self._shape):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        texts = (pa.array(column, pa.string()) for column in (rows.names, rows.labels))
        columns = [pa.array(rows.indices, pa.int64()), *texts, values]
        self._waiting.append(pa.record_batch(columns, schema=self._schema))
        self._bytes += rows.features.nbytes
        if self._bytes >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
        self._waiting, self._bytes = [], 0

    def close(self) -> None:
        """Write the last rows."""
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """Close it, ignoring errors."""
        with suppress(OSError):
            self._writer.close()
