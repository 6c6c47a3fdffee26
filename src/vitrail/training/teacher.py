"""The teacher of a run: a frozen model that is shown the images of the student, through its own preprocessing.

    augmented pixels -> mixed as the student's -> the teacher's channels, size, mean and std -> its outputs

The teacher is not a part of the module that is trained, so it is in no training state, optimizer or bundle. A run
records its name and digest, and resumes only with the same one.
"""

import copy
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from vitrail.acceleration.engine import prepare
from vitrail.acceleration.planner import ExecutionPlan, Purpose, hardware_of, plan_inference
from vitrail.checkpoints.bundle import CLASSIFICATION, Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.augmentation.mixing import mix_pixels
from vitrail.data.batches import Batch
from vitrail.errors import ConfigError
from vitrail.models.checks import per_token
from vitrail.runtime import Precision, autocast
from vitrail.schema import Frozen

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a greyscale image (ITU-R 601), as Pillow has them."""
INSTEAD = "learn its features with vitrail pretrain --method distill"


class TeacherSettings(Frozen):
    """How a classifier learns from a teacher. A recipe with this table requires --teacher."""

    targets: Literal["soft", "hard"] = "soft"
    """`soft`: the teacher's probabilities. `hard`: the class that it predicts, as in DeiT; a model from scratch then
    has a distillation token by default."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 3.0
    """Softens the probabilities of teacher and student: logits are divided by it. For soft targets only."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the teacher's targets in the loss; the labels have the rest."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        default = type(self).model_fields["temperature"].default
        if self.targets == "hard" and self.temperature != default:
            raise ConfigError(
                f"teacher.temperature {self.temperature:g} has no effect with hard targets; leave it out (default "
                f"{default:g})"
            )
        return self


# ── opening ──


@dataclass(frozen=True, eq=False)
class Teacher:
    """An opened teacher."""

    bundle: Bundle
    name: str
    """Where it was opened from, as the user wrote it."""

    @functools.cached_property
    def digest(self) -> str:
        """The checksum of all that its outputs depend on: weights, config, preprocessing, order of the classes."""
        bundle = self.bundle
        words = bundle.model.config.resolved().to_json(), bundle.preprocess.to_json(), json.dumps(bundle.classes)
        digest = hashlib.blake2b("\n".join(words).encode(), digest_size=16)
        for name, tensor in sorted(bundle.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def record(self) -> dict[str, str]:
        """Return what a bundle says about the teacher of its model."""
        return {"name": self.name, "digest": self.digest}

    def execution(self, device: torch.device, precision: Precision, purpose: Purpose) -> ExecutionPlan:
        """Return how its outputs are computed: without CUDA graphs, which crashed along with those of the student."""
        plan = plan_inference(self.bundle.model.config, hardware_of(device), precision, purpose)
        return plan._replace(graphs=False)

    def weight_bytes(self, precision: Precision) -> int:
        """Return the memory of its weights."""
        numbers = sum(parameter.numel() for parameter in self.bundle.model.parameters())
        return numbers * (4 if precision == "float32" else 2)


def opened_teacher(teacher: "str | Path | Bundle | Teacher | None") -> Teacher | None:
    """Open the teacher of a run; assumptions made while opening it are printed when the run starts."""
    if teacher is None or isinstance(teacher, Teacher):
        return teacher
    if isinstance(teacher, Bundle):
        name = str(teacher.origin or teacher.provenance.get("source") or "a bundle in memory")
        return Teacher(ready_bundle(teacher), name)
    if isinstance(teacher, str | Path):
        return Teacher(ready_bundle(teacher), str(teacher))
    raise ConfigError(f"teacher is {teacher!r}; use a bundle, a path or a name, such as teacher='timm:name.tag'")


def check_channels(teacher: Teacher, channels: int) -> None:
    """Raise if images with these channels cannot be converted to the teacher's."""
    own = teacher.bundle.preprocess.channels
    if own != channels and {own, channels} != {1, 3}:
        raise ConfigError(
            f"the teacher {teacher.name} takes images of {own} channels, and the model {channels}; use a teacher with "
            f"the same channels"
        )


