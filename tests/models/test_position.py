"""Each position embedding against its definition, written as loops."""

import math
from typing import Any

import pytest
import torch
from tests.support.peers import scramble

from vitrail.models.config import ViTConfig
from vitrail.models.position import outer, read_table, relative_offsets, relative_term, rope_2d, rotate, sincos_2d
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": (12, 20), "patch_size": 4, "width": 24, "depth": 2, "heads": 3, "classes": 5}


def test_sincos_2d_is_the_plain_baselines() -> None:
    table = sincos_2d((3, 5), 16)
    for n in range(15):
        y, x = divmod(n, 5)
        omega = [10_000 ** -(i / 3) for i in range(4)]
        expected = [math.sin(x * w) for w in omega] + [math.cos(x * w) for w in omega]
        expected += [math.sin(y * w) for w in omega] + [math.cos(y * w) for w in omega]
        assert torch.allclose(table[0, n], torch.tensor(expected), atol=1e-6)


def test_learned_2d_concatenates_x_and_y() -> None:
    row, column = torch.randn(3, 4), torch.randn(5, 4)
    table = outer(row, column)
    assert table.shape == (1, 15, 8)
    for n in range(15):
        y, x = divmod(n, 5)
        assert torch.equal(table[0, n], torch.cat([column[x], row[y]]))


def test_rope_makes_attention_depend_on_the_step_between_patches() -> None:
    """The dot product of a rotated query and key is the same for all pairs of patches with the same offset."""
    config = ViTConfig(**TINY, position="rope_2d", registers=2)
    query, key = torch.randn(8), torch.randn(8)
    everywhere = rotate(query.expand(1, 1, config.tokens, 8), rope_2d(config))
    keys = rotate(key.expand(1, 1, config.tokens, 8), rope_2d(config))
    products = (everywhere @ keys.transpose(-2, -1))[0, 0][config.layout.patches, config.layout.patches]
    by_step: dict[tuple[int, int], float] = {}
    for a in range(15):
        for b in range(15):
            step = (a // 5 - b // 5, a % 5 - b % 5)
            assert float(products[a, b]) == pytest.approx(by_step.setdefault(step, float(products[a, b])), abs=1e-5)
    assert len({round(value, 4) for value in by_step.values()}) > 20
    # Special tokens are not rotated.
    assert torch.allclose(everywhere[0, 0, :3], query.expand(3, 8))


@pytest.mark.parametrize("token", ["first", "last"])
def test_relative_term_is_attention_to_the_offsets(token: Any) -> None:
    config = ViTConfig(**TINY, position="relative", registers=1, class_token=token)
    query, table = torch.randn(2, 3, config.tokens, 8), torch.randn(2 * 15 - 1, 8)
    actual = relative_term(query, table, relative_offsets(config))
    patches = range(config.tokens)[config.layout.patches]
    for i in range(config.tokens):
        for j in range(config.tokens):
            expected = query[:, :, i] @ table[i - j + 14] if i in patches and j in patches else torch.zeros(2, 3)
            assert torch.allclose(actual[:, :, i, j], expected, atol=1e-5)


def test_relative_attention_is_the_papers() -> None:
    """softmax((q·k + q·r) / √d): the logits of the extra attention join those of the main one."""
    model = scramble(ViT(ViTConfig(**TINY, position="relative", class_token="none", pool="mean")))
    x = torch.randn(1, 15, 24)
    block = model.blocks[0]
    attention = block.attn
    weights = model.trace(torch.randn(1, 3, 12, 20), attention=(0,)).attention[0]
    assert weights.shape == (1, 3, 15, 15)
    _, places = model.embed(torch.zeros(1, 3, 12, 20))
    _, result = attention.traced(x, places)
    query, key, _ = attention.qkv(x).reshape(1, 15, 3, 3, 8).permute(2, 0, 3, 1, 4)
    logits = torch.zeros(1, 3, 15, 15)
    for i in range(15):
        for j in range(15):
            r = attention.rel_pos[i - j + 14]
            logits[:, :, i, j] = (query[:, :, i] * (key[:, :, j] + r)).sum(-1) / math.sqrt(8)
    assert torch.allclose(result, logits.softmax(-1), atol=1e-5)


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d", "sincos_2d"])
@pytest.mark.parametrize("token", ["first", "last", "none"])
@pytest.mark.parametrize("covers", ["patches", "class", "all"])
def test_table_rows_match_their_tokens(position: Any, token: Any, covers: Any) -> None:
    """The row of a patch is always added to that patch, and uncovered tokens get zero."""
    fields = {**TINY, "position": position, "class_token": token, "registers": 2, "pool": "mean"}
    if position == "learned_1d":
        fields["position_covers"] = covers
    model = ViT(ViTConfig(**fields))
    scramble(model)
    config = model.config
    table, layout = read_table(model, config), config.layout
    assert table.shape == (1, config.tokens, 24)
    covered = config.covers
    assert bool(table[:, layout.registers].any()) == (covered == "all")
    if layout.class_token is not None:
        assert bool(table[:, layout.class_token].any()) == (covered != "patches")
    assert (table[:, layout.patches].abs().sum(-1) > 0).all()
    x = torch.randn(2, 3, 12, 20)
    tokens, _ = model.embed(x)
    assert torch.allclose(tokens[:, layout.patches], model.patch_embed(x) + table[:, layout.patches], atol=1e-6)


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d", "sincos_2d"])
def test_position_at_as_in_table_8(position: Any) -> None:
    """Stem: once. Shared: one table before every block. Every block: a separate table for each."""
    x = torch.randn(2, 3, 12, 20)
    shared = ViT(ViTConfig(**TINY, position=position, position_at="shared"))
    scramble(shared)
    table = read_table(shared, shared.config)
    plain = ViT(ViTConfig(**TINY, position="none")).eval()
    plain.load_state_dict({k: v for k, v in shared.state_dict().items() if not k.startswith("pos_embed")})
    tokens, places = plain.embed(x)
    assert places.table is None
    for block in plain.blocks:
        tokens = block(tokens + table, places)
    assert torch.allclose(plain.head(plain.norm(tokens)[:, 0]), shared(x), atol=1e-5)

    every = ViT(ViTConfig(**TINY, position=position, position_at="every_block")).eval()
    names = {name for name, _ in every.named_parameters() if "pos_embed" in name}
    per_block = {"learned_1d": ["pos_embed"], "learned_2d": ["pos_embed_row", "pos_embed_col"], "sincos_2d": []}
    assert names == {f"blocks.{i}.{leaf}" for i in range(2) for leaf in per_block[position]}
    state = dict(shared.state_dict())
    for i in range(2):
        for leaf in per_block[position]:
            state[f"blocks.{i}.{leaf}"] = state[leaf]
    every.load_state_dict({k: v for k, v in state.items() if not k.startswith("pos_embed")})
    assert torch.allclose(every(x), shared(x), atol=1e-5)


def test_positions_matter() -> None:
    """Shuffled patches change the output of every model except one without positions."""
    image = torch.randn(1, 3, 12, 20)
    cells = image.unfold(2, 4, 4).unfold(3, 4, 4).reshape(3, 15, 4, 4)
    shuffled = cells[:, torch.randperm(15)].reshape(3, 3, 5, 4, 4).permute(0, 1, 3, 2, 4).reshape(1, 3, 12, 20)
    for position in ("none", "learned_1d", "learned_2d", "relative", "sincos_2d", "rope_2d"):
        model = scramble(ViT(ViTConfig(**TINY, position=position)))
        assert torch.allclose(model(image), model(shuffled), atol=1e-5) == (position == "none"), position
