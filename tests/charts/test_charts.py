"""Charts: they show their values, are valid XML for any input, and escape text."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable

import numpy as np
import pytest

from vitrail.charts.axis import Axis, around, short
from vitrail.charts.bars import Bar, Bin, bar_chart, reliability_diagram
from vitrail.charts.dots import DotRow, dot_chart
from vitrail.charts.heat import heat_map
from vitrail.charts.lines import Series, line_chart, scatter
from vitrail.charts.points import MOST_DOTS, point_chart
from vitrail.charts.precision_recall import precision_recall_chart
from vitrail.charts.svg import escape

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('1')</script>\"&\x00\x1b"


def texts(svg: str, kind: str = "text") -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}{kind}")]


def charts(name: str) -> list[str]:
    return [
        line_chart([Series(name, [1, 2, 3], [0.1, 0.2, 0.4], marks=True)], title=name, x_label=name, y_label=name),
        scatter([Series(name, [1, 2, 3], [0.1, 0.2, 0.4])], title=name),
        bar_chart([Bar(name, 3.0), Bar("other", 5.0, name)], title=name),
        reliability_diagram([Bin(0.5, 1.0, 4, 0.8, 0.75)], title=name),
        dot_chart([DotRow(name, [1, 2, 3], 2.0, (1.5, 2.5), name), DotRow("b", (), None)], title=name, x_label=name),
        point_chart(
            [1, 2, 3], [3, 1, 2], title=name, x_label=name, guide=name, notes=[name] * 3, trend=(name, [(1, 2)])
        ),
        point_chart(range(2000), range(2000), title=name, y_label=name, diagonal=True),
        precision_recall_chart([0.5, 1], [1, 0.4], title=name, at=(0.5, 1), chance=0.2),
        heat_map([[0.5, 0.5], [0, 1]], rows=[name, "b"], columns=[name, "b"], title=name, x_label=name, y_label=name),
        heat_map(np.eye(70).tolist(), rows=[name] * 70, columns=[name] * 70, title=name),
    ]


def test_text_is_escaped() -> None:
    for svg in charts(EVIL):
        root = ET.fromstring(svg)  # valid XML despite forbidden characters
        assert not list(root.iter(f"{SVG}script"))
        assert any("<script>alert('1')</script>" in text for text in [*texts(svg), *texts(svg, "title")])


def test_only_standalone_charts_include_their_style() -> None:
    series = [Series("a", [0, 1], [0, 1])]
    alone, inside = line_chart(series, title="t"), line_chart(series, title="t", standalone=False)
    assert "prefers-color-scheme:dark" in "".join(texts(alone, "style"))
    assert not texts(inside, "style")


def test_charts_have_accessible_names() -> None:
    for svg in charts("name"):
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == "name"
        assert root[0].tag == f"{SVG}title"
        assert (root[1].text or "").strip()


def test_points_are_at_their_values() -> None:
    """The marks of a line from (0, 0) to (4, 1) are on a straight line, the middle one in the middle."""
    svg = line_chart([Series("a", [0, 2, 4], [0, 0.5, 1], marks=True)], title="t", y_low=0, y_high=1)
    marks = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in ET.fromstring(svg).iter(f"{SVG}circle")]
    (x0, y0), (x1, y1), (x2, y2) = marks
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert 2 * x1 == pytest.approx(x0 + x2, abs=0.2)
    assert 2 * y1 == pytest.approx(y0 + y2, abs=0.2)


def test_values_that_are_not_finite_are_skipped() -> None:
    svg = line_chart([Series("a", [0, 1, 2], [1, math.nan, math.inf], marks=True)], title="t")
    assert "nan" not in svg
    assert "inf" not in svg
    assert len(list(ET.fromstring(svg).iter(f"{SVG}circle"))) == 1


@pytest.mark.parametrize(
    "empty",
    [
        lambda: line_chart([], title="t"),
        lambda: line_chart([Series("a", [], [])], title="t"),
        lambda: scatter([Series("a", [1], [math.nan])], title="t"),
        lambda: bar_chart([], title="t"),
        lambda: point_chart([1, math.inf], [math.nan, 1], title="t"),
        lambda: reliability_diagram([Bin(0, 1, 0, None, None)], title="t"),
        lambda: heat_map([], rows=[], columns=[], title="t"),
    ],
)
def test_empty_charts(empty: Callable[[], str]) -> None:
    assert any(text.startswith(("nothing to draw", "no predictions")) for text in texts(empty()))


def test_log_axes_space_powers_of_ten_evenly() -> None:
    axis = Axis(0.01, 1, log=True)
    assert [axis.position(value) for value in (0.01, 0.1, 1)] == pytest.approx([0, 0.5, 1])
    assert axis.ticks() == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    assert around([1e-8, 1], log=True).ticks() == pytest.approx([1e-8, 1e-6, 1e-4, 1e-2, 1])
    assert not around([0, 1], log=True).log, "log(0) is undefined"
    short_stretch = around([2.39, 2.43], log=True).ticks()
    assert len(short_stretch) > 2, "an axis without numbers says nothing"
    assert all(2.15 <= tick <= 2.68 for tick in short_stretch)


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis(0, 1, unit="percent"), ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (Axis(0, 4000, unit="integer"), ["0", "1,000", "2,000", "3,000", "4,000"]),
        (Axis(0, 2, unit="integer"), ["0", "1", "2"]),
        (Axis(0, 4e-4), ["0", "1e-4", "2e-4", "3e-4", "4e-4"]),
    ],
)
def test_ticks_are_round(axis: Axis, labels: list[str]) -> None:
    assert [axis.format(tick) for tick in axis.ticks()] == labels


def test_a_low_chart_still_shows_its_scale() -> None:
    assert Axis(0, 7.3).ticks(3) == pytest.approx([0, 2, 4, 6])
    assert Axis(0.5, 2.5, unit="integer").ticks(3) == [1, 2], "no fractions of an integer"


def test_short_numbers() -> None:
    assert [short(value) for value in (0, 0.5, 12000, 5e-4, 1 / 3, 2.5e7)] == [
        "0", "0.5", "12,000", "5e-4", "0.3333", "2.5e7",
    ]  # fmt: skip


def test_small_matrices_show_counts_and_large_ones_stay_small() -> None:
    svg = heat_map(
        [[0.9, 0.1], [0, 1]], counts=[[9, 1], [0, 10]], rows=["cat", "dog"], columns=["cat", "dog"], title="t"
    )
    assert {"9", "1", "10", "cat", "dog"} <= set(texts(svg))
    assert "cat → dog: 1, 10.0%" in texts(svg, "title")
    generator = np.random.default_rng(0)
    fractions = generator.dirichlet(np.full(200, 0.05), 200)
    names = [f"a rather long name of class {i}" for i in range(200)]
    large = heat_map(fractions.tolist(), rows=names, columns=names, title="t")
    assert len(large) < 700_000
    assert len(texts(large)) < 60, "200 names would lie over one another"


def test_matrix_rows_are_rows() -> None:
    fractions = np.eye(3)
    fractions[0] = (0.6, 0, 0.4)
    small = ET.fromstring(heat_map(fractions.tolist(), rows=["a", "b", "c"], columns=["a", "b", "c"], title="t"))
    cells = {
        kind: [r for r in small.iterfind(f"{SVG}g/{SVG}rect") if (r.get("class") or "").startswith(kind)]
        for kind in ("hit", "miss")
    }
    (mistake,) = cells["miss"]
    assert mistake.get("y") == cells["hit"][0].get("y"), "in the row of the first class"
    assert mistake.get("x") == cells["hit"][2].get("x"), "in the column of the last"
    large = np.zeros((70, 70))
    large[3, 50] = 1
    names = list(map(str, range(70)))
    (path,) = list(ET.fromstring(heat_map(large.tolist(), rows=names, columns=names, title="t")).iter(f"{SVG}path"))
    assert path.get("d") == "M50 3h1v1h-1z"


def test_reliability_bars_show_the_accuracy() -> None:
    root = ET.fromstring(reliability_diagram([Bin(0.8, 0.9, 10, 0.85, 0.5), Bin(0.9, 1.0, 20, 0.95, 1.0)]))
    high = {
        kind: [float(r.get("height", "")) for r in root.iter(f"{SVG}rect") if r.get("class") == kind]
        for kind in ("fill1", "fill2 pale", "fill1 pale")
    }
    assert high["fill1"][0] / high["fill1"][1] == pytest.approx(0.5, abs=0.01)
    assert high["fill2 pale"][0] / high["fill1"][1] == pytest.approx(0.35, abs=0.01)
    assert high["fill1 pale"][0] / high["fill1 pale"][1] == pytest.approx(0.5, abs=0.05), "half as many predictions"


def test_the_gap_of_an_overconfident_bin_is_drawn() -> None:
    def gaps(accuracy: float) -> tuple[int, bool]:
        svg = reliability_diagram([Bin(0.8, 0.9, 10, 0.85, accuracy)])
        drawn = sum(rect.get("class") == "fill2 pale" for rect in ET.fromstring(svg).iter(f"{SVG}rect"))
        return drawn, "gap to confidence" in texts(svg)

    assert gaps(0.5) == (1, True)
    assert gaps(0.9) == (0, False), "the legend names only what is drawn"


def test_escape_covers_attributes() -> None:
    assert escape("a\"b'c<d>&") == "a&quot;b&#39;c&lt;d&gt;&amp;"


def test_the_mean_of_dots_is_between_them() -> None:
    """The tick of the mean is at the middle dot, the interval between the outer ones, and 100% is the end."""
    svg = dot_chart([DotRow("a", [0.9, 0.94, 0.98], 0.94, (0.9, 0.98))], title="t", unit="percent")
    root = ET.fromstring(svg)
    dots = [float(circle.get("cx", "")) for circle in root.iter(f"{SVG}circle")]
    interval, mean = (path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "curve line1")
    assert dots[1] == pytest.approx((dots[0] + dots[2]) / 2, abs=0.11)
    assert float(mean[1:].split()[0]) == pytest.approx(dots[1], abs=0.11)
    assert [float(end) for end in (interval[1:].split()[0], interval.split("H")[1])] == [dots[0], dots[2]]
    assert "94.00%" in texts(svg)
    assert "mean 94.00%, 95% interval 90.00% to 98.00%" in (root[1].text or "")


def test_dots_without_values() -> None:
    assert "nothing to draw" in texts(dot_chart([DotRow("a", (), None)], title="t"))
    shown = texts(dot_chart([DotRow("a", [1.0], 1.0), DotRow("b", (), None, note="diverged")], title="t"))
    assert {"a", "b", "diverged"} <= set(shown)


# ── points ──


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in ET.fromstring(svg).iter(f"{SVG}circle")]


def guide(svg: str) -> list[tuple[float, float]]:
    """Return the ends of the dotted line, the last one of the drawing."""
    (path,) = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class") == "guide" and "L" in p.get("d", "")]
    ends = [end.split() for end in path.get("d", "").removeprefix("M").split("L")]
    return [(float(x), float(y)) for x, y in ends]


def test_a_point_with_equal_values_is_on_the_diagonal() -> None:
    svg = point_chart([1, 5, 9], [1, 5, 2], title="t", diagonal=True, guide="equal")
    (x0, y0), (x1, y1) = guide(svg)
    on_it, also_on_it, below = circles(svg)

    def height(x: float) -> float:
        return y0 + (x - x0) * (y1 - y0) / (x1 - x0)

    assert on_it[1] == pytest.approx(height(on_it[0]), abs=0.2)
    assert also_on_it[1] == pytest.approx(height(also_on_it[0]), abs=0.2)
    assert below[1] > height(below[0]) + 20
    assert "equal" in texts(svg)


@pytest.mark.parametrize("errors", [[-3, 2, 0], [1, 2, 3], [-1, -2, -3], [0, 0, 0]])
def test_the_guide_is_at_zero(errors: list[float]) -> None:
    svg = point_chart([1, 2, 3], errors, title="t")
    (_, start), (_, end) = guide(svg)
    assert start == end
    for (_, y), error in zip(circles(svg), errors, strict=True):
        assert math.copysign(1, start - y) == math.copysign(1, error) if error else abs(y - start) < 0.2


def test_many_points_are_counted_in_cells() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=100_000)
    svg = point_chart(x.tolist(), (x + generator.normal(size=100_000)).tolist(), title="t", diagonal=True)
    assert len(svg) < 60_000
    assert not circles(svg)
    assert "100,000 points" in "".join(texts(svg, "desc"))
    few = point_chart([0.0] * MOST_DOTS + [1.0], [0.0] * MOST_DOTS + [1.0], title="t", diagonal=True)
    cells = {p.get("class"): p.get("d", "") for p in ET.fromstring(few).iterfind(f"{SVG}g/{SVG}path")}
    assert {kind: path.count("M") for kind, path in cells.items()} == {"hit0": 1, "hit9": 1}
    assert f"{MOST_DOTS:,}" in texts(few), "the strongest colour"
    assert len(circles(point_chart([0.0] * MOST_DOTS, [0.0] * MOST_DOTS, title="t"))) == MOST_DOTS


def test_points_that_are_not_finite_keep_the_notes_of_the_others() -> None:
    svg = point_chart([1, math.nan, 3], [1, 2, 3], title="t", notes=["a", "b", "c"])
    assert texts(svg, "title") == ["t", "a", "c"]


def test_a_precision_recall_curve_starts_at_recall_zero() -> None:
    svg = precision_recall_chart([0.5, 1], [1, 0.5], title="cat", at=(1, 0.5), chance=0.25)
    root = ET.fromstring(svg)
    (curve,) = [p.get("d", "") for p in root.iter(f"{SVG}path") if p.get("class") == "curve line1"]
    points = [tuple(map(float, point.split())) for point in curve.removeprefix("M").split("L")]
    assert len(points) == 3
    assert points[0][1] == points[1][1] < points[2][1]
    assert circles(svg) == [points[2]]
    (chance,) = [p.get("d", "") for p in root.iter(f"{SVG}path") if p.get("class") == "guide"]
    assert float(chance.removeprefix("M").partition("h")[0].split()[1]) > points[2][1]
    assert "at the threshold: recall 100.0%, precision 50.0%" in "".join(texts(svg, "desc"))
    assert "no image has this label" in texts(precision_recall_chart([], [], title="t"))


def test_a_long_label_is_shortened_in_its_chart() -> None:
    svg = precision_recall_chart([1], [1], title="a label " * 20)
    assert all(len(text) <= 34 for text in texts(svg))
    assert "a label " * 20 in texts(svg, "title")
