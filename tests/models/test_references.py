"""Two plain reference models built from `torch.nn`, against ours with the same weights."""

import torch
import torch.nn.functional as F
from tests.support.peers import relative_error, scramble
from tests.support.reference_models import CLASSES, HEADS, HIDDEN, PATCH, D, PostNormLayer, PostNormTransformer, attend
from torch import Tensor, nn

from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT


def test_post_norm_encoder_with_class_token_last() -> None:
    reference = PostNormTransformer()
    reference = scramble(reference)  # type: ignore[assignment]
    config = ViTConfig(
        image_size=(12, 12),
        patch_size=(PATCH, PATCH),
        width=D,
        depth=2,
        heads=HEADS,
        mlp_width=HIDDEN,
        stem="linear",
        class_token="last",
        norm_order="post",
        activation="relu",
        qkv_bias=False,
        proj_bias=False,
        norm_eps=1e-5,
        pool="none",
        final_norm="none",
        classes=CLASSES,
    )
    state = {
        "patch_embed.proj.weight": reference.patch.weight.reshape(D, 3, PATCH, PATCH),
        "patch_embed.proj.bias": reference.patch.bias,
        "cls_token": reference.token[None, None],
        "pos_embed": reference.place[None],
        "head.weight": reference.out.weight,
        "head.bias": reference.out.bias,
    }
    for i, layer in enumerate(reference.layers):
        assert isinstance(layer, PostNormLayer)
        state |= {
            f"blocks.{i}.attn.qkv.weight": torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]),
            f"blocks.{i}.attn.proj.weight": layer.o.weight,
            f"blocks.{i}.norm1.weight": layer.norm_a.weight,
            f"blocks.{i}.norm1.bias": layer.norm_a.bias,
            f"blocks.{i}.norm2.weight": layer.norm_b.weight,
            f"blocks.{i}.norm2.bias": layer.norm_b.bias,
            f"blocks.{i}.mlp.fc1.weight": layer.up.weight,
            f"blocks.{i}.mlp.fc1.bias": layer.up.bias,
            f"blocks.{i}.mlp.fc2.weight": layer.down.weight,
            f"blocks.{i}.mlp.fc2.bias": layer.down.bias,
        }
    ours = ViT(config).eval()
    ours.load_state_dict(state)
    x = torch.randn(3, 3, 12, 12)
    with torch.no_grad():
        expected = reference(x)
        assert expected.shape == (3, 10, CLASSES)
        assert relative_error(ours(x), expected) <= 1e-5
        assert relative_error(ours.trace(x, attention=(0, 1)).logits, expected) <= 1e-5


class FirstLucidrains(nn.Module):
    """The first version of vit-pytorch's ViT: no norms around the patch projection, mean pooling over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH * 3, D)
        self.token = nn.Parameter(torch.empty(1, 1, D))
        self.place = nn.Parameter(torch.empty(1, 10, D))
        self.norms_a = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.norms_b = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(D, HIDDEN) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, D) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        # (p1 p2 c): the rows of a patch, the pixels of a row, the channels of a pixel
        cells = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # B C rows columns p1 p2
        t = self.patch(cells.permute(0, 2, 3, 4, 5, 1).reshape(len(x), 9, -1))
        t = torch.cat([self.token.expand(len(x), 1, D), t], dim=1) + self.place
        for i in range(2):
            t = t + self.out[i](attend(*self.qkv[i](self.norms_a[i](t)).chunk(3, dim=-1)))
            t = t + self.down[i](F.gelu(self.up[i](self.norms_b[i](t))))
        y: Tensor = self.head(t.mean(dim=1))
        return y


def test_first_version_of_lucidrains() -> None:
    reference = FirstLucidrains()
    scramble(reference)
    config = ViTConfig(
        image_size=(12, 12),
        patch_size=(PATCH, PATCH),
        width=D,
        depth=2,
        heads=HEADS,
        mlp_width=HIDDEN,
        stem="linear",
        qkv_bias=False,
        norm_eps=1e-5,
        pool="mean",
        pool_over="all",
        final_norm="after_pool",
        classes=CLASSES,
    )
    named = dict(reference.named_parameters())
    state = {
        "patch_embed.proj.weight": named["patch.weight"].reshape(D, PATCH, PATCH, 3).permute(0, 3, 1, 2),
        "patch_embed.proj.bias": named["patch.bias"],
        "cls_token": named["token"],
        "pos_embed": named["place"],
        "fc_norm.weight": named["head.0.weight"],
        "fc_norm.bias": named["head.0.bias"],
        "head.weight": named["head.1.weight"],
        "head.bias": named["head.1.bias"],
    }
    for i in range(2):
        state[f"blocks.{i}.attn.qkv.weight"] = named[f"qkv.{i}.weight"]
        for ours_name, theirs in {
            "norm1": "norms_a",
            "attn.proj": "out",
            "norm2": "norms_b",
            "mlp.fc1": "up",
            "mlp.fc2": "down",
        }.items():
            for kind in ("weight", "bias"):
                state[f"blocks.{i}.{ours_name}.{kind}"] = named[f"{theirs}.{i}.{kind}"]
    ours = ViT(config).eval()
    ours.load_state_dict(state)
    x = torch.randn(3, 3, 12, 12)
    with torch.no_grad():
        assert relative_error(ours(x), reference(x)) <= 1e-5
