"""What every test shares."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

# A shell starts what runs in its background with Ctrl-C switched off, also for the commands that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Several pytest processes share the machine; one thread each is faster than all of them for all.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    """Start every test from the same random state and leave none behind."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    # bf16 on a processor without it makes torch give up oneDNN for good, and other kernels round otherwise.
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
