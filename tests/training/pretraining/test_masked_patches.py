"""Masked patch prediction: loss and gradients against a plain loop, the corruption, reconstructions, refusals."""

import copy
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import scramble
from tests.support.tiny_models import KINDS, TINY
from torch import Tensor

from vitrail.errors import ConfigError, InputError
from vitrail.models.config import ViTConfig
from vitrail.models.stems import patchify
from vitrail.models.vit import ViT
from vitrail.training.pretraining.masked_patches import (
    MaskedPatchesSettings,
    MaskedPatchPrediction,
    corrupt,
    other_patches,
)

TARGETS = ("colour", "colours_4x4", "pixels")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALLOWED = [kind for kind in KINDS if kind not in ("conv_stem", "resnet", "every_rate", "cnn")]


def build(kind: str = "plain", target: str = "colour", ratio: float = 0.5, **changes: Any) -> MaskedPatchPrediction:
    encoder = ViT(ViTConfig(**{**TINY, **KINDS[kind], "classes": 0, **changes}))
    chosen = MaskedPatchesSettings(target=target, mask_ratio=ratio)
    channels = encoder.config.channels
    model = MaskedPatchPrediction(encoder, chosen, MEAN[:channels], STD[:channels])
    scramble(model)
    return model


def batch(model: MaskedPatchPrediction, count: int = 3) -> tuple[Tensor, Tensor]:
    """Return images whose patches have every colour, and noise."""
    config = model.encoder.config
    base = torch.rand(count, config.channels, *config.grid)
    base = base.repeat_interleave(config.patch_size[0], 2).repeat_interleave(config.patch_size[1], 3)
    colours = (base + 0.3 * torch.rand(count, config.channels, *config.image_size) - 0.15).clamp(0, 1)
    mean, std = (torch.tensor(values[: config.channels])[:, None, None] for values in (MEAN, STD))
    return (colours - mean) / std, torch.rand(count, config.patches, 3)


# ── the reference, from the paper's text ──


def reference_loss(model: MaskedPatchPrediction, pixels: Tensor, noise: Tensor) -> Tensor:
    """Compute the loss in loops over images, patches and pixels."""
    encoder, config = model.encoder, model.encoder.config
    chosen = [reference_choice(noise[b, :, 0].tolist(), model.settings.mask_ratio) for b in range(len(pixels))]
    embedded = encoder.patch_embed(pixels)
    sequences = []
    for b in range(len(pixels)):
        patches = []
        for i in range(config.patches):
            patch = embedded[b, i]
            if i in chosen[b]:
                _, kind, other = noise[b, i].tolist()
                others = [j for j in range(config.patches) if j != i]
                if kind < 0.8:
                    patch = model.mask_token[0, 0]
                elif kind < 0.9:
                    patch = embedded[b, others[int(other * len(others))]]
            patches.append(patch)
        sequences.append(torch.stack(patches))
    tokens, positions = encoder.add_positions(torch.stack(sequences))
    for block in encoder.blocks:
        tokens = block(tokens, positions)
    tokens = encoder.norm(tokens)[:, config.layout.patches]
    losses = [
        reference_patch_loss(model, tokens[b, i] @ model.pred.weight.T + model.pred.bias, reference_patch(pixels, b, i))
        for b in range(len(pixels))
        for i in chosen[b]
    ]
    return torch.stack(losses).mean()


def reference_choice(noise: list[float], ratio: float) -> list[int]:
    """Return the patches with the lowest noise."""
    return sorted(range(len(noise)), key=lambda i: noise[i])[: int(len(noise) * ratio)]


def reference_patch(pixels: Tensor, b: int, i: int, h: int = 8, w: int = 8) -> Tensor:
    """Cut patch i out of image b."""
    columns = pixels.shape[3] // w
    y, x = i // columns * h, i % columns * w
    return pixels[b, :, y : y + h, x : x + w]


