"""The documentation is correct: its code runs, its links resolve, its drawings show the actual shapes."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.peers import import_peer

from vitrail import Preprocess, ViTConfig, variant_config
from vitrail.data.inputs import fitted, item_of
from vitrail.models.stages import sample_image, stages
from vitrail.models.vit import ViT

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
DRAWINGS = sorted((DOCS / "drawings").glob("*.svg"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCREENSHOTS = [DOCS / "drawings" / "explorer.png", DOCS / "drawings" / "report.png"]
LARGEST_DRAWING, LARGEST_SCREENSHOT = 200_000, 300_000

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


SHOWN = [path for path in sorted((ROOT / "src").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Return the line number and the code of every Python block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(2)), match[2]) for match in _FENCE.finditer(text) if match[1] == "python"]


@contextlib.contextmanager
def namespace(page: Path) -> Iterator[dict[str, object]]:
    """Run a page in its own module, which is not `__main__`, as if it were imported."""
    module = ModuleType("page_" + re.sub(r"\W", "_", name_of(page)))
    sys.modules[module.__name__] = module
    try:
        yield vars(module)
    finally:
        del sys.modules[module.__name__]


# ── code ──

OTHERS_WARN = {"docs/guides/own-loop.md": "Lightning and accelerate", "docs/guides/bulk.md": "Ray"}
"""Pages that import libraries with warnings of their own."""


def pages_with_code() -> list[Any]:
    """Only the README runs with the fast tests; together the other pages take a minute."""
    marked = []
    for page in (page for page in PAGES if python_blocks(page)):
        marks = [pytest.mark.slow] if page.name != "README.md" else []
        marks += [pytest.mark.filterwarnings("ignore")] if name_of(page) in OTHERS_WARN else []
        marked.append(pytest.param(page, id=name_of(page), marks=marks))
    return marked


@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name == "own-loop.md":
        import_peer("torchvision")  # Lightning imports it if it is there
    with namespace(page) as names, contextlib.redirect_stdout(io.StringIO()):
        for line, code in python_blocks(page):
            # Pad with empty lines, so that tracebacks show the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), names)


# Pages that import from a submodule, and what they teach with it. Everything else uses the names of `vitrail`.
DEEP_IMPORTS = {
    ("docs/guides/data.md", "vitrail.data.batches"): "batches for your own training loop",
    ("docs/guides/data.md", "vitrail.data.cache"): "the cache of decoded images",
    ("docs/guides/data.md", "vitrail.data.stream"): "batches for your own training loop",
    ("docs/guides/explain.md", "vitrail.explanations.attention"): "maps of tensors, for research code",
    ("docs/guides/explain.md", "vitrail.explanations.relevance"): "maps of tensors, for research code",
    ("docs/guides/figures.md", "vitrail.explanations.figures"): "the numbers of a figure",
    ("docs/guides/performance.md", "vitrail.acceleration.auto"): "engines for your own service",
    ("docs/guides/performance.md", "vitrail.acceleration.engine"): "engines for your own service",
    ("docs/how-a-vit-sees.md", "vitrail.models.stems"): "how an image becomes patches",
}


def test_pages_and_examples_teach_the_public_names() -> None:
    """A page that imports from a submodule would break when the submodule is tidied up."""
    code = [(name_of(page), text) for page in PAGES for _, text in python_blocks(page)]
    code += [(name_of(path), path.read_text(encoding="utf-8")) for path in EXAMPLES]
    deep = re.compile(r"^\s*(?:from|import) (vitrail\.\S+)", re.MULTILINE)
    assert {(name, module) for name, text in code for module in deep.findall(text)} == set(DEEP_IMPORTS)


def page_functions(page: Path, folder: Path) -> dict[str, Any]:
    """Run the code of a page in a folder and return its namespace."""
    with namespace(page) as names, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for line, code in python_blocks(page):
            exec(compile("\n" * line + code, str(page), "exec"), names)
        return dict(names)


def test_the_onnx_example_prepares_an_image_as_predict_does(tmp_path: Path) -> None:
    """The pixels equal those of the bundle, for any image and preprocessing."""
    blocks = [code for _, code in python_blocks(DOCS / "guides" / "export.md") if "def prepared" in code]
    names: dict[str, Any] = {}
    exec(blocks[0].partition("\n# A photo")[0], names)  # only the function; another test runs the whole page
    prepared = names["prepared"]
    generator = np.random.default_rng(0)
    for number, (mode, size, turn) in enumerate(
        [("RGB", (90, 41), 6), ("RGB", (41, 90), 3), ("RGBA", (50, 50), 1), ("L", (33, 70), 8), ("RGB", (20, 21), 5)]
    ):
        channels = len(Image.new(mode, (1, 1)).getbands())
        pixels = generator.integers(0, 256, (size[1], size[0], channels), np.uint8).squeeze()
        file, exif = tmp_path / f"{number}.png", Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(pixels).save(file, exif=exif)
        for preprocess in (
            Preprocess(size=(32, 32), resize="cover", resize_to=(36, 36)),
            Preprocess(size=(24, 40), resize="cover", interpolation="bicubic", half="down"),
            Preprocess(size=(32, 32), resize="contain", mean=(0.4, 0.5, 0.6)),
            Preprocess(size=(32, 32), resize="squash", interpolation="lanczos"),
            Preprocess(size=(32, 32), resize="cover", resize_to=(28, 28)),
            Preprocess(size=(32, 32), resize="cover").with_channels(1),
        ):
            ours = fitted(item_of(file, preprocess.channels), preprocess)
            theirs = prepared(file, json.loads(preprocess.to_json()))
            assert theirs.dtype == np.uint8
            assert np.array_equal(theirs[0], ours), (mode, size, turn, preprocess)


@pytest.mark.slow
def test_the_onnx_example_predicts_what_the_command_predicts(tmp_path: Path) -> None:
    names = page_functions(DOCS / "guides" / "export.md", tmp_path)
    command = [
        sys.executable,
        "-m",
        "vitrail",
        "predict",
        "pets",
        "photo.jpg",
        "--output",
        "rows.csv",
        "--device",
        "cpu",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    text = (tmp_path / "rows.csv").read_text(encoding="utf-8")
    classes, best, probabilities = names["classes"], names["best"], names["probabilities"]
    assert str(classes[best]) in text
    written = [float(value) for value in re.findall(r"\b0\.\d+", text)]
    assert min(abs(value - float(probabilities[best])) for value in written) < 1e-3


def test_every_guide_has_code() -> None:
    with_code = {name_of(page) for page in PAGES if python_blocks(page)}
    with_examples = {"README.md", "docs/index.md", "docs/how-a-vit-sees.md"}
    assert with_examples | {name_of(page) for page in (DOCS / "guides").glob("*.md")} <= with_code


def run_example(path: Path, folder: Path) -> str:
    """Run an example with warnings as errors and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_the_example_runs(path: Path, tmp_path: Path) -> None:
    printed = run_example(path, tmp_path)
    if path.name == "segmentation_head.py":
        match = re.search(r"intersection over union[^:]*: (\d\.\d+)", printed)
        assert match is not None, printed
        assert float(match[1]) > 0.7


