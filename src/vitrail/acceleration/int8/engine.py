"""The int8 engine: a quantised graph in OpenVINO, one stream per core."""

import threading
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vitrail.acceleration.cpu.threads import CpuThreads
from vitrail.acceleration.export.graph import quiet, require
from vitrail.acceleration.export.openvino import core
from vitrail.acceleration.int8.check import Int8Check
from vitrail.acceleration.planner import ExecutionPlan
from vitrail.errors import CheckpointError
from vitrail.text import first_line


class Int8Engine:
    """A quantised model in OpenVINO. Its inputs are pixels (B, C, H, W), its outputs float32.

    A large batch is split into chunks that run on one core each, as in the torch engine; a few images use all cores.
    """

    kind: Literal["openvino"] = "openvino"
    precision: Literal["int8"] = "int8"

    def __init__(self, path: Path, plan: ExecutionPlan, check: Int8Check, digest: str) -> None:
        self.check, self.digest = check, digest
        self.plan = plan._replace(reason="; ".join(filter(None, (check.text, plan.reason))))
        self.cpu_threads = CpuThreads()
        threads = torch.get_num_threads()
        self._few = _Session(path, threads, streams=1)
        self._many = _Session(path, threads, streams=threads) if self.cpu_threads.one_core_each else self._few

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the outputs for images."""
        return self.cpu_threads(self._run, pixels)

    def _run(self, pixels: Tensor) -> Tensor:
        # In a thread of the pool, torch has one core.
        return (self._many if torch.get_num_threads() == 1 else self._few)(pixels)


class _Session:
    """A graph compiled for this CPU; threads may call it at the same time."""

    def __init__(self, path: Path, threads: int, *, streams: int) -> None:
        require("openvino", "int8")
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",  # what is not int8 stays in float32
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": streams,
        }
        try:
            with quiet():
                self.compiled = core().compile_model(core().read_model(path), "CPU", settings)
        except RuntimeError as error:
            raise CheckpointError(f"OpenVINO cannot open the quantised model ({first_line(error)})") from None
        self._local = threading.local()

    def __call__(self, pixels: Tensor) -> Tensor:
        request = getattr(self._local, "request", None)
        if request is None:
            request = self._local.request = self.compiled.create_infer_request()
        # Into OpenVINO's own memory. An array as input deadlocks with several threads: one holds the GIL and waits
        # for OpenVINO's lock, another frees its previous array inside that lock, for which it needs the GIL.
        tensor = request.get_input_tensor(0)
        tensor.shape = list(pixels.shape)
        tensor.data[:] = pixels.numpy()
        request.infer()
        return torch.from_numpy(request.get_output_tensor(0).data.copy())