def reference_patch_loss(model: MaskedPatchPrediction, output: Tensor, patch: Tensor) -> Tensor:
    """Return the loss of one patch."""
    if model.settings.target == "pixels":
        return (output - patch.reshape(-1)).square().mean()
    cells = 4 if model.settings.target == "colours_4x4" else 1
    losses = []
    for cell in range(cells * cells):
        colour = reference_colour(patch, cell // cells, cell % cells, cells)
        logits = output[cell * 512 : (cell + 1) * 512]
        losses.append(logits.exp().sum().log() - logits[colour])
    return torch.stack(losses).mean()


def reference_colour(patch: Tensor, row: int, column: int, cells: int) -> int:
    """Return the 3-bit mean colour of a cell of a patch: its class among 512."""
    h, w = patch.shape[1] // cells, patch.shape[2] // cells
    result = 0
    for channel in range(3):
        values = [
            patch[channel, row * h + y, column * w + x].item() * STD[channel] + MEAN[channel]
            for y in range(h)
            for x in range(w)
        ]
        result = 8 * result + max(0, min(7, math.floor(8 * sum(values) / len(values))))
    return result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["plain", "linear", "rope"])
def test_loss_and_gradients_match_the_reference(kind: str, target: str) -> None:
    model = build(kind, target).double()
    again = copy.deepcopy(model)
    pixels, noise = batch(model, 6)
    noise[0, :, 1] = torch.linspace(0.75, 0.95, 8)  # all three kinds of corruption
    pixels = pixels.double()
    actual, expected = model(pixels, noise), reference_loss(again, pixels, noise)
    assert abs(actual.item() - expected.item()) <= 1e-10 * expected.item()
    actual.backward()
    expected.backward()
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        gradient, wanted = cast("Tensor", parameter.grad), cast("Tensor", other.grad)
        assert wanted.abs().max() > 0, name
        assert (gradient - wanted).abs().max() <= 1e-8 * wanted.abs().max(), name


# ── the corruption ──


def test_fractions_of_the_corruption() -> None:
    """80% of the chosen patches become the mask token, 10% another patch, 10% are kept; no other patch changes."""
    B, N = 400, 50
    patches = torch.arange(B * N, dtype=torch.float32).reshape(B, N, 1) + 1
    noise, chosen = torch.rand(B, N, 3), torch.rand(B, N) < 0.5
    result = corrupt(patches, torch.zeros(1, 1, 1), chosen, noise)
    assert torch.equal(result[~chosen], patches[~chosen])
    masked, kept = (result == 0)[..., 0], (result == patches)[..., 0]
    swapped = ~masked & ~kept
    for kind, expected in ((masked, 0.8), (swapped, 0.1), (kept, 0.1)):
        assert abs(kind[chosen].float().mean() - expected) < 0.015
    image_of = torch.arange(B).repeat_interleave(N).reshape(B, N)
    assert torch.equal(((result[..., 0] - 1) // N).long()[swapped], image_of[swapped])


@settings(max_examples=100, deadline=None)
@given(count=st.integers(2, 40), values=st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=20))
def test_no_patch_is_replaced_by_itself(count: int, values: list[float]) -> None:
    noise = torch.tensor([*values, 0.0, math.nextafter(1, 0)])[:, None].expand(-1, count)
    others = other_patches(noise)
    assert others.min() >= 0
    assert others.max() < count
    assert not (others == torch.arange(count)).any()


def test_every_other_patch_is_equally_likely() -> None:
    steps = (torch.arange(7 * 100) + 0.5) / 700
    others = other_patches(steps[:, None].expand(-1, 8))
    for i in range(8):
        assert others[:, i].bincount(minlength=8).tolist() == [0 if j == i else 100 for j in range(8)]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), rows=st.integers(1, 5), columns=st.integers(2, 5), ratio=st.floats(0.05, 0.95))
