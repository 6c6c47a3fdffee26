"""A report in Chromium: no requests, no console errors, everything visible, also on a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.browser import chromium
from tests.support.tiny_runs import CLASSES, EVIL

from vitrail import Run
from vitrail.explanations.figures.figure import TEXT
from vitrail.reports.report import report

pytestmark = pytest.mark.slow

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as result:
        yield result


@pytest.fixture(scope="module")
def files(
    run: Path,
    other_run: Path,
    done: Run,
    labels_run: Path,
    other_labels_run: Path,
    value_run: Path,
    other_value_run: Path,
    columns_run: Path,
    masks_run: Path,
    other_masks_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "one": report(run, out=folder / "one.html"),
        "two": report(run, other_run, folder / "two.html"),
        "pretraining": report(done.folder, out=folder / "pretraining.html"),
        "labels": report(labels_run, out=folder / "labels.html"),
        "two-labels": report(labels_run, other_labels_run, folder / "two-labels.html"),
        "values": report(value_run, out=folder / "values.html"),
        "columns": report(columns_run, out=folder / "columns.html"),
        "masks": report(masks_run, out=folder / "masks.html"),
        "two-masks": report(masks_run, other_masks_run, folder / "two-masks.html"),
        "two-values": report(value_run, other_value_run, folder / "two-values.html"),
    }


class Opened(NamedTuple):
    """A page with its requests and console messages."""

    page: Any
    requests: list[str]
    complaints: list[str]


@pytest.fixture
def opened(browser: Any, files: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Opened]:
    which, viewport, scheme = request.param
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda one: requests.append(one.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    page.goto(files[which].as_uri())
    yield Opened(page, requests, complaints)
    context.close()


EVERYWHERE = [
    (which, size, scheme)
    for which in (
        "one",
        "two",
        "pretraining",
        "labels",
        "two-labels",
        "values",
        "columns",
        "two-values",
        "masks",
        "two-masks",
    )
    for size in (PHONE, DESKTOP)
    for scheme in ("light", "dark")
]


@pytest.mark.parametrize(
    "opened", EVERYWHERE, indirect=True, ids=lambda case: f"{case[0]}-{case[1]['width']}-{case[2]}"
)
def test_the_page_is_complete_and_makes_no_requests(opened: Opened) -> None:
    page = opened.page
    assert page.evaluate("document.images.length") > 0
    assert page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert page.evaluate("document.querySelectorAll('svg.chart').length") >= 4
    assert opened.complaints == []
    external = [url for url in opened.requests if not url.startswith("data:")]
    assert len(external) == 1, "only the file itself"
    assert external[0].startswith("file:")


@pytest.mark.parametrize("opened", [("one", DESKTOP, "light")], indirect=True)
def test_a_script_in_a_name_is_shown_as_text(opened: Opened) -> None:
    cells = opened.page.locator("#classes tbody th").all_inner_texts()
    assert sorted(cells) == sorted(CLASSES)
    assert opened.page.locator("script").count() == 1
    assert opened.page.get_by_text(EVIL).first.is_visible()


@pytest.mark.parametrize("opened", [("one", DESKTOP, "light")], indirect=True)
def test_tables_are_sorted_by_mouse_and_keyboard(opened: Opened) -> None:
    page = opened.page

    def column(number: int) -> list[str]:
        results: list[str] = page.locator(f"#classes tbody tr > :nth-child({number})").all_inner_texts()
        return results

    def direction() -> Any:
        return page.locator("#classes th", has=recall).get_attribute("aria-sort")

    recall = page.get_by_role("button", name="Recall", exact=True)
    recall.click()
    results = [float(text.rstrip("%")) for text in column(3)]
    assert results == sorted(results, reverse=True)
    assert direction() == "descending"
    recall.press("Enter")
    results = [float(text.rstrip("%")) for text in column(3)]
    assert results == sorted(results)
    assert direction() == "ascending"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    images = [int(text) for text in column(2)]
    assert images == sorted(images, reverse=True)
    assert direction() is None
    page.locator("#classes").get_by_role("button", name="Class", exact=True).click()
    assert column(1) == [EVIL, "plain", CLASSES[1]]


@pytest.mark.parametrize("opened", [("one", DESKTOP, "dark")], indirect=True)
def test_dark_mode_and_print_colours(opened: Opened) -> None:
    def light(variable: str) -> float:
        script = "v => getComputedStyle(document.querySelector('svg.chart')).getPropertyValue(v)"
        colour = opened.page.evaluate(script, variable).strip().lstrip("#")
        return sum(int(colour[place : place + 2], 16) for place in (0, 2, 4)) / 765

    assert light("--chart-ink") > 0.7
    opened.page.emulate_media(media="print")
    assert light("--chart-ink") < 0.3
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    lefts = opened.page.evaluate("[...document.querySelectorAll('svg.chart')].map(s => s.getBoundingClientRect().left)")
    assert min(lefts) >= 0, "what reaches into the margin of the paper may be cut off"


@pytest.mark.parametrize("opened", [("one", DESKTOP, "light")], indirect=True)
def test_it_prints(opened: Opened) -> None:
    printed = opened.page.pdf()
    assert printed.startswith(b"%PDF")
    assert opened.page.evaluate("document.querySelector('details').open"), "the recipe is printed, too"


@pytest.mark.parametrize("opened", [("one", PHONE, "light")], indirect=True)
def test_wide_content_scrolls_and_is_focusable(opened: Opened) -> None:
    boxes = opened.page.locator(".box")
    assert boxes.count() >= 3
    for box in boxes.all():
        assert box.get_attribute("tabindex") == "0"
        assert box.get_attribute("aria-label")


SHADOW = "(side) => getComputedStyle(document.querySelector('#classes .scroller'), side).opacity"


@pytest.mark.parametrize("opened", [("one", size, "light") for size in (PHONE, DESKTOP)], indirect=True)
def test_only_clipped_tables_show_the_scroll_hint(opened: Opened) -> None:
    page = opened.page
    narrow = page.viewport_size["width"] == PHONE["width"]
    box, hint = page.locator("#classes .box"), page.locator("#classes .hint")
    cut = box.evaluate("box => box.scrollWidth > box.clientWidth + 1")
    assert cut == narrow
    assert hint.is_visible() == narrow
    assert page.evaluate(SHADOW, "::after") == ("1" if narrow else "0")
    if narrow:
        box.evaluate("box => (box.scrollLeft = box.scrollWidth)")
        page.wait_for_function(f"({SHADOW})('::after') === '0'")
        assert page.evaluate(SHADOW, "::before") == "1"


@pytest.mark.parametrize("opened", [("one", PHONE, "light")], indirect=True)
def test_the_positions_figure_is_legible_on_a_phone(opened: Opened) -> None:
    figure = opened.page.locator("#inside figure.sheet img[alt*=osition]").first
    shrunk = figure.evaluate("image => image.getBoundingClientRect().width / image.naturalWidth")
    assert TEXT * shrunk >= 9


CONTRASTS = """() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll("#confusion svg g")].map((cell) => {
    const lights = ["rect", "text"].map((tag) => light(getComputedStyle(cell.querySelector(tag)).fill));
    return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
  });
}"""


@pytest.mark.parametrize("opened", [("one", DESKTOP, scheme) for scheme in ("light", "dark")], indirect=True)
def test_the_confusion_matrix_has_enough_contrast(opened: Opened) -> None:
    result = opened.page.evaluate(CONTRASTS)
    assert len(result) >= len(CLASSES)
    assert min(result) >= 4.5


OVERLAPS = """() => {
  const found = [];
  for (const chart of document.querySelectorAll("svg.chart")) {
    const texts = [...chart.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const frame = chart.getBoundingClientRect();
    texts.forEach(([one, a], index) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1) found.push(`${one} is cut off`);
      for (const [other, b] of texts.slice(index + 1)) {
        const [wide, high] = [Math.min(a.right, b.right) - Math.max(a.left, b.left),
                              Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
        if (wide > 2 && high > 4) found.push(`${one} lies on ${other}`);
      }
    });
  }
  return found;
}"""


@pytest.mark.parametrize(
    "opened",
    [(which, size, "light") for which in ("labels", "values", "columns", "two-values") for size in (PHONE, DESKTOP)],
    indirect=True,
    ids=lambda case: f"{case[0]}-{case[1]['width']}",
)
def test_the_texts_of_charts_do_not_overlap(opened: Opened) -> None:
    assert opened.page.evaluate(OVERLAPS) == []
