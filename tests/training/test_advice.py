"""Warnings before training on few photos."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.checkpoints.locate import parse
from vitrail.metrics.baselines import PRETRAINED
from vitrail.models.config import ViTConfig
from vitrail.tasks.lookup import CLASSIFICATION
from vitrail.training.defaults import FEW, before_training
from vitrail.training.plan import DataFacts
from vitrail.training.run_logger import gap_warning
from vitrail.training.sweep import sweep
from vitrail.training.train import train

TINY = ["model.width=16", "model.depth=1", "model.heads=1", "model.patch_size=16", "model.stem=conv", "steps=1"]


@pytest.mark.parametrize(
    ("images", "side", "fresh", "warns"),
    [(551, 300, True, True), (551, 300, False, False), (FEW, 300, True, False), (551, 28, True, False)],
)
def test_training_from_scratch_on_few_photos_warns(images: int, side: int, fresh: bool, warns: bool) -> None:
    result = before_training(DataFacts(images, ("cat", "dog"), side, grey=False), ViTConfig(), fresh=fresh)
    assert bool(result) == warns
    if warns:
        assert result[0].startswith("few photos: training from scratch on 551 images")
        assert f"--from {PRETRAINED}" in result[1]
        assert "hf download timm/vit_small_patch16_224.augreg_in21k --local-dir vit-small" in result[1]


def test_the_suggested_name_can_be_opened() -> None:
    result = parse(PRETRAINED)
    assert result is not None
    assert result.repository == "timm/vit_small_patch16_224.augreg_in21k"


def test_a_gap_between_training_and_validation_warns() -> None:
    steps = [{"step": step, "accuracy": step / 100} for step in range(1, 101)]
    for best, warned in ((50, False), (100, True)):
        validations = [
            {"step": 50, "val_top1": 0.45, "val_loss": 1.0, "best": 50},
            {"step": 100, "val_top1": 0.5, "val_loss": 1.0, "best": best},
        ]
        message = gap_warning([*steps, *validations], 100, CLASSIFICATION)
        assert bool(message) == warned, "what counts is the checkpoint that is kept"
    assert message[0].startswith("overfitting: 98.0% on the augmented training images, 50.0% on the 100 ")
    assert gap_warning(steps, 100, CLASSIFICATION) == []
    assert gap_warning(validations, 100, CLASSIFICATION) == []
    assert gap_warning([*steps, *validations], 4, CLASSIFICATION) == [], "two of four images may be chance"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sixteen images of noise, large enough to count as photos."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(
                tmp_path / "photos" / label / f"{number}.png"
            )
    return tmp_path / "photos"


@pytest.mark.slow
def test_a_sweep_prints_data_messages_once(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "dog" / "again.png").write_bytes((photos / "cat" / "0.png").read_bytes())
    done = sweep(
        photos, over={"optimizer.lr": [0.001, 0.002]}, changes=[*TINY, "data.test=0", "data.val=0.25"],
        folder=tmp_path / "sweep", device="cpu", workers=0,
    )  # fmt: skip
    shown = " ".join(capsys.readouterr().err.split())
    for text in ("WARNING: few photos", "WARNING: better: start from a pretrained", "again.png"):
        assert shown.count(text) <= 1, text
    assert "WARNING: few photos" in shown
    assert "again.png" in shown, "conflicting labels are reported once, too"
    for run in done.runs:
        log = (run.folder / "log.txt").read_text()
        assert log.count("WARNING: few photos") == 1, "the log of every run is complete"
        assert "again.png" in log


def test_a_run_warns_once_before_training(photos: Path, tmp_path: Path) -> None:
    changes = [*TINY, "data.test=0", "data.val=0.25"]
    run = train(photos, changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    lines = (run.folder / "log.txt").read_text().splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith("WARNING: few photos")]
    assert len(places) == 1
    assert "; always 'cat' gives 50.0%, chance 50.0%; " in run.summary
    assert "; evaluated on the validation split; selected on these images; " in run.summary
    assert [f"WARNING: {text}" for text in run.metrics.warnings] == [
        line for line in lines[places[0] + 2 :] if line.startswith("WARNING: ")
    ]
    assert run.metrics.warnings, "four images say nothing about a model of noise"
    assert lines[places[0] + 1].startswith("WARNING: better: start from a pretrained model")
    assert places[0] < next(place for place, line in enumerate(lines) if line.startswith("step 1: "))
    tuned = train(
        photos, pretrained=run.bundle, changes=["steps=1"], folder=tmp_path / "tuned", device="cpu", workers=0,
        quiet=True,
    )  # fmt: skip
    assert "few photos" not in (tuned.folder / "log.txt").read_text()
