"""Corrupt every kind of file that we read: truncated or with flipped bits, it opens or raises a one-line error.

Each row of `CASES` says how such files are made, which one is corrupted, and how it is opened.
"""

import functools
import io
import json
import os
import random
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.writing import write_safetensors
from vitrail.data.cache import CacheSize, cached
from vitrail.data.checking.check import check_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.index_files import YOUNG_NS
from vitrail.data.sources.opening import open_data
from vitrail.data.sources.selection import choose_images, recorded_split
from vitrail.errors import VitrailError
from vitrail.inference.bulk_prediction import predict_files
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.run_folder import OUTCOME, write_json
from vitrail.training.sweep_run import Outcome, recorded_outcome
from vitrail.training.train import Run, train

LONGEST_SENTENCE = 1_500
OLD = YOUNG_NS / 1e9 + 0.1
"""Seconds after which a file is old enough to be cached."""
TINY = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, classes=3)
RECIPE = [
    "epochs=4",
    "batch=8",
    "evaluations=2",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "model.image_size=8",
    "model.patch_size=4",
    "data.val=0.25",
    "data.test=0.25",
]


class Case(NamedTuple):
    """A kind of file and how to corrupt it."""

    make: Callable[[Path], object]
    """Fill an empty folder."""
    file: str
    """The file to corrupt: the last match of a pattern."""
    open: Callable[[Path], object]
    """Read the file like a user would."""
    changes: bool = False
    """Whether opening changes other files, as resuming a run does."""
    slow: bool = False
    """Whether opening is so slow that the quick tests skip it."""


