"""Speed and memory on a GPU: ours against timm, torchvision and transformers, each in its best mode, in one run.

    python benchmarks/gpu.py --json gpu.json                                    everything, a few minutes per row
    python benchmarks/gpu.py --only inference:B/16 training:B/16 --seconds 4    two rows
    python benchmarks/gpu.py --only training:B/16 --checkpointing               one with gradient checkpointing
    python benchmarks/gpu.py --lab                                              every kernel by itself, with predictions
    python benchmarks/gpu.py --profile B/16                                     where the time goes
    python benchmarks/gpu.py --curve 500 --sizes B/16 --seeds 3                 loss curves of both training paths
    python benchmarks/gpu.py --curve 500 --sizes B/16 --starts 2 --nudges 8     and their spread from one initialisation
    python benchmarks/gpu.py --device cpu --curve 400 --small --seeds 14        and over many seeds (40 minutes)
    python benchmarks/gpu.py --device cpu --curve 300 --small late --seeds 3    and with a late loss drop
    python benchmarks/gpu.py --device cpu --sizes Ti/16 --batch 2 --seconds 0   smoke test (minutes)

A row is a task and a size. All contestants of a row are built first, then timed in turns, so that a GPU that throttles
slows all of them; the median of the turns counts. A line is printed after every contestant and the table so far after
every row, and the JSON file is rewritten, so an interrupted run keeps its results. Peers that are not installed are
skipped by name; `--carried FOLDER` unpacks wheels from there first. Inputs are the same for a whole row: bf16 images on
the device. Peers get bf16 weights for inference, autocast for training, and torch.compile for both.

    img/s     images/s
    of GPU    model FLOPs as a fraction of the GPU's rate for large bf16 matmuls, measured at the start; counts the
              operations of the whole model (a training step is three forward passes), even where some are saved
    peak      MiB: weights, optimizer state and a step's memory; unknown with CUDA graphs
    first     seconds of the first step, including compilation
    error     relative error of the logits against the same model in float64
    top-1     fraction of images with the same top-1 class as in float64 (means little for random weights)
"""

import argparse
import contextlib
import copy
import dataclasses
import gc
import json
import math
import platform
import re
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Python adds a script's own folder to the path, but not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu_lab import device_rates, run_lab, timed
from tests.support.peers import import_peer, scramble

import vitrail
from vitrail.acceleration import planner
from vitrail.acceleration.accelerate import Accelerated
from vitrail.acceleration.cuda.fp8.calibration import calibrate
from vitrail.acceleration.cuda.inference.encoder import MATMULS, EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.acceleration.planner import can_checkpoint, unsupported_by_fp8, unsupported_by_fused_training
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.config import ViTConfig
from vitrail.models.stages import cost
from vitrail.models.variants import variant_config
from vitrail.models.vit import ViT
from vitrail.runtime import choose_device

SIZES = ("B/16", "L/16", "S/16", "Ti/16", "B/16@384")
TASKS = ("inference", "training")
BATCH = {"inference": 512, "training": 256}
SMALLER = {"L/16": 2, "B/16@384": 2}
"""Sizes with batches smaller by this factor."""
ROUNDS = 7
JUDGED = 16
"""Images whose logits are compared with float64."""
CLASSES = 100
"""Number of classes for the loss curve."""
SMALL = {
    "quick": (ViTConfig(image_size=(32, 32), patch_size=(8, 8), width=64, depth=4, heads=1, classes=20), 64, 1e-3),
    "late": (
        ViTConfig(image_size=(224, 224), patch_size=(16, 16), width=192, depth=4, heads=3, classes=CLASSES),
        32,
        3e-4,
    ),
}
"""Models for the loss curve on a CPU, with batch size and learning rate."""
NUDGE = 1e-6
"""Relative perturbation of the initial weights for runs that differ only in rounding."""
LEARNED = 2.0
"""The loss below which a run counts as having learned; chance is 4.6 for 100 classes."""
SMOOTHED = 10
"""Number of steps to average that loss over."""
BF16 = torch.bfloat16
EAGER = "eager"
"""Not compiled. Some versions of transformers build an attention mask under torch.compile, which rules out fast kernels
(5.17 does, 5.22 does not)."""
GRAPHS = "reduce-overhead"
"""The torch.compile mode that uses CUDA graphs."""
TUNED, TUNED_GRAPHS = "max-autotune-no-cudagraphs", "max-autotune"
"""The modes that autotune matmul kernels, without and with CUDA graphs."""


