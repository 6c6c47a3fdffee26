"""The benchmark against other libraries says in one sentence what it cannot do."""

import sys

import pytest
from benchmarks import gpu

from vitrail.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch is 0; give 1 or more"),
        (["--seconds", "nan"], "--seconds is nan; give 0 or more"),
        (["--contestants", "("], "'(' is no regular expression"),
        (["--only", "inference:Q/16"], "no row is called 'inference:Q/16'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.parse()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cuda:77"])
    with pytest.raises(ConfigError, match="is not on this machine"):
        gpu.parse()


def test_contestants_are_named_by_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--contestants", "^vitrail$", "timm graphs"])
    assert list(gpu.contestants(gpu.parse(), None)["training"]) == ["vitrail", "timm graphs"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--contestants", "nobody"])
    with pytest.raises(ConfigError, match="no contestant is called nobody; there are vitrail bf16, timm compile"):
        gpu.contestants(gpu.parse(), None)
