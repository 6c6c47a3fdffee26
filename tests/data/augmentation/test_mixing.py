"""Neighbours are mixed as defined, however a batch is sliced."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitrail.data.augmentation.mixing import Mixing, draw_mix, mix_pixels, mix_targets
from vitrail.errors import ConfigError

SIZE = (24, 40)
BOTH = Mixing(mixup=0.8, cutmix=1.0)


def drawn(mixing: Mixing, images: int, size: tuple[int, int] = SIZE, seed: int = 0) -> tuple[torch.Tensor, ...]:
    mix = draw_mix(mixing, seed, np.arange(images), size)
    return torch.from_numpy(mix.lam), torch.from_numpy(mix.box)


@given(
    seed=st.integers(0, 2**62),
    first=st.integers(0, 1000),
    pairs=st.integers(1, 12),
    cut=st.integers(0, 12),
    mixing=st.sampled_from([BOTH, Mixing(mixup=0.2), Mixing(cutmix=1.0, chance=0.5)]),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_mixing_does_not_depend_on_slicing(seed: int, first: int, pairs: int, cut: int, mixing: Mixing) -> None:
    positions = np.arange(2 * first, 2 * (first + pairs))
    whole = draw_mix(mixing, seed, positions, SIZE)
    halves = [draw_mix(mixing, seed, part, SIZE) for part in np.split(positions, [2 * min(cut, pairs)]) if len(part)]
    assert np.array_equal(np.concatenate([half.lam for half in halves]), whole.lam)
    assert np.array_equal(np.concatenate([half.box for half in halves]), whole.box)
    assert np.array_equal(whole.lam[::2], whole.lam[1::2])


def test_pixels_and_targets_against_a_plain_loop() -> None:
    lam, box = drawn(BOTH, 64)
    pixels, labels = torch.randn(64, 3, *SIZE, dtype=torch.float64), torch.randint(0, 7, (64,))
    targets = torch.nn.functional.one_hot(labels, 7).double()
    mixed, soft = mix_pixels(pixels, lam, box), mix_targets(targets, lam)
    methods = set()
    for i in range(64):
        other, own = i ^ 1, float(lam[i])
        top, left, bottom, right = box[i].tolist()
        expected = pixels[i].clone()
        if bottom:
            methods.add("cutmix")
            expected[:, top:bottom, left:right] = pixels[other, :, top:bottom, left:right]
            covered = (bottom - top) * (right - left) / (SIZE[0] * SIZE[1])
            assert own == pytest.approx(1 - covered, abs=1e-6)
        else:
            methods.add("mixup")
            expected = own * pixels[i] + (1 - own) * pixels[other]
        assert torch.allclose(mixed[i], expected)
        assert torch.allclose(soft[i], own * targets[i] + (1 - own) * targets[other])
    assert methods == {"cutmix", "mixup"}
    assert torch.allclose(soft.sum(dim=1), torch.ones(64, dtype=torch.float64))


def test_lambda_is_beta_distributed() -> None:
    lam, box = drawn(Mixing(mixup=0.2), 8000)
    assert not box.any()
    assert stats.kstest(lam[::2].numpy(), stats.beta(0.2, 0.2).cdf).pvalue > 0.01
    lam, box = drawn(Mixing(cutmix=1.0), 8000, (1000, 1000))
    inner = (box[:, 0] > 0) & (box[:, 1] > 0) & (box[:, 2] < 1000) & (box[:, 3] < 1000)
    tall, wide = (box[:, 2] - box[:, 0])[inner], (box[:, 3] - box[:, 1])[inner]
    assert (tall - wide).abs().max() <= 1
    middle = ((box[:, 0] + box[:, 2]) / 2)[inner & (box[:, 2] - box[:, 0] < 20)]
    assert 400 < middle.mean() < 600


def test_chances() -> None:
    lam, box = drawn(Mixing(mixup=1.0, cutmix=1.0, chance=0.6), 20_000)
    mixed, cut = (lam < 1)[::2], (box[:, 2] > 0)[::2]
    assert float(mixed.float().mean()) == pytest.approx(0.6, abs=0.02)
    assert float(cut.float().mean()) == pytest.approx(0.6 * 0.5, abs=0.02)


def test_nothing_is_mixed_by_default() -> None:
    lam, box = drawn(Mixing(), 5)
    assert (lam == 1).all()
    assert not box.any()
    pixels = torch.randn(4, 3, *SIZE)
    assert torch.equal(mix_pixels(pixels, lam[:4], box[:4]), pixels)


@pytest.mark.parametrize("positions", [np.arange(3), np.arange(1, 5)])
def test_split_pairs_raise(positions: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="are not whole pairs"):
        draw_mix(BOTH, 0, positions, SIZE)
