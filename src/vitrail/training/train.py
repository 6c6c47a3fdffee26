"""`train`: a folder of images in, an evaluated classifier out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import BadFiles, default_workers
from vitrail.data.cache import CacheSize, cached
from vitrail.data.checking.check import quick_check
from vitrail.data.checking.findings import Unreadable, them
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.source import place_of
from vitrail.data.sources.splits import Splits
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import Evaluation
from vitrail.io import read_json
from vitrail.runtime import Precision, busy_cpu_note, choose_device, faster_in_bf16, process_group, repeatable
from vitrail.training.auto_batch import fit_batch_to_memory, memory_limit
from vitrail.training.console import RunConsole, SilentConsole
from vitrail.training.defaults import ResolvedDefault, TrainingPlan, before_training, describe_data, resolve_defaults
from vitrail.training.distributed import Ranks, RunContext
from vitrail.training.finetune_init import opened_pretrained
from vitrail.training.loop import train_run
from vitrail.training.memory import Job, resident_images
from vitrail.training.recipe import Recipe, default_recipe, read_recipe
from vitrail.training.run_folder import (
    CHECK,
    SPLIT,
    Origin,
    check_outside_data,
    default_folder,
    keep_origin,
    keep_recipe,
    locked,
    origin_of,
    read_in_run,
    write_json,
)
from vitrail.training.samples import keep_samples
from vitrail.training.sessions import timed_session
from vitrail.training.stamps import check_stamps
from vitrail.training.step import plan_step


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    bundle: Bundle
    metrics: Evaluation
    defaults: list[ResolvedDefault]
    summary: str
    """The result in one sentence."""
    report: Path | None = None
    """The HTML report, if one was written."""


def train(
    data: str | Path = "digits",
    *,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    pretrained: str | Path | Bundle | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    evaluate_on: Literal["test", "val"] = "test",
    printed: set[str] | None = None,
) -> Run:
    """Train a classifier on images, or resume an interrupted run: the same call finds the same folder.

    `recipe` is the name of a bundled recipe, a TOML file or a `Recipe`; `changes` are strings such as
    "optimizer.lr=3e-4". `pretrained` is a model to fine-tune; `overrides` and `keys` supply what its file does not say,
    as for `load`. `evaluate_on="val"` leaves the test split untouched while settings are still being chosen; the same
    call without it gives the test result later. `printed` holds messages about the data that earlier runs have printed
    and this one need not repeat; this run adds its own.
    """
    data, chosen = place_of(data), choose_device(device)
    with process_group(chosen) as processes, Ranks(processes, chosen).reporting_lost_ranks() as ranks:
        with ranks.together(), ranks.main_first():
            first = _recipe(recipe, changes, pretrained)
            first.check_pretrained(pretrained)
            bundle = opened_pretrained(pretrained, overrides, keys)
            splits = open_data(data, seed=first.seed, val=first.data.val, test=first.data.test)
            facts = describe_data(splits.train, chosen.type)
            plan = resolve_defaults(first, facts, bundle)
            advice = before_training(facts, fresh=bundle is None)
            origin = origin_of(data, bundle)
            place = Path(folder) if folder is not None else default_folder(origin, [plan.recipe])
            check_outside_data(place, origin)
        _check_ranks_agree(ranks, plan, splits)
        context = RunContext(chosen, _precision(plan.recipe, chosen), _workers(workers, ranks), ranks)
        job = Job(plan, chosen, context.precision, processes.size, context.workers, resident_images(plan, splits))
        plan = fit_batch_to_memory(job, place, len(splits.train), memory_limit(chosen))
        opened = _opened(ranks, place, plan, splits, origin, advice, quiet=quiet, printed=printed)
        with opened as console, repeatable(plan.recipe.deterministic):
            if bundle is not None:
                bundle.announce()
            with ranks.together(), ranks.main_first():
                used = _cached(splits if evaluate_on == "test" else splits._replace(test=None), plan, context)
            with timed_session(place, chosen, processes.size, context.precision) if ranks.is_main else nullcontext():
                best, evaluation, bad = train_run(
                    plan, used, bundle, place, context, console, final=evaluate_on == "test"
                )
            summary = _summary(evaluation, used, bad, console.waiting_fraction)
            console.note(f"best model: {place / 'best'}")
            for warning in evaluation.warnings:
                console.warning(warning)
            console.result(summary)
    return Run(place, best, evaluation, plan.defaults, summary)


def _check_ranks_agree(ranks: Ranks, plan: TrainingPlan, splits: Splits) -> None:
    """Raise if the ranks have resolved different plans; they would deadlock."""
    words = json.dumps(splits.record, sort_keys=True)
    plans = ranks.all_gather((plan.recipe.fingerprint(), len(splits.train), words))
    if len(set(plans)) > 1:
        counts = sorted({images for _, images, _ in plans})
        seen = f"{counts[0]:,} and {counts[-1]:,} images" if len(counts) > 1 else "different names or settings"
        error = ConfigError(f"the ranks do not see the same data: {seen}; give all of them the same files")
        error.everywhere = True
        raise error


@contextmanager
def _opened(
    ranks: Ranks,
    place: Path,
    plan: TrainingPlan,
    splits: Splits,
    origin: Origin,
    advice: Sequence[str],
    *,
    quiet: bool,
    printed: set[str] | None,
) -> Iterator[RunConsole | SilentConsole]:
    """Lock the run folder and open its console, on the main process only."""
    with ExitStack() as stack:
        console: RunConsole | SilentConsole = SilentConsole()
        with ranks.together():
            if ranks.is_main:
                stack.enter_context(locked(place))
                keep_recipe(place, plan.recipe)
                moved = keep_origin(place, origin)
                console = stack.enter_context(
                    RunConsole(place, quiet=quiet, compiled=plan.recipe.compile, printed=printed)
                )
                _introduce(console, place, plan, splits, advice, ranks)
                for text in (moved, check_stamps(place, splits)):
                    if text is not None:
                        console.note(text)
        yield console


def _recipe(recipe: str | Path | Recipe | None, changes: Sequence[str], pretrained: object) -> Recipe:
    if isinstance(recipe, Recipe):
        if changes:
            raise ConfigError("changes apply to a recipe's name or file; change a Recipe with replace()")
        return recipe
    return read_recipe(recipe or default_recipe(pretrained), changes)


def _introduce(
    console: RunConsole, place: Path, plan: TrainingPlan, splits: Splits, advice: Sequence[str], ranks: Ranks
) -> None:
    """Print the plan, and write split.json, check.json and the samples."""
    device = ranks.device
    if not (place / SPLIT).exists():
        _check_data(console, place, splits, plan.model.image_size[0], plan.recipe.data.bad_files)
        write_json(place / SPLIT, splits.record)
        console.defaults(plan.defaults)
        for text in advice:
            console.data_note(text, loud=True)
        busy = busy_cpu_note(device)
        if busy is not None:
            console.data_note(busy, topic="busy CPU")
    elif read_in_run(place / SPLIT, read_json) != json.loads(json.dumps(splits.record)):
        raise DataError(
            f"the data has changed since the run in {place} started: images were added, removed or renamed; choose "
            f"another --run, or restore them"
        )
    keep_samples(place, splits.train)
    steps = "one step" if plan.steps == 1 else f"{plan.steps:,} steps"
    precision = _precision(plan.recipe, device)
    console.note(f"run folder {place}: {steps}, {len(splits.train):,} training images")
    console.note(str(plan_step(plan.model, plan.recipe, precision, device, alone=ranks.alone)))


def _check_data(console: RunConsole, place: Path, splits: Splits, size: int, bad_files: BadFiles) -> None:
    """Run the quick data check, save its findings, and print the serious ones; an unreadable image may stop the run."""
    report = quick_check(splits, size=size)
    write_json(place / CHECK, report.as_dict())
    if bad_files == "refuse" and report.unreadable:
        raise _refused(report.unreadable)
    if report.contents is not None:
        report.contents.save(place)
    console.data_note(report.summary)
    for finding in report.findings:
        if finding.serious:
            some = ", ".join(finding.details[:2]) + (", …" if len(finding.details) > 2 else "")
            details = f" ({some})" if some else ""
            console.data_note(f"{finding.text}{details}; {finding.advice}", loud=True)


def _refused(unreadable: Sequence[Unreadable]) -> DataError:
    """Return the error for unreadable images with `bad_files = "refuse"`."""
    first, count = unreadable[0], len(unreadable)
    more = "" if count == 1 else f", the first of {count:,} such images"
    return DataError(
        f"{first.image.name} cannot be read: {first.reason}{more}; fix or remove {them(count)}, or train with --set "
        f"data.bad_files=skip"
    )


def _cached(splits: Splits, plan: TrainingPlan, context: RunContext) -> Splits:
    side = plan.recipe.data.cache
    if side is None:
        return splits
    size = CacheSize(side, plan.preprocess.channels)
    return splits._replace(train=cached(splits.train, size, workers=context.workers))


def _precision(recipe: Recipe, device: torch.device) -> Precision:
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if faster_in_bf16(device) else "float32"


def _workers(requested: int | None, ranks: Ranks) -> int:
    """Use few workers on a CPU, where the model needs the cores."""
    if requested is not None:
        return requested
    return default_workers() if ranks.device.type != "cpu" else max(1, default_workers() // 4)


def _summary(evaluation: Evaluation, splits: Splits, bad: list[str], waiting_fraction: float | None) -> str:
    split = "test" if splits.test is not None else "validation" if splits.val is not None else "training"
    chosen_by = f"; evaluated on the {split} split" + ("" if splits.test is not None else "; selected on these images")
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    skipped = f"; unreadable and skipped in training: {', '.join(bad[:3])}{more}" if bad else ""
    waiting = "" if waiting_fraction is None else f"; waiting for data {waiting_fraction:.0%}"
    return f"{evaluation.summary}{chosen_by}{skipped}{waiting}"
