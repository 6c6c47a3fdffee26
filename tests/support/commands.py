"""Commands of `vitrail` in this process, which has already imported torch."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from vitrail.__main__ import main

PLAN = re.compile(r"(eager|packed oneDNN path|fused CUDA path), (float32|bf16|fp16)(, CUDA graphs)?(: .+)?")
"""The execution plan as one line; which one it is depends on the machine."""


class CommandOutput(NamedTuple):
    """The exit code of a command and its output."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Parse the output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def after_plan(self) -> str:
        """Return stderr after its first line, which is the execution plan."""
        plan, _, rest = self.err.partition("\n")
        assert PLAN.fullmatch(plan), self.err
        return rest


RunCommand = Callable[..., CommandOutput]
"""A fixture that runs a command with the words it is given."""


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> CommandOutput:
    """Run `vitrail` with these words; output from before is dropped."""
    monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    return CommandOutput(int(left.value.code or 0), *capsys.readouterr())
