"""DINO (arXiv 2104.14294): self-distillation without labels.

    image -> 2 global views and some smaller local views
      teacher: its encoder and head see the global views
      student: its encoder and head see all views
      loss: the student predicts the teacher's output for every other view of the same image

The teacher is a moving average of the student. Its outputs are centred and sharpened, so that they neither become equal
for all images nor uniform. Schedules are pure functions of the step; teacher and centre are in the state dict, so a run
resumes exactly.

Axes: B batch, V views, K prototypes.
"""

import itertools
import math
from typing import Annotated, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vitrail.data.augmentation.multicrop import GLOBAL_VIEWS, Area, Colours, MultiCrop, check_area
from vitrail.errors import ConfigError, InputError
from vitrail.models.config import ViTConfig
from vitrail.models.resampled import ResampledForward
from vitrail.models.vit import ViT
from vitrail.schema import Count, Frozen, Pair, Positive

LOCAL_FRACTION = 96 / 224
"""Side of a local view, as a fraction of the image's: the paper's."""
FEWEST_PATCHES = 2
"""Rows and columns of patches that a local view needs at least."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(gt=0, le=10)]


class DinoSettings(Frozen):
    """The settings of DINO. The defaults are those of the paper or of its code, but for `prototypes`."""

    prototypes: Count = 4096
    """Outputs of the head. The paper has 65536, for ImageNet; small datasets need fewer."""
    hidden: Positive = 2048
    """Width of the head's hidden layers."""
    bottleneck: Positive = 256
    """Width of the head before its last layer."""
    student_temperature: Temperature = 0.1
    """Temperature of the student's softmax."""
    teacher_temperature: Temperature = 0.04
    """Temperature of the teacher's softmax after the warmup; lower is sharper."""
    warmup_teacher_temperature: Temperature = 0.04
    """Temperature of the teacher's softmax at the first step."""
    warmup_fraction: Fraction = 0.3
    """Fraction of the run in which the teacher's temperature changes linearly from the first to the second."""
    momentum: Fraction = 0.996
    """How much of the teacher stays at the first step; it rises to 1 by a cosine over the run. Unless a recipe sets it,
    a run chooses it for its number of steps."""
    centre_momentum: Fraction = 0.9
    """How much of the centre stays at every step, but for the first ones, when it is the mean of all steps. Unless a
    recipe sets it, a run chooses it for the `momentum`."""
    local_crops: Annotated[Count, Field(le=64)] = 6
    """Number of local views per image, next to the two global ones."""
    local_size: Pair | None = None
    """Height and width of a local view, in pixels. None: 0.43 of the image's, rounded to a multiple of the patch's."""
    global_area: Area = (0.4, 1.0)
    """Range of the area of global views, as a fraction of the image's."""
    local_area: Area = (0.05, 0.4)
    """Range of the area of local views, as a fraction of the image's."""
    flip: Fraction = 0.5
    """Probability that a view is flipped horizontally."""
    colours: Colours = "full"
    """What changes the colours of views: `full` is colour jitter, grey, blur and solarisation; `jitter` leaves out the
    last two, which destroy tiny images; `none` lets the student match views by their brightness."""
    freeze_last_layer: Fraction = 0.01
    """Fraction of the run in which the head's last layer does not train."""

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if self.prototypes < 2:
            raise ConfigError(f"prototypes is {self.prototypes}; one output cannot tell images apart, so use 2 or more")
        check_area("global_area", self.global_area)
        check_area("local_area", self.local_area)
        return self

    def crops(self, config: ViTConfig) -> MultiCrop:
        """Return how to crop the views for an encoder, whose image size is that of the global views."""
        size = self.size_of_local_views(config) if self.local_crops else config.image_size
        return MultiCrop(
            local_crops=self.local_crops,
            local_size=size,
            global_area=self.global_area,
            local_area=self.local_area,
            flip=self.flip,
            colours=self.colours,
        )

    def size_of_local_views(self, config: ViTConfig) -> tuple[int, int]:
        """Return height and width of the local views of an encoder."""
        patch = config.patch_size
        if self.local_size is None:
            rows, columns = (round(LOCAL_FRACTION * side) for side in config.grid)
            size = rows * patch[0], columns * patch[1]
        else:
            size = self.local_size
            rows, columns = size[0] // patch[0], size[1] // patch[1]
        if size != (rows * patch[0], columns * patch[1]):
            raise ConfigError(
                f"local_size is {_by(size)}, which patches of {_by(patch)} do not fill; use multiples of the patch size"
            )
        if min(rows, columns) < FEWEST_PATCHES:
            raise ConfigError(
                f"images of {_by(config.image_size)} in patches of {_by(patch)} make local views of {rows}×{columns} "
                f"patches, but DINO needs 2×2; use larger images, smaller patches, or local_crops = 0"
            )
        return size


# ── schedules ──


