"""A small segmentation head on a ViT's grid of patch features.

A 1×1 convolution on `features(..., as_grid=True)` learns, together with a tiny ViT, to find a disc in noise. Run
`python examples/segmentation_head.py`: it trains for a few seconds on images it paints itself and prints how well
the found disc covers the real one (intersection over union).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail


class Segmenter(nn.Module):
    """A score for every pixel, from the patch features of a ViT."""

    def __init__(self, vit: vitrail.ViT) -> None:
        super().__init__()
        self.vit = vit
        self.head = nn.Conv2d(vit.config.width, 1, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to scores (B, 1, H, W)."""
        grid = self.vit.features(x, as_grid=True).tokens  # (B, D, rows, columns)
        return F.interpolate(self.head(grid), x.shape[2:], mode="bilinear")


def paint(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Paint images of a bright disc in noise, and the masks that say where it is."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(size // 4, 3 * size // 4, (count, 2, 1, 1))
    mask = ((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2 < (size // 5) ** 2).float()[:, None]
    return 0.5 * torch.randn(count, 3, size, size) + mask, mask


def main() -> None:
    torch.manual_seed(0)
    tiny = vitrail.ViTConfig(image_size=(48, 48), patch_size=(4, 4), width=64, depth=2, heads=4, classes=0)
    model = Segmenter(vitrail.create(tiny))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        images, masks = paint(16, 48)
        loss = F.binary_cross_entropy_with_logits(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, masks = paint(64, 48)
    with torch.no_grad():
        predicted = model(images) > 0
    overlap = (predicted & masks.bool()).sum() / (predicted | masks.bool()).sum()
    print(f"intersection over union on 64 new images: {overlap:.2f}")


if __name__ == "__main__":
    main()