@dataclass(frozen=True)
class Row:
    """A task and a size, with the inputs that all its contestants get."""

    task: str
    size: str
    config: ViTConfig
    images: Tensor
    labels: Tensor
    lr: float = 1e-4
    """Learning rate."""
    checkpointing: bool = False
    """Whether training uses gradient checkpointing."""

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self.images.device


@dataclass
class Ready:
    """A contestant that is ready to run."""

    step: Callable[[], object]
    logits: Callable[[Tensor], Tensor]
    held: int
    """Bytes of weights and, in training, optimizer state."""
    replayed: bool = False


@dataclass
class Result:
    """The result of a contestant."""

    task: str
    size: str
    batch: int
    name: str
    images_per_second: float
    slowest: float
    fastest: float
    fraction_of_gpu: float
    peak_mib: float | None
    first_seconds: float
    error: float | None
    same_top1: float | None


Maker = Callable[[Row], Ready]


# ── models ──


def ours(row: Row, weights: ViT | None) -> ViT:
    """Return our model with the row's weights: those given, or the same every time.

    Training starts from weights as a fresh model has them, inference from random ones everywhere: how much power a
    matmul takes, and so how fast the GPU may be, depends on its numbers.
    """
    torch.manual_seed(0)
    model = ViT(row.config) if weights is None else copy.deepcopy(weights)
    model.gradient_checkpointing = row.checkpointing
    if weights is None and row.task != "training":
        scramble(model)
    return model


def of_timm(row: Row, weights: ViT | None) -> nn.Module:
    config = row.config
    model = import_peer("timm.models.vision_transformer").VisionTransformer(
        img_size=config.image_size, patch_size=config.patch_size, embed_dim=config.width, depth=config.depth,
        num_heads=config.heads, num_classes=config.classes,
    )  # fmt: skip
    model.load_state_dict(ours(row, weights).state_dict())
    model.set_grad_checkpointing(row.checkpointing)
    return cast("nn.Module", model)


def of_torchvision(row: Row, _: ViT | None) -> nn.Module:
    if row.checkpointing:
        raise ConfigError("torchvision's ViT has no gradient checkpointing")
    config = row.config
    model = import_peer("torchvision.models.vision_transformer").VisionTransformer(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_layers=config.depth,
        num_heads=config.heads, hidden_dim=config.width, mlp_dim=config.mlp_hidden, num_classes=config.classes,
    )  # fmt: skip
    return cast("nn.Module", model) if row.task == "training" else scramble(model)


