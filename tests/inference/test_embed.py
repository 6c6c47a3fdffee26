"""`vitrail embed`: features in every format, constant memory, and errors."""

import io
import json
import os
import resource
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.support import forked_commands
from tests.support.commands import RunCommand

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_source
from vitrail.errors import CheckpointError, InputError
from vitrail.inference import feature_files
from vitrail.inference.features import ComputeOptions, FeatureKind, FeatureRequest, gather
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

PRE = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))


def bundle(**fields: Any) -> Bundle:
    size = {"image_size": 8, "patch_size": 4, "channels": 1, "width": 16, "depth": 2, "heads": 2, "classes": 2}
    return Bundle(ViT(ViTConfig(**{**size, **fields})), PRE)


def read(path: Path) -> tuple[NDArray[Any], list[dict[str, Any]]]:
    """Read a feature file, and return the features and the other columns."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        column, shape = table["features"].combine_chunks(), [len(table)]
        while pa.types.is_fixed_size_list(column.type):
            shape.append(column.type.list_size)
            column = column.flatten()
        return column.to_numpy().reshape(shape), table.select(["index", "name", "label"]).to_pylist()
    array = np.load(path) if path.suffix == ".npy" else load_file(path)["features"]
    sidecar = path.with_name(path.name + ".jsonl").read_text(encoding="utf-8")
    return array, [json.loads(line) for line in sidecar.splitlines()]


@pytest.mark.parametrize("suffix", ["parquet", "npy", "safetensors"])
@pytest.mark.parametrize("kind", ["pooled", "class", "patches", "registers"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_round_trip_of_every_format(suffix: str, kind: FeatureKind, dtype: Any, photos: Path, tmp_path: Path) -> None:
    model, path = bundle(registers=3), tmp_path / "out" / f"x.{suffix}"
    done = vitrail.embed(model, photos, path, tokens=kind, dtype=dtype, batch=3, workers=0, device="cpu")
    expected = gather(
        model, open_source(photos), FeatureRequest(kind), ComputeOptions("cpu", batch=3, workers=0)
    ).features
    actual, rows = read(path)
    assert actual.dtype == np.dtype(dtype)
    assert done.shape == actual.shape
    np.testing.assert_array_equal(actual, expected.astype(dtype))
    assert [row["index"] for row in rows] == list(range(20))
    assert [row["label"] for row in rows] == ["cat"] * 10 + ["dog"] * 10
    assert rows[0]["name"] == str(photos / "cat" / "0.png")
    sidecar = set() if suffix == "parquet" else {f"x.{suffix}.jsonl"}
    assert {file.name for file in path.parent.iterdir()} == {f"x.{suffix}"} | sidecar


def test_metadata(photos: Path, tmp_path: Path) -> None:
    expected = {"tokens": "patches", "layer": 0, "layers": 2, "normalised": True, "raw": False}
    for name in ("x.parquet", "x.safetensors"):
        vitrail.embed(
            bundle(), photos, tmp_path / name, tokens="patches", layer=-2, normalise=True, workers=0, device="cpu"
        )
    facts = json.loads(pq.read_schema(tmp_path / "x.parquet").metadata[b"vitrail"])
    assert facts.items() >= expected.items()
    assert facts["classes"] == ["cat", "dog"]
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert json.loads(file.metadata()["vitrail"]) == facts


@pytest.mark.parametrize("suffix", ["parquet", "npy", "safetensors"])
def test_an_unreadable_image_has_no_row(
    suffix: str, run: RunCommand, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_files, "ROW_GROUP", 500)
    whole = bundle().save("model")
    assert run("embed", whole, photos, "-o", f"good.{suffix}", "--batch", 4).code == 0
    (photos / "cat" / "00.png").write_text("no image")
    done = run("embed", whole, photos, "-o", f"x.{suffix}", "--batch", 4)
    assert done.code == 0
    assert done.out.startswith(f"20 × 16 float32 in x.{suffix}")
    assert done.after_plan.splitlines()[0] == "1 image could not be read and was skipped:"
    assert done.after_plan.splitlines()[1].startswith(f"  {photos / 'cat' / '00.png'}: ")
    (good, _), (result, rows) = read(Path(f"good.{suffix}")), read(Path(f"x.{suffix}"))
    np.testing.assert_allclose(result, good, atol=1e-6)
    assert [row["index"] for row in rows] == [0, *range(2, 21)]


def test_images_without_classes(run: RunCommand, photos: Path) -> None:
    done = run("embed", bundle().save("model"), photos / "cat", "-o", "x.npy", "--normalise", "--tokens", "class")
    assert (done.code, done.after_plan) == (0, "")
    assert done.out == "10 × 16 float32 in x.npy; names and labels are in x.npy.jsonl\n"
    features, rows = read(Path("x.npy"))
    assert {row["label"] for row in rows} == {None}
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=1e-6)


def test_splits_and_the_default_name(run: RunCommand) -> None:
    model = bundle().save("model")
    assert "359 × 2 × 2" not in run("embed", model, "digits", "--split", "test", "--tokens", "patches").out
    features, rows = read(Path("features.parquet"))
    assert features.shape == (359, 4, 16)
    assert {row["label"] for row in rows} == set("0123456789")
    done = run("embed", model, "digits", "--split", "test")
    assert (done.code, done.out) == (2, "")
    assert "features.parquet" in done.err
    assert run("embed", model, "digits", "--split", "test", "--overwrite", "--layer", 0).code == 0
    assert read(Path("features.parquet"))[0].shape == (359, 16)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux says how much memory is in use")
@pytest.mark.parametrize(
    ("suffix", "images"),
    [
        ("parquet", 3000),
        pytest.param("parquet", 10_000, marks=pytest.mark.slow),
        pytest.param("npy", 10_000, marks=pytest.mark.slow),
        pytest.param("safetensors", 10_000, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(
    suffix: str, images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(feature_files, "ROW_GROUP", 2**20)
    image = io.BytesIO()
    Image.new("L", (4, 4), 100).save(image, "PNG")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for number in range(images):
            entry = tarfile.TarInfo(f"{number:06d}.png")
            entry.size = len(image.getvalue())
            tar.addfile(entry, io.BytesIO(image.getvalue()))
    # Wide vectors from a tiny model: the features of 2,000 images are 32 MB.
    model = ViT(ViTConfig(image_size=4, patch_size=4, channels=1, width=8, depth=1, heads=1, representation=4096))
    tiny = Bundle(model, PRE.replace(size=(4, 4)))
    held: dict[int, int] = {}

    def look(stage: str, done: int, total: int | None) -> None:
        if stage == "embedding" and not done % 1000:
            held[done] = resident()

    path = tmp_path / f"x.{suffix}"
    done = vitrail.embed(tiny, tmp_path / "images.tar", path, batch=50, workers=0, device="cpu", on_progress=look)
    assert done.shape == (images, 4096)
    assert max(held.values()) - held[1000] < 12_000_000, held


def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    """As another user, also if the tests run as root."""
    (tmp_path / "locked").mkdir(mode=0o555)
    code = """
