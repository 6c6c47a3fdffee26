"""The checks themselves: a wrong writer is caught, user files are not overwritten, key tables are validated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import tiny_bundle

from vitrail.checkpoints import convert as module
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.custom import read_key_table
from vitrail.checkpoints.family import Family
from vitrail.checkpoints.formats import timm
from vitrail.checkpoints.infer import infer_config
from vitrail.checkpoints.keys import KeyMap, rule
from vitrail.checkpoints.load import load
from vitrail.checkpoints.tensors import load_weights
from vitrail.checkpoints.writing import atomic_file
from vitrail.errors import CheckpointError


@pytest.mark.parametrize("damage", [1.001, float("nan"), float("inf")])
@pytest.mark.parametrize("approximate", [False, True])
def test_a_wrong_writer_is_caught(
    damage: float, approximate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Family.write

    def wrong(self: Family, weights: Any, config: Any) -> Any:
        written = write(self, weights, config)
        key = next(name for name in written if "mlp" in name.lower() and name.endswith(("weight", "kernel")))
        return {**written, key: written[key] * (damage if damage != 1.001 or not approximate else 50)}

    monkeypatch.setattr(Family, "write", wrong)
    bundle = tiny_bundle()
    with torch.no_grad():
        bundle.model.get_parameter("head.weight").zero_()  # the logits alone prove nothing
    to, name = ("google", "x.npz") if approximate else ("torchvision", "x.pth")
    with pytest.raises(CheckpointError, match=r"the logits of the converted .* differ by"):
        convert(bundle, tmp_path / name, to=to, approximate=approximate)
    assert list(tmp_path.iterdir()) == []


def test_the_callers_model_keeps_its_mode(tmp_path: Path) -> None:
    bundle = tiny_bundle(mlp_dropout=0.5)
    bundle.model.train()
    assert convert(bundle, tmp_path / "x").change == 0
    assert bundle.model.training


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    convert(tiny_bundle(), full)  # an empty folder may be used
    convert(tiny_bundle(), full, overwrite=True)
    (full / "precious.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"contains more than a checkpoint \(precious\.txt\), and replacing it would"
    ):
        convert(tiny_bundle(), full, overwrite=True)
    with pytest.raises(CheckpointError, match="is a folder, and what would be written is a file"):
        convert(tiny_bundle(), _renamed(full, tmp_path / "full.pth"), to="torchvision", overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file, and what would be written is a folder"):
        convert(tiny_bundle(), tmp_path / "file", overwrite=True)
    assert (tmp_path / "full.pth" / "precious.txt").read_text() == "mine"
    words = "exists already; choose another name, or replace it with --overwrite"
    with pytest.raises(CheckpointError, match=words), atomic_file(tmp_path / "file"):
        pass


def _renamed(old: Path, new: Path) -> Path:
    return old.rename(new)


def test_the_source_is_not_its_own_target(tmp_path: Path) -> None:
    tiny_bundle().save(tmp_path / "models" / "vit")
    for target in (tmp_path / "models" / "vit", tmp_path / "models"):
        with pytest.raises(CheckpointError, match="is or contains the source"):
            convert(tmp_path / "models" / "vit", target, overwrite=True)
    with pytest.raises(CheckpointError, match="is the name of a model on a hub"):
        convert(tmp_path / "models" / "vit", "hf:org/x")


def test_unused_parent_folders_are_removed(tmp_path: Path) -> None:
    bundle = tiny_bundle()
    with torch.no_grad():
        bundle.model.get_parameter("norm.bias").fill_(float("nan"))
    with pytest.raises(CheckpointError, match="the model's outputs are not finite, so nothing was written"):
        convert(bundle, tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "name", "words"),
    [
        ("torchvision", "x", r"torchvision is written as a file; use a name that ends in \.safetensors or"),
        ("google", "x.pth", r"google is written as a file; use a name that ends in \.npz$"),
        ("transformers", "x.pth", "transformers is written as a folder, but x.pth is a file name"),
        ("bundle", "x.safetensors", "bundle is written as a folder"),
    ],
)
def test_unsuitable_target_names(to: Any, name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(tiny_bundle(activation="gelu_tanh", norm_eps=1e-6), tmp_path / name, to=to)


def test_permissions_are_those_of_other_files(tmp_path: Path) -> None:
    tiny_bundle().save(tmp_path / "b")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "other").stat().st_mode
    for file in (tmp_path / "b").iterdir():
        assert file.stat().st_mode == (tmp_path / "other" / "file").stat().st_mode


def test_the_eps_of_transformers_is_close_enough_for_timm(tmp_path: Path) -> None:
    bundle = tiny_bundle(norm_eps=1e-12)
    with pytest.raises(CheckpointError, match=r"norm_eps=1e-12 \(the target has 1e-06\); allow it"):
        convert(bundle, tmp_path / "timm", to="timm")
    done = convert(bundle, tmp_path / "timm", to="timm", approximate=True)
    assert 0 < done.change < module.APPROXIMATE_TOLERANCE
    assert load(tmp_path / "timm").model.config.norm_eps == 1e-6
    assert convert(bundle, tmp_path / "timm.pth", to="timm").change == 0


# ── nonsense files ──


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.999999999.attn.qkv.weight": torch.zeros(3)}, "layer 2 of 1000000000 is missing from the weights"),
        (
            {"patch_embed.proj.weight": torch.zeros(128, 192)},
            r"patch_embed\.proj\.weight is \(128, 192\), expected 4 non-empty axes",
        ),
        ({"reg_token": torch.zeros(3)}, r"reg_token is \(3,\), expected 3 non-empty axes"),
        ({"head.weight": torch.tensor(1.0)}, r"head\.weight is \(\), expected 2 non-empty axes"),
        (
            {"norm.bias": torch.zeros(128, dtype=torch.int8)},
            r"has int8 values in norm\.bias; save the model in float32",
        ),
        ({"norm.bias": torch.zeros(128).to_sparse()}, r"has sparse values in norm\.bias"),
        ({"norm.bias": torch.zeros(128, device="meta")}, r"has no values in norm\.bias|corrupt"),
    ],
)
def test_nonsense_shapes_and_values(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    torch.save({**tiny_bundle().model.state_dict(), **change}, tmp_path / "odd.pth")
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "odd.pth", heads=2)


def test_nonsense_archives(tmp_path: Path) -> None:
    np.savez(tmp_path / "words.npz", a=np.array(["x"]))
    with pytest.raises(CheckpointError, match="is a NumPy archive that is corrupt or contains something other"):
        load(tmp_path / "words.npz")
    convert(tiny_bundle(activation="gelu_tanh"), tmp_path / "whole.npz", to="google")
    arrays = dict(np.load(tmp_path / "whole.npz"))
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    np.savez(tmp_path / "big-endian.npz", **swapped)
    assert load(tmp_path / "big-endian.npz").model.config.depth == 2
    less = {name: array for name, array in arrays.items() if "encoderblock_0/MultiHead" not in name}
    np.savez(tmp_path / "less.npz", **less)
    with pytest.raises(CheckpointError, match="looks like google, but its tensors have other shapes"):
        load(tmp_path / "less.npz")
    key = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/kernel"
    np.savez(tmp_path / "no-key.npz", **{name: array for name, array in arrays.items() if name != key})
    with pytest.raises(CheckpointError, match=r"needs .*key/kernel, which the file does not have; is it truncated"):
        load(tmp_path / "no-key.npz")


def test_a_gap_among_layers() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny_bundle(depth=3).model.state_dict().items()}
    with pytest.raises(CheckpointError, match="layer 1 of 3 is missing from the weights"):
        infer_config({name: shape for name, shape in shapes.items() if "blocks.1." not in name}, {"heads": 2})


def test_unexpected_weights_and_long_lists() -> None:
    model = tiny_bundle().model
    state = {**model.state_dict(), "extra": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"1 unexpected \(extra\)"):
        load_weights(model, state)
    with pytest.raises(CheckpointError, match=r"32 missing \(.*, and 24 more\)"):
        load_weights(model, {})


def test_reading_empties_the_weights() -> None:
    model = tiny_bundle().model
    weights = dict(model.state_dict())
    timm.FAMILY.read(weights, {})
    assert weights == {}


def test_a_key_map_rejects_unknown_names() -> None:
    with pytest.raises(CheckpointError, match=r"cannot store norm\.bias"):
        KeyMap([rule("a", "norm.weight")]).write({"norm.bias": torch.zeros(2)}, tiny_bundle().model.config)
    with pytest.raises(CheckpointError, match=r"a has 1 axes, .*, expected 2"):
        KeyMap([rule("a", "norm.weight", permute=(1, 0))]).read({"a": torch.zeros(3)})


@pytest.mark.parametrize(
    ("theirs", "ours", "extra", "words"),
    [
        ("a.{}", "norm.weight", "", "differ in their number of {}; they must have the same number"),
        ("a.{x}", "blocks.{}.norm1.weight", "", "has a brace that is not {}"),
        (
            "a",
            "norm.weight",
            "transpose = [0, 0]",
            r"\[0, 0\] of norm\.weight is not a permutation of axes",
        ),
        ("a", "norm.weight", "transpose = []", r"transpose = \[\] of norm\.weight is not a permutation of axes"),
    ],
)
def test_nonsense_key_tables(theirs: str, ours: str, extra: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(f'[[keys]]\ntheirs = "{theirs}"\nours = "{ours}"\n{extra}\n')
    with pytest.raises(CheckpointError, match=words):
        read_key_table(tmp_path / "t.toml")


def test_a_bundle_that_was_edited(tmp_path: Path) -> None:
    import json

    tiny_bundle().save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    whole = json.loads(path.read_text())
    for change, words in (
        ({"classes": "abc"}, "should have a list of names as classes"),
        ({"classes": [1, 2, 3]}, "should have a list of names as classes"),
        ({"provenance": None}, "should have an object as provenance"),
        ({"vit": {**whole["vitrail"]["vit"], "depth": 999_999}}, "says 999999 layers, but has only 32 tensors"),
    ):
        path.write_text(json.dumps({**whole, "vitrail": {**whole["vitrail"], **change}}))
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / "b")
