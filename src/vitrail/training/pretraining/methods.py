"""The pretraining methods by name: the module of each, and the noise that it needs."""

from collections.abc import Callable
from typing import NamedTuple, cast

from torch import nn

from vitrail.models.vit import ViT
from vitrail.training.plan import TrainingPlan
from vitrail.training.pretraining.dino import Dino, DinoSettings
from vitrail.training.pretraining.distill import DistillSettings, FeatureStudent
from vitrail.training.pretraining.mae import MaeSettings, MaskedAutoencoder
from vitrail.training.pretraining.masked_patches import MaskedPatchesSettings, MaskedPatchPrediction
from vitrail.training.teacher import Teacher


class Method(NamedTuple):
    """A pretraining method."""

    module: Callable[[ViT, TrainingPlan], nn.Module]
    """Wraps a model for pretraining; the result has an `encoder`."""
    draws: tuple[int, ...] = ()
    """Uniform draws per patch, besides the first."""
    reconstructs: bool = False
    """Whether the module has a `reconstruct`, which predicts masked patches."""


def _mae(model: ViT, plan: TrainingPlan) -> nn.Module:
    return MaskedAutoencoder(model, plan.recipe.mae or MaeSettings())


def _masked_patches(model: ViT, plan: TrainingPlan) -> nn.Module:
    settings = plan.recipe.masked_patches or MaskedPatchesSettings()
    return MaskedPatchPrediction(model, settings, plan.preprocess.mean, plan.preprocess.std)


def _distill(model: ViT, plan: TrainingPlan) -> nn.Module:
    teacher = cast("Teacher", plan.teacher)  # `Recipe.check_teacher` has refused a plan without one
    return FeatureStudent(model, plan.recipe.distill or DistillSettings(), teacher.bundle.model.config)


def _dino(model: ViT, plan: TrainingPlan) -> nn.Module:
    return Dino(model, plan.recipe.dino or DinoSettings())


METHODS = {
    "mae": Method(_mae, reconstructs=True),
    "masked_patches": Method(_masked_patches, (3,), reconstructs=True),
    "dino": Method(_dino),
    "distill": Method(_distill),
}
