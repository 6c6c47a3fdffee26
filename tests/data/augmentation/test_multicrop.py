"""Multi-crop: areas, sizes and frequencies of the views, drawn from seed and position only."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from vitrail.data.augmentation.multicrop import MultiCrop, PlannedView, apply_views, decode_scale, plan_views
from vitrail.errors import ConfigError

CROPS = MultiCrop(local_size=16, local_crops=3)
SIZE = (32, 32)
COUNT = 2000
CHANCE = 0.001


def image(height: int = 60, width: int = 80, mode: str = "RGB") -> Image.Image:
    rough = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height)).convert(mode)


def names(view: PlannedView) -> list[str]:
    return [operation.name for operation in view.plan.operations]


MANY = [plan_views(CROPS, 300, 400, SIZE, 0, position) for position in range(COUNT)]


@given(
    height=st.integers(16, 2000),
    width=st.integers(16, 2000),
    seed=st.integers(0, 2**32),
    position=st.integers(0, 2**40),
)
@settings(deadline=None, derandomize=True)
def test_boxes_are_inside_the_image_and_areas_within_bounds(height: int, width: int, seed: int, position: int) -> None:
    for number, (plan, size) in enumerate(plan_views(CROPS, height, width, SIZE, seed, position)):
        box, (low, high) = plan.box, CROPS.global_area if number < 2 else CROPS.local_area
        assert size == (SIZE if number < 2 else (16, 16))
        assert 0 <= box.top <= box.bottom <= height
        assert 0 <= box.left <= box.right <= width
        # Sides are whole pixels. Very oblong images have no box of an allowed area, and get the largest centre crop.
        rounding = (box.height + box.width) / 2 + 1
        assert box.height * box.width >= low * height * width - rounding or min(box.height, box.width) == min(
            height, width
        )
        if 3 / 4 <= width / height <= 4 / 3:
            assert box.height * box.width <= high * height * width + rounding
        assert 3 / 4 - 0.2 <= box.width / box.height <= 4 / 3 + 0.3


@pytest.mark.parametrize(("view", "area"), [(0, (0.4, 1.0)), (1, (0.4, 1.0)), (2, (0.05, 0.4)), (4, (0.05, 0.4))])
def test_areas_and_ratios_are_drawn_from_the_whole_range(view: int, area: tuple[float, float]) -> None:
    boxes = [views[view].plan.box for views in MANY]
    areas = [box.height * box.width / (300 * 400) for box in boxes]
    assert min(areas) == pytest.approx(area[0], abs=0.02)
    assert max(areas) == pytest.approx(area[1], abs=0.07)
    if area[1] < 0.5:  # large boxes that do not fit are redrawn, so only small areas are uniform
        assert stats.kstest(areas, stats.uniform(area[0], area[1] - area[0]).cdf).pvalue > CHANCE
        ratios = [math.log(box.width / box.height) for box in boxes]
        assert min(ratios) == pytest.approx(math.log(3 / 4), abs=0.03)
        assert max(ratios) == pytest.approx(math.log(4 / 3), abs=0.03)


@pytest.mark.parametrize(
    ("operation", "chances"),
    [
        ("brightness", (0.8,) * 5),
        ("hue", (0.8,) * 5),
        ("grey", (0.2,) * 5),
        ("blur", (1.0, 0.1, 0.5, 0.5, 0.5)),
        ("solarize", (0.0, 0.2, 0.0, 0.0, 0.0)),
    ],
)
def test_frequencies_of_operations(operation: str, chances: tuple[float, ...]) -> None:
    for view, chance in enumerate(chances):
        count = sum(operation in names(views[view]) for views in MANY)
        if chance in (0.0, 1.0):
            assert count == chance * COUNT
        else:
            assert stats.binomtest(count, COUNT, chance).pvalue > CHANCE


def test_strengths_and_order_of_operations() -> None:
    order = ["grey", "blur", "solarize"]
    bounds = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.8, 1.2), "hue": (-0.1, 0.1)}
    for views in MANY:
        for view in views:
            found = names(view)
            jittered = [name for name in found if name in bounds]
            assert found == jittered + [name for name in order if name in found]
            assert len(jittered) in (0, 4)
            for name, values in view.plan.operations:
                if name in bounds:
                    assert bounds[name][0] <= values[0] <= bounds[name][1]
                if name == "blur":
                    assert 0.1 <= values[0] <= 2.0
    flips = sum(view.plan.flip for views in MANY for view in views)
    assert stats.binomtest(flips, 5 * COUNT, 0.5).pvalue > CHANCE


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**62))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_views_depend_on_seed_and_position_only(seed: int, position: int) -> None:
    once, again = (plan_views(CROPS, 60, 80, SIZE, seed, position) for _ in range(2))
    assert once == again
    pixels = [apply_views(views, image()) for views in (once, again)]
    assert all(np.array_equal(one, other) for one, other in zip(*pixels, strict=True))
    assert once != plan_views(CROPS, 60, 80, SIZE, seed ^ 1, position)
    assert once != plan_views(CROPS, 60, 80, SIZE, seed, position ^ 1)


def test_the_number_of_views_does_not_change_a_view() -> None:
    more = plan_views(CROPS.replace(local_crops=7), 60, 80, SIZE, 3, 5)
    assert more[:5] == plan_views(CROPS, 60, 80, SIZE, 3, 5)
    assert len({view.plan.box for view in more}) == 9


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_shapes(mode: str, channels: int) -> None:
    made = apply_views(plan_views(CROPS, 60, 80, SIZE, 0, 0), image(mode=mode))
    assert [view.shape for view in made] == [(32, 32, channels)] * 2 + [(16, 16, channels)] * 3
    assert {view.dtype for view in made} == {np.dtype(np.uint8)}


def test_no_view_is_enlarged_by_decoding_at_a_reduced_scale() -> None:
    for views in MANY[:100]:
        scale = decode_scale(views)
        assert all(view.plan.box.height * scale >= view.size[0] - 1e-9 for view in views)
        assert all(view.plan.box.width * scale >= view.size[1] - 1e-9 for view in views)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_area": (0.1, 1.2)}, r"local_area is \(0.1, 1.2\); .* up to 1"),
        ({"global_area": (0.8, 0.4)}, "global_area .* smaller number first"),
        ({"local_area": (0.0, 0.4)}, "local_area.0 is 0.0"),
        ({"local_crops": 65}, "local_crops is 65"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiCrop(**{"local_size": 16, **fields})
