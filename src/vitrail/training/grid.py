"""What a sweep tries: read from the command line, put together in every combination, and checked."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Training
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.splits import Splits
from vitrail.data.stream import Stream
from vitrail.errors import ConfigError
from vitrail.models.vit import ViT
from vitrail.training.defaults import DataFacts, TrainingPlan, describe_data, resolve_defaults
from vitrail.training.optimizers import freeze, parameter_groups
from vitrail.training.recipe import Recipe, read_value

OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"
FIXED = ("data.val", "data.test")
"""What decides which images are measured, so that runs which differ in it cannot be compared."""
LONGEST_NAME = 60


@dataclass(frozen=True)
class Trial:
    """A candidate before it is trained."""

    values: dict[str, Any]
    recipe: Recipe
    plan: TrainingPlan

    @property
    def title(self) -> str:
        """The values, as they would be given on the command line."""
        return ", ".join(f"{key}={shown(value)}" for key, value in self.values.items())

    @property
    def folder_name(self) -> str:
        """A name that says the values; where a file system would not take them, with the recipe's mark."""
        leaves = [key.rpartition(".")[2] for key in self.values]
        short = leaves if len(set(leaves)) == len(leaves) else list(self.values)
        words = ",".join(f"{key}={shown(v)}" for key, v in zip(short, self.values.values(), strict=True))
        name = re.sub(r"[^\w.+=,-]+", "-", words)
        if name == words and len(name) <= LONGEST_NAME:
            return name
        return f"{name[:LONGEST_NAME].strip('-')}-{self.plan.recipe.fingerprint()}"


def read_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read what is written as "optimizer.lr=.003,.01"; commas in brackets or quotes belong to a value."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        name, pieces = key.strip(), _pieces(values)
        if not name or not all(pieces):
            raise ConfigError(f"{text!r} names no values to try; write optimizer.lr=0.003,0.01,0.03")
        if name in found:
            raise ConfigError(f"{name} is swept twice; give all its values at once: {name}=…,…")
        found[name] = [read_value(piece) for piece in pieces]
    return found


def _pieces(text: str) -> list[str]:
    """Cut a text at the commas that are in no bracket and in no quotes."""
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
        raise ConfigError(f"a bracket or a quote in {text!r} has no other half; write [0.2,1.0],[0.5,1.0]")
    return [piece.strip() for piece in pieces]


def combine(over: Mapping[str, Sequence[Any]], changes: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of the values, the last key changing first; refuse what cannot be compared."""
    if not over:
        raise ConfigError("a sweep needs something to try; give it values such as optimizer.lr=0.003,0.01,0.03")
    for key in over:
        if fixed := next((name for name in FIXED if _overlap(key, name)), None):
            raise ConfigError(f"a sweep over {key} would measure its runs on different images; use --set {fixed}=…")
        if _overlap(key, "criterion"):
            raise ConfigError("a sweep compares its runs by one criterion; choose it with --set criterion=…")
        if change := next((text for text in changes if _overlap(key, text.partition("=")[0].strip())), None):
            raise ConfigError(f"{key} is swept, but {change} sets it; leave one of them out")
    for one, other in combinations(over, 2):
        if _overlap(one, other):
            raise ConfigError(f"{one} and {other} contradict each other, because one is a part of the other")
    return [dict(zip(over, values, strict=True)) for values in product(*(_plain(key, over[key]) for key in over))]


def _plain(key: str, values: Sequence[Any]) -> list[Any]:
    """Return values as a recipe file could hold them: a tuple is a list there."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"{key} is to be tried with {values!r}; give a list of values")
    try:
        return [json.loads(json.dumps(value)) for value in values]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key} is to be tried with {values!r}, which no recipe can hold; use plain numbers"
        ) from None


def _overlap(one: str, other: str) -> bool:
    """Say whether two dotted names are the same, or one lies in the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def shown(value: Any) -> str:
    """Write a value as it would be given on the command line; 1000 and 1000.0 are the same there."""
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return json.dumps(int(value) if whole else value, ensure_ascii=False)


def plan_trials(
    recipes: Sequence[tuple[dict[str, Any], Recipe]], data: str | Path, bundle: Bundle | None, device: str
) -> list[Trial]:
    """Settle and check every candidate before the first is trained; of equal ones keep one."""
    known: dict[int, tuple[Splits, DataFacts]] = {}
    trials: dict[str, Trial] = {}
    for values, recipe in recipes:
        if recipe.seed not in known:  # the seed draws the parts, where the data names none
            splits = open_data(data, seed=recipe.seed, val=recipe.data.val, test=recipe.data.test)
            if splits.val is None:
                raise ConfigError(
                    "the data has no validation split, which a sweep chooses by; give it one with data.val=0.1"
                )
            known[recipe.seed] = splits, describe_data(splits.train, device)
        splits, facts = known[recipe.seed]
        plan = resolve_defaults(recipe, facts, bundle)
        _check(plan, splits)
        trials.setdefault(plan.recipe.to_json(), Trial(values, recipe, plan))
    return list(trials.values())


def _check(plan: TrainingPlan, splits: Splits) -> None:
    """Refuse what a run would refuse when it starts, which for the last candidate may be hours from now."""
    recipe = plan.recipe
    stream = Stream(len(splits.train), plan.batch, recipe.seed, recipe.data.repeats)
    Training(splits.train, stream, plan.preprocess, plan.augmentation, plan.mixing)
    with torch.device("meta"):
        model = ViT(plan.model)
    freeze(model, recipe.freeze)
    parameter_groups(model, recipe.optimizer)
