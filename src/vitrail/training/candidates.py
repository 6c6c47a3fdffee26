"""Named candidates of a sweep: their file, and the checks of every table in it.

recipe = "cifar10"            a built-in recipe, or a path relative to the file
seeds = [0, 1, 2]             default: the recipe's seed
[set]                         settings of every candidate
[over]                        settings with several values, of which each candidate keeps the best
[candidate.NAME]              settings of one candidate
[candidate.NAME.over]         its own values; they replace those of [over]
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, suggest
from vitrail.io import ContentError, read_toml
from vitrail.training.grid import check_comparable, combine, overlap
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import check_option, preset_names, read_recipe, read_value, split_changes

KEYS = ("recipe", "seeds", "set", "over", "candidate")
FOLDER_NAME = re.compile(r"[\w+=,-][\w.+=,-]{0,59}")
"""Candidates give their folders a name."""


@dataclass(frozen=True)
class Candidate:
    """A candidate: its own settings, and settings of which the best value is selected."""

    name: str
    settings: dict[str, Any]
    over: dict[str, list[Any]]

    @property
    def table(self) -> str:
        """The name of its table."""
        return f"candidate.{self.name}"

    def combinations(self) -> list[dict[str, Any]]:
        """Return every combination of its grid; a single empty one if it has no grid."""
        return combine(self.over, ()) if self.over else [{}]


@dataclass(frozen=True)
class CandidateFile:
    """The content of a file of candidates, checked as far as its words say."""

    name: str
    """Of the file, for messages."""
    recipe: str | Path | None
    seeds: list[int] | None
    settings: dict[str, Any]
    candidates: list[Candidate]

    def error(self, table: str, message: object) -> ConfigError:
        """Return an error that names the file and one of its tables."""
        return ConfigError(f"{self.name}, [{table}]: {message}")

    def check_selection(self, only: Sequence[str]) -> None:
        """Raise if one of the names is not a candidate."""
        names = [candidate.name for candidate in self.candidates]
        if isinstance(only, str):
            raise ConfigError(f"only is {only!r}; pass a list of names: only=[{only!r}]")
        for name in only:
            if name not in names:
                hint = suggest(name, names) or f"; choose from {', '.join(names)}"
                raise ConfigError(f"{self.name} has no candidate {name!r}{hint}")


def read_candidates(source: str | Path | Mapping[str, Any]) -> CandidateFile:
    """Read a file of candidates, or a mapping with the same content."""
    if isinstance(source, Mapping):
        return _Reader("the candidates").read(_plain(source), Path())
    path = Path(source)
    try:
        content = read_toml(path)
    except OSError as error:
        raise ConfigError(f"the candidates {path} cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise ConfigError(f"{path} {error}") from None
    return _Reader(str(path)).read(content, path.parent)


def _plain(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as a file could hold it: tuples become lists."""
    try:
        content: dict[str, Any] = json.loads(json.dumps(dict(source)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the candidates cannot be read ({error}); use plain dicts, lists and numbers") from None
    return content


@dataclass(frozen=True)
class _Reader:
    name: str
    names: set[str] = field(default_factory=set)

    def read(self, content: dict[str, Any], folder: Path) -> CandidateFile:
        for key in content:
            if key not in KEYS:
                raise ConfigError(f"{self.name} has an unknown key {key!r}{suggest(key, KEYS)}")
        settings = self._settings(content.get("set", {}), "set")
        default = self._grid(content.get("over", {}), "over", settings)
        tables = content.get("candidate", {})
        if not isinstance(tables, dict) or not tables:
            raise ConfigError(f"{self.name} has no candidates; add a table such as [candidate.baseline]")
        candidates = [self._candidate(name, table, default, settings) for name, table in tables.items()]
        return CandidateFile(
            self.name, self._recipe(content.get("recipe"), folder), self._seeds(content), settings, candidates
        )

    def _recipe(self, recipe: Any, folder: Path) -> str | Path | None:
        if recipe is None or recipe in preset_names():
            return recipe  # type: ignore[no-any-return]
        if not isinstance(recipe, str):
            raise ConfigError(f"{self.name}: recipe is {recipe!r}; write the name of a recipe or the path of a file")
        return folder / recipe if recipe.endswith(".toml") else recipe  # an unknown name gets the error of --recipe

    def _seeds(self, content: dict[str, Any]) -> list[int] | None:
        seeds = content.get("seeds")
        if seeds is None and "seeds" not in content:
            return None
        whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
        if not whole or not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(
                f"{self.name}: seeds is {seeds!r}; write different integers from 0 on, such as seeds = [0, 1, 2]"
            )
        return list(seeds)

    def _candidate(self, name: str, table: Any, default: dict[str, list[Any]], shared: dict[str, Any]) -> Candidate:
        where = f"candidate.{name}"
        if not FOLDER_NAME.fullmatch(name) or name.startswith("sweep."):  # files of the sweep
            raise self._error(
                where, f"the name {name!r} cannot be a folder; use letters, digits, '-' and '_', at most 60"
            )
        if name.casefold() in self.names:
            raise self._error(where, "another candidate has this name in other letters, and they would share a folder")
        self.names.add(name.casefold())
        if not isinstance(table, dict):
            raise self._error(where, f"it is {table!r}; write a table of settings")
        table = dict(table)
        own = self._grid(table.pop("over", {}), f"{where}.over", shared)
        settings = self._settings(table, where)
        for key in settings:
            self._check_comparable(key, where)
            if twice := next((other for other in own if overlap(key, other)), None):
                raise self._error(where, f"{key} is set, but its grid contains {twice}; leave one of them out")
        rest = {key: values for key, values in default.items() if not any(overlap(key, fixed) for fixed in settings)}
        return Candidate(name, settings, {**rest, **own})

    def _settings(self, table: Any, where: str) -> dict[str, Any]:
        """Return the settings of a table by their dotted names."""
        if not isinstance(table, dict):
            raise self._error(where, f"it is {table!r}; write a table of settings")
        settings: dict[str, Any] = {}
        for key, value in _dotted(table):
            try:
                check_option(key)
            except ConfigError as error:
                raise self._error(where, error) from None
            if key == "seed":
                raise self._error(where, "the seed is the same for all candidates; write seeds = [0, 1, 2]")
            if twice := next((other for other in settings if overlap(key, other)), None):
                both = f"{key} is set twice" if key == twice else f"{twice} and {key} overlap"
                raise self._error(where, f"{both}; leave one of them out")
            settings[key] = None if value == "none" else value
        return settings

    def _grid(self, table: Any, where: str, shared: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the values of each setting of a grid."""
        grid = self._settings(table, where)
        for key, values in grid.items():
            self._check_comparable(key, where)
            if twice := next((other for other in shared if overlap(key, other)), None):
                raise self._error(where, f"{key} has several values, but [set] sets {twice}; leave one of them out")
            if not isinstance(values, list) or not values:
                raise self._error(where, f"{key} is {values!r}; write a list with at least one value")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise self._error(where, f"{key} is {values!r}; write different values")
            grid[key] = [None if value == "none" else value for value in values]
        return grid

    def _check_comparable(self, key: str, where: str) -> None:
        try:
            check_comparable(key)
        except ConfigError as error:
            raise self._error(where, error) from None

    def _error(self, where: str, message: object) -> ConfigError:
        return ConfigError(f"{self.name}, [{where}]: {message}")


def _dotted(table: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the settings of nested tables with their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


# ── recipes ──


@dataclass(frozen=True)
class CandidateRecipes:
    """The recipes of all candidates: the base recipe, [set], --set, the candidate's settings, its grid and the seed."""

    file: CandidateFile
    base: str | Path | Recipe
    changes: Sequence[str]

    def __post_init__(self) -> None:
        for key, _ in split_changes(self.changes):
            if key == "seed" and self.file.seeds is not None:
                raise ConfigError(f"{self.file.name} sets seeds, and --set the seed; leave one of them out")
            for candidate in self.file.candidates:
                if twice := next((one for one in (*candidate.settings, *candidate.over) if overlap(key, one)), None):
                    raise self.file.error(
                        candidate.table, f"{twice} is set, but --set sets {key}; leave one of them out"
                    )

    def check(self, pretrained: object, teacher: object = None) -> None:
        """Raise if a recipe is invalid, or needs a pretrained model or a teacher, before they are opened."""
        for candidate in self.file.candidates:
            for values in candidate.combinations():
                recipe = self.recipe(candidate, values)
                recipe.check_pretrained(pretrained)
                recipe.check_teacher(teacher)

    @property
    def shared(self) -> dict[str, Any]:
        """The settings of every candidate: --set counts more than [set]."""
        return _merged(self.file.settings, self._changed)

    @property
    def _changed(self) -> dict[str, Any]:
        return {key: read_value(text) for key, text in split_changes(self.changes)}

    def recipe(self, candidate: Candidate, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a candidate with some values of its grid and a seed."""
        try:
            return self._read(self.shared, candidate.settings, values)
        except ConfigError as error:
            raise self.blamed(error, candidate, values) from None

    def blamed(self, error: ConfigError, candidate: Candidate, values: Mapping[str, Any]) -> ConfigError:
        """Return an error with the name of the table that causes it: settings are judged together."""
        tables: list[tuple[str, tuple[Mapping[str, Any], ...]]] = [
            ("", (self._changed,)),
            ("set", (self.shared,)),
            (candidate.table, (self.shared, candidate.settings)),
        ]
        for table, layers in tables:
            try:
                self._read(*layers)
            except ConfigError as cause:
                if str(cause) == str(error):
                    return self.file.error(table, error) if table else error
        tried = any(key in candidate.over for key in values)
        return self.file.error(f"{candidate.table}.over" if tried else candidate.table, error)

    def _read(self, *layers: Mapping[str, Any]) -> Recipe:
        return read_recipe(self.base, values=_merged(*layers))


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings; the last one counts. Whoever sets the steps unsets the epochs of the recipe, and vice versa."""
    settings: dict[str, Any] = {}
    for layer in layers:
        for ours, other in (("steps", "epochs"), ("epochs", "steps")):
            if layer.get(ours) is not None and other not in layer:
                settings[other] = None
        settings |= layer
    return settings
