"""The fused training path in pieces that are compiled one by one, for several ranks.

    stem | blocks 0, 1 | blocks 2, 3 | ... | last blocks and head

A compiled backward pass returns all its gradients at its end. With the whole model in one piece, DDP could reduce none
of them before the backward pass is over. In pieces, it reduces those of a piece while the pieces before it run. At a
boundary the residual stream and its gradient are written in float32 and read again, which is fused inside a piece.

DDP calls this module; the module calls compiled functions. Compiling DDP itself would split graphs at its buckets,
which torch 2.11 cannot do for a hand-written backward pass.
"""

import torch
from torch import Tensor, nn

from vitrail.acceleration.cuda.training.model import FusedTraining
from vitrail.models.vit import ViT

BLOCKS_PER_PIECE = 2
"""More of them: fewer boundaries. Fewer: DDP starts earlier, and has less left to reduce at the end."""


class FusedPieces(nn.Module):
    """A model with a fused forward pass in compiled pieces, to be wrapped by DistributedDataParallel."""

    def __init__(self, model: ViT, blocks_per_piece: int = BLOCKS_PER_PIECE) -> None:
        super().__init__()
        self.fused, self.blocks_per_piece = FusedTraining(model), blocks_per_piece
        self.stem = torch.compile(self.fused.stem)
        self.encode = torch.compile(self.fused.encode)
        self.finish = torch.compile(self.fused.finish)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes)."""
        blocks, size = self.fused.blocks, self.blocks_per_piece
        *pieces, last = (blocks[start : start + size] for start in range(0, len(blocks), size))
        # Equal pieces share compiled code. With stochastic depth all differ, and need more than torch's limit.
        limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
        with torch._dynamo.config.patch(optimize_ddp=False, recompile_limit=limit):
            tokens, places = self.stem(x)
            for piece in pieces:
                tokens = self.encode(piece, tokens, places)
            return self.finish(last, tokens, places)