def test_the_number_of_chosen_patches(data: st.DataObject, rows: int, columns: int, ratio: float) -> None:
    patches = rows * columns
    if int(patches * ratio) == 0:
        return
    model = build(image_size=(2 * rows, 2 * columns), patch_size=2, width=6, ratio=ratio)
    drawn = data.draw(st.lists(st.integers(0, 5), min_size=2 * patches, max_size=2 * patches))
    noise = torch.rand(2, patches, 3)
    noise[..., 0] = torch.tensor(drawn).reshape(2, patches) / 6
    mask = model.reconstruct(torch.zeros(2, 3, 2 * rows, 2 * columns), noise).mask
    assert mask.sum(dim=1).tolist() == [int(patches * ratio)] * 2


@pytest.mark.parametrize("kind", ALLOWED)
def test_masked_pixels_do_not_reach_the_encoder(kind: str) -> None:
    """The pixels of patches that become the mask token change the target only."""
    model = build(kind, "pixels")
    pixels, noise = batch(model)
    noise[..., 1] = 0
    result = model.reconstruct(pixels, noise)
    changed = torch.where(result.masked == 0, torch.randn_like(pixels), pixels)
    assert torch.equal(model.reconstruct(changed, noise).images, result.images)
    assert not torch.equal(model(changed, noise), model(pixels, noise))


# ── every kind of encoder, every target ──


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("target", TARGETS)
def test_the_loss_is_a_function_of_images_and_noise(kind: str, target: str) -> None:
    model = build(kind, target).train()
    pixels, noise = batch(model)
    loss = model(pixels, noise)
    assert loss.ndim == 0
    assert torch.equal(loss, model(pixels, noise))
    assert not torch.equal(loss, model(pixels, noise.flip(1)))
    loss.backward()
    unused = ("attn_pool.", "pre_logits.")
    without = [n for n, p in model.named_parameters() if p.grad is None and not n.startswith(unused, len("encoder."))]
    assert without == []


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("target", TARGETS)
def test_reconstructions_keep_the_visible_patches(kind: str, target: str) -> None:
    model = build(kind, target)
    pixels, noise = batch(model)
    result = model.reconstruct(pixels, noise)
    inputs, images, masked = (patchify(each, (8, 8)) for each in (pixels, result.images, result.masked))
    assert torch.equal(images[~result.mask], inputs[~result.mask])
    assert torch.equal(masked[~result.mask], inputs[~result.mask])
    assert not masked[result.mask].any()
    if target == "pixels":  # the loss is the error of what is shown
        error = (images - inputs)[result.mask].square().mean()
        assert torch.allclose(error, model(pixels, noise), rtol=1e-5)