# ── words ──


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_resolve(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link) and not link.startswith("#")]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_every_option_of_a_model_is_explained() -> None:
    page = (DOCS / "guides" / "model.md").read_text(encoding="utf-8")
    assert [field for field in ViTConfig.model_fields if f"| `{field}` |" not in page] == []


def test_every_decision_is_listed() -> None:
    listed = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    decisions = [page.name for page in (DOCS / "decisions").glob("[0-9]*.md")]
    assert decisions
    assert [name for name in decisions if f"({name})" not in listed or f"decisions/{name}" not in navigation] == []


def test_the_make_targets_in_the_text_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in (ROOT / "README.md", DOCS / "index.md"):
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {"demo", "test"} <= set(named) <= targets


# ── drawings ──


def words(drawing: Path) -> list[str]:
    """Return every text in a drawing."""
    tree = ElementTree.parse(drawing)
    return ["".join(element.itertext()) for element in tree.iter("{http://www.w3.org/2000/svg}text")]


def load_drawing_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "drawings" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", DRAWINGS, ids=name_of)
def test_a_drawing_is_self_contained(path: Path) -> None:
    """It is small, follows dark mode, is large enough to read, and loads no other file."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < LARGEST_DRAWING
    assert "prefers-color-scheme:dark" in text
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', text)) >= 13
    fetched = re.findall(r'(?:href|src)="(?!data:|#)[^"]*"|url\((?!#)|@import|@font-face|<script', text)
    assert fetched == []


@pytest.mark.parametrize("path", SCREENSHOTS, ids=name_of)
def test_screenshots_are_small_and_used(path: Path) -> None:
    with Image.open(path) as image:
        assert image.width >= 1280
    assert path.stat().st_size < LARGEST_SCREENSHOT
    assert f"](docs/drawings/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_image_has_alt_text() -> None:
    for page in PAGES:
        assert "![](" not in page.read_text(encoding="utf-8"), name_of(page)


def test_the_drawing_shows_the_shapes_of_the_model() -> None:
    # The drawing cuts the image and flattens the patches, as in the paper; a convolution does both at once.
    config = variant_config("B/16").replace(stem="linear")
    with torch.device("meta"):  # shapes only
        result = stages(ViT(config).eval(), sample_image(config.channels, config.image_size))
    written = words(DOCS / "drawings" / "how-a-vit-sees.svg")
    for stage in result:
        assert " × ".join(map(str, stage.shape[1:])) in written, stage
    assert f"{math.prod(result[0].shape):,} numbers" in written
    assert f"{config.width} → {config.mlp_hidden} → {config.width}" in written


def test_the_drawings_are_up_to_date(tmp_path: Path) -> None:
    """`make drawings` writes the same text. Pixels are not compared: they may differ between machines."""
    program = load_drawing_program()
    with torch.no_grad():
        program.draw_how_a_vit_sees(tmp_path)
        program.draw_project(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in DRAWINGS]
    for path in DRAWINGS:
        assert words(tmp_path / path.name) == words(path), f"run `make drawings`: {path.name} is out of date"


# ── the site ──


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    html = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    assert len(html) >= len(PAGES) - 1
    # Opening a page makes no external request.
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//'
    )
    assert [page for page in html if fetched.search(page)] == []


@pytest.mark.parametrize("path", SHOWN, ids=name_of)
def test_the_docstring_examples_run(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed
