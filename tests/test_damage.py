"""A truncated or bit-flipped file opens, or gives a one-line error; it never raises another exception."""

from pathlib import Path

import pytest
from tests.damaging import KINDS, check


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.slow])
def test_corruption(name: str, tmp_path: Path) -> None:
    check(KINDS[name], tmp_path, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_corruption_at_many_offsets(name: str, tmp_path: Path) -> None:
    check(KINDS[name], tmp_path, 12 if KINDS[name].slow else 150, seed=1)
