"""Data that is neither a path nor images: every function says in one sentence what is supported."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from torch.utils.data import Dataset

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_data, open_source
from vitrail.data.sources.selection import choose_images
from vitrail.errors import CheckpointError, DataError, InputError
from vitrail.evaluation import evaluate_bundle
from vitrail.inference.classifier import Classifier


class Mine(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def tiny() -> Bundle:
    config = vitrail.ViTConfig(image_size=(16, 16), patch_size=(8, 8), width=48, depth=2, heads=2, classes=3)
    return Bundle(
        vitrail.ViT(config), Preprocess(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3), classes=("a", "b", "c")
    )


FUNCTIONS: dict[str, Callable[[object], object]] = {
    "train": lambda data: vitrail.train(data, quiet=True),
    "sweep": lambda data: vitrail.sweep(data, over={"optimizer.lr": [0.1]}, quiet=True),  # type: ignore[call-overload]
    "embed": lambda data: vitrail.embed(tiny(), data, "features.npy"),  # type: ignore[call-overload]
    "probe": lambda data: vitrail.probe(tiny(), data),
    "open_data": lambda data: open_data(data),
    "open_source": lambda data: open_source(data),
    "choose_images": lambda data: choose_images(data),
}
ODD: dict[str, tuple[object, str]] = {
    "dataset": (Mine(), "item 0 of the dataset is of type int, not an image"),
    "list": (["a.png", "b.png"], "a.png, item 0 of the list, does not exist, nor do 1 more"),
    "mapping": ({"path": ["a.png"], "label": ["x"]}, "the data is a mapping with the keys 'path', 'label'"),
    "nothing": (None, "the data is of type NoneType, which is not supported; give a path (a folder"),
    "number": (3, "the data is of type int, which is not supported; give a path"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_data_that_is_not_supported(function: str, odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, sentence = ODD[odd]
    with pytest.raises((DataError, InputError), match=re.escape(sentence)):
        FUNCTIONS[function](data)
    assert not list(tmp_path.iterdir())


def test_an_empty_path_is_said() -> None:
    with pytest.raises(DataError, match="the data path is empty"):
        open_data("")


def test_a_path_instead_of_a_source() -> None:
    with pytest.raises(InputError, match=r"expected a source of images, found str; open a path with open_source"):
        evaluate_bundle(tiny(), "digits")


@pytest.mark.parametrize("odd", ["dataset", "nothing"])
def test_classifier_errors_list_supported_inputs(odd: str) -> None:
    with pytest.raises(InputError, match="expected a path, the bytes of a file"):
        Classifier(tiny()).predict(cast("str", ODD[odd][0]))


@pytest.mark.parametrize("source", [None, tiny().model, 3])
def test_what_is_not_a_checkpoint(source: object) -> None:
    with pytest.raises(CheckpointError, match="load opens a folder, a weight file or a name on a hub, found a"):
        vitrail.load(source)


def test_conversion_errors_say_what_to_do(tmp_path: Path) -> None:
    stem = {"stem": "conv_stem", "conv_stem": [{"channels": 24}, {"channels": 48}, {"channels": 48}]}
    config = tiny().model.config.replace(**stem)
    fresh = Bundle(vitrail.ViT(config), tiny().preprocess, ("a", "b", "c"), {"source": "trained from scratch"})
    with pytest.raises(
        CheckpointError, match=r"conv_stem.*; vitrail export writes ONNX, and models trained with --set"
    ):
        vitrail.convert(fresh, tmp_path / "x", to="timm")
