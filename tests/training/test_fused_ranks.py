"""The fused path on two ranks: the update of one rank, with gradients reduced during the backward pass."""

import json
from typing import Any

import pytest
from tests.support import forked_commands
from tests.support.fused_ranks import CASES, too_large

pytestmark = pytest.mark.slow  # every rank imports torch's compiler


def measured(ranks: int, backend: str, *cases: str) -> dict[str, Any]:
    code = "from tests.support.fused_ranks import main; main()"
    results = forked_commands.run_ranks(ranks, "cpu", backend, *cases, code=code)
    assert [done.returncode for done in results] == [0] * ranks, [done.stderr for done in results]
    found: dict[str, Any] = json.loads(results[0].stdout)
    return found


def test_two_ranks_update_as_one() -> None:
    found = measured(2, "none")
    assert too_large(found["differences"]) == {}
    assert found["differences"].keys() == CASES.keys()


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_pieces_reduce_gradients_during_the_backward_pass(ranks: int) -> None:
    found = measured(ranks, "aot_eager", "float32, accumulated")
    assert too_large(found["differences"]) == {}
    # DDP has one bucket in the first step, and then makes them in the order in which gradients were ready.
    assert [step.startswith("b") for step in found["order"]] == [False, True, True], found["order"]
