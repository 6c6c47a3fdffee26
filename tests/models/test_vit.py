"""The methods of ViT, and its errors for invalid inputs."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.peers import scramble
from torch import nn

from vitrail.errors import ConfigError, InputError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

TINY: dict[str, Any] = {"image_size": (12, 20), "patch_size": 4, "width": 24, "depth": 3, "heads": 3, "classes": 5}


def tiny(**fields: Any) -> ViT:
    model = ViT(ViTConfig(**{**TINY, **fields}))
    scramble(model)
    return model.eval()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 12, 20), "found 3 axes, (3, 12, 20); add a batch axis with x[None]"),
        ((2, 1, 3, 12, 20), "found 5 axes"),
        (
            (2, 1, 12, 20),
            "takes images of 3 channels, found 1; convert the image, or build the model with channels=1",
        ),
        ((2, 12, 20, 3), "the channels seem to be last, so use x.permute(0, 3, 1, 2)"),
        (
            (2, 3, 20, 12),
            "takes images of 12×20 pixels, found 20×12; resize the images, or call model.resize((20, 12))",
        ),
    ],
)
def test_wrong_images(shape: tuple[int, ...], words: str) -> None:
    for method in ("forward", "features", "trace"):
        with pytest.raises(InputError) as caught:
            getattr(tiny(), method)(torch.zeros(shape))
        assert words in str(caught.value)


@pytest.mark.parametrize("thing", [None, [1], "x", 3, np.zeros((1, 3, 12, 20), np.float32)])
def test_inputs_that_are_not_tensors(thing: Any) -> None:
    with pytest.raises(InputError, match=f"expected a tensor of images, found {type(thing).__name__}"):
        tiny()(thing)


def test_another_precision_or_device() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        with pytest.raises(InputError, match=rf"the model computes in torch.float32, the images are {dtype}; use x.to"):
            tiny()(torch.zeros(1, 3, 12, 20, dtype=dtype))
    with pytest.raises(InputError, match="the model is on cpu, the images on meta"):
        tiny()(torch.zeros(1, 3, 12, 20, device="meta"))
    with pytest.raises(InputError, match=r"expected images with pixels, found a tensor of shape \(1, 3, 0, 0\)"):
        tiny()(torch.zeros(1, 3, 0, 0))


@pytest.mark.parametrize("layers", [(0.5,), (True,), ("a",), 0, None, "all", torch.tensor([0.5])])
def test_layers_that_are_not_integers(layers: Any) -> None:
    with pytest.raises(InputError, match=r"expected layer indices|expected an integer layer"):
        tiny().trace(torch.zeros(1, 3, 12, 20), attention=layers)


@pytest.mark.parametrize("layers", [range(2), iter((0, 1)), [0, 1], torch.tensor([0, 1]), {0: "a", 1: "b"}])
def test_layers_in_any_collection(layers: Any) -> None:
    assert set(tiny().trace(torch.zeros(1, 3, 12, 20), attention=layers).attention) == {0, 1}


def test_integer_images_are_an_error() -> None:
    with pytest.raises(InputError, match=r"found torch\.uint8; preprocess the image first"):
        tiny()(torch.zeros(1, 3, 12, 20, dtype=torch.uint8))


def test_empty_batch() -> None:
    assert tiny()(torch.zeros(0, 3, 12, 20)).shape == (0, 5)


def test_features_are_the_input_of_the_head() -> None:
    model, x = tiny(), torch.randn(2, 3, 12, 20)
    pooled, tokens = model.features(x).pooled, model.features(x).tokens
    assert tokens.shape == (2, 16, 24)
    assert torch.equal(model.head(pooled), model(x))
    assert torch.equal(pooled, tokens[:, 0])


def test_features_as_grid() -> None:
    """Cell (r, c) of the grid is the token of the patch in row r, column c, wherever the special tokens are."""
    for fields in (
        {},
        {"class_token": "last", "registers": 2},
        {"class_token": "none", "pool": "mean", "registers": 3},
    ):
        model, x = tiny(**fields), torch.randn(2, 3, 12, 20)
        tokens = model.features(x).tokens[:, model.config.layout.patches]
        grid = model.features(x, as_grid=True).tokens
        assert grid.shape == (2, 24, 3, 5)
        assert torch.equal(grid[:, :, 1, 2], tokens[:, 1 * 5 + 2])


def test_features_of_a_layer_equal_a_truncated_model() -> None:
    model, x = tiny(), torch.randn(2, 3, 12, 20)
    shorter = ViT(model.config.replace(depth=2)).eval()
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("blocks.2.")}
    shorter.load_state_dict(state)
    for layer in (1, -2):
        assert torch.equal(model.features(x, layer=layer).pooled, shorter.features(x).pooled)
    assert torch.equal(model.features(x, layer=2).pooled, model.features(x).pooled)


@pytest.mark.parametrize("layer", [3, -4, 99])
def test_layers_out_of_range(layer: int) -> None:
    x = torch.zeros(1, 3, 12, 20)
    for call in (
        lambda: tiny().features(x, layer=layer),
        lambda: tiny().trace(x, attention=(layer,)),
        lambda: tiny().trace(x, tokens=(layer,)),
    ):
        with pytest.raises(InputError, match=rf"layer {layer} does not exist: this model has layers 0 to 2"):
            call()


def test_a_grid_needs_every_patch() -> None:
    model = tiny(patch_dropout=0.5).train()
    with pytest.raises(InputError, match=r"call \.eval\(\) before features\(as_grid=True\)"):
        model.features(torch.zeros(1, 3, 12, 20), as_grid=True)


def test_trace_is_differentiable_and_counts_from_the_end() -> None:
    model, x = tiny(), torch.randn(2, 3, 12, 20, requires_grad=True)
    traced = model.trace(x, attention=(-1, 2), tokens=(0, -1))
    assert traced.attention[-1] is traced.attention[2]
    assert set(traced.tokens) == {0, -1}
    (gradient,) = torch.autograd.grad(traced.logits[:, 0].sum(), traced.attention[-1])
    assert gradient.abs().sum() > 0
    assert torch.equal(traced.logits, model.head(model.norm(traced.tokens[-1])[:, 0]))


def test_other_layers_keep_the_fused_kernel() -> None:
    """Count the kernels: tracing one of three layers leaves two fused attentions."""
    model, x = tiny(), torch.randn(2, 3, 12, 20)
    with torch.profiler.profile(acc_events=True) as profile, torch.no_grad():
        model.trace(x, attention=(1,))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::scaled_dot_product_attention"] == 2


def test_reset_head() -> None:
    model, x = tiny(), torch.randn(2, 3, 12, 20)
    before = model.features(x).pooled
    model.reset_head(9)
    assert model.config.classes == 9
    assert model(x).shape == (2, 9)
    assert torch.equal(model.features(x).pooled, before)
    model.reset_head(0)
    assert torch.equal(model(x), before)
    model.reset_head(2)
    assert model(x).shape == (2, 2)
    with pytest.raises(ConfigError, match="classes is -3"):
        model.reset_head(-3)


def test_reset_head_keeps_dtype_and_the_second_head() -> None:
    model = tiny(distillation_token=True).double()
    model.reset_head(9)
    by_class, by_distillation = model.distilled(torch.randn(2, 3, 12, 20, dtype=torch.float64))
    assert by_class.shape == by_distillation.shape == (2, 9)
    with pytest.raises(InputError, match="has no distillation token"):
        tiny().distilled(torch.randn(2, 3, 12, 20))


def test_logits_are_the_mean_of_both_heads() -> None:
    model, x = tiny(distillation_token=True), torch.randn(2, 3, 12, 20)
    by_class, by_distillation = model.distilled(x)
    assert torch.allclose(model(x), (by_class + by_distillation) / 2)
    assert not torch.allclose(by_class, by_distillation)


def test_resize_and_back_runs_in_between() -> None:
    model, x = tiny(), torch.randn(2, 3, 12, 20)
    before = model(x)
    model.resize(24)
    assert model.config.grid == (6, 6)
    assert model(torch.randn(1, 3, 24, 24)).shape == (1, 5)
    model.resize((12, 20))
    assert model(x).shape == before.shape


def test_equal_token_counts_are_still_resampled() -> None:
    """14×14 -> 7×28 keeps 196 patches; a copied table would be wrong in every row (timm copies it)."""
    model = ViT(ViTConfig(image_size=(56, 56), patch_size=4, width=24, depth=1, heads=3, classes=5))
    old = model.pos_embed.detach().clone()
    model.resize((28, 112))
    assert model.config.grid == (7, 28)
    assert model.pos_embed.shape == old.shape
    assert torch.equal(model.pos_embed[:, 0], old[:, 0])
    assert not torch.allclose(model.pos_embed[:, 1:], old[:, 1:], atol=1e-3)


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_enlarged_images_with_enlarged_patches_give_the_same_logits(stem: str) -> None:
    """With the image enlarged patch by patch, the resized model gives the same logits: FlexiViT end to end."""
    model, x = tiny(stem=stem), torch.randn(2, 3, 12, 20)
    before = model(x)
    cells = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 1, 4, 4)
    larger = nn.functional.interpolate(cells, (6, 8), mode="bilinear").reshape(2, 3, 3, 5, 6, 8)
    larger = larger.permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 18, 40)
    model.resize((18, 40), (6, 8))
    assert torch.allclose(model(larger), before, atol=1e-4)


@pytest.mark.parametrize("stem", ["linear_norm", "conv_stem", "resnet"])
def test_stems_bound_to_their_patch(stem: str) -> None:
    model = ViT(ViTConfig(image_size=64, patch_size=16, stem=stem, width=48, heads=3, depth=1))
    with pytest.raises(ConfigError, match=f"the stem '{stem}' is bound to its patch size"):
        model.resize(128, 32)
    assert model.config.patch_size == (16, 16)  # an error changes nothing
    model.resize(96)
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 1000)


def test_bad_resizes() -> None:
    model = tiny()
    with pytest.raises(ConfigError, match="image height 13 is not a multiple"):
        model.resize(13)
    with pytest.raises(ConfigError, match="no resampling method 'bicubic'; choose one of google, timm"):
        model.resize(24, method="bicubic")
    with pytest.raises(ConfigError, match="no resampling method None"):
        model.resize(24, method=None)
    assert model.config == ViTConfig(**TINY)


def test_frozen_parameters_stay_frozen_through_resize() -> None:
    model = tiny().requires_grad_(False)
    model.resize(24, 6)
    assert not any(p.requires_grad for p in model.parameters())


def test_gradient_checkpointing_changes_nothing() -> None:
    """Also with dropout, stochastic depth and dropped patches, because the random state is restored."""
    rates = dict.fromkeys(
        ("embed_dropout", "attention_dropout", "mlp_dropout", "stochastic_depth", "patch_dropout"), 0.3
    )
    model, x = tiny(**rates, position="rope_2d").train(), torch.randn(4, 3, 12, 20)
    results = []
    for switch in (False, True):
        model.gradient_checkpointing = switch
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = results
    assert plain.keys() == recomputed.keys() == dict(model.named_parameters()).keys()
    assert all(torch.allclose(plain[n], recomputed[n], atol=1e-6) for n in plain)


def test_autocast_bf16_is_near_float32() -> None:
    model, x = tiny(qk_norm=True, position="rope_2d"), torch.randn(2, 3, 12, 20)
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = model(x)
    assert (actual.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("position", ["learned_1d", "sincos_2d", "rope_2d", "relative", "learned_2d"])
def test_half_precision_weights(position: str) -> None:
    model = tiny(position=position).to(torch.bfloat16)
    assert model(torch.randn(2, 3, 12, 20, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_state_dict_has_only_learned_tensors() -> None:
    for position in ("sincos_2d", "rope_2d"):
        assert not [k for k in tiny(position=position).state_dict() if "pos" in k or "rotation" in k]


def test_a_meta_model_takes_weights_by_assignment() -> None:
    """Built on the meta device, a model takes weights by assignment and gives the same logits."""
    for position in ("learned_1d", "sincos_2d", "rope_2d", "relative"):
        model, x = tiny(position=position), torch.randn(2, 3, 12, 20)
        with torch.device("meta"):
            empty = ViT(model.config)
        empty.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(empty.eval()(x), model(x))


def test_patch_dropout_keeps_special_tokens_and_positions() -> None:
    """The output for the kept patches equals that of a sequence without the others."""
    for fields in (
        {"position": "learned_1d", "position_at": "every_block"},
        {"position": "learned_2d", "position_at": "shared"},
        {"position": "rope_2d"},
        {"position": "relative"},
        {"position": "sincos_2d"},
    ):
        model = tiny(**fields, patch_dropout=0.4, registers=1)
        x = torch.randn(2, 3, 12, 20)
        model.train()
        torch.manual_seed(3)
        tokens, places = model.embed(x)
        assert places.kept is not None
        assert places.kept.shape == (2, 2 + 9)
        assert torch.equal(places.kept[:, :2], torch.tensor([[0, 1], [0, 1]]))
        assert (places.kept.diff(dim=1) > 0).all()
        model.eval()
        whole, _ = model.embed(x)
        assert torch.equal(tokens, whole.gather(1, places.kept[..., None].expand(-1, -1, 24)))
        # Attention over the kept tokens equals attention over all tokens with the others masked.
        block = model.blocks[0]
        short = block(tokens, places)
        hidden = torch.full((2, 1, 17, 17), float("-inf"))
        for b in range(2):
            hidden[b, :, :, places.kept[b]] = 0
        result = masked_block(model, whole, hidden)
        assert torch.allclose(short, result.gather(1, places.kept[..., None].expand(-1, -1, 24)), atol=1e-5)


def masked_block(model: ViT, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Run the first block on all tokens, with some keys masked."""
    original = nn.functional.scaled_dot_product_attention

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any, dropout_p: float) -> torch.Tensor:
        return original(q, k, v, attn_mask=hidden if attn_mask is None else hidden + attn_mask, dropout_p=dropout_p)

    _, places = model.embed(torch.zeros(2, 3, 12, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", masked)
        out: torch.Tensor = model.blocks[0](x, places)
    return out


def test_stochastic_depth_grows_with_depth_and_keeps_the_mean() -> None:
    model = tiny(stochastic_depth=0.5, depth=3)
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.25, 0.5]
    drop = model.blocks[2].drop_path.train()
    out = drop(torch.ones(20_000, 2, 3))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert out.mean() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(out[:, 0, 0], out[:, 1, 2])  # per image
