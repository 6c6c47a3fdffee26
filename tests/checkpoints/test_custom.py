"""A ViT nobody knows, opened and written by a table its owner wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_references import CLASSES, PostNormTransformer
from tests.peers import relative_error, scramble

from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.load import load
from vitrail.errors import CheckpointError

TABLE = """
[config]
heads = 4
norm_eps = 1e-5
norm_order = "post"
activation = "relu"
class_token = "last"
pool = "none"
final_norm = "none"
stem = "linear"
patch_size = [4, 4]
image_size = [12, 12]

[[keys]]
theirs = "patch.bias"
ours = "patch_embed.proj.bias"
[[keys]]
theirs = "patch.weight"
ours = "patch_embed.proj.weight"
[[keys]]
theirs = "token"
ours = "cls_token"
[[keys]]
theirs = "place"
ours = "pos_embed"
[[keys]]
theirs = ["layers.{}.q.weight", "layers.{}.k.weight", "layers.{}.v.weight"]
ours = "blocks.{}.attn.qkv.weight"
transpose = [1, 0]
[[keys]]
theirs = "layers.{}.o.weight"
ours = "blocks.{}.attn.proj.weight"
[[keys]]
theirs = "out.weight"
ours = "head.weight"
[[keys]]
theirs = "out.bias"
ours = "head.bias"

[[splits]]
theirs = "layers.{}.kv.weight"
into = ["layers.{}.k.weight", "layers.{}.v.weight"]
axis = 1
"""
for theirs, ours in {"norm_a": "norm1", "norm_b": "norm2", "up": "mlp.fc1", "down": "mlp.fc2"}.items():
    for kind in ("weight", "bias"):
        TABLE += f'\n[[keys]]\ntheirs = "layers.{{}}.{theirs}.{kind}"\nours = "blocks.{{}}.{ours}.{kind}"\n'


def their_file(model: PostNormTransformer, path: Path) -> dict[str, torch.Tensor]:
    """Save the model as its owner did: kernels transposed, keys and values in one tensor."""
    state = dict(model.state_dict())
    state["patch.weight"] = state["patch.weight"].reshape(24, 3, 4, 4)
    state["token"], state["place"] = state["token"][None, None], state["place"][None]
    for i in range(2):
        query, key, value = (state.pop(f"layers.{i}.{part}.weight").T.contiguous() for part in "qkv")
        state[f"layers.{i}.q.weight"] = query
        state[f"layers.{i}.kv.weight"] = torch.cat([key, value], dim=1)
    torch.save(state, path)
    return state


def test_a_home_made_vit_both_ways(tmp_path: Path) -> None:
    peer = PostNormTransformer()
    scramble(peer)
    state = their_file(peer, tmp_path / "mine.pth")
    (tmp_path / "map.toml").write_text(TABLE)
    bundle = load(tmp_path / "mine.pth", keys=tmp_path / "map.toml")
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        assert bundle.model(x).shape == (2, 10, CLASSES)
        assert relative_error(bundle.model(x), peer(x)) <= 1e-5
    convert(bundle, tmp_path / "again.pth", to="own", keys=tmp_path / "map.toml")
    written = torch.load(tmp_path / "again.pth", weights_only=True)
    assert set(written) == set(state)
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("transpose", "transpos"), r"no option 'keys\.\d+\.transpos'.*did you mean 'transpose'"),
        (lambda t: t.replace("heads = 4", "haeds = 4"), "no option 'haeds'; did you mean 'heads'"),
        (lambda t: t + "\n[[keys]]", "KeyTable needs keys"),
        (lambda t: t.replace('ours = "head.bias"', 'ours = "head.weight"'), r"names head\.weight twice among ours"),
        (lambda _: "keys = ", "is not TOML"),
        (lambda t: t.replace('theirs = "out.bias"', 'theirs = "exit.bias"'), r"1 of its .* not known there: out\.bias"),
    ],
)
def test_bad_tables(change: Any, words: str, tmp_path: Path) -> None:
    peer = PostNormTransformer()
    scramble(peer)
    their_file(peer, tmp_path / "mine.pth")
    (tmp_path / "map.toml").write_text(change(TABLE))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "mine.pth", keys=tmp_path / "map.toml")


def test_own_needs_a_table(tmp_path: Path) -> None:
    peer = PostNormTransformer()
    scramble(peer)
    their_file(peer, tmp_path / "mine.pth")
    (tmp_path / "map.toml").write_text(TABLE)
    bundle = load(tmp_path / "mine.pth", keys=tmp_path / "map.toml")
    with pytest.raises(CheckpointError, match="'own' needs one"):
        convert(bundle, tmp_path / "x.pth", to="own")
    with pytest.raises(CheckpointError, match=r"nowhere\.toml cannot be read"):
        load(tmp_path / "mine.pth", keys=tmp_path / "nowhere.toml")
