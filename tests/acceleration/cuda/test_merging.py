"""Token merging: which tokens are merged, how, and which are left alone."""

from typing import Any

import pytest
import torch
from tests.acceleration.tiny import bundle, pixels
from tests.peers import relative_error
from torch import Tensor

import vitrail
from vitrail.acceleration.cuda.calibration import calibrate
from vitrail.acceleration.cuda.encoder import EncoderPrecision, FastEncoder
from vitrail.acceleration.cuda.merging import Merging, merge, read_merging, weighted_mean
from vitrail.acceleration.cuda.model import FastModel
from vitrail.errors import ConfigError
from vitrail.models.vit import ViT

EXACT = EncoderPrecision(torch.float64, exact=True)
MANY: dict[str, Any] = {"patch_size": (4, 4), "depth": 3}  # 4 × 8 patches


def model_and_images(kind: str = "plain", **changes: Any) -> tuple[ViT, Tensor]:
    made = bundle(kind, **{**MANY, **changes})
    return made.model.double().eval(), made.preprocess.normalise(pixels(3, made.preprocess.channels)).double()


@torch.inference_mode()
def outputs(model: torch.nn.Module, images: Tensor) -> Tensor:
    result: Tensor = model(images)
    return result


def tokens(count: int, width: int = 6, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def keys_of(x: Tensor, heads: int = 2) -> Tensor:
    keys: Tensor = x.unflatten(2, (heads, -1))
    return keys


# ── a single merge ──


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (0, 2), (3, 1)])
def test_special_tokens_stay_and_nothing_is_lost(count: int, before: int, after: int) -> None:
    x = tokens(before + 11 + after)
    result, sizes = merge(x, None, keys_of(x), count, before=before, after=after)
    assert result.shape == (2, before + 11 + after - count, 6)
    assert torch.equal(result[:, :before], x[:, :before])
    assert torch.equal(result[:, len(result[0]) - after :], x[:, len(x[0]) - after :])
    special = torch.cat([sizes[:, :before], sizes[:, sizes.shape[1] - after :]], dim=1)
    assert bool((special == 1).all())
    assert sizes.sum(dim=1).tolist() == [before + 11 + after] * 2
    assert torch.allclose(weighted_mean(result, sizes), x.mean(dim=1))
    # Tokens that were not merged are bit-identical.
    same = (result[:, :, None] == x[:, None]).all(dim=3).any(dim=2)
    assert torch.equal(same, sizes == 1)


def test_the_most_similar_are_merged() -> None:
    x = torch.eye(6, dtype=torch.float64)[None].clone()
    x[0, 3] = 2 * x[0, 4] + 0.1 * x[0, 3]  # 4 has nearly the direction of 3; the norm of keys does not count
    x[0, 0] = 0.5 * x[0, 1] + 0.8 * x[0, 0]
    result, sizes = merge(x, None, keys_of(x, heads=1), 1, before=0, after=0)
    # 0 and 2 of the first set remain; then come 1, 3 and 5.
    assert sizes.tolist() == [[1, 1, 1, 2, 1]]
    assert torch.equal(result[0, [0, 1, 2, 4]], x[0, [0, 2, 1, 5]])
    assert torch.allclose(result[0, 3], (x[0, 3] + x[0, 4]) / 2)
    result, sizes = merge(x, None, keys_of(x, heads=1), 2, before=0, after=0)
    assert sizes.tolist() == [[1, 2, 2, 1]]
    assert torch.allclose(result[0, 1], (x[0, 0] + x[0, 1]) / 2)


def test_a_mean_is_weighted_by_earlier_merges() -> None:
    x = tokens(2, batch=1)
    sizes = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    result, merged = merge(x, sizes, keys_of(x), 1, before=0, after=0)
    assert merged.tolist() == [[4.0]]
    assert torch.allclose(result[0, 0], (3 * x[0, 0] + x[0, 1]) / 4)


def test_images_are_merged_independently() -> None:
    x = tokens(12, batch=3)
    result, sizes = merge(x, None, keys_of(x), 4, before=1, after=0)
    for number in range(3):
        alone, alone_sizes = merge(x[number : number + 1], None, keys_of(x[number : number + 1]), 4, before=1, after=0)
        assert torch.allclose(alone[0], result[number])
        assert torch.equal(alone_sizes[0], sizes[number])


def as_set(tokens: Tensor) -> Tensor:
    """Return tokens (B, T, D) sorted by their first element, which differs."""
    return torch.stack([image[image[:, 0].argsort()] for image in tokens])


def test_the_order_within_a_set_does_not_matter() -> None:
    x = tokens(12)
    shuffled = x.clone()
    shuffled[:, ::2] = x[:, ::2][:, [3, 0, 5, 1, 4, 2]]
    shuffled[:, 1::2] = x[:, 1::2][:, [2, 4, 0, 5, 3, 1]]
    actual, expected = (merge(inputs, None, keys_of(inputs), 4, before=0, after=0)[0] for inputs in (shuffled, x))
    assert torch.allclose(as_set(actual), as_set(expected))


# ── a whole model ──


@pytest.mark.parametrize("kind", ["plain", "mean_of_all", "distilled"])
@pytest.mark.parametrize("numbers", [EXACT, EncoderPrecision()], ids=["float64", "bf16"])
def test_merging_nothing_is_bit_identical(kind: str, numbers: EncoderPrecision) -> None:
    model, images = model_and_images(kind)
    if numbers.dtype != torch.float64:
        model, images = model.float(), images.float()
    assert torch.equal(outputs(FastModel(model, numbers, merge=0), images), outputs(FastModel(model, numbers), images))


