"""How much memory a run will take, known before its first step.

    weights        once                               the average   once more, in float32
    gradients      those that are trained, once       the optimizer twice for Adam, once for SGD with momentum; for Muon
                                                      once for matrices, twice for the rest
    images       all of them, where they live on the device
    in flight      what the backward pass needs, and what a layer needs while it computes; or, where that is more, what
                   Muon's update needs, which computes all matrices of one shape together

All but the last follow from the parameters and the data. For the last, one step is gone through without computing
anything: with torch's fake tensors, which have a shape, a dtype and a device, but no numbers. Every storage is counted
while it lives, so that autocast's copies, gradient checkpointing and the order of the backward pass need no formula of
their own.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.data.augmentation.mixing import mix_pixels
from vitrail.data.sources.splits import Splits
from vitrail.models.vit import ViT
from vitrail.runtime import Precision, autocast
from vitrail.training import objectives
from vitrail.training.defaults import TrainingPlan
from vitrail.training.forward import uses_cuda_graph, uses_fused_pass
from vitrail.training.muon import Muon
from vitrail.training.optimizers import Optimizer, freeze, is_matrix, make_optimizer

KERNELS = 64 * 2**20
"""What matrix products keep to work with on CUDA: 32 MiB for each of the threads of forward and backward (Hopper)."""
PREFETCHED = 2
"""Batches that every worker makes ahead."""
EVALUATION_BATCH = 256


class Job(NamedTuple):
    """What is trained, and on what."""

    plan: TrainingPlan
    device: torch.device
    precision: Precision
    processes: int = 1
    workers: int = 0
    resident: int = 0
    """How many images live on the device, as `resident_images` counts them."""

    @property
    def images(self) -> int:
        """How many images a process sends through the model at once."""
        return max(1, self.plan.batch // (self.processes * self.plan.recipe.gradient_accumulation))


class Forecast(NamedTuple):
    """The most that a step takes, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    images: int
    """How many images go through the model at once."""
    in_flight: int
    """What they take, beside the gradients."""
    parts: int
    """Into how many micro-batches a process cuts its share."""
    resident: int = 0
    """What the images that live on the device take."""
    updating: int = 0
    """What the update needs while it computes, whatever the batch; `in_flight` is never less."""

    @property
    def standing(self) -> int:
        """What is there whatever the batch."""
        return self.weights + self.gradients + self.optimizer + self.average + self.resident

    @property
    def total(self) -> int:
        """The most there is at one moment."""
        return self.standing + self.in_flight

    def with_images(self, images: int, parts: int) -> int:
        """Return about what another number of images at once would take in all."""
        # With one part, gradients take the place of what the backward pass has used up; with more, they are in the way.
        more = self.gradients if self.parts == 1 < parts else 0
        return self.standing + more + max(self.updating, round(self.in_flight * images / self.images))


def resident_images(plan: TrainingPlan, splits: Splits) -> int:
    """Return how many images live on the device: those to train on, and those to measure by."""
    return len(splits.train) + len(splits.val or splits.train) if plan.recipe.data.on_device else 0


def evaluation_batch(images: int) -> int:
    """Return how many images are measured at once: so few that memory which is enough for training is enough."""
    return min(EVALUATION_BATCH, 2 * max(1, images))


def forecast(job: Job) -> Forecast:
    """Go through a step without computing, on torch's fake tensors, and count."""
    recipe = job.plan.recipe
    # Torch's own way of telling which kernel attention takes needs a real GPU of the kind; Apple's cannot be asked.
    device = torch.device("cpu") if job.device.type == "mps" else job.device
    with torch.random.fork_rng(devices=_generators(device)), FakeTensorMode():
        model = _model(job, device)
        trained = [p for p in model.parameters() if p.requires_grad]
        weights, gradients = _bytes(model.state_dict().values()), _bytes(trained)
        average = sum(4 * tensor.numel() for tensor in model.state_dict().values()) if recipe.averaging.on else 0
        buckets = gradients if job.processes > 1 else 0  # in which the processes add up their gradients

        measuring = (weights if average else 0) + _measuring(job, model, device)
        training = _training(job, model, device) - gradients
        optimizer = sum(_copies(recipe.optimizer, *named) * _bytes(named[1:]) for named in _trained(model))
        updating = _updating(recipe.optimizer, model)
    after = max(measuring, updating)  # never both at once
    in_flight = (training + after if _recorded(job) else max(training, after)) + _beside(job)
    return Forecast(
        weights, gradients + buckets, optimizer, average, job.images, in_flight, recipe.gradient_accumulation,
        job.resident * math.prod((job.plan.model.channels, *job.plan.model.image_size)), updating,
    )  # fmt: skip


def _recorded(job: Job) -> bool:
    """Say whether a step's memory is kept for its next replay, so that measuring needs its own."""
    recipe, alone = job.plan.recipe, job.processes == 1
    return uses_fused_pass(job.plan.model, recipe, job.precision, job.device, alone=alone) and uses_cuda_graph(recipe)


