"""A model with the fast encoder."""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.acceleration.casting import cast_matrices
from vitrail.acceleration.cuda.attention import preferred_attention
from vitrail.acceleration.cuda.inference.elementwise import add_table, cut_patches
from vitrail.acceleration.cuda.inference.encoder import EncoderPrecision, FastEncoder
from vitrail.acceleration.folding import affine
from vitrail.models.checks import check_images
from vitrail.models.vit import Features, ViT


class FastModel(nn.Module):
    """A model for inference only: maps normalised images (B, C, H, W) to the model's output.

    `layers` and `all_tokens` are for `encode` and `features`: use only the first layers, and keep every token even if
    the head reads only one.
    """

    def __init__(
        self, model: ViT, precision: EncoderPrecision, *, layers: int | None = None, all_tokens: bool = False
    ) -> None:
        super().__init__()
        self.config, self.dtype = model.config, precision.dtype
        self.encoder = FastEncoder(model, precision, layers=layers, all_tokens=all_tokens)
        around = _without_blocks(model)
        self.stem = PatchStem(around, precision.dtype) if self.config.stem in ("conv", "linear") else None
        low = precision.dtype in (torch.bfloat16, torch.float16)
        self.around = cast_matrices(around, precision.dtype) if low else around
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the model's output."""
        tokens = self.encode(images)
        with self._casting():
            # Not `classify`, which also returns the weights of the pool `map`, and computes it differently.
            return self.around._classify(tokens)

    def features(self, images: Tensor) -> Features:
        """Return `ViT.features` for the encoder's layers and tokens."""
        tokens = self.encode(images)
        with self._casting():
            tokens = self.around.norm(tokens)
            return Features(self.around._pool(tokens), tokens)

    def encode(self, images: Tensor) -> Tensor:
        """Return the tokens after the last block: all, (B, T, D), or the one the head reads, (B, 1, D)."""
        with self._casting():
            tokens = self._tokens(images)
        # Disable the caller's autocast, which would change the accumulation dtypes.
        with torch.autocast(images.device.type, enabled=False), preferred_attention(images.device.type):
            return cast("Tensor", self.encoder(tokens))

    def _casting(self) -> torch.autocast:
        device = next(self.around.parameters()).device.type  # not of the images, which are checked later
        return torch.autocast(device, self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16))

    def _tokens(self, images: Tensor) -> Tensor:
        if self.stem is None:
            return self.around.embed(images)[0]
        check_images(images, self.config, next(self.around.parameters()))
        return cast("Tensor", self.around.norm_pre(self.stem(images)))


class PatchStem(nn.Module):
    """Patch projection as one matmul; special tokens and positions, the same for all images, are added together.

    Special tokens enter the matmul as zero rows, so that all tokens are at their positions.
    """

    weight: Tensor
    common: Tensor

    def __init__(self, around: ViT, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = around.config, dtype
        weight = affine(cast("nn.Conv2d", around.patch_embed.proj)).weight
        self.register_buffer("weight", weight.to(dtype).contiguous(), persistent=False)
        common = _constant_tokens(around).to(weight.device, torch.float64 if dtype == torch.float64 else torch.float32)
        self.register_buffer("common", common.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, T, D)."""
        patches = self.config.layout.patches
        after = self.config.tokens - patches.stop
        rows = cut_patches(x, self.config.patch_size, self.dtype, before=patches.start, after=after)
        return add_table(rows @ self.weight.t(), self.common)


def _without_blocks(model: ViT) -> ViT:
    """Return a copy of everything around the encoder."""
    blocks, memo = model.blocks, {}
    memo[id(blocks)] = nn.ModuleList()
    return copy.deepcopy(model, memo).eval()


@torch.no_grad()
def _constant_tokens(around: ViT) -> Tensor:
    """Return the tokens (T, D) of an image of zeros, in float64: special tokens, positions, the projection's bias."""
    exact = copy.deepcopy(around).double()
    exact.norm_pre = nn.Identity()
    weight = next(exact.parameters())
    with torch.autocast(weight.device.type, enabled=False):
        return exact.embed(weight.new_zeros(1, exact.config.channels, *exact.config.image_size))[0][0]