def class_columns(teacher: Teacher, classes: Sequence[str]) -> tuple[int, ...]:
    """Return the teacher's output for each class of the data; raise unless it has the same classes, in any order."""
    bundle, names = teacher.bundle, teacher.bundle.classes
    if not bundle.model.config.classes:
        raise ConfigError(f"the teacher {teacher.name} has no head; use a classifier, or {INSTEAD}")
    if bundle.task != CLASSIFICATION:
        raise ConfigError(f"the teacher's task is {bundle.task}, not {CLASSIFICATION}; use a classifier, or {INSTEAD}")
    if fault := per_token(bundle.model.config):
        raise ConfigError(f"the teacher {teacher.name} cannot be used: {fault}")
    if names is None:
        raise ConfigError(
            f"the class names of the teacher {teacher.name} are unknown, so they cannot be matched with the data's; "
            f"set bundle.classes and save it, or {INSTEAD}"
        )
    if sorted(names) != sorted(classes):
        raise ConfigError(
            f"the teacher {teacher.name} has other classes than the data: {_difference(names, classes)}; use a teacher "
            f"that was trained on the same classes, or {INSTEAD}"
        )
    return tuple(names.index(name) for name in classes)


def _difference(names: Sequence[str], classes: Sequence[str]) -> str:
    missing, extra = [name for name in classes if name not in names], [name for name in names if name not in classes]
    lacks = [f"{who} lacks {_first(which)}" for who, which in (("it", missing), ("the data", extra)) if which]
    return " and ".join(lacks) or "it has a name twice"


def _first(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" (and {len(names) - 1:,} more)" if len(names) > 1 else "")


# ── computing ──


class TeacherImages:
    """Maps the images of a batch to the input of a teacher."""

    def __init__(self, teacher: Teacher, *, mixed: bool) -> None:
        """`mixed`: the student sees mixed images."""
        self.preprocess, self.mixed = teacher.bundle.preprocess, mixed

    def __call__(self, batch: Batch) -> Tensor:
        """Return normalised images (B, C, H, W) of the teacher's size, on the device of the batch."""
        pixels = batch.pixels.float()
        if self.mixed:
            pixels = mix_pixels(pixels, batch.lam, batch.box)
        pixels = with_channels(pixels, self.preprocess.channels)
        if tuple(pixels.shape[-2:]) != self.preprocess.size:
            mode = "bicubic" if self.preprocess.interpolation == "bicubic" else "bilinear"
            pixels = F.interpolate(pixels, self.preprocess.size, mode=mode, antialias=True).clamp(0, 255)
        return self.preprocess.normalise(pixels)


def with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Return pixels (B, C, H, W) in greyscale or colour."""
    if pixels.shape[1] == channels:
        return pixels
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1)
    red, green, blue = (pixels[:, channel : channel + 1] for channel in range(3))
    grey: Tensor = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return grey


def frozen_model(teacher: Teacher, device: torch.device) -> Any:
    """Return a copy of the teacher's model on a device, in eval mode."""
    return copy.deepcopy(teacher.bundle.model).to(device).eval().requires_grad_(False)


class ClassTeacher:
    """A teacher that is asked for classes, in the fastest way its device has for the run's precision."""

    def __init__(
        self, teacher: Teacher, classes: Sequence[str], device: torch.device, precision: Precision, *, mixed: bool
    ) -> None:
        columns = class_columns(teacher, classes)
        self.images, self.device, self.precision = TeacherImages(teacher, mixed=mixed), device, precision
        self.columns = None if columns == tuple(range(len(columns))) else torch.tensor(columns, device=device)
        model = frozen_model(teacher, device)
        plan = teacher.execution(device, precision, "evaluate")
        self.model = prepare(model, plan).eval()

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return logits (B, K) in float32, in the order of the data's classes."""
        with autocast(self.device, self.precision):
            logits: Tensor = self.model(self.images(batch))
        return logits.float() if self.columns is None else logits.float().index_select(1, self.columns)
