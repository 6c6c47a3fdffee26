"""The studies: every sweep is valid, every script runs, and every page has the numbers of its results."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from vitrail.data.sources.splits import subset_indices
from vitrail.models.stages import cost
from vitrail.models.stems import patchify
from vitrail.training.candidates import Candidate, CandidateFile, CandidateRecipes, read_candidates

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.parent.name for path in ROOT.glob("studies/*/README.md"))
SWEEPS = sorted(path.relative_to(ROOT / "studies").as_posix() for path in ROOT.glob("studies/*/*.toml"))
sys.path.insert(0, str(ROOT))
from studies import draw, tables  # noqa: E402
from studies.positions import shuffled  # noqa: E402
from studies.resolution import run as resolution  # noqa: E402

TINY = ["steps=2", "batch=32", "evaluations=1", "model.width=16", "model.depth=1", "model.heads=1", "model.stem=conv",
        "model.patch_size=2"]  # fmt: skip


def test_every_study_is_drawn_and_described() -> None:
    assert set(draw.STUDIES_BY_NAME) == set(NAMES)
    listed = (ROOT / "studies" / "README.md").read_text()
    for name in NAMES:
        assert f"({name}/README.md)" in listed
        assert (ROOT / "studies" / name / "README.md").exists()


@pytest.mark.parametrize("name", SWEEPS)
def test_the_candidates_of_a_study_are_valid(name: str) -> None:
    """Also their models, which a recipe checks only when it meets the data."""
    file = read_candidates(ROOT / "studies" / name)
    for candidate in file.candidates:
        vitrail.create(model_of(file, candidate))
    assert file.seeds == ([0] if name == "pretraining/long.toml" else [0, 1, 2])


def model_of(file: CandidateFile, candidate: Candidate) -> vitrail.ViTConfig:
    recipe = CandidateRecipes(file, file.recipe or "", ()).recipe(candidate, candidate.combinations()[0])
    return vitrail.ViTConfig.from_json(json.dumps({**recipe.model, "classes": 202}))


@pytest.mark.slow
def test_the_models_of_the_data_study_cost_alike() -> None:
    file = read_candidates(ROOT / "studies" / "data-size" / "sweep.toml")
    costs = [cost(model_of(file, candidate)).flops for candidate in file.candidates]
    assert max(costs) / min(costs) < 1.03


def test_the_candidates_of_a_model_differ_only_in_their_images() -> None:
    file = read_candidates(ROOT / "studies" / "data-size" / "sweep.toml")
    models: dict[str, list[dict[str, object]]] = {}
    for candidate in file.candidates:
        other = {key: value for key, value in candidate.settings.items() if key != "data.fraction"}
        models.setdefault(candidate.name.rpartition("-")[0], []).append({**other, "over": candidate.over})
    assert {name: len(same) for name, same in models.items()} == {"vit": 5, "vit-conv": 5, "resnet": 5}
    assert all(settings == same[0] for same in models.values() for settings in same)


def test_the_page_on_data_size_has_the_sizes_of_the_subsets() -> None:
    labels = np.repeat(np.arange(draw.TINY_CLASSES), draw.TINY_PER_CLASS)
    for percent in (1, 3, 10, 30, 100):
        images = subset_indices(labels, seed=0, fraction=percent / 100)
        assert draw.subset_size(percent / 100) == len(images)


def test_the_intervals_in_the_results_are_those_of_a_page() -> None:
    section = (ROOT / "docs" / "results.md").read_text().partition("### Studies")[2].partition("\n### ")[0]
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "studies").glob("*.md"))
    intervals = re.findall(r"[\d.]+ \([\d.]+–[\d.]+\)", section)
    assert len(intervals) > 10
    assert [text for text in intervals if text not in pages] == []


def test_every_page_has_the_numbers_of_its_results() -> None:
    for name in draw.finished():
        for path, content in draw.outputs(name).items():
            assert path.read_text(encoding="utf-8") == content, f"run python studies/draw.py {name}"


def test_no_page_without_results() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "studies").glob("*.md")} - {"index", "inductive-bias"}
    assert pages == set(draw.finished())


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sweep of two candidates on the digits."""
    folder = tmp_path_factory.mktemp("study") / "sweep"
    candidates = {
        "seeds": [0, 1],
        "candidate": {"learned": {"model.position": "learned_1d"}, "sincos": {"model.position": "sincos_2d"}},
    }
    vitrail.sweep(
        "digits", candidates=candidates, changes=TINY, folder=folder, device="cpu", workers=0, quiet=True
    )  # fmt: skip
    return folder


def test_shuffled_patches(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shuffled.py", str(sweep), "digits", "--device", "cpu"])
    shuffled.main()
    results = json.loads((sweep / "shuffled.json").read_text())
    assert {name: len(values) for name, values in results.items()} == {"learned": 2, "sincos": 2}


def test_shuffling_keeps_every_patch() -> None:
    seen: list[torch.Tensor] = []

    class Look(vitrail.ViT):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return super().forward(x)

    model = Look(vitrail.ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, classes=2))
    images = torch.arange(2 * 3 * 64).reshape(2, 3, 8, 8).float()
    shuffled.Shuffled(model)(images)
    assert not torch.equal(seen[0], images)
    for image, other in zip(images, seen[0], strict=True):
        patches, others = (
            {tuple(patch) for patch in patchify(one[None], (4, 4))[0].tolist()} for one in (image, other)
        )
        assert patches == others


@pytest.mark.slow
def test_other_resolutions(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "SIZES", (8, 12))
    changes = ("compile=false", "data.on_device=false", "steps=1", "batch=32")
    trials = resolution.trials(sweep, Path("digits"), "cpu", changes)
    assert len(trials) == 2 * (5 + 5) + 2 * 2
    row = resolution.measure(next(one for one in trials if one.size == 12 and one.method == "google"))
    assert (row["candidate"], row["size"], row["method"]) == ("learned", 12, "google")
    assert 0 <= row["before"] <= 1
    assert 0 <= row["after"] <= 1


def test_numbers_are_formatted_with_their_interval() -> None:
    assert tables.estimate([0.5]) == "50.0 (one seed)"
    assert tables.estimate([0.70, 0.72, 0.71]) == "71.0 (68.5–73.5)"
    assert tables.table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    assert draw.filled("<!-- drawn: table -->\nold\n<!-- end -->", {"table": "new\n"}) == (
        "<!-- drawn: table -->\nnew\n<!-- end -->"
    )


def test_learning_rates_at_the_edge_are_marked() -> None:
    candidate = {"values": {"optimizer.lr": 0.001}, "at_edge": ["optimizer.lr"]}
    assert tables.learning_rate(candidate) == "0.001 (edge)"
    assert tables.learning_rate({**candidate, "at_edge": []}) == "0.001"
    assert np.isclose(
        draw.accuracy_at({"tried": [{"values": {"optimizer.lr": 0.1}, "metrics": {"val_top1": 0.3}}]}, 0.1), 0.3
    )
