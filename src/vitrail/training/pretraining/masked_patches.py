"""Masked patch prediction, the ViT paper's own pretraining (arXiv 2010.11929, appendix B.1.2), after BERT.

    images (B, C, H, W)
      -> stem, (B, N, D)
      -> half of the patches are chosen; most of their embeddings are replaced
      -> special tokens and positions, encoder blocks and norm
      -> linear, for the chosen patches only: the colour of each, or its pixels

Unlike a masked autoencoder, the encoder sees all N tokens, and a linear layer replaces the decoder.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.checks import check_images
from vitrail.models.config import ViTConfig
from vitrail.models.position import gather_tokens
from vitrail.models.stems import patchify
from vitrail.models.vit import ViT
from vitrail.schema import Frozen
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

REPLACED, SWAPPED = 0.8, 0.1
"""Fractions of the chosen patches that become the mask token, or another patch; the others are kept (BERT)."""
LEVELS = 8
"""Levels of a channel in a 3-bit colour."""
CELLS = {"colour": 1, "colours_4x4": 4}
"""Rows and columns of colours that are predicted for each patch, by target."""


class MaskedPatchesSettings(Frozen):
    """Masked patch prediction. The defaults are the paper's."""

    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the patches that are chosen: corrupted and predicted."""
    target: Literal["colour", "colours_4x4", "pixels"] = "colour"
    """`colour` predicts the mean colour of a patch, with 3 bits per channel: one of 512 classes. `colours_4x4` does so
    for each of 4×4 cells of the patch. `pixels` is a regression of all pixels."""

    def chosen(self, patches: int) -> int:
        """Return how many of the patches of an image are chosen."""
        return int(patches * self.mask_ratio)


def check_masked_patches(
    config: ViTConfig, settings: MaskedPatchesSettings, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Raise a `ConfigError` if the encoder cannot be pretrained by masked patch prediction."""
    check_encoder(config, "masked patch prediction", settings.chosen(config.patches))
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != config.channels:
            raise ConfigError(f"{name} has {len(values)} values for {config.channels} channels; give one per channel")
    if settings.target == "pixels":
        return
    if config.channels > 3:
        raise ConfigError(
            f"target {settings.target!r} needs images of at most 3 channels, not {config.channels}; use target='pixels'"
        )
    if min(config.patch_size) < CELLS[settings.target]:
        height, width = config.patch_size
        raise ConfigError(
            f"patches of {height}×{width} pixels have no 4×4 cells; use target='colour', or larger patches"
        )


