"""The interface of a learner: what a run trains, its loss, and how it is validated.

    ViT -> module                    what the optimizer trains: the model itself, or with a decoder or a teacher
    images -> inputs -> loss         a step
    module -> ViT                    what the bundle keeps

`supervised` learns a task from labels; `pretraining` learns from images alone. The loop, the state, the ranks and the
memory forecast are the same for both.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.views import AnyBatch
from vitrail.models.vit import ViT
from vitrail.tasks.metrics import Metrics, MetricSpec
from vitrail.training.distributed import Ranks

if TYPE_CHECKING:
    from vitrail.training.run import TrainingRun


class ShownMetrics(Protocol):
    """The metrics that a run shows while it trains."""

    @property
    def training_metric(self) -> MetricSpec:
        """The metric that is averaged over every training batch."""

    @property
    def headline(self) -> MetricSpec:
        """The validation metric that the run is known by."""

    @property
    def criteria(self) -> Mapping[str, MetricSpec]:
        """The validation metrics that can select the best checkpoint."""


class Validation(NamedTuple):
    """The metrics of the current model."""

    metrics: dict[str, float]
    """By their keys in metrics.jsonl; `val_loss` is one of them."""
    images: int
    """The number of images."""
    constants: Mapping[str, Any] = MappingProxyType({})
    """The constants of the task that follow from these predictions."""


class Learner(ABC):
    """What a run trains."""

    keeps_last: ClassVar[bool] = False
    """Whether the last checkpoint is kept, and not the one with the best criterion."""

    @abstractmethod
    def module(self, model: ViT) -> nn.Module:
        """Return the module to train; the model is a part of it."""

    @abstractmethod
    def kept(self, module: nn.Module) -> ViT:
        """Return the model that the bundle keeps."""

    @abstractmethod
    def inputs(self, pixels: Tensor, first: int) -> tuple[Tensor, ...]:
        """Return the arguments of the module for normalised images; `first`: the first one's position in the stream."""

    def view_inputs(self, views: tuple[Tensor, Tensor], first: int) -> tuple[Tensor, ...]:
        """Return the arguments of the module for normalised views of images, from a batch of views."""
        raise TypeError(f"{type(self).__name__} learns from images, not from views ({len(views)}, at {first})")

    def before_step(self, step: int) -> None:  # noqa: B027 (most learners have nothing to do)
        """Prepare for step `step` (0-based), before its first micro-batch."""

    def before_update(self, module: nn.Module, step: int) -> None:  # noqa: B027
        """Change the gradients of step `step` after they are clipped, before the optimizer uses them."""

    def after_update(self, module: nn.Module, step: int, ranks: Ranks) -> None:  # noqa: B027
        """Change what the optimizer does not train, after its update in step `step`."""

    @abstractmethod
    def loss(self, outputs: Any, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Map the module's outputs to the mean loss and the sum of the training metric over the images."""

    def placeholders(self, pixels: Tensor) -> Tensor:
        """Return labels of the right shape and type for images (B, C, H, W), to forecast the memory of a step."""
        return torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)

    @abstractmethod
    def validate(self, run: "TrainingRun") -> Validation:
        """Evaluate the current model on the validation split."""

    def constants(self, run: "TrainingRun") -> Mapping[str, Any]:  # noqa: ARG002
        """Return the constants of the task that follow from the current model's predictions."""
        return {}

    @abstractmethod
    def standard_error(self, criterion: str, value: float, images: int) -> float | None:
        """Return the standard error of a criterion; None if it is not known, so that every digit counts."""

    @abstractmethod
    def evaluate(self, run: "TrainingRun", best: Bundle, *, final: bool) -> Metrics:
        """Evaluate the best model; `final`: write what the result is based on to the run folder."""
