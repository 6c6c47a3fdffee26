"""Time and peak memory of one pretraining step, ours and other libraries', in one run.

    python benchmarks/pretraining.py --json rows.json         a GPU: mae B/16, dino S/16 and B/16, at 224 px
    python benchmarks/pretraining.py --only mae --batch 512
    python benchmarks/pretraining.py --only dino --model S/16
    python benchmarks/pretraining.py --tiny --device cpu      smoke test

mae    ours as in `vitrail pretrain`, eager and compiled; transformers' ViTMAEForPreTraining, eager and compiled.
dino   2 global views of 224 px and 6 local views of 96 px. Ours, eager and compiled; a plain loop with lightly's
       DINOLoss and DINOProjectionHead and timm's ViT (without timm: transformers' ViT), eager and compiled.

All take the same uint8 images, which are on the device, and normalise them. All use AdamW (fused on a GPU) and, on a
GPU, bf16 autocast; dino also clips gradients and updates its teacher. Ours includes what a run needs besides (masks
from the stream position, gradient norm, check for non-finite numbers). The median of `--rounds` rounds counts. A
library that cannot be imported is reported, and its rows are left out.
"""

import argparse
import copy
import gc
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.batches import Batch
from vitrail.data.views import AnyBatch, ViewBatch
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, Processes, autocast, choose_device
from vitrail.training.distributed import Ranks
from vitrail.training.learners import learner_of
from vitrail.training.optimizers import make_optimizer
from vitrail.training.plan import DataFacts, TrainingPlan
from vitrail.training.pretraining.defaults import resolve_pretraining
from vitrail.training.pretraining.dino import momentum_for
from vitrail.training.recipe_files import read_recipe
from vitrail.training.state import Progress, State
from vitrail.training.step import Stepper, forward_of, plan_step, reset_compiled

STEPS = 100_000
"""Length of the run whose steps are measured; schedules depend on it."""
LR = 1e-5
MAX_GRAD_NORM = 3.0
PATHS = ("eager", "compiled")
Step = Callable[[], None]


class Size(NamedTuple):
    """A model and the sizes of its images."""

    name: str
    width: int
    depth: int
    heads: int
    patch: int
    image: int
    local: int
    prototypes: int
    hidden: int
    bottleneck: int
    decoder: tuple[int, int, int]
    """Width, depth and heads of the decoder of mae."""


SMALL = Size("S/16", 384, 12, 6, 16, 224, 96, 65536, 2048, 256, (512, 8, 16))
BASE = SMALL._replace(name="B/16", width=768, heads=12)
TINY = Size("tiny", 32, 2, 2, 8, 32, 16, 64, 32, 16, (16, 1, 2))


class Setting(NamedTuple):
    """What a row is measured with."""

    method: str
    size: Size
    batch: int
    device: torch.device
    precision: Precision


class MissingError(Exception):
    """A library cannot be imported."""


