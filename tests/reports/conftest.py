"""Three runs shared by all report tests; tests that change one use a copy."""

import shutil
from pathlib import Path

import pytest
from tests.support.tiny_runs import images, tiny_pretraining, tiny_run

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
