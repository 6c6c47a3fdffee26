"""Masked autoencoders: loss and gradients against transformers, what the encoder sees, reconstructions, refusals."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import import_peer, rename, scramble
from tests.support.tiny_models import KINDS, TINY
from torch import Tensor, nn

from vitrail.errors import ConfigError, InputError
from vitrail.models.config import ViTConfig
from vitrail.models.stems import patchify
from vitrail.models.vit import ViT
from vitrail.training.pretraining.mae import Decoder, MaeSettings, MaskedAutoencoder, decoder_positions
from vitrail.training.pretraining.masking import PATCHWISE_STEMS, rank_patches

REFUSED = ("conv_stem", "resnet", "every_rate", "cnn")
ALLOWED = [kind for kind in KINDS if kind not in REFUSED]
NARROW = MaeSettings(decoder_width=16, decoder_depth=2, decoder_heads=2)


def build(kind: str = "plain", chosen: MaeSettings = NARROW, **changes: Any) -> MaskedAutoencoder:
    encoder = ViT(ViTConfig(**{**TINY, **KINDS[kind], "classes": 0, **changes}))
    model = MaskedAutoencoder(encoder, chosen)
    scramble(model)
    return model


def batch(model: MaskedAutoencoder, count: int = 3) -> tuple[Tensor, Tensor]:
    config = model.encoder.config
    return torch.randn(count, config.channels, *config.image_size), torch.rand(count, config.patches)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# ── against transformers ──

BLOCKS = {
    r"attention\.([qkv])_proj\.(.*)": r"attn.\2.\1",
    r"attention\.o_proj\.(.*)": r"attn.proj.\1",
    r"layernorm_before\.(.*)": r"norm1.\1",
    r"layernorm_after\.(.*)": r"norm2.\1",
    r"mlp\.(fc[12])\.(.*)": r"mlp.\1.\2",
}
TABLE = {
    r"vit\.embeddings\.cls_token": "encoder.cls_token",
    r"vit\.embeddings\.position_embeddings": "encoder.pos_embed",
    r"vit\.embeddings\.patch_embeddings\.projection\.(.*)": r"encoder.patch_embed.proj.\1",
    r"vit\.layers\.(\d+)\.(.*)": r"encoder.blocks.\1.\2",
    r"vit\.layernorm\.(.*)": r"encoder.norm.\1",
    r"decoder\.mask_token": "decoder.mask_token",
    r"decoder\.decoder_embed\.(.*)": r"decoder.embed.\1",
    r"decoder\.decoder_layers\.(\d+)\.(.*)": r"decoder.blocks.\1.\2",
    r"decoder\.decoder_norm\.(.*)": r"decoder.norm.\1",
    r"decoder\.decoder_pred\.(.*)": r"decoder.pred.\1",
}


def as_ours(peer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of transformers' model, and stack queries, keys and values."""
    fixed = "decoder.decoder_pos_embed"
    state = rename({name: tensor for name, tensor in peer.items() if name != fixed}, TABLE)
    inner = {rf"(\w+coder\.blocks\.\d+\.){old}": _shifted(new) for old, new in BLOCKS.items()}
    state = rename(state, {**inner, r"((?!.*\.blocks\.).*)": r"\1"})
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.endswith((".q", ".k", ".v")):
            result[name] = tensor
        elif name.endswith(".q"):
            stem, kind = name[:-2].rsplit(".", 1)
            result[f"{stem}.qkv.{kind}"] = torch.cat([state[f"{name[:-1]}{letter}"] for letter in "qkv"])
    return result


def _shifted(replacement: str) -> str:
    """Number the groups of a replacement from 2, because group 1 is the name of the block."""
    return r"\1" + replacement.replace(r"\2", r"\3").replace(r"\1", r"\2")


def peer_and_ours(norm: bool) -> tuple[nn.Module, MaskedAutoencoder]:
    """Return transformers' masked autoencoder with random weights, and ours with the same."""
    transformers = import_peer("transformers")
    options = transformers.ViTMAEConfig(
        image_size=24, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, layer_norm_eps=1e-6, norm_pix_loss=norm, attn_implementation="sdpa",
    )  # fmt: skip
    peer = scramble(transformers.ViTMAEForPreTraining(options)).double()
    peer.vit.embeddings.position_embeddings.requires_grad_()  # to compare its gradient with that of a learned table
    encoder = ViT(ViTConfig(image_size=24, patch_size=4, width=24, depth=2, heads=3, mlp_width=40, classes=0))
    ours = MaskedAutoencoder(encoder, NARROW.replace(normalise_pixels=norm)).double()
    ours.load_state_dict(as_ours(peer.state_dict()))
    with torch.no_grad():
        peer.decoder.decoder_pos_embed[:, :1] = 0
        peer.decoder.decoder_pos_embed[:, 1:] = ours.decoder.positions
    return peer, ours