def peer(module: str, name: str) -> Any:
    """Return a class or function of another library; raise `MissingError` if it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision, if it was built for another torch
        raise MissingError(f"{module}.{name} cannot be imported ({str(error).splitlines()[0]})") from None


# ── ours ──


def our_plan(setting: Setting, *, compiled: bool) -> TrainingPlan:
    """Return the plan of a run with this model."""
    size = setting.size
    changes = [
        f"steps={STEPS}", f"batch={setting.batch}", f"compile={str(compiled).lower()}", "schedule.kind=constant",
        f"optimizer.lr={LR}", f"model.image_size={size.image}", f"model.patch_size={size.patch}",
        f"model.width={size.width}", f"model.depth={size.depth}", f"model.heads={size.heads}", "model.init=timm",
        "model.class_token=first", "model.pool=cls", "model.final_norm=before_pool",
    ]  # fmt: skip
    if setting.method == "dino":
        changes += [
            f"dino.prototypes={size.prototypes}", f"dino.hidden={size.hidden}", f"dino.bottleneck={size.bottleneck}",
            f"dino.local_size={size.local}", "dino.local_crops=6", f"optimizer.max_grad_norm={MAX_GRAD_NORM}",
            "dino.freeze_last_layer=0",  # or the steps that are measured would not update it
        ]  # fmt: skip
    else:
        width, depth, heads = size.decoder
        changes += [f"mae.decoder_width={width}", f"mae.decoder_depth={depth}", f"mae.decoder_heads={heads}"]
    facts = DataFacts(1_000_000, (), 400, grey=False, device=setting.device.type)
    return resolve_pretraining(read_recipe(setting.method, changes), facts, None)


def our_step(setting: Setting, *, compiled: bool) -> Step:
    """Return the step of a run."""
    plan, device = our_plan(setting, compiled=compiled), setting.device
    ranks, learner = Ranks(Processes(), device), learner_of(plan, device)
    torch.manual_seed(0)
    module = learner.module(ViT(plan.model).train()).to(device)
    state = State(module, make_optimizer(module, plan.recipe.optimizer), None, Progress())
    execution = plan_step(plan.model, plan.recipe, setting.precision, device, alone=True)
    forward = forward_of(module, execution, ranks)
    stepper = Stepper(plan.recipe, plan.preprocess, device, setting.precision, learner, ranks)
    batch = images_of(setting)

    def step() -> None:
        stepper.launch(state, forward, batch, LR)

    return step


def images_of(setting: Setting) -> AnyBatch:
    """Return random images or views on the device."""
    size, count, generator = setting.size, setting.batch, torch.Generator().manual_seed(0)

    def pixels(*shape: int) -> Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    numbers = torch.arange(count)
    if setting.method == "dino":
        large = pixels(count, 2, 3, size.image, size.image)
        return ViewBatch(large, pixels(count, 6, 3, size.local, size.local), numbers).to(setting.device)
    box = torch.zeros(count, 4, dtype=torch.int64)
    return Batch(pixels(count, 3, size.image, size.image), numbers, numbers, torch.ones(count), box).to(setting.device)


# ── other libraries ──


def normalised(pixels: Tensor) -> Tensor:
    """Normalise as our recipes do."""
    return pixels.float().div_(127.5).sub_(1.0)


def fused_adamw(parameters: Iterator[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    """Return AdamW in its fastest form."""
    return torch.optim.AdamW(parameters, LR, weight_decay=weight_decay, fused=True)


def transformers_mae(setting: Setting, *, compiled: bool) -> Step:
    """Return a plain loop around transformers' masked autoencoder."""
    size = setting.size
    width, depth, heads = size.decoder
    config = peer("transformers", "ViTMAEConfig")(
        hidden_size=size.width, num_hidden_layers=size.depth, num_attention_heads=size.heads,
        intermediate_size=4 * size.width, image_size=size.image, patch_size=size.patch, mask_ratio=0.75,
        norm_pix_loss=True, decoder_hidden_size=width, decoder_num_hidden_layers=depth,
        decoder_num_attention_heads=heads, decoder_intermediate_size=4 * width, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = peer("transformers", "ViTMAEForPreTraining")(config).to(setting.device).train()
    forward = torch.compile(model) if compiled else model
    optimizer = fused_adamw(model.parameters(), 0.05)
    batch = images_of(setting)
    assert isinstance(batch, Batch)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        pixels = normalised(batch.pixels)
        with autocast(setting.device, setting.precision):
            loss = forward(pixel_values=pixels).loss
        loss.backward()
        optimizer.step()

    return step


def peer_encoder(size: Size) -> nn.Module:
    """Return a ViT that maps images of any size to class tokens: timm's, or without it transformers'."""
    if importlib.util.find_spec("timm") is not None:
        model: nn.Module = peer("timm.models.vision_transformer", "VisionTransformer")(
            img_size=size.image, patch_size=size.patch, embed_dim=size.width, depth=size.depth, num_heads=size.heads,
            num_classes=0, dynamic_img_size=True,
        )  # fmt: skip
        return model
    config = peer("transformers", "ViTConfig")(
        hidden_size=size.width, num_hidden_layers=size.depth, num_attention_heads=size.heads,
        intermediate_size=4 * size.width, image_size=size.image, patch_size=size.patch, attn_implementation="sdpa",
    )  # fmt: skip
    return _ClassToken(peer("transformers", "ViTModel")(config, add_pooling_layer=False))


class _ClassToken(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.model(pixel_values=x, interpolate_pos_encoding=True).last_hidden_state
        return tokens[:, 0]


def lightly_dino(setting: Setting, *, compiled: bool) -> Step:
    """Return a plain loop with lightly's head and loss."""
    make_head = peer("lightly.models.modules.heads", "DINOProjectionHead")
    make_loss, update_momentum = peer("lightly.loss", "DINOLoss"), peer("lightly.models.utils", "update_momentum")
    size, device = setting.size, setting.device
    torch.manual_seed(0)
    encoder = peer_encoder(size)
    head = make_head(size.width, size.hidden, size.bottleneck, size.prototypes, freeze_last_layer=-1)
    # Not deep-copied: torch's old weight_norm, which lightly uses, cannot be.
    teacher_head = make_head(size.width, size.hidden, size.bottleneck, size.prototypes)
    teacher_head.load_state_dict(head.state_dict())
    student = nn.Sequential(encoder, head).to(device).train()
    teacher = nn.Sequential(copy.deepcopy(encoder), teacher_head).to(device).requires_grad_(False)
    loss_of = make_loss(output_dim=size.prototypes).to(device)
    by_student, by_teacher = (torch.compile(model) if compiled else model for model in (student, teacher))
    optimizer = fused_adamw(student.parameters(), 0.04)
    batch, momentum = images_of(setting), momentum_for(STEPS)
    assert isinstance(batch, ViewBatch)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        large, small = (normalised(views.transpose(0, 1).flatten(0, 1)) for views in (batch.globals, batch.locals))
        with autocast(device, setting.precision):
            with torch.no_grad():
                targets = by_teacher(large).chunk(2)
            outputs = [*by_student(large).chunk(2), *by_student(small).chunk(6)]
        loss = loss_of(
            [target.float() for target in targets], [output.float() for output in outputs], teacher_temp=0.04
        )
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        update_momentum(student, teacher, m=momentum)

    return step


# ── measuring ──


CONTESTANTS: dict[str, dict[str, Callable[..., Step]]] = {
    "mae": {"vitrail": our_step, "transformers": transformers_mae},
    "dino": {"vitrail": our_step, "lightly": lightly_dino},
}


def measured(step: Step, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """Return the time of a step, the median of all rounds, and the peak memory."""
    began = time.perf_counter()
    step()
    synchronise(device)
    first = time.perf_counter() - began
    for _ in range(3):
        step()
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise(device)
        seconds.append((time.perf_counter() - began) / steps)
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "step_ms": 1e3 * statistics.median(seconds),
        "best_ms": 1e3 * min(seconds),
        "first_s": first,
        "peak_mib": peak,
    }


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(setting: Setting, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure every contestant of a method, eager and compiled."""
    for library, contestant in CONTESTANTS[setting.method].items():
        for path in options.paths:
            row = {
                "method": setting.method, "model": setting.size.name, "batch": setting.batch, "library": library,
                "path": path, "precision": setting.precision,
            }  # fmt: skip
            try:
                step = contestant(setting, compiled=path == "compiled")
                numbers = measured(step, setting.device, options.rounds, options.steps)
                yield {**row, **numbers, "images_per_second": 1e3 * setting.batch / numbers["step_ms"]}
            except MissingError as missing:
                yield {**row, "missing": str(missing)}
            except torch.OutOfMemoryError:
                yield {**row, "missing": "out of GPU memory; use a smaller --batch"}
            reset_compiled(setting.device)
            gc.collect()


def text_of(row: dict[str, Any]) -> str:
    """Say what a row holds."""
    name = f"{row['method']} {row['model']} batch {row['batch']}  {row['library']} {row['path']}:"
    if "missing" in row:
        return f"{name} {row['missing']}"
    peak = "" if row["peak_mib"] is None else f", peak {row['peak_mib']:,.0f} MiB"
    return f"{name} {row['step_ms']:.2f} ms per step, {row['images_per_second']:,.0f} images/s{peak}"


def settings_of(options: argparse.Namespace, device: torch.device) -> list[Setting]:
    """Return what to measure."""
    precision: Precision = "bf16" if device.type == "cuda" else "float32"
    rows = {"mae": (BASE,), "dino": (SMALL, BASE)}
    found = []
    for method, sizes in rows.items():
        for size in (TINY,) if options.tiny else sizes:
            if options.only in (None, method) and (options.tiny or options.model in (None, size.name)):
                batch = options.batch or (4 if options.tiny else 256 if method == "mae" else 64)
                found.append(Setting(method, size, batch, device, precision))
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CONTESTANTS), help="measure one method")
    parser.add_argument("--model", choices=(SMALL.name, BASE.name), help="measure one model")
    parser.add_argument("--batch", type=int, help="images per step; default 256 for mae, 64 for dino")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to test this script")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS, help="which rows to measure")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    for name in ("batch", "rounds", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; give 1 or more")
    device = choose_device(options.device)
    found = []
    for setting in settings_of(options, device):
        for row in rows_of(setting, options):
            print(text_of(row), flush=True)
            found.append(row)
    if options.json is not None:
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        content = {"device": machine, "torch": torch.__version__, "rows": found}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except VitrailError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
