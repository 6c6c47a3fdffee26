"""Throughput and agreement in int8: our float32, int8 in OpenVINO, and what was tried instead.

    python benchmarks/int8.py photos/ --repeats 9
    python benchmarks/int8.py photos/ --model runs/pets/best --repeats 9

Without `--model` it is an S/16 at 224 with random weights, which is as fast as a trained one; its agreement says
little, and is not required. All contenders run in turns on the same images in memory, normalisation included; ratios
compare calls of the same turn. ONNX Runtime's own quantiser is run on the same calibration images, with `--all`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peers import scramble

import vitrail
from vitrail import Bundle
from vitrail.acceleration.engine import open_engine
from vitrail.acceleration.export.graph import Graph, output_name, trace
from vitrail.acceleration.export.onnx import OnnxFile, onnx_program, write_onnx
from vitrail.acceleration.export.openvino import Compiled
from vitrail.acceleration.int8.engine import Int8Engine
from vitrail.data.inputs import fitted
from vitrail.inference.listing import list_items
from vitrail.quantisation import CalibrationImages, calibration_images, open_unchecked

CPU = torch.device("cpu")
Run = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("images", help="a folder of images: they are computed, and calibrate int8")
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="also the contenders that were not chosen")
    asked = parser.parse_args()
    bundle = vitrail.load(asked.model) if asked.model else _random_s16()
    with tempfile.TemporaryDirectory() as folder:
        runs, engine = _contenders(bundle, asked.images, Path(folder), everything=asked.all)
        pixels = _pixels(bundle, asked.images, asked.batch)
        _measure(runs, pixels, asked.repeats)
    print(f"int8: {engine.plan}")


def _random_s16() -> Bundle:
    torch.manual_seed(0)
    model = scramble(vitrail.create("vit_small_patch16_224", classes=1000)).eval()
    preprocess = vitrail.Preprocess(size=(224, 224), resize="cover", resize_to=(256, 256))
    return Bundle(model, preprocess)  # type: ignore[arg-type]


def _contenders(bundle: Bundle, images: str, folder: Path, *, everything: bool) -> tuple[dict[str, Run], Int8Engine]:
    engine = open_unchecked(bundle, images, device=CPU)
    runs: dict[str, Run] = {
        "torch, float32": open_engine(bundle.model, bundle.preprocess, device=CPU),
        "openvino, int8 (NNCF)": engine,
    }
    if not everything:
        return runs, engine
    path = folder / "float32.onnx"
    write_onnx(onnx_program(trace(Graph(bundle.model, bundle.preprocess)), output_name(bundle.model)), path)
    theirs = _quantised_by_onnxruntime(path, calibration_images(bundle, images))
    runs |= {
        "onnx, float32": OnnxFile(path),
        "openvino, float32": Compiled(path),
        "onnx, int8 (ONNX Runtime)": OnnxFile(theirs),
        "openvino, int8 (ONNX Runtime)": Compiled(theirs),
    }
    return runs, engine


def _quantised_by_onnxruntime(path: Path, images: CalibrationImages) -> Path:
    """Quantise statically: per channel, matmuls only, as recommended for transformers."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(images.calibration.split(1))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"pixels": batch.contiguous().numpy()}

    prepared, made = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(prepared),
        str(made),
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm", "Conv"],
    )
    return made


def _pixels(bundle: Bundle, images: str, count: int) -> Tensor:
    rows = [fitted(item, bundle.preprocess) for item in list_items([images])][:count]
    repeats = -(-count // len(rows))
    return torch.stack([torch.from_numpy(row) for row in rows]).repeat(repeats, 1, 1, 1)[:count].permute(0, 3, 1, 2)


def _measure(runs: dict[str, Run], pixels: Tensor, repeats: int) -> None:
    expected = next(iter(runs.values()))(pixels)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            started, used = time.perf_counter(), time.process_time()
            outputs = run(pixels)
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
            else:
                same = int((outputs.argmax(1) == expected.argmax(1)).sum())
                change = float((outputs.softmax(1) - expected.softmax(1)).abs().max())
                print(f"{name}: {same} of {len(pixels)} have the same top class, probabilities within {change:.4f}")
    exact = next(iter(runs))
    print(f"\n{len(pixels)} images a call, {torch.get_num_threads()} threads, onnxruntime {onnxruntime.__version__}")
    for name in runs:
        ratio = statistics.median(a / b for a, b in zip(seconds[exact], seconds[name], strict=True))
        by_cpu = statistics.median(a / b for a, b in zip(cpu[exact], cpu[name], strict=True))
        median, spent = statistics.median(seconds[name]), 1000 * statistics.median(cpu[name]) / len(pixels)
        print(
            f"{name}: {len(pixels) / median:.1f} images/s ({ratio:.2f}×), {spent:.1f} ms of CPU time per image "
            f"({by_cpu:.2f}×)"
        )


if __name__ == "__main__":
    main()
