"""Golden values: parameter names, config fields and logits must not change unnoticed (`make golden`)."""

import json

import pytest
from tests.golden.regenerate import GOLDEN, HERE, logits


@pytest.mark.parametrize("name", ["parameter_names.txt", "config_fields.json"])
def test_contract(name: str) -> None:
    assert GOLDEN[name]() == (HERE / name).read_text(encoding="utf-8")


def test_golden_logits() -> None:
    actual, expected = (json.loads(text) for text in (logits(), (HERE / "logits.json").read_text(encoding="utf-8")))
    assert actual == pytest.approx(expected, rel=1e-4)
