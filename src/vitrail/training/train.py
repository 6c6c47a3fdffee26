"""`train`: a folder of images in, a measured classifier out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import default_workers
from vitrail.data.cache import CacheSize, cached
from vitrail.data.checking.check import quick_check
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.source import place_of
from vitrail.data.sources.splits import Splits
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import Evaluation
from vitrail.io import read_json
from vitrail.runtime import Precision, choose_device, faster_in_bf16, process_group, repeatable
from vitrail.training.advice import before_training
from vitrail.training.auto_batch import fit_batch_to_memory
from vitrail.training.console import RunConsole, SilentConsole
from vitrail.training.defaults import ResolvedDefault, TrainingPlan, describe_data, resolve_defaults
from vitrail.training.distributed import Ranks, RunContext
from vitrail.training.finetune_init import opened_pretrained
from vitrail.training.loop import train_run
from vitrail.training.memory import Job, resident_images
from vitrail.training.memory_limits import memory_limit
from vitrail.training.recipe import Recipe, default_recipe, read_recipe
from vitrail.training.run_folder import (
    CHECK,
    SPLIT,
    Origin,
    check_apart,
    claimed,
    default_folder,
    keep_origin,
    keep_recipe,
    origin_of,
    read_in_run,
    write_json,
)
from vitrail.training.samples import keep_samples
from vitrail.training.sessions import timed_session
from vitrail.training.stamps import check_stamps


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    bundle: Bundle
    metrics: Evaluation
    defaults: list[ResolvedDefault]
    summary: str
    """How good it is, in one sentence."""
    report: Path | None = None
    """The page about it, if one was made."""


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
    said: set[str] | None = None,
) -> Run:
    """Train a classifier on images, or go on with a run that was stopped: the same call finds the same folder.

    `recipe` is the name of one that comes with the package, a TOML file, or a value; `changes` are such as
    "optimizer.lr=3e-4". `start` is a model to begin with; `overrides` and `keys` say what its file does not tell, as
    for `load`. `evaluate_on="val"` leaves the test split alone while
    settings are still being chosen; the same call without it gives the result later. `said` holds what earlier runs
    have shown of the data, which is not shown again; this run adds to it.
    """
    data, chosen = place_of(data), choose_device(device)
    with process_group(chosen) as processes, Ranks(processes, chosen).noticing_losses() as ranks:
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
            check_apart(place, origin)
        _check_alike(ranks, plan, splits)
        context = RunContext(chosen, _precision(plan.recipe, chosen), _workers(workers, ranks), ranks)
        job = Job(plan, chosen, context.precision, processes.size, context.workers, resident_images(plan, splits))
        plan = fit_batch_to_memory(job, place, len(splits.train), memory_limit(chosen))
        opened = _opened(ranks, place, plan, splits, origin, advice, quiet=quiet, said=said)
        with opened as screen, repeatable(plan.recipe.deterministic):
            if bundle is not None:
                bundle.announce()
            with ranks.together(), ranks.main_first():
                shown = _cached(splits if evaluate_on == "test" else splits._replace(test=None), plan, context)
            with timed_session(place, chosen, processes.size, context.precision) if ranks.is_main else nullcontext():
                best, measured, bad = train_run(
                    plan, shown, bundle, place, context, screen, final=evaluate_on == "test"
                )
            summary = _summary(measured, shown, bad, screen.waited_share)
            screen.note(f"the best model is {place / 'best'}")
            for warning in measured.warnings:
                screen.warning(warning)
            screen.result(summary)
    return Run(place, best, measured, plan.defaults, summary)


def _check_alike(ranks: Ranks, plan: TrainingPlan, splits: Splits) -> None:
    """All processes must have worked out the same plan, or they would wait for each other for ever."""
    words = json.dumps(splits.record, sort_keys=True)
    found = ranks.gathered((plan.recipe.fingerprint(), len(splits.train), words))
    if len(set(found)) > 1:
        counts = sorted({images for _, images, _ in found})
        seen = f"{counts[0]:,} and {counts[-1]:,} images" if len(counts) > 1 else "other names or settings"
        error = ConfigError(f"the processes do not see the same data: {seen}; give all of them the same files")
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
    said: set[str] | None,
) -> Iterator[RunConsole | SilentConsole]:
    """Keep the run folder for this run, and show it; only the main process does either."""
    with ExitStack() as stack:
        screen: RunConsole | SilentConsole = SilentConsole()
        with ranks.together():
            if ranks.is_main:
                stack.enter_context(claimed(place))
                keep_recipe(place, plan.recipe)
                moved = keep_origin(place, origin)
                screen = stack.enter_context(RunConsole(place, quiet=quiet, compiled=plan.recipe.compile, said=said))
                _introduce(screen, place, plan, splits, advice, ranks.device)
                for text in (moved, check_stamps(place, splits)):
                    if text is not None:
                        screen.note(text)
        yield screen


def _recipe(recipe: str | Path | Recipe | None, changes: Sequence[str], pretrained: object) -> Recipe:
    if isinstance(recipe, Recipe):
        if changes:
            raise ConfigError("changes go with a recipe's name or file; change a Recipe with replace()")
        return recipe
    return read_recipe(recipe or default_recipe(pretrained), changes)


def _introduce(
    screen: RunConsole, place: Path, plan: TrainingPlan, splits: Splits, advice: Sequence[str], device: torch.device
) -> None:
    """Say what will be done, and keep what is known of the data."""
    if not (place / SPLIT).exists():
        _say_check(screen, place, splits, plan.model.image_size[0])
        write_json(place / SPLIT, splits.record)
        screen.defaults(plan.defaults)
        for text in advice:
            screen.of_data(text, loud=True)
    elif read_in_run(place / SPLIT, read_json) != json.loads(json.dumps(splits.record)):
        raise DataError(
            f"the data is no longer what the run in {place} began with: images were added, removed or renamed; "
            f"choose another --run, or bring them back"
        )
    keep_samples(place, splits.train)
    steps = "one step" if plan.steps == 1 else f"{plan.steps:,} steps"
    precision = _precision(plan.recipe, device)
    screen.note(f"the run is in {place}: {steps} in {precision}, {len(splits.train):,} images to train on")


def _say_check(screen: RunConsole, place: Path, splits: Splits, size: int) -> None:
    """Check the data in bounded time, keep what was found, and say what would make a result wrong."""
    report = quick_check(splits, size=size)
    write_json(place / CHECK, report.as_dict())
    if report.contents is not None:
        report.contents.save(place)
    screen.of_data(report.summary)
    for finding in report.findings:
        if finding.grave:
            some = ", ".join(finding.details[:2]) + (", …" if len(finding.details) > 2 else "")
            details = f" ({some})" if some else ""
            screen.of_data(f"{finding.text}{details}; {finding.advice}", loud=True)


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


def _workers(asked: int | None, ranks: Ranks) -> int:
    """On a CPU the model needs the cores itself."""
    if asked is not None:
        return asked
    return default_workers() if ranks.device.type != "cpu" else max(1, default_workers() // 4)


def _summary(measured: Evaluation, splits: Splits, bad: list[str], waited: float | None) -> str:
    split = "test" if splits.test is not None else "validation" if splits.val is not None else "training"
    chosen_by = f"; evaluated on the {split} split" + ("" if splits.test is not None else "; selected on these images")
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    left_out = f"; left out of training: {', '.join(bad[:3])}{more}" if bad else ""
    waiting = "" if waited is None else f"; waiting for data {waited:.0%}"
    return f"{measured.summary}{chosen_by}{left_out}{waiting}"