@pytest.mark.parametrize("norm", [False, True])
def test_loss_and_gradients_match_transformers(norm: bool) -> None:
    peer, ours = peer_and_ours(norm)
    pixels, noise = torch.randn(3, 3, 24, 24, dtype=torch.float64), torch.rand(3, 36)
    expected, actual = peer(pixel_values=pixels, noise=noise).loss, ours(pixels, noise)
    assert abs(actual.item() - expected.item()) <= 1e-10 * expected.item()
    expected.backward()
    actual.backward()
    theirs, our_gradients = as_ours(gradients(peer)), gradients(ours)
    assert our_gradients.keys() == theirs.keys() == dict(ours.named_parameters()).keys()
    for name, gradient in theirs.items():
        assert (our_gradients[name] - gradient).abs().max() <= 1e-8 * gradient.abs().max(), name


def test_the_mask_and_the_prediction_match_transformers() -> None:
    peer, ours = peer_and_ours(norm=False)
    pixels, noise = torch.randn(2, 3, 24, 24, dtype=torch.float64), torch.rand(2, 36)
    expected = peer(pixel_values=pixels, noise=noise)
    result = ours.reconstruct(pixels, noise)
    assert torch.equal(result.mask, expected.mask.bool())
    images = peer.unpatchify(expected.logits)
    hidden = result.mask.reshape(2, 1, 6, 6).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert torch.allclose(result.images, torch.where(hidden, images, pixels), atol=1e-10)


def test_decoder_positions_match_the_authors() -> None:
    """transformers computes y before x and then swaps them, because the authors' weights have x first."""
    module = import_peer("transformers.models.vit_mae.modeling_vit_mae")
    table = module.build_2d_sinusoidal_position_embedding(height=3, width=5, embed_dim=24)
    y, x = table.chunk(2, dim=-1)
    config = ViTConfig(image_size=(12, 20), patch_size=4, width=24, heads=2, classes=0)
    assert torch.allclose(decoder_positions(config)[0], torch.cat([x, y], dim=-1), atol=1e-6)


def test_the_decoder_is_initialised_as_in_the_paper() -> None:
    config = ViTConfig(**{**TINY, "classes": 0})
    decoder = Decoder(config, MaeSettings(decoder_width=128, decoder_heads=4, decoder_depth=1))
    assert 0.015 < decoder.mask_token.std() < 0.025
    block: Any = decoder.blocks[0]
    # Queries, keys and values are three layers.
    for linear, outputs in ((decoder.embed, 128), (decoder.pred, 192), (block.attn.qkv, 128), (block.mlp.fc1, 512)):
        bound = math.sqrt(6 / (linear.in_features + outputs))
        assert 0.95 * bound < linear.weight.abs().max() <= bound
        assert linear.bias.abs().max() < 1e-4


# ── every kind of encoder ──


@pytest.mark.parametrize("kind", ALLOWED)
def test_masked_pixels_do_not_reach_the_encoder(kind: str) -> None:
    model = build(kind)
    pixels, noise = batch(model)
    hidden = model.reconstruct(pixels, noise).masked == 0
    changed = torch.where(hidden, torch.randn_like(pixels), pixels)
    ranking = rank_patches(noise)
    expected, actual = (model.encode_visible(images, ranking) for images in (pixels, changed))
    assert expected.shape[1] == 2 + model.encoder.config.special_tokens
    assert torch.equal(actual, expected)
    assert not torch.equal(model(changed, noise), model(pixels, noise))


