"""Speed and peak memory of the model vs. timm's, with the same weights and images.

    python benchmarks/model.py
    python benchmarks/model.py --models B/16 --devices cuda --modes eager --json result.json

Both models are timed alternately in one run (ours, timm, timm, ours, …), so that throttling affects both. Every repeat
gives one ratio of throughputs, ours / timm: above 1 ours is faster. The table shows the median ratio and the
interquartile range. On each device the first case also runs with a second copy of timm's model in place of ours; the
distance of that row from 1 is the noise of this machine.

Cases: forward (eval, inference mode) and training (forward and backward of a cross-entropy loss); eager and compiled;
float32 and, where the device computes in it natively, bfloat16 autocast. A case whose logits differ is not timed.

Memory: on CUDA the peak of one step, weights included, for every case; on the CPU the growth of a fresh process that
builds one model and trains it for one step.
"""

import argparse
import gc
import json
import math
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Python adds a script's own folder to the path, but not the repository root; `tests.support.peers` imports timm.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.peers import import_peer, relative_error, scramble

from vitrail.models.variants import VARIANTS, variant_config
from vitrail.models.vit import ViT

# Without hybrids: timm names the weights of their ResNet differently.
TIMM_NAMES = {variant.paper: f"{variant.name}_224" for variant in VARIANTS if variant.resnet is None}
BATCH = {"cpu": 4, "cuda": 256}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
SAMPLE_SECONDS = 0.2
"""Seconds per timing: as many steps as fit, and at least one."""
MEMORY_MODEL = "B/16"
MEMORY_RUNS = 3


class Case(NamedTuple):
    """One row of the table."""

    device: str
    model: str
    task: str
    mode: str
    precision: str
    batch: int


class Result(NamedTuple):
    """The result of a case. Throughput is in images/s, memory in MiB."""

    case: Case
    control: bool
    """Whether a second copy of timm's model replaced ours."""
    ours: float
    timm: float
    ratio: float
    lower_quartile: float
    upper_quartile: float
    logit_error: float
    memory_ours: float | None = None
    memory_timm: float | None = None


class Side:
    """One of the two models, ready to run a case."""

    def __init__(self, model: nn.Module, case: Case, images: Tensor, labels: Tensor) -> None:
        self.model = model.train(case.task == "training").to(case.device)
        # `fullgraph`, because a graph break would silently time a partly eager model.
        self.call = torch.compile(self.model, fullgraph=True) if case.mode == "compiled" else self.model
        self.case, self.images, self.labels = case, images, labels

    def logits(self) -> Tensor:
        """Return the logits, in the precision of the case."""
        with torch.inference_mode(self.case.task == "forward"), self._precision():
            return cast("Tensor", self.call(self.images))

    def step(self) -> None:
        """Run one step of the case."""
        if self.case.task == "forward":
            self.logits()
            return
        with self._precision():
            loss = F.cross_entropy(self.call(self.images), self.labels)
        loss.backward()
        # After the step, so that these gradients do not count in the other side's peak memory.
        self.model.zero_grad(set_to_none=True)

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(self.case.device, torch.bfloat16, enabled=self.case.precision == "bfloat16")


def build_timm(name: str) -> nn.Module:
    return cast("nn.Module", import_peer("timm").create_model(TIMM_NAMES[name]))


def build_sides(case: Case, *, control: bool) -> tuple[Side, Side]:
    """Return our model (or, as a control, a second copy of timm's) and timm's, with equal weights."""
    generator = torch.Generator().manual_seed(0)
    config = variant_config(case.model)
    images = torch.randn(case.batch, config.channels, *config.image_size, generator=generator).to(case.device)
    labels = torch.randint(config.classes, (case.batch,), generator=generator).to(case.device)
    # Initial biases are zero, so equal logits would prove little without this.
    timm = scramble(build_timm(case.model))
    ours = build_timm(case.model) if control else ViT(config)
    ours.load_state_dict(timm.state_dict())
    return Side(ours, case, images, labels), Side(timm, case, images, labels)