class MaskedPatchPrediction(nn.Module):
    """An encoder with the linear layer that pretrains it; `forward` returns the loss.

    `mean` and `std` are those of the preprocessing; they map normalised pixels back to colours from 0 to 1.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, encoder: ViT, settings: MaskedPatchesSettings, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        super().__init__()
        config, like = encoder.config, next(encoder.parameters())
        check_masked_patches(config, settings, mean, std)
        self.settings = settings
        self.encoder = without_pooling(encoder)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.width, device=like.device, dtype=like.dtype))
        self.pred = nn.Linear(config.width, _outputs(config, settings), device=like.device, dtype=like.dtype)
        for name, values in (("mean", mean), ("std", std)):
            colours = torch.tensor(values, device=like.device, dtype=like.dtype)
            self.register_buffer(name, colours[:, None, None], persistent=False)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.xavier_uniform_(self.pred.weight)
        nn.init.zeros_(self.pred.bias)

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of the chosen patches of normalised images (B, C, H, W).

        `noise` (B, N, 3) is uniform in [0, 1). The first value chooses patches, lowest first; the second, how a chosen
        patch is corrupted; the third, which other patch may replace it.
        """
        predicted, chosen, _ = self._predict(pixels, noise)
        patches = gather_tokens(patchify(pixels, self.encoder.config.patch_size), chosen)
        if self.settings.target == "pixels":
            return F.mse_loss(predicted, patches)
        classes = self._classes(patches)
        return F.cross_entropy(predicted.reshape(classes.numel(), -1), classes.flatten())

    @torch.no_grad()
    def reconstruct(self, pixels: Tensor, noise: Tensor) -> Reconstruction:
        """Return the images with their chosen patches predicted: as pixels, or in the most probable colours."""
        config = self.encoder.config
        predicted, chosen, ranking = self._predict(pixels, noise)
        if self.settings.target != "pixels":
            predicted = self._painted(predicted)
        everywhere = predicted.new_zeros(*noise.shape[:2], predicted.shape[-1])
        everywhere = everywhere.scatter(1, chosen[..., None].expand_as(predicted), predicted)
        return reconstruction(pixels, everywhere, ranking.rank < self._chosen, config, "chw")

    def _predict(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Ranking]:
        """Return the output for the chosen patches (B, chosen N, …), their indices and the ranking."""
        config = self.encoder.config
        check_images(pixels, config, self.mask_token)
        check_noise(noise, pixels, config, draws=3)
        ranking = rank_patches(noise[..., 0])
        chosen = ranking.order[:, : self._chosen]
        patches = corrupt(self.encoder.patch_embed(pixels), self.mask_token, ranking.rank < self._chosen, noise)
        tokens = encode(self.encoder, *self.encoder.add_positions(patches))
        return self.pred(gather_tokens(tokens[:, config.layout.patches], chosen)), chosen, ranking

    def _classes(self, patches: Tensor) -> Tensor:
        """Return the class of each cell's mean colour, (B, chosen N, cells); red is its most significant digit."""
        config, cells = self.encoder.config, CELLS[self.settings.target]
        images = patches.reshape(-1, config.channels, *config.patch_size) * self.std + self.mean
        colours = F.adaptive_avg_pool2d(images, cells).flatten(2)  # (patches, C, cells)
        levels = (colours * LEVELS).long().clamp(0, LEVELS - 1)
        classes = levels[:, 0]
        for channel in range(1, config.channels):
            classes = classes * LEVELS + levels[:, channel]
        return classes.reshape(*patches.shape[:2], -1)

    def _painted(self, logits: Tensor) -> Tensor:
        """Return patches (B, chosen N, C·h·w) painted in the most probable colours, normalised."""
        config, cells = self.encoder.config, CELLS[self.settings.target]
        classes = logits.reshape(-1, cells, cells, LEVELS**config.channels).argmax(dim=-1)
        digits = [classes // LEVELS ** (config.channels - 1 - channel) % LEVELS for channel in range(config.channels)]
        centres = (torch.stack(digits, dim=1) + 0.5) / LEVELS
        images = F.interpolate((centres - self.mean) / self.std, config.patch_size, mode="nearest")
        return images.reshape(*logits.shape[:2], -1)

    @property
    def _chosen(self) -> int:
        return self.settings.chosen(self.encoder.config.patches)


def corrupt(patches: Tensor, mask_token: Tensor, chosen: Tensor, noise: Tensor) -> Tensor:
    """Corrupt the chosen (B, N) of the patch embeddings (B, N, D): most become the mask token, some another patch."""
    kind, other = noise[..., 1], other_patches(noise[..., 2])
    swapped = torch.where((kind < REPLACED + SWAPPED)[..., None], gather_tokens(patches, other), patches)
    corrupted = torch.where((kind < REPLACED)[..., None], mask_token.to(patches.dtype), swapped)
    return torch.where(chosen[..., None], corrupted, patches)


def other_patches(noise: Tensor) -> Tensor:
    """Return the index of another patch for each patch, uniformly from noise (B, N); never the patch itself."""
    N = noise.shape[1]
    drawn = (noise * (N - 1)).long().clamp(max=N - 2)  # the product may round up to N - 1
    return drawn + (drawn >= torch.arange(N, device=noise.device))


def _outputs(config: ViTConfig, settings: MaskedPatchesSettings) -> int:
    """Return the outputs for each patch: logits of every cell, or all pixels."""
    if settings.target == "pixels":
        return config.channels * config.patch_size[0] * config.patch_size[1]
    return int(CELLS[settings.target] ** 2 * LEVELS**config.channels)
