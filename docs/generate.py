"""Generated sections of the docs: commands from Typer, recipe fields from pydantic, names and modules from docstrings.

A page marks the place with `<!-- generated: commands -->`. MkDocs runs `on_page_markdown` as a hook when it builds a
page, so a generated section cannot be out of date. To read one in a terminal:

    python docs/generate.py commands
"""

import ast
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo, CommandInfo
from typer.utils import get_params_from_function

import vitrail
from vitrail.cli.app import app
from vitrail.training.recipe import Recipe

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vitrail"
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace every marker of a page; MkDocs calls this for each page."""
    return fill(markdown)


def fill(markdown: str) -> str:
    """Return a page with its generated sections."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)


# ── the command line ──


class Parameter(NamedTuple):
    """An argument or an option of a command."""

    argument: bool
    spelling: str
    metavar: str
    default: str
    help: str


def commands() -> str:
    """Return a table of all commands, and a section for each."""
    named = [(_command_name(command), command) for command in app.registered_commands if not command.hidden]
    rows = [
        (f"[`vitrail {name}`](#vitrail-{name})", _cell(_description(command).partition("\n\n")[0]))
        for name, command in named
    ]
    sections = [_command_section(name, command) for name, command in named]
    return "\n\n".join([_table(("command", "what it does"), rows), *sections])


def parameters(command: CommandInfo) -> list[Parameter]:
    """Return the arguments and options of a command, in the order of its signature."""
    assert command.callback is not None
    result = []
    for name, meta in get_params_from_function(command.callback).items():
        info = meta.default
        if info.hidden:
            continue
        kind = _without_none(meta.annotation)
        argument = isinstance(info, ArgumentInfo)
        decls = [word for word in info.param_decls or () if word.startswith("-")]
        flag = kind is bool
        if argument:
            spelling = name.upper() + (" ..." if get_origin(kind) is list else "")
        elif decls:
            spelling = ", ".join(decls)
        else:
            option = name.replace("_", "-")
            spelling = f"--{option} / --no-{option}" if flag else f"--{option}"
        metavar = "" if argument or flag else info.metavar or _metavar(kind)
        text = _cell(info.help or "")
        if info.envvar:
            text += f" Environment: `{info.envvar}`."
        result.append(Parameter(argument, spelling, metavar, _option_default(info.default, flag), text))
    return result


def _command_section(name: str, command: CommandInfo) -> str:
    listed = parameters(command)
    arguments = [parameter for parameter in listed if parameter.argument]
    options = [parameter for parameter in listed if not parameter.argument]
    usage = " ".join(
        [f"vitrail {name}", *(["[OPTIONS]"] if options else [])]
        + [word.spelling if word.default == "required" else f"[{word.spelling}]" for word in arguments]
    )
    blocks = [f"## `vitrail {name}` {{ #vitrail-{name} }}", _description(command), f"```text\n{usage}\n```"]
    if arguments:
        rows = [(f"`{word.spelling.removesuffix(' ...')}`", word.default, word.help) for word in arguments]
        blocks.append(_table(("argument", "default", "description"), rows))
    if options:
        rows = [(f"`{f'{word.spelling} {word.metavar}'.strip()}`", word.default, word.help) for word in options]
        blocks.append(_table(("option", "default", "description"), rows))
    return "\n\n".join(blocks)