def momentum_for(steps: int) -> float:
    """Return a momentum for a run of `steps`: the teacher averages the student over a tenth of a short run.

    The paper's 0.996 averages over 250 steps; in a run of 500 steps such a teacher would hardly leave its random start.
    Below 0.99 it follows the student too closely to be a better model than it.
    """
    return round(min(0.996, max(0.99, 1 - 10 / max(1, steps))), 6)


def centre_momentum_for(momentum: float) -> float:
    """Return a momentum of the centre: it follows fifty times as fast as the teacher, or at once.

    A slower centre lags behind the part of the outputs that all images share; the student then learns that part, and
    the outputs become equal for all images.
    """
    return round(min(0.9, max(0.0, 1 - 50 * (1 - momentum))), 6)


def centre_momentum_at(settings: DinoSettings, step: int) -> float:
    """Return how much of the centre stays after step `step` (0-based): at first it is the plain mean of all steps.

    A centre that starts from 0 lags behind what all images share, which the student would learn first.
    """
    return min(settings.centre_momentum, step / (step + 1))


def teacher_momentum(settings: DinoSettings, step: int, steps: int) -> float:
    """Return how much of the teacher stays after step `step` (0-based) of `steps`: from `momentum` to 1, a cosine."""
    return 1 - (1 - settings.momentum) * (1 + math.cos(math.pi * _progress(step, steps))) / 2


def teacher_temperature_at(settings: DinoSettings, step: int, steps: int) -> float:
    """Return the teacher's temperature at step `step` (0-based) of `steps`: linear, then constant."""
    first, last = settings.warmup_teacher_temperature, settings.teacher_temperature
    progress = _progress(step, steps)
    if progress >= settings.warmup_fraction:
        return last
    return first + (last - first) * progress / settings.warmup_fraction


def last_layer_frozen(settings: DinoSettings, step: int, steps: int) -> bool:
    """Return whether the head's last layer does not train at step `step` (0-based) of `steps`."""
    return _progress(step, steps) < settings.freeze_last_layer


def _progress(step: int, steps: int) -> float:
    return min(1.0, step / max(1, steps))


# ── loss ──


def dino_loss(
    student: Tensor, teacher: Tensor, centre: Tensor, student_temperature: float, teacher_temperature: Tensor | float
) -> Tensor:
    """Return the mean cross-entropy over all pairs of a teacher's view and another view of the student.

    Takes the outputs of the heads, (student V, B, K) and (teacher V, B, K). The teacher's views are the first ones of
    the student.
    """
    with torch.autocast(student.device.type, enabled=False):
        targets = ((_precise(teacher) - centre) / teacher_temperature).softmax(dim=-1)
        log_probabilities = (_precise(student) / student_temperature).log_softmax(dim=-1)
        pairs = -torch.einsum("tbk,sbk->ts", targets, log_probabilities)
    same = torch.eye(*pairs.shape, dtype=torch.bool, device=pairs.device)
    return pairs.masked_fill(same, 0.0).sum() / ((pairs.numel() - min(pairs.shape)) * student.shape[1])


def _precise(outputs: Tensor) -> Tensor:
    """Return outputs in float32 or wider: in bf16, logits divided by a temperature lose most of their digits."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


# ── modules ──


class DinoHead(nn.Module):
    """The projection head: three layers with GELU, L2 normalisation, and a cosine similarity to each prototype."""

    def __init__(
        self, width: int, settings: DinoSettings, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        hidden, bottleneck = settings.hidden, settings.bottleneck
        self.fc1 = nn.Linear(width, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, hidden, device=device, dtype=dtype)
        self.fc3 = nn.Linear(hidden, bottleneck, device=device, dtype=dtype)
        self.last_layer = nn.Linear(bottleneck, settings.prototypes, bias=False, device=device, dtype=dtype)
        for layer in (self.fc1, self.fc2, self.fc3):
            nn.init.normal_(layer.weight, std=0.02)  # the paper truncates it at 100 standard deviations
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (…, D) to (…, K)."""
        x = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))
        # Weight normalisation with its magnitude fixed at 1: only the directions of the prototypes train.
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.last_layer.weight, dim=-1))


class DinoOutput(NamedTuple):
    """What a forward pass returns."""

    loss: Tensor
    """A scalar."""
    teacher_mean: Tensor
    """(K,), the mean output of the teacher, for `Dino.after_step`."""


