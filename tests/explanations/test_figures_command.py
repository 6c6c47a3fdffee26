"""`vitrail figures` and the drawing of examples: outputs, omissions and errors."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import CommandOutput, RunCommand, run_command

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.inputs import Item
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, InputError
from vitrail.explanations.attention import rollout_maps
from vitrail.explanations.figures import Absent, Figure, filters_figure, rollout_figure
from vitrail.explanations.figures.draw import sample_items
from vitrail.explanations.figures.examples import MASK, attended, examples_figure
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


def tiny(**fields: Any) -> Bundle:
    size = {"image_size": (8, 12), "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "classes": 2, "init": "timm"}
    torch.manual_seed(0)
    model = ViT(ViTConfig(**{**size, **fields}))
    return Bundle(model, Preprocess(size=model.config.image_size), ("cat", "dog"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command in this process, in a folder with the bundle `model` and five `photos`."""
    monkeypatch.chdir(tmp_path)
    tiny().save("model")
    for number in range(5):
        noise = np.random.default_rng(number).integers(0, 256, (9, 14, 3), np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(noise).save(tmp_path / "photos" / f"{number}.png")

    def command(*words: object) -> CommandOutput:
        device = [] if "--device" in words else ["--device", "cpu"]
        return run_command(monkeypatch, capsys, "figures", *words, *device)

    return command


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# ── outputs ──


def test_all_figures(run: RunCommand) -> None:
    done = run("model", "photos", "--out", "all")
    assert (done.code, done.err) == (0, "")
    assert files("all") == ["captions.md", "distance.svg", "filters.png", "positions.png", "rollout.png"]
    for name in ("filters.png", "positions.png", "rollout.png"):
        with Image.open(Path("all", name)) as image:
            image.load()
            assert image.mode == "RGB"
    captions = Path("all", "captions.md").read_text(encoding="utf-8")
    assert captions.count("## ") == 4
    assert "over all patches of 5 images (the paper uses 128)" in captions
    assert "![How far each head looks](distance.svg)" in captions
    assert "distance: all/distance.svg" in done.out.splitlines()


def test_output_is_deterministic(run: RunCommand) -> None:
    for out in ("one", "two"):
        assert run("model", "photos", "--out", out).code == 0
    assert [Path("one", name).read_bytes() for name in files("one")] == [
        Path("two", name).read_bytes() for name in files("two")
    ]


def test_without_images_some_figures_are_omitted(run: RunCommand) -> None:
    done = run("model", "-o", "some")
    assert done.code == 0
    assert files("some") == ["captions.md", "filters.png", "positions.png"]
    assert done.err == "not drawn: distance and rollout, which need images; pass some after the model\n"


def test_only_some(run: RunCommand) -> None:
    done = run("model", "photos/0.png", "--only", "rollout", "--only", "filters", "-o", "some")
    assert (done.code, done.err) == (0, "")
    assert files("some") == ["captions.md", "filters.png", "rollout.png"]


def test_a_figure_that_the_model_does_not_have(run: RunCommand) -> None:
    tiny(position="rope_2d").save("rope")
    done = run("rope", "-o", "some")
    assert done.code == 0
    assert files("some") == ["captions.md", "filters.png"]
    assert "positions: not drawn, because this model has no position table: it rotates queries and keys" in done.out
    assert "This figure cannot be drawn: this model has no position table" in Path("some", "captions.md").read_text(
        encoding="utf-8"
    )


def test_unreadable_images_are_reported(run: RunCommand) -> None:
    Path("photos", "5.png").write_bytes(b"no image")
    done = run("model", "photos", "-o", "some")
    assert done.code == 0
    assert done.err == "skipped: photos/5.png: it is not an image: the file starts with b'no image'\n"
    assert "over all patches of 5 images" in Path("some", "captions.md").read_text(encoding="utf-8")


# ── errors ──


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model", "--only", "filter"], "no figure is called 'filter'; did you mean 'filters'?"),
        (
            ["model", "--only", "distance"],
            "the figure 'distance' needs images; pass files or folders after the model",
        ),
        (["model", "nowhere"], "nowhere does not exist; give files, folders"),
        (["model", "empty"], "no images in these paths"),
        (["model", "bad.png"], "none of the images can be read"),
        (["model", "photos", "--out", "taken"], "filters.png"),
        (["model", "photos", "--out", "bad.png"], "bad.png is a file, but figures need a folder"),
        (["no-model"], "no-model"),
        (["model", "--device", "abacus"], "no device is called 'abacus'"),
    ],
)
def test_errors_are_one_message(run: RunCommand, words: list[str], message: str) -> None:
    Path("empty").mkdir()
    Path("bad.png").write_bytes(b"")
    Path("taken").mkdir()
    Path("taken", "filters.png").write_bytes(b"mine")
    done = run(*words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith("vitrail: ")
    assert Path("taken", "filters.png").read_bytes() == b"mine"
    assert not Path("figures").exists()


def test_overwrite_replaces(run: RunCommand) -> None:
    Path("taken").mkdir()
    Path("taken", "filters.png").write_bytes(b"mine")
    Path("taken", "notes.txt").write_text("stays", encoding="utf-8")
    assert run("model", "--out", "taken", "--overwrite").code == 0
    assert files("taken") == ["captions.md", "filters.png", "notes.txt", "positions.png"]
    with Image.open("taken/filters.png") as image:
        assert image.format == "PNG"


# ── which images ──


def test_images_are_subsampled_evenly_and_deterministically() -> None:
    items = [Item(b"%d" % number) for number in range(2000)]
    chosen = [int(item.name) for item in sample_items(items, 128)]
    assert chosen == [int(item.name) for item in sample_items(iter(items), 128)]
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 128
    # A folder lists class by class: every tenth of it is represented.
    assert min(np.histogram(chosen, bins=10, range=(0, 2000))[0]) >= 5
    assert [int(item.name) for item in sample_items(items[:3], 128)] == [0, 1, 2]


# ── examples ──


class Shown(NamedTuple):
    map: Any
    image: Image.Image
    target: str | int | None = None


def test_the_mask_is_transparent_where_the_map_is_largest() -> None:
    image = Image.new("RGB", (8, 8), (200, 100, 0))
    veiled = np.asarray(attended(image, np.array([[1, 0]], np.float32)))
    assert tuple(veiled[4, 0]) == (200, 100, 0)
    assert tuple(veiled[4, 7]) == MASK
    assert np.asarray(attended(image, np.zeros((2, 2), np.float32))).reshape(-1, 3).tolist() == [list(MASK)] * 64


@pytest.mark.parametrize(("count", "size"), [(1, (8, 8)), (4, (40, 20)), (5, (300, 500))])
def test_examples_are_next_to_their_images(count: int, size: tuple[int, int]) -> None:
    colours = [(20 * number + 10, 255 - 20 * number, 99) for number in range(count)]
    shown = [Shown(np.ones((2, 3), np.float32), Image.new("RGB", size, colour)) for colour in colours]
    image = examples_figure(shown).image
    assert image is not None
    pixels = np.asarray(image)
    areas = [int((pixels == colour).all(axis=2).sum()) for colour in colours]
    assert len(set(areas)) == 1
    assert areas[0] >= 2 * 100 * 100  # each twice, and large enough


def test_names_that_pillow_cannot_write() -> None:
    shown = [
        Shown(np.ones((2, 2), np.float32), Image.new("RGB", (9, 9)), name) for name in ("猫", "x" * 300, 7, "\0\n")
    ]
    figure = examples_figure(shown)
    assert figure.caption.endswith("The explained class is below each pair.")


def test_rollout_figure_of_a_bundle() -> None:
    bundle = tiny()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    made = rollout_figure(bundle, [pixels] * 20, device="cpu")
    assert isinstance(made, Figure)
    normal = bundle.preprocess.normalise(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    map = rollout_maps(bundle.model.eval(), normal)[0].numpy()
    image = Image.fromarray(pixels)
    expected = np.asarray(attended(image.resize((192, 128), Image.Resampling.NEAREST), map))
    assert made.image is not None
    # The first pair, after the margin and the heading: 192 wide, 6 between.
    actual = np.asarray(made.image)[41 : 41 + 128, 24 + 192 + 6 : 24 + 2 * 192 + 6]
    np.testing.assert_array_equal(actual, expected)


def test_no_examples() -> None:
    with pytest.raises(InputError, match="at least one image"):
        rollout_figure(tiny(), [], device="cpu")
    alone = rollout_figure(tiny(image_size=4), [np.zeros((4, 4, 3), np.uint8)], device="cpu")
    assert isinstance(alone, Absent)
    assert "one patch" in alone.reason


def test_a_figure_is_saved_atomically(tmp_path: Path) -> None:
    figure = filters_figure(tiny())
    assert isinstance(figure, Figure)
    path = figure.save(tmp_path / "new" / "folder")
    with pytest.raises(CheckpointError, match="exists already; choose another name, or replace it with --overwrite"):
        figure.save(tmp_path / "new" / "folder")
    assert [other.name for other in path.parent.iterdir()] == ["filters.png"]
