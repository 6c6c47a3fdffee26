"""The training objective: the loss of logits (B, K) against targets (B, K), K classes."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from torch import Tensor

from vitrail.data.augmentation.mixing import mix_targets
from vitrail.errors import ConfigError, InputError
from vitrail.schema import Frozen, Rate


def _as_class_weights(value: Any) -> Any:
    """Validate the whole field at once, so that an error is one sentence and not one per member of the union."""
    if isinstance(value, (list, tuple)) and value:
        numbers = [number for number in value if isinstance(number, (int, float)) and not isinstance(number, bool)]
        if len(numbers) == len(value) and all(0 <= number < float("inf") for number in numbers) and any(numbers):
            return tuple(float(number) for number in numbers)
    elif value in ("none", "balanced"):
        return value
    raise PydanticCustomError(
        "class_weights", "it should be 'none', 'balanced', or a list with one number >= 0 per class"
    )


class Objective(Frozen):
    """The loss and its targets."""

    loss: Literal["softmax", "sigmoid", "l2", "l1", "huber"] | None = None
    """`softmax`: cross-entropy; `sigmoid`: binary cross-entropy, for one class per image summed over classes (as in
    Google's code). For numbers: `l2`, `l1`, or `huber`, which is quadratic up to one standard deviation. None: softmax
    for classification and segmentation, sigmoid for multilabel, l2 for regression."""
    label_smoothing: Rate = 0.0
    """Fraction of the target that is spread evenly over all classes."""
    class_weights: Annotated[Literal["none", "balanced"] | tuple[float, ...], BeforeValidator(_as_class_weights)] = (
        "none"
    )
    """Loss weight of each class: none, `balanced` (inverse to its frequency), or one number per class."""


def targets(labels: Tensor, classes: int, objective: Objective, lam: Tensor | None = None) -> Tensor:
    """Return targets (B, K) in float32 whose rows sum to 1: smoothed, then mixed with their partners' by `lam`."""
    smooth = objective.label_smoothing
    rows = F.one_hot(labels, classes).to(torch.float32)
    if smooth:
        rows = rows * (1 - smooth) + smooth / classes
    return rows if lam is None else mix_targets(rows, lam)


def loss(logits: Tensor, targets: Tensor, objective: Objective, weights: Tensor | None = None) -> Tensor:
    """Return the mean loss over the batch, computed in float32 or wider.

    `weights` (K) come from `class_weights`. The sum is divided by the number of images, not by their weights, so that
    micro-batches and ranks together give the gradient of the whole batch.
    """
    if logits.shape != targets.shape:
        raise InputError(f"logits have shape {tuple(logits.shape)}, but targets have shape {tuple(targets.shape)}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    weights = None if weights is None else weights.to(logits)
    if objective.loss in (None, "softmax"):
        return F.cross_entropy(logits, targets, weight=weights)
    by_image = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    if weights is not None:
        by_image = by_image * (targets @ weights)
    return by_image.mean()


def class_weights(labels: Tensor | NDArray[Any], classes: int, objective: Objective) -> Tensor | None:
    """Return the class weights (K) for `loss`; None if all classes have weight 1.

    `labels` are those of the whole training split.
    """
    chosen = objective.class_weights
    if isinstance(chosen, tuple):
        if len(chosen) != classes:
            raise ConfigError(f"class_weights has {len(chosen)} numbers, but there are {classes} classes")
        return torch.tensor(chosen, dtype=torch.float32)
    return balanced_weights(labels, classes) if chosen == "balanced" else None


def balanced_weights(labels: Tensor | NDArray[Any], classes: int) -> Tensor:
    """Return weights (K) that make every class count equally, with a mean of 1 over the images.

    A class without images gets 0.
    """
    counts = torch.bincount(torch.as_tensor(labels).cpu(), minlength=classes).to(torch.float64)
    present = int((counts > 0).sum())
    weights = torch.where(counts > 0, counts.sum() / (max(present, 1) * counts.clamp(min=1)), 0.0)
    return weights.to(torch.float32)


def only_in_training(recipe: Mapping[str, Any]) -> list[str]:
    """Return what a resolved recipe adds to the training loss but not to the validation loss."""
    objective, mixing = recipe.get("objective") or {}, recipe.get("mixing") or {}
    smoothing = float(objective.get("label_smoothing", 0) or 0)
    mixed = [name for name, key in (("mixup", "mixup"), ("CutMix", "cutmix")) if mixing.get(key)]
    return [
        *([f"label smoothing ({smoothing:g})"] if smoothing else []),
        *(mixed if mixing.get("chance", 1) else []),
        *(["class weights"] if objective.get("class_weights", "none") != "none" else []),
        *(["the teacher's targets"] if recipe.get("teacher") else []),
    ]
