"""The explorer page with late or reordered responses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.browser import chromium
from tests.support.page_visit import DESKTOP, WAIT, Visit, image_file, service, some_bundle, visit

from vitrail import ViTConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    folder = tmp_path_factory.mktemp("bundles")
    birds = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, classes=3)
    finer = birds.replace(patch_size=4, depth=2, heads=4)
    names = ("heron", "kite", "crow")
    bundles = {"birds": some_bundle(birds, names, folder / "b"), "finer": some_bundle(finer, names, folder / "f")}
    with service(bundles) as address, chromium() as browser, visit(browser, DESKTOP) as result:
        result.open(address)
        yield result


@pytest.fixture
def seen(opened: Visit) -> Iterator[Visit]:
    opened.go("#model=birds&image=balloon")
    yield opened
    complaints, opened.complaints[:] = list(opened.complaints), []
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


@contextmanager
def held(seen: Visit, pattern: str) -> Iterator[list[Any]]:
    """Hold requests until the end of the block; yields the held ones."""
    waiting: list[Any] = []
    seen.page.route(pattern, lambda route: waiting.append(route))
    try:
        yield waiting
    finally:
        seen.page.unroute(pattern)  # releases the held requests


def give(seen: Visit, content: bytes) -> None:
    seen.page.set_input_files("#file", {"name": "bird.png", "mimeType": "image/png", "buffer": content})


def wait_for(seen: Visit, waiting: list[Any], many: int) -> None:
    for _ in range(WAIT // 20):
        if len(waiting) >= many:
            return
        seen.page.wait_for_timeout(20)
    pytest.fail("the request does not come")


def test_a_sample_that_loads_slowly_does_not_replace_a_later_one(seen: Visit) -> None:
    with held(seen, "**/samples/*boat*") as waiting:
        seen.page.get_by_role("button", name="boat").click()
        wait_for(seen, waiting, 1)
        seen.page.get_by_role("button", name="daisy").click()
        seen.until("image=daisy")
        seen.settle()
        shown = seen.pixels()
    seen.page.wait_for_timeout(300)
    seen.settle()
    assert "image=daisy" in seen.hash()
    assert seen.pixels() == shown


def test_an_aborted_image_is_not_restored(seen: Visit) -> None:
    before = seen.pixels()
    with held(seen, "**/v1/predict*") as waiting:
        give(seen, image_file())
        wait_for(seen, waiting, 1)
        give(seen, b"no image")
        wait_for(seen, waiting, 2)
    seen.page.locator("#problem").wait_for(timeout=WAIT)
    seen.settle()
    seen.page.wait_for_timeout(300)  # the URL is updated with a delay
    assert "image=balloon" in seen.hash()
    assert seen.pixels() == before


@pytest.mark.parametrize("change", ["model", "layer"])
def test_changes_while_an_image_loads_apply_to_that_image(seen: Visit, change: str) -> None:
    view = "model=finer" if change == "model" else "layer=0"

    def alter() -> None:
        if change == "model":
            seen.part("models").select_option("finer")
        else:
            seen.part("layer").fill("0")

    give(seen, image_file())
    seen.settle()
    alter()
    seen.until(view)
    seen.settle()
    expected = seen.pixels()
    seen.go("#model=birds&image=balloon")
    with held(seen, "**/v1/predict*") as waiting:
        give(seen, image_file())
        wait_for(seen, waiting, 1)
        alter()
        wait_for(seen, waiting, 2)
    seen.until(view)
    seen.until("image=own")
    seen.settle()
    assert seen.pixels() == expected
    # The page also returns to it, and not to the previous image.
    seen.page.get_by_label("Compare with").select_option("finer")
    seen.until("other=finer")
    seen.settle()
    assert "image=own" in seen.hash()
    assert seen.pixels() == expected


@pytest.mark.parametrize("method", ["attention", "rollout"])
def test_a_model_replaced_on_the_server_is_detected(seen: Visit, method: str) -> None:
    seen.go(f"#model=birds&image=balloon&method={method}&layer=0")
    before = seen.pixels()
    requested = "**/v1/explain*"
    seen.page.route(requested, lambda route: route.continue_(url=route.request.url.replace("birds", "finer")))
    try:
        give(seen, image_file())
        seen.page.locator("#problem").wait_for(timeout=WAIT)
    finally:
        seen.page.unroute(requested)
    assert "The model “birds” has changed on the server; reload the page" in seen.page.locator("#problem").inner_text()
    seen.settle()
    assert seen.pixels() == before


def test_an_unknown_class_is_ignored(seen: Visit) -> None:
    seen.go("#model=birds&image=daisy&method=relevance&target=999")
    assert seen.page.locator("#problem").is_hidden()
    assert seen.part("readout").inner_text().startswith("Evidence for")
