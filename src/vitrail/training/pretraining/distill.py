"""Feature distillation: a student learns the features of a teacher from images alone.

    image -> student -> pooled vector and patch tokens -> linear maps to the teacher's widths
    image -> teacher -> pooled vector and patch tokens -> resampled to the student's grid, normalised

As arXiv 2205.14141: the teacher's features are normalised by a LayerNorm without parameters, so that no dimension
dominates, and compared by a smooth L1 loss. The linear maps are thrown away.

Axes: B batch, N patches, D width.
"""

from typing import Annotated, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vitrail.acceleration.casting import cast_once
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision
from vitrail.acceleration.cuda.inference.model import FastModel
from vitrail.data.batches import Batch
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast
from vitrail.schema import Frozen
from vitrail.training.teacher import Teacher, TeacherImages, check_channels, frozen_model

BETA = 2.0
"""Where the smooth L1 loss changes from squared to absolute errors: the paper's."""

Weight = Annotated[float, Field(ge=0, le=1000)]


class DistillSettings(Frozen):
    """The settings of feature distillation."""

    pooled_weight: Weight = 1.0
    """Weight of the loss of the pooled vector; 0 leaves it out."""
    patch_weight: Weight = 1.0
    """Weight of the loss of the patch tokens; 0 leaves it out."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not self.pooled_weight and not self.patch_weight:
            raise ConfigError(
                "distill.pooled_weight and distill.patch_weight are 0, so there is no loss; set one above 0"
            )
        return self


def check_distill(config: ViTConfig, settings: DistillSettings, teacher: Teacher) -> None:
    """Raise a `ConfigError` if the student cannot learn the teacher's features."""
    check_channels(teacher, config.channels)
    pool = teacher.bundle.model.config.pool
    if settings.pooled_weight and not teacher.bundle.model.config.has_pool:
        raise ConfigError(
            f"the teacher {teacher.name} does not pool its tokens (pool = '{pool}'); set distill.pooled_weight=0"
        )
    if not settings.pooled_weight and (config.pool == "map" or config.representation):
        raise ConfigError(
            "distill.pooled_weight is 0, so the model's pooling layers would not be trained; set it above 0, or "
            "model.pool=mean without model.representation"
        )
    if settings.patch_weight and config.patch_dropout:
        raise ConfigError(
            f"feature distillation compares all patches, but patch_dropout is {config.patch_dropout}; set it to 0, or "
            f"distill.patch_weight=0"
        )


# ── features ──


class PairedFeatures(NamedTuple):
    """What student and teacher are compared by."""

    pooled: Tensor
    """(B, D)."""
    patches: Tensor
    """(B, N, D)."""


def feature_loss(mapped: Tensor, target: Tensor) -> Tensor:
    """Return the smooth L1 loss of mapped features (…, D) and the teacher's, normalised, in float32 or wider."""
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    return F.smooth_l1_loss(mapped.to(target.dtype), F.layer_norm(target, target.shape[-1:]), beta=BETA)


def resampled(patches: Tensor, grid: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Return patch tokens (B, N, D) of a grid, resampled bilinearly to another grid."""
    if grid == new:
        return patches
    maps = patches.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(maps, new, mode="bilinear", antialias=True).flatten(2).transpose(1, 2)


class FeatureTeacher:
    """A teacher that is asked for features, in the fastest way its device has for the run's precision."""

    def __init__(self, teacher: Teacher, grid: tuple[int, int], device: torch.device, precision: Precision) -> None:
        """`grid`: the student's patches."""
        self.grid, self.device, self.precision = grid, device, precision
        self.images = TeacherImages(teacher, mixed=False)
        model: ViT = frozen_model(teacher, device)
        plan = teacher.execution(device, precision, "features")
        self.model: ViT | FastModel
        if plan.path == "fused_encoder":
            self.model = FastModel(model, EncoderPrecision(), all_tokens=True)
        else:
            self.model = cast_once(model, plan.autocast).eval()

    @torch.no_grad()
    def __call__(self, batch: Batch) -> PairedFeatures:
        """Return the teacher's features in float32."""
        config = self.model.config
        with autocast(self.device, self.precision):
            features = self.model.features(self.images(batch))
        patches = features.tokens[:, config.layout.patches].float()
        return PairedFeatures(features.pooled.float(), resampled(patches, config.grid, self.grid))


class FeatureStudent(nn.Module):
    """An encoder with linear maps from its features to the teacher's."""

    def __init__(self, encoder: ViT, settings: DistillSettings, teacher: ViTConfig) -> None:
        super().__init__()
        config, like = encoder.config, next(encoder.parameters())
        self.encoder = encoder
        with like.device:
            self.to_pooled = nn.Linear(config.pooled_width, teacher.pooled_width) if settings.pooled_weight else None
            self.to_patches = nn.Linear(config.width, teacher.width) if settings.patch_weight else None

    def forward(self, pixels: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the mapped pooled vector and patch tokens of normalised images (B, C, H, W)."""
        features = self.encoder.features(pixels)
        # A norm after the pooling is applied to the patches, too, so that both are of the same scale.
        patches = self.encoder.fc_norm(features.tokens[:, self.encoder.config.layout.patches])
        return (
            None if self.to_pooled is None else self.to_pooled(features.pooled),
            None if self.to_patches is None else self.to_patches(patches),
        )


def distillation_loss(
    mapped: tuple[Tensor | None, Tensor | None], target: PairedFeatures, settings: DistillSettings
) -> Tensor:
    """Return the weighted loss of the features that the student has mapped."""
    weights = settings.pooled_weight, settings.patch_weight
    losses = [
        weight * feature_loss(own, other)
        for weight, own, other in zip(weights, mapped, target, strict=True)
        if own is not None
    ]
    return torch.stack(losses).sum()
