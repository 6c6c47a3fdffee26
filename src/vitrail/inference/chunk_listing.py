"""The images of a bulk job as a file: the driver writes it once, and a worker reads the images of its chunk.

It is a Parquet file with one row group per chunk. It holds names and locations, not images: a worker reads an image
that a Parquet manifest contains from that manifest. So neither memory nor network traffic grow with the images listed.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from vitrail.data.inputs import Item, is_url
from vitrail.data.sources.parquet import images_of, import_pyarrow
from vitrail.data.sources.source import Source, digits
from vitrail.errors import DataError, VitrailError
from vitrail.inference.listing import DIGITS
from vitrail.io import atomic_write, flush

TABLES_HELD = 4
"""Number of Parquet manifests that a worker keeps open."""


def write_listing(items: Iterator[Item], target: Path, chunk: int) -> tuple[int, str]:
    """Write the images, and return how many they are and a digest of them."""
    arrow: Any = import_pyarrow(os.fspath(target))
    schema = arrow.schema(
        [
            ("name", arrow.binary()),
            ("file", arrow.binary()),
            ("start", arrow.int64()),
            ("size", arrow.int64()),
            ("error", arrow.string()),
            ("contained", arrow.bool_()),
        ]
    )
    digest, images = hashlib.sha256(), 0
    with atomic_write(target) as temporary:
        with arrow.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
            while rows := [_row(item) for item in islice(items, chunk)]:
                for row in rows:
                    digest.update(repr(tuple(row.values())).encode())
                images += len(rows)
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema), row_group_size=chunk)
        flush(temporary)
    return images, digest.hexdigest()[:32]


def _row(item: Item) -> dict[str, Any]:
    contained = item.content is not None
    # A worker may run in another folder.
    relative = item.file and item.file != DIGITS and not is_url(item.file)
    file = os.path.abspath(item.file) if relative else item.file
    return {
        "name": item.name,
        "file": file,
        "start": item.start,
        "size": item.size,
        "error": item.error,
        "contained": contained,
    }


def read_listing(listing: Path, chunk: int) -> Iterator[Item]:
    """Yield the images of a chunk."""
    arrow: Any = import_pyarrow(os.fspath(listing))
    try:
        rows = _opened(listing).read_row_group(chunk, use_threads=False).to_pylist()
    except (OSError, arrow.ArrowException):
        raise DataError(
            f"{listing} cannot be read by a worker; the output folder must be on a disk that all machines share"
        ) from None
    for row in rows:
        if not row.pop("contained"):
            yield Item(**row)
            continue
        try:
            content = _table(row["file"]).read(row["start"])
        except VitrailError as error:
            yield Item(row["name"], error=str(error))
        else:
            yield Item(row["name"], row["file"], row["start"], content=content)


@lru_cache(maxsize=1)
def _opened(listing: Path) -> Any:
    # Kept open: parsing the footer takes longer the more chunks there are.
    return import_pyarrow(os.fspath(listing)).parquet.ParquetFile(listing)


@lru_cache(maxsize=TABLES_HELD)
def _table(place: bytes) -> Source:
    return digits() if place == DIGITS else images_of(os.fsdecode(place))
