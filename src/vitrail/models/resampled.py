"""`ResampledForward`: run a ViT on images of another size without changing it, differentiably.

`ViT.resize` replaces the position tables, so the model then fits only the new size. Here the tables stay; every forward
pass computes tables for the other grid from them. So one model trains on images of several sizes, and the gradients of
all sizes add up in the same parameters.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from vitrail.models.config import ViTConfig
from vitrail.models.position import TABLES, Method, check_method, resample_table, table_rows
from vitrail.models.vit import ViT


class ResampledForward(nn.Module):
    """The forward pass of a ViT of this config, for images of another size.

    It has no parameters and nothing in its state dict: the ViT is passed to `forward`. With gradient checkpointing the
    whole forward pass is one checkpoint.
    """

    def __init__(self, config: ViTConfig, image_size: tuple[int, int], *, method: Method = "timm") -> None:
        super().__init__()
        check_method(method)
        new = config.replace(image_size=image_size)
        with torch.device("meta"):
            model = ViT(new)
        # In a tuple, so that its empty parameters are not registered here.
        self._model = (model,)
        # What follows from the grid is computed even for a meta model; the rest (BatchNorm) belongs to the ViT.
        self._positions = [name for name, buffer in model.named_buffers() if not buffer.is_meta]
        for name in self._positions:
            self.register_buffer(name, model.get_buffer(name), persistent=False)
        for name, matrix in resampling_matrices(config, new, method).items():
            self.register_buffer(f"{name}_matrix", matrix, persistent=False)

    @property
    def model(self) -> ViT:
        """The model of the other size; its parameters are empty, those of the encoder take their place."""
        return self._model[0]

    def forward(self, encoder: ViT, x: Tensor) -> Tensor:
        """Return what `encoder`, resized to the size of the images (B, C, h, w), would return."""
        tensors = {name: self._resampled(name, parameter) for name, parameter in encoder.named_parameters()}
        tensors |= dict(encoder.named_buffers()) | {name: self.get_buffer(name) for name in self._positions}
        model = self.model.train(encoder.training)
        if encoder.gradient_checkpointing and encoder.training:
            # Around the whole call: blocks that recompute later would no longer see these tensors.
            return checkpoint(functional_call, model, tensors, x, use_reentrant=False)  # type: ignore[no-any-return]
        return functional_call(model, tensors, x)  # type: ignore[no-any-return]

    def _resampled(self, name: str, parameter: Tensor) -> Tensor:
        """Return the table for the other grid; any other parameter unchanged."""
        kind = name.rpartition(".")[2]
        if kind not in TABLES:
            return parameter
        with torch.autocast(parameter.device.type, enabled=False):  # bf16 would round the positions
            return self.get_buffer(f"{kind}_matrix").to(parameter.dtype) @ parameter


def resampling_matrices(old: ViTConfig, new: ViTConfig, method: Method = "timm") -> dict[str, Tensor]:
    """Return a matrix for each learned table: matrix @ table is the table for the new grid.

    Resampling is linear, so the columns are what it makes of the unit vectors. A matmul is deterministic on a GPU; the
    backward pass of an interpolation is not.
    """
    rows: dict[str, int] = {}
    match old.position:
        case "learned_1d":
            rows = {"pos_embed": table_rows(old)}
        case "learned_2d":
            rows = {"pos_embed_row": old.grid[0], "pos_embed_col": old.grid[1]}
        case "relative":
            rows = {"rel_pos": 2 * old.patches - 1}
    matrices = {}
    for name, count in rows.items():
        units = torch.eye(count)
        made = resample_table(name, units[None] if name == "pos_embed" else units, old, new, method)
        matrices[name] = made.reshape(-1, count)
    return matrices
