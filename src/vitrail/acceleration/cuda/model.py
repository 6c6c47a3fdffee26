"""A model whose encoder is the fast one; stem and head stay the model's own, or are done in one product."""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.acceleration.casting import cast_matrices
from vitrail.acceleration.cuda.attention import preferred_attention
from vitrail.acceleration.cuda.elementwise import add_table, cut_patches, kernels_run
from vitrail.acceleration.cuda.encoder import FastEncoder, Numbers, can_fold
from vitrail.acceleration.cuda.folding import affine
from vitrail.acceleration.cuda.merging import Merging, weighted_mean
from vitrail.models.checks import check_images
from vitrail.models.vit import Features, ViT


def runs_fast(model: ViT) -> bool:
    """Say whether `FastModel` stands for a model where that is: on a CUDA device that runs the kernels."""
    device = next(model.parameters()).device
    return device.type == "cuda" and can_fold(model.config) and kernels_run(device)


class FastModel(nn.Module):
    """A model to answer with, not to train or to save: images (B, C, H, W), normalised, to what the model returns.

    `layers` and `whole` are for `encode` and `features`: the model as if it ended after so many layers, and with every
    token, where the head reads one only. `merge` is how many tokens are merged in each block.
    """

    def __init__(
        self, model: ViT, numbers: Numbers, *, layers: int | None = None, whole: bool = False, merge: int | Merging = 0
    ) -> None:
        super().__init__()
        self.config, self.dtype = model.config, numbers.dtype
        self.encoder = FastEncoder(model, numbers, layers=layers, whole=whole, merge=merge)
        around = _without_blocks(model)
        self.stem = PatchStem(around, numbers.dtype) if self.config.stem in ("conv", "linear") else None
        low = numbers.dtype in (torch.bfloat16, torch.float16)
        self.around = cast_matrices(around, numbers.dtype) if low else around
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return what the model itself would."""
        tokens, sizes = self._encode(images)
        with self._casting(images):
            if sizes is not None and self.config.pool == "mean":
                return self._classify_mean(tokens, sizes)
            # Not `classify`, which also makes the weights of the pool `map`, in a way of its own.
            return self.around._classify(tokens)

    def features(self, images: Tensor) -> Features:
        """Return what `ViT.features` does for the layers that are here; of the tokens only those that are."""
        tokens = self.encode(images)
        with self._casting(images):
            tokens = self.around.norm(tokens)
            return Features(self.around._pool(tokens), tokens)

    def encode(self, images: Tensor) -> Tensor:
        """Return the tokens as they leave the last block: all, (B, T, D), or the one that is read, (B, 1, D)."""
        return self._encode(images)[0]

    def _encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        with self._casting(images):
            tokens = self._tokens(images)
        # Whoever calls may have autocast on, which would change what the encoder sums in.
        with torch.autocast(images.device.type, enabled=False), preferred_attention(images.device.type):
            return self.encoder.merged(tokens)

    def _classify_mean(self, tokens: Tensor, sizes: Tensor) -> Tensor:
        """Turn merged tokens into logits as the model does its own."""
        around = self.around
        pooled = weighted_mean(*(around._pooled_over(part) for part in (around.norm(tokens), sizes)))
        return cast("Tensor", around.head(around.pre_logits(around.fc_norm(pooled))))

    def _casting(self, images: Tensor) -> torch.autocast:
        return torch.autocast(images.device.type, self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16))

    def _tokens(self, images: Tensor) -> Tensor:
        if self.stem is None:
            return self.around.embed(images)[0]
        check_images(images, self.config, next(self.around.parameters()))
        return cast("Tensor", self.around.norm_pre(self.stem(images)))


class PatchStem(nn.Module):
    """Patches cut and projected by one product; tokens and positions, the same for all images, are added at once.

    The other tokens go through the product as rows of zeros, so that all come out in their places.
    """

    weight: Tensor
    common: Tensor

    def __init__(self, around: ViT, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = around.config, dtype
        weight = affine(cast("nn.Conv2d", around.patch_embed.proj)).weight
        self.register_buffer("weight", weight.to(dtype).contiguous(), persistent=False)
        common = _of_a_black_image(around).to(weight.device, torch.float64 if dtype == torch.float64 else torch.float32)
        self.register_buffer("common", common.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, T, D)."""
        where = self.config.layout.patches
        after = self.config.tokens - where.stop
        rows = cut_patches(x, self.config.patch_size, self.dtype, before=where.start, after=after)
        return add_table(rows @ self.weight.t(), self.common)


def _without_blocks(model: ViT) -> ViT:
    """Return a copy of everything around the encoder."""
    blocks, memo = model.blocks, {}
    memo[id(blocks)] = nn.ModuleList()
    return copy.deepcopy(model, memo).eval()


@torch.no_grad()
def _of_a_black_image(around: ViT) -> Tensor:
    """Return the tokens (T, D) of an image of zeros, in float64: special tokens, positions, the projection's bias."""
    exact = copy.deepcopy(around).double()
    exact.norm_pre = nn.Identity()
    weight = next(exact.parameters())
    with torch.autocast(weight.device.type, enabled=False):
        return exact.embed(weight.new_zeros(1, exact.config.channels, *exact.config.image_size))[0][0]
