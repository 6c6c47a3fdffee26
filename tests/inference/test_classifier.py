"""`vitrail.Classifier`: every kind of image, one and many, and invalid inputs."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.prediction_jobs import tiny_bundle, tiny_images, tiny_pixels

import vitrail
from vitrail import CheckpointError, Classifier, ConfigError, DataError, Diverged, InputError
from vitrail.tasks.classification import ClassPrediction


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier(tiny_bundle(), device="cpu")


def test_a_prediction_is_the_softmax_of_the_logits(classifier: Classifier) -> None:
    bundle = tiny_bundle()
    with torch.no_grad():
        shares = bundle.model(bundle.preprocess(Image.fromarray(tiny_pixels(3)))[None]).softmax(dim=1)[0]
    prediction = classifier.predict(tiny_pixels(3))
    order = shares.argsort(descending=True).tolist()
    assert prediction.names == tuple(("cat", "dog", "fox")[index] for index in order)
    assert prediction.probabilities == pytest.approx(shares[order].tolist(), abs=1e-5)
    assert (prediction.name, prediction.probability) == next(iter(prediction))
    assert repr(prediction).startswith(f"ClassPrediction({prediction.name} ")
    assert repr(prediction).count("%") == 3


def test_every_kind_of_image_gives_the_same_prediction(classifier: Classifier, tmp_path: Path) -> None:
    (path,) = tiny_images(tmp_path, 1)
    pixels = tiny_pixels(0)
    grey = np.array(Image.fromarray(pixels).convert("L"))
    expected = classifier(str(path))
    kinds: list[Any] = [
        path,
        path.read_bytes(),
        Image.open(path),
        Image.fromarray(pixels),
        pixels,
        torch.from_numpy(pixels).permute(2, 0, 1),
        torch.from_numpy(pixels).permute(2, 0, 1).float() / 255,
    ]
    assert [classifier(kind) for kind in kinds] == [expected] * len(kinds)
    assert [prediction.names for prediction in classifier.predict(kinds)] == [expected.names] * len(kinds)
    of_grey = classifier(grey)
    assert of_grey != expected
    assert [classifier(kind) for kind in (grey[:, :, None], torch.from_numpy(grey), Image.fromarray(grey))] == [
        of_grey
    ] * 3


def test_a_pillow_image_is_treated_like_its_file(tmp_path: Path) -> None:
    """Rotated upright, white where transparent, palettes converted: like a file with the same content."""
    classifier = Classifier(tiny_bundle(), device="cpu")
    tags = Image.Exif()
    tags[0x0112] = 6
    upright = Image.fromarray(tiny_pixels(1))
    upright.save(tmp_path / "turned.jpg", exif=tags)
    upright.convert("RGBA").convert("P").save(tmp_path / "palette.png")
    clear = upright.convert("RGBA")
    clear.putalpha(90)
    clear.save(tmp_path / "clear.png")
    for name in ("turned.jpg", "palette.png", "clear.png"):
        with Image.open(tmp_path / name) as opened:
            assert classifier(opened) == classifier(tmp_path / name), name
    upright.save(tmp_path / "plain.jpg")
    assert classifier(tmp_path / "plain.jpg") != classifier(tmp_path / "turned.jpg")


def test_many_in_one_list_out(classifier: Classifier, tmp_path: Path) -> None:
    paths = tiny_images(tmp_path, 7)
    alone = [classifier(path) for path in paths]
    for many in (paths, tuple(paths), (path for path in paths), np.stack([tiny_pixels(n) for n in range(7)])):
        result = classifier.predict(many, batch=3)
        assert [prediction.names for prediction in result] == [prediction.names for prediction in alone]
        for prediction, same in zip(result, alone, strict=True):
            assert prediction.probabilities == pytest.approx(same.probabilities, abs=1e-5)
    assert classifier.predict(paths[:1]) == alone[:1]
    assert classifier.predict([]) == []


def test_top(classifier: Classifier) -> None:
    assert len(classifier(tiny_pixels(0), top=1).names) == 1
    assert len(classifier(tiny_pixels(0), top=50).names) == 3
    with pytest.raises(ConfigError, match="top is 0; it should be a whole number, 1 or more"):
        classifier.predict(tiny_pixels(0), top=0)
    with pytest.raises(ConfigError, match="batch is 0; it should be a whole number, 1 or more"):
        classifier.predict(tiny_pixels(0), batch=0)


def test_class_indices_without_names() -> None:
    assert set(Classifier(tiny_bundle(None), device="cpu")(tiny_pixels(0)).names) == {"0", "1", "2"}


def test_bad_images_raise_or_are_kept(classifier: Classifier, tmp_path: Path) -> None:
    good, *_ = tiny_images(tmp_path, 1)
    (tmp_path / "text.jpg").write_text("no image")
    bad = tmp_path / "text.jpg"
    with pytest.raises(DataError, match=r"text\.jpg: it is not an image: the file starts with"):
        classifier([good, bad])
    with pytest.raises(DataError, match=r"^image 1: the file is empty"):
        classifier([good.read_bytes(), b""])
    first, second, third = classifier([bad, good, tmp_path / "gone.png"], errors="keep")
    assert (first.names, first.probabilities) == ((), ())
    assert first.error is not None
    assert repr(first) == f"ClassPrediction(error: {first.error})"
    assert second == classifier(good)
    assert third.error == "it cannot be read: No such file or directory"
    with pytest.raises(DataError, match="the image has no prediction: it is not an image"):
        _ = first.name
    with pytest.raises(ConfigError, match="choose 'raise' or 'keep'"):
        classifier(good, errors="ignore")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (17, "expected a path, the bytes of a file, .* found int"),
        (None, "found NoneType"),
        ([3.5], "image 0: expected a path, .* found float"),
        ("https://example.org/cat.jpg", "https://example.org/cat.jpg: a URL, .* download it first"),
        (".", "a folder; pass its files, or use the command line"),
        (np.zeros((3, 20, 30), np.uint8), r"an array should be \(height, width, channels\), but this is \(3, 20, 30"),
        (torch.zeros(20, 30, 3), r"a tensor should be \(channels, height, width\), but this is \(20, 30, 3\)"),
    ],
)
def test_inputs_that_are_not_images(classifier: Classifier, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        classifier(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((5, 5, 2), np.uint8), "an image with 2 channels, expected 3"),
        (torch.full((3, 5, 5), -1.0), "range from -1 to -1; an image has integers"),
        (np.zeros(5, np.uint8), "is not an image; use"),
    ],
)
def test_arrays_that_are_not_images(classifier: Classifier, value: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        classifier(value)


def test_an_extremely_narrow_image() -> None:
    bundle = tiny_bundle()
    bundle.preprocess = bundle.preprocess.replace(resize="cover", size=(256, 256), resize_to=(256, 256))
    file = io.BytesIO()
    Image.new("RGB", (1, 40_000)).save(file, "PNG")
    with pytest.raises(DataError, match=r"40,000×1 pixels is too narrow to be resized"):
        Classifier(bundle, device="cpu")(file.getvalue())


def test_bundles_that_cannot_classify(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the model has no head"):
        Classifier(tiny_bundle(None, classes=0))
    with pytest.raises(CheckpointError, match="does not exist"):
        Classifier(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="'tortch'; did you mean 'torch'"):
        Classifier(tiny_bundle(), engine="tortch")
    with pytest.raises(ConfigError, match="no precision is called 'int3'"):
        Classifier(tiny_bundle(), precision="int3")
    broken = tiny_bundle()
    torch.nn.init.constant_(broken.model.head.bias, float("nan"))
    with pytest.raises(Diverged, match="the logits for the image are not finite; the weights are"):
        Classifier(broken, device="cpu")(tiny_pixels(0))


def test_it_opens_anything_that_load_opens(tmp_path: Path) -> None:
    folder = tiny_bundle().save(tmp_path / "bundle")
    assert isinstance(vitrail.Classifier(folder).predict(tiny_pixels(0)), ClassPrediction)
    assert Classifier(str(folder), precision="bf16", device="cpu")(tiny_pixels(0)).names


def test_a_pillow_image_may_be_passed_many_times(classifier: Classifier, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png", compress_level=1)
    expected = classifier(tmp_path / "large.png")
    for _ in range(3):  # threads that decode the same image concurrently usually fail
        with Image.open(tmp_path / "large.png") as image:
            assert classifier([image] * 8) == [expected] * 8


def test_a_half_precision_tensor(classifier: Classifier) -> None:
    pixels = torch.zeros(3, 9, 12)
    pixels[:, :4] = 1
    assert classifier(pixels.bfloat16()) == classifier(pixels.half()) == classifier(pixels)
