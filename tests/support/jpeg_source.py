"""A source of JPEG files in memory."""

import io

import numpy as np
from PIL import Image

from vitrail.data.sources.source import Pixels


class JpegSource:
    """A source of JPEGs in memory, some of them corrupt."""

    classes = ("a", "b", "c")

    def __init__(self, count: int, corrupt: tuple[int, ...] = ()) -> None:
        self.labels = np.arange(count, dtype=np.int64) % 3
        self.contents = []
        for number in range(count):
            rng = np.random.default_rng(number)
            smooth = rng.integers(0, 255, (4, 5, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(smooth).resize((60 + number, 50)).save(file, "JPEG")
            self.contents.append(file.getvalue()[: 200 if number in corrupt else None])

    def __len__(self) -> int:
        return len(self.contents)

    def name(self, index: int) -> str:
        return f"images/{index}.jpg"

    def read(self, index: int) -> bytes | Pixels:
        return self.contents[index]

    def stamp(self, index: int) -> tuple[int, int]:
        return len(self.contents[index]), 0