@pytest.mark.parametrize(("target", "side"), [("colour", 8), ("colours_4x4", 2)])
def test_reconstructions_show_the_right_colours(target: str, side: int) -> None:
    """After training on one batch, every cell has the centre of the bin of its mean colour."""
    config = ViTConfig(**{**TINY, "classes": 0})
    model = MaskedPatchPrediction(ViT(config), MaskedPatchesSettings(target=target), MEAN, STD)
    pixels, noise = batch(model, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(pixels, noise)
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    result = model.reconstruct(pixels, noise)
    colours, shown = F.avg_pool2d(pixels * std + mean, side), F.avg_pool2d(result.images * std + mean, side)
    expected = ((8 * colours).floor().clamp(max=7) + 0.5) / 8
    hidden = result.mask.reshape(2, 1, 2, 4).repeat_interleave(8 // side, 2).repeat_interleave(8 // side, 3)
    assert torch.allclose(torch.where(hidden, shown, 0), torch.where(hidden, expected, 0), atol=1e-5)


def test_cells_of_patches_that_are_not_a_multiple_of_4() -> None:
    """The cells of a patch of 6 pixels overlap; a patch of one colour has it in every cell."""
    model = build(target="colours_4x4", image_size=(12, 12), patch_size=6)
    pixels, noise = batch(model)
    assert torch.isfinite(model(pixels, noise))
    assert model.reconstruct(pixels, noise).images.shape == pixels.shape
    mean, std = (torch.tensor(values)[:, None] for values in (MEAN, STD))
    flat = ((torch.tensor([0.3, 0.99, 0.01])[:, None] - mean) / std).expand(-1, 36).reshape(1, 1, -1)
    assert model._classes(flat).tolist() == [[[2 * 64 + 7 * 8 + 0] * 16]]


def test_grey_images_have_8_colours() -> None:
    assert build("grey").pred.out_features == 8
    assert build("grey", "colours_4x4").pred.out_features == 8 * 16
    assert build("plain", "colours_4x4").pred.out_features == 512 * 16


# ── execution ──


@pytest.mark.parametrize("target", TARGETS)
def test_gradient_checkpointing_gives_the_same_gradients(target: str) -> None:
    model = build("rope", target).train()
    pixels, noise = batch(model)
    model(pixels, noise).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.encoder.gradient_checkpointing = True
    model(pixels, noise).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["colours_4x4", "pixels"])
def test_one_graph(target: str) -> None:
    torch.compiler.reset()
    model = build("plain", target).train()
    pixels, noise = batch(model)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(pixels, noise)
    loss.backward()
    assert torch.allclose(loss, model(pixels, noise), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("patch", [8, 6])
def test_inductor_gives_the_same_loss(patch: int) -> None:
    torch.compiler.reset()
    model = build("plain", "colours_4x4", image_size=2 * patch, patch_size=patch)
    pixels, noise = batch(model)
    assert torch.allclose(torch.compile(model, fullgraph=True)(pixels, noise), model(pixels, noise), rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_autocast(target: str) -> None:
    model = build("plain", target)
    pixels, noise = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, images = model(pixels, noise), model.reconstruct(pixels, noise).images
    assert loss.dtype == images.dtype == torch.float32
    assert torch.allclose(loss, model(pixels, noise), rtol=0.05)


def test_the_module_has_the_device_and_dtype_of_its_encoder() -> None:
    encoder = ViT(ViTConfig(**{**TINY, "classes": 0})).double()
    model = MaskedPatchPrediction(encoder, MaskedPatchesSettings(), MEAN, STD)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float64}


# ── refusals ──


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({**KINDS["cnn"]}, "colour", "masked patch prediction needs encoder blocks, but depth is 0"),
        ({**KINDS["conv_stem"]}, "colour", "'conv_stem' mixes the pixels of neighbouring patches"),
        ({**KINDS["resnet"]}, "colour", "'resnet' mixes the pixels"),
        ({"patch_dropout": 0.5}, "colour", "patch_dropout is 0.5; set patch_dropout to 0"),
        ({"classes": 5}, "colour", "the encoder has 5 classes; set classes=0"),
        ({"image_size": 8}, "colour", "would mask 0 of 1; change mask_ratio, or use smaller patches"),
        ({"channels": 4}, "colour", "needs images of at most 3 channels, not 4; use target='pixels'"),
        ({"patch_size": 2}, "colours_4x4", "patches of 2×2 pixels have no 4×4 cells; use target='colour'"),
    ],
)
def test_encoders_that_cannot_be_pretrained(changes: dict[str, Any], target: str, message: str) -> None:
    encoder = ViT(ViTConfig(**{**TINY, "classes": 0, **changes}))
    channels = encoder.config.channels
    with pytest.raises(ConfigError, match=message):
        MaskedPatchPrediction(encoder, MaskedPatchesSettings(target=target), (0.5,) * channels, (0.5,) * channels)


def test_statistics_of_another_number_of_channels_are_refused() -> None:
    encoder = ViT(ViTConfig(**{**TINY, "classes": 0}))
    with pytest.raises(ConfigError, match="std has 1 values for 3 channels; give one per channel"):
        MaskedPatchPrediction(encoder, MaskedPatchesSettings(), MEAN, (0.5,))


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1])
def test_impossible_ratios_are_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=f"mask_ratio is {ratio}"):
        MaskedPatchesSettings(mask_ratio=ratio)


@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 2), (2, 8, 3)])
def test_noise_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = build()
    with pytest.raises(InputError, match=r"expected noise of shape \(3, 8, 3\)"):
        model(batch(model)[0], torch.rand(shape))
