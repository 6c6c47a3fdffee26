"""Forecast the memory of a run before its first step.

    weights        once                               average    once more, in float32
    gradients      once, for trained parameters       optimizer  twice for Adam, once for SGD with momentum; for Muon
                                                      once for matrices, twice for the rest
    teacher        its weights                        images     all of them, if they live on the device
    sharded        each rank holds its slices of the first four; what it gathers counts as activations
    activations    what the backward pass, the running layer and the teacher's forward pass need; or, if larger, what
                   Muon's update needs, which processes all matrices of one shape together

All but the last follow from the parameters and the data. For the last, one step runs on torch's fake tensors, which
have a shape, a dtype and a device but no data. Every storage is counted while it is alive, so autocast copies, gradient
checkpointing and the order of the backward pass need no formulas.
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
from vitrail.data.batches import Batch
from vitrail.data.slots import PER_WORKER
from vitrail.models.lora import add_adapters
from vitrail.models.vit import ViT
from vitrail.runtime import autocast
from vitrail.training.context import Job, evaluation_batch
from vitrail.training.learner import Learner
from vitrail.training.learners import learner_of
from vitrail.training.muon import Muon
from vitrail.training.optimizers import Optimizer, freeze, is_matrix, make_optimizer
from vitrail.training.sharding import ShardedUnits

KERNELS = 64 * 2**20
"""Workspace of CUDA matmuls: 32 MiB each for the forward and the backward thread (Hopper)."""


class Forecast(NamedTuple):
    """Peak memory of a step, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    images: int
    """Micro-batch size."""
    in_flight: int
    """Activations and temporary buffers, without the gradients."""
    accumulation: int
    """Gradient accumulation steps."""
    resident: int = 0
    """Images kept on the device."""
    updating: int = 0
    """Temporary memory of the optimizer step, independent of the batch size; `in_flight` is never less."""
    teacher: int = 0
    """Weights of the teacher."""
    teaching: int = 0
    """What the teacher's forward pass needs in a step; a part of `in_flight`."""

    @property
    def standing(self) -> int:
        """Memory that does not depend on the batch size."""
        return self.weights + self.gradients + self.optimizer + self.average + self.resident + self.teacher

    @property
    def total(self) -> int:
        """Peak memory."""
        return self.standing + self.in_flight

    def with_images(self, images: int, accumulation: int) -> int:
        """Estimate the total for another micro-batch size."""
        # With one micro-batch, gradients reuse memory that the backward pass frees; with more, they add to the peak.
        more = self.gradients if self.accumulation == 1 < accumulation else 0
        return self.standing + more + max(self.updating, round(self.in_flight * images / self.images))


