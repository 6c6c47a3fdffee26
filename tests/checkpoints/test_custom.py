"""A custom ViT, opened and written with a key table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.peers import relative_error, scramble
from tests.support.reference_models import CLASSES, PostNormTransformer

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
    """Save the model in a custom layout: transposed kernels, keys and values in one tensor."""
    state = dict(model.state_dict())
    state["patch.weight"] = state["patch.weight"].reshape(24, 3, 4, 4)
    state["token"], state["place"] = state["token"][None, None], state["place"][None]
    for i in range(2):
        query, key, value = (state.pop(f"layers.{i}.{part}.weight").T.contiguous() for part in "qkv")
        state[f"layers.{i}.q.weight"] = query
        state[f"layers.{i}.kv.weight"] = torch.cat([key, value], dim=1)
    torch.save(state, path)
    return state


def test_a_custom_vit_both_ways(tmp_path: Path) -> None:
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
        (
            lambda t: t.replace('theirs = "out.bias"', 'theirs = "exit.bias"'),
            r"1 of .* do not belong to it: out\.bias",
        ),
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
    with pytest.raises(CheckpointError, match="'own' needs a key table"):
        convert(bundle, tmp_path / "x.pth", to="own")
    with pytest.raises(CheckpointError, match=r"nowhere\.toml cannot be read"):
        load(tmp_path / "mine.pth", keys=tmp_path / "nowhere.toml")


# ── a typical MNIST ViT: a position table without a batch axis, flattened kernels, queries scaled elsewhere ──


class CustomViT(torch.nn.Module):
    """Class token, learned positions, pre-norm; queries are multiplied by 2, positions by 0.5."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.where = torch.nn.Parameter(torch.empty(17, 32))
        self.token = torch.nn.Parameter(torch.empty(32))
        self.patch = torch.nn.Linear(64, 32)
        self.norm_a, self.norm_b, self.norm = (torch.nn.LayerNorm(32) for _ in range(3))
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.hidden = torch.nn.Linear(32, 24) if hidden else None
        self.out = torch.nn.Linear(24 if hidden else 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.unfold(2, 8, 8).unfold(3, 8, 8).reshape(len(x), 16, 64)
        x = torch.cat([self.token.expand(len(x), 1, -1), self.patch(patches)], dim=1) + 0.5 * self.where
        y = self.norm_a(x)
        parts = (2 * self.q(y), self.k(y), self.v(y))
        q, k, v = (part.reshape(len(x), 17, 4, 8).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm_b(x))))
        x = self.norm(x)[:, 0]
        return self.out(x if self.hidden is None else torch.nn.functional.gelu(self.hidden(x)))  # type: ignore[no-any-return]


