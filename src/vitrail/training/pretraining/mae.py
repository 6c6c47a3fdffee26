"""Masked autoencoders (arXiv 2111.06377): encode few visible patches, decode the pixels of the masked ones.

    images (B, C, H, W)
      -> stem and positions of all patches; the visible ones and the special tokens are kept
      -> encoder blocks and norm
      -> linear, mask tokens for the masked patches, fixed positions
      -> decoder blocks and norm
      -> linear: the pixels of every patch, (B, N, h·w·C)

After pretraining only the encoder is kept. Pixels of a patch are flattened with channels last, as in the authors' code.
"""

from typing import Annotated, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.config import ViTConfig
from vitrail.models.initialise import initialise
from vitrail.models.position import TokenPositions, gather_tokens, keep_positions, sincos_2d, with_special_tokens
from vitrail.models.stems import patchify
from vitrail.models.vit import ViT
from vitrail.schema import Frozen, Positive
from vitrail.training.pretraining.masking import (
    Ranking,
    Reconstruction,
    check_encoder,
    check_noise,
    encode,
    rank_patches,
    reconstruction,
    without_pooling,
)


class MaeSettings(Frozen):
    """A masked autoencoder. The defaults are the paper's, with its best target, normalised pixels."""

    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Fraction of the patches that are masked."""
    decoder_width: Positive = 512
    """Width of the decoder."""
    decoder_depth: Positive = 8
    """Blocks of the decoder."""
    decoder_heads: Positive = 16
    """Heads of each of the decoder's blocks."""
    normalise_pixels: bool = True
    """Whether the target is each patch normalised by its mean and standard deviation, or its pixels as they are."""

    @model_validator(mode="after")
    def _decoder_fits(self) -> Self:
        if self.decoder_width % self.decoder_heads:
            raise ConfigError(
                f"decoder_width {self.decoder_width} is not a multiple of decoder_heads {self.decoder_heads}; change "
                f"one of them"
            )
        if self.decoder_width % 4:
            raise ConfigError(
                f"the decoder's positions need a decoder_width that is a multiple of 4, not {self.decoder_width}"
            )
        return self

    def visible(self, patches: int) -> int:
        """Return how many of the patches of an image are visible."""
        return int(patches * (1 - self.mask_ratio))


def check_mae(config: ViTConfig, settings: MaeSettings) -> None:
    """Raise a `ConfigError` if the encoder cannot be pretrained as a masked autoencoder."""
    check_encoder(config, "a masked autoencoder", config.patches - settings.visible(config.patches))
    if settings.normalise_pixels and _values(config) == 1:
        raise ConfigError("a patch of one value has no standard deviation; set normalise_pixels=False, or patch_size=2")


class MaskedAutoencoder(nn.Module):
    """An encoder with the decoder that pretrains it; `forward` returns the loss."""

    def __init__(self, encoder: ViT, settings: MaeSettings) -> None:
        super().__init__()
        check_mae(encoder.config, settings)
        like = next(encoder.parameters())
        self.settings = settings
        self.encoder = without_pooling(encoder)
        with like.device:
            self.decoder = Decoder(encoder.config, settings)
        if like.dtype != torch.get_default_dtype():  # moving fake tensors, as a forecast has them, is an error
            self.decoder.to(like.dtype)

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the masked patches of normalised images (B, C, H, W).

        `noise` (B, N), uniform in [0, 1), chooses the patches: those with the lowest values are visible.
        """
        predicted, ranking = self._predict(pixels, noise)
        target = patchify(pixels, self.encoder.config.patch_size, "hwc")
        if self.settings.normalise_pixels:
            mean, std = _statistics(target)
            target = (target - mean) / std
        # Every image has the same number of masked patches, so the mean over all values is the mean over patches.
        masked = ranking.order[:, self._visible :]
        return F.mse_loss(gather_tokens(predicted, masked), gather_tokens(target, masked))

    @torch.no_grad()
    def reconstruct(self, pixels: Tensor, noise: Tensor) -> Reconstruction:
        """Return the images with their masked patches predicted, on the scale of the input."""
        predicted, ranking = self._predict(pixels, noise)
        if self.settings.normalise_pixels:
            # The decoder predicts normalised patches: only the patch itself knows its mean and deviation.
            mean, std = _statistics(patchify(pixels, self.encoder.config.patch_size, "hwc"))
            predicted = predicted * std + mean
        return reconstruction(pixels, predicted, ranking.rank >= self._visible, self.encoder.config, "hwc")

    def encode_visible(self, pixels: Tensor, ranking: Ranking) -> Tensor:
        """Return the normalised output tokens of the encoder for special tokens and visible patches only."""
        kept = with_special_tokens(self.encoder.config, ranking.order[:, : self._visible])
        tokens, positions = self.encoder.embed(pixels)
        return encode(self.encoder, gather_tokens(tokens, kept), keep_positions(positions, kept))

    def _predict(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Ranking]:
        check_noise(noise, pixels, self.encoder.config)
        ranking = rank_patches(noise)
        return self.decoder(self.encode_visible(pixels, ranking), ranking.rank), ranking

    @property
    def _visible(self) -> int:
        return self.settings.visible(self.encoder.config.patches)


class Decoder(nn.Module):
    """A narrow Transformer that predicts the pixels of all patches from the encoder's visible tokens."""

    positions: Tensor

    def __init__(self, encoder: ViTConfig, settings: MaeSettings) -> None:
        super().__init__()
        self.before, self.after = encoder.layout.patches.start, encoder.tokens - encoder.layout.patches.stop
        width = settings.decoder_width
        config = ViTConfig(
            image_size=encoder.image_size,
            patch_size=encoder.patch_size,
            channels=encoder.channels,
            position="none",
            width=width,
            depth=settings.decoder_depth,
            heads=settings.decoder_heads,
            norm_eps=encoder.norm_eps,
            classes=0,
        )
        self.embed = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("positions", decoder_positions(config).to(self.mask_token.device), persistent=False)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.pred = nn.Linear(width, _values(encoder))
        # As the paper: "xavier_uniform to init all Transformer blocks, following ViT's official code".
        initialise(self, config, only=("blocks", "norm"))
        nn.init.normal_(self.mask_token, std=0.02)
        for linear in (self.embed, self.pred):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor, rank: Tensor) -> Tensor:
        """Map visible tokens (B, kept T, D), patches in the order of their rank, to pixels (B, N, h·w·C)."""
        B, N = rank.shape
        visible = tokens.shape[1] - self.before - self.after
        before, patches, after = self.embed(tokens).split([self.before, visible, self.after], dim=1)
        patches = torch.cat([patches, self.mask_token.expand(B, N - visible, -1)], dim=1)
        patches = gather_tokens(patches, rank) + self.positions
        tokens = torch.cat([before, patches, after], dim=1)
        for block in self.blocks:
            tokens = block(tokens, TokenPositions())
        return cast("Tensor", self.pred(self.norm(tokens[:, self.before : self.before + N])))


def decoder_positions(config: ViTConfig) -> Tensor:
    """Return the fixed table of the patches' positions, (1, N, D).

    The frequencies are those of the authors' code, 10000^(-4i/D): they end just before the last one of `sincos_2d`.
    """
    quarter = config.width // 4
    return sincos_2d(config.grid, config.width, temperature=10_000 ** ((quarter - 1) / quarter))


def _statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each patch, with the paper's epsilon for patches of one colour."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def _values(config: ViTConfig) -> int:
    """Return the number of values in a patch."""
    return config.channels * config.patch_size[0] * config.patch_size[1]