def forecast(job: Job) -> Forecast:
    """Run a step on torch's fake tensors and count the memory."""
    recipe = job.plan.recipe
    # Torch selects the attention kernel on a real device of the same kind; MPS cannot be queried.
    device = torch.device("cpu") if job.device.type == "mps" else job.device
    learner = learner_of(job.plan, device)  # a task may keep real tensors in its loss
    with torch.random.fork_rng(devices=_generators(device)), FakeTensorMode(allow_non_fake_inputs=True):
        model = module_of(job, device, learner)
        trained = [p for p in model.parameters() if p.requires_grad]
        weights, gradients = _bytes(model.state_dict().values()), _bytes(trained)
        average = sum(4 * tensor.numel() for tensor in model.state_dict().values()) if recipe.averaging.on else 0
        buckets = gradients if job.processes > 1 and not job.context.sharded else 0  # DDP's buckets

        evaluating = (weights if average else 0) + _evaluation_bytes(job, model, device, learner)
        if recipe.distill is not None:  # validation asks the teacher, too
            evaluating += _teaching_bytes(job, device, evaluation_batch(job.images))
        # The teacher runs between the forward and the backward pass, while all activations are held.
        teaching = _teaching_bytes(job, device, job.images)
        training = _training_bytes(job, model, device, learner) - gradients + teaching
        optimizer = sum(_copies(recipe.optimizer, *named) * _bytes(named[1:]) for named in _trained(model))
        updating = _update_bytes(recipe.optimizer, model)
        if job.context.sharded:
            units = ShardedUnits.of(model, job.precision)
            training += units.gathered - units.cast
            evaluating += weights  # a whole copy of the model is evaluated
    after = max(evaluating, updating)  # never both at once
    # A CUDA graph keeps the memory of a step, so that evaluation needs its own.
    in_flight = training + after if job.context.execution.graphs else max(training, after)
    in_flight += _overhead_bytes(job)
    if job.context.sharded:
        weights, gradients, optimizer, average = (
            -(-size // job.processes) for size in (weights, gradients, optimizer, average)
        )
    return Forecast(
        weights, gradients + buckets, optimizer, average, job.images, in_flight, recipe.gradient_accumulation,
        job.context.resident * math.prod((job.plan.model.channels, *job.plan.model.image_size)), updating,
        0 if job.plan.teacher is None else job.plan.teacher.weight_bytes(job.precision), teaching,
    )  # fmt: skip


def step_fits(job: Job, estimate: Forecast) -> bool:
    """Run a step on random images to see whether the GPU has enough memory."""
    try:
        with torch.random.fork_rng(devices=_generators(job.device)):
            _compute_a_step(job, estimate)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def _compute_a_step(job: Job, estimate: Forecast) -> None:
    held = estimate.optimizer + estimate.average + estimate.resident + estimate.teacher + estimate.teaching
    standing = torch.empty(held, dtype=torch.uint8, device=job.device)
    learner = learner_of(job.plan, job.device)
    module = module_of(job, job.device, learner)
    for _ in range(min(2, job.plan.recipe.gradient_accumulation)):
        _loss(job, _images(job, job.device, job.images), module, learner).backward()
    update = torch.empty(estimate.updating, dtype=torch.uint8, device=job.device)
    torch.cuda.synchronize(job.device)
    del standing, update  # they had to stay allocated until here


def _images(job: Job, device: torch.device, images: int) -> Tensor:
    plan = job.plan
    size = (images, plan.model.channels, *plan.model.image_size)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=device)


def _loss(job: Job, stored: Tensor, module: nn.Module, learner: Learner) -> Tensor:
    """Return the loss of images, computed as in a training step."""
    plan, device, count = job.plan, stored.device, len(stored)
    pixels = plan.preprocess.normalise(stored)
    lam, box = torch.ones(count, device=device), torch.zeros(count, 4, dtype=torch.int64, device=device)
    if plan.mixing.on and count % 2 == 0:
        pixels = mix_pixels(pixels, lam, box)
    inputs = learner.inputs(pixels, 0)
    with autocast(device, job.precision):
        outputs = module(*inputs)
    numbers = torch.zeros(count, dtype=torch.int64, device=device)
    return learner.loss(outputs, Batch(stored, learner.placeholders(stored), numbers, lam, box))[0]


def module_of(job: Job, device: torch.device, learner: Learner) -> nn.Module:
    """Return the module that a job trains, with its frozen weights and adapters, unsharded."""
    with device:
        model = ViT(job.plan.model).train()
        model.gradient_checkpointing = job.plan.recipe.gradient_checkpointing
        add_adapters(model, job.plan.recipe.lora, seed=0)
        freeze(model, job.plan.recipe.frozen)
        return learner.module(model)


def _training_bytes(job: Job, module: nn.Module, device: torch.device, learner: Learner) -> int:
    """Return the memory of a step, including gradients but not the weights."""

    def step() -> None:
        # The second micro-batch runs while the gradients of the first are held; further ones add nothing.
        for _ in range(min(2, job.plan.recipe.gradient_accumulation)):
            _loss(job, _images(job, device, job.images), module, learner).backward()

    peak = _peak_bytes(step, module)
    module.zero_grad(set_to_none=True)
    return peak