def custom_table(*, hidden: bool = False, shapes: bool = True) -> str:
    text = """
[config]
heads = 4
norm_eps = 1e-5
activation = "gelu"
pool = "cls"
norm_order = "pre"
class_token = "first"
patch_size = 8

[preprocess]
mean = [0.1307]
std = [0.3081]
resize = "squash"

[[keys]]
theirs = ["q.weight", "k.weight", "v.weight"]
ours = "blocks.0.attn.qkv.weight"
scale = [2, 1, 1]
[[keys]]
theirs = ["q.bias", "k.bias", "v.bias"]
ours = "blocks.0.attn.qkv.bias"
scale = [2, 1, 1]
"""
    shaped = {
        "where": ("pos_embed", [1, 17, 32], [17, 32], 0.5),
        "token": ("cls_token", [1, 1, -1], [32], 1),
        "patch.weight": ("patch_embed.proj.weight", [32, 1, 8, 8], [32, 64], 1),
    }
    for theirs, (ours, reshape, shape, scale) in shaped.items():
        text += f'\n[[keys]]\ntheirs = "{theirs}"\nours = "{ours}"\nreshape = {reshape}\nscale = {scale}\n'
        text += f"shape = {shape}\n" if shapes else ""
    layers = {"norm_a": "norm1", "norm_b": "norm2", "o": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2"}
    names = {mine: f"blocks.0.{ours}" for mine, ours in layers.items()} | {"norm": "norm", "out": "head"}
    names |= {"hidden": "pre_logits.fc"} if hidden else {}
    pairs = [(f"{mine}.{kind}", f"{ours}.{kind}") for mine, ours in names.items() for kind in ("weight", "bias")]
    for theirs, ours in [*pairs, ("patch.bias", "patch_embed.proj.bias")]:
        text += f'\n[[keys]]\ntheirs = "{theirs}"\nours = "{ours}"\n'
    return text


def test_a_key_table_with_reshape_scale_and_preprocess(tmp_path: Path) -> None:
    peer = CustomViT()
    scramble(peer)
    torch.save(peer.state_dict(), tmp_path / "mnist.pth")
    (tmp_path / "map.toml").write_text(custom_table())
    bundle = load(tmp_path / "mnist.pth", keys=tmp_path / "map.toml")
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert relative_error(bundle.model(x), peer(x)) <= 1e-5
    assert (bundle.preprocess.mean, bundle.preprocess.channels) == ((0.1307,), 1)
    assert bundle.assumptions == ()
    convert(bundle, tmp_path / "again.pth", to="own", keys=tmp_path / "map.toml")
    written = torch.load(tmp_path / "again.pth", weights_only=True)
    assert all(torch.equal(written[name], tensor) for name, tensor in peer.state_dict().items())
    (tmp_path / "map.toml").write_text(custom_table(shapes=False))
    with pytest.raises(CheckpointError, match=r"token is reshaped on reading.*add shape = "):
        convert(bundle, tmp_path / "no.pth", to="own", keys=tmp_path / "map.toml")


def test_an_unsupported_head_activation_is_reported(tmp_path: Path) -> None:
    """GELU in the head is not supported: mapped to our tanh layer, it opens with a reported assumption."""
    torch.save(scramble(CustomViT(hidden=True)).state_dict(), tmp_path / "mnist.pth")
    (tmp_path / "map.toml").write_text(custom_table(hidden=True))
    bundle = load(tmp_path / "mnist.pth", keys=tmp_path / "map.toml")
    assert [(assumption.field, assumption.value) for assumption in bundle.assumptions] == [("pre_logits", "tanh")]
    assert "a layer with another activation cannot be opened" in str(bundle.assumptions[0])


def test_fields_missing_in_a_key_table_are_reported(tmp_path: Path) -> None:
    torch.save(scramble(CustomViT()).state_dict(), tmp_path / "mnist.pth")
    lines = custom_table().splitlines()
    left_out = ("norm_eps", "activation", "pool", "norm_order", "class_token", "mean", "std", "resize")
    (tmp_path / "map.toml").write_text("\n".join(line for line in lines if not line.startswith(left_out)))
    bundle = load(tmp_path / "mnist.pth", keys=tmp_path / "map.toml")
    fields = {assumption.field for assumption in bundle.assumptions}
    images = {"preprocess.mean", "preprocess.std", "preprocess.resize"}
    assert fields == {"activation", "norm_eps", "pool", "norm_order", "class_token", *images}
    mean = load(tmp_path / "mnist.pth", keys=tmp_path / "map.toml", overrides={"pool": "mean"})
    assert ("pool_over", "patches") in [(assumption.field, assumption.value) for assumption in mean.assumptions]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("reshape = [1, 17, 32]", "reshape = [1, 16, 32]", r"where is \(17, 32\), which cannot be reshaped to"),
        ("reshape = [1, 17, 32]", "reshape = [-1, -1, 32]", "one of which may be -1"),
        ("scale = [2, 1, 1]", "scale = [2, 1]", "should be one non-zero number, or 3 of them"),
        ("scale = 0.5", "scale = 0", "should be one non-zero number"),
        ("patch_size = 8", "patch_size = 'x'", "patch_size is 'x': expected one integer"),
        ("mean = [0.1307]", "mean = [0.1, 0.2]", "for 1 channels|for 3 channels|give one for each"),
        ("mean = [0.1307]", "maen = [0.1307]", "no option 'maen'"),
    ],
)
def test_bad_reshapes_and_scales(old: str, new: str, words: str, tmp_path: Path) -> None:
    torch.save(scramble(CustomViT()).state_dict(), tmp_path / "mnist.pth")
    (tmp_path / "map.toml").write_text(custom_table().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "mnist.pth", keys=tmp_path / "map.toml")