import os, sys
from vitrail.errors import CheckpointError
from vitrail.inference.embed import check_output
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    check_output(sys.argv[1], overwrite=False)
except CheckpointError as error:
    print(error)
"""
    target = tmp_path / "locked" / "x.npy"
    done = forked_commands.run(target, code=code)
    expected = f"{target} cannot be written: no write permission for {target.parent}; choose another folder\n"
    assert done.stdout == expected, done.stderr


def test_features_too_large_for_float16(photos: Path, tmp_path: Path) -> None:
    model = bundle()
    with torch.no_grad():
        model.model.norm.bias.fill_(1e5)
    with pytest.raises(
        InputError, match=r"the features of .*0\.png reach 1e\+05, which float16 cannot hold; write float"
    ):
        vitrail.embed(model, photos, tmp_path / "x.npy", dtype="float16", workers=0, device="cpu")
    assert not list(tmp_path.glob("*x.npy*"))


def test_a_full_disk(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitrail.inference.feature_files._Npy.add", refuse)
    for name in ("x.npy", "x.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name} could not be written: No space left on device; nothing was"):
            vitrail.embed(bundle(), photos, tmp_path / name, workers=0, device="cpu")
    assert {file.name for file in tmp_path.iterdir()} == {"photos"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("-o", "x.csv"),
            "features cannot be written to x.csv; give a file that ends with .parquet, .npy, .safetensors",
        ),
        (("-o", "file/x.npy"), "/file is a file; choose another folder"),
        (("-o", "folder.npy"), "folder.npy is a folder, and what would be written is a file"),
        (("-o", "sidecar.npy"), "sidecar.npy.jsonl"),
        (("--layer", "2"), "layer 2 does not exist: this model has layers 0 to 1 (or -1 for the last)"),
        (("--layer", "-3"), "layer -3 does not exist: this model has layers 0 to 1"),
        (("--tokens", "class"), "this model has no class token; choose pooled or patches"),
        (
            ("--tokens", "pooling"),
            "unknown features 'pooling'; choose pooled, class, patches, registers; did you",
        ),
        (("--raw",), "raw features are tokens as they leave a layer"),
        (("--dtype", "int8"), "features are written as float32 or float16, not as 'int8'"),
        (("--split", "tset"), "unknown split 'tset'"),
        (("--split", "test"), "too few"),
        (("--precision", "int3"), "'int3'"),
    ],
)
def test_errors(run: RunCommand, photos: Path, options: tuple[str, ...], message: str) -> None:
    Path("file").write_text("")
    Path("folder.npy").mkdir()
    Path("sidecar.npy.jsonl").write_text("mine")
    for number in range(2, 10):
        (photos / "cat" / f"{number}.png").unlink()
    model = bundle(class_token="none", pool="mean").save("model")
    done = run("embed", model, photos, *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert Path("sidecar.npy.jsonl").read_text() == "mine"


def test_invalid_paths(run: RunCommand, photos: Path) -> None:
    model = bundle().save("model")
    Path("empty").mkdir()
    for words in (("nowhere", photos), (model, "nowhere"), (model, "empty")):
        done = run("embed", *words, "-o", "x.npy")
        assert (done.code, done.out) == (2, "")
        assert "nowhere does not exist; " in done.err or "empty has no images" in done.err
        assert len(done.err.splitlines()) == 1
    assert not Path("x.npy").exists()
