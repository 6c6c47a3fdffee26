"""LitServe around a timm model: batches, on a GPU compiled and in bf16."""

from pathlib import Path
from typing import Any, cast

import litserve
import torch
from benchmarks.serve_peers import Timm
from fastapi import Request, UploadFile
from starlette.datastructures import FormData
from torch import Tensor

BATCH, TIMEOUT = 64, 0.005
SIZES = (1, 4, 16, 64)
"""Batches are padded to these sizes, so that the model is compiled for a few shapes only."""


class TimmApi(litserve.LitAPI):  # type: ignore[misc]
    """Decodes, batches, predicts."""

    def __init__(self, bundle: Path, precision: str, compiled: bool) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=TIMEOUT, api_path="/predict")
        self.bundle, self.precision, self.compiled = bundle, precision, compiled

    def setup(self, device: str) -> None:
        """Load and compile the model."""
        self.timm = Timm(self.bundle, self.precision, device.partition(":")[0], self.compiled)
        for size in SIZES if self.compiled else ():
            for _ in range(3):  # compiles, and captures CUDA graphs
                self.timm.rows(torch.zeros(size, 3, 224, 224))

    def decode_request(self, request: Request) -> Tensor:
        """Decode an upload."""
        # LitServe passes a form, and knows from the annotation that it should.
        image = cast("FormData", request)["image"]
        return self.timm.pixels(cast("UploadFile", image).file.read())

    def batch(self, inputs: list[Tensor]) -> Tensor:
        """Stack images."""
        return torch.stack(inputs)

    def predict(self, x: Tensor) -> list[dict[str, Any]]:
        """Return the results of a batch."""
        count = len(x)
        size = next(size for size in SIZES if size >= count) if self.compiled else count
        return self.timm.rows(torch.cat([x, x.new_zeros(size - count, *x.shape[1:])]))[:count]

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the result of each image."""
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """Wrap a result as the other servers do."""
        return {"results": [output]}


def run_litserve(bundle: Path, precision: str, device: str, port: int, workers: int) -> None:
    """Serve batches."""
    api = TimmApi(bundle, precision, compiled=device != "cpu")
    server = litserve.LitServer(api, accelerator=device, devices=1, workers_per_device=workers, timeout=120)
    server.run(port=port, log_level="error", generate_client_file=False)