class LogitsOnly(nn.Module):
    """A transformers model that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return cast("Tensor", self.model(x).logits)


def of_transformers(row: Row, _: ViT | None) -> nn.Module:
    config, peer = row.config, import_peer("transformers")
    settings = peer.ViTConfig(
        hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.heads,
        intermediate_size=config.mlp_hidden, image_size=config.image_size[0], patch_size=config.patch_size[0],
        num_labels=config.classes, layer_norm_eps=config.norm_eps, attn_implementation="sdpa",
    )  # fmt: skip
    model = peer.ViTForImageClassification(settings)
    if row.checkpointing:
        model.gradient_checkpointing_enable()
    return LogitsOnly(model if row.task == "training" else scramble(model))


PEERS: dict[str, Callable[[Row, ViT | None], nn.Module]] = {
    "timm": of_timm,
    "torchao": of_timm,  # which it quantises
    "torchvision": of_torchvision,
    "transformers": of_transformers,
}


# ── contestants ──


def compiled(model: nn.Module, device: torch.device, mode: str | None = None) -> Callable[[Tensor], Tensor]:
    """Compile a model; on a CPU without code generation, which would dominate the run time."""
    if mode == EAGER:
        return cast("Callable[[Tensor], Tensor]", model)
    if device.type == "cpu":
        return cast("Callable[[Tensor], Tensor]", torch.compile(model, backend="aot_eager", dynamic=False))
    return cast("Callable[[Tensor], Tensor]", torch.compile(model, mode=mode, dynamic=False))


def forward_pass(row: Row, model: nn.Module, mode: str | None = None) -> Ready:
    """Prepare a plain model: bf16 weights, compiled."""
    model = model.to(row.device, BF16).eval().requires_grad_(False)
    call = compiled(model, row.device, mode)

    def logits(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return call(images)

    return Ready(lambda: logits(row.images), logits, held(model))


def quantised_by_torchao(row: Row, model: nn.Module) -> Ready:
    """Prepare a plain model whose blocks torchao computes in float8, with a scale per row, compiled."""
    quantisation = import_peer("torchao.quantization")
    settings = quantisation.Float8DynamicActivationFloat8WeightConfig(granularity=quantisation.PerRow())

    def in_block(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "blocks." in name

    model = model.to(row.device, BF16).eval().requires_grad_(False)
    quantisation.quantize_(model, settings, filter_fn=in_block)
    call = compiled(model, row.device)

    def logits(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return call(images)

    return Ready(lambda: logits(row.images), logits, held(model))


def fast(row: Row, model: ViT, numbers: EncoderPrecision, *, graphs: bool = True) -> Ready:
    """Build what `vitrail.accelerate` builds on CUDA, on any device."""
    call = Accelerated(FastModel(model.to(row.device), numbers), row.device, graphs=graphs)
    return Ready(lambda: call(row.images), call, held(call.model), replayed=graphs)


def low(row: Row, model: ViT, **changes: Any) -> EncoderPrecision:
    """Return fp8 settings calibrated on some of the row's images."""
    like = next(model.to(row.device).parameters())
    numbers = EncoderPrecision(**changes)
    inputs = calibrate(model, row.images[:64].to(like.dtype), low=numbers.low, spared=numbers.spared)
    return dataclasses.replace(numbers, inputs=inputs)


