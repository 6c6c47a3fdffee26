"""`Recipe`: everything that decides what a training run computes, as one typed value that is read from TOML.

A field that is None is chosen for the data and the model when the run starts (`choices.py`), shown with the reason, and
written into the run's own recipe, which has no None left among them.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import BadFiles
from vitrail.errors import ConfigError, suggest
from vitrail.schema import Count, Frozen, Positive
from vitrail.schema import Sequence as AsTuple
from vitrail.training.averaging import Averaging
from vitrail.training.objectives import Objective
from vitrail.training.optimizers import Optimizer
from vitrail.training.schedules import Schedule

Share = Annotated[float, Field(ge=0, lt=1)]


class DataPart(Frozen):
    """What is trained on, and how it is read."""

    val: Share = 0.1
    """Share of every class for the val part, where the data names none."""
    test: Share = 0.2
    """Share of every class for the test part, where the data names none."""
    balance: bool = False
    """Show every class equally often."""
    repeats: Positive = 1
    """How often a batch shows the same picture, each time cut anew."""
    cache: Positive | None = None
    """Keep pictures decoded, with so many pixels along the shorter side. None: read the files."""
    bad_files: BadFiles = "skip"


class Recipe(Frozen):
    """A training run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """How often every picture is shown."""
    batch: Positive | None = None
    """Pictures in a step, over all processes."""
    micro_batches: Positive = 1
    """Into how many parts a process cuts its share of a batch, to save memory."""
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False
    """On CUDA: algorithms that give the same bits every time, at some cost of speed."""
    evaluations: Positive = 20
    """How often, spread evenly over the run, the val part is measured."""
    patience: Count = 0
    """Stop after so many measurements without a better one; 0 never stops early."""
    save_minutes: Annotated[float, Field(ge=0, le=1e5)] = 5.0
    """Minutes between two saved states; every measurement of the val part saves one, too."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Fields of `ViTConfig`; `name` starts from a named model ("S/16")."""
    freeze: Annotated[tuple[str, ...], AsTuple] = ()
    """Patterns of parameters that stay as they are: "blocks.*"."""
    data: DataPart = DataPart()
    augmentation: Augmentation | None = None
    mixing: Mixing | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    averaging: Averaging = Averaging()
    objective: Objective = Objective()

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.batch is not None and self.batch % (self.data.repeats * self.micro_batches):
            raise ConfigError(
                f"a batch of {self.batch} is no multiple of data.repeats {self.data.repeats} × micro_batches "
                f"{self.micro_batches}; change one of them"
            )
        return self

    def fingerprint(self) -> str:
        """Return a short name for exactly these settings."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=3).hexdigest()


def preset_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its name or from a file, with changes such as "optimizer.lr=3e-4"."""
    table = _table(name)
    for change in changes:
        _set(table, change)
    return Recipe.from_json(json.dumps(table))


def _presets() -> Any:
    return files("vitrail.training").joinpath("recipes")


def _table(name: str | Path) -> dict[str, Any]:
    place = _presets().joinpath(f"{name}.toml") if str(name) in preset_names() else Path(name)
    try:
        return tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no recipe is called {str(name)!r}{suggest(str(name), preset_names())}; there are "
            f"{', '.join(preset_names())}, or give a .toml file"
        ) from None
    except OSError as error:
        raise ConfigError(f"the recipe {name} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {name} is not TOML ({error})") from None


def _set(table: dict[str, Any], change: str) -> None:
    """Change one value of a table, by its dotted name; a value is read as TOML, or taken as a word."""
    path, equals, text = change.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"{change!r} changes nothing; write optimizer.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text.strip() == "none" else text.strip()
    *parents, leaf = (part.strip() for part in path.split("."))
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path.strip()} cannot be set, because {parent} is {inner!r}")
        table = inner
    table[leaf] = value


def write_toml(recipe: Recipe) -> str:
    """Return a recipe as TOML, with every value written out; what is None is left out."""
    lines: list[str] = []
    _write_table(json.loads(recipe.to_json()), (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {name: value for name, value in table.items() if value is not None and not isinstance(value, dict)}
    if path and values:
        lines += ["", f"[{'.'.join(path)}]"]
    lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
    for name, value in table.items():
        if isinstance(value, dict):
            _write_table(value, (*path, name), lines)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # numbers, words and truth values look the same in both


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_inline(v)}" for name, v in value.items() if v is not None) + " }"
    return _toml(value)