def _command_name(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or str(getattr(command.callback, "__name__", "")).replace("_", "-")


def _description(command: CommandInfo) -> str:
    return inspect.cleandoc(command.help or inspect.getdoc(command.callback) or "")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is list:
        return _metavar(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return "/".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "/".join(str(choice.value) for choice in kind)
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _option_default(value: Any, flag: bool) -> str:
    if value is ...:
        return "required"
    if value is None or value == "":
        return ""
    if flag:
        return "on" if value else "off"
    return f"`{value.value if isinstance(value, Enum) else value}`"


# ── recipes ──


class Field(NamedTuple):
    """A field of a recipe."""

    path: str
    type: str
    default: str
    description: str


def recipe_fields() -> str:
    """Return a table of a recipe's own fields, and one for each of its sections."""
    sections = {name: inner for name, field in Recipe.model_fields.items() if (inner := _config_in(field.annotation))}
    rows = [row for row in _field_rows(Recipe, "", nested=False) if row.path not in sections]
    blocks = ["## Top level", _field_table(rows)]
    for name, config in sections.items():
        blocks += [f"## `[{name}]` {{ #{name} }}", docstrings(Recipe).get(name, ""), inspect.getdoc(config) or ""]
        blocks.append(_field_table(_field_rows(config, f"{name}.")))
    return "\n\n".join(block for block in blocks if block)


def fields() -> list[Field]:
    """Return every field of a recipe, with the fields of its sections."""
    return list(_field_rows(Recipe, ""))


def docstrings(config: type[BaseModel]) -> dict[str, str]:
    """Return the text under each field of a config, from its source."""
    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                texts[statement.target.id] = inspect.cleandoc(following.value.value)
    return texts


def _field_rows(config: type[BaseModel], path: str, *, nested: bool = True) -> Iterator[Field]:
    described = docstrings(config)
    for name, field in config.model_fields.items():
        inner = _config_in(field.annotation)
        text = described.get(name) or (inner and inspect.getdoc(inner)) or ""
        yield Field(f"{path}{name}", _type(field.annotation), _field_default(field), _cell(text))
        if inner is not None and nested:
            yield from _field_rows(inner, f"{path}{name}.")


def _field_table(rows: Iterable[Field]) -> str:
    cells = [(f"`{row.path}`", row.type, row.default, row.description) for row in rows]
    return _table(("field", "type", "default", "description"), cells)


def _config_in(annotation: Any) -> type[BaseModel] | None:
    """Return the config that a field holds, also as one of several types."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(kind) for kind in inner))
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in inner)
    if origin is tuple and inner[-1] is ...:
        return f"list of {_type(inner[0])}"
    if origin is tuple:
        return f"[{', '.join(_type(kind) for kind in inner)}]"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    names = {int: "integer", float: "float", bool: "boolean", str: "string", type(None): "`none`"}
    return names[annotation]


def _field_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    return "" if isinstance(value, BaseModel) else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


# ── Python and the source ──


ALIASES = {
    "Data": (
        "vitrail.data.sources.given.Data",
        "What functions take as `data`: a path, or images with labels in Python.",
    )
}


def names() -> str:
    """Return a table of the public names."""
    rows = []
    for name in vitrail.__all__:
        thing = getattr(vitrail, name)
        if name in ALIASES:  # a type alias has no docstring that can be asked for
            rows.append((f"[`{name}`][{ALIASES[name][0]}]", ALIASES[name][1]))
            continue
        text = "The version, as a string." if isinstance(thing, str) else (inspect.getdoc(thing) or "")
        target = "#" if isinstance(thing, str) else f"#{thing.__module__}.{thing.__qualname__}"
        rows.append((f"`{name}`" if target == "#" else f"[`{name}`][{target[1:]}]", _cell(text.partition("\n\n")[0])))
    return _table(("name", "description"), rows)


def layers() -> str:
    """Return a table of the top-level entries of the package, lowest layer first."""
    rows = []
    for name, layer in sorted(_layers().items(), key=lambda item: item[1]):
        package = SOURCE / name / "__init__.py"
        path = package if package.exists() else SOURCE / f"{name}.py"
        rows.append((str(layer), f"`{name}/`" if path is package else f"`{name}.py`", _summary(path)))
    return _table(("layer", "entry", "what it is"), rows)


def modules() -> str:
    """Return a table of the modules of each package."""
    blocks = []
    packages = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
    for package in packages:
        name = package.relative_to(SOURCE.parent).as_posix()
        paths = [path for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
        rows = [(f"`{path.name}`", _summary(path)) for path in paths]
        blocks += [f"## `{name}/`", _summary(package / "__init__.py")]
        blocks += [_table(("module", "what it is"), rows)] if rows else []
    return "\n\n".join(blocks)


def _layers() -> dict[str, int]:
    """Return the layers that the architecture test enforces."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LAYER":
            layers: dict[str, int] = ast.literal_eval(node.value)
            return layers
    raise LookupError("tests/test_architecture.py does not define LAYER")


def _summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _cell(text.partition("\n\n")[0])


# ── Markdown ──


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return a text as one line that a table can hold."""
    pieces = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(piece if number % 2 else piece.replace("<", "&lt;") for number, piece in enumerate(pieces))


def _without_none(annotation: Any) -> Any:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if get_origin(annotation) in (Union, types.UnionType) and kinds else annotation


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "layers": layers,
    "modules": modules,
    "names": names,
    "recipe_fields": recipe_fields,
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in GENERATORS:
        print(GENERATORS[sys.argv[1]]())
    else:
        sys.exit(f"usage: python docs/generate.py {'|'.join(GENERATORS)}")