@pytest.mark.parametrize(("pool", "merges"), [("cls", 2), ("mean", 3)])
@pytest.mark.parametrize("class_token", ["first", "last"])
def test_each_block_has_fewer_tokens(pool: str, merges: int, class_token: str) -> None:
    """Except the last one, if it computes a single token anyway."""
    model, images = model_and_images(pool=pool, class_token=class_token, registers=2)
    fast = FastModel(model, EXACT, merge=4)
    seen: list[int] = []
    for block in fast.encoder.blocks:
        block.register_forward_hook(lambda _, __, result: seen.append(len(result[0]) // 3))
    assert outputs(fast, images).shape == (3, 5)
    total = model.config.tokens
    assert seen == [total - 4, total - 8, total - 12 if merges == 3 else 1]
    whole, sizes = FastEncoder(model, EXACT, all_tokens=True, merge=4).encode(tokens(total, 24))
    assert whole.shape[1] == total - model.config.depth * 4
    assert sizes is not None
    assert sizes.sum(dim=1).tolist() == [total] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"class_token": "last", "registers": 2},
        {"pool": "mean"},
        {"pool": "mean", "pool_over": "all", "registers": 1},
        {"pool": "mean", "final_norm": "after_pool", "class_token": "none"},
        {"distillation_token": True},
        {"norm_before_blocks": True, "representation": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 5])
def test_equal_patches_may_be_merged(changes: dict[str, Any], count: int) -> None:
    """If all patches are equal, proportional attention makes merging exact."""
    model, images = model_and_images(**changes, position="none")
    images = images[..., :4, :4].repeat(1, 1, 4, 8)
    result = outputs(FastModel(model, EXACT, merge=count), images)
    assert relative_error(result, outputs(model, images)) < 1e-10
    if changes.get("pool") != "mean":
        unbiased = outputs(FastModel(model, EXACT, merge=Merging(count, proportional=False)), images)
        assert relative_error(unbiased, outputs(model, images)) > 1e-6


def test_different_patches_change_the_output_slightly() -> None:
    model, images = model_and_images()
    assert 1e-6 < relative_error(outputs(FastModel(model, EXACT, merge=1), images), outputs(model, images)) < 0.5


def test_in_fp8_too() -> None:
    model, images = model_and_images(width=32, heads=2, pool="mean")
    model, images = model.float(), images.float()
    inputs = calibrate(model, images)
    expected = outputs(FastModel(model, EncoderPrecision(torch.float32, exact=True), merge=4), images)
    for low in ({"qkv", "fc1", "fc2"}, {"qkv", "proj", "fc1", "fc2"}):
        numbers = EncoderPrecision(torch.float32, inputs=inputs, low=frozenset(low))
        assert relative_error(outputs(FastModel(model, numbers, merge=4), images), expected) < 0.3


@pytest.mark.parametrize("merge", [0, 4])
def test_no_images(merge: int) -> None:
    model, images = model_and_images(pool="mean")
    assert outputs(FastModel(model, EXACT, merge=merge), images[:0]).shape == (0, 5)


def test_with_accelerate() -> None:
    made = bundle("plain", **MANY)
    images = made.preprocess.normalise(pixels(3))
    fast = vitrail.accelerate(made.model, merge=4)
    result = fast(images)
    assert isinstance(fast.model, FastModel)
    assert result.dtype == torch.float32
    assert torch.equal(result, fast(images))
    assert not torch.equal(result, vitrail.accelerate(made.model)(images))


# ── errors ──


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({}, -1, "merge is -1; use the number of tokens to merge per block, 0 or more"),
        ({}, 1.5, "merge is 1.5; use the number of tokens to merge per block, 0 or more"),
        ({}, True, "merge is True; use the number of tokens to merge per block, 0 or more"),
        ({}, 11, "merge is 11, too many for 32 patches and 2 blocks; choose up to 10"),
        ({"pool": "mean"}, 9, "merge is 9, too many for 32 patches and 3 blocks; choose up to 8"),
        ({"pool": "map"}, 1, "token merging needs a head that reads the class token, or the mean of all tokens; use"),
        ({"pool": "none"}, 1, "token merging needs a head that reads the class token, or the mean of all tokens; use"),
        (
            {"position": "rope_2d"},
            1,
            "token merging needs plain pre-norm blocks with positions added at the stem, whi",
        ),
    ],
)
def test_invalid_merge_options(changes: dict[str, Any], count: Any, message: str) -> None:
    made = bundle("plain", **{**MANY, **changes})
    with pytest.raises(ConfigError) as error:
        vitrail.accelerate(made.model, merge=count)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("changes", [{}, {"pool": "mean"}])
def test_the_largest_merge(changes: dict[str, Any]) -> None:
    model, images = model_and_images(**changes)
    merges = 2 if model.config.pool == "cls" else 3
    most = model.config.patches // (merges + 1)
    assert read_merging(most, model.config, merges) == Merging(most)
    assert outputs(FastModel(model, EXACT, merge=most), images).isfinite().all()


def test_similarity_depends_on_direction_only() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.1, 0.0], [0.0, 1.0], [10.0, 10.0]])[None, :, None]
    x = torch.tensor([[0.0], [2.0], [4.0], [6.0]])[None]
    tokens, sizes = merge(x, None, keys, 1, before=0, after=0)
    assert tokens.flatten().tolist() == [4.0, 1.0, 6.0]  # the first was merged into the second, which has its direction
    assert sizes.flatten().tolist() == [1.0, 2.0, 1.0]
