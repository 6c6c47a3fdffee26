"""A truncated or bit-flipped file opens, or gives a one-line error; it never raises another exception."""

from pathlib import Path

import pytest
from tests.support.corrupt_files import CASES, check


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.slow])
def test_damage(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_damage_at_many_places(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, 12 if CASES[name].slow else 150, seed=1)
