"""The file of named candidates: what it may say, and the sentence for everything else."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run_command

import vitrail
from vitrail.errors import ConfigError
from vitrail.training.candidates import CandidateRecipes, read_candidates

FILE = """
recipe = "plain-baseline"
seeds = [0, 1]

[set]
steps = 5
"optimizer.weight_decay" = 0.1
[set.model]
width = 16
depth = 1
heads = 1

[over]
"optimizer.lr" = [0.01, 0.1]
"optimizer.max_grad_norm" = ["none", 1.0]

[candidate.cls]
"model.pool" = "cls"

[candidate.mean]
model.pool = "mean"
model.class_token = "none"
optimizer.max_grad_norm = 2.0

[candidate.mean.over]
optimizer.lr = [0.03]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "pooling.toml"
    path.write_text(text)
    return path


def test_settings_and_grids_of_a_file(tmp_path: Path) -> None:
    file = read_candidates(written(tmp_path, FILE))
    assert (file.recipe, file.seeds) == ("plain-baseline", [0, 1])
    assert file.settings == {
        "steps": 5, "optimizer.weight_decay": 0.1, "model.width": 16, "model.depth": 1, "model.heads": 1,
    }  # fmt: skip
    cls, mean = file.candidates
    assert cls.over == {"optimizer.lr": [0.01, 0.1], "optimizer.max_grad_norm": [None, 1.0]}
    assert len(cls.combinations()) == 4
    assert mean.settings == {"model.pool": "mean", "model.class_token": None, "optimizer.max_grad_norm": 2.0}
    assert mean.combinations() == [{"optimizer.lr": 0.03}]
    recipes = CandidateRecipes(file, "scratch-small", ["steps=7"])
    recipe = recipes.recipe(mean, {"optimizer.lr": 0.03, "seed": 1})
    assert (recipe.steps, recipe.seed, recipe.optimizer.lr, recipe.model["class_token"]) == (7, 1, 0.03, "none")


def test_the_last_length_counts(tmp_path: Path) -> None:
    """`steps` in [set] replaces the epochs of the recipe, `--set epochs` both; a contradiction in one table is one."""
    file = read_candidates(written(tmp_path, FILE))
    for changes, length in (((), (5, None)), (("epochs=2",), (None, 2)), (("steps=none", "epochs=3"), (None, 3))):
        recipe = CandidateRecipes(file, "plain-baseline", changes).recipe(file.candidates[0], {})
        assert (recipe.steps, recipe.epochs) == length
    both = read_candidates({"set": {"steps": 1, "epochs": 1}, "candidate": {"a": {}}})
    with pytest.raises(ConfigError, match=r"\[set\]: epochs is 1 and steps is 1"):
        CandidateRecipes(both, "plain-baseline", ()).recipe(both.candidates[0], {})


def test_a_mapping_says_the_same_as_a_file(tmp_path: Path) -> None:
    content = {"seeds": (0, 1), "candidate": {"a": {"model.pool": "mean", "over": {"optimizer": {"lr": (0.1, 0.2)}}}}}
    file = read_candidates(content)
    assert (file.seeds, file.candidates[0].over) == ([0, 1], {"optimizer.lr": [0.1, 0.2]})


def test_a_recipe_is_relative_to_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'recipe = "mine.toml"\n[candidate.a]\n')
    assert read_candidates(path).recipe == tmp_path / "mine.toml"


