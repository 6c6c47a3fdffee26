"""Training on masks: learned, resumed, fine-tuned in both directions, evaluated, explained, exported, swept."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.mask_data import SHAPES, write_shapes
from torch import Tensor, nn

import vitrail
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.tasks.segmentation import MaskPrediction
from vitrail.tasks.segmentation_metrics import SegmentationMetrics
from vitrail.training.sessions import Stopped
from vitrail.training.train import Run

QUICK = ["model.patch_size=4", "model.stem=conv", "model.width=32", "model.depth=2", "model.heads=2", "batch=12",
         "evaluations=2", "precision=float32"]  # fmt: skip


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def trained(data: Path | str, folder: Path, *changes: str, **settings: Any) -> Run:
    return vitrail.train(
        data, changes=[*QUICK, *changes], folder=folder, device="cpu", workers=0, quiet=True, **settings
    )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes") / "data", 60, 24)


@pytest.fixture(scope="module")
def run(shapes: Path) -> Run:
    return trained(shapes, shapes.parent / "run", "epochs=6")


def test_it_says_what_it_learned(run: Run) -> None:
    assert isinstance(run.metrics, SegmentationMetrics)
    assert (run.bundle.task, run.bundle.classes) == ("segmentation", SHAPES)
    defaults = {default.field: default.value for default in run.defaults}
    assert defaults["task"] == "segmentation"
    assert defaults["model.pool"] == "patches"
    assert run.bundle.preprocess.resize == "squash"
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {"val_mean_iou", "val_pixel_accuracy", "val_loss"} <= rows[-1].keys()
    assert "mean IoU" in (run.folder / "best" / "README.md").read_text()
    assert run.report is not None
    assert (run.folder / "test_predictions.parquet").exists()


@pytest.mark.slow
def test_shapes_are_learned(tmp_path: Path) -> None:
    made = trained(write_shapes(tmp_path / "data", 200, 24), tmp_path / "run", "epochs=30", "model.width=48")
    assert isinstance(made.metrics, SegmentationMetrics)
    assert made.metrics.mean_iou > 0.7 > 2 * made.metrics.largest_class


def test_evaluation_gives_the_numbers_of_the_run(run: Run, shapes: Path) -> None:
    again = vitrail.evaluate(run.folder / "best", str(shapes), device="cpu", workers=0, precision="float32")
    assert isinstance(again, SegmentationMetrics)
    assert isinstance(run.metrics, SegmentationMetrics)
    assert again.mean_iou == pytest.approx(run.metrics.mean_iou, rel=1e-5)
    assert again.loss == pytest.approx(run.metrics.loss, rel=1e-5)
    assert "evaluated on the test split" in again.summary


def test_a_stopped_run_resumes_exactly(run: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.training import supervised

    made, steps = supervised.Supervised.loss, []

    def stop_in_sixth_step(self: Any, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        steps.append(1)
        if len(steps) == 6:
            signal.raise_signal(signal.SIGTERM)
        return made(self, outputs, batch)

    monkeypatch.setattr(supervised.Supervised, "loss", stop_in_sixth_step)
    with pytest.raises(Stopped):
        trained(shapes, tmp_path / "run", "epochs=6")
    monkeypatch.undo()
    resumed = trained(shapes, tmp_path / "run", "epochs=6")
    assert_same_weights(run.bundle.model, resumed.bundle.model)
    assert resumed.metrics.as_dict() == run.metrics.as_dict()


@pytest.mark.slow
def test_worker_processes_change_nothing(run: Run, shapes: Path, tmp_path: Path) -> None:
    other = vitrail.train(
        shapes, changes=[*QUICK, "epochs=6"], folder=tmp_path / "run", device="cpu", workers=1, quiet=True
    )
    assert_same_weights(run.bundle.model, other.bundle.model)


# ── other models ──


def classifier(**options: Any) -> vitrail.Bundle:
    config = vitrail.ViTConfig(image_size=24, patch_size=4, width=32, depth=2, heads=2, classes=5, **options)
    return vitrail.Bundle(vitrail.ViT(config), vitrail.Preprocess(size=24, resize="cover"), tuple("abcde"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"pool": "map", "class_token": "none"}, marks=pytest.mark.slow),
        pytest.param({"representation": 16}, marks=pytest.mark.slow),
    ],
)
def test_a_classifier_becomes_a_segmenter(options: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    start = classifier(**options)
    before = {name: tensor.clone() for name, tensor in start.model.state_dict().items()}
    fields = ["steps=1", "batch=12", "evaluations=1", "optimizer.lr=1e-9", "optimizer.kind=sgd", "precision=float32"]
    made = vitrail.train(
        shapes, pretrained=start, changes=fields, folder=tmp_path / "run", device="cpu", workers=0, quiet=True
    )
    after = made.bundle.model.state_dict()
    assert made.bundle.model.config.pool == "patches"
    assert made.bundle.preprocess.resize == "squash"
    assert after["head.weight"].shape[0] == 3
    for name, tensor in before.items():
        if not name.startswith(("head.", "attn_pool.")):
            assert torch.allclose(after[name], tensor, atol=1e-6), name


@pytest.mark.slow
def test_a_segmenter_becomes_a_classifier(run: Run, tmp_path: Path) -> None:
    changes = ["steps=1", "batch=16", "evaluations=1", "model.image_size=24", "precision=float32"]
    made = vitrail.train(
        "digits", pretrained=run.bundle, changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True
    )
    assert (made.bundle.task, made.bundle.model.config.pool) == ("classification", "mean")


def test_several_layers_and_a_new_head(run: Run, shapes: Path, tmp_path: Path) -> None:
    made = trained(shapes, tmp_path / "run", "steps=1", "model.head_layers=[0,1]")
    assert made.bundle.model.config.pooled_width == 64
    other = vitrail.train(
        shapes, pretrained=run.bundle, changes=["steps=1", "batch=12", "model.head_layers=[0,1]"],
        folder=tmp_path / "other", device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    assert other.bundle.model.config.head_layers == (0, 1)
    kept = vitrail.train(
        shapes, pretrained=run.bundle, changes=["steps=1", "batch=12"], folder=tmp_path / "kept", device="cpu",
        workers=0, quiet=True,
    )  # fmt: skip
    assert "fresh head" not in str(kept.bundle.provenance)


@pytest.mark.slow
def test_pretraining_uses_the_images_only(shapes: Path, tmp_path: Path) -> None:
    changes = ["steps=2", "batch=8", "evaluations=1", "compile=false", "model.width=32", "model.depth=2",
               "model.heads=2", "model.patch_size=4"]  # fmt: skip
    made = vitrail.pretrain(
        shapes, method="mae", changes=changes, folder=tmp_path / "mae", device="cpu", workers=0, quiet=True
    )
    fields = ["steps=1", "batch=12"]
    tuned = vitrail.train(
        shapes, pretrained=made.bundle, changes=fields, folder=tmp_path / "run", device="cpu", workers=0, quiet=True
    )
    assert tuned.bundle.task == "segmentation"


# ── what is done with a model ──


def test_predictions_are_masks(run: Run, shapes: Path, tmp_path: Path) -> None:
    (made,) = vitrail.predict(run.bundle, [shapes / "images" / "0000.png"], device="cpu")
    assert isinstance(made, MaskPrediction)
    assert set(made.classes) <= set(SHAPES)
    assert sum(made.fractions) == pytest.approx(1, abs=1e-3)
    assert made.mask(24, 24).shape == (24, 24)
    for suffix in ("jsonl", "csv", "parquet", "txt"):
        done = vitrail.predict(
            run.folder / "best", [str(shapes / "images")], output=tmp_path / f"rows.{suffix}", device="cpu"
        )
        assert (done.images, done.bad) == (60, 0)
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert first.keys() == {"number", "path", "error", "classes", "fractions", "mask"}


@pytest.mark.slow
def test_exports_give_the_same_logits(run: Run, tmp_path: Path) -> None:
    for form, suffix in (("onnx", "onnx"), ("torch", "pt2"), ("openvino", "xml")):
        done = vitrail.export(run.folder / "best", tmp_path / f"model.{suffix}", to=form)
        assert done.check.passed
        assert done.metadata["task"] == "segmentation"
        assert "bilinear upsampling" in done.metadata["activation"]
        assert done.metadata["classes"] == list(SHAPES)


def test_a_patch_is_explained(run: Run, shapes: Path) -> None:
    image = shapes / "images" / "0000.png"
    map = vitrail.explain(run.folder / "best", image, query="2,3", target="disc", device="cpu")
    assert map.target == "disc"
    assert map.probability is not None
    with pytest.raises(vitrail.InputError, match="choose one with query: a patch as 'row,column'"):
        vitrail.explain(run.folder / "best", image, device="cpu")


@pytest.mark.slow
def test_a_sweep_compares_by_mean_iou(shapes: Path, tmp_path: Path) -> None:
    swept = vitrail.sweep(
        shapes, over={"optimizer.lr": [0.001, 0.01]}, changes=[*QUICK, "steps=2", "evaluations=1"],
        folder=tmp_path / "sweep", device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    assert swept.task.name == "segmentation"
    assert swept.criterion == "mean_iou"


# ── bad input ──


def test_settings_that_do_not_fit(shapes: Path, run: Run, tmp_path: Path) -> None:
    for change, words in {
        "preprocess.resize='cover'": "every pixel of an image needs a class; leave them out",
        "model.pool='mean'": "the task segmentation needs logits per patch, but the model has pool = 'mean'",
        "criterion='accuracy'": "criterion is 'accuracy'; choose from mean_iou, pixel_accuracy, loss",
        "mixing.mixup=0.2": "mixing is on, but the task segmentation does not support it; leave it out",
        "objective.loss='sigmoid'": "objective.loss is sigmoid, but the task segmentation does not support it",
    }.items():
        with pytest.raises(ConfigError, match=words):
            trained(shapes, tmp_path / "run", "task=segmentation", "steps=1", change)
    with pytest.raises(ConfigError, match="the task segmentation cannot learn from a teacher"):
        trained(shapes, tmp_path / "run", "steps=1", teacher=classifier())
    assert not list(tmp_path.iterdir())


def test_other_data_and_other_models(run: Run, shapes: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model's task is segmentation, not classification"):
        vitrail.Classifier(run.folder / "best", device="cpu")
    with pytest.raises(DataError):
        vitrail.evaluate(run.folder / "best", "digits", device="cpu", workers=0)
    with pytest.raises(DataError):
        vitrail.evaluate(classifier(), str(shapes), device="cpu", workers=0)
    with pytest.raises(DataError):
        trained("digits", tmp_path / "run", "task=segmentation", "steps=1")
    wrong = classifier()
    wrong.task = "segmentation"
    with pytest.raises(CheckpointError, match=r"set model\.pool=patches"):
        vitrail.predict(wrong, [shapes / "images" / "0000.png"], device="cpu")
    masks = write_shapes(tmp_path / "small", 12, 24)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(masks / "masks" / "0003.png")
    with pytest.raises(DataError, match="0003"):
        trained(masks, tmp_path / "run", "steps=1")
    assert not (tmp_path / "run").exists()