@torch.no_grad()
def _evaluation_bytes(job: Job, model: nn.Module, device: torch.device, learner: Learner) -> int:
    """Return the memory of evaluating one batch, without the weights."""

    def evaluate() -> None:
        pixels = job.plan.preprocess.normalise(_images(job, device, evaluation_batch(job.images)))
        inputs = learner.inputs(pixels, 0)
        with autocast(device, job.precision):
            model(*inputs)

    model.eval()
    peak = _peak_bytes(evaluate, model)
    model.train()
    return peak


@torch.no_grad()
def _teaching_bytes(job: Job, device: torch.device, images: int) -> int:
    """Return the memory of the teacher's forward pass, without its weights. Its faster paths need no more than this."""
    if job.plan.teacher is None:
        return 0
    bundle = job.plan.teacher.bundle
    with device:
        model = ViT(bundle.model.config).eval().requires_grad_(False)

    def teach() -> None:
        stored = torch.empty((images, bundle.preprocess.channels, *bundle.preprocess.size), device=device)
        with autocast(device, job.precision):
            model(bundle.preprocess.normalise(stored))

    return _peak_bytes(teach, model)


def _update_bytes(config: Optimizer, model: nn.Module) -> int:
    """Return the temporary memory of an optimizer step, without weights, gradients and optimizer state.

    For AdamW and SGD it is at most the size of one parameter, and is not counted.
    """
    if config.kind != "muon":
        return 0
    optimizer = cast("Muon", make_optimizer(model, config))
    for _, parameter in _trained(model):
        parameter.grad = torch.zeros_like(parameter)
    device = next(model.parameters()).device
    # On a GPU the device decides whether to skip a step, and needs memory for both outcomes.
    bad = torch.zeros((), device=device) if device.type == "cuda" else None
    optimizer.step_matrices(bad)  # allocates the momenta, which count as optimizer state
    momenta = [kept for state in optimizer.state.values() for kept in state.values()]
    gradients = [parameter.grad for _, parameter in _trained(model) if parameter.grad is not None]
    peak = _peak_bytes(lambda: optimizer.step_matrices(bad), model, [*gradients, *momenta])
    model.zero_grad(set_to_none=True)
    return peak


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _overhead_bytes(job: Job) -> int:
    """Return memory outside the tensors of a step: CUDA workspaces, or on a CPU the prefetched images."""
    if job.device.type == "cuda":
        return KERNELS
    height, width = job.plan.model.image_size
    batches = 1 + PER_WORKER * job.context.workers
    return batches * job.images * job.plan.recipe.gradient_accumulation * height * width * job.plan.model.channels


def _copies(optimizer: Optimizer, name: str, parameter: Tensor) -> int:
    """Return how many copies of a parameter the optimizer state holds."""
    if optimizer.kind == "muon":
        return 1 if is_matrix(name, parameter) else 2
    return 2 if optimizer.kind != "sgd" else 1 if optimizer.momentum else 0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _generators(device: torch.device) -> list[torch.device]:
    """Return the devices, besides the CPU, whose random state a dry run must preserve."""
    return [device] if device.type == "cuda" else []


def _peak_bytes(work: Callable[[], None], model: nn.Module, others: Iterable[Tensor] = ()) -> int:
    """Return the peak bytes that `work` allocates, besides the model and `others`."""
    count = _Alive([*model.parameters(), *model.buffers(), *others])
    with count:
        work()
    return count.peak


class _Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, for as long as they are alive."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in there:
            self._count(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._count(tensor, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, tensor: Tensor, size: int) -> None:
        # Views share one storage object.
        storage = tensor.untyped_storage()
        name = id(storage)
        if name in self._storages:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self._storages[name]

        self._storages[name] = weakref.ref(storage, gone)
        self.now += size


def _tensors_in(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _tensors_in(item)
