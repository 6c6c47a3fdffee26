"""Whatever is truncated or flipped opens, or is refused in one sentence; never does another exception come out."""

from pathlib import Path

import pytest
from tests.damaging import DAMAGE_CASES, check


@pytest.mark.parametrize("name", [name for name, kind in DAMAGE_CASES.items() if not kind.slow])
def test_damage(name: str, tmp_path: Path) -> None:
    check(DAMAGE_CASES[name], tmp_path, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE_CASES)
def test_damage_at_many_places(name: str, tmp_path: Path) -> None:
    check(DAMAGE_CASES[name], tmp_path, 12 if DAMAGE_CASES[name].slow else 150, seed=1)
