"""Recipes as files: read them by name or path, change single values (`--set optimizer.lr=3e-4`), write them as TOML."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest, unknown_argument
from vitrail.io import ContentError, parse_toml, read_toml
from vitrail.models.config import ViTConfig
from vitrail.schema import Frozen
from vitrail.tasks.lookup import CLASSIFICATION, task_named
from vitrail.tasks.task import CLASS_SETTINGS
from vitrail.training.recipe import METHODS, Recipe

ANY_METHOD = "auto"
"""Pretrain by the method of the recipe; without a recipe, by the first of the methods."""
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
        drop(table, CLASS_SETTINGS - task_named(task).settings)
    for path, value in settings:
        _set(table, path, value)
    return Recipe.from_json(json.dumps(table))


def drop(table: dict[str, Any], names: Iterable[str]) -> None:
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
    """Return a recipe with these changes; raise unless it pretrains by this method, or any if the method is "auto".

    Without a method, it has to learn from labels.
    """
    names = [name.replace("_", "-") for name in METHODS]
    if method not in (None, ANY_METHOD, *names):
        raise ConfigError(f"method is {method!r}; choose {' or '.join(names)}{suggest(str(method), names)}")
    if isinstance(recipe, Recipe):
        if changes:
            raise ConfigError("changes apply to a recipe's name or file; change a Recipe with replace()")
        chosen = recipe
    else:
        chosen = read_recipe(recipe, changes)
    if method is None and chosen.method is not None:
        raise ConfigError(f"the recipe pretrains without labels ({chosen.method}); use vitrail pretrain")
    if method is not None and chosen.method is None:
        table = METHODS[0] if method == ANY_METHOD else method.replace("-", "_")
        raise ConfigError(f"the recipe learns from labels; use vitrail train, or add a table such as [{table}] to it")
    own = (chosen.method or "").replace("_", "-")
    if method not in (None, ANY_METHOD, own):
        raise ConfigError(f"the method is {method}, but the recipe's is {own}; leave out one of them")
    return chosen


def default_recipe(pretrained: object, method: str | None = None) -> str:
    """Return the name of the default recipe."""
    if method is not None:
        return METHODS[0] if method == ANY_METHOD else method
    return "scratch-small" if pretrained is None else "finetune"


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
