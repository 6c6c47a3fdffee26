"""The public functions that commands call: what they return, their progress, and their errors."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import PLAN, run_command
from tests.support.prediction_jobs import tiny_bundle, tiny_images

import vitrail


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a bundle, a folder `p` of images, and a folder `data` of two classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    tiny_bundle().save("bundle")
    tiny_images(Path("p"), 3)
    for label in ("cat", "dog"):
        tiny_images(Path("data", label), 10)
    return tmp_path


class Calls:
    """Records progress and plans."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.plans: list[str] = []

    def progress(self, stage: str, done: int, total: int | None) -> None:
        assert total is None or done <= total
        if stage not in self.stages:
            self.stages.append(stage)


def test_check(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = Calls()
    checked = vitrail.check(
        folder / "data", size=8, images_per_second=10, sheet="sheet.png", workers=0, on_progress=calls.progress
    )
    assert not set(calls.stages) - {"listing", "measuring", "decoding"}
    assert calls.stages[-1] == "decoding"
    assert checked.passed
    assert checked.summary.startswith("20 images in 2 classes; ")
    assert [bound.images_per_second for bound in checked.bounds] == [10]
    assert checked.sheet == Path("sheet.png")
    with Image.open("sheet.png") as sheet:
        assert sheet.format == "PNG"
    (folder / "data" / "cat" / "bad.png").write_text("no image")
    checked = vitrail.check("data", size=8, images_per_second=10, workers=0)
    assert not checked.passed
    done = run_command(monkeypatch, capsys, "check", "data", "--size", 8, "--json", "--workers", 0)
    printed, expected = json.loads(done.out), json.loads(json.dumps(checked.as_dict()))
    assert done.code == 2
    for measured in ("speed", "bounds"):
        assert printed.pop(measured)
        del expected[measured]
    assert printed == expected
    with pytest.raises(vitrail.ConfigError, match=r"the contact sheet 'sheet\.jpg' does not end with \.png"):
        vitrail.check("data", sheet="sheet.jpg")


def test_figures(folder: Path) -> None:
    calls = Calls()
    done = vitrail.figures(vitrail.load("bundle"), "p", out=folder / "all", device="cpu", on_progress=calls.progress)
    assert calls.stages == ["reading", "drawing"]
    assert [(figure.name, figure.path) for figure in done.figures] == [
        ("filters", folder / "all" / "filters.png"),
        ("positions", folder / "all" / "positions.png"),
        ("distance", folder / "all" / "distance.svg"),
        ("rollout", folder / "all" / "rollout.png"),
    ]
    assert done.figures[0].text in done.captions.read_text(encoding="utf-8")
    assert (done.left_out, done.bad) == ((), ())
    Path("p", "bad.png").write_text("no image")
    done = vitrail.figures("bundle", [Path("p")], only=["rollout"], out="one", device="cpu")
    assert [figure.name for figure in done.figures] == ["rollout"]
    assert done.bad == ("p/bad.png: it is not an image: the file starts with b'no image'",)
    assert vitrail.figures("bundle", out="two", device="cpu").left_out == ("distance", "rollout")
    with pytest.raises(vitrail.InputError, match="the figure 'distance' needs images"):
        vitrail.figures("bundle", only=["distance"])


def test_explain_files(folder: Path) -> None:
    Path("p", "bad.png").write_text("no image")
    Path("p", "notes.txt").write_text("not an image")
    calls = Calls()
    done = vitrail.explain_files(
        "bundle", "p", method="gradcam", target="dog", arrays=True, device="cpu", on_progress=calls.progress
    )
    assert calls.stages == ["explaining"]
    assert [file.name for file in done.files] == [f"p/0000{number}.png" for number in range(3)]
    single = vitrail.explain("bundle", "p/00000.png", method="gradcam", target="dog", device="cpu")
    assert (done.targeted, done.files[0].target) == (True, "dog")
    assert done.files[0].probability == pytest.approx(single.probability)
    assert done.files[0].array is not None
    np.testing.assert_array_equal(np.load(done.files[0].array), single.map)
    assert [text.partition(":")[0] for text in done.bad] == ["p/bad.png"]
    assert done.skipped == ("1 file was skipped: no image suffix (p/notes.txt)",)
    (folder / "empty").mkdir()
    with pytest.raises(vitrail.DataError, match="no images in empty"):
        vitrail.explain_files("bundle", "empty")


def test_evaluate_embed_and_bench_report_their_plan_and_progress(folder: Path) -> None:
    assert folder
    calls = Calls()
    reporting = {"on_progress": calls.progress, "on_plan": calls.plans.append}
    metrics = vitrail.evaluate("bundle", "data", split="all", workers=0, device="cpu", **reporting)
    assert metrics.images == 20
    assert calls.stages[-1] == "evaluating"
    done = vitrail.embed("bundle", "data", "x.npy", workers=0, device="cpu", **reporting)  # type: ignore[call-overload]
    features = vitrail.embed("bundle", "data", workers=0, device="cpu", **reporting)  # type: ignore[call-overload]
    assert done.shape == features.features.shape
    np.testing.assert_array_equal(np.load("x.npy"), features.features)
    assert calls.stages[-1] == "embedding"
    cells = vitrail.bench(
        "bundle",
        engines=["torch"],
        precisions=["float32"],
        batches=[1, 2],
        seconds=0.02,
        device="cpu",
        **reporting,
    )
    assert [cell.batch for cell in cells.cells] == [1, 2]
    assert (cells.device, cells.torch, cells.seconds) == ("cpu", torch.__version__, 0.02)
    assert calls.stages[-1] == "measuring"
    assert len(calls.plans) == 4
    assert all(PLAN.fullmatch(plan) for plan in calls.plans)


def test_overrides_open_a_file_that_does_not_say_everything(folder: Path) -> None:
    bundle = vitrail.load("bundle")
    torch.save(bundle.model.state_dict(), folder / "vit.pth")
    with pytest.raises(vitrail.CheckpointError, match="heads"):
        vitrail.predict("vit.pth", "p")
    known = {"heads": bundle.model.config.heads}
    rows = vitrail.predict("vit.pth", "p", overrides=known, device="cpu")
    assert len(rows) == 3
    with pytest.raises(vitrail.CheckpointError, match="overrides and keys apply to weight files only"):
        vitrail.evaluate(bundle, "data", overrides=known)


@pytest.mark.slow
def test_list_models() -> None:
    models = vitrail.list_models()
    assert len(models) == 19
    base = next(model for model in models if model.paper == "B/16")
    assert (base.name, base.cost.parameters) == ("vit_base_patch16_224", 86_567_656)
    assert base.config == vitrail.variant_config("B/16")


def test_serve_names_models_and_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = vitrail.ServeSettings(models=["runs/pets/best", Path("other.pth"), "mine=folder"], port=0)
    assert [(model.name, model.source) for model in settings.models] == [
        ("pets", "runs/pets/best"),
        ("other.pth", "other.pth"),
        ("mine", "folder"),
    ]
    assert vitrail.ServeSettings(models="runs/pets/best").models == settings.models[:1]
    with pytest.raises(vitrail.ConfigError, match="no model to serve"):
        vitrail.serve([])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        vitrail.ConfigError, match=r"not installed \(starlette, uvicorn, .*pip install 'vitrail\[serve\]'"
    ):
        vitrail.serve("bundle")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("train", {"evaluate_on": "tets"}, "evaluate_on is 'tets'; choose 'test' or 'val'"),
        ("check", {"size": "big"}, "size is 'big'; it should be the image size"),
        ("predict", {"images": "digits", "top": "3"}, "top is '3'; it should be a whole number"),
        ("figures", {"only": "filters"}, "only is 'filters'; pass a list of figures"),
        ("bench", {"precisions": "float32"}, "precisions is 'float32'; pass a list"),
    ],
)
def test_arguments_of_the_wrong_type(
    function: str, arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = "digits" if function in ("train", "check") else tiny_bundle()
    with pytest.raises(vitrail.ConfigError, match=message):
        getattr(vitrail, function)(first, **arguments)
