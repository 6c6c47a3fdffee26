"""Corrupt, endless or oversized weights and configs: an immediate one-line error that names the file."""

import json
import os
import signal
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.corrupt_files import TINY, drop_digest, tiny_bundle

import vitrail
from vitrail.checkpoints.custom import read_key_table
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_data
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.io import file_digest
from vitrail.models.vit import ViT
from vitrail.training.recipe_files import read_recipe


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tiny_bundle().save(tmp_path / "bundle")


@contextmanager
def at_once() -> Iterator[None]:
    """Fail if the block hangs."""

    def hangs(_: int, __: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def edit(bundle: Path, change: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    change(config["vitrail"])
    (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_one_flipped_bit_is_detected(bundle: Path) -> None:
    weights = bundle / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{weights} is corrupt: its digest is not the weights_sha256 in"):
        vitrail.load(bundle)
    drop_digest(bundle)
    vitrail.load(bundle)


def test_the_digest_is_that_of_sha256sum(bundle: Path) -> None:
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    assert config["vitrail"]["weights_sha256"] == file_digest(bundle / "model.safetensors")


def test_a_bundle_without_a_digest_opens(bundle: Path) -> None:
    """Removing the line, as the message suggests, leaves valid JSON."""
    config = bundle / "config.json"
    kept = [line for line in config.read_text(encoding="utf-8").splitlines() if "weights_sha256" not in line]
    config.write_text("\n".join(kept), encoding="utf-8")
    save_file({**load_file(bundle / "model.safetensors")}, bundle / "model.safetensors")
    assert vitrail.load(bundle).classes == ("cat", "dog", "fox")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int32])
def test_a_bundle_with_an_unsupported_dtype(kind: torch.dtype, bundle: Path) -> None:
    weights = {name: tensor.to(kind) for name, tensor in load_file(bundle / "model.safetensors").items()}
    save_file(weights, bundle / "model.safetensors")
    drop_digest(bundle)
    with pytest.raises(CheckpointError, match=r"has (float8_e4m3fn|int32) values in .*; save the model in float32"):
        vitrail.load(bundle)


def test_an_archive_with_a_corrupt_directory(tmp_path: Path) -> None:
    vitrail.convert(tiny_bundle(), tmp_path / "m.npz", to="google", approximate=True)
    content = bytearray((tmp_path / "m.npz").read_bytes())
    at = content.rindex(b"PK\x01\x02")
    content[at : at + 4] = b"XXXX"
    (tmp_path / "m.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.npz is a zip file with a corrupt directory"):
        vitrail.load(tmp_path / "m.npz", heads=2)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cls.npy", bytes(3_000_000))
        archive.infolist()[0].file_size = 3_200_000_000  # claimed by the directory, which is written last
    with pytest.raises(CheckpointError, match=r"would unpack from 0\.0 MB to 3\.2 GB, far more than weights compress"):
        vitrail.load(tmp_path / "m.npz", heads=2)


def test_a_torch_file_that_was_compressed(tmp_path: Path) -> None:
    torch.save(ViT(TINY).state_dict(), tmp_path / "m.pth")
    with zipfile.ZipFile(tmp_path / "m.pth") as old, zipfile.ZipFile(tmp_path / "n.pth", "w", 8) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    with pytest.raises(CheckpointError, match=r"n\.pth is a recompressed PyTorch file"):
        vitrail.load(tmp_path / "n.pth", heads=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested more than 100 levels deep"),
        ('{"a":' * 200_000, "nested more than 100 levels deep"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested more than 100 levels deep"),
        ('{"vitrail": ' + "9" * 5_000 + "}", "is not JSON"),
        ('{"vitrail": {"format_version": ' + "9" * 4_000 + "}}", "is a bundle of format 99"),
    ],
)
def test_absurd_configs(text: str, words: str, bundle: Path) -> None:
    (bundle / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=words) as result:
        vitrail.load(bundle)
    assert len(str(result.value)) < 600


def test_absurd_key_tables(tmp_path: Path) -> None:
    for text in ("a = " + "[" * 200_000, "a = " + "9" * 5_000, "a = \xff"):
        (tmp_path / "keys.toml").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"keys\.toml (is not|is nested)"):
            read_key_table(tmp_path / "keys.toml")


def test_preprocessing_to_a_million_pixels_a_side(bundle: Path) -> None:
    for field in ("size", "resize_to"):
        with pytest.raises(ConfigError, match=f"preprocess.{field} is 1,000,000×1,000,000 with 3 channels, more than"):
            Preprocess(**{field: 1_000_000})
    assert Preprocess(size=8_192).size == (8_192, 8_192)
    edit(bundle, lambda ours: ours["preprocess"].update(size=[9_000, 9_000]))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="prepares images of 9000×9000 pixels in 3 channels for a model that"):
        vitrail.load(bundle)


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m.pth"])
def test_an_endless_device_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with at_once(), pytest.raises(CheckpointError, match="not a regular file"):
        vitrail.load(tmp_path / name)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("device", [True, False])
def test_a_bundle_of_devices_and_pipes(file: str, device: bool, bundle: Path) -> None:
    (bundle / file).unlink()
    (bundle / file).symlink_to("/dev/zero") if device else os.mkfifo(bundle / file)
    with at_once(), pytest.raises(CheckpointError):
        vitrail.load(bundle)


@pytest.mark.parametrize(
    "name", ["all.csv", "all.jsonl", "all.parquet", "all.tar", "a/1.png", "recipe.toml", "keys.toml"]
)
def test_a_pipe_does_not_block(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    opened: dict[str, Callable[[Path], object]] = {
        "recipe.toml": read_recipe,
        "keys.toml": read_key_table,
        "1.png": lambda path: vitrail.Classifier(tiny_bundle())(path),
    }
    with at_once(), pytest.raises(VitrailError):
        opened.get(Path(name).name, open_data)(tmp_path / name)


@pytest.mark.parametrize(("name", "to"), [("m.npz", "google"), ("m.pth", "torchvision"), ("m.safetensors", "timm")])
def test_written_files_follow_the_umask(name: str, to: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        vitrail.convert(tiny_bundle(), tmp_path / name, to=to, approximate=True)
    finally:
        os.umask(before)
    files = [tmp_path / name] if (tmp_path / name).is_file() else list((tmp_path / name).iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "parquet"])
def test_features_follow_the_umask(suffix: str, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
        np.save(tmp_path / "data" / str(number) / "1.npy", np.zeros((8, 8, 3), np.uint8))
    before = os.umask(0o027)
    try:
        vitrail.embed(tiny_bundle(), tmp_path / "data", tmp_path / f"f.{suffix}", device="cpu", workers=0)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("f.*")} == {0o640}
