"""The fused forward pass for training on a GPU, to be wrapped by torch.compile.

If the head reads a single token, the last block computes keys and values of all tokens, but everything else for that
token only: the other tokens do not affect the loss. All gradients stay the same, up to rounding. Patches are projected
by a matmul, which is several times faster than a convolution on a GPU.
"""

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.acceleration.cuda.training.block import all_tokens, as_stream, one_token
from vitrail.acceleration.planner import hardware_of, unsupported_by_fused_training
from vitrail.errors import ConfigError
from vitrail.models.blocks import Block, pooled_token
from vitrail.models.checks import check_images
from vitrail.models.lora import has_adapters
from vitrail.models.position import TokenPositions
from vitrail.models.stems import ConvProjection, patchify
from vitrail.models.vit import ViT


class FusedTraining(nn.Module):
    """A model with a fused forward pass. It shares the model's parameters.

    Create it after the model has been moved to its device.
    Stochastic depth draws the same numbers as in the model; dropout in the last block draws for one token only.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        if lacks := unsupported_by_fused_training(model.config):  # the result would be wrong
            raise ConfigError(f"the fused path does not support {lacks}; train the model itself")
        if has_adapters(model):  # they would be ignored
            raise ConfigError("the fused path does not support LoRA adapters; train the model itself")
        self.model = model
        self.short_attention = hardware_of(next(model.parameters()).device).short_attention

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits, as the model does."""
        return self.finish(self.blocks, *self.stem(x))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, in order."""
        return tuple(cast("Block", block) for block in self.model.blocks)

    def stem(self, x: Tensor) -> tuple[Tensor, TokenPositions]:
        """Map images to the tokens (B, T, D) of the first block, in the precision of the residual stream."""
        tokens, places = self._embed(x)
        return as_stream(tokens), places

    def encode(self, blocks: tuple[Block, ...], tokens: Tensor, places: TokenPositions) -> Tensor:
        """Run blocks before the last one, on all tokens."""
        for block in blocks:
            tokens = self._run(all_tokens, block, tokens, places)
        return tokens

    def finish(self, blocks: tuple[Block, ...], tokens: Tensor, places: TokenPositions) -> Tensor:
        """Run the last blocks and the head, giving logits."""
        tokens = self.encode(blocks[:-1], tokens, places)
        one = pooled_token(self.model.config) is not None and not self.model.config.patch_dropout
        return self.model._classify(self._run(one_token if one else all_tokens, blocks[-1], tokens, places))

    def _embed(self, x: Tensor) -> tuple[Tensor, TokenPositions]:
        model, config = self.model, self.model.config
        if config.stem != "conv":
            return model.embed(x)
        check_images(x, config, next(model.parameters()))
        return model.add_positions(project_patches(cast("ConvProjection", model.patch_embed), x))

    def _run(
        self,
        function: Callable[[Block, Tensor, TokenPositions, bool], Tensor],
        block: Block,
        tokens: Tensor,
        places: TokenPositions,
    ) -> Tensor:
        """Run one block, with gradient checkpointing if the model uses it."""
        if self.model.gradient_checkpointing and self.model.training:
            return cast(
                "Tensor", checkpoint(function, block, tokens, places, self.short_attention, use_reentrant=False)
            )
        return function(block, tokens, places, self.short_attention)


def project_patches(stem: ConvProjection, x: Tensor) -> Tensor:
    """Map images to patches (B, N, D) by a matmul."""
    height, width = stem.proj.kernel_size
    return F.linear(patchify(x, (height, width)), stem.proj.weight.flatten(1), stem.proj.bias)
