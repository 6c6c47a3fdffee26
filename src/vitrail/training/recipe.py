"""`Recipe`: everything that decides what a training run computes, as one typed value that is read from TOML.

A field that is None is chosen for the data and the model when the run starts (`choices.py`), shown with the reason, and
written into the run's own recipe, which has no None left among them.
"""

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import BadFiles
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest, unknown_argument
from vitrail.io import ContentError, parse_toml, read_toml
from vitrail.models.config import ViTConfig
from vitrail.schema import LIMIT, Count, Frozen, Positive
from vitrail.schema import Sequence as AsTuple
from vitrail.training.averaging import Averaging
from vitrail.training.criterion import Criterion, default_criterion
from vitrail.training.finetune_init import FinetuneInit
from vitrail.training.objectives import Objective
from vitrail.training.optimizers import Optimizer
from vitrail.training.schedules import Schedule

Share = Annotated[float, Field(ge=0, lt=1)]
_MODEL_HAS = {"size": "image_size", "channels": "channels"}
ALSO_CALLED = {
    "batch_size": "batch",
    "num_epochs": "epochs",
    "learning_rate": "optimizer.lr",
    "img_size": "model.image_size",
    "wd": "optimizer.weight_decay",
    "class_weights": "objective.class_weights",
}
"""What other libraries call some options."""
ARGUMENTS = {
    "num_workers": "vitrail calls it workers",
    "output_dir": "vitrail calls it folder",
    "run": "it is folder in Python",
    "set": "it is changes in Python, such as changes=['epochs=3']",
    "pretrained": "vitrail calls it start, such as start='timm:name.tag'",
    "model": "start takes a model that exists, and changes=['model.name=S/16'] gives a fresh one its size",
    "resume": "the same call finds the same folder and resumes",
}
"""What people call some arguments of `train`, and what they are told."""


def _as_batch(value: Any) -> Any:
    """Check the whole field at once, so that a fault is one sentence and not one for each kind it could be."""
    if hasattr(value, "__index__") and not isinstance(value, bool) and 0 < operator.index(value) <= LIMIT:
        return operator.index(value)
    if value is None or value == "auto":
        return value
    raise PydanticCustomError("batch", f"it should be a whole number from 1 to {LIMIT:,}, or 'auto'")


class DataSettings(Frozen):
    """What is trained on, and how it is read."""

    val: Share = 0.1
    """Share of every class for the validation split, where the data names none."""
    test: Share = 0.2
    """Share of every class for the test split, where the data names none."""
    balance: bool = False
    """Show every class equally often."""
    repeats: Positive = 1
    """How often a batch shows the same image, each time cut anew."""
    cache: Positive | None = None
    """Keep images decoded, with so many pixels along the shorter side. None: read the files."""
    on_device: bool = False
    """Keep all training images on the device and vary them there: for small images, where reading is the bound."""
    bad_files: BadFiles = "skip"
    """`skip` replaces an image that cannot be read by another one and records it; `refuse` stops the run."""


