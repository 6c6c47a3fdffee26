"""`train`: a folder of pictures in, a measured classifier out."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.data.batches import default_workers
from vitrail.data.cache import CacheSize, cached
from vitrail.data.checking.check import quick_check
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.splits import Parts
from vitrail.errors import ConfigError
from vitrail.evaluation import Evaluation
from vitrail.runtime import Precision, choose_device
from vitrail.training.choices import Choice, Plan, choose, look_at
from vitrail.training.folder import CHECK, SPLIT, claimed, default_folder, keep_recipe, write_json
from vitrail.training.loop import Where, train_run
from vitrail.training.recipe import Recipe, read_recipe
from vitrail.training.watch import Screen


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    bundle: Bundle
    metrics: Evaluation
    choices: list[Choice]
    verdict: str
    """How good it is, in one sentence."""


def train(
    data: str | Path = "digits",
    *,
    recipe: str | Path | Recipe | None = None,
    changes: Sequence[str] = (),
    start: str | Path | Bundle | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
) -> Run:
    """Train a classifier on pictures, or go on with a run that was stopped: the same call finds the same folder.

    `recipe` is the name of one that comes with the package, a TOML file, or a value; `changes` are such as
    "optimizer.lr=3e-4". `start` is a model to begin with.
    """
    first = _recipe(recipe, changes, start)
    chosen = choose_device(device)
    bundle = start if isinstance(start, Bundle) or start is None else load(start)
    parts = open_data(data, seed=first.seed, val=first.data.val, test=first.data.test)
    plan = choose(first, look_at(parts.train, chosen.type), bundle)
    place = Path(folder) if folder is not None else default_folder(str(data), plan.recipe, _name(start))
    with claimed(place), Screen(place, quiet=quiet) as screen:
        keep_recipe(place, plan.recipe)
        _introduce(screen, place, plan, parts)
        where = Where(chosen, _precision(plan.recipe, chosen), _workers(workers, chosen))
        best, measured, bad = train_run(plan, _cached(parts, plan, where), bundle, place, where, screen)
        verdict = _verdict(measured, parts, bad, screen.waited_share)
        screen.note(verdict)
    return Run(place, best, measured, plan.choices, verdict)


def _recipe(recipe: str | Path | Recipe | None, changes: Sequence[str], start: object) -> Recipe:
    if isinstance(recipe, Recipe):
        if changes:
            raise ConfigError("changes go with a recipe's name or file; change a Recipe with replace()")
        return recipe
    return read_recipe(recipe or ("finetune" if start is not None else "scratch-small"), changes)


def _name(start: str | Path | Bundle | None) -> str | None:
    return None if start is None else str(start.origin or "bundle") if isinstance(start, Bundle) else str(start)


def _introduce(screen: Screen, place: Path, plan: Plan, parts: Parts) -> None:
    """Say what will be done, and keep what is known of the data."""
    if not (place / SPLIT).exists():
        write_json(place / SPLIT, parts.split)
        report = quick_check(parts, size=plan.model.image_size[0])
        write_json(place / CHECK, report.as_dict())
        screen.note(report.verdict)
        for choice in plan.choices:
            screen.note(f"{choice.field} = {_shown(choice.value)}: {choice.reason}")
    screen.note(f"the run is in {place}: {plan.steps:,} steps, {len(parts.train):,} pictures to train on")


def _shown(value: Any) -> str:
    return "×".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _cached(parts: Parts, plan: Plan, where: Where) -> Parts:
    side = plan.recipe.data.cache
    if side is None:
        return parts
    size = CacheSize(side, plan.preprocess.channels)
    return parts._replace(train=cached(parts.train, size, workers=where.workers))


def _precision(recipe: Recipe, device: torch.device) -> Precision:
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def _workers(asked: int | None, device: torch.device) -> int:
    """On a CPU the model needs the cores itself."""
    if asked is not None:
        return asked
    return default_workers() if device.type != "cpu" else max(1, (os.cpu_count() or 1) // 4)


def _verdict(measured: Evaluation, parts: Parts, bad: list[str], waited: float) -> str:
    chosen_by = "" if parts.test is not None else "; selected on these pictures"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    left_out = f"; left out of training: {', '.join(bad[:3])}{more}" if bad else ""
    return f"{measured.verdict}{chosen_by}{left_out}; waiting for data {waited:.0%}"