class Dino(nn.Module):
    """Student and teacher.

    `encoder` is the student, whose parameters and those of `head` train. The `teacher` is what a run keeps: its weights
    are usually better than the student's.
    """

    centre: Tensor

    def __init__(self, encoder: ViT, settings: DinoSettings) -> None:
        super().__init__()
        config, like = encoder.config, next(encoder.parameters())
        check_dino(config, settings)
        local_size = settings.size_of_local_views(config) if settings.local_crops else None
        self.settings = settings
        self.encoder = encoder
        self.head = DinoHead(config.pooled_width, settings, like.device, like.dtype)
        with like.device:
            self.teacher = ViT(config)
        if like.dtype != torch.get_default_dtype():
            self.teacher.to(like.dtype)
        self.teacher_head = DinoHead(config.pooled_width, settings, like.device, like.dtype)
        # Loaded and not deep-copied, which the memory forecast's fake tensors do not support.
        for teacher, student in ((self.teacher, encoder), (self.teacher_head, self.head)):
            teacher.load_state_dict(student.state_dict())
            teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(settings.prototypes, device=like.device, dtype=like.dtype))
        self.at_local_size = None if local_size is None else ResampledForward(config, local_size).to(like)
        self.train(encoder.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the student; the teacher has no dropout and stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, global_views: Tensor, local_views: Tensor, teacher_temperature: Tensor | float) -> DinoOutput:
        """Return the loss of normalised views (B, 2, C, H, W) and (B, V, C, h, w), and the mean teacher output."""
        _check_views(global_views, local_views, self.settings)
        B = len(global_views)
        images = global_views.flatten(0, 1)
        with torch.no_grad():
            teacher = _by_view(self.teacher_head(self.teacher(images)), B)
        features = [_by_view(self.encoder(images), B)]
        if self.at_local_size is not None:
            features.append(_by_view(self.at_local_size(self.encoder, local_views.flatten(0, 1)), B))
        student = self.head(torch.cat(features))
        loss = dino_loss(student, teacher, self.centre, self.settings.student_temperature, teacher_temperature)
        return DinoOutput(loss, _precise(teacher).mean(dim=(0, 1)))

    @torch.no_grad()
    def target_entropy(self, global_views: Tensor, teacher_temperature: Tensor | float) -> Tensor:
        """Return the mean entropy of the teacher's outputs, in nats; log K if they are uniform, so teach nothing."""
        outputs = _precise(self.teacher_head(self.teacher(global_views.flatten(0, 1))))
        log_targets = ((outputs - self.centre) / teacher_temperature).log_softmax(dim=-1)
        return -(log_targets.exp() * log_targets).sum(dim=-1).mean()

    def before_step(self, step: int, steps: int) -> None:
        """Drop the gradient of the head's last layer while it is frozen; call it before the optimizer's step."""
        if last_layer_frozen(self.settings, step, steps):
            self.head.last_layer.weight.grad = None

    @torch.no_grad()
    def after_step(self, step: int, steps: int, teacher_mean: Tensor) -> None:
        """Update teacher and centre; call it after the optimizer's step `step` (0-based) of `steps`.

        `teacher_mean` is the mean over the whole batch: the caller averages it over micro-batches, and all-reduces it
        over ranks, or the centres of the ranks diverge.
        """
        keep = centre_momentum_at(self.settings, step)
        self.centre.mul_(keep).add_(teacher_mean, alpha=1 - keep)
        momentum = teacher_momentum(self.settings, step, steps)
        for student, teacher in ((self.encoder, self.teacher), (self.head, self.teacher_head)):
            _move_towards(teacher, student, 1 - momentum)


def _by_view(outputs: Tensor, images: int) -> Tensor:
    """Turn the outputs (B · V, …), views of an image next to each other, into (V, B, …)."""
    by_image: Tensor = outputs.unflatten(0, (images, -1))
    return by_image.transpose(0, 1)


def _move_towards(teacher: nn.Module, student: nn.Module, weight: float) -> None:
    """Move the teacher by a fraction of the way to the student; buffers too, of which integers are copied."""
    averages: list[Tensor] = []
    values: list[Tensor] = []
    of_teacher, of_student = (itertools.chain(module.parameters(), module.buffers()) for module in (teacher, student))
    for average, value in zip(of_teacher, of_student, strict=True):
        if average.is_floating_point():
            averages.append(average)
            values.append(value)
        else:
            average.copy_(value)
    torch._foreach_lerp_(averages, values, weight)


def check_dino(config: ViTConfig, settings: DinoSettings) -> None:
    """Raise a `ConfigError` if DINO cannot train this encoder."""
    if not config.depth:
        raise ConfigError("DINO trains a ViT, but this model is a ResNet without blocks (depth = 0); choose a ViT")
    if not config.has_pool:
        raise ConfigError(
            f"DINO needs one vector per image, but pool is {config.pool!r}; use pool='cls', 'mean' or 'map'"
        )
    if config.classes:
        raise ConfigError(
            f"DINO has its own head, but this model has one for {config.classes} classes; build it with classes=0, or "
            f"call reset_head(0)"
        )
    settings.crops(config)


def _check_views(global_views: Tensor, local_views: Tensor, settings: DinoSettings) -> None:
    for name, views, count in (("global", global_views, GLOBAL_VIEWS), ("local", local_views, settings.local_crops)):
        if views.ndim != 5 or views.shape[1] != count or len(views) != len(global_views):
            raise InputError(
                f"expected {name} views (batch, {count}, channels, height, width), found {tuple(views.shape)}; "
                f"use the settings that the views were made with"
            )


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
