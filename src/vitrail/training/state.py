"""The training state of a run in memory: everything that a step changes, and what resuming needs of it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from vitrail.errors import CheckpointError
from vitrail.training.averaging import Average
from vitrail.training.slices import gather_into


class Score(NamedTuple):
    """How good a checkpoint is; scores are compared by value, then by loss. Higher is better."""

    value: float
    """The criterion; negated if lower is better."""
    loss: float
    """The validation loss, negated."""

    @property
    def known(self) -> bool:
        """Whether the criterion is finite."""
        return math.isfinite(self.value)


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    best_step: int = 0
    best_digest: str = ""
    """Digest of best/config.json, which holds the digest of the weights."""
    highest: tuple[float, float] | None = None
    """The highest `Score` of a validation. best/ may be a later checkpoint that is as good."""
    since_highest: int = 0
    """Validations since the highest score."""
    bad_files: list[str] | None = None
    finished: bool = False

    @property
    def highest_score(self) -> Score | None:
        """The highest score; None if no validation had a finite one, and after best/ was lost."""
        return None if self.highest is None or not self.best_step else Score(*self.highest)

    def reach(self, score: Score) -> bool:
        """Take in the score of a validation; return whether it is the highest, as the first finite one is."""
        highest = self.highest_score
        if not score.known or (highest is not None and not score > highest):
            self.since_highest += 1
            return False
        self.highest, self.since_highest = (score.value, score.loss), 0
        return True


class Setting(NamedTuple):
    """What the exact bits of the weights depend on, besides the recipe."""

    threads: int
    processes: int
    precision: str
    sharded: bool = False
    decoder: str = "cpu"


@dataclass
class State:
    """Everything that a step changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    progress: Progress
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", enabled=False))
    """Loss scaling for fp16."""
    whole: nn.Module | None = None
    """An unsharded copy of a sharded model on the CPU, which `unsharded` fills; None if the model is not sharded."""

    def averaged(self) -> AbstractContextManager[None]:
        """Swap in the averaged weights, if there are any, inside a `with` block."""
        return nullcontext() if self.average is None else self.average.swapped(self.model)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather a sharded model on every rank's device inside a `with` block; `plain` is then that copy."""
        if self.whole is None:
            yield
            return
        gather_into(self.whole.to(next(self.model.parameters()).device), self.model)
        try:
            yield
        finally:
            self.whole.to("cpu")

    @property
    def plain(self) -> nn.Module:
        """The model to evaluate and to save; of a sharded one a copy, which `unsharded` brings up to date."""
        return self.model if self.whole is None else self.whole

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, their average and the optimizer state by name; of a sharded model this rank's slices."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.state().items()}
        for name, parameter in self.trained().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return tensors

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def restore(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Load what `tensors` returned in an earlier run; `where` names it in messages."""
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            groups[group][rest] = tensor
        expected = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        if expected != {name: tensor.shape for name, tensor in groups["model"].items()}:
            raise CheckpointError(
                f"the training state in {where} is of another model than the recipe's; delete that run folder, or "
                f"choose another one with --run"
            )
        self.model.load_state_dict(groups["model"])
        if self.average is not None:
            self.average.load(groups["average"])
        for name, parameter in self.trained().items():
            states = {
                place.removeprefix(f"{name}/"): tensor
                for place, tensor in groups["optimizer"].items()
                if place.startswith(f"{name}/")
            }
            if states:
                self.optimizer.state[parameter] = {key: tensor.to(parameter.device) for key, tensor in states.items()}