def measure(case: Case, repeats: int, *, control: bool = False) -> Result:
    """Check that both sides agree, then time them alternately."""
    # Compiled code is cached per function, which all models share: earlier cases would count as recompilations.
    torch.compiler.reset()
    ours, timm = build_sides(case, control=control)
    error = relative_error(ours.logits().detach().float(), timm.logits().detach().float())
    if error > TOLERANCE[case.precision]:
        raise SystemExit(f"{case}: the logits differ by {error:.1e} (relative), more than {TOLERANCE[case.precision]}")
    steps = warm_up(ours, timm)
    pairs = [time_pair(ours, timm, steps, swap=bool(repeat % 2)) for repeat in range(repeats)]
    ratios = [theirs / mine for mine, theirs in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    mine, theirs = (case.batch * steps / statistics.median(side) for side in zip(*pairs, strict=True))
    memory = (cuda_peak(ours), cuda_peak(timm)) if case.device == "cuda" else (None, None)
    return Result(case, control, mine, theirs, middle, low, high, error, *memory)


def warm_up(ours: Side, timm: Side) -> int:
    """Warm up both sides; return the number of steps per timing."""
    for side in (ours, timm, ours, timm):
        side.step()
    return max(1, math.floor(SAMPLE_SECONDS / time_steps(timm, 1)))


def time_pair(ours: Side, timm: Side, steps: int, *, swap: bool) -> tuple[float, float]:
    """Time our side and timm's, timm's first if `swap`: the second has warmer caches, or a hotter chip."""
    if swap:
        theirs, mine = time_steps(timm, steps), time_steps(ours, steps)
    else:
        mine, theirs = time_steps(ours, steps), time_steps(timm, steps)
    return mine, theirs


def time_steps(side: Side, steps: int) -> float:
    """Return the seconds of several steps."""
    synchronise(side.case.device)
    start = time.perf_counter()
    for _ in range(steps):
        side.step()
    synchronise(side.case.device)
    return time.perf_counter() - start


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cuda_peak(side: Side) -> float:
    """Return the peak memory of one step in MiB: this side's weights, plus what the step adds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    side.step()
    torch.cuda.synchronize()
    weights = sum(p.numel() * p.element_size() for p in side.model.parameters())
    return (torch.cuda.max_memory_allocated() - before + weights) / 2**20


def cpu_peaks(batch: int) -> tuple[float, float]:
    """Return the memory growth in MiB of a fresh process that trains ours, and timm's, for one step."""
    case = Case("cpu", MEMORY_MODEL, "training", "eager", "float32", batch)
    peaks: tuple[list[float], list[float]] = ([], [])
    for _ in range(MEMORY_RUNS):
        for control, peak in zip((False, True), peaks, strict=True):
            # `spawn`, because a forked process starts with its parent's memory.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak.append(pool.apply(process_growth, (case, control)))
    return statistics.median(peaks[0]), statistics.median(peaks[1])


def process_growth(case: Case, timm: bool) -> float:
    """Build one model in this process, train it for a step, and return the growth of peak memory in MiB."""
    import_peer("timm")
    before = process_peak()
    config = variant_config(case.model)
    model = build_timm(case.model) if timm else ViT(config)
    images = torch.randn(case.batch, config.channels, *config.image_size)
    Side(model, case, images, torch.zeros(case.batch, dtype=torch.long)).step()
    return process_peak() - before


def process_peak() -> float:
    """Return the peak resident memory of this process in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def precisions(device: str) -> tuple[str, ...]:
    """Return the precisions that the device supports natively."""
    native = torch.cuda.is_bf16_supported(including_emulation=False) if device == "cuda" else cpu_has_bfloat16()
    return ("float32", "bfloat16") if native else ("float32",)


def cpu_has_bfloat16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN also accepts CPUs that only emulate bfloat16 with AVX-512.
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cases(options: argparse.Namespace, device: str) -> Iterator[Case]:
    batch = options.batch or BATCH[device]
    for mode in options.modes:
        for model in options.models:
            for precision in precisions(device):
                for task in ("forward", "training"):
                    yield Case(device, model, task, mode, precision, batch)


def measure_all(options: argparse.Namespace) -> Iterator[Result]:
    """Run every case, and on each device the first one again as a control."""
    for device in options.devices:
        for number, case in enumerate(cases(options, device)):
            for control in (True, False) if number == 0 else (False,):
                yield measure(case, options.repeats, control=control)
                # Free the models of a case before building the next.
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()


HEADER = (
    f"{'device':6} {'model':6} {'task':8} {'mode':8} {'precision':9} {'batch':>5}"
    f" {'ours/s':>8} {'timm/s':>8} {'ratio':>6} {'quartiles':>15}  memory"
)


def row(result: Result) -> str:
    case = result.case
    spread = f"{result.lower_quartile:.3f} to {result.upper_quartile:.3f}"
    memory = memory_ratio(result.memory_ours, result.memory_timm) if result.memory_ours and result.memory_timm else ""
    return (
        f"{case.device:6} {case.model:6} {case.task:8} {case.mode:8} {case.precision:9} {case.batch:5}"
        f" {result.ours:8.1f} {result.timm:8.1f} {result.ratio:6.3f} {spread:>15}  {memory}"
        f"{' control: timm / timm' if result.control else ''}"
    ).rstrip()


def memory_ratio(ours: float, timm: float) -> str:
    return f"{ours / timm:.3f} ({ours:.0f} / {timm:.0f} MiB)"


def environment() -> dict[str, Any]:
    """Return the environment of the measurements."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": import_peer("timm").__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def parse() -> argparse.Namespace:
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser = argparse.ArgumentParser(description="Compare the model's speed and memory with timm's.")
    parser.add_argument("--models", nargs="+", choices=TIMM_NAMES, default=["Ti/16", "S/16", "B/16"])
    parser.add_argument("--batch", type=int, help=f"batch size (default: {BATCH})")
    parser.add_argument("--repeats", type=int, default=11, help="timings of each side, at least 2")
    parser.add_argument("--devices", nargs="+", choices=available, default=available)
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, to show their spread")
    return options


def main() -> None:
    options = parse()
    record: dict[str, Any] = {"environment": environment(), "repeats": options.repeats}
    print(", ".join(f"{key} {value}" for key, value in record["environment"].items() if value), flush=True)
    if "cpu" in options.devices:
        # First, because a process inherits the peak memory of its parent, which is still small now.
        batch = options.batch or BATCH["cpu"]
        ours, timm = cpu_peaks(batch)
        print(f"cpu memory, {MEMORY_MODEL}, one eager training step, batch {batch}: {memory_ratio(ours, timm)}")
        record["cpu_memory"] = {"model": MEMORY_MODEL, "batch": batch, "ours": ours, "timm": timm}
    for device in options.devices:
        if "bfloat16" not in precisions(device):
            print(f"{device}: bfloat16 is skipped, the device does not support it natively")
    print(f"\n{HEADER}", flush=True)
    record["results"] = []
    for result in measure_all(options):
        print(row(result), flush=True)
        record["results"].append({**result._asdict(), "case": result.case._asdict()})
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