class Recipe(Frozen):
    """A training run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed. Shuffling, augmentation, initialisation and dropout derive from it."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """How often every image is shown."""
    steps: Positive | None = None
    """The length of the run in steps, instead of `epochs`."""
    batch: Annotated[int | Literal["auto"] | None, BeforeValidator(_as_batch)] = None
    """Images in a step, over all processes; "auto" halves the usual number until memory is enough."""
    gradient_accumulation: Positive = 1
    """Into how many parts a process cuts its share of a batch, to save memory."""
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 where the device is clearly faster with it, otherwise float32."""
    compile: bool = False
    """Use `torch.compile`; on a GPU in bf16 also the fused training path."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    deterministic: bool = False
    """On CUDA: algorithms that give the same bits every time, at some cost of speed."""
    evaluations: Positive = 20
    """How often, spread evenly over the run, the validation split is measured."""
    patience: Count = 0
    """Stop after so many measurements without a better one; 0 never stops early."""
    criterion: Criterion | None = None
    """What the best checkpoint has most of on the val split: `accuracy`, `balanced_accuracy`, `macro_f1`, or the least
    `loss`. None: balanced_accuracy where classes are balanced or weighted, else accuracy."""
    save_minutes: Annotated[float, Field(ge=0, le=1e5)] = 5.0
    """Minutes between two saved states; every measurement of the validation split saves one, too."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Fields of `ViTConfig`; `name` starts from a named model ("S/16"), `paper = true` from the ViT paper's options."""
    preprocess: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Preprocess`, such as `resize_to`; size and channels follow from the model."""
    pretrained: FinetuneInit | None = None
    """How the model of --from is fitted to the data. Where a recipe has it, such a model must be given."""
    freeze: Annotated[tuple[str, ...], AsTuple] = ()
    """Patterns of parameters that stay as they are: "blocks.*"."""
    data: DataSettings = DataSettings()
    augmentation: Augmentation | None = None
    mixing: Mixing | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    averaging: Averaging = Averaging()
    objective: Objective = Objective()

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"epochs is {self.epochs:g} and steps is {self.steps}; leave one of them out, or take it back with "
                f"epochs=none or steps=none"
            )
        for name in ("size", "channels"):
            if name in self.preprocess:
                raise ConfigError(f"preprocess.{name} follows from the model; set model.{_MODEL_HAS[name]} instead")
        if isinstance(self.batch, int) and self.batch % (self.data.repeats * self.gradient_accumulation):
            raise ConfigError(
                f"a batch of {self.batch} is no multiple of data.repeats {self.data.repeats} × gradient_accumulation "
                f"{self.gradient_accumulation}; change one of them"
            )
        return self

    def check_pretrained(self, pretrained: object) -> None:
        """Refuse a recipe that trains a model that exists where none is given."""
        if self.pretrained is not None and pretrained is None:
            raise ConfigError("this recipe trains a model that exists; say which with --from, or take another recipe")

    def settled_criterion(self) -> Criterion:
        """Return the criterion, or what follows from the class weights where none is named."""
        alike = self.data.balance or self.objective.class_weights != "none"
        return self.criterion or default_criterion(classes_count_alike=alike)

    def fingerprint(self) -> str:
        """Return a short name for exactly these settings."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=3).hexdigest()


def preset_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def read_recipe(
    name: str | Path | Recipe, changes: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe by its name or from a file, or take one; with changes such as "optimizer.lr=3e-4".

    `values` are changes that are values already: {"optimizer.lr": 3e-4}.
    """
    table = json.loads(name.to_json()) if isinstance(name, Recipe) else _table(name)
    if isinstance(changes, (str, Mapping)):
        raise ConfigError(f"changes is {changes!r}; write a list of texts: changes=['optimizer.lr=3e-4']")
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"{change!r} changes nothing; write optimizer.lr=3e-4")
        check_name(path.strip(), text)
        _set(table, path, read_value(text))
    for path, value in (values or {}).items():
        check_name(path.strip(), str(value))
        _set(table, path, value)
    return Recipe.from_json(json.dumps(table))


def check_name(path: str, value: str) -> None:
    """Refuse a name that is only the end of another one, or what others call it, and say the full name."""
    full = None if path.partition(".")[0] in Recipe.model_fields else full_name(path)
    if full is not None:
        raise ConfigError(f"a recipe has no option {path!r}; did you mean --set {full}={value.strip()}?")


def full_name(name: str) -> str | None:
    """Return the option that is called `name`, by its own name, its end, or what others call it; None without one."""
    names = option_names()
    leaf = name.rpartition(".")[2]
    if name in names or leaf in ALSO_CALLED:
        return name if name in names else ALSO_CALLED[leaf]
    return next((option for option in names if option.endswith(f".{leaf}")), None)


def unknown_setting(function: Callable[..., object], argument: str, value: object) -> ConfigError:
    """Return the error for an argument that `train` or `sweep` does not have: most are settings of the recipe."""
    hint = ""
    if argument in ARGUMENTS:
        hint = ARGUMENTS[argument]
    elif (full := full_name(argument)) is not None:
        written = str(value).lower() if isinstance(value, bool) or value is None else value
        hint = f"settings go into the recipe: changes=['{full}={written}'] (--set {full}={written})"
    return unknown_argument(function, argument, hint)


def option_names() -> list[str]:
    """Return the full names of all options of a recipe: epochs, optimizer.lr, model.width."""
    inner: dict[str, type[Frozen]] = {"model": ViTConfig, "preprocess": Preprocess}
    found: list[str] = []
    for name, field in Recipe.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        kinds = [part for part in parts if isinstance(part, type) and issubclass(part, Frozen)]
        config = inner.get(name) or (kinds[0] if kinds else None)
        found.append(name)
        found += [f"{name}.{leaf}" for leaf in (config.model_fields if config is not None else ())]
    return [*found, "model.name", "model.paper"]


def default_recipe(pretrained: object) -> str:
    """Return the name of the recipe that is taken when none is asked for."""
    return "scratch-small" if pretrained is None else "finetune"


def read_value(text: str) -> Any:
    """Read a value as TOML (.5 stands for 0.5), none as None; what is neither is a word."""
    word = text.strip()
    number = re.sub(r"^([-+]?)\.(?=[0-9])", r"\g<1>0.", word)
    try:
        value = parse_toml(f"value = {number}")["value"]
        json.dumps(value)  # a date is TOML, too, but no value of a recipe
    except (ContentError, TypeError):
        return None if word == "none" else word
    return value


def _presets() -> Any:
    return files("vitrail.training").joinpath("recipes")


def _table(name: str | Path) -> dict[str, Any]:
    place = _presets().joinpath(f"{name}.toml") if str(name) in preset_names() else Path(name)
    try:
        return read_toml(place) if isinstance(place, Path) else parse_toml(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if str(name).endswith(".toml"):
            raise ConfigError(f"there is no file {name}; give a recipe that is there, or a name of our own") from None
        raise ConfigError(
            f"no recipe is called {str(name)!r}; there are {', '.join(preset_names())}, or give a .toml file"
            f"{suggest(str(name), preset_names())}"
        ) from None
    except OSError as error:
        raise ConfigError(f"the recipe {name} cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise ConfigError(f"the recipe {name} {error}") from None


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    """Change one value of a table, by its dotted name."""
    *parents, leaf = (part.strip() for part in path.split("."))
    for parent in parents:
        inner = table.get(parent)
        if inner is None:
            inner = table[parent] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{path.strip()} cannot be set, because {parent} is {inner!r}")
        table = inner
    table[leaf] = _nothing(parents, leaf) if value is None else value


def _nothing(parents: list[str], leaf: str) -> str | None:
    """Return what "none" means for a field: the word, where it is one of the field's choices, or that it is not set."""
    fields: Mapping[str, Any] = Recipe.model_fields
    for parent in parents:
        kind = ViTConfig if parent == "model" else fields[parent].annotation if parent in fields else None
        kinds = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Frozen)]
        fields = kinds[0].model_fields if kinds else {}
    return "none" if leaf in fields and "none" in _words(fields[leaf].annotation) else None


def _words(annotation: Any) -> list[str]:
    """Return the words that a field may be."""
    parts = get_args(annotation)
    return [part for part in parts if isinstance(part, str)] + [word for part in parts for word in _words(part)]


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
