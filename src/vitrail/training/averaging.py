"""The average of the weights over the steps of a run, which is often better than the last of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrail.errors import CheckpointError, ConfigError
from vitrail.schema import Frozen
from vitrail.training.schedules import Steps


class Averaging(Frozen):
    """Which average is kept. What the paper calls Polyak averaging with a factor of 0.9999 is `ema`."""

    kind: Literal["none", "ema", "polyak"] = "none"
    """`ema` forgets older weights exponentially; `polyak` is the plain mean of all weights from `start` on."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """`ema`: how much of the average stays at each step."""
    warmup: bool = False
    """`ema`: keep at most (1 + t) / (10 + t) after `start` + t steps, so that a short run forgets where it began."""
    start: Steps = 0
    """Steps before the average begins; until then it is the weights as they are."""

    @property
    def on(self) -> bool:
        """Whether an average is kept at all."""
        return self.kind != "none"

    def share(self, step: int) -> float:
        """Return how much of the weights after `step` steps goes into the average: a pure function."""
        t = step - self.start
        if t < 1 or self.kind == "none":
            return 1.0
        if self.kind == "polyak":
            return 1 / t
        return 1 - (min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay)


class Average:
    """The average itself: a plain dict of tensors, by the names of the model's state dict.

    It is kept in float32 at least, also where the weights are bf16, whose steps are too coarse for small changes.
    BatchNorm's running statistics are averaged like weights; whole numbers (its count of batches) are copied. A model's
    tensors are looked up once, so they must stay the same ones while it is averaged, whatever is written into them.
    """

    def __init__(self, model: nn.Module, averaging: Averaging) -> None:
        if not averaging.on:
            raise ConfigError("averaging is 'none', so there is no average to keep")
        self.averaging = averaging
        self._tensors = {name: _precise(tensor).clone() for name, tensor in model.state_dict().items()}
        self._model: nn.Module | None = None
        self._live: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights that the model has after `step` steps: 1 after the first, and so on, none left out."""
        if self._model is not model:  # walking through a model at every step takes longer than the sums
            self._model, self._live = model, model.state_dict()
        share = self.averaging.share(step)
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, tensor in self._live.items():
            if tensor.is_floating_point() and share < 1:
                averages.append(self._tensors[name])
                weights.append(_precise(tensor))
            else:
                self._tensors[name].copy_(tensor)
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Put the average into the model, in the model's own dtype."""
        for name, tensor in model.state_dict().items():
            tensor.copy_(self._tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Have the average in the model for the time of a `with`; afterwards the weights are back, bit for bit."""
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.copy_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.copy_(kept[name])

    def state(self) -> dict[str, Tensor]:
        """Return the average by name: the tensors themselves, which the next `update` changes."""
        return dict(self._tensors)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned in an earlier run."""
        for name in sorted(self._tensors.keys() ^ state.keys()):
            where = "the saved average" if name in self._tensors else "the model"
            raise CheckpointError(f"the saved average does not fit the model: {name} is missing in {where}")
        for name, tensor in self._tensors.items():
            saved = state[name]
            if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
                raise CheckpointError(
                    f"the saved average does not fit the model: {name} is {tuple(saved.shape)} {saved.dtype} there and "
                    f"{tuple(tensor.shape)} {tensor.dtype} here"
                )
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])


def _precise(tensor: Tensor) -> Tensor:
    """Return a floating tensor in float32 at least, any other as it is."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
