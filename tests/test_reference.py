"""The generated reference is complete, and the files about the project agree with the code."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.models import CommandInfo
from typer.testing import CliRunner

import vitrail
from vitrail.cli.app import app
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import preset_names

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
ROOT_PAGES = ["CONTRIBUTING.md", "SECURITY.md"]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


generate = load_generator()


def page(name: str) -> str:
    text: str = generate.fill((REFERENCE / name).read_text(encoding="utf-8"))
    return text


def test_every_marker_has_a_generator_and_every_generator_a_marker() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    used = [name for text in texts for name in re.findall(r"<!-- generated: (.*?) -->", text)]
    assert sorted(used) == sorted(generate.GENERATORS)
    assert all("generated:" not in generate.fill(text) for text in texts)
    assert "docs/generate.py" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_tables_have_as_many_cells_as_columns() -> None:
    for name, make in generate.GENERATORS.items():
        for table in re.findall(r"(?:^\|.*\n?)+", make(), re.MULTILINE):
            cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(cells) == 1, (name, table)


# ── the command line ──


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_every_argument_and_option_of_a_command_is_documented(command: CommandInfo) -> None:
    name = command.callback.__name__
    text = page("cli.md")
    section = re.search(rf"^## `vitrail {name}`.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    parameters = generate.parameters(command)
    assert len(parameters) == len(inspect.signature(command.callback).parameters)
    for parameter in parameters:
        assert parameter.help, f"{name} {parameter.spelling} has no help"
        assert parameter.spelling.removesuffix(" ...") in section[0]


def test_options_are_spelled_as_the_help_spells_them() -> None:
    for command in app.registered_commands:
        name = command.callback.__name__
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
        for parameter in generate.parameters(command):
            spellings = re.split(r", | / ", parameter.spelling)
            assert all(spelling.removesuffix(" ...").lower() in shown.lower() for spelling in spellings), parameter


# ── recipes ──


def test_every_recipe_field_is_documented() -> None:
    fields = generate.fields()
    paths = {field.path for field in fields}
    assert {"steps", "pretrained.head", "augmentation.randaugment.layers", *Recipe.model_fields} <= paths
    assert [field.path for field in fields if not field.description] == []
    text = page("recipes.md")
    sections = set(re.findall(r"^## `\[(\w+)\]`", text, re.MULTILINE))
    rows = re.findall(r"^\| `([\w.-]+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted([*(paths - sections), *preset_names()])
    assert sections <= set(Recipe.model_fields)


def test_types_and_defaults_of_recipe_fields() -> None:
    rows = {field.path: field for field in generate.fields()}
    assert (rows["optimizer.betas"].type, rows["optimizer.betas"].default) == ("[float, float]", "`[0.9, 0.999]`")
    assert (rows["epochs"].type, rows["epochs"].default) == ("float or `none`", "`none`")
    assert rows["schedule.kind"].type == '`"cosine"`, `"linear"`, `"constant"`'


# ── Python ──


def test_every_public_name_has_a_row() -> None:
    text = page("api.md")
    assert [name for name in vitrail.__all__ if f"`{name}`" not in text] == []
    empty = [line for line in generate.names().splitlines() if line.endswith("|  |")]
    assert empty == []


def test_every_module_has_a_summary() -> None:
    empty = [line for made in (generate.layers(), generate.modules()) for line in made.splitlines() if "|  |" in line]
    assert empty == []


def documented() -> list[str]:
    return [
        name for path in REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", path.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("name", documented())
def test_documented_objects_exist(name: str) -> None:
    """What mkdocstrings renders can be imported, so that a rename fails here and not only in the docs build."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        found = getattr(importlib.import_module(module), attribute)
        assert found.__doc__ or name in {target for target, _ in generate.ALIASES.values()}


def test_every_public_name_is_rendered() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    rendered = []
    for name in documented():
        module, _, attribute = name.rpartition(".")
        result = getattr(importlib.import_module(module), attribute)
        members = re.search(rf"^::: {re.escape(name)}\n(?: .*\n)*? +members: \[(.*?)\]", pages, re.MULTILINE)
        rendered += [
            result,
            *(getattr(result, member, None) for member in re.findall(r"\w+", members[1] if members else "")),
        ]
    public = [name for name in vitrail.__all__ if name != "__version__"]
    assert [name for name in public if not any(getattr(vitrail, name) is result for result in rendered)] == []


# ── files about the project ──


def test_the_citation_has_the_version_and_the_licence() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == vitrail.__version__
    assert re.search(r"^license: (.*)$", text, re.MULTILINE)[1] == "Apache-2.0"


@pytest.mark.parametrize("name", ROOT_PAGES)
def test_paths_and_targets_in_the_text_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    paths = [match for match in re.findall(r"`([\w.]+/[\w./-]*)`", text) if not re.search(r"NAME|^site/", match)]
    assert [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "src/vitrail"))] == []
