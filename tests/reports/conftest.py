"""Runs shared by all report tests; tests that change one use a copy."""

import shutil
from pathlib import Path

import pytest
from tests.support.mask_data import write_shapes
from tests.support.tiny_runs import CLASSES, COLUMNS, images, labelled_images, tiny_pretraining, tiny_run

from vitrail import Run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("reports") / "data")


@pytest.fixture(scope="session")
def run(data: Path) -> Path:
    return tiny_run(data, data.parents[1] / "a <i>run & more").folder


@pytest.fixture(scope="session")
def other_run(data: Path) -> Path:
    return tiny_run(data, data.parents[1] / "other", "optimizer.lr=0.01", "epochs=6").folder


@pytest.fixture(scope="session")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same images with several labels each, and with numbers."""
    return labelled_images(tmp_path_factory.mktemp("targets") / "data")


@pytest.fixture(scope="session")
def labels_run(manifests: tuple[Path, Path]) -> Path:
    return tiny_run(manifests[0], manifests[0].parents[1] / "labels").folder


@pytest.fixture(scope="session")
def other_labels_run(manifests: tuple[Path, Path]) -> Path:
    return tiny_run(manifests[0], manifests[0].parents[1] / "other labels", "optimizer.lr=0.03").folder


@pytest.fixture(scope="session")
def value_run(manifests: tuple[Path, Path]) -> Path:
    """A run on one column of numbers."""
    return tiny_run(manifests[1], manifests[1].parents[1] / "values", f'data.labels=["{COLUMNS[0]}"]').folder


@pytest.fixture(scope="session")
def other_value_run(manifests: tuple[Path, Path]) -> Path:
    """A better one."""
    changes = (f'data.labels=["{COLUMNS[0]}"]', "optimizer.lr=0.03", "epochs=12")
    return tiny_run(manifests[1], manifests[1].parents[1] / "other values", *changes).folder


@pytest.fixture(scope="session")
def columns_run(manifests: tuple[Path, Path]) -> Path:
    """A run on two columns."""
    return tiny_run(manifests[1], manifests[1].parents[1] / "columns", f"data.labels={list(COLUMNS)}").folder


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with masks, whose classes have names that would break a page without escaping."""
    folder = write_shapes(tmp_path_factory.mktemp("masks") / "data", 90, (24, 28))
    (folder / "classes.txt").write_text("\n".join(f"{value} {name}" for value, name in enumerate(CLASSES)))
    return folder


@pytest.fixture(scope="session")
def masks_run(shapes: Path) -> Path:
    return tiny_run(shapes, shapes.parent / "masks <i>run", "model.patch_size=4", "optimizer.lr=0.01").folder


@pytest.fixture(scope="session")
def other_masks_run(shapes: Path) -> Path:
    """A run whose model has a larger input."""
    changes = ("model.image_size=24", "model.patch_size=4", "optimizer.lr=0.01", "epochs=8")
    return tiny_run(shapes, shapes.parent / "other masks", *changes).folder


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A pretraining run."""
    return tiny_pretraining(tmp_path_factory.mktemp("pretraining") / "a <i>run & more")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


@pytest.fixture
def bare(run: Path, tmp_path: Path) -> Path:
    """A run without its model, whose report is quick to write."""
    return shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("best", "last", "state"))