@pytest.mark.parametrize("kind", ALLOWED)
def test_visible_patches_keep_their_positions(kind: str) -> None:
    """The reference runs all tokens, with no attention to masked ones; positions of every kind stay in place."""
    model = build(kind)
    encoder, span = model.encoder, model.encoder.config.layout.patches
    pixels, noise = batch(model)
    seen = torch.ones(3, encoder.config.tokens, dtype=torch.bool)
    seen[:, span] = ~model.reconstruct(pixels, noise).mask
    x, positions = encoder.embed(pixels)
    for block in encoder.blocks:
        x = block.add_position(x, positions)
        query, key, value, bias = block.attn.project(block.norm1(x), positions)
        logits = query @ key.transpose(-2, -1) * key.shape[-1] ** -0.5 + (0 if bias is None else bias)
        weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
        x = x + block.ls1(block.attn.proj((weights @ value).transpose(1, 2).flatten(2)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    expected = encoder.fc_norm(encoder.norm(x))
    ranking = rank_patches(noise)
    actual = model.encode_visible(pixels, ranking)
    before, visible, after = actual.split([span.start, 2, encoder.config.tokens - span.stop], dim=1)
    special = torch.cat([expected[:, : span.start], expected[:, span.stop :]], dim=1)
    assert torch.allclose(torch.cat([before, after], dim=1), special, atol=1e-5)
    for row, order, wanted in zip(visible, ranking.order, expected[:, span], strict=True):
        assert torch.allclose(row, wanted[order[:2]], atol=1e-5)


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("norm", [False, True])
def test_reconstructions_keep_the_visible_patches(kind: str, norm: bool) -> None:
    model = build(kind, NARROW.replace(normalise_pixels=norm))
    pixels, noise = batch(model)
    result = model.reconstruct(pixels, noise)
    inputs, images, masked = (patchify(each, (8, 8)) for each in (pixels, result.images, result.masked))
    assert torch.equal(images[~result.mask], inputs[~result.mask])
    assert torch.equal(masked[~result.mask], inputs[~result.mask])
    assert not masked[result.mask].any()
    assert not torch.isclose(images[result.mask], inputs[result.mask]).all(-1).any()
    if not norm:  # the loss is the error of what is shown
        error = (images - inputs)[result.mask].square().mean()
        assert torch.allclose(error, model(pixels, noise), rtol=1e-5)


def test_reconstructions_have_the_scale_of_the_input() -> None:
    """With normalised targets, a prediction of zeros is the mean of each patch."""
    model = build()
    nn.init.zeros_(model.decoder.pred.weight)
    nn.init.zeros_(model.decoder.pred.bias)
    pixels, noise = batch(model)
    result = model.reconstruct(3 * pixels + 5, noise)
    inputs, images = patchify(3 * pixels + 5, (8, 8))[result.mask], patchify(result.images, (8, 8))[result.mask]
    assert torch.allclose(images, inputs.mean(dim=-1, keepdim=True).expand_as(images), atol=1e-5)


@pytest.mark.parametrize("kind", ALLOWED)
def test_the_loss_is_a_function_of_images_and_noise(kind: str) -> None:
    model = build(kind).train()
    pixels, noise = batch(model)
    loss = model(pixels, noise)
    assert loss.ndim == 0
    assert torch.equal(loss, model(pixels, noise))
    assert not torch.equal(loss, model(pixels, noise.flip(1)))
    loss.backward()
    unused = ("attn_pool.", "pre_logits.")
    without = [n for n, p in model.named_parameters() if p.grad is None and not n.startswith(unused, len("encoder."))]
    assert without == []


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 5),
    columns=st.integers(2, 5),
    ratio=st.floats(0.05, 0.95),
    values=st.sampled_from([3, 1000]),
)
def test_the_number_of_masked_patches(data: st.DataObject, rows: int, columns: int, ratio: float, values: int) -> None:
    """It follows from the ratio for any noise, also with equal values; the lowest values are visible."""
    patches, chosen = rows * columns, NARROW.replace(mask_ratio=ratio)
    visible = int(patches * (1 - ratio))
    if visible == 0:
        return
    config = ViTConfig(image_size=(2 * rows, 2 * columns), patch_size=2, width=4, depth=1, heads=1, classes=0)
    drawn = data.draw(st.lists(st.integers(0, values), min_size=2 * patches, max_size=2 * patches))
    noise = torch.tensor(drawn).reshape(2, patches) / (values + 1)
    mask = MaskedAutoencoder(ViT(config), chosen).reconstruct(torch.zeros(2, 3, 2 * rows, 2 * columns), noise).mask
    assert mask.sum(dim=1).tolist() == [patches - visible] * 2
    for values_of, hidden in zip(noise, mask, strict=True):
        assert values_of[~hidden].max() <= values_of[hidden].min()


# ── execution ──


@pytest.mark.parametrize("kind", ["plain", "rope", "relative", "every_block"])
def test_gradient_checkpointing_gives_the_same_gradients(kind: str) -> None:
    model = build(kind).train()
    pixels, noise = batch(model)
    model(pixels, noise).backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    model.encoder.gradient_checkpointing = True
    model(pixels, noise).backward()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "rope"])
