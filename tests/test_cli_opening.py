"""Every command that opens a model: any dtype, --override and --keys, and logged assumptions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.support import forked_commands
from tests.support.peers import scramble
from typer.testing import CliRunner

import vitrail
from vitrail.cli.app import app

CONFIG = vitrail.ViTConfig(image_size=(16, 16), patch_size=(8, 8), width=48, depth=1, heads=3, classes=2)
HEADS = ("--override", "heads=3")
ASSUMED = ["activation", "norm_eps", "pool", "preprocess.mean", "preprocess.std", "preprocess.resize"]
COMMANDS = ("predict", "eval", "embed", "probe", "explain", "figures", "export", "convert", "bench", "train", "inspect")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for number in range(24):
        place = root / ("cat", "dog")[number % 2] / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (16, 16, 3), np.uint8)).save(place)
    return root


def checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    model = scramble(vitrail.create(CONFIG))
    save_file({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, folder / "vit.safetensors")
    return folder / "vit.safetensors"


def words(command: str, file: Path, images: Path, out: Path) -> list[str]:
    """Return arguments that run a command quickly on a model."""
    first = str(next(images.rglob("*.png")))
    changes = ("steps=1", "batch=8", "evaluations=1")
    match command:
        case "predict":
            return ["predict", str(file), first, "--workers", "0", "-o", str(out / "rows.jsonl"), "-q"]
        case "eval":
            return ["eval", str(file), str(images), "--split", "all", "--workers", "0", "--by-number"]
        case "embed":
            return ["embed", str(file), str(images), "-o", str(out / "features.npy"), "--workers", "0"]
        case "probe":
            return ["probe", str(file), str(images), "--only", "knn", "--k", "1", "--workers", "0"]
        case "explain":
            return ["explain", str(file), first, "--out", str(out / "maps")]
        case "figures":
            return ["figures", str(file), "--out", str(out / "figures"), "--only", "filters"]
        case "export":
            return ["export", str(file), str(out / "vit.pt2"), "--to", "torch"]
        case "convert":
            return ["convert", str(file), str(out / "bundle"), "--dtype", "float32"]
        case "bench":
            quick = ("--engine", "torch", "--precision", "float32", "--batch", "1", "--seconds", "0.01")
            return ["bench", str(file), *quick]
        case "train":
            start = ["train", str(images), "--from", str(file), "--run", str(out / "run"), "--workers", "0"]
            return [*start, *(word for change in changes for word in ("--set", change))]
        case _:
            return ["inspect", str(file)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_opens_bf16_and_logs_its_assumptions(
    command: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = checkpoint(tmp_path, torch.bfloat16)
    done = CliRunner().invoke(app, [*words(command, file, images, tmp_path), *HEADS])
    assert done.exit_code == 0, (done.output, done.exception)
    messages = [
        record.message for record in caplog.records if record.name == "vitrail" and record.levelname == "WARNING"
    ]
    fields = [line.removeprefix("assumed: ").partition("=")[0] for line in messages]
    assert fields == ASSUMED, messages


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_fails_on_ambiguous_fields(command: str, images: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, words(command, checkpoint(tmp_path, torch.float32), images, tmp_path))
    assert isinstance(done.exception, vitrail.CheckpointError)
    assert "set it with --override heads=N" in str(done.exception)


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("predict", ("no head",), "the model has no head"),
        ("predict", ("--engine", "onxx"), "'onxx'"),
        ("eval", ("no head",), "the model has no head"),
        ("embed", ("--layer", "9"), "layer"),
        ("probe", ("--layer", "9"), "layer"),
        ("explain", ("--method", "attention", "--layer", "9"), "layer"),
        ("export", ("--to", "onxx"), "the formats are"),
        ("convert", ("--to", "google"), "google is written as a file"),
        ("convert", ("--to", "onxx"), "no format is called"),
        ("convert", ("--image-size", "33"), "not a multiple of patch"),
        ("train", ("--set", "model.width=24"), "model.width cannot be changed"),
        ("train", ("--set", "bacth=3"), "bacth"),
    ],
)
def test_an_error_is_not_preceded_by_warnings(
    command: str,
    more: tuple[str, ...],
    message: str,
    images: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Assumptions about a file do not matter if opening or using it fails."""
    file = checkpoint(tmp_path, torch.float32)
    if more == ("no head",):
        config = CONFIG.replace(classes=0)
        save_file(scramble(vitrail.create(config)).state_dict(), file)
        more = ()
    done = CliRunner().invoke(app, [*words(command, file, images, tmp_path), *HEADS, *more])
    assert isinstance(done.exception, vitrail.VitrailError), done.output
    assert message in str(done.exception)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_python_logs_assumptions_once_and_only_after_success(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = checkpoint(tmp_path, torch.float32)
    with pytest.raises(vitrail.ConfigError, match="not a multiple of patch"):
        vitrail.load(file, heads=3, image_size=33)
    assert caplog.records == []
    bundle = vitrail.load(file, heads=3)
    assert len(caplog.records) == len(ASSUMED)
    vitrail.Classifier(bundle)
    vitrail.evaluate(bundle, images, by_number=True, workers=0)
    assert len(caplog.records) == len(ASSUMED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_predict_from_any_dtype_in_any_precision(
    dtype: torch.dtype, precision: str, images: Path, tmp_path: Path
) -> None:
    line = [*words("predict", checkpoint(tmp_path, dtype), images, tmp_path), *HEADS, "--precision", precision]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, (done.output, done.exception)


def test_assumptions_go_to_stderr(tmp_path: Path) -> None:
    """In a separate process, where no test handler captures the log."""
    done = forked_commands.run("inspect", checkpoint(tmp_path, torch.float32), *HEADS)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 6
    assert all(text.startswith("assumed: ") and "--override" in text for text in lines)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("heads=abc", "heads is 'abc': input should be a valid integer"),
        ("patch_size=8", None),
        ("haeds=3", "no option 'haeds'; did you mean 'heads'"),
        ("heads", "'heads' is not NAME=VALUE"),
        ("preprocess.mean=0.4,0.5,0.6", None),
        ("preprocess.mean=.4,.5,.6", None),
        ("pool=none", None),
        ("head_dim=none", None),
        ("norm_eps=none", "norm_eps is 'none': input should be a valid number"),
    ],
)
def test_overrides_on_the_command_line(override: str, message: str | None, tmp_path: Path) -> None:
    file = checkpoint(tmp_path, torch.float32)
    done = CliRunner().invoke(app, ["inspect", str(file), *HEADS, "--override", override])
    if message is None:
        assert done.exit_code == 0, (done.output, done.exception)
        assert "patches of 8×8" in done.output
        assert not override.startswith("preprocess") or "mean (0.4, 0.5, 0.6)" in done.output
        assert override != "pool=none" or "pool none" in done.output
    else:
        assert message in str(done.exception) + done.output.replace("\n", " ")
        assert isinstance(done.exception, vitrail.ConfigError | SystemExit)


