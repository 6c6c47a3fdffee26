"""`Recipe`: everything that decides what a training run computes, as one typed value read from TOML.

A field that is None is resolved from the data and the model when the run starts (`defaults.py`), printed with the
reason, and written into the run's recipe.toml.
"""

import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from vitrail.models.lora import LoRA
from vitrail.schema import LIMIT, Count, Frozen, Names, Positive
from vitrail.tasks.lookup import CLASSIFICATION, task_named
from vitrail.tasks.objective import Objective
from vitrail.tasks.task import CLASS_SETTINGS
from vitrail.training.averaging import Averaging
from vitrail.training.distributed import Distributed
from vitrail.training.finetune_init import FinetuneInit
from vitrail.training.optimizers import Optimizer, Schedule
from vitrail.training.pretraining.dino import DinoSettings
from vitrail.training.pretraining.distill import DistillSettings
from vitrail.training.pretraining.mae import MaeSettings
from vitrail.training.pretraining.masked_patches import MaskedPatchesSettings
from vitrail.training.teacher import TeacherSettings

METHODS = ("mae", "masked_patches", "dino", "distill")
"""The tables of a recipe for pretraining, one per method."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
_MODEL_HAS = {"size": "image_size", "channels": "channels"}
ALIASES = {
    "batch_size": "batch",
    "num_epochs": "epochs",
    "learning_rate": "optimizer.lr",
    "img_size": "model.image_size",
    "wd": "optimizer.weight_decay",
    "class_weights": "objective.class_weights",
}
"""Names that other libraries use for some options."""
ARGUMENTS = {
    "num_workers": "vitrail calls it workers",
    "output_dir": "vitrail calls it folder",
    "run": "it is folder in Python",
    "set": "it is changes in Python, such as changes=['epochs=3']",
    "weights": "vitrail calls it pretrained, such as pretrained='timm:name.tag'",
    "model": "pretrained takes an existing model; changes=['model.name=S/16'] selects a model to train from scratch",
    "resume": "the same call finds the same folder and resumes",
}
"""Names that other libraries use for some arguments of `train`, with a hint for each."""


def _as_batch(value: Any) -> Any:
    """Validate the whole field at once, so that an error is one sentence and not one per member of the union."""
    if hasattr(value, "__index__") and not isinstance(value, bool) and 0 < operator.index(value) <= LIMIT:
        return operator.index(value)
    if value is None or value == "auto":
        return value
    raise PydanticCustomError("batch", f"it should be an integer from 1 to {LIMIT:,}, or 'auto'")


class DataSettings(Frozen):
    """The training data and how it is read."""

    val: Fraction = 0.1
    """Fraction of every class for the validation split, if the data does not define one."""
    test: Fraction = 0.2
    """Fraction of every class for the test split, if the data does not define one."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train on this fraction of every class in the training split, drawn by the seed; validation and test stay whole.
    With the same seed, a smaller fraction is contained in a larger one."""
    per_class: Positive | None = None
    """Train on at most this many images per class, drawn in the same order as `fraction`. None: no limit."""
    balance: bool = False
    """Sample every class equally often."""
    repeats: Positive = 1
    """Repeated augmentation: how often a batch contains the same image, each time augmented anew."""
    cache: Positive | None = None
    """Cache decoded images with this shorter side in pixels. None: decode the files every time."""
    on_device: bool = False
    """Keep all training images on the device and augment them there: for small images, where loading is slow."""
    bad_files: BadFiles = "skip"
    """`skip` replaces an image that cannot be read by another one and records it; `refuse` stops the run."""

    @model_validator(mode="after")
    def _check_subset(self) -> Self:
        if self.fraction < 1 and self.per_class is not None:
            raise ConfigError(
                f"data.fraction is {self.fraction} and data.per_class is {self.per_class}; leave one of them out, or "
                f"unset it with data.fraction=1 or data.per_class=none"
            )
        return self

    @property
    def subset(self) -> str | None:
        """The setting that reduces the training split, as on the command line; None if it stays whole."""
        if self.per_class is not None:
            return f"data.per_class={self.per_class}"
        return f"data.fraction={self.fraction}" if self.fraction < 1 else None


class Recipe(Frozen):
    """A training run."""

    task: str = CLASSIFICATION.name
    """What the model learns: `classification`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed. Shuffling, augmentation, initialisation and dropout derive from it."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Number of passes over the training split."""
    steps: Positive | None = None
    """The length of the run in steps, instead of `epochs`."""
    batch: Annotated[int | Literal["auto"] | None, BeforeValidator(_as_batch)] = None
    """Images per step, over all ranks; "auto" halves the default until it fits in memory."""
    gradient_accumulation: Positive = 1
    """Micro-batches per step and rank; more of them save memory."""
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 where the device is clearly faster with it, otherwise float32."""
    compile: bool = False
    """Use `torch.compile`; on a GPU in bf16 also the fused training path."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    deterministic: bool = False
    """On CUDA: use deterministic algorithms, which are slower."""
    evaluations: Positive = 20
    """Number of validations, spread evenly over the run."""
    patience: Count = 0
    """Stop early after this many validations without improvement; 0 disables early stopping."""
    criterion: str | None = None
    """The validation metric that selects the best checkpoint: `accuracy`, `balanced_accuracy`, `macro_f1` or `loss`.
    None: balanced_accuracy if classes are balanced or weighted, else accuracy."""
    save_minutes: Annotated[float, Field(ge=0, le=1e5)] = 5.0
    """Minutes between saved training states; every validation saves one, too."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Fields of `ViTConfig`; `name` selects a named model ("S/16"), `paper = true` the ViT paper's options."""
    preprocess: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Preprocess`, such as `resize_to`; size and channels follow from the model."""
    pretrained: FinetuneInit | None = None
    """How to adapt the model of --from to the data. A recipe with this table requires --from."""
    teacher: TeacherSettings | None = None
    """How to learn from the model of --teacher. A recipe with this table requires --teacher."""
    freeze: Annotated[tuple[str, ...], Names] = ()
    """Patterns of parameters to freeze: "blocks.*"."""
    lora: LoRA = LoRA()
    data: DataSettings = DataSettings()
    distributed: Distributed = Distributed()
    augmentation: Augmentation | None = None
    mixing: Mixing | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    averaging: Averaging = Averaging()
    objective: Objective = Objective()
    mae: MaeSettings | None = None
    """Pretrain a masked autoencoder, without labels; `vitrail pretrain`."""
    masked_patches: MaskedPatchesSettings | None = None
    """Pretrain by masked patch prediction, without labels; `vitrail pretrain --method masked-patches`."""
    distill: DistillSettings | None = None
    """Learn the features of a teacher, without labels; `vitrail pretrain --method distill --teacher MODEL`."""

    dino: DinoSettings | None = None
    """Pretrain by self-distillation between views, without labels; `vitrail pretrain --method dino`."""

    @property
    def method(self) -> str | None:
        """The pretraining method; None if the run learns from labels."""
        return next((name for name in METHODS if getattr(self, name) is not None), None)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"epochs is {self.epochs:g} and steps is {self.steps}; leave one of them out, or unset it with "
                f"epochs=none or steps=none"
            )
        if len(methods := [name for name in METHODS if getattr(self, name) is not None]) > 1:
            raise ConfigError(f"the recipe has tables of several methods, {' and '.join(methods)}; keep one")
        if methods and self.teacher is not None:
            raise ConfigError(
                f"[teacher] is for training with labels, and {methods[0]} has none; leave one of them out"
            )
        criteria = task_named(self.task).criteria
        if self.criterion is not None and self.criterion not in criteria:
            raise ConfigError(
                f"criterion is {self.criterion!r}; choose from {', '.join(criteria)}{suggest(self.criterion, criteria)}"
            )
        for name in ("size", "channels"):
            if name in self.preprocess:
                raise ConfigError(f"preprocess.{name} follows from the model; set model.{_MODEL_HAS[name]} instead")
        if isinstance(self.batch, int) and self.batch % (self.data.repeats * self.gradient_accumulation):
            raise ConfigError(
                f"a batch of {self.batch} is not a multiple of data.repeats {self.data.repeats} × "
                f"gradient_accumulation {self.gradient_accumulation}; change one of them"
            )
        if self.lora.rank and self.freeze:
            raise ConfigError(
                f"lora.rank is {self.lora.rank} and freeze is {list(self.freeze)}, but LoRA already freezes everything "
                f"except its adapters and the head; leave one of them out, or unset it with lora.rank=0 or freeze=[]"
            )
        # Without a pretrained model, which `check_pretrained` asks for, the optimizer is not what has to change.
        if self.lora.rank and self.optimizer.kind == "muon" and self.pretrained is not None:
            raise ConfigError(
                f"lora.rank is {self.lora.rank} and optimizer.kind is 'muon', but Muon trains the matrices that LoRA "
                f"freezes; set optimizer.kind=adamw"
            )
        return self

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of what is not trained: `freeze`; with LoRA, everything but the adapters and the head."""
        return ("*", "!*.lora_[AB]", "!head*") if self.lora.rank else self.freeze

    def check_pretrained(self, pretrained: object) -> None:
        """Raise if this recipe fine-tunes but no pretrained model is given."""
        if self.pretrained is not None and pretrained is None:
            raise ConfigError("this recipe fine-tunes a pretrained model; pass one with --from, or use another recipe")
        if self.lora.rank and self.method is not None:
            raise ConfigError(f"lora.rank is {self.lora.rank}, but pretraining trains all weights; set lora.rank=0")
        if self.lora.rank and pretrained is None:
            raise ConfigError(
                f"lora.rank is {self.lora.rank}, but LoRA freezes the weights, and without --from they are random; "
                f"pass a pretrained model with --from, or set lora.rank=0"
            )

    def check_teacher(self, teacher: object) -> None:
        """Raise if this recipe needs a teacher and none is given, or the other way round."""
        if teacher is None and self.teacher is not None:
            raise ConfigError(
                "this recipe has settings for a teacher ([teacher]); pass one with --teacher, or drop them"
            )
        if teacher is None and self.distill is not None:
            raise ConfigError("distill learns the features of a teacher; pass one with --teacher")
        if teacher is not None and self.method not in (None, "distill"):
            raise ConfigError(f"{self.method} learns without --teacher; leave it out, or use --method distill")
        if teacher is not None and self.task != CLASSIFICATION.name:
            raise ConfigError(f"the task {self.task} cannot learn from a teacher; leave out --teacher")

    def resolved_criterion(self) -> str:
        """Return the criterion, or its default given the class weights. Pretraining validates its loss."""
        if self.method is not None:
            return "loss"
        balanced = self.data.balance or self.objective.class_weights != "none"
        return self.criterion or task_named(self.task).default_criterion(class_balanced=balanced)

    def identity(self) -> "Recipe":
        """Return the settings that the result depends on; the others are the defaults."""
        return self.replace(distributed=Distributed())

    def fingerprint(self) -> str:
        """Return a short hash of the settings that the result depends on."""
        return hashlib.blake2b(self.identity().to_json().encode(), digest_size=3).hexdigest()


def preset_names() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def read_recipe(
    name: str | Path | Recipe, changes: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe by name or from a file, and apply changes such as "optimizer.lr=3e-4".

    `values` are changes with parsed values: {"optimizer.lr": 3e-4}. A bundled recipe is for classification; with
    another task, what it says about classes is dropped.
    """
    table = json.loads(name.to_json()) if isinstance(name, Recipe) else _table(name)
    settings: list[tuple[str, Any]] = []
    for path, text in split_changes(changes):
        check_name(path, text)
        settings.append((path, read_value(text)))
    for path, value in (values or {}).items():
        check_name(path.strip(), str(value))
        settings.append((path, value))
    task = next((value for path, value in reversed(settings) if path.strip() == "task"), CLASSIFICATION.name)
    if not isinstance(name, Recipe) and str(name) in preset_names() and isinstance(task, str):
        _drop(table, CLASS_SETTINGS - task_named(task).settings)
    for path, value in settings:
        _set(table, path, value)
    return Recipe.from_json(json.dumps(table))


def _drop(table: dict[str, Any], names: Iterable[str]) -> None:
    """Remove values by their dotted names."""
    for name in names:
        section, _, leaf = name.partition(".")
        if leaf:
            table.get(section, {}).pop(leaf, None)
        else:
            table.pop(section, None)


def split_changes(changes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the value of each change, as text."""
    if isinstance(changes, (str, Mapping)):
        raise ConfigError(f"changes is {changes!r}; pass a list of strings: changes=['optimizer.lr=3e-4']")
    pairs = []
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"{change!r} is not a change; write optimizer.lr=3e-4")
        pairs.append((path.strip(), text))
    return pairs


def check_option(path: str) -> None:
    """Raise for a dotted name that no recipe has, and suggest the closest."""
    names = option_names()
    first, _, rest = path.partition(".")
    known = path if not rest else f"{first}.{rest.partition('.')[0]}"
    if known not in names:
        full = full_name(path)
        hint = f"; did you mean {full!r}?" if full is not None else suggest(path, names)
        raise ConfigError(f"a recipe has no option {path!r}{hint}")


def check_name(path: str, value: str) -> None:
    """Raise for an abbreviated name or another library's name, and suggest the full name."""
    full = None if path.partition(".")[0] in Recipe.model_fields else full_name(path)
    if full is not None:
        raise ConfigError(f"a recipe has no option {path!r}; did you mean --set {full}={value.strip()}?")


def full_name(name: str) -> str | None:
    """Return the full name of an option from its name, its last component or an alias; None if there is none."""
    names = option_names()
    leaf = name.rpartition(".")[2]
    if name in names or leaf in ALIASES:
        return name if name in names else ALIASES[leaf]
    return next((option for option in names if option.endswith(f".{leaf}")), None)


def unknown_setting(function: Callable[..., object], argument: str, value: object) -> ConfigError:
    """Return the error for an unknown argument of `train` or `sweep`; most belong in the recipe."""
    hint = ""
    if argument in ARGUMENTS:
        hint = ARGUMENTS[argument]
    elif (full := full_name(argument)) is not None:
        written = str(value).lower() if isinstance(value, bool) or value is None else value
        hint = f"settings go into the recipe: changes=['{full}={written}'] (--set {full}={written})"
    return unknown_argument(function, argument, hint)


def option_names() -> list[str]:
    """Return the full names of all recipe options: epochs, optimizer.lr, model.width."""
    inner: dict[str, type[Frozen]] = {"model": ViTConfig, "preprocess": Preprocess}
    names: list[str] = []
    for name, field in Recipe.model_fields.items():
        types = (field.annotation, *get_args(field.annotation))
        kinds = [kind for kind in types if isinstance(kind, type) and issubclass(kind, Frozen)]
        config = inner.get(name) or (kinds[0] if kinds else None)
        names.append(name)
        names += [f"{name}.{leaf}" for leaf in (config.model_fields if config is not None else ())]
    return [*names, "model.name", "model.paper"]


def recipe_for(method: str | None, recipe: str | Path | Recipe, changes: Sequence[str]) -> Recipe:
    """Return a recipe with these changes; raise unless it pretrains (or, without a method, learns from labels)."""
    names = [name.replace("_", "-") for name in METHODS]
    if method is not None and method not in names:
        raise ConfigError(f"method is {method!r}; choose {' or '.join(names)}{suggest(method, names)}")
    if isinstance(recipe, Recipe):
        if changes:
            raise ConfigError("changes apply to a recipe's name or file; change a Recipe with replace()")
        chosen = recipe
    else:
        chosen = read_recipe(recipe, changes)
    if method is None and chosen.method is not None:
        raise ConfigError(f"the recipe pretrains without labels ({chosen.method}); use vitrail pretrain")
    if method is not None and chosen.method is None:
        table = method.replace("-", "_")
        raise ConfigError(f"the recipe learns from labels; use vitrail train, or add a table such as [{table}] to it")
    own = (chosen.method or "").replace("_", "-")
    if method not in (None, own, names[0]):  # the first is the default, so it says nothing
        raise ConfigError(f"the method is {method}, but the recipe's is {own}; leave out one of them")
    return chosen


def default_recipe(pretrained: object, method: str | None = None) -> str:
    """Return the name of the default recipe."""
    return method or ("scratch-small" if pretrained is None else "finetune")


def read_value(text: str) -> Any:
    """Parse a value as TOML (.5 means 0.5), "none" as None; anything else is a string."""
    word = text.strip()
    number = re.sub(r"^([-+]?)\.(?=[0-9])", r"\g<1>0.", word)
    try:
        value = parse_toml(f"value = {number}")["value"]
        json.dumps(value)  # TOML has dates, recipes do not
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
            raise ConfigError(
                f"{name} does not exist; pass an existing recipe file or the name of a bundled recipe"
            ) from None
        raise ConfigError(
            f"unknown recipe {str(name)!r}; choose from {', '.join(preset_names())}, or pass a .toml file"
            f"{suggest(str(name), preset_names())}"
        ) from None
    except OSError as error:
        raise ConfigError(f"the recipe {name} cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise ConfigError(f"the recipe {name} {error}") from None


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    """Set one value of a table by its dotted name."""
    *parents, leaf = (key.strip() for key in path.split("."))
    for parent in parents:
        inner = table.get(parent)
        if inner is None:
            inner = table[parent] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{path.strip()} cannot be set, because {parent} is {inner!r}")
        table = inner
    table[leaf] = _none_value(parents, leaf) if value is None else value


def _none_value(parents: list[str], leaf: str) -> str | None:
    """Return what "none" means for a field: the string if it is one of the field's literals, else None."""
    fields: Mapping[str, Any] = Recipe.model_fields
    for parent in parents:
        kind = ViTConfig if parent == "model" else fields[parent].annotation if parent in fields else None
        kinds = [k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, Frozen)]
        fields = kinds[0].model_fields if kinds else {}
    return "none" if leaf in fields and "none" in _literals(fields[leaf].annotation) else None


def _literals(annotation: Any) -> list[str]:
    """Return the string literals of an annotation."""
    args = get_args(annotation)
    return [arg for arg in args if isinstance(arg, str)] + [literal for arg in args for literal in _literals(arg)]


def write_toml(recipe: Recipe) -> str:
    """Return a recipe as TOML with every value; None is omitted."""
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
    return json.dumps(value, ensure_ascii=False)  # numbers, strings and booleans look the same in TOML


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_inline(v)}" for name, v in value.items() if v is not None) + " }"
    return _toml(value)
