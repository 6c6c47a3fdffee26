"""Settings shared by all tests."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

# Shells ignore SIGINT for background jobs, and the commands that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Triton reads it when it is imported, which a test of something else may do first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Some tests import it themselves. It would start a thread that sends to its makers, in processes that fork.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Several pytest processes share the machine; one thread each is fastest, for the processes that they start, too.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    """Start every test from the same random state, and restore it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    # On a CPU without bf16, using bf16 disables oneDNN for good, and other kernels round differently.
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