def test_fine_tuning_with_other_heads_is_another_run(images: Path, tmp_path: Path) -> None:
    """The weights are the same but the model is not, so the run is not resumed."""
    line = words("train", checkpoint(tmp_path, torch.float32), images, tmp_path)
    assert CliRunner().invoke(app, [*line, *HEADS]).exit_code == 0
    done = CliRunner().invoke(app, [*line, "--override", "heads=1"])
    assert isinstance(done.exception, vitrail.ConfigError)
    plain = CliRunner().invoke(app, ["train", str(images), *HEADS])
    assert "add --from" in str(plain.exception)


def test_the_server_takes_overrides_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from vitrail.serving.lifecycle import Counters
    from vitrail.serving.model_registry import ServedModel
    from vitrail.serving.settings import Settings

    file = checkpoint(tmp_path, torch.bfloat16)
    made: dict[str, Any] = {"models": [str(file)], "device": "cpu"}
    with pytest.raises(vitrail.CheckpointError, match="--override heads=N"):
        ServedModel(Settings(**made).models[0], Settings(**made), Counters())
    settings = Settings(**made, overrides={"heads": 3})
    served = ServedModel(settings.models[0], settings, Counters())
    assert served.description["heads"] == 3
    assert served.engine is not None
    messages = [record.__dict__["fields"] for record in caplog.records if record.name == "vitrail.serving"]
    assert [line["what"].partition("=")[0] for line in messages if line["model"] == "vit" and "what" in line] == ASSUMED
    assert "vitrail" not in {record.name for record in caplog.records}  # whose lines are not part of the server's log


@pytest.mark.parametrize("command", ["predict", "inspect", "train"])
def test_a_key_table_opens_a_custom_vit_in_commands(
    command: str, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = scramble(vitrail.create(CONFIG)).state_dict()
    save_file({f"mine.{name}": tensor.double() for name, tensor in state.items()}, tmp_path / "mine.safetensors")
    table = '[config]\nheads = 3\nactivation = "gelu"\nnorm_eps = 1e-6\npool = "cls"\n'
    table += "[preprocess]\nmean = [0.5, 0.5, 0.5]\n"
    table += "".join(f'[[keys]]\ntheirs = "mine.{name}"\nours = "{name}"\n' for name in state)
    (tmp_path / "mine.toml").write_text(table)
    line = [*words(command, tmp_path / "mine.safetensors", images, tmp_path), "--keys", str(tmp_path / "mine.toml")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, (done.output, done.exception)
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    fields = [line.removeprefix("assumed: ").partition("=")[0] for line in messages]
    assert fields == ["norm_order", "class_token", "preprocess.std", "preprocess.resize"]
