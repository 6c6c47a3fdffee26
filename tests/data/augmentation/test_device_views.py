"""Views made on the device: the resize against Pillow's, sizes, areas, and images that stay what they are."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.augmentation.device_views import DRAWS, device_views, resize_matrix
from vitrail.data.augmentation.multicrop import MultiCrop

CROPS = MultiCrop(local_size=(8, 8), local_crops=3)


@pytest.mark.parametrize(("box", "made"), [((2.0, 20.0), 12), ((0.0, 32.0), 32), ((5.5, 9.25), 16), ((0.0, 32.0), 7)])
def test_the_resize_is_pillows(box: tuple[float, float], made: int) -> None:
    # Far from black and white: Pillow also clips between the two axes.
    image = np.random.default_rng(0).integers(64, 192, (32, 32), np.uint8)
    start, length = box
    expected = Image.fromarray(image).resize(
        (made, made), Image.Resampling.BICUBIC, box=(start, start, start + length, start + length)
    )
    matrix = resize_matrix(torch.tensor(start), torch.tensor(length), 32, made)
    actual = (matrix @ torch.from_numpy(image).float() @ matrix.T).clamp(0, 255)
    assert np.abs(actual.numpy() - np.asarray(expected, dtype=np.float32)).max() < 1.5


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_sizes_and_range(channels: int) -> None:
    pixels, drawn = torch.rand(4, channels, 16, 20), torch.rand(4, 5 * DRAWS)
    large, small = device_views(pixels, drawn, CROPS)
    assert large.shape == (4, 2, channels, 16, 20)
    assert small.shape == (4, 3, channels, 8, 8)
    for views in (large, small):
        assert views.min() >= 0
        assert views.max() <= 1 + 1e-5


def test_a_whole_image_without_colours_stays_unchanged() -> None:
    pixels = torch.rand(2, 3, 16, 16)
    crops = MultiCrop(local_size=(8, 8), local_crops=0, global_area=(1.0, 1.0), flip=0.0, colours="none")
    drawn = torch.full((2, 2 * DRAWS), 0.5)
    drawn.view(2, 2, DRAWS)[..., 1] = np.log(4 / 3) / (np.log(4 / 3) - np.log(3 / 4))  # a ratio of 1
    large, small = device_views(pixels, drawn, crops)
    torch.testing.assert_close(large[:, 0], pixels, rtol=0, atol=1e-4)
    assert small.shape[1] == 0
    flipped, _ = device_views(pixels, drawn, crops.replace(flip=1.0))
    torch.testing.assert_close(flipped[:, 0], pixels.flip(-1), rtol=0, atol=1e-4)


def test_a_uniform_image_keeps_its_value_unless_colours_change_it() -> None:
    pixels, drawn = torch.full((3, 3, 16, 16), 0.25), torch.rand(3, 5 * DRAWS)
    plain = device_views(pixels, drawn, CROPS.replace(colours="none"))
    assert all((views - 0.25).abs().max() < 1e-5 for views in plain)
    coloured = device_views(pixels, drawn, CROPS)
    for views in coloured:  # jitter changes the value, but a uniform image stays uniform
        assert views.std(dim=(3, 4)).max() < 1e-5
        assert (views - 0.25).abs().max() > 0.01
