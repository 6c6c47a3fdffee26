"""`train`: a folder of images in, an evaluated classifier out."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vitrail._version import __version__
from vitrail.acceleration.planner import Purpose
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.cache import CacheSize, cached
from vitrail.data.sources.given import Data, given_data
from vitrail.data.sources.in_memory import recorded_kind
from vitrail.data.sources.splits import Splits
from vitrail.data.sources.targets import label_rows
from vitrail.errors import ConfigError
from vitrail.runtime import Processes, busy_cpu_note, choose_device, process_group, repeatable
from vitrail.tasks.metrics import Metrics
from vitrail.tasks.task import Task
from vitrail.text import plural
from vitrail.training.auto_batch import fit_batch_to_memory, memory_limit
from vitrail.training.cluster import ClusterPlan, plan_cluster, shard_if_needed
from vitrail.training.console import RunConsole, SilentConsole
from vitrail.training.context import Job, open_splits, run_context
from vitrail.training.defaults import before_training, resolve_defaults
from vitrail.training.distributed import Distributed, Ranks
from vitrail.training.finetune_init import keeps_head, opened_pretrained
from vitrail.training.learners import shown_metrics
from vitrail.training.loop import RunResult, train_run
from vitrail.training.placement import place_images
from vitrail.training.plan import ResolvedDefault, TrainingPlan, describe_data
from vitrail.training.preparation import PreparedFolder, prepare_folder
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import default_recipe, recipe_for
from vitrail.training.run_folder import Origin, check_outside_data, default_folder, locked, origin_of
from vitrail.training.sessions import timed_session
from vitrail.training.teacher import Teacher, opened_teacher


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    bundle: Bundle
    metrics: Metrics
    defaults: list[ResolvedDefault]
    summary: str
    """The result in one sentence."""
    report: Path | None = None
    """The HTML report, if one was written."""


def train(
    data: Data = "digits",
    *,
    method: str | None = None,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    teacher: str | Path | Bundle | Teacher | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    evaluate_on: Literal["test", "val"] = "test",
    printed: set[str] | None = None,
) -> Run:
    """Train a model on images, or resume an interrupted run: the same call finds the same folder.

    `method` is a pretraining method, or "auto" for that of the recipe; without one the model learns from labels.
    `recipe` is the name of a bundled recipe, a TOML file or a `Recipe`; `changes` are strings such as
    "optimizer.lr=3e-4". `pretrained` is a model to fine-tune; `overrides` and `keys` supply what its file does not say,
    as for `load`. `teacher` is a model to learn from. `evaluate_on="val"` leaves the test split untouched while
    settings are still being chosen; the same call without it gives the test result later. `printed` holds messages
    about the data that earlier runs have printed and this one need not repeat; this run adds its own.
    """
    if evaluate_on not in ("test", "val"):
        raise ConfigError(f"evaluate_on is {evaluate_on!r}; choose 'test' or 'val'")
    chosen = choose_device(device)
    with process_group(chosen) as processes, Ranks(processes, chosen).watched() as ranks:
        with ranks.together():
            asked = recipe_for(method, recipe or default_recipe(pretrained, method), changes)
        ranks.wait_at_most(asked.distributed.timeout_minutes)
        ranks.doing("opening the data")  # an index of remote shards may take hours
        with ranks.together(), ranks.main_first():
            request = _request(data, asked, pretrained, overrides, keys, teacher, folder, chosen)
        _check_ranks_agree(ranks, request)
        job = _job(request, ranks, workers)
        result, summary = _trained(request, job, quiet, printed, evaluate_on)
    return Run(request.folder, result.best, result.metrics, job.plan.defaults, summary)


def plan(
    data: Data = "digits",
    *,
    gpus: int,
    gpu_memory: int | None = None,
    method: str | None = None,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    teacher: str | Path | Bundle | Teacher | None = None,
    device: str = "auto",
) -> ClusterPlan:
    """Forecast what a run needs on several GPUs, without starting it.

    `gpu_memory` is the memory of each in bytes, by default what is free on this device. The other arguments are those
    of `train`, and with `method` those of `pretrain`.
    """
    if gpus < 1:
        raise ConfigError(f"gpus is {gpus}; give at least 1")
    if gpu_memory is not None and gpu_memory < 1:
        raise ConfigError(f"gpu_memory is {gpu_memory}; give the bytes of one GPU")
    chosen = choose_device(device)
    asked = recipe_for(method, recipe or default_recipe(pretrained, method), changes)
    asked = asked.replace(distributed=Distributed(shard=False))  # both ways are planned
    request = _request(data, asked, pretrained, None, None, teacher, None, chosen)
    context = run_context(request.plan, request.splits, Ranks(Processes(), chosen), None)
    available = memory_limit(chosen).free if gpu_memory is None else gpu_memory
    return plan_cluster(Job(request.plan, context), gpus, available)


def _trained(
    request: "_Request", job: Job, quiet: bool, printed: set[str] | None, evaluate_on: Literal["test", "val"]
) -> tuple[RunResult, str]:
    """Train and evaluate; return the result, and as one sentence."""
    ranks = job.context.ranks
    with _opened(request, job, quiet, printed) as console, repeatable(job.plan.recipe.deterministic):
        if request.pretrained is not None:
            request.pretrained.announce()
        if job.plan.teacher is not None:
            job.plan.teacher.bundle.announce()
        with ranks.together(), ranks.main_first():
            splits = _splits_to_read(request.splits, evaluate_on, job)
        with _timed(request.folder, job):
            final = evaluate_on == "test"
            result = train_run(job, splits, request.pretrained, request.folder, console, final=final)
        summary = _summary(result, splits, pretraining=job.plan.recipe.method is not None)
        _print_result(console, request.folder, result.metrics, summary)
    return result, summary


# ── what to train, and on what ──


class _Request(NamedTuple):
    """What is to be trained: the arguments of `train`, resolved."""

    plan: TrainingPlan
    """With `batch = "auto"`, its batch is not chosen yet; the plan of the job is final."""
    splits: Splits
    pretrained: Bundle | None
    origin: Origin
    folder: Path
    advice: list[str]


def _request(
    data: Data,
    recipe: Recipe,
    pretrained: str | Path | Bundle | None,
    overrides: Mapping[str, Any] | None,
    keys: str | Path | None,
    teacher: str | Path | Bundle | Teacher | None,
    folder: str | Path | None,
    device: torch.device,
) -> _Request:
    recipe.check_pretrained(pretrained)
    recipe.check_teacher(teacher)
    bundle, taught_by = opened_pretrained(pretrained, overrides, keys), opened_teacher(teacher)
    opened = given_data(data, labelling=recipe.labelling)
    splits = open_splits(opened, recipe)
    facts = describe_data(splits.train, device.type)
    plan = resolve_defaults(recipe, facts, bundle, taught_by)
    plan = plan._replace(task=_fitted(plan, splits, bundle))
    advice = before_training(facts, plan.model, fresh=bundle is None) if recipe.method is None else []
    origin = origin_of(opened, bundle, taught_by)
    place = Path(folder) if folder is not None else default_folder(origin, [plan.recipe])
    check_outside_data(place, origin)
    return _Request(plan, splits, bundle, origin, place, advice)


def _fitted(plan: TrainingPlan, splits: Splits, pretrained: Bundle | None) -> Task:
    """Return the task with its constants: those of the training labels, or of the head that is kept."""
    task, how = plan.task, plan.recipe.pretrained
    if plan.recipe.method is not None:
        return task
    if pretrained is not None and how is not None and pretrained.task == task.name and pretrained.task_constants:
        names = task.output_names(plan.classes)
        if keeps_head(pretrained, how, plan.model, names):
            return task.with_constants(pretrained.task_constants, plan.model.classes)
    return task.fitted(label_rows(splits.train), plan.recipe.labelling)


def _check_ranks_agree(ranks: Ranks, request: _Request) -> None:
    """Raise if the ranks have other versions, or have resolved different plans; they would deadlock."""
    versions = sorted(set(ranks.all_gather(f"Vitrail {__version__} with torch {torch.__version__}")))
    if len(versions) > 1:
        error = ConfigError(f"the ranks have different versions: {', '.join(versions)}; install the same everywhere")
        error.everywhere = True
        raise error
    images = len(request.splits.train)
    plans = ranks.all_gather((request.plan.recipe.fingerprint(), images, _data_digest(request)))
    if len(set(plans)) > 1:
        counts = sorted({images for _, images, _ in plans})
        seen = f"{counts[0]:,} and {counts[-1]:,} images" if len(counts) > 1 else "different names or settings"
        error = ConfigError(f"the ranks do not see the same data: {seen}; give all of them the same files")
        error.everywhere = True
        raise error


def _data_digest(request: _Request) -> str:
    """Return a digest of the split, the order of the training labels and, of data in memory, its fingerprint."""
    digest = hashlib.blake2b(json.dumps(request.splits.record, sort_keys=True).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(label_rows(request.splits.train)).data)
    if recorded_kind(request.origin.data) is not None:  # a path may differ between machines
        digest.update(request.origin.data.encode())
    return digest.hexdigest()


def _job(request: _Request, ranks: Ranks, workers: int | None) -> Job:
    """Decide what the run computes on, and with `batch = "auto"` the batch size that fits there."""
    with ranks.together():
        context = run_context(request.plan, request.splits, ranks, workers)
    images, limit = len(request.splits.train), memory_limit(context.device)
    job = shard_if_needed(Job(request.plan, context), limit)
    with ranks.together():
        job = place_images(job, request.splits, limit)
    return fit_batch_to_memory(job, request.folder, images, limit)


def _splits_to_read(splits: Splits, evaluate_on: Literal["test", "val"], job: Job) -> Splits:
    """Return the splits without those that are not to be touched; cache the training images if the recipe says so."""
    if evaluate_on != "test":
        splits = splits._replace(test=None)
    side = job.plan.recipe.data.cache
    if side is None:
        return splits
    size = CacheSize(side, job.plan.preprocess.channels)
    return splits._replace(train=cached(splits.train, size, workers=job.context.workers))


# ── the run folder and the console ──


@contextmanager
def _opened(request: _Request, job: Job, quiet: bool, printed: set[str] | None) -> Iterator[RunConsole | SilentConsole]:
    """Lock and prepare the run folder and open its console, on the main process only."""
    folder, ranks = request.folder, job.context.ranks
    with ExitStack() as stack:
        console: RunConsole | SilentConsole = SilentConsole()
        with ranks.together():
            if ranks.is_main:
                stack.enter_context(locked(folder))
                prepared = prepare_folder(folder, job.plan, request.splits, request.origin)
                console = RunConsole(
                    folder,
                    shown=shown_metrics(job.plan),
                    quiet=quiet,
                    compiled=job.plan.recipe.compile is True,
                    printed=printed,
                )
                stack.enter_context(console)
                _introduce(console, request, job, prepared)
        yield console


def _introduce(console: RunConsole, request: _Request, job: Job, prepared: PreparedFolder) -> None:
    """Print the plan of the run."""
    plan = job.plan
    if prepared.check is not None:
        console.data_check(prepared.check)
        console.defaults(plan.defaults)
        for text in request.advice:
            console.data_note(text, loud=True)
        busy = busy_cpu_note(job.device)
        if busy is not None:
            console.data_note(busy, topic="busy CPU")
    steps = "one step" if plan.steps == 1 else f"{plan.steps:,} steps"
    console.note(f"run folder {request.folder}: {steps}, {_training_images(request)}")
    console.note(str(job.context.execution))
    if job.context.placement:
        console.note(job.context.placement)
    job.context.decoder.announce(console.note)
    if plan.teacher is not None:
        purpose: Purpose = "evaluate" if plan.recipe.method is None else "features"
        console.note(f"teacher {plan.teacher.name}: {plan.teacher.execution(job.device, job.precision, purpose)}")
    for text in prepared.moved:
        console.note(text)


def _training_images(request: _Request) -> str:
    """Say how many images are trained on, and of how many if they are a subset."""
    images, subset = len(request.splits.train), request.plan.recipe.data.subset
    if subset is None:
        return plural(images, "training image")
    return f"{images:,} of {sum(request.splits.record['subset']['drawn_from'].values()):,} training images ({subset})"


def _timed(folder: Path, job: Job) -> AbstractContextManager[None]:
    """Record the hardware and duration of this session, on the main process only."""
    if not job.context.ranks.is_main:
        return nullcontext()
    return timed_session(folder, job.device, job.processes, job.precision)


def _summary(result: RunResult, splits: Splits, *, pretraining: bool) -> str:
    split = "test" if splits.test is not None else "validation" if splits.val is not None else "training"
    selected = splits.test is None and not pretraining
    chosen_by = f"; evaluated on the {split} split" + ("; selected on these images" if selected else "")
    bad, waiting_fraction = result.bad_files, result.waiting_fraction
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    skipped = f"; unreadable and skipped in training: {', '.join(bad[:3])}{more}" if bad else ""
    waiting = "" if waiting_fraction is None else f"; waiting for data {waiting_fraction:.0%}"
    return f"{result.metrics.summary}{chosen_by}{skipped}{waiting}"


def _print_result(console: RunConsole | SilentConsole, folder: Path, metrics: Metrics, summary: str) -> None:
    console.note(f"best model: {folder / 'best'}")
    for warning in metrics.warnings:
        console.warning(warning)
    console.result(summary)