A = "[candidate.a]\n"
BAD: dict[str, tuple[str, str]] = {
    "no TOML": ("seeds = [0", "pooling.toml is not TOML ("),
    "no candidates": ("seeds = [0]", "pooling.toml has no candidates; add a table such as [candidate.baseline]"),
    "empty candidates": ("candidate = {}", "pooling.toml has no candidates"),
    "unknown key": ("sed = [0]\n" + A, "pooling.toml has an unknown key 'sed'; did you mean 'seeds' or 'set'?"),
    "unknown table": ("[candidates.a]\n" + A, "has an unknown key 'candidates'; did you mean 'candidate'?"),
    "twice the same name": (A + A, "pooling.toml is not TOML ("),
    "the same folder": (A + "[candidate.A]", "[candidate.A]: another candidate has this name in other letters"),
    "no folder": ('[candidate."a/b"]', "[candidate.a/b]: the name 'a/b' cannot be a folder"),
    "hidden folder": ('[candidate.".a"]', "cannot be a folder"),
    "no table": ("[candidate]\na = 3", "[candidate.a]: it is 3; write a table of settings"),
    "no seeds": ("seeds = []\n" + A, "seeds is []; write different integers from 0 on, such as seeds = [0, 1, 2]"),
    "one seed": ("seeds = 3\n" + A, "seeds is 3; write different integers"),
    "seeds of text": ('seeds = ["a"]\n' + A, "seeds is ['a']; write different integers"),
    "seeds that are not whole": ("seeds = [1.5]\n" + A, "seeds is [1.5]"),
    "equal seeds": ("seeds = [1, 1]\n" + A, "seeds is [1, 1]"),
    "seed in set": ("[set]\nseed = 1\n" + A, "[set]: the seed is the same for all candidates; write seeds = [0, 1, 2]"),
    "seed in a grid": ("[over]\nseed = [1, 2]\n" + A, "[over]: the seed is the same for all candidates"),
    "typo in set": ("[set]\nstep = 3\n" + A, "[set]: a recipe has no option 'step'; did you mean 'steps'"),
    "typo": (A + '"model.pol" = "cls"', "[candidate.a]: a recipe has no option 'model.pol'; did you mean 'model.pool'"),
    "nested typo": (A + "[candidate.a.optimizer]\nlrr = 1", "no option 'optimizer.lrr'; did you mean 'optimizer.lr'"),
    "deep typo": (A + "augmentation.randaugment.layer = 1", "[candidate.a]: "),
    "short name": (A + "lr = 0.1", "[candidate.a]: a recipe has no option 'lr'; did you mean 'optimizer.lr'?"),
    "typo in a grid": (A + '[candidate.a.over]\n"optimizer.lrr" = [1]', "[candidate.a.over]: a recipe has no option"),
    "no list": (A + '[candidate.a.over]\n"optimizer.lr" = 1', "[candidate.a.over]: optimizer.lr is 1; write a list"),
    "empty list": (
        '[over]\n"optimizer.lr" = []\n' + A,
        "[over]: optimizer.lr is []; write a list with at least one value",
    ),
    "a value twice": (
        '[over]\n"optimizer.lr" = [0.1, 0.1]\n' + A,
        "optimizer.lr is [0.1, 0.1]; write different values",
    ),
    "set and swept": (
        '[set]\n"optimizer.lr" = 1\n[over]\n"optimizer.lr" = [1]\n' + A,
        "[over]: optimizer.lr has several values, but [set] sets optimizer.lr; leave one of them out",
    ),
    "set and swept by a candidate": (
        '[set]\n"optimizer.lr" = 1\n' + A + '[candidate.a.over]\n"optimizer.lr" = [1]\n',
        "[candidate.a.over]: optimizer.lr has several values, but [set] sets optimizer.lr",
    ),
    "set and swept by itself": (
        A + '"optimizer.lr" = 1\n[candidate.a.over]\n"optimizer.lr" = [1]\n',
        "[candidate.a]: optimizer.lr is set, but its grid contains optimizer.lr; leave one of them out",
    ),
    "set twice": ('[set]\n"model.width" = 1\nmodel.width = 2\n' + A, "[set]: model.width is set twice"),
    "overlap": ('[set]\nmixing = "none"\n"mixing.mixup" = 0.1\n' + A, "[set]: mixing and mixing.mixup overlap"),
    "other images": (A + "data.val = 0.2", "[candidate.a]: a sweep over data.val would evaluate its runs on different"),
    "other test images": ('[over]\n"data.test" = [0.1]\n' + A, "[over]: a sweep over data.test would evaluate"),
    "other criterion": (A + 'criterion = "loss"', "[candidate.a]: a sweep compares its runs by one criterion"),
    "recipe is a number": ("recipe = 3\n" + A, "recipe is 3; write the name of a recipe or the path of a file"),
    "unknown recipe": ('recipe = "cifar"\n' + A, "unknown recipe 'cifar'"),
    "missing recipe": ('recipe = "mine.toml"\n' + A, "mine.toml does not exist"),
    "value": (A + '"optimizer.lr" = "fast"', "[candidate.a]: optimizer.lr is 'fast'"),
    "value in set": ('[set]\n"optimizer.lr" = "fast"\n' + A, "[set]: optimizer.lr is 'fast'"),
    "value in a grid": ('[over]\n"optimizer.lr" = [0.1, "fast"]\n' + A, "[candidate.a.over]: optimizer.lr is 'fast'"),
    "model": (A + "model.width = 16\nmodel.heads = 3", "[candidate.a]: "),
    "parameters": (A + 'freeze = ["blokcs.*"]', "[candidate.a]: no parameter matches 'blokcs.*'"),
    "the same candidates": (A + "[candidate.b]", "[candidate.b]: its runs are those of candidate 'a'; remove one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD[case]
    path = written(tmp_path, text)
    shown = run_command(monkeypatch, capsys, "train", "digits", "--sweep", path, "--run", tmp_path / "run")
    assert shown.code == 2
    assert message in shown.err
    assert "pooling.toml" in shown.err or "recipe" in case
    assert shown.err.startswith("vitrail: ")
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "FILE", "--sweep", "optimizer.lr=1,2"], "it cannot be combined with another --sweep"),
        (["--sweep", "FILE", "--recipe", "augreg"], "names the recipe plain-baseline, and --recipe another"),
        (["--sweep", "FILE", "--only", "clss"], "has no candidate 'clss'; did you mean 'cls'?"),
        (["--sweep", "FILE", "--only", "x"], "has no candidate 'x'; choose from cls, mean"),
        (["--sweep", "FILE", "--set", "model.pool=mean"], "[candidate.cls]: model.pool is set, but --set sets model.p"),
        (["--sweep", "FILE", "--set", "optimizer.lr=1"], "[candidate.cls]: optimizer.lr is set, but --set sets"),
        (["--sweep", "FILE", "--set", "seed=1"], "sets seeds, and --set the seed; leave one of them out"),
        (["--sweep", "FILE", "--set", "seed"], "'seed' is not a change"),
        (["--sweep", "FILE", "--set", "stepps=1"], "stepps"),
        (["--sweep", "FILE", "--set", "data.val=0.0"], "a sweep selects on the validation split"),
        (["--sweep", "nowhere.toml"], "the candidates nowhere.toml cannot be read: No such file or directory"),
        (["--only", "cls"], "--only belongs to a sweep; add --sweep"),
        (["--jobs", "2"], "--jobs belongs to a sweep; add --sweep"),
        (["--sweep", "seed=1,2", "--only", "cls"], "--only selects candidates of a file"),
    ],
)
def test_bad_options(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, FILE)
    options = [str(path) if word == "FILE" else word for word in words]
    shown = run_command(monkeypatch, capsys, "train", "digits", "--run", tmp_path / "run", *options)
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert message in shown.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either values to try \\(over\\) or candidates"),
        ({"over": {"seed": [0]}, "candidates": {"candidate": {"a": {}}}}, "either values to try"),
        ({"over": {"seed": [0]}, "only": ["a"]}, "only selects candidates of a file"),
        ({"over": {"seed": [0]}, "jobs": 0}, "jobs is 0; pass a number of runs, at least 1"),
        ({"candidates": {"candidate": {"a": {}}}, "only": "a"}, "only is 'a'; pass a list of names"),
        ({"candidates": {"candidate": {"a": {"model": object()}}}}, "use plain dicts, lists and numbers"),
        ({"candidates": {"candidate": {"a": {"lr": 1}}}}, "the candidates, \\[candidate.a\\]: a recipe has no option"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        vitrail.sweep("digits", folder=tmp_path / "run", **arguments)
