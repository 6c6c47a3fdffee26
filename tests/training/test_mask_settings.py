"""The settings of a recipe about masks: which values count, and what images with masks do not support."""

from pathlib import Path

import pytest
from tests.support.mask_data import write_shapes

from vitrail.data.sources.targets import Labelling, output_names_of
from vitrail.errors import ConfigError
from vitrail.training.context import open_splits
from vitrail.training.recipe_files import read_recipe


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    return write_shapes(tmp_path, 20, 16)


def test_ignored_values_are_a_setting(shapes: Path) -> None:
    recipe = read_recipe("scratch-small", ["data.ignore=[0, 7]"])
    assert recipe.labelling == Labelling(None, (), None, (0, 7))
    splits = open_splits(str(shapes), recipe)
    assert output_names_of(splits.train) == ("disc", "square")
    assert splits.record["labelling"]["ignore"] == [0, 7]
    with pytest.raises(ConfigError, match=r"data.ignore"):
        read_recipe("scratch-small", ["data.ignore=[-1]"])
    with pytest.raises(
        ConfigError, match=r"data.ignore is \[0, 7\], values in masks, but digits has no masks; leave it"
    ):
        open_splits("digits", recipe)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            "data.cache=64",
            r"data.cache is 64, but a mask has the size of its image, not of a smaller one; leave it out",
        ),
        (
            "data.on_device=true",
            r"data.on_device is true, but images with masks are augmented on the CPU; leave it out",
        ),
        ("data.per_class=3", r"per_class is 3, but the images of .* have no classes; use fraction"),
    ],
)
def test_what_masks_do_not_support(shapes: Path, change: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        open_splits(str(shapes), read_recipe("scratch-small", [change]))
