"""The page's files, read once at the start: a client's path is looked up in a table and never opened."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from vitrail.training.samples import samples_of_bundle

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}
MOST_SAMPLES, LARGEST_SAMPLE = 12, 200_000
"""How many samples of a model's own classes are offered, and how many bytes one may have."""
JPEG = b"\xff\xd8\xff"
FOLDER = Path(__file__).parent / "page"


class PageFile(NamedTuple):
    """A file that is served as it is."""

    content: bytes
    media_type: str
    tag: str
    """A name for this content; a browser that has it already need not get it again."""


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Return the page's files by their addresses: / is index.html, samples are below /samples, all else /assets."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES and path.is_file():
            place = path.relative_to(folder).as_posix()
            address = (
                "/" if place == "index.html" else f"/{place}" if place.startswith("samples/") else f"/assets/{place}"
            )
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[address] = PageFile(content, TYPES[path.suffix], tag)
    return found


def sample_list(files: dict[str, PageFile]) -> list[dict[str, str]]:
    """Return the sample images with their names, in the order of their files."""
    # Their addresses are relative, as all of the page's: a proxy may have put the service below another path.
    return [
        {"name": _called(address), "url": address.lstrip("/")}
        for address, file in files.items()
        if address.startswith("/samples/") and file.media_type.startswith("image/")
    ]


class OwnSample(NamedTuple):
    """An image that the run of a model kept: the class it has, and the JPEG itself."""

    label: str
    content: bytes


def own_samples(source: str) -> list[OwnSample]:
    """Read an image of each of a few of a model's classes, where the model lies in a run that kept some."""
    if not Path(source).is_dir():  # a file, or a name of a hub
        return []
    first: dict[str, Path] = {}
    for sample in samples_of_bundle(source):
        first.setdefault(sample.label, sample.file)
    labels = list(first)
    most = min(MOST_SAMPLES, len(labels))
    found = []
    for label in (labels[place * len(labels) // most] for place in range(most)):
        try:
            with first[label].open("rb") as file:
                content = file.read(LARGEST_SAMPLE + 1)
        except OSError:
            continue
        if content.startswith(JPEG) and len(content) <= LARGEST_SAMPLE:
            found.append(OwnSample(label, content))
    return found


def _called(address: str) -> str:
    stem = address.rpartition("/")[2].rpartition(".")[0]
    return re.sub(r"^\d+-", "", stem).replace("-", " ").replace("_", " ")  # numbers before names keep their order
