"""Previews: what the images of a pretraining run show, how many there are, and that they change nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from vitrail import Preprocess, ViT, ViTConfig
from vitrail.data.sources.opening import open_unlabelled
from vitrail.data.sources.source import Arrays
from vitrail.errors import CheckpointError
from vitrail.training.pretraining import previews
from vitrail.training.pretraining.masking import encode
from vitrail.training.pretraining.methods import METHODS
from vitrail.training.pretraining.previews import (
    COMPONENTS,
    MASKED,
    ORIGINAL,
    RECONSTRUCTION,
    SIDE,
    Preview,
    drawn_images,
    encoded,
    is_due,
    patch_features,
    preview_steps,
    read_preview,
)
from vitrail.training.run_folder import PREVIEWS, preview_file

SMALL = ("compile=false", "steps=12", "batch=32", "evaluations=2", "model.width=32", "model.depth=2", "model.heads=2",
         "data.val=0.1")  # fmt: skip
ZOOM = SIDE // 8
"""Pixels of a tile for each pixel of the digits."""


def pretrained(folder: Path, method: str = "mae", *changes: str, data: str | Path = "digits") -> Path:
    return vitrail.pretrain(
        data, method=method, changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0, quiet=True
    ).folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "state").glob("[0-9]*")) / "state.safetensors")


def patches(tiles: np.ndarray) -> np.ndarray:
    """Cut tiles (B, SIDE, SIDE, 3) of digits with patches of 2×2 pixels: (B, 16, …)."""
    side, count = 2 * ZOOM, len(tiles)
    return tiles.reshape(count, 4, side, 4, side, 3).swapaxes(2, 3).reshape(count, 16, -1)


@pytest.fixture(scope="module", params=["mae", "masked-patches"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, pretrained(tmp_path_factory.mktemp("previews") / "run", request.param)


# ── what is shown ──


def test_visible_patches_are_the_original_ones(run: tuple[str, Path]) -> None:
    method, folder = run
    shown = read_preview(preview_file(folder, 12))
    assert shown.rows == (ORIGINAL, MASKED, RECONSTRUCTION)
    original, masked, made = map(patches, shown.tiles)
    grey = (masked == 128).all(axis=2)  # 0 after normalisation
    assert set(grey.sum(axis=1)) == {12 if method == "mae" else 8}
    np.testing.assert_array_equal(masked[~grey], original[~grey])
    np.testing.assert_array_equal(made[~grey], original[~grey])
    assert (made[grey] != original[grey]).any()
    assert (made[grey] != 128).any()


def test_the_original_row_is_the_validation_images(run: tuple[str, Path]) -> None:
    shown = read_preview(preview_file(run[1], 6))
    source = open_unlabelled("digits", val=0.1).val
    assert source is not None
    by_name = {source.name(index): np.asarray(source.read(index)) for index in range(len(source))}
    assert len(set(shown.names)) == 8
    for name, tile in zip(shown.names, shown.tiles[0], strict=True):
        expected = by_name[name].reshape(8, 8).repeat(ZOOM, axis=0).repeat(ZOOM, axis=1)
        np.testing.assert_array_equal(tile, np.stack([expected] * 3, axis=-1))


def test_images_and_masks_stay_the_same(run: tuple[str, Path]) -> None:
    first, last = (read_preview(preview_file(run[1], step)) for step in (6, 12))
    assert first.names == last.names
    np.testing.assert_array_equal(first.tiles[:2], last.tiles[:2])
    assert (first.tiles[2] != last.tiles[2]).any()


def test_patch_features_are_components_of_all_images_together() -> None:
    torch.manual_seed(0)
    config = ViTConfig(image_size=(12, 8), patch_size=4, width=16, depth=2, heads=2, classes=0, registers=2)
    model, preprocess = ViT(config).eval(), Preprocess(size=(12, 8))
    pixels = torch.randn(5, 3, 12, 8)
    with torch.no_grad():
        rows = patch_features(model, pixels, preprocess)
        tokens = encode(model, *model.embed(pixels))[:, config.layout.patches].reshape(30, 16).double().numpy()
    assert list(rows) == [ORIGINAL, COMPONENTS]
    maps = rows[COMPONENTS]
    assert maps.shape == (5, 3, 12, 8)
    colours = maps[:, :, ::4, ::4].permute(0, 2, 3, 1).reshape(30, 3).double().numpy()
    centred = tokens - tokens.mean(axis=0)
    expected = centred @ np.linalg.svd(centred, full_matrices=False)[2][:3].T
    for channel in range(3):  # the scale is clipped at the extremes
        inside = (colours[:, channel] > 0) & (colours[:, channel] < 1)
        assert abs(np.corrcoef(colours[inside, channel], expected[inside, channel])[0, 1]) > 1 - 1e-6
    np.testing.assert_array_equal(maps, maps[:, :, ::4, ::4].repeat_interleave(4, 2).repeat_interleave(4, 3))


def test_a_method_without_reconstructions_shows_patch_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mae", METHODS["mae"]._replace(reconstructs=False))
    shown = read_preview(preview_file(pretrained(tmp_path / "run"), 12))
    assert shown.rows == (ORIGINAL, COMPONENTS)
    assert np.ptp(shown.tiles[1]) > 200


@pytest.mark.slow
def test_large_colour_images_are_reduced(tmp_path: Path) -> None:
    rng, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    for number in range(12):
        Image.fromarray(rng.integers(0, 255, (160, 200, 3), np.uint8)).save(data / f"{number}.png")
    (data / "broken.png").write_bytes(b"not an image")
    changes = ("model.image_size=[144,160]", "model.patch_size=16", "steps=1", "batch=8", "data.val=0.5")
    shown = read_preview(preview_file(pretrained(tmp_path / "run", "mae", *changes, data=data), 1))
    assert shown.tiles.shape[2:] == (SIDE * 144 // 160, SIDE, 3)
    assert shown.tiles.shape[1] == len(shown.names) <= 7
    assert not any("broken" in name for name in shown.names)


def test_images_are_drawn_by_the_seed() -> None:
    preprocess = Preprocess(size=(4, 4), channels=1, mean=(0.5,), std=(0.5,))
    source = Arrays(np.zeros((50, 4, 4), np.uint8), np.zeros(50, np.int64), ("image",))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    pixels, names = drawn_images(source, preprocess, 7, 8)
    assert pixels.shape == (8, 1, 4, 4)
    assert names == drawn_images(source, preprocess, 7, 8)[1]
    assert names != drawn_images(source, preprocess, 8, 8)[1]
    assert torch.equal(before, torch.random.get_rng_state())


# ── how many, and what they cost ──


def test_one_preview_for_each_interval_and_the_last(tmp_path: Path) -> None:
    (tmp_path / PREVIEWS).mkdir()
    for step in range(1, 101):
        if is_due(tmp_path, step, 100):
            preview_file(tmp_path, step).touch()
    assert preview_steps(tmp_path) == [*range(1, 101, 10), 100]
    assert is_due(tmp_path, 11, 100), "a resumed run writes it again"
    assert not is_due(tmp_path, 12, 100)


def test_previews_do_not_change_the_weights(
    run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, folder = run
    monkeypatch.setattr(previews, "is_due", lambda *_: False)
    without = pretrained(tmp_path / "run", method)
    assert not (without / PREVIEWS).exists()
    actual, expected = state(folder), state(without)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    assert (folder / "metrics.jsonl").read_text() == (without / "metrics.jsonl").read_text()


def test_a_run_without_its_preview_folder_continues(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (".lock", PREVIEWS):
        (tmp_path / "run" / name).touch()
    folder = pretrained(tmp_path / "run")
    assert (folder / "log.txt").read_text().count("previews is no longer written") == 1


def test_tensorboard_shows_the_same_images(run: tuple[str, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[1] / "tensorboard")).Reload().Images("val/preview")
    assert [event.step for event in events] == preview_steps(run[1]) == [6, 12]
    for event in events:
        assert event.encoded_image_string == preview_file(run[1], event.step).read_bytes()
        assert (event.width, event.height) == (8 * 132 - 4, 3 * 132 - 4)


# ── files ──


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 8, 5, 7), (2, 1, 128, 96)], ids=str)
@pytest.mark.parametrize("name", ["", "a/b.png", 'ünï <&> "\u202e\udcff'])
def test_a_sheet_is_read_back(shape: tuple[int, int, int, int], name: str, tmp_path: Path) -> None:
    tiles = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    made = Preview(tuple(f"row {i}" for i in range(shape[0])), (name,) * shape[1], tiles)
    path = tmp_path / "sheet.png"
    path.write_bytes(encoded(made))
    found = read_preview(path)
    assert (found.rows, found.names) == (made.rows, made.names)
    np.testing.assert_array_equal(found.tiles, tiles)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n", "cut", "bare", "other"])
def test_a_corrupt_sheet_is_named(content: bytes | str, run: tuple[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "000001.png"
    match content:
        case "cut":
            path.write_bytes(preview_file(run[1], 12).read_bytes()[:900])
        case "bare":
            Image.new("RGB", (8, 8)).save(path)
        case "other":
            made = Preview(("a",), ("b", "c"), np.zeros((1, 2, 5, 5, 3), np.uint8))
            path.write_bytes(encoded(made).replace(b'["b", "c"]', b'["b",  5 ]'))
        case bytes():
            path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"000001\.png cannot be read"):
        read_preview(path)
