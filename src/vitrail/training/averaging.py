"""Weight averaging over the steps of a run (EMA, Polyak), which often beats the last weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrail.errors import CheckpointError, ConfigError
from vitrail.schema import Frozen
from vitrail.training.optimizers import Steps


class Averaging(Frozen):
    """Which average to keep. The ViT paper's "Polyak averaging with a factor of 0.9999" is `ema`."""

    kind: Literal["none", "ema", "polyak"] = "none"
    """`ema` is the exponential moving average; `polyak` is the plain mean of all weights from `start` on."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """`ema`: the decay per step."""
    warmup: bool = False
    """`ema`: cap the decay at (1 + t) / (10 + t) after `start` + t steps, for short runs."""
    start: Steps = 0
    """Steps before averaging starts; until then the average equals the weights."""

    @property
    def on(self) -> bool:
        """Whether averaging is enabled."""
        return self.kind != "none"

    def lerp_weight(self, step: int) -> float:
        """Return the weight of the current parameters in the average after `step` steps: a pure function."""
        t = step - self.start
        if t < 1 or self.kind == "none":
            return 1.0
        if self.kind == "polyak":
            return 1 / t
        return 1 - (min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay)


class Average:
    """The average itself: a dict of tensors with the keys of the model's state dict.

    It is kept in float32 or wider, even for bf16 weights, which are too coarse for small updates. BatchNorm's running
    statistics are averaged like weights; integers (`num_batches_tracked`) are copied. The model's tensors are looked up
    once, so a model must keep the same tensor objects while it is averaged.
    """

    def __init__(self, model: nn.Module, averaging: Averaging) -> None:
        if not averaging.on:
            raise ConfigError("averaging.kind is 'none', so no average is kept")
        self.averaging = averaging
        self._tensors = {name: _precise(tensor).clone() for name, tensor in model.state_dict().items()}
        self._model: nn.Module | None = None
        self._live: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average with the model's weights after `step` steps; call it after every step, from 1 on."""
        if self._model is not model:  # building the state dict every step would cost more than the update
            self._model, self._live = model, model.state_dict()
        lerp_weight = self.averaging.lerp_weight(step)
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, tensor in self._live.items():
            if tensor.is_floating_point() and lerp_weight < 1:
                averages.append(self._tensors[name])
                weights.append(_precise(tensor))
            else:
                self._tensors[name].copy_(tensor)
        if averages:
            torch._foreach_lerp_(averages, weights, lerp_weight)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copy the average into the model, in the model's dtype."""
        for name, tensor in model.state_dict().items():
            tensor.copy_(self._tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Swap the average into the model inside a `with` block; afterwards the weights are restored bit for bit."""
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.copy_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.copy_(kept[name])

    def state(self) -> dict[str, Tensor]:
        """Return the average by name: the live tensors, which the next `update` changes in place."""
        return dict(self._tensors)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned in an earlier run."""
        for name in sorted(self._tensors.keys() ^ state.keys()):
            where = "the saved average" if name in self._tensors else "the model"
            raise CheckpointError(f"the saved average does not match the model: {name} is missing in {where}")
        for name, tensor in self._tensors.items():
            saved = state[name]
            if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
                raise CheckpointError(
                    f"the saved average does not match the model: {name} is {tuple(saved.shape)} {saved.dtype} in the "
                    f"file and {tuple(tensor.shape)} {tensor.dtype} in the model"
                )
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])


def _precise(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float32 or wider; any other tensor unchanged."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
