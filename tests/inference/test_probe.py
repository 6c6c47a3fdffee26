"""`vitrail probe`: the three protocols on real images, and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import RunCommand

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_data
from vitrail.errors import ConfigError
from vitrail.inference.features import Features
from vitrail.inference.probe import Collected, ProbePlan, ProbeResult, ProbeRow, evaluate_features, open_splits
from vitrail.inference.protocols import draw_examples, fit_least_squares
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

PRE = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))


def bundle(**fields: Any) -> Bundle:
    size = {"image_size": 8, "patch_size": 2, "channels": 1, "width": 32, "depth": 1, "heads": 2, "classes": 10}
    return Bundle(ViT(ViTConfig(**{**size, "pool": "mean", **fields})), PRE)


def accuracy(result: ProbeResult, method: str, setting: float | None = None) -> float:
    rows = [row for row in result.rows if row.method == method and setting in (None, row.setting)]
    assert len(rows) == 1
    return rows[0].mean


@pytest.mark.slow
def test_a_random_model_on_the_digits() -> None:
    result = vitrail.probe(bundle(), "digits", k=(1, 20), workers=0, device="cpu")
    assert [(row.method, row.setting) for row in result.rows[:-1]] == [
        *(("fewshot", shots) for shots in (1, 5, 10, 25)),
        ("knn", 1),
        ("knn", 20),
    ]
    assert (result.images, result.examples, result.split_origin, result.notes) == (359, 1259, "stratified", ())
    # Random features preserve much of a digit: well above the 10% of chance.
    assert accuracy(result, "fewshot", 25) > max(0.25, accuracy(result, "fewshot", 1))
    assert accuracy(result, "knn", 20) > 0.35
    assert accuracy(result, "linear") > 0.45
    assert all(len(row.accuracies) == (3 if row.method == "fewshot" else 1) for row in result.rows)


@pytest.mark.slow
def test_training_improves_features(tmp_path: Path) -> None:
    changes = [
        "epochs=25",
        "evaluations=2",
        "model.width=48",
        "model.depth=2",
        "model.heads=2",
        "model.patch_size=2",
        "model.image_size=8",
        "optimizer.lr=2e-3",
    ]
    run = vitrail.train("digits", changes=changes, folder=tmp_path / "run", device="cpu", workers=0, quiet=True)
    trained = vitrail.probe(tmp_path / "run" / "best", "digits", workers=0, device="cpu")
    assert trained.split_origin == "recorded"
    fresh = Bundle(ViT(run.bundle.model.config), run.bundle.preprocess)
    random = vitrail.probe(fresh, "digits", workers=0, device="cpu")
    for before, after in zip(random.rows, trained.rows, strict=True):
        assert after.mean > before.mean, (before, after)
    assert accuracy(trained, "fewshot", 25) > accuracy(random, "fewshot", 25) + 0.2


def test_rows_match_the_protocols() -> None:
    """Few-shot accuracy is that of the draws of seeds 0, 1, 2, computed by hand."""
    random = np.random.default_rng(0)
    labels = np.arange(120) % 4
    features = (random.normal(size=(4, 10))[labels] + random.normal(size=(120, 10))).astype(np.float32)
    train, test = (
        Features(features[split], labels[split], np.arange(60), ()) for split in (slice(0, 60), slice(60, 120))
    )
    collected = Collected(train, None, test, ("a", "b", "c", "d"), "given")
    actual = evaluate_features(collected, ProbePlan(shots=(3,), seeds=4, k=(5,)), device="cpu")
    expected = []
    for seed in range(4):
        drawn = draw_examples(train.labels, 3, seed)
        fitted = fit_least_squares(torch.from_numpy(train.features[drawn]), torch.from_numpy(train.labels[drawn]), 4)
        predictions = fitted.scores(torch.from_numpy(test.features)).argmax(dim=1).numpy()
        expected.append((predictions == test.labels).mean())
    row = actual.rows[0]
    np.testing.assert_allclose(row.accuracies, expected)
    assert row.mean == pytest.approx(np.mean(expected))
    assert row.spread == pytest.approx(np.std(expected, ddof=1))
    assert actual.interval(row) is None
    interval = actual.interval(actual.rows[1])
    assert interval is not None
    assert interval.low < actual.rows[1].mean < interval.high
    assert ProbeRow("fewshot", 1, (0.5,)).spread is None


def test_the_command(run: RunCommand) -> None:
    model = bundle().save("model")
    done = run("probe", model, "digits", "--only", "knn,fewshot", "--k", "10,20", "--shots", "2", "--seeds", 2)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "359 test images and 1,259 train images of 10 classes, in random stratified splits."
    assert [line.split("  ")[0] for line in lines[2:]] == ["few-shot", "k-NN", "k-NN"]
    assert "±" in lines[2]
    result = json.loads(run("probe", model, "digits", "--only", "fewshot", "--shots", "2", "--seeds", 2, "--json").out)
    (row,) = result["probes"]
    assert (row["method"], row["shots"], len(row["accuracies"]), row["interval"]) == ("fewshot", 2, 2, None)
    assert f"{100 * row['accuracy']:.1f}%" in lines[2]
    assert (result["images"], result["examples"], result["bad"]) == (359, 1259, [])


def test_layers_have_different_features(run: RunCommand) -> None:
    model = bundle(depth=2).save("model")
    whole, first, last = (
        json.loads(run("probe", model, "digits", "--only", "knn", "--json", *layer).out)["probes"][0]["accuracy"]
        for layer in ((), ("--layer", "0"), ("--layer", "-1"))
    )
    assert whole == last != first


def test_few_images(run: RunCommand, photos: Path) -> None:
    """Default shots and neighbours are limited by the number of examples."""
    (photos / "cat" / "bad.png").write_text("no image")
    done = run("probe", bundle().save("model"), photos)
    assert (done.code, done.err) == (0, "")
    assert "few-shot  5 shots" in done.out
    assert "few-shot  10 shots" not in done.out
    assert "25 shots are skipped: class 'cat' (and 1 more) has only 7 training images." in done.out
    assert "K is 14 instead of 20, because the data has no more training images." in done.out
    assert "1 more could not be read:" in done.out
    assert "bad.png" in done.out


def test_more_neighbours_than_examples_raise_before_computing_features(photos: Path) -> None:
    with pytest.raises(ConfigError, match="k is 500; it should be from 1 to 14, the number of examples"):
        open_splits(photos, ProbePlan(("knn",), k=(1, 500)))
    assert open_splits(photos, ProbePlan(("linear",), k=(1, 500))).train.classes == (
        "cat",
        "dog",
    )  # k is not used


def test_a_class_without_readable_images_is_not_ignored(run: RunCommand, photos: Path) -> None:
    for file in (photos / "dog").iterdir():
        file.write_text("no image")
    done = run("probe", bundle().save("model"), photos, "--only", "fewshot,knn", "--split", "val")
    assert "1 shots are skipped: class 'dog' has only 0 training images." in done.out
    done = run("probe", bundle().save("other"), photos, "--only", "fewshot", "--shots", "1", "--split", "val")
    assert done.code == 2
    assert "1 shots need 1 training images of every class, but class 'dog' has only 0" in done.err


def test_splits_of_the_data(run: RunCommand, photos: Path) -> None:
    for split in ("train", "val"):
        Path("parted", split).mkdir(parents=True)
    for label in ("cat", "dog"):
        (photos / label).rename(Path("parted", "train", label))
        Path("parted", "val", label).mkdir()
        for number in range(3):
            Image.new("L", (8, 8), 20 * number).save(Path("parted", "val", label, f"{number}.png"))
    model = bundle().save("model")
    done = run("probe", model, "parted")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "vitrail: parted has no test split to evaluate on; evaluate on its validation split with --split val "
        "(split='val')\n"
    )
    done = run("probe", model, "parted", "--split", "val")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("6 val images and 20 train images of 2 classes, in the splits of the dataset.")
    assert "linear" in done.out


def test_splits_of_the_models_own_run(run: RunCommand, photos: Path) -> None:
    model = bundle().save(Path("run", "best"))
    Path("run", "split.json").write_text(json.dumps(open_data(photos, seed=5, val=0.2, test=0.3).record))
    done = run("probe", model, photos, "--only", "fewshot")
    assert done.out.startswith("6 test images and 10 train images of 2 classes, in the splits of the model's run.")
    assert "in random stratified splits." in run("probe", model, "digits", "--only", "knn").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shots", "1,9"), "9 shots need 9 training images of every class, but class 'cat' has only 4; use fewer"),
        (("--shots", "five"), "'five' should be integers, such as 1,5,10"),
        (("--shots", "0"), "shots is 0; it should be 1 or more"),
        (("--k", "500"), "k is 500; it should be from 1 to 11, the number of examples"),
        (("--k", "-1"), "'-1' should be integers"),
        (("--seeds", "0"), "--seeds"),
        (
            ("--only", "knn,fewshots"),
            "unknown probe 'fewshots'; choose fewshot, knn, linear; did you mean 'fewshot'?",
        ),
        (("--only", ","), "only is empty"),
        (("--split", "train"), "a probe is evaluated on the test or validation split, not on 'train'"),
        (("--layer", "1"), "layer 1 does not exist: this model has layers 0 to 0"),
        (("--precision", "int3"), "'int3'"),
    ],
)
def test_errors(run: RunCommand, photos: Path, options: tuple[str, ...], message: str) -> None:
    for number in range(4):
        (photos / "cat" / f"{number}.png").unlink()
    done = run("probe", bundle().save("model"), photos, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_data_that_cannot_be_probed(run: RunCommand, photos: Path) -> None:
    model = bundle().save("model")
    for words, message in (
        (("nowhere", photos), "nowhere"),
        ((model, "nowhere"), "nowhere does not exist"),
        ((model, photos / "cat"), "no class folders"),
    ):
        done = run("probe", *words)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
        assert len(done.err.splitlines()) == 1
    for file in (photos / "dog").iterdir():
        file.unlink()
    (photos / "dog").rmdir()
    done = run("probe", model, photos)
    assert done.code == 2
    assert "has only one class, 'cat'" in done.err


def test_invalid_plans() -> None:
    with pytest.raises(ConfigError, match="seeds is 0; it should be 1 or more"):
        ProbePlan(seeds=0)
    with pytest.raises(ConfigError, match="shots is empty"):
        ProbePlan(shots=())
