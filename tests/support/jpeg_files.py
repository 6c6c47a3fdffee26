"""JPEG files of every kind, and others, on disk."""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.sources.source import Pixels, read_file


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return a smooth image, with edges, whose regions all differ."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    smooth.paste((250, 20, 90), (width // 3, height // 4, width // 2, height // 2))
    return smooth


def jpeg(image: Image.Image, orientation: int = 1, **options: object) -> bytes:
    """Encode an image."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    image.save(file, "JPEG", exif=exif, **{"quality": 90, **options})
    return file.getvalue()


class Ending(NamedTuple):
    """A kind of file."""

    name: str
    bad: bool = False


ENDINGS = (
    Ending("plain.jpg"),
    Ending("turned.jpg"),
    Ending("grey.jpg"),
    Ending("full.jpg"),
    Ending("progressive.jpg"),
    Ending("cmyk.jpg"),
    Ending("appended.jpg"),
    Ending("truncated.jpg", bad=True),
    Ending("text.jpg", bad=True),
    Ending("image.png"),
)


def content_of(name: str, seed: int) -> bytes:
    """Return the content of a file of some kind."""
    image = photo(50 + 3 * seed, 70 - 2 * seed, seed)
    match name.partition(".")[0]:
        case "turned":
            return jpeg(image, orientation=2 + seed % 7)
        case "grey":
            return jpeg(image.convert("L"))
        case "full":
            return jpeg(image, subsampling=0)
        case "progressive":
            return jpeg(image, progressive=True)
        case "cmyk":
            return jpeg(image.convert("CMYK"))
        case "appended":
            return jpeg(image) + b"a video"
        case "truncated":
            return jpeg(image)[:-300]
        case "text":
            return b"not an image"
        case "image":
            file = io.BytesIO()
            image.save(file, "PNG")
            return file.getvalue()
    return jpeg(image)


class MixedFiles:
    """A source of some files of each kind."""

    classes = ("a", "b", "c")

    def __init__(self, folder: Path, each: int) -> None:
        self.files = [folder / f"{number}-{ending.name}" for number in range(each) for ending in ENDINGS]
        for seed, file in enumerate(self.files):
            file.write_bytes(content_of(file.name.partition("-")[2], seed % 11))
        self.labels = np.arange(len(self.files), dtype=np.int64) % 3

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index].name

    def read(self, index: int) -> bytes | Pixels:
        return read_file(str(self.files[index]), self.name(index))

    def stamp(self, index: int) -> tuple[int, int]:
        return index, 0
