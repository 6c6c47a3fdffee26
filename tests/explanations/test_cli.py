"""`vitrail explain`, run in this process."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import CommandOutput, RunCommand, run_command
from tests.support.reference_explanations import bundle, noise

from vitrail.explanations.explanation import CAPTION, GAP, Explanation, captioned
from vitrail.inference.classifier import Classifier
from vitrail.text import percent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    monkeypatch.chdir(tmp_path)
    bundle().save("model")
    for number, name in enumerate(("cat.png", "a dog?.png")):
        noise(seed=number).save(name)

    def command(*words: object) -> CommandOutput:
        return run_command(monkeypatch, capsys, "explain", "model", *words, "--device", "cpu")

    return command


def size(path: str) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_images_with_their_maps(run: RunCommand) -> None:
    done = run("cat.png", "a dog?.png", "--class", "owl", "--arrays")
    assert done.code == 0, done.err
    assert sorted(path.name for path in Path("explanations").iterdir()) == [
        "a_dog_-relevance-owl.npy", "a_dog_-relevance-owl.png", "cat-relevance-owl.npy", "cat-relevance-owl.png",
    ]  # fmt: skip
    assert size("explanations/cat-relevance-owl.png") == (2 * 224 + 8, 134 + CAPTION)
    assert np.load("explanations/cat-relevance-owl.npy").shape == (3, 5)
    lines = done.out.splitlines()
    assert lines[0].split() == ["image", "class", "confidence", "written"]
    assert lines[1].startswith("cat.png")
    assert "owl" in lines[1]
    assert "explanations/cat-relevance-owl.png" in lines[1]


def test_existing_files_need_overwrite(run: RunCommand) -> None:
    assert run("cat.png", "--out", "o", "--method", "rollout").code == 0
    before = Path("o/cat-rollout.png").read_bytes()
    refused = run("a dog?.png", "cat.png", "--out", "o", "--method", "rollout")
    assert refused.code == 2
    assert "o/cat-rollout.png" in refused.err
    assert [path.name for path in Path("o").iterdir()] == ["cat-rollout.png"], "nothing was computed before"
    assert run("cat.png", "--out", "o", "--method", "rollout", "--overwrite", "--opacity", 1).code == 0
    assert Path("o/cat-rollout.png").read_bytes() != before
    assert run("cat.png", "--out", "o", "--method", "rollout", "--discard", "0.5").code == 0, (
        "another map, another file"
    )
    assert Path("o/cat-rollout-discard0.5.png").is_file()


def test_only_the_first_of_many_images_are_listed(run: RunCommand) -> None:
    content = Path("cat.png").read_bytes()
    Path("many").mkdir()
    for number in range(23):
        (Path("many") / f"{'long' * 50}{number}.png").write_bytes(content)
        (Path("many") / f"bad{number}.png").write_bytes(b"nothing")
    done = run("many", "--method", "attention", "--side", 16)
    assert done.code == 0, done.err
    assert len(list(Path("explanations").iterdir())) == 23
    lines = done.out.splitlines()
    assert len(lines) == 22
    assert lines[-1] == "… and 3 more in explanations"
    assert max(map(len, lines)) < 250, "a long name is cut short"
    assert done.err.splitlines()[-1] == "skipped: 3 more"


def test_grids(run: RunCommand) -> None:
    done = run("cat.png", "--method", "attention", "--grid", "heads", "--layer", 0, "--query", "1,1", "--arrays")
    assert done.code == 0, done.err
    assert np.load("explanations/cat-attention-layer0-1_1-heads.npy").shape == (3, 3, 5)
    assert size("explanations/cat-attention-layer0-1_1-heads.png")[0] == 3 * (160 + 8) + 8
    assert run("cat.png", "--method", "pca", "--grid", "layers", "--arrays").code == 0
    assert np.load("explanations/cat-pca-layers.npy").shape == (3, 3, 5, 3)


def test_paths_from_stdin(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cat.png\na dog?.png\n")))
    done = run("-", "--method", "attention")
    assert done.code == 0, done.err
    assert len(list(Path("explanations").iterdir())) == 2


def test_one_bad_image_does_not_stop_the_others(run: RunCommand) -> None:
    Path("bad.png").write_bytes(b"nothing")
    done = run(".")
    assert done.code == 0
    assert len(done.out.splitlines()) == 3
    assert "skipped: " in done.err
    assert "bad.png" in done.err
    assert run("bad.png").code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cat.png", "--method", "attention", "--layer", 9), "layer 9 does not exist: this model has layers 0 to 2"),
        (("cat.png", "--class", "cot"), "did you mean 'cat'?"),
        (("cat.png", "--grid", "heads"), "only attention has one map per head, relevance does not"),
        (("none.png",), "none.png does not exist"),
        (("cat.png", "--out", "cat.png"), "cat.png is a file"),
        (("empty",), "no images in empty"),
    ],
)
def test_errors_are_one_line(run: RunCommand, words: tuple[object, ...], message: str) -> None:
    Path("empty").mkdir()
    done = run(*words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert not Path("explanations").exists()


def test_a_closed_stdin_has_no_paths(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    done = run("-")
    assert done.code == 2
    assert done.err.startswith("vitrail: there are no paths on stdin; pipe them in, one per line")


def notes(path: str) -> dict[str, str]:
    with Image.open(path) as image:
        return {key.removeprefix("vitrail:"): str(value) for key, value in image.info.items() if "vitrail:" in str(key)}


@pytest.mark.parametrize("method", ["relevance", "attention", "rollout", "pca"])
def test_a_file_records_the_class_and_its_probability(run: RunCommand, method: str) -> None:
    assert run("cat.png", "--method", method).code == 0
    best = Classifier(bundle(), device="cpu")("cat.png")
    result = notes(f"explanations/cat-{method}.png")
    assert (result["method"], result["class"]) == (method, best.name)
    assert float(result["probability"]) == pytest.approx(best.probability, abs=1e-4)


def test_explained_and_predicted_class_differ(run: RunCommand) -> None:
    predicted = Classifier(bundle(), device="cpu")("cat.png").name
    other = next(name for name in bundle().classes or () if name != predicted)
    assert run("cat.png", "--class", other).code == 0
    result = notes(f"explanations/cat-relevance-{other}.png")
    assert (result["target"], result["class"]) == (other, predicted)
    assert float(result["target_probability"]) < float(result["probability"])


def test_a_grid_has_a_caption(run: RunCommand) -> None:
    assert run("cat.png", "--method", "attention", "--grid", "heads").code == 0
    (file,) = Path("explanations").iterdir()
    assert "class" in notes(str(file))


def test_the_caption_is_above_the_maps() -> None:
    map = np.eye(3, dtype=np.float32)
    owl = Explanation(map, noise(), "relevance", "owl", 0.873, "owl", 0.873)
    cat = Explanation(map, noise(), "relevance", "cat", 0.1, "owl", 0.873)
    assert owl.caption == f"relevance for owl, {percent(0.873)}%"
    assert cat.caption == "relevance for cat, 10.0%; predicted owl, 87.3%"
    assert Explanation(map, noise(), "pca", None, None, "owl", 0.873).caption == "pca; predicted owl, 87.3%"
    assert Explanation(map, noise(), "pca").caption == "pca"
    one, other = (np.asarray(captioned(result.side_by_side(), result.caption)) for result in (owl, cat))
    assert (one[CAPTION:] == other[CAPTION:]).all()
    assert (one[CAPTION:] == np.asarray(owl.side_by_side())).all()
    assert (one[:CAPTION] != other[:CAPTION]).any()
    assert one[:CAPTION].min() < 100, "something is written"


@pytest.mark.parametrize("name", ["x" * 300, "line\nbreak \x1b[31m", "☃猫", " "])
def test_any_class_name_fits_above_the_image(name: str) -> None:
    result = Explanation(np.eye(3, dtype=np.float32), noise(), "relevance", name, 0.5)
    sheet = result.side_by_side()
    pixels = np.asarray(captioned(sheet, result.caption))
    assert pixels.shape == (sheet.height + CAPTION, sheet.width, 3)
    assert (pixels[:CAPTION, -GAP + 1 :] == 255).all(), "nothing is cut off at the right"
