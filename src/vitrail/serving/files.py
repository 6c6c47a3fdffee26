"""The page's static files, read once at startup: request paths are looked up in a table, never opened."""

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
MAX_SAMPLES, MAX_SAMPLE_BYTES = 12, 200_000
"""Maximum number of training samples per model, and bytes per sample."""
JPEG = b"\xff\xd8\xff"
FOLDER = Path(__file__).parent / "page"


class PageFile(NamedTuple):
    """A static file."""

    content: bytes
    media_type: str
    etag: str


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Return the page's files by URL path: / is index.html, samples are under /samples, the rest under /assets."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES and path.is_file():
            relative = path.relative_to(folder).as_posix()
            url = (
                "/"
                if relative == "index.html"
                else f"/{relative}"
                if relative.startswith("samples/")
                else f"/assets/{relative}"
            )
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            files[url] = PageFile(content, TYPES[path.suffix], etag)
    return files


def sample_list(files: dict[str, PageFile]) -> list[dict[str, str]]:
    """Return the built-in samples and their names, in file order."""
    # Relative URLs, like all of the page's: a proxy may serve it under another path.
    return [
        {"name": _display_name(url), "url": url.lstrip("/")}
        for url, file in files.items()
        if url.startswith("/samples/") and file.media_type.startswith("image/")
    ]


class ModelSample(NamedTuple):
    """A sample image saved by a training run: its label and the JPEG."""

    label: str
    content: bytes


def model_samples(source: str) -> list[ModelSample]:
    """Read one sample image per class, for a few classes, if the model is in a run folder with samples."""
    if not Path(source).is_dir():  # a file or a hub name
        return []
    first: dict[str, Path] = {}
    for sample in samples_of_bundle(source):
        first.setdefault(sample.label, sample.file)
    labels = list(first)
    count = min(MAX_SAMPLES, len(labels))
    samples = []
    for label in (labels[i * len(labels) // count] for i in range(count)):
        try:
            with first[label].open("rb") as file:
                content = file.read(MAX_SAMPLE_BYTES + 1)
        except OSError:
            continue
        if content.startswith(JPEG) and len(content) <= MAX_SAMPLE_BYTES:
            samples.append(ModelSample(label, content))
    return samples


def _display_name(url: str) -> str:
    stem = url.rpartition("/")[2].rpartition(".")[0]
    return re.sub(r"^\d+-", "", stem).replace("-", " ").replace("_", " ")  # a leading number only sets the order