def fits_really(job: Job, known: Forecast) -> bool:
    """Compute a step on random images, to see whether a GPU has the memory for it."""
    try:
        with torch.random.fork_rng(devices=_generators(job.device)):
            _compute_a_step(job, known)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def _compute_a_step(job: Job, known: Forecast) -> None:
    standing = torch.empty(known.optimizer + known.average + known.resident, dtype=torch.uint8, device=job.device)
    model = _model(job, job.device)
    for _ in range(min(2, job.plan.recipe.gradient_accumulation)):
        _loss(job, _images(job, job.device, job.images), model).backward()
    update = torch.empty(known.updating, dtype=torch.uint8, device=job.device)
    torch.cuda.synchronize(job.device)
    del standing, update  # they had to be there until now


def _images(job: Job, device: torch.device, images: int) -> Tensor:
    plan = job.plan
    size = (images, plan.model.channels, *plan.model.image_size)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=device)


def _loss(job: Job, stored: Tensor, model: nn.Module) -> Tensor:
    """Return the loss of images, by way of everything that a step does."""
    plan, device, count = job.plan, stored.device, len(stored)
    pixels = plan.preprocess.normalise(stored)
    if plan.mixing.on and count % 2 == 0:
        share, box = torch.ones(count, device=device), torch.zeros(count, 4, dtype=torch.int64, device=device)
        pixels = mix_pixels(pixels, share, box)
    with autocast(device, job.precision):
        logits: Tensor = model(pixels)
    targets = torch.full(logits.shape, 1 / logits.shape[-1], device=device)
    return objectives.loss(logits, targets, plan.recipe.objective)


def _model(job: Job, device: torch.device) -> ViT:
    with device:
        model = ViT(job.plan.model)
    model.gradient_checkpointing = job.plan.recipe.gradient_checkpointing
    freeze(model, job.plan.recipe.freeze)
    return model.train()


def _training(job: Job, model: nn.Module, device: torch.device) -> int:
    """Return what a step takes beside the weights, the gradients among it."""

    def step() -> None:
        # A second part finds the gradients of the first; a third finds no more.
        for _ in range(min(2, job.plan.recipe.gradient_accumulation)):
            _loss(job, _images(job, device, job.images), model).backward()

    most = _most_alive(step, model)
    model.zero_grad(set_to_none=True)
    return most


@torch.no_grad()
def _measuring(job: Job, model: nn.Module, device: torch.device) -> int:
    """Return what the measuring of a batch takes beside the weights."""

    def measure() -> None:
        pixels = job.plan.preprocess.normalise(_images(job, device, evaluation_batch(job.images)))
        with autocast(device, job.precision):
            model(pixels)

    model.eval()
    most = _most_alive(measure, model)
    model.train()
    return most


def _updating(config: Optimizer, model: nn.Module) -> int:
    """Return what an update takes beside the weights, the gradients and what the optimizer keeps.

    Of AdamW and SGD that is one parameter's worth at most, and is not counted.
    """
    if config.kind != "muon":
        return 0
    optimizer = cast("Muon", make_optimizer(model, config))
    for _, parameter in _trained(model):
        parameter.grad = torch.zeros_like(parameter)
    device = next(model.parameters()).device
    # On a GPU the device itself decides whether a step counts, for which it needs both outcomes.
    bad = torch.zeros((), device=device) if device.type == "cuda" else None
    optimizer.step_matrices(bad)  # makes the momenta, which are counted as the optimizer's
    momenta = [kept for state in optimizer.state.values() for kept in state.values()]
    gradients = [parameter.grad for _, parameter in _trained(model) if parameter.grad is not None]
    most = _most_alive(lambda: optimizer.step_matrices(bad), model, [*gradients, *momenta])
    model.zero_grad(set_to_none=True)
    return most


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _beside(job: Job) -> int:
    """Return what is there beside tensors that a step makes: on a CPU the images that workers make ahead."""
    if job.device.type == "cuda":
        return KERNELS
    height, width = job.plan.model.image_size
    batches = 1 + PREFETCHED * job.workers
    return batches * job.images * job.plan.recipe.gradient_accumulation * height * width * job.plan.model.channels


def _copies(optimizer: Optimizer, name: str, parameter: Tensor) -> int:
    """Return how many numbers an optimizer keeps for each one of a parameter."""
    if optimizer.kind == "muon":
        return 1 if is_matrix(name, parameter) else 2
    return 2 if optimizer.kind != "sgd" else 1 if optimizer.momentum else 0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _generators(device: torch.device) -> list[torch.device]:
    """Return the devices, beside the processor, whose random numbers a dry run must leave alone."""
    return [device] if device.type == "cuda" else []


def _most_alive(work: Callable[[], None], model: nn.Module, others: Iterable[Tensor] = ()) -> int:
    """Return the most bytes that `work` has alive at one moment, beside the model and other tensors that are there."""
    count = _Alive([*model.parameters(), *model.buffers(), *others])
    with count:
        work()
    return count.most


class _Alive(TorchDispatchMode):
    """Counts the storages that operations make, from the moment they are made until nobody has them any more."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in there:
            self._count(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._count(tensor, tensor.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return result

    def _count(self, tensor: Tensor, size: int) -> None:
        # Views share a storage, which is one object for as long as anything lies in it.
        storage = tensor.untyped_storage()
        name = id(storage)
        if name in self._known:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[name]

        self._known[name] = weakref.ref(storage, gone)
        self.now += size


def _tensors_in(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors_in(part)
