"""A plain reference training loop: autograd and textbook formulas in float64, and the inputs of both loops."""

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.tasks.objective import Objective
from vitrail.training.averaging import Average, Averaging
from vitrail.training.optimizers import Optimizer, make_optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.state import Progress, State

IMAGES, CLASSES, SIDE = 8, 4, 8
RATES = (0.01, 0.02, 0.005, 0.01)


def tiny(**options: Any) -> ViT:
    torch.manual_seed(0)
    fields = {"image_size": SIDE, "patch_size": 4, "width": 8, "depth": 2, "heads": 2, "init": "timm"}
    model = ViT(ViTConfig(**fields | {"classes": CLASSES} | options)).train()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that every one matters
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batches(count: int, mixed: str = "none") -> list[Batch]:
    """Draw batches; `mixed` says how neighbours are mixed."""
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(count):
        pixels = torch.randint(0, 4, (IMAGES, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
        share, box = torch.ones(IMAGES), torch.zeros(IMAGES, 4, dtype=torch.int64)
        if mixed in ("mixup", "both"):
            share[:] = torch.tensor([0.75, 0.5, 1.0, 0.125]).repeat_interleave(2)
        if mixed in ("cutmix", "both"):
            box[:4] = torch.tensor([[0, 0, 4, 4], [2, 5, 8, 7]]).repeat_interleave(2, dim=0)
            covered = (box[:4, 2] - box[:4, 0]) * (box[:4, 3] - box[:4, 1])
            share[:4] = 1 - covered / SIDE**2
        results.append(Batch(pixels, labels, torch.arange(IMAGES), share, box))
    return results


class Case(NamedTuple):
    """A test case."""

    optimizer: Optimizer
    objective: Objective = Objective()
    averaging: Averaging = Averaging()
    mixed: str = "none"
    gradient_accumulation: int = 1
    weights: tuple[float, ...] | None = None

    def recipe(self) -> Recipe:
        mixing = Mixing(mixup=1.0) if self.mixed != "none" else Mixing()
        return Recipe(
            optimizer=self.optimizer, objective=self.objective, averaging=self.averaging, mixing=mixing,
            gradient_accumulation=self.gradient_accumulation,
        )  # fmt: skip


ADAMW = Optimizer(kind="adamw", lr=0.01, weight_decay=0.3, betas=(0.8, 0.95))
SGD = Optimizer(kind="sgd", lr=0.01, weight_decay=0.1)
CASES = {
    "adamw": Case(ADAMW),
    "adamw, layer by layer": Case(ADAMW.replace(layer_decay=0.5)),
    "adam": Case(Optimizer(kind="adam", lr=0.01, weight_decay=0.1)),
    "sgd": Case(SGD),
    "sgd without momentum": Case(SGD.replace(momentum=0.0)),
    "nesterov": Case(SGD.replace(nesterov=True, momentum=0.8)),
    "clipped": Case(SGD.replace(max_grad_norm=0.5)),
    "a limit that is not reached": Case(SGD.replace(max_grad_norm=1e6)),
    "clipped adamw": Case(ADAMW.replace(max_grad_norm=0.5)),
    "ema": Case(ADAMW, averaging=Averaging(kind="ema", decay=0.6)),
    "ema with a warm-up and a start": Case(SGD, averaging=Averaging(kind="ema", decay=0.9, warmup=True, start=1)),
    "polyak": Case(SGD, averaging=Averaging(kind="polyak", start=1)),
    "mixup": Case(ADAMW, mixed="mixup"),
    "cutmix": Case(ADAMW, mixed="cutmix"),
    "mixup and cutmix, smoothed": Case(SGD, Objective(label_smoothing=0.125), mixed="both"),
    "smoothing": Case(ADAMW, Objective(label_smoothing=0.25)),
    "sigmoid": Case(ADAMW, Objective(loss="sigmoid")),
    "sigmoid, smoothed, mixed": Case(SGD, Objective(loss="sigmoid", label_smoothing=0.125), mixed="both"),
    "class weights": Case(SGD, weights=(2.0, 0.5, 0.0, 3.0)),
    "class weights, sigmoid, mixed": Case(
        SGD, Objective(loss="sigmoid"), mixed="mixup", weights=(2.0, 0.5, 0.0, 3.0)
    ),
    "everything": Case(
        ADAMW.replace(max_grad_norm=0.1, layer_decay=0.7), Objective(label_smoothing=0.125),
        Averaging(kind="ema", decay=0.8),
        "both", 2, (2.0, 0.5, 0.25, 3.0),
    ),
}  # fmt: skip


# ── the reference ──


class Reference(NamedTuple):
    """The result of the reference loop."""

    weights: dict[str, Tensor]
    average: dict[str, Tensor] | None
    losses: list[float]
    norms: list[float]


def reference(model: ViT, case: Case, data: list[Batch]) -> Reference:
    model = copy.deepcopy(model).double()
    memory: dict[str, dict[str, Tensor]] = {name: {} for name, _ in model.named_parameters()}
    average = {name: p.detach().clone() for name, p in model.named_parameters()} if case.averaging.on else None
    losses, norms = [], []
    for t, (batch, rate) in enumerate(zip(data, RATES, strict=False), start=1):
        names, parameters = zip(*model.named_parameters(), strict=True)
        loss = reference_loss(model, case, batch)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients))
        max_norm = case.optimizer.max_grad_norm
        factor = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
        with torch.no_grad():
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                decay = case.optimizer.weight_decay if decays(name) else 0.0
                lr = rate * layer_share(name, case.optimizer.layer_decay)
                parameter.copy_(update(case.optimizer, parameter, gradient * factor, memory[name], t, lr, decay))
                if average is not None:
                    average[name] = averaged(case.averaging, average[name], parameter, t)
        losses.append(float(loss.detach()))
        norms.append(norm)
    return Reference({name: p.detach() for name, p in model.named_parameters()}, average, losses, norms)


