"""curves.png: it shows the numbers of the metrics file, and no text overlaps."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail.training.curves as curves_module
from vitrail.training.curves import VAL, Curve, curve, curves_figure, draw_curves, headlines
from vitrail.training.objectives import loss_note
from vitrail.training.run_folder import MetricsFile
from vitrail.training.train import train


def metrics_file(steps: int, every: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a run that learns, validated every few steps."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        part = step / steps
        rows.append(
            {
                "step": step,
                "epoch": step / 10,
                "loss": 2.3 * math.exp(-3 * part) + 0.05 * float(rng.random()),
                "accuracy": 1 - 0.9 * math.exp(-4 * part),
                "lr": 1e-3 * (1 - part),
                "gradient_norm": 1 + float(rng.random()),
            }
        )
        if every and step % every == 0:
            best = min(step, steps - every)  # the last validation is not the best one
            top1 = 0.95 * part if step <= best else 0.5
            rows.append({"step": step, "val_top1": top1, "val_loss": 2 - part, "best": best})
    return rows


CASES = {
    "one row": metrics_file(1),
    "one measurement": metrics_file(1, 1),
    "not yet validated": metrics_file(40),
    "a run": metrics_file(300, 25),
    "a long run": [{**row, "step": 1000 * row["step"]} for row in metrics_file(400, 5)],
    "only validated": [row for row in metrics_file(50, 10) if "val_top1" in row],
    "not finite": [*metrics_file(30, 10), {"step": 31, "loss": math.nan, "val_loss": math.inf}],
    "always the same": [{"step": step, "loss": 0.0, "lr": 0.0, "gradient_norm": 0.0} for step in (1, 2, 3)],
}


EVERYTHING = {
    "objective": {"label_smoothing": 0.1, "class_weights": "balanced"},
    "mixing": {"mixup": 0.2, "cutmix": 1.0, "chance": 0.5},
}
RECIPES: list[dict[str, Any]] = [{}, EVERYTHING, {"objective": {"loss": "sigmoid"}}]


@pytest.mark.parametrize("recipe", RECIPES, ids=["plain", "everything", "sigmoid"])
@pytest.mark.parametrize("case", CASES)
def test_no_text_overlaps_or_leaves_the_image(case: str, recipe: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = curves_figure(CASES[case], "digits-1a2b3c", loss_note(recipe))
    FigureCanvasAgg(figure).draw()
    page = figure.bbox
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    # The panels of a column share their x axis, which is labelled below the lower one only.
    boxes = {text: text.get_window_extent() for text in texts if text.get_window_extent().width}
    shown = {text: box for text, box in boxes.items() if _drawn(figure, text)}
    assert len(shown) > 15
    for text, box in shown.items():
        assert page.x0 <= box.x0 < box.x1 <= page.x1, text
        assert page.y0 <= box.y0 < box.y1 <= page.y1, text
    for (one, box), (other, there) in itertools.combinations(shown.items(), 2):
        assert not box.overlaps(there), (one, other)


def _drawn(figure: Any, text: Any) -> bool:
    """Ticks outside an axis keep a label that is not drawn."""
    for panel in figure.axes:
        for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
            for tick in axis.get_major_ticks():
                if text in (tick.label1, tick.label2):
                    return bool(low <= tick.get_loc() <= high) and text.get_visible()
    return True


def test_the_file(tmp_path: Path) -> None:
    draw_curves(CASES["not yet validated"], tmp_path / "curves.png")
    before = _pixels_of(tmp_path / "curves.png", VAL)
    draw_curves(CASES["a run"], tmp_path / "curves.png")
    assert (before, _pixels_of(tmp_path / "curves.png", VAL) > 1000) == (0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    draw_curves([], tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


def _pixels_of(path: Path, colour: str) -> int:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    return int((pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).sum())


def test_the_figure_describes_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    real = curves_module.curves_figure

    def seen(*arguments: Any) -> Any:
        figure = real(*arguments)
        drawn.append(figure.axes[0].get_title(loc="right"))
        return figure

    monkeypatch.setattr(curves_module, "curves_figure", seen)
    tiny = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=4", "steps=2", "evaluations=1"]
    changes = [*tiny, "objective.label_smoothing=0.1", "mixing.mixup=0.2"]
    train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    assert drawn[-1].startswith("training: with label smoothing (0.1), mixup\nvalidation: without, ")
    assert loss_note({"objective": {"label_smoothing": 0.0}})[0] == "training: augmented images"
    assert loss_note(EVERYTHING) == (
        "training: with label smoothing (0.1), mixup, CutMix, class weights",
        "validation: without, so the two are not comparable",
    )
    assert "mixup" not in loss_note({"mixing": {"mixup": 0.2, "chance": 0}})[0]


def test_the_headline_has_the_best_and_the_last_numbers() -> None:
    head, below = headlines(CASES["a run"], "digits-1a2b3c")
    assert head == "Validation accuracy 87.1%, step 275 of 300 kept"
    assert below.startswith("digits-1a2b3c   ·   30.0 epochs   ·   training loss 0.1")
    assert below.endswith("validation loss 1.000 at the end")
    assert headlines(metrics_file(1), "a")[0] == "Step 1, not yet validated"


def test_smoothing_does_not_lag() -> None:
    steps = np.arange(1.0, 401.0)
    straight = Curve(steps, 5 - steps / 100)
    half = 400 // 40
    np.testing.assert_allclose(straight.smooth().values[half:-half], straight.values[half:-half])
    wild = np.random.default_rng(0).random(400)
    expected = [wild[max(0, i - half) : i + half + 1].mean() for i in range(400)]
    np.testing.assert_allclose(Curve(steps, wild).smooth().values, expected)


def test_a_truncated_metrics_file_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert len(curve(MetricsFile.read(tmp_path), "loss")) == 1
    draw_curves(MetricsFile.read(tmp_path), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
