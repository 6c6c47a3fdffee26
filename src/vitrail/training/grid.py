"""The grid of a sweep: parse values, build every combination, validate each."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Training
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.splits import Splits
from vitrail.data.stream import Stream
from vitrail.errors import ConfigError
from vitrail.models.lora import add_adapters
from vitrail.models.vit import ViT
from vitrail.training.context import open_splits
from vitrail.training.defaults import resolve_defaults, with_task
from vitrail.training.optimizers import freeze, parameter_groups
from vitrail.training.plan import DataFacts, TrainingPlan, describe_data
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import read_value
from vitrail.training.teacher import Teacher

OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"
FIXED = ("data.val", "data.test", "data.labels", "task")
"""Settings that decide which images are held out; runs that differ in them cannot be compared. `data.fraction` and
`data.per_class` do not: they reduce the training split only."""
LONGEST_NAME = 60


@dataclass(frozen=True)
class Trial:
    """A combination of settings to train."""

    values: dict[str, Any]
    recipe: Recipe
    plan: TrainingPlan

    @property
    def title(self) -> str:
        """The values as on the command line."""
        return ", ".join(f"{key}={format_value(value)}" for key, value in self.values.items())

    @property
    def folder_name(self) -> str:
        """A folder name made of the values, with the recipe's fingerprint if they are too long or not allowed."""
        leaves = [key.rpartition(".")[2] for key in self.values]
        short = leaves if len(set(leaves)) == len(leaves) else list(self.values)
        words = ",".join(f"{key}={format_value(v)}" for key, v in zip(short, self.values.values(), strict=True))
        name = re.sub(r"[^\w.+=,-]+", "-", words)
        if name == words and len(name) <= LONGEST_NAME:
            return name
        return f"{name[:LONGEST_NAME].strip('-')}-{self.plan.recipe.fingerprint()}"


def read_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse "optimizer.lr=.003,.01"; commas inside brackets or quotes belong to a value."""
    parsed: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        name, pieces = key.strip(), _pieces(values)
        if not name or not all(pieces):
            raise ConfigError(f"{text!r} has no values to try; write optimizer.lr=0.003,0.01,0.03")
        if name in parsed:
            raise ConfigError(f"{name} is swept twice; give all its values at once: {name}=…,…")
        parsed[name] = [read_value(piece) for piece in pieces]
    return parsed


def _pieces(text: str) -> list[str]:
    """Split a text at commas outside brackets and quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        else:
            depth += (letter in OPENING) - (letter in CLOSING)
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth or quote:
        raise ConfigError(f"unbalanced bracket or quote in {text!r}; write [0.2,1.0],[0.5,1.0]")
    return [piece.strip() for piece in pieces]


def combine(over: Mapping[str, Sequence[Any]], changes: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of the values, the last key varying fastest; raise if runs could not be compared."""
    if not over:
        raise ConfigError("a sweep needs values to try, such as optimizer.lr=0.003,0.01,0.03")
    for key in over:
        check_comparable(key)
        if change := next((text for text in changes if overlap(key, text.partition("=")[0].strip())), None):
            raise ConfigError(f"{key} is swept, but {change} sets it; leave one of them out")
    for one, other in combinations(over, 2):
        if overlap(one, other):
            raise ConfigError(f"{one} and {other} overlap: one is inside the other; leave one of them out")
    return [dict(zip(over, values, strict=True)) for values in product(*(_plain(key, over[key]) for key in over))]


def check_comparable(key: str) -> None:
    """Raise if runs that differ in a setting could not be compared."""
    if fixed := next((name for name in FIXED if overlap(key, name)), None):
        raise ConfigError(f"a sweep over {key} would evaluate its runs on different images; use --set {fixed}=…")
    if overlap(key, "criterion"):
        raise ConfigError("a sweep compares its runs by one criterion; set it with --set criterion=…")


def _plain(key: str, values: Sequence[Any]) -> list[Any]:
    """Return values as a recipe file can hold them: tuples become lists."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"the values of {key} are {values!r}; pass a list")
    try:
        return [json.loads(json.dumps(value)) for value in values]
    except (TypeError, ValueError):
        raise ConfigError(
            f"the values of {key} are {values!r}, which a recipe cannot hold; use plain numbers"
        ) from None


def overlap(one: str, other: str) -> bool:
    """Whether two dotted names are equal, or one is inside the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def format_value(value: Any) -> str:
    """Format a value as on the command line, where 1000 and 1000.0 are the same."""
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    integral = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return json.dumps(int(value) if integral else value, ensure_ascii=False)


@dataclass(frozen=True)
class TrialPlanner:
    """Resolves and validates combinations of settings before the first of them is trained."""

    data: str | Path | InMemory
    bundle: Bundle | None
    device: str
    teacher: Teacher | None = None
    opened: dict[tuple[int, float, int | None], tuple[Splits, DataFacts]] = field(default_factory=dict)
    """The data by seed and subset: the seed draws the splits if the data does not define them."""

    def splits(self, recipe: Recipe) -> Splits:
        """Return the splits of a recipe; raise if the data has no validation split."""
        return self._opened(recipe)[0]

    def _opened(self, recipe: Recipe) -> tuple[Splits, DataFacts]:
        images = recipe.seed, recipe.data.fraction, recipe.data.per_class
        if images not in self.opened:
            splits = open_splits(self.data, recipe)
            if splits.val is None:
                raise ConfigError("a sweep selects on the validation split, but the data has none; set data.val=0.1")
            self.opened[images] = splits, describe_data(splits.train, self.device)
        return self.opened[images]

    def trial(self, values: dict[str, Any], recipe: Recipe) -> Trial:
        """Resolve and validate a recipe with these values."""
        splits, facts = self._opened(recipe)
        recipe = with_task(recipe, facts, [])
        plan = resolve_defaults(recipe, facts, self.bundle, self.teacher)
        _check(plan, splits)
        return Trial(values, recipe, plan)


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """Drop trials with the same resolved recipe as an earlier one."""
    by_recipe: dict[str, Trial] = {}
    for trial in trials:
        by_recipe.setdefault(trial.plan.recipe.to_json(), trial)
    return list(by_recipe.values())


def _check(plan: TrainingPlan, splits: Splits) -> None:
    """Raise the errors of a run's start now; for the last combination they might otherwise come hours later."""
    recipe = plan.recipe
    stream = Stream(len(splits.train), plan.batch, recipe.seed, recipe.data.repeats)
    Training(splits.train, stream, plan.preprocess, plan.augmentation, plan.mixing)
    with torch.device("meta"):
        model = ViT(plan.model)
    add_adapters(model, recipe.lora, seed=0)
    freeze(model, recipe.frozen)
    parameter_groups(model, recipe.optimizer)
