"""The servers that `vitrail serve` is compared with: FastAPI and LitServe around a timm model.

    python benchmarks/serve_peers.py KIND PRECISION DEVICE PORT BUNDLE

async     FastAPI, `async def` as in its tutorial: one image at a time
thread    FastAPI, `def`: one image at a time, in its thread pool
litserve  LitServe, which batches (benchmarks/serve_litserve.py); its workers (`--workers`) decode and compute at once
"""

import argparse
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tests.support.peers import import_peer
from torch import Tensor, nn

TOP = 5


class Timm:
    """A timm model and its transform."""

    def __init__(self, bundle: Path, precision: str, device: str, compiled: bool) -> None:
        timm = import_peer("timm")
        model: nn.Module = timm.create_model(f"local-dir:{bundle}", pretrained=True).eval().to(device)
        self.transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
        self.model = torch.compile(model, mode="max-autotune" if device == "cuda" else None) if compiled else model
        self.device, self.precision = device, precision

    def pixels(self, content: bytes) -> Tensor:
        """Decode an image."""
        pixels: Tensor = self.transform(Image.open(io.BytesIO(content)).convert("RGB"))
        return pixels

    def rows(self, pixels: Tensor) -> list[dict[str, Any]]:
        """Return the result of each image."""
        in_bf16 = torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")
        with torch.inference_mode(), in_bf16:
            likely = self.model(pixels.to(self.device)).float().softmax(dim=1).topk(TOP)
        both = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        return [
            {"classes": [{"index": i, "probability": p} for i, p in zip(indices, values, strict=True)]}
            for indices, values in both
        ]


def run_fastapi(kind: str, model: Timm, port: int) -> None:
    """Serve one image at a time."""
    import uvicorn
    from fastapi import FastAPI, UploadFile

    app = FastAPI()

    def respond(content: bytes) -> dict[str, Any]:
        return {"results": model.rows(model.pixels(content).unsqueeze(0))}

    if kind == "async":

        @app.post("/predict")
        async def predict(image: UploadFile) -> dict[str, Any]:
            return respond(await image.read())

    else:

        @app.post("/predict")
        def predict_in_a_thread(image: UploadFile) -> dict[str, Any]:
            return respond(image.file.read())

    uvicorn.run(app, port=port, log_level="error")


def main() -> None:
    """Run a server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("async", "thread", "litserve"))
    parser.add_argument("precision", choices=("float32", "bf16"))
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("port", type=int)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.kind == "litserve":
        from benchmarks.serve_litserve import run_litserve

        run_litserve(options.bundle, options.precision, options.device, options.port, options.workers)
    else:
        model = Timm(options.bundle, options.precision, options.device, compiled=False)
        run_fastapi(options.kind, model, options.port)


if __name__ == "__main__":
    main()