def test_one_graph(kind: str) -> None:
    torch.compiler.reset()
    model = build(kind).train()
    pixels, noise = batch(model)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(pixels, noise)
    loss.backward()
    assert torch.allclose(loss, model(pixels, noise), rtol=1e-5)


@pytest.mark.slow
def test_inductor_gives_the_same_loss() -> None:
    torch.compiler.reset()
    model = build()
    pixels, noise = batch(model)
    assert torch.allclose(torch.compile(model, fullgraph=True)(pixels, noise), model(pixels, noise), rtol=1e-5)


def test_autocast() -> None:
    model = build()
    pixels, noise = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, images = model(pixels, noise), model.reconstruct(pixels, noise).images
    assert loss.dtype == images.dtype == torch.float32
    assert torch.allclose(loss, model(pixels, noise), rtol=0.05)


def test_it_learns_one_batch() -> None:
    config = ViTConfig(**{**TINY, "classes": 0})
    model = MaskedAutoencoder(ViT(config), NARROW)
    pixels, noise = batch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(pixels, noise).item()
    for _ in range(60):
        optimizer.zero_grad()
        model(pixels, noise).backward()
        optimizer.step()
    assert model(pixels, noise).item() < 0.5 * first


def test_the_decoder_is_on_one_device() -> None:
    """Where the memory of a step is forecast, the device is that of the context."""
    with torch.device("meta"):
        decoder = Decoder(ViTConfig(**TINY), MaeSettings(decoder_width=8, decoder_depth=1, decoder_heads=1))
    assert {tensor.device.type for tensor in (*decoder.parameters(), *decoder.buffers())} == {"meta"}


def test_the_module_has_the_device_and_dtype_of_its_encoder() -> None:
    model = MaskedAutoencoder(ViT(ViTConfig(**{**TINY, "classes": 0})).double(), NARROW)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float64}


# ── refusals ──


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**KINDS["cnn"]}, "needs encoder blocks, but depth is 0; use a ViT"),
        ({**KINDS["conv_stem"]}, "'conv_stem' mixes the pixels of neighbouring patches; use stem 'linear' or"),
        ({**KINDS["resnet"]}, "'resnet' mixes the pixels"),
        ({"patch_dropout": 0.5}, "patch_dropout is 0.5; set patch_dropout to 0"),
        ({"classes": 5}, "the encoder has 5 classes; set classes=0"),
        ({"image_size": 8}, "would mask 1 of 1; change mask_ratio, or use smaller patches"),
        ({"image_size": (8, 24)}, "would mask 3 of 3"),
        ({"patch_size": 1, "channels": 1}, "a patch of one value has no standard deviation"),
    ],
)
def test_encoders_that_cannot_be_pretrained(changes: dict[str, Any], message: str) -> None:
    encoder = ViT(ViTConfig(**{**TINY, "classes": 0, **changes}))
    with pytest.raises(ConfigError, match=message):
        MaskedAutoencoder(encoder, NARROW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_ratio": 0.0}, "mask_ratio is 0.0"),
        ({"mask_ratio": 1.0}, "mask_ratio is 1.0"),
        ({"mask_ratio": -0.5}, "mask_ratio is -0.5"),
        ({"decoder_heads": 3}, "decoder_width 512 is not a multiple of decoder_heads 3; change one of them"),
        ({"decoder_width": 6, "decoder_heads": 3}, "a decoder_width that is a multiple of 4, not 6"),
        ({"decoder_depth": 0}, "decoder_depth is 0"),
    ],
)
def test_impossible_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaeSettings(**changes)


def test_every_stem_is_patchwise_or_refused() -> None:
    """A stem in the list maps a change of one patch to one token; every other stem is refused."""
    for stem in ("linear", "conv", "linear_norm", "conv_stem", "resnet"):
        encoder = scramble(ViT(ViTConfig(**{**TINY, **KINDS.get(stem, {}), "classes": 0, "stem": stem})))
        pixels = torch.randn(1, 3, 16, 32)
        changed = pixels.clone()
        changed[..., :8, 8:16] = 0
        differs = (encoder.patch_embed(pixels) != encoder.patch_embed(changed)).any(-1)[0]
        assert (differs.nonzero().flatten().tolist() == [1]) == (stem in PATCHWISE_STEMS)


@pytest.mark.parametrize("shape", [(3, 7), (2, 8), (3, 8, 3), (8,)])
def test_noise_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = build()
    with pytest.raises(InputError, match=r"expected noise of shape \(3, 8\).*draw it with torch.rand\(3, 8\)"):
        model(torch.randn(3, 3, 16, 32), torch.rand(shape))
