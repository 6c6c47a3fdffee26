"""The learner that a step is tested with."""

from functools import partial

from torch import Tensor

from vitrail.tasks.classification import classification_loss
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.training.recipe import Recipe
from vitrail.training.supervised import Supervised


def plain_loss(recipe: Recipe, weights: Tensor | None = None) -> Supervised:
    """Return a classifier with the loss of a recipe, with these class weights."""
    mixed = recipe.mixing is not None and recipe.mixing.on
    return Supervised(CLASSIFICATION, partial(classification_loss, recipe.objective, weights), mixed, 0)
