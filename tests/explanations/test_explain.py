"""`vitrail.explain` and its images."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.reference_explanations import NAMES, build, bundle, images, noise

import vitrail
from vitrail.data.inputs import Item
from vitrail.errors import CheckpointError, ConfigError, DataError, Diverged, InputError
from vitrail.explanations.explain import Explainer
from vitrail.explanations.explanation import CAPTION, HEAT, Explanation, heat, plan_outputs, safe_name, stretched
from vitrail.explanations.relevance import relevance_maps
from vitrail.explanations.request import ExplanationRequest


@pytest.mark.parametrize("method", ["attention", "rollout", "relevance", "gradcam", "pca"])
@pytest.mark.parametrize("name", ["class first", "grey", "hybrid"])
def test_one_image(name: str, method: Any) -> None:
    ours = bundle(name)
    result = vitrail.explain(ours, noise(), method=method, device="cpu")
    assert isinstance(result, Explanation)
    assert result.map.shape == ((3, 5, 3) if method == "pca" else (3, 5))
    assert result.map.dtype == np.float32
    assert (result.image.mode, result.image.size) == ("RGB", (20, 12))
    assert np.array_equal(
        np.asarray(result.image.convert("L" if name == "grey" else "RGB")).reshape(12, 20, -1),
        ours.preprocess.pixels(noise()).permute(1, 2, 0).numpy(),
    ), "this is what the model saw"
    if method in ("relevance", "gradcam"):
        prediction = vitrail.Classifier(ours, device="cpu")(noise())
        assert result.target == prediction.name
        assert result.probability == pytest.approx(prediction.probability, rel=1e-4)
        assert prediction.name in repr(result)
    else:
        assert (result.target, result.probability) == (None, None)
    assert result.overlay().size == (224, round(12 * 224 / 20))
    assert result.overlay(side=400).size == (400, 240)


def test_several_images_of_every_kind(tmp_path: Path) -> None:
    ours = bundle()
    noise(12, 20).save(tmp_path / "a.png")
    folder = [tmp_path / "a.png", noise(12, 20), np.asarray(noise(12, 20)), (tmp_path / "a.png").read_bytes()]
    actual = vitrail.explain(ours, folder, target="owl", device="cpu")
    assert [one.target for one in actual] == ["owl"] * 4
    pixels = ours.preprocess(noise(12, 20))[None]
    expected = relevance_maps(ours.model, pixels, 4)[0].numpy()
    for one in actual:
        np.testing.assert_allclose(one.map, expected, rtol=1e-5)


def test_training_mode_is_restored() -> None:
    ours = bundle("class first", attention_dropout=0.5)
    expected = vitrail.explain(ours, noise(), device="cpu").map
    ours.model.train()
    assert np.array_equal(vitrail.explain(ours, noise(), device="cpu").map, expected)
    assert ours.model.training
    assert ours.model.blocks[0].training


def test_numpy_and_torch_integers() -> None:
    ours = bundle()
    actual = vitrail.explain(ours, noise(), target=torch.tensor(2), device="cpu")  # type: ignore[call-overload]
    assert actual.target == NAMES[2]
    one, two = np.int64(1), np.int64(-1)
    actual = vitrail.explain(ours, noise(), method="attention", layer=one, head=two, device="cpu")  # type: ignore[call-overload]
    expected = vitrail.explain(ours, noise(), method="attention", layer=1, head=-1, device="cpu")
    assert np.array_equal(actual.map, expected.map)
    for wrong in (np.float64(1), True, torch.tensor([1, 2])):
        with pytest.raises(vitrail.InputError, match="expected an integer layer"):
            vitrail.explain(ours, noise(), method="attention", layer=wrong, device="cpu")  # type: ignore[call-overload]


@pytest.mark.parametrize(("target", "number"), [("fox", 2), (2, 2), ("2", 2), (0, 0)])
def test_the_class_may_be_chosen(target: str | int, number: int) -> None:
    result = vitrail.explain(bundle(), noise(), target=target, device="cpu")
    assert result.target == NAMES[number]
    assert vitrail.explain(bundle(names=None), noise(), target=target if target != "fox" else 2).target == number


def test_a_model_with_logits_for_every_token() -> None:
    ours = bundle("per token")
    patch = vitrail.explain(ours, noise(), query="1,2", device="cpu")
    assert not np.array_equal(patch.map, vitrail.explain(ours, noise(), query=(2, 2), device="cpu").map)
    whole = vitrail.explain(ours, noise(), device="cpu")
    logits = ours.model(ours.preprocess(noise())[None])[0].detach()
    assert whole.target == NAMES[int(logits[0].argmax())]  # the class token's prediction
    assert patch.target == NAMES[int(logits[1 + 5 + 2].argmax())]


def test_other_than_three_channels() -> None:
    ours = bundle("class first", channels=2)
    result = vitrail.explain(ours, np.zeros((12, 20, 2), np.uint8) + np.array([0, 200], np.uint8), device="cpu")
    assert result.image.getpixel((0, 0)) == (100, 100, 100)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("class first", {"method": "relevence"}, "unknown method 'relevence'; did you mean 'relevance'?"),
        ("class first", {"method": "attention", "layer": 3}, "layer 3 does not exist: this model has layers 0 to 2"),
        ("class first", {"method": "pca", "layer": -4}, "layer -4 does not exist: this model has layers 0 to 2"),
        ("class first", {"method": "attention", "head": 3}, "head 3 does not exist: this model has heads 0 to 2"),
        ("class first", {"method": "attention", "head": 0.5}, "expected an integer head, found 0.5"),
        (
            "class first",
            {"method": "attention", "query": "3,0"},
            "row 3, column 0 is outside the patch grid: this model has rows 0 to 2",
        ),
        ("class first", {"method": "attention", "query": (0, -1)}, "row 0, column -1 is outside the patch grid"),
        (
            "class first",
            {"method": "rollout", "query": "register:0"},
            "this model has no registers; choose class, mean or",
        ),
        ("registers", {"method": "rollout", "query": "register:3"}, "registers register:0 to register:2"),
        (
            "registers",
            {"method": "rollout", "query": "distillation"},
            "no distillation token; choose class, register:0",
        ),
        ("mean", {"method": "attention", "query": "class"}, "no class token; choose mean or a patch 'row,column'"),
        ("mean", {"method": "attention", "query": "pool"}, "unknown token 'pool'; choose mean or a patch"),
        ("mean", {"method": "attention", "query": "somewhere"}, "unknown token 'somewhere'; choose"),
        ("mean", {"method": "attention", "query": 5}, "unknown token '5'; choose"),
        ("mean", {"method": "attention", "query": (1, 2, 3)}, "unknown token '(1, 2, 3)'; choose"),
        ("map", {"method": "attention", "query": "pool", "layer": 1}, "the pool's query comes after all layers"),
        (
            "class first",
            {"method": "relevance", "query": "class"},
            "query does not apply to relevance, only to attention",
        ),
        (
            "class first",
            {"method": "relevance", "layer": 1},
            "layer does not apply to relevance, only to attention, gradcam and pca;",
        ),
        ("class first", {"method": "rollout", "target": "cat"}, "target does not apply to rollout, only to relevance"),
        ("class first", {"method": "attention", "fuse": "max"}, "fuse does not apply to attention, only to rollout"),
        ("class first", {"method": "rollout", "fuse": "maxx"}, "unknown fuse 'maxx'; did you mean 'max'?"),
        ("class first", {"method": "rollout", "discard": 1.0}, "at least 0 and below 1"),
        ("class first", {"target": "cot"}, "this model has no class 'cot'; did you mean 'cat'?"),
        ("class first", {"target": "zebra"}, "no class 'zebra'; it has cat, dog, fox, hen, owl"),
        ("class first", {"target": 5}, "class 5 does not exist: this model has classes 0 to 4"),
        ("class first", {"target": -1}, "class -1 does not exist"),
    ],
)
def test_invalid_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        vitrail.explain(bundle(name), noise(), device="cpu", **options)
    assert message in str(caught.value)


def test_models_without_a_class_to_explain() -> None:
    with pytest.raises(InputError, match="no head, so it has no class to explain; use attention, rollout or pca"):
        vitrail.explain(bundle("class first", classes=0), noise(), device="cpu")
    assert vitrail.explain(bundle("class first", classes=0), noise(), method="rollout", device="cpu").map.shape == (
        3,
        5,
    )
    with pytest.raises(InputError, match=r"logits for every token .* 'row,column'; attention, rollout and pca work"):
        vitrail.explain(bundle("per token", class_token="none"), noise(), device="cpu")
    with pytest.raises(InputError, match="no names, use an index"):
        vitrail.explain(bundle(names=None), noise(), target="cat", device="cpu")


def test_invalid_images(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png: "):
        vitrail.explain(bundle(), tmp_path / "bad.png", device="cpu")
    with pytest.raises(InputError, match=r"image 1: expected a path, .* found int"):
        vitrail.explain(bundle(), [noise(), 7], device="cpu")  # type: ignore[list-item]
    with pytest.raises(InputError, match="expected a path"):
        vitrail.explain(bundle(), 7, device="cpu")  # type: ignore[call-overload]
    assert vitrail.explain(bundle(), [], device="cpu") == []


def test_corrupt_weights_raise() -> None:
    ours = bundle()
    with torch.no_grad():
        ours.model.blocks[1].attn.qkv.weight[0, 0] = float("nan")
    with pytest.raises(Diverged, match="not finite; the model's weights are corrupt"):
        vitrail.explain(ours, noise(), method="rollout", device="cpu")


# ── grids ──


def test_a_grid_of_heads_or_layers() -> None:
    ours, item = bundle(), Item(b"", content=noise())
    x = ours.preprocess(noise())[None]
    heads = Explainer(ours, ExplanationRequest("attention", layer=1, query="0,3"), device="cpu").grid(item, "heads")
    weights = ours.model.trace(x, attention=(1,)).attention[1].detach()
    assert [tile.label for tile in heads] == ["head 0", "head 1", "head 2"]
    for head, tile in enumerate(heads):
        np.testing.assert_allclose(tile.explanation.map.flatten(), weights[0, head, 4, 1:], rtol=1e-4)
    layers = Explainer(ours, ExplanationRequest("attention", head=2), device="cpu").grid(item, "layers")
    traced = ours.model.trace(x, attention=range(3)).attention
    assert [tile.label for tile in layers] == ["layer 0", "layer 1", "layer 2"]
    for layer, tile in enumerate(layers):
        np.testing.assert_allclose(tile.explanation.map.flatten(), traced[layer][0, 2, 0, 1:].detach(), rtol=1e-4)


@pytest.mark.parametrize(
    ("grid_request", "each", "message"),
    [
        (ExplanationRequest("rollout"), "layers", "combines all layers in one map"),
        (ExplanationRequest("gradcam"), "heads", "only attention has one map per head"),
        (ExplanationRequest("attention", head=1), "heads", "omit head 1"),
        (ExplanationRequest("pca", layer=1), "layers", "omit layer 1"),
        (ExplanationRequest("pca"), "tokens", "heads or layers, not 'tokens'"),
    ],
)
def test_invalid_grids(grid_request: ExplanationRequest, each: Any, message: str) -> None:
    item = Item(b"", content=noise())
    with pytest.raises(ConfigError, match=message):
        Explainer(bundle(), grid_request, device="cpu").grid(item, each)


# ── images and files ──


def test_heat_colours_increase_in_lightness() -> None:
    lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in heat(np.linspace(0, 1, 256)).tolist()]
    assert all(later > earlier for earlier, later in itertools.pairwise(lightness))
    assert heat(np.array([0.0, 1.0])).tolist() == [list(HEAT[0]), list(HEAT[-1])]
    assert stretched(np.array([2.0, 4.0, 3.0])).tolist() == [0, 1, 0.5]
    assert stretched(np.full(3, 7.0)).tolist() == [0, 0, 0]


def test_the_overlay_is_aligned_with_the_map() -> None:
    map = np.zeros((4, 6), np.float32)
    map[1, 4] = 1
    image = Image.new("RGB", (240, 160), (120, 90, 60))
    result = Explanation(map, image, "attention")
    light = np.asarray(result.overlay(opacity=1).convert("L"), np.float32)
    row, column = np.unravel_index(light.argmax(), light.shape)
    assert 40 <= row < 80
    assert 160 <= column < 200
    assert result.overlay(opacity=0).tobytes() == image.tobytes()
    assert result.side_by_side().size == (240 + 8 + 240, 160)
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=f"opacity is {wrong}; it should be from 0"):
            result.overlay(wrong)


def test_saving(tmp_path: Path) -> None:
    result = Explanation(np.eye(3, dtype=np.float32), noise(), "attention")
    assert result.save(tmp_path / "new" / "x.png") == tmp_path / "new" / "x.png"
    with Image.open(tmp_path / "new" / "x.png") as image:
        width, height = result.side_by_side().size
        assert image.size == (width, height + CAPTION)
    result.save(tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.npy"), result.map)
    with pytest.raises(CheckpointError, match="exists already; choose another name, or replace it with --overwrite"):
        result.save(tmp_path / "x.npy")
    result.save(tmp_path / "x.npy", overwrite=True)
    with pytest.raises(ConfigError, match=r"has no suffix of an image"):
        result.save(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"photos/cat.jpg", "cat"),
        (b"a b?c*<script>.PNG", "a_b_c_script_"),
        (b"x.tar/..\\con.png", "_con"),
        (b"nul", "_nul"),
        (b"..png", "image"),
        (b"/", "image"),
        (b"list.csv, line 7", "list.csv_line_7"),
        (b"\xff\xfe.png", "_"),
        ("grün/Größe 1.webp".encode(), "Größe_1"),
        (("é" * 300 + ".png").encode(), "é" * 60),
    ],
)
def test_portable_file_names(name: bytes, expected: str) -> None:
    assert safe_name(name) == expected


def test_output_files_are_unique(tmp_path: Path) -> None:
    planned = plan_outputs([b"a/1.png", b"b/1.png", b"c/1.JPG"], tmp_path, "pca", arrays=True, overwrite=False)
    assert [files.image.name for files in planned] == ["1-pca.png", "1-2-pca.png", "1-3-pca.png"]
    assert planned[1].array == tmp_path / "1-2-pca.npy"


def test_functions_take_batches() -> None:
    model = build("class first")
    x = images(model.config, 3)
    together = relevance_maps(model, x, torch.tensor([0, 1, 2]))
    for i in range(3):
        torch.testing.assert_close(relevance_maps(model, x[i : i + 1], i)[0], together[i])