def decays(name: str) -> bool:
    kernels = ("patch_embed.proj", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "head")
    return name.endswith(tuple(f"{kernel}.weight" for kernel in kernels))


def layer_share(name: str, layer_decay: float | None) -> float:
    """Return the learning rate scale of a parameter of the two-block model: 1 for the head, a factor less per layer."""
    if layer_decay is None or name.startswith(("head", "norm.")):
        return 1.0
    return layer_decay ** {"blocks.1": 1, "blocks.0": 2}.get(name[:8], 3)


def reference_loss(model: nn.Module, case: Case, batch: Batch) -> Tensor:
    """Return the loss of each image."""
    pixels, smooth = batch.pixels.double(), case.objective.label_smoothing
    images, rows = [], []
    for i in range(IMAGES):
        partner = i + 1 if i % 2 == 0 else i - 1
        share = float(batch.lam[i])
        top, left, bottom, right = batch.box[i].tolist()
        if bottom > top:
            image = pixels[i].clone()
            image[:, top:bottom, left:right] = pixels[partner][:, top:bottom, left:right]
        else:
            image = share * pixels[i] + (1 - share) * pixels[partner]
        row = torch.zeros(CLASSES, dtype=torch.float64)
        row[int(batch.labels[i])] += share
        row[int(batch.labels[partner])] += 1 - share
        images.append(image)
        rows.append(row * (1 - smooth) + smooth / CLASSES)
    logits: Tensor = model(torch.stack(images))
    targets = torch.stack(rows)
    weights = torch.tensor(case.weights or (1.0,) * CLASSES, dtype=torch.float64)
    if case.objective.loss in (None, "softmax"):
        log_p = logits - logits.exp().sum(dim=1, keepdim=True).log()
        return -(targets * weights * log_p).sum() / IMAGES
    p = 1 / (1 + (-logits).exp())
    by_image = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(dim=1)
    return (by_image * (targets * weights).sum(dim=1)).sum() / IMAGES


def update(
    config: Optimizer, weight: Tensor, gradient: Tensor, memory: dict[str, Tensor], t: int, lr: float, decay: float
) -> Tensor:
    """Return the weight after step t (from 1)."""
    if config.kind != "adamw":
        gradient = gradient + decay * weight
    if config.kind == "sgd":
        memory["v"] = config.momentum * memory.get("v", torch.zeros_like(weight)) + gradient
        return weight - lr * (gradient + config.momentum * memory["v"] if config.nesterov else memory["v"])
    beta1, beta2 = config.betas
    memory["m"] = beta1 * memory.get("m", torch.zeros_like(weight)) + (1 - beta1) * gradient
    memory["s"] = beta2 * memory.get("s", torch.zeros_like(weight)) + (1 - beta2) * gradient * gradient
    mean, square = memory["m"] / (1 - beta1**t), memory["s"] / (1 - beta2**t)
    shrunk = weight - lr * decay * weight if config.kind == "adamw" else weight
    return shrunk - lr * mean / (square.sqrt() + config.eps)


def averaged(config: Averaging, average: Tensor, weight: Tensor, t: int) -> Tensor:
    """Return the average after step t (from 1)."""
    if t <= config.start:
        return weight.clone()
    if config.kind == "polyak":
        n = t - config.start
        return average * (n - 1) / n + weight / n
    kept = min(config.decay, (1 + t - config.start) / (10 + t - config.start)) if config.warmup else config.decay
    return kept * average + (1 - kept) * weight


# ── ours ──

EXACT = Preprocess(size=(SIDE, SIDE), mean=(0.0,) * 3, std=(1 / 255,) * 3)
"""Leaves the pixels unchanged."""


def begin(model: nn.Module, recipe: Recipe) -> State:
    average = Average(model, recipe.averaging) if recipe.averaging.on else None
    return State(model, make_optimizer(model, recipe.optimizer), average, Progress())
