"""Opening files: assumptions are logged, and errors are one sentence."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoints import google_arrays
from tests.support.corrupt_files import drop_digest
from tests.support.peers import import_peer, scramble

from vitrail.checkpoints.bundle import Bundle, imagenet_names
from vitrail.checkpoints.load import load
from vitrail.checkpoints.tensors import load_weights
from vitrail.checkpoints.writing import atomic_file, atomic_folder
from vitrail.data.preprocess import HALF, Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "classes": 3}


def tiny(**fields: Any) -> ViT:
    model = ViT(ViTConfig(**{**TINY, **fields}))
    scramble(model)
    return model.eval()


def test_imagenet_names() -> None:
    names = imagenet_names()
    assert len(names) == len(set(names)) == 1000
    peer = import_peer("torchvision.models._meta")._IMAGENET_CATEGORIES
    assert (names[0], names[1], names[999]) == (peer[0], peer[1], "toilet tissue")
    assert sum(ours.lower() == theirs.lower() for ours, theirs in zip(names, peer, strict=True)) > 900


def test_a_thousand_outputs_are_assumed_to_be_imagenet(tmp_path: Path) -> None:
    torch.save(tiny(classes=1000).state_dict(), tmp_path / "a.pth")
    bundle = load(tmp_path / "a.pth", heads=3)
    assert bundle.classes == imagenet_names()
    assert "classes=ImageNet's names (because the head has 1,000 outputs)" in bundle.provenance["assumed"][-1]
    torch.save(tiny().state_dict(), tmp_path / "b.pth")
    assert load(tmp_path / "b.pth", heads=3).classes is None


def test_a_zero_head_is_noted(tmp_path: Path) -> None:
    model = tiny(activation="gelu_tanh")
    with torch.no_grad():
        model.head.weight.zero_()
    np.savez(tmp_path / "i21k.npz", **google_arrays(model))
    assert "the head is all zero" in load(tmp_path / "i21k.npz").provenance["notes"][-1]


def test_coverage_and_preprocessing_are_the_familys(tmp_path: Path) -> None:
    torch.save(tiny().state_dict(), tmp_path / "a.pth")
    bundle = load(tmp_path / "a.pth", heads=3)
    count = len(tiny().state_dict())
    assert bundle.provenance["coverage"].startswith(f"{count} of {count} tensors, 0.0")
    assert bundle.preprocess.resize_to == (35, 35)  # 248 of 224, at 32
    assert bundle.preprocess.mean == HALF
    assert not bundle.model.training


def test_every_file_format_gives_the_same_weights(tmp_path: Path) -> None:
    model = tiny()
    state = model.state_dict()
    torch.save(state, tmp_path / "a.pth")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "b.pt")
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "c.safetensors")
    (tmp_path / "c.safetensors").rename(tmp_path / "misnamed.npz")  # the content counts, not the name
    x = torch.randn(1, 3, 32, 32)
    for name in ("a.pth", "b.pt", "old.bin", "misnamed.npz"):
        assert torch.equal(load(tmp_path / name, heads=3).model(x), model(x)), name


def test_bfloat16_arrays(tmp_path: Path) -> None:
    """JAX writes bfloat16 as raw pairs of bytes; the values are restored exactly."""
    arrays = google_arrays(tiny(activation="gelu_tanh"))
    halves = {
        name: torch.from_numpy(array.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.dtype("V2"))
        for name, array in arrays.items()
    }
    np.savez(tmp_path / "half.npz", **halves)
    model = load(tmp_path / "half.npz").model
    expected = torch.from_numpy(arrays["head/kernel"].T.copy()).to(torch.bfloat16)
    assert torch.equal(model.head.weight, expected)


# ── files that cannot be opened ──


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("touch should-not-exist",))


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    state = tiny().state_dict()
    files: dict[str, tuple[Path, str]] = {}

    def add(name: str, words: str) -> Path:
        files[name] = (folder / name, words)
        return folder / name

    torch.save(state, folder / "whole.pth")
    add("cut.pth", "copied completely").write_bytes((folder / "whole.pth").read_bytes()[:5000])
    add("empty.pth", "is empty").write_bytes(b"")
    add("text.pth", "is not a checkpoint: its content is").write_text("these are not the weights you are looking for")
    random_bytes = np.random.default_rng(0).bytes(5000)
    add("random.bin", "neither safetensors, nor a PyTorch file, nor a NumPy").write_bytes(random_bytes)
    with zipfile.ZipFile(add("photos.zip", "neither a PyTorch checkpoint nor a NumPy archive"), "w") as archive:
        archive.writestr("holiday.jpg", b"...")
    torch.save({"model": Evil()}, add("evil.pth", "opening it could run code"))
    add("evil.pkl", "opening it could run code").write_bytes(pickle.dumps(Evil(), protocol=2))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    add("lying.safetensors", "corrupt safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"123")
    add("huge.safetensors", "corrupt safetensors").write_bytes((10**15).to_bytes(8, "little") + b"{}" * 20)
    torch.save([1, 2, 3], add("list.pth", "has no named tensors"))
    torch.save({"encoder.weight": torch.zeros(2)}, add("text-model.pth", "is not a supported Vision Transformer"))
    module = import_peer("torchvision.models.vision_transformer")
    other = module.VisionTransformer(32, 8, 1, 3, 48, 96).state_dict()
    torch.save({**state, **other}, add("mixed.pth", "several families"))
    torch.save({**state, "extra.weight": torch.zeros(2)}, add("more.pth", "1 of its"))
    torch.save({k: v for k, v in state.items() if "blocks.0." not in k}, add("less.pth", "blocks.0.attn.qkv.weight"))
    torch.save({k: v for k, v in state.items() if k != "norm.bias"}, add("one-less.pth", "1 missing (norm.bias)"))
    torch.save(
        {**state, "blocks.1.norm1.bias": torch.zeros(7)}, add("bent.pth", "blocks.1.norm1.bias: file 7, model 48")
    )
    torch.save({**state, "pos_embed": torch.zeros(1, 12, 48)}, add("odd.pth", "not a square grid"))
    return files


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (path, words) in bad_files(tmp_path).items():
        with pytest.raises(CheckpointError) as caught:
            load(path, heads=3)
        assert words in str(caught.value), name
        assert "\n" not in str(caught.value), name
    assert not (tmp_path / "should-not-exist").exists()


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; pass a folder or a weight file"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no weight file"):
        load(tmp_path)
    for name in ("a.pth", "b.pth"):
        torch.save(tiny().state_dict(), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"several weight files \(a\.pth, b\.pth\); pass one"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 99}, "bundle of format 99"),
        ({"vit": {"widht": 3}}, "did you mean 'width'"),
        ({"preprocess": None}, "Preprocess"),
    ],
)
def test_bad_bundles(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    Bundle(tiny(), Preprocess(size=(32, 32))).save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    config["vitrail"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(Exception, match=words):
        load(tmp_path / "b")
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON \("):
        load(tmp_path / "b")


def test_a_wrong_number_of_heads(tmp_path: Path) -> None:
    torch.save(tiny().state_dict(), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="5 heads do not divide the attention's width 48"):
        load(tmp_path / "a.pth", heads=5)
    with pytest.raises(CheckpointError, match=r"no published ViT has this size .*; set it with --override heads=N"):
        load(tmp_path / "a.pth")


def test_fresh_names_may_be_missing() -> None:
    model, state = tiny(), tiny().state_dict()
    for name in ("head.weight", "head.bias"):
        del state[name]
    before = model.head.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"2 missing \(head\.weight, head\.bias\)"):
        load_weights(model, dict(state))
    load_weights(model, dict(state), fresh=("head.*",))
    assert torch.equal(model.head.weight, before)


def test_fresh_names_are_initialised_and_reported(tmp_path: Path) -> None:
    state = tiny().state_dict()
    del state["blocks.1.norm1.bias"]
    torch.save(state, tmp_path / "less.pth")
    with pytest.raises(CheckpointError, match=r"1 missing \(blocks\.1\.norm1\.bias\)"):
        load(tmp_path / "less.pth", heads=3, fresh=("head.*",))
    bundle = load(tmp_path / "less.pth", heads=3, fresh=("blocks.1.norm1.*",))
    assert bundle.provenance["fresh"] == ["blocks.1.norm1.bias"]
    assert "fresh: blocks.1.norm1.bias" in bundle.coverage
    assert not bundle.model.blocks[1].norm1.bias.any()
    assert torch.equal(bundle.model.blocks[1].norm1.weight, state["blocks.1.norm1.weight"])
    Bundle(tiny(), Preprocess(size=(32, 32))).save(tmp_path / "bundle")
    save_file(state, tmp_path / "bundle" / "model.safetensors")
    drop_digest(tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"1 missing \(blocks\.1\.norm1\.bias\)"):
        load(tmp_path / "bundle")
    assert load(tmp_path / "bundle", fresh=("blocks.*",)).provenance["fresh"] == ["blocks.1.norm1.bias"]


def test_loading_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(tiny().state_dict(), tmp_path / "a.pth")
    with caplog.at_level("INFO", logger="vitrail"):
        bundle = load(tmp_path / "a.pth", heads=3, classes=5, image_size=48, position_method="google")
    old = tiny().config
    position = f"position {old.grid[0]}x{old.grid[1]} -> {48 // old.patch_size[0]}x{48 // old.patch_size[1]} by google"
    count = sum(p.numel() for p in tiny().parameters()) / 1e6
    whole = f"{len(tiny().state_dict())} of {len(tiny().state_dict())} tensors, {count:.2f} M parameters"
    assert bundle.coverage == f"{whole}, {position}, image 32x32 -> 48x48, head reset {old.classes} -> 5"
    messages = [record.message for record in caplog.records if record.levelname == "INFO"]
    assert messages == [f"{tmp_path / 'a.pth'}: {bundle.coverage}"]
    assumed = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert assumed == [f"assumed: {assumption}" for assumption in bundle.assumptions]


def test_the_target_size_explains_a_non_square_table(tmp_path: Path) -> None:
    config = tiny().config.replace(image_size=(2 * tiny().config.patch_size[0], 5 * tiny().config.patch_size[1]))
    torch.save(ViT(config).state_dict(), tmp_path / "oblong.pth")
    with pytest.raises(CheckpointError, match="not a square grid; set the image size with --override image_size="):
        load(tmp_path / "oblong.pth", heads=3)
    with pytest.raises(CheckpointError, match="do not fit an image of 32×32"):
        load(tmp_path / "oblong.pth", heads=3, image_size=32)
    bundle = load(tmp_path / "oblong.pth", heads=3, image_size=config.image_size)
    assert bundle.model.config.grid == (2, 5)
    assert "position" not in bundle.coverage


# ── atomic writes ──


def test_saving_a_bundle_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, target = Bundle(tiny(), Preprocess(size=(32, 32))), tmp_path / "b"
    bundle.save(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        bundle.save(target)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitrail.checkpoints.bundle.write_safetensors", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device; nothing was changed; free some space"):
        bundle.save(target, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_overwriting_replaces_the_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "b"
    Bundle(tiny(), Preprocess(size=(32, 32)), provenance={"n": 1}).save(target)
    (target / "preprocessor_config.json").write_text("{}")
    Bundle(tiny(), Preprocess(size=(32, 32)), provenance={"n": 2}).save(target, overwrite=True)
    assert load(target).provenance["n"] == 2
    assert sorted(path.name for path in target.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_interrupted_write_leaves_no_trace(tmp_path: Path) -> None:
    def half_a_folder() -> None:
        with atomic_folder(tmp_path / "x") as folder:
            (folder / "half").write_text("…")
            raise KeyboardInterrupt

    def half_a_file() -> None:
        with atomic_file(tmp_path / "y") as file:
            file.write_text("…")
            raise KeyboardInterrupt

    for write in (half_a_folder, half_a_file):
        with pytest.raises(KeyboardInterrupt):
            write()
    assert list(tmp_path.iterdir()) == []
    with atomic_file(tmp_path / "y") as file:
        file.write_text("done")
    assert (tmp_path / "y").read_text() == "done"
