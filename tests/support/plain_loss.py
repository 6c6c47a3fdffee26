"""The loss that a step is tested with."""

from functools import partial

from torch import Tensor

from vitrail.tasks.classification import classification_loss
from vitrail.tasks.task import TrainingLoss
from vitrail.training.recipe import Recipe


def plain_loss(recipe: Recipe, weights: Tensor | None = None) -> TrainingLoss:
    """Return the loss of a recipe, with these class weights."""
    return partial(classification_loss, recipe.objective, weights)