def learning(row: Row, trained: nn.Module, forward: nn.Module, mode: str | None = None) -> Ready:
    """Build a training step: autocast, cross-entropy, fused AdamW."""
    call = compiled(forward.to(row.device).train(), row.device, mode)
    optimizer = torch.optim.AdamW(trained.parameters(), row.lr, weight_decay=0.05, fused=True)

    def logits(images: Tensor) -> Tensor:
        with torch.autocast(row.device.type, BF16):
            return call(images)

    def step() -> Tensor:
        loss = F.cross_entropy(logits(row.images).float(), row.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    # AdamW's state is two values per parameter.
    return Ready(step, logits, 3 * held(trained), replayed=mode in (GRAPHS, TUNED_GRAPHS))


def learning_plainly(row: Row, model: nn.Module, mode: str | None = None) -> Ready:
    model = model.to(row.device)
    return learning(row, model, model, mode)


def learning_fast(row: Row, model: ViT, mode: str | None = None) -> Ready:
    """Build our fused training path, as `vitrail train` uses with compile on a GPU."""
    model = model.to(row.device).train()
    short = not unsupported_by_fused_training(row.config) and (can_checkpoint() or not row.checkpointing)
    return learning(row, model, FusedTraining(model) if short else model, mode)


def contestants(options: argparse.Namespace, weights: ViT | None) -> dict[str, dict[str, Maker]]:
    """Return the contestants of each task, the most important first."""

    def peer(name: str, mode: str | None = None) -> Maker:
        return lambda row: forward_pass(row, PEERS[name](row, weights), mode)

    inference: dict[str, Maker] = {
        "vitrail bf16": lambda row: fast(row, ours(row, weights), EncoderPrecision()),
        "timm compile": peer("timm"),
        "vitrail fp8": lambda row: fast(row, model := ours(row, weights), low(row, model)),
        "vitrail bf16 exact": lambda row: fast(row, ours(row, weights), EncoderPrecision(exact=True)),
        "vitrail bf16 no graphs": lambda row: fast(row, ours(row, weights), EncoderPrecision(), graphs=False),
        "vitrail fp8 no graphs": lambda row: fast(row, model := ours(row, weights), low(row, model), graphs=False),
        "vitrail fp8 all": lambda row: fast(row, model := ours(row, weights), low(row, model, low=frozenset(MATMULS))),
        "vitrail fp8 unspared": lambda row: fast(row, model := ours(row, weights), low(row, model, spared=0)),
        "vitrail fp8 unfused": lambda row: fast(row, model := ours(row, weights), low(row, model, fused=False)),
        "vitrail bf16 fused": lambda row: fast(row, ours(row, weights), EncoderPrecision(exact=True, fused=True)),
        "vitrail fp8 rows": lambda row: fast(row, model := ours(row, weights), low(row, model, weight_scales="row")),
        "vitrail compile": lambda row: forward_pass(row, ours(row, weights)),
        "torchvision compile": peer("torchvision"),
        "transformers compile": peer("transformers"),
        "transformers eager": peer("transformers", EAGER),
        "timm max-autotune": peer("timm", TUNED),
        "torchao fp8": lambda row: quantised_by_torchao(row, of_timm(row, weights)),
    }
    training: dict[str, Maker] = {
        "vitrail": lambda row: learning_fast(row, ours(row, weights)),
        "timm compile": lambda row: learning_plainly(row, of_timm(row, weights)),
        "vitrail graphs": lambda row: learning_fast(row, ours(row, weights), GRAPHS),
        "timm graphs": lambda row: learning_plainly(row, of_timm(row, weights), GRAPHS),
        "vitrail compile": lambda row: learning_plainly(row, ours(row, weights)),
        "torchvision compile": lambda row: learning_plainly(row, of_torchvision(row, weights)),
        "transformers compile": lambda row: learning_plainly(row, of_transformers(row, weights)),
        "transformers eager": lambda row: learning_plainly(row, of_transformers(row, weights), EAGER),
        "timm max-autotune": lambda row: learning_plainly(row, of_timm(row, weights), TUNED),
        "timm max-autotune graphs": lambda row: learning_plainly(row, of_timm(row, weights), TUNED_GRAPHS),
    }
    chosen = {"inference": inference, "training": training}
    contenders = {
        task: {
            name: make for name, make in makers.items() if any(re.search(part, name) for part in options.contestants)
        }
        for task, makers in chosen.items()
    }
    if not any(contenders[task] for task in options.tasks):
        names = dict.fromkeys(name for task in options.tasks for name in chosen[task])
        raise ConfigError(f"no contestant matches {' or '.join(options.contestants)}; choose from {', '.join(names)}")
    return contenders


# ── timing ──


def held(*models: nn.Module) -> int:
    """Return the bytes of the models' parameters and buffers, counting shared ones once."""
    tensors = {tensor for model in models for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(row: Row, makers: dict[str, Maker], options: argparse.Namespace, rate: float) -> Iterator[Result]:
    """Build every contestant of a row, then time them in turns."""
    ready: dict[str, Ready] = {}
    first: dict[str, float] = {}
    errors: dict[str, tuple[float | None, float | None]] = {}
    for name, make in makers.items():
        if time.perf_counter() > options.deadline:
            print(f"  {name}: skipped, the time limit is reached", flush=True)
            continue
        try:
            start = time.perf_counter()
            made = make(row)
            synchronise(row.device)
            built = time.perf_counter()
            made.step()
            synchronise(row.device)
            first[name] = time.perf_counter() - built
            errors[name] = judge(row, name, made, options.weights_model)
            once = timed(made.step, 2, row.device)
            ready[name] = made
            print(
                f"  {name}: built in {built - start:.1f} s, first step {first[name]:.1f} s, then"
                f" {len(row.images) / once:,.0f} img/s; error {show(errors[name][0], '.1e')}",
                flush=True,
            )
        except ModuleNotFoundError as error:
            print(f"  {name}: skipped, {error.name} is not installed; pip install '.[test]'", flush=True)
        except Exception as error:  # a failing peer or kernel must not end the run
            print(f"  {name}: skipped, {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    times = take_turns(row, ready, options.seconds)
    flops = cost(row.config).flops * (3 if row.task == "training" else 1)
    for name, made in ready.items():
        count, middle = len(row.images), statistics.median(times[name])
        yield Result(
            row.task, row.size, count, name, count / middle, count / max(times[name]), count / min(times[name]),
            flops * count / middle / rate, peak(row, made), first[name], *errors[name],
        )  # fmt: skip


def take_turns(row: Row, ready: dict[str, Ready], seconds: float) -> dict[str, list[float]]:
    """Return several step times for each contestant, alternating the order."""
    steps = {name: max(1, int(seconds / ROUNDS / timed(made.step, 1, row.device))) for name, made in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(ROUNDS):
        for name in list(ready) if number % 2 == 0 else list(reversed(ready)):
            times[name].append(timed(ready[name].step, steps[name], row.device))
    return times


def judge(row: Row, name: str, made: Ready, weights: ViT | None) -> tuple[float | None, float | None]:
    """Return the relative error of the logits against float64, and the top-1 agreement.

    Training contestants have taken a step by now, so that their weights are their own; they are errors by tests.
    """
    if row.task == "training":
        return None, None
    model: nn.Module = ours(row, weights) if name.startswith("vitrail") else PEERS[name.split()[0]](row, weights)
    with torch.inference_mode():
        exact = model.to(row.device).double().eval()(row.images[:JUDGED].double())
    # Use the whole batch to avoid recompilation.
    logits = made.logits(row.images)[:JUDGED].double()
    same = (logits.argmax(dim=-1) == exact.argmax(dim=-1)).double().mean()
    return float((logits - exact).norm() / exact.norm()), float(same)


def peak(row: Row, made: Ready) -> float | None:
    """Return the peak memory of one step in MiB: the contestant's own, plus what the step adds."""
    if row.device.type != "cuda" or made.replayed:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + made.held) / 2**20


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ── output ──

HEADER = (
    f"{'task':9} {'size':8} {'batch':>5} {'contestant':29} {'img/s':>8} {'to timm':>7} {'of GPU':>7} {'peak':>7}"
    f" {'first':>6} {'error':>7} {'top-1':>6}"
)


def show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def line(result: Result, results: list[Result]) -> str:
    timm = [
        r.images_per_second
        for r in results
        if (r.task, r.size) == (result.task, result.size) and r.name.startswith("timm")
    ]
    ratio = result.images_per_second / max(timm) if timm else None
    return (
        f"{result.task:9} {result.size:8} {result.batch:5} {result.name:29} {result.images_per_second:8,.0f}"
        f" {show(ratio, '.2f'):>7} {result.fraction_of_gpu:7.2f} {show(result.peak_mib, ',.0f'):>7}"
        f" {result.first_seconds:6.1f} {show(result.error, '.1e'):>7} {show(result.same_top1, '.3f'):>6}"
    )


def keep(record: dict[str, Any], results: list[Result], path: Path | None) -> None:
    """Print the table so far, and write all results to the file."""
    print(f"\n{HEADER}")
    for result in results:
        print(line(result, results))
    print(flush=True)
    record["results"] = [dataclasses.asdict(result) for result in results]
    write(record, path)


def write(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")


# ── profiles and loss curves ──


def profile(row: Row, makers: dict[str, Maker]) -> None:
    """Print a kernel profile of a few steps of our contestants."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if row.device.type == "cuda" else [])
    for name, make in makers.items():
        if not name.startswith("vitrail"):
            continue
        made = make(row)
        for _ in range(3):
            made.step()
        synchronise(row.device)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(3):
                made.step()
            synchronise(row.device)
        by = "self_cuda_time_total" if row.device.type == "cuda" else "self_cpu_time_total"
        print(f"\n{row.task} {row.size}, {name}, three steps")
        print(profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=70), flush=True)


Losses = dict[str, list[list[float]]]
"""For each training path and seed, the loss of every step."""


def curve(row: Row, steps: int, seeds: int) -> Iterator[Losses]:
    """Train with the plain and the fused path from the same weights, several times; yield the losses after every run.

    Images of a class have a pattern of their own under noise. Plain runs with other batches of such images, and
    from weights that differ in their last digits, show how far two runs may lie apart.
    """
    losses: Losses = {"plain": [], "other batches": [], "nudged": [], "fast": []}
    for seed in range(seeds):
        for way, runs in losses.items():
            runs.append(learned(row, steps, seed, way))
            end = runs[-1][-max(1, steps // 10) :]
            print(f"seed {seed}, {way}: {statistics.fmean(end):.4f} at the end", flush=True)
            yield losses


def compare(losses: Losses) -> None:
    """Print the mean loss of each tenth, and the difference from the plain run with its standard error."""
    steps = len(losses["plain"][0])
    length = max(1, steps // 10)
    for number in range(0, steps, length):
        means = {way: [statistics.fmean(run[number : number + length]) for run in runs] for way, runs in losses.items()}
        words = [f"step {number:4}  plain {statistics.fmean(means['plain']):.4f}"]
        for way in ("other batches", "nudged", "fast"):
            apart = [mine - plain for mine, plain in zip(means[way], means["plain"], strict=True)]
            error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.4f}" if len(apart) > 1 else ""
            words.append(f"{way} {statistics.fmean(apart):+.4f}{error}")
        print("  ".join(words), flush=True)


def scatter(row: Row, steps: int, starts: list[int], nudges: int, size: float) -> Iterator[list[dict[str, Any]]]:
    """Train from each initialisation with both paths, then several times from slightly perturbed weights."""
    runs: list[dict[str, Any]] = []
    for start in starts:
        for number in range(nudges + 1):
            for way in ("plain", "fast"):
                generator = torch.Generator().manual_seed(number)
                losses = learned(row, steps, start, way, size if number else 0.0, generator)
                runs.append({"start": start, "way": way, "nudge": number, "losses": losses})
                end = statistics.fmean(losses[-max(1, steps // 10) :])
                print(f"start {start}, {way}, nudge {number}: {when_learned(losses)}, {end:.4f} at the end", flush=True)
                torch.compiler.reset()
                yield runs


def when_learned(losses: list[float]) -> str:
    means = (statistics.fmean(losses[step : step + SMOOTHED]) for step in range(len(losses) - SMOOTHED + 1))
    below = next((step for step, mean in enumerate(means) if mean < LEARNED), None)
    return f"never below {LEARNED:g}" if below is None else f"below {LEARNED:g} from step {below} on"


def learned(
    row: Row, steps: int, seed: int, way: str, nudge: float = 0.0, generator: torch.Generator | None = None
) -> list[float]:
    """Return the losses of one run, from randomly perturbed initial weights."""
    nudge = NUDGE if way == "nudged" else nudge
    noise = torch.Generator(row.device).manual_seed(seed)
    classes = min(CLASSES, row.config.classes)
    patterns = torch.randn(classes, *row.images.shape[1:], generator=noise, dtype=BF16, device=row.device)
    labels = torch.randint(classes, (16, len(row.labels)), generator=noise, device=row.device)
    torch.manual_seed(seed)
    model, losses = ViT(row.config), list[float]()
    if nudge:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + nudge * torch.randn(parameter.shape, generator=generator))
    mode = EAGER if row.device.type == "cpu" else None  # compiling does not pay off
    made = learning_fast(row, model, mode) if way == "fast" else learning_plainly(row, model, mode)
    for number in range(steps):
        at = number * 7 if way == "other batches" else number
        noise.manual_seed(seed * 1_000_000 + 1 + at)
        row.labels.copy_(labels[at % len(labels)])
        row.images.normal_(generator=noise).add_(patterns[row.labels], alpha=0.3)
        losses.append(float(cast("Tensor", made.step())))
    return losses


def small_row(device: torch.device, kind: str = "quick") -> Row:
    """Return a task that a CPU learns in about a minute; `late` takes a few."""
    config, batch, lr = SMALL[kind]
    images = torch.zeros(batch, config.channels, *config.image_size, dtype=BF16, device=device)
    return Row("training", kind, config, images, torch.zeros(batch, dtype=torch.int64, device=device), lr=lr)


# ── the run ──


def config_of(size: str) -> ViTConfig:
    """Return the config of a size, such as B/16 or B/16@384."""
    name, at, pixels = size.partition("@")
    if at and not pixels.isdecimal():
        raise ConfigError(f"{size!r} is not a size; write the image size after the @, such as B/16@384")
    config = variant_config(name)
    return config.replace(image_size=(int(pixels), int(pixels))) if pixels else config


def make_row(task: str, size: str, options: argparse.Namespace) -> Row:
    """Return deterministic images and labels for a size."""
    config = options.weights_model.config if options.weights_model is not None else config_of(size)
    batch = options.batch or BATCH[task] // SMALLER.get(size, 1)
    generator = torch.Generator().manual_seed(0)
    if options.images is not None:
        pixels = torch.from_numpy(np.load(options.images))[:batch]
        images = options.preprocess.normalise(pixels)
    else:
        images = torch.randn(batch, config.channels, *config.image_size, generator=generator)
    labels = torch.randint(config.classes, (len(images),), generator=generator)
    again = options.checkpointing and task == "training"
    return Row(task, size, config, images.to(options.device, BF16), labels.to(options.device), checkpointing=again)


def rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for size in options.sizes:
        for task in options.tasks:
            if not options.only or f"{task}:{size}" in options.only:
                yield task, size


def environment(device: torch.device) -> dict[str, Any]:
    versions = {}
    for name in ("timm", "torchao", "torchvision", "transformers", "triton"):
        with contextlib.suppress(ImportError):
            versions[name] = import_peer(name).__version__
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
    }


def unpack(folder: Path) -> None:
    """Make the wheels in a folder importable, after installed packages."""
    where = tempfile.mkdtemp()
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(where)
    sys.path.append(where)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare our speed on a GPU with the other libraries'.")
    parser.add_argument("--device", help="device (default: cuda)")
    parser.add_argument("--sizes", nargs="+", help=f"such as B/16 or B/16@384 (default: {' '.join(SIZES)})")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=[], help="rows, such as inference:B/16 (default: all)")
    parser.add_argument(
        "--contestants", nargs="+", default=[""], help="regular expressions of names, such as timm 'vitrail bf16$'"
    )
    usual = ", ".join(f"{count} for {task}" for task, count in BATCH.items())
    parser.add_argument("--batch", type=int, help=f"batch size (default: {usual}, half for {' and '.join(SMALLER)})")
    parser.add_argument("--checkpointing", action="store_true", help="train with gradient checkpointing")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of timing per contestant")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further contestant is built")
    parser.add_argument("--weights", help="a trained model, for a meaningful error: anything vitrail.load opens")
    parser.add_argument("--images", type=Path, help="an .npy file of uint8 images (N, C, H, W) to go with it")
    parser.add_argument("--carried", type=Path, help="a folder of wheels of peers that are not installed")
    parser.add_argument("--json", type=Path, help="also write the results to this file, after every row")
    parser.add_argument(
        "--lab", action="store_true", help="time every kernel by itself, at the shapes of the first size"
    )
    parser.add_argument("--profile", help="a size: print a kernel profile")
    parser.add_argument("--curve", type=int, help="number of steps to train with the plain and the fused path")
    parser.add_argument(
        "--small", nargs="?", const="quick", choices=SMALL,
        help="with --curve: a small model for a CPU; `late` learns nothing for its first 100 steps",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, help="with --curve: number of initialisations (default: 1)")
    parser.add_argument(
        "--starts", type=int, nargs="+", help="with --curve: seeds of the initial weights, instead of --seeds"
    )
    parser.add_argument("--nudges", type=int, help="with --starts: number of extra runs from perturbed weights")
    parser.add_argument(
        "--nudge", type=float, help=f"with --nudges: relative size of the perturbation (default: {NUDGE:g})"
    )
    parser.add_argument(
        "--short",
        type=int,
        default=planner.MAX_SHORT,
        help="use our short-attention kernel in training up to this many tokens",
    )
    options = parser.parse_args()
    if options.checkpointing and ("training" not in options.tasks or options.curve is not None):
        parser.error("--checkpointing is about rows of training; have that among the --tasks, and leave --curve out")
    if options.batch is not None and options.batch < 1:
        parser.error(f"--batch is {options.batch}; give 1 or more")
    if options.curve is not None and options.curve < 1:
        parser.error(f"--curve is {options.curve}; give 1 or more steps")
    if (options.seeds is not None or options.small) and options.curve is None:
        parser.error("--seeds and --small are about a loss curve; give --curve and a number of steps, too")
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; give 1 or more")
    if options.starts and (options.curve is None or options.seeds is not None):
        parser.error("--starts are those of a loss curve; give --curve and a number of steps, and leave --seeds out")
    if options.nudges is not None and (not options.starts or options.nudges < 0):
        parser.error("--nudges is how often runs from --starts are repeated; give those, and 0 or more")
    if options.nudge is not None and (not options.nudges or not 0 < options.nudge < 1):
        parser.error(f"--nudge is the size of --nudges; give those, and a fraction between 0 and 1, such as {NUDGE:g}")
    if options.small and (options.sizes or options.batch or options.weights):
        parser.error("--small is a model of its own; leave --sizes, --batch and --weights out")
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        parser.error(f"--json {options.json} is not a file in an existing folder; create {options.json.parent} first")
    if options.images and not (options.weights and options.images.is_file()):
        parser.error(f"--images {options.images}: give an existing .npy file, and --weights")
    if options.carried and not options.carried.is_dir():
        parser.error(f"--carried {options.carried} is not a folder")
    if not math.isfinite(options.seconds) or options.seconds < 0:
        parser.error(f"--seconds is {options.seconds}; give 0 or more")
    for pattern in options.contestants:
        try:
            re.compile(pattern)
        except re.error as error:
            parser.error(f"--contestants {pattern!r} is not a regular expression: {error}")
    planner.MAX_SHORT = options.short
    if options.device is None and not torch.cuda.is_available():
        parser.error("no CUDA device was found; see that the program runs with --device cpu, as its first lines say")
    options.device = choose_device(options.device or "cuda")
    sizes = options.sizes or SIZES
    for row in options.only:
        if row not in [f"{task}:{size}" for task in options.tasks for size in sizes]:
            parser.error(f"unknown row {row!r}; write a task, a colon and a size, such as {TASKS[0]}:{sizes[0]}")
    options.deadline = time.perf_counter() + options.limit
    options.weights_model = options.preprocess = None
    if options.weights:
        if options.sizes or options.only or options.profile:
            parser.error("--weights are of one size, which --sizes, --only and --profile cannot change; leave them out")
        bundle = vitrail.load(options.weights)
        if not bundle.model.config.classes:
            parser.error(f"--weights {options.weights} have no head, so logits cannot be compared; use others")
        options.weights_model, options.preprocess = bundle.model.eval(), bundle.preprocess
        options.sizes = ["given"]
    options.sizes = options.sizes or list(SIZES)
    return options


def main() -> None:
    options = parse()
    if options.carried:
        unpack(options.carried)
    # Models of one library share their code, so each counts as a recompilation.
    torch._dynamo.config.recompile_limit = 64
    record: dict[str, Any] = {"environment": environment(options.device)}
    print(", ".join(f"{key} {value}" for key, value in record["environment"].items()), flush=True)
    makers = contestants(options, options.weights_model)
    if options.profile:
        for task in options.tasks:
            profile(make_row(task, options.profile, options), makers[task])
        return
    if options.curve:
        small = small_row(options.device, options.small) if options.small else None
        row = small or make_row("training", options.sizes[0], options)
        if options.starts:
            for runs in scatter(row, options.curve, options.starts, options.nudges or 0, options.nudge or NUDGE):
                record["scatter"] = runs
                write(record, options.json)
            return
        for losses in curve(row, options.curve, options.seeds or 1):
            record["curve"] = losses
            write(record, options.json)
        compare(record["curve"])
        return
    record["gpu rates"] = rates = device_rates(options.device)
    print(", ".join(f"{name} {value:,.1f}" for name, value in rates.items()), flush=True)
    if options.lab:
        batch = options.batch or BATCH["inference"]
        config = options.weights_model.config if options.weights else config_of(options.sizes[0])
        for entry in run_lab(config, batch, options.device, rates):
            record.setdefault("lab", []).append(entry)
            write(record, options.json)
        return
    results: list[Result] = []
    for task, size in rows(options):
        row = make_row(task, size, options)
        print(f"{task} {size}, batch {len(row.images)}", flush=True)
        if task == "inference" and unsupported_by_fp8(row.config):
            print("  not supported by the fast encoder", flush=True)
        results += measure(row, makers[task], options, rates["bf16 TFLOP/s"] * 1e12)
        keep(record, results, options.json)
        torch.compiler.reset()
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