def corruptions(content: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield truncated content and content with flipped bits; the start and the end are corrupted more often."""
    draw = random.Random(seed)
    yield "empty", b""
    for number in range(count):
        edge = min(len(content), 600)
        at = draw.choice([draw.randrange(len(content)), draw.randrange(edge), len(content) - 1 - draw.randrange(edge)])
        match number % 4:
            case 0:
                yield f"truncated at {at}", content[:at]
            case 1 | 2:
                bit = draw.randrange(8)
                yield f"bit {bit} of {at}", content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            case _:
                noise = draw.randbytes(draw.choice([1, 4, 32]))
                yield f"noise at {at}", content[:at] + noise + content[at + len(noise) :]


def check(case: Case, place: Path, count: int, seed: int = 0) -> int:
    """Corrupt a file repeatedly and open it; return how often that raised an error."""
    whole, work = place / "whole", place / "work"
    work.mkdir(parents=True)
    before = os.environ.get("VITRAIL_CACHE")
    os.environ["VITRAIL_CACHE"] = str(work / "cache")
    errors = 0
    try:
        case.make(work)
        shutil.copytree(work, whole)
        case.open(work)  # the intact file opens
        if case.changes:
            _restore(whole, work)
        file = sorted(work.glob(case.file))[-1]
        content = file.read_bytes()
        for how, corrupt in corruptions(content, count, seed):
            if case.changes:
                _restore(whole, work)
            file.write_bytes(corrupt)
            errors += _raises(case, work, f"{file.relative_to(work)}, {how}")
    finally:
        os.environ.pop("VITRAIL_CACHE")
        if before is not None:
            os.environ["VITRAIL_CACHE"] = before
    return errors


def _restore(whole: Path, work: Path) -> None:
    shutil.rmtree(work)
    shutil.copytree(whole, work)


def _raises(case: Case, work: Path, how: str) -> bool:
    try:
        case.open(work)
    except VitrailError as error:
        text = str(error)
        assert text.strip(), how
        assert "\n" not in text, f"{how}: {text}"
        assert len(text) < LONGEST_SENTENCE, f"{how}: {text[:300]}"
        return True
    except Exception as error:
        raise AssertionError(f"{how}: {type(error).__name__}: {error}") from error
    return False


# ── weights ──


def tiny_bundle() -> Bundle:
    torch.manual_seed(0)
    return Bundle(ViT(TINY).eval(), Preprocess(size=8), ("cat", "dog", "fox"))


def _save_bundle(place: Path) -> None:
    tiny_bundle().save(place / "m")


def _save_bundle_without_digest(place: Path) -> None:
    _save_bundle(place)
    drop_digest(place / "m")


def drop_digest(bundle: Path) -> None:
    """Turn a bundle into one written by other tools, without a digest."""
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    del config["vitrail"]["weights_sha256"]
    (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _converted(to: str, name: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        vitrail.convert(tiny_bundle(), place / name, to=to, approximate=True)

    return make


def _torch_file(**options: bool) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        torch.save({"state_dict": ViT(TINY).state_dict(), "epoch": 3}, place / "m.pth", **options)

    return make


def _compressed_npz(place: Path) -> None:
    _converted("google", "plain.npz")(place)
    with np.load(place / "plain.npz") as arrays:
        np.savez_compressed(place / "m.npz", **arrays)


def _sharded(place: Path) -> None:
    vitrail.convert(tiny_bundle(), place / "m", to="transformers")
    shard = "model-00001-of-00001.safetensors"
    (place / "m" / "model.safetensors").rename(place / "m" / shard)
    index = {"metadata": {}, "weight_map": {"vit.embeddings.cls_token": shard}}
    (place / "m" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _with_key_table(place: Path) -> None:
    weights = tiny_bundle().model.state_dict()
    write_safetensors(place / "m.safetensors", {f"my.{name}": tensor for name, tensor in weights.items()})
    lines = [f'[[keys]]\ntheirs = "my.{name}"\nours = "{name}"\n' for name in weights]
    (place / "keys.toml").write_text("[config]\nheads = 2\n\n" + "\n".join(lines), encoding="utf-8")


def _load(name: str, **more: object) -> Callable[[Path], object]:
    def opened(place: Path) -> object:
        options = {key: str(place / str(value)) if key == "keys" else value for key, value in more.items()}
        bundle = vitrail.load(place / name, **options)
        side = bundle.model.config.image_size
        if bundle.model.config.channels * side[0] * side[1] < 1 << 16 and bundle.preprocess.channels in (1, 3):
            vitrail.Classifier(bundle)(np.zeros((9, 9, 3), np.uint8))
        return bundle

    return opened


# ── data ──


def _images(place: Path, count: int = 24) -> Path:
    for number in range(count):
        folder = place / "data" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 10, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return place / "data"


def _manifest(name: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        data = _images(place)
        rows = [{"path": os.fspath(f.relative_to(data)), "label": f.parent.name} for f in sorted(data.rglob("*.png"))]
        if name.endswith(".csv"):
            lines = ["path,label", *(f"{row['path']},{row['label']}" for row in rows)]
            (data / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif name.endswith(".jsonl"):
            (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(rows), data / name)

    return make


def _parquet_bytes(place: Path) -> None:
    data = _images(place)
    rows = [{"image": f.read_bytes(), "label": f.parent.name} for f in sorted(data.rglob("*.png"))]
    pq.write_table(pa.Table.from_pylist(rows), place / "all.parquet")


def _tar(place: Path) -> None:
    data = _images(place)
    with tarfile.open(place / "all.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number, file in enumerate(sorted(data.rglob("*.png"))):
            for suffix, content in (("png", file.read_bytes()), ("cls", str(number % 2).encode())):
                info = tarfile.TarInfo(f"{'long' * 30 if number == 3 else ''}{number:05d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    (place / "classes.txt").write_text("cat\ndog\n", encoding="utf-8")


def _old_images(place: Path) -> None:
    _images(place)
    time.sleep(OLD)


def _old_manifest(place: Path) -> None:
    _manifest("all.csv")(place)
    time.sleep(OLD)


def _old_tar(place: Path) -> None:
    _tar(place)
    time.sleep(OLD)


def _read_all(name: str) -> Callable[[Path], object]:
    def opened(place: Path) -> object:
        splits = open_data(place / name, val=0.25, test=0.25)
        for index in range(len(splits.train)):
            try:
                splits.train.read(index)
            except VitrailError:
                continue
        return check_data(splits, cache=False).as_dict()

    return opened


def _checked(place: Path) -> object:
    return check_data(open_data(place / "data" / "all.csv", val=0.25, test=0.25)).as_dict()


def _cached(place: Path) -> object:
    source = cached(open_data(place / "data", val=0, test=0).train, CacheSize(8))
    for index in range(len(source)):
        try:
            source.read(index)
        except VitrailError:
            continue
    return source


# ── runs ──


def train_tiny(place: Path) -> Run:
    """Train briefly, or resume the run."""
    return train(place / "data", changes=RECIPE, folder=place / "run", device="cpu", workers=0, quiet=True)


@functools.cache
def _made_once() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="run-to-corrupt-")
    _images(Path(made.name))
    train_tiny(Path(made.name))
    return made


def make_run(place: Path) -> None:
    """Create a finished run."""
    shutil.copytree(_made_once().name, place, dirs_exist_ok=True)


def make_stopped_run(place: Path) -> None:
    """Leave a run without its last state, as if it had been killed."""
    make_run(place)
    shutil.rmtree(sorted((place / "run" / "state").glob("[0-9]*"))[-1])


def _report(place: Path) -> object:
    return vitrail.report(place / "run")


def _recorded(place: Path) -> object:
    return choose_images(place / "data", record=recorded_split(place / "run" / "best"))


def _outcome(place: Path) -> None:
    write_json(place / OUTCOME, asdict(Outcome({"val_top1": 0.5, "val_loss": 1.25}, 3, 6, 2.5, None)))


# ── predictions ──


def _predictions(format: str, *, stopped: bool) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        tiny_bundle().save(place / "m")
        _images(place)
        target = place / f"rows.{format}"
        predict_files(place / "m", str(place / "data"), output=target, workers=0)
        if stopped:
            _stop_early(place, format)

    return make


def _stop_early(place: Path, format: str) -> None:
    """Replace a finished job by one that stopped before its end."""
    target = place / f"rows.{format}"
    target.unlink()
    seen = 0

    def stop(done: int, _: int | None) -> None:
        nonlocal seen
        seen = done
        if done >= 8:
            raise KeyboardInterrupt

    try:
        predict_files(place / "m", str(place / "data"), output=target, workers=0, batch=4, on_progress=stop)
    except KeyboardInterrupt:
        assert seen < 24


def _resume(format: str) -> Callable[[Path], object]:
    def opened(place: Path) -> object:
        return predict_files(
            place / "m", str(place / "data"), output=place / f"rows.{format}", workers=0, batch=4, resume=True
        )

    return opened


def _predict_image(place: Path) -> object:
    return predict_files(place / "m", [str(place / "data")], output=place / "rows.jsonl", workers=0, overwrite=True)


def _image(suffix: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        tiny_bundle().save(place / "m")
        data = _images(place, 2)
        pixels = np.random.default_rng(1).integers(0, 256, (20, 24, 3), np.uint8)
        if suffix == "npy":
            np.save(data / "z.npy", pixels)
        else:
            Image.fromarray(pixels).save(data / f"z.{suffix}")

    return make


CASES: dict[str, Case] = {
    "safetensors": Case(_converted("timm", "m"), "m/*.safetensors", _load("m/model.safetensors")),
    "timm config": Case(_converted("timm", "m"), "m/config.json", _load("m")),
    "transformers config": Case(_converted("transformers", "m"), "m/config.json", _load("m")),
    "transformers preprocessing": Case(_converted("transformers", "m"), "m/preprocessor_config.json", _load("m")),
    "index of weight shards": Case(_sharded, "m/*.index.json", _load("m")),
    "npz": Case(_converted("google", "m.npz"), "m.npz", _load("m.npz", heads=2)),
    "compressed npz": Case(_compressed_npz, "m.npz", _load("m.npz", heads=2)),
    "pth": Case(_torch_file(), "m.pth", _load("m.pth", heads=2)),
    "legacy pth": Case(_torch_file(_use_new_zipfile_serialization=False), "m.pth", _load("m.pth", heads=2)),
    "key table": Case(_with_key_table, "keys.toml", _load("m.safetensors", keys="keys.toml")),
    "bundle weights": Case(_save_bundle, "m/model.safetensors", _load("m")),
    "bundle weights without digest": Case(_save_bundle_without_digest, "m/model.safetensors", _load("m")),
    "bundle config": Case(_save_bundle, "m/config.json", _load("m")),
    "csv": Case(_manifest("all.csv"), "data/all.csv", _read_all("data/all.csv")),
    "jsonl": Case(_manifest("all.jsonl"), "data/all.jsonl", _read_all("data/all.jsonl")),
    "parquet": Case(_manifest("all.parquet"), "data/all.parquet", _read_all("data/all.parquet")),
    "parquet of images": Case(_parquet_bytes, "all.parquet", _read_all("all.parquet")),
    "tar": Case(_tar, "all.tar", _read_all("all.tar")),
    "classes of a tar": Case(_tar, "classes.txt", _read_all("all.tar")),
    "index of a tar": Case(_old_tar, "cache/index/*.npz", _read_all("all.tar")),
    "index of a folder": Case(_old_images, "cache/index/*.npz", _read_all("data"), slow=True),
    "cache of a check": Case(_old_manifest, "cache/index/*.npz", _checked, slow=True),
    "outcome of a run of a sweep": Case(_outcome, "outcome.json", recorded_outcome),
    "table of the pixel cache": Case(_images, "cache/pixels/*/table.npz", _cached),
    "pixel cache": Case(_images, "cache/pixels/*/pixels.bin", _cached),
    "job": Case(_predictions("jsonl", stopped=True), "rows.jsonl.job.json", _resume("jsonl"), changes=True),
    "rows as jsonl": Case(_predictions("jsonl", stopped=True), "rows.jsonl", _resume("jsonl"), changes=True),
    "rows as csv": Case(_predictions("csv", stopped=True), "rows.csv", _resume("csv"), changes=True),
    "rows for parquet": Case(
        _predictions("parquet", stopped=True), "rows.parquet.rows.jsonl", _resume("parquet"), changes=True
    ),
    "finished jsonl": Case(_predictions("jsonl", stopped=False), "rows.jsonl", _resume("jsonl"), changes=True),
    "finished csv": Case(_predictions("csv", stopped=False), "rows.csv", _resume("csv"), changes=True),
    "finished parquet": Case(_predictions("parquet", stopped=False), "rows.parquet", _resume("parquet"), changes=True),
    **{f"{suffix} image": Case(_image(suffix), f"data/z.{suffix}", _predict_image) for suffix in ("png", "jpg", "npy")},
    "split for eval": Case(make_run, "run/split.json", _recorded, slow=True),
    **{
        f"report of {file}": Case(make_run, f"run/{file}", _report, changes=True, slow=True)
        for file in (
            "recipe.toml", "split.json", "origin.json", "metrics.jsonl", "result.json", "check.json",
            "test_predictions.parquet", "best/config.json", "best/model.safetensors",
        )
    },
    **{
        f"run with {file}": Case(make_stopped_run, f"run/{file}", train_tiny, changes=True, slow=True)
        for file in (
            "recipe.toml", "split.json", "origin.json", "metrics.jsonl", "log.txt", "state/*/state.json",
            "state/*/state.safetensors", "best/config.json", "best/model.safetensors", "result.json", "stamps.index",
        )
    },
    **{
        f"finished run with {file}": Case(make_run, f"run/{file}", train_tiny, changes=True, slow=True)
        for file in ("state/*/state.json", "state/*/state.safetensors", "best/config.json", "best/model.safetensors")
    },
}  # fmt: skip
