"""The architecture: which layer may import which, what is public, and what an import costs."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vitrail
import vitrail.api

SOURCE = Path(vitrail.__file__).parent
TESTS = Path(__file__).parent

# A top-level entry of the package imports only entries of a lower layer (docs/decisions/0001).
LAYER = {
    "_version": 0,
    "errors": 0,
    "text": 0,
    "schema": 1,
    "runtime": 1,
    "io": 1,
    "models": 2,
    "data": 2,
    "metrics": 2,
    "charts": 2,
    "checkpoints": 3,
    "acceleration": 3,
    "tasks": 4,
    "evaluation": 5,
    "quantisation": 5,
    "exporting": 6,
    "training": 6,
    "inference": 6,
    "explanations": 6,
    "reports": 7,
    "serving": 7,
    "api": 8,
    "__init__": 9,
    "cli": 9,
    "__main__": 10,
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return the parsed modules of the package by dotted name."""
    results = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        results[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return results


def imports(tree: ast.Module) -> list[str]:
    """Return the imports of a module, at the top or inside functions."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.append(node.module or "")
            if node.module == "vitrail":
                names += [f"vitrail.{alias.name}" for alias in node.names]
    return names


def top(module: str) -> str:
    return module.removeprefix("vitrail.").partition(".")[0]


def test_layers_only_import_downwards() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, tree in modules().items()
        for target in imports(tree)
        if target.startswith("vitrail.") and top(target) != top(module) and LAYER[top(target)] >= LAYER[top(module)]
    ]
    assert wrong == []


def test_acceleration_has_no_import_cycles() -> None:
    """Not even through an import inside a function, which would only hide one."""
    names = {f"vitrail.{name}".removesuffix(".__init__"): tree for name, tree in modules().items()}
    graph: dict[str, set[str]] = {}
    for name, tree in names.items():
        if top(name) == "acceleration":
            graph[name] = {target for target in module_imports(tree, set(names)) if top(target) == "acceleration"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def module_imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules that a module imports, also as names of their package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def test_every_entry_has_a_layer() -> None:
    assert {top(module) for module in modules()} <= set(LAYER)


# What a command needs of the package besides its public names, and why.
CLI_EXCEPTIONS = {
    ("cli.app", "vitrail._version"): "the version, without importing anything else",
    ("cli.output", "vitrail.io"): "an error while writing to stdout becomes a message",
    ("cli.pretrain", "vitrail.training"): "a signal sets the exit code",
    ("cli.sweep", "vitrail.training"): "the grid of a sweep is parsed and printed",
    ("cli.train", "vitrail.training"): "a signal sets the exit code",
}


def runtime_imports(tree: ast.Module) -> list[str]:
    """Return the imports of a module, without those for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return imports(tree)


def test_commands_use_only_the_public_functions() -> None:
    """A command decodes its options, calls a function of `vitrail` and encodes the result (docs/decisions/0001)."""
    light = ("vitrail.cli", "vitrail.text", "vitrail.errors")
    used = {
        (module, ".".join(target.split(".")[:2]))
        for module, tree in modules().items()
        if top(module) == "cli"
        for target in runtime_imports(ast.parse(ast.unparse(tree)))
        if target.startswith("vitrail.") and not target.startswith(light)
    }
    assert {entry for entry in used if entry[1].removeprefix("vitrail.") not in vitrail.__all__} == set(CLI_EXCEPTIONS)


def test_models_import_only_torch_and_lower_layers() -> None:
    allowed = {"torch", "pydantic", "vitrail", *sys.stdlib_module_names}
    models = {name: tree for name, tree in modules().items() if top(name) == "models"}
    used = {name.partition(".")[0] for tree in models.values() for name in imports(tree)}
    assert used <= allowed


def test_peers_are_imported_by_tests_only() -> None:
    peers = {"lightly", "timm", "torchvision", "transformers", "vit_pytorch"}
    assert {n for tree in modules().values() for n in imports(tree)} & peers == set()


def test_user_errors_are_never_asserts() -> None:
    asserts = [name for name, tree in modules().items() if any(isinstance(n, ast.Assert) for n in ast.walk(tree))]
    assert asserts == []


def test_every_public_name_imports() -> None:
    assert vitrail.__all__ == sorted(vitrail.__all__)
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitrail.nothing


def test_every_function_and_result_of_the_api_is_public() -> None:
    assert set(vitrail.api.__all__) <= set(vitrail.__all__)
    for name in vitrail.api.__all__:
        assert getattr(vitrail, name) is getattr(vitrail.api, name)


# What the service needs of inference and explanations besides the public functions: a request as a value, computed for
# a batch of pixels in memory on a model that stays open.
SERVING_USES = {
    "vitrail.inference.features",
    "vitrail.inference.jobs",
    "vitrail.explanations.attention",
    "vitrail.explanations.explain",
    "vitrail.explanations.relevance",
    "vitrail.explanations.request",
}


def test_what_serving_uses_of_inference_and_explanations() -> None:
    used = {
        target
        for module, tree in modules().items()
        if top(module) == "serving"
        for target in imports(tree)
        if top(target) in ("inference", "explanations")
    }
    assert used <= SERVING_USES


@pytest.mark.parametrize("code", ["import vitrail", "import vitrail.cli.app", "import vitrail.models.config"])
def test_light_imports_stay_light(code: str) -> None:
    """`--help` and reading a config must not import torch, which takes seconds."""
    check = f"import sys; {code}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'PIL')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_no_import_needs_a_module_that_windows_lacks() -> None:
    names = [f"vitrail.{name}".removesuffix(".__init__") for name in modules() if "kernels" not in name]
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios")))
for name in {sorted(set(names) - {"vitrail.__main__"})}:
    importlib.import_module(name)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_is_the_newest_in_the_changelog() -> None:
    changelog = Path(__file__).parents[1] / "CHANGELOG.md"
    headings = [line for line in changelog.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## {vitrail.__version__}")


def test_tests_import_only_support_modules() -> None:
    """What two test files share is in `tests/support`, so that a test file can change without breaking another one."""
    wrong = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in re.findall(r"^ *(?:from|import) (tests\b\S*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if not f"{name}.".startswith(("tests.support.", "tests.golden."))
    ]
    assert wrong == []


def test_the_map_of_the_tests_is_complete() -> None:
    """`tests/README.md` names every folder and every support module."""
    folders = {path.parent.relative_to(TESTS).as_posix() + "/" for path in TESTS.rglob("*.py")} - {"./"}
    modules = {path.name for path in (TESTS / "support").glob("*.py")}
    named = set(re.findall(r"^\| `([^`]+)`", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert folders | modules <= named
    gone = {name for name in named if name.endswith("/")} - folders, {n for n in named if n.endswith(".py")} - modules
    assert gone == (set(), set())
