"""The explorer page in a real Chromium, with a real service behind it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, get_args

import httpx
import numpy as np
import pytest
import torch
from tests.support.browser import chromium
from tests.support.page_visit import DESKTOP, PHONE, WAIT, Visit, image_file, service, some_bundle, visit

import vitrail
from vitrail import ViTConfig
from vitrail.data.inputs import fitted, item_of
from vitrail.data.sources.source import Arrays
from vitrail.explanations.attention import attention_rows
from vitrail.explanations.request import Method
from vitrail.models.config import ResNet
from vitrail.models.variants import resnet_config
from vitrail.serving.files import FOLDER
from vitrail.training.samples import keep_samples

GRID, NAMES = (4, 4), ("heron", "<b>kite</b>", "crow", "wren", "owl", "swift")
REFUSED = "Failed to load resource"  # Chromium's console message for an HTTP error that the page explains
LIMIT = 0.25  # request limit in megabytes


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as result:
        yield result


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    birds = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, classes=6, registers=1)
    finer = birds.replace(patch_size=4, depth=2, heads=4, pool="mean", class_token="none", registers=0)
    return {
        "birds": some_bundle(birds, NAMES, folder / "birds"),
        "finer": some_bundle(finer, NAMES, folder / "finer"),
    }


@pytest.fixture(scope="module")
def address(bundles: dict[str, Path]) -> Iterator[str]:
    with service(bundles, body_limit=LIMIT) as result:
        yield result


@pytest.fixture(scope="module")
def opened(browser: Any, address: str) -> Iterator[Visit]:
    """Open the page once for all tests, which is the slowest step."""
    with visit(browser, DESKTOP) as result:
        result.open(address)
        yield result


@pytest.fixture
def seen(opened: Visit, address: str) -> Iterator[Visit]:
    """Reset the page; at the end, fail on console errors or requests to other hosts."""
    opened.go("#model=birds")
    yield opened
    complaints = [text for text in opened.complaints if not text.startswith(REFUSED)]
    external = [url for url in opened.requests if not url.startswith((address, "data:", "blob:", "about:"))]
    opened.complaints.clear()
    assert (complaints, external) == ([], [])


def upload(seen: Visit, content: bytes, name: str = "bird.png", kind: str = "image/png") -> None:
    seen.page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": content})
    seen.settle()


def predictions(seen: Visit, panel: int = 0) -> list[tuple[str, str]]:
    rows = seen.part("bars", panel).locator("button")
    return [
        (row.locator(".name").inner_text(), row.locator(".probability").inner_text())
        for row in (rows.nth(i) for i in range(5))
    ]


# ── image input ──


def test_an_uploaded_image_gets_the_predictions_of_the_classifier(seen: Visit, bundles: dict[str, Path]) -> None:
    upload(seen, image_file())
    expected = vitrail.Classifier(bundles["birds"], device="cpu").predict(image_file(), top=5)
    actual = predictions(seen)
    assert [name for name, _ in actual] == list(expected.names), "names are text, also those with brackets"
    for (_, share), probability in zip(actual, expected.probabilities, strict=True):
        assert abs(float(re.sub("[^0-9.]", "", share)) - 100 * probability) <= 0.5
    seen.until("image=own")
    assert seen.page.locator("#live").inner_text().startswith(f"birds predicts {expected.name}")


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_an_image_is_dropped_or_pasted(seen: Visit, way: str) -> None:
    before = seen.pixels()
    seen.page.evaluate(
        """([bytes, way]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "bird.png", { type: "image/png" }));
            const payload = way === "drop" ? { dataTransfer: data } : { clipboardData: data };
            const kind = way === "drop" ? DragEvent : ClipboardEvent;
            document.body.dispatchEvent(new kind(way, { bubbles: true, cancelable: true, ...payload }));
        }""",
        [list(image_file(seed=1)), way],
    )
    seen.until("image=own")
    seen.settle()
    assert seen.pixels() != before


def test_a_sample_is_chosen(seen: Visit) -> None:
    before = seen.pixels()
    seen.page.get_by_role("button", name="daisy").click()
    seen.until("image=daisy")
    seen.settle()
    assert seen.pixels() != before
    assert seen.page.get_by_role("button", name="daisy").get_attribute("aria-pressed") == "true"


# ── maps ──


def expected_rows(bundle: Path, content: bytes, layer: int) -> torch.Tensor:
    """Return the attention of a layer (heads, tokens, tokens) for an image, computed by the package."""
    opened = vitrail.load(bundle)
    crop = torch.from_numpy(fitted(item_of(content, 3), opened.preprocess).copy()).permute(2, 0, 1)[None]
    return attention_rows(opened.model.eval(), opened.preprocess.normalise(crop), layer)[0]


def test_a_pointer_move_shows_the_attention_of_the_patch(seen: Visit, bundles: dict[str, Path]) -> None:
    upload(seen, image_file())
    requested = seen.inference_requests()
    images = set()
    rows = expected_rows(bundles["birds"], image_file(), 2).mean(dim=0)
    for place in range(16):
        seen.over(place // 4, place % 4, GRID)
        images.add(seen.pixels())
        row = rows[2 + place]  # after the class token and the register
        best = int(row.argmax())
        output = seen.part("readout").inner_text()
        token = {0: "class token", 1: "register 0"}.get(best, f"patch {(best - 2) // 4},{(best - 2) % 4}")
        assert f"attends most to {'itself' if best == 2 + place else token}: " in output
        number = re.search(r": ([\d.]+)%\.", output)
        assert number is not None
        assert abs(float(number[1]) - 100 * float(row[best])) <= 0.6
    assert len(images) == 16, "each patch has a map of its own"
    assert seen.inference_requests() == requested, "a pointer move sends no request"
    assert "query" not in seen.hash()


def test_a_pointer_move_takes_less_than_50_milliseconds(seen: Visit) -> None:
    taken = seen.part("canvas").evaluate(
        """canvas => {
            const box = canvas.getBoundingClientRect(), taken = [];
            for (let i = 0; i < 64; i++) {
                const [x, y] = [(i * 7) % 16 % 4, Math.floor(((i * 7) % 16) / 4)];
                const at = { clientX: box.x + box.width * (x + .5) / 4, clientY: box.y + box.height * (y + .5) / 4 };
                const start = performance.now();
                canvas.dispatchEvent(new PointerEvent("pointermove", at));
                canvas.getContext("2d").getImageData(0, 0, 1, 1); // waits until it is really drawn
                taken.push(performance.now() - start);
            }
            return taken;
        }"""
    )
    assert median(taken) < 50, taken


def test_layers_and_heads_switch(seen: Visit) -> None:
    looks = {seen.pixels()}
    for layer in (1, 0):
        seen.part("layer").press("ArrowLeft")
        seen.settle()
        looks.add(seen.pixels())
        seen.until(f"layer={layer}")
        assert seen.part("layer-value").inner_text() == str(layer)
    requested = seen.inference_requests()
    for head in ("Head 0", "Head 1"):
        seen.page.get_by_role("radio", name=head).check(force=True)
        seen.settle()
        looks.add(seen.pixels())
    seen.until("head=1")
    assert len(looks) == 5
    seen.page.get_by_role("radio", name="Mean of all heads").check(force=True)
    seen.part("layer").press("ArrowRight")
    seen.settle()
    assert seen.pixels() in looks
    assert seen.inference_requests() == requested, "responses are cached"


def test_special_tokens_can_be_selected(seen: Visit) -> None:
    first = seen.pixels()
    assert seen.page.get_by_role("button", name="Class token").get_attribute("aria-pressed") == "true"
    seen.page.get_by_role("button", name="Register 0").click()
    seen.page.mouse.move(0, 0)
    seen.settle()
    assert seen.pixels() != first
    assert seen.part("readout").inner_text().startswith("Register 0 attends most to")
    seen.until("query=register:0")


@pytest.mark.parametrize("method", get_args(Method)[1:])
def test_each_method_overlays_its_map(seen: Visit, bundles: dict[str, Path], method: Method) -> None:
    upload(seen, image_file())
    seen.page.locator(f"#methods input[value={method}]").check(force=True)
    seen.settle()
    actual = vitrail.explain(bundles["birds"], image_file(), method=method, device="cpu")
    seen.page.locator("#opacity").fill("100")  # the map alone
    seen.settle()
    colours = seen.part("canvas").evaluate(
        """canvas => [...Array(16).keys()].map(i => [...canvas.getContext("2d").getImageData(
            (i % 4 + .5) * canvas.width / 4, (Math.floor(i / 4) + .5) * canvas.height / 4, 1, 1).data.slice(0, 3)])"""
    )
    alone = actual.overlay(opacity=1, side=4)  # one pixel per patch
    expected = torch.from_numpy(np.array(alone)).reshape(-1, 3).float()
    assert (torch.tensor(colours).float() - expected).abs().max() < 12
    if actual.target is not None:
        assert f"Evidence for {actual.target}" in seen.part("readout").inner_text()
    over = seen.pixels()
    seen.page.locator("#opacity").fill("0")
    seen.settle()
    assert seen.pixels() != over
    seen.until("opacity=0")


def test_clicking_a_class_explains_it(seen: Visit) -> None:
    row = seen.part("bars").locator("button").nth(2)
    name = row.locator(".name").inner_text()
    row.click()
    seen.page.mouse.move(0, 0)  # the page may move under the pointer, and a pointer over the map selects a patch
    seen.settle()
    assert seen.page.get_by_role("radio", name="Relevance").is_checked()
    assert f"Evidence for {name}," in seen.part("readout").inner_text()
    assert row.get_attribute("aria-pressed") == "true"


# ── links and comparison ──


def test_a_link_restores_the_view(seen: Visit, address: str) -> None:
    seen.open(f"{address}#image=goldfish&model=birds&layer=1&head=1&query=2,3&opacity=0.35")
    assert seen.part("readout").inner_text().startswith("Patch 2,3 attends most to")
    assert seen.page.get_by_role("radio", name="Head 1").is_checked()
    assert seen.page.locator("#opacity").input_value() == "35"
    before, link = seen.pixels(), seen.hash()
    seen.go("#model=birds")
    assert seen.pixels() != before
    seen.go(link)
    assert seen.pixels() == before
    seen.go("#image=own&model=no-such&layer=99&head=-1&query=77,1&method=magic&opacity=7&other=x")
    assert "cannot contain" in seen.page.locator("#notice").inner_text()
    assert seen.part("layer-value").inner_text() == "2"


def test_two_models_are_compared(seen: Visit) -> None:
    seen.page.get_by_label("Compare with").select_option("finer")
    seen.page.wait_for_selector(".panel >> nth=1")
    seen.settle()
    assert len(predictions(seen, 0)) == len(predictions(seen, 1)) == 5
    seen.until("other=finer")
    assert re.search("Both predict|birds predicts", seen.page.locator("#result").inner_text())
    first, second = seen.pixels(0), seen.pixels(1)
    seen.over(3, 0, GRID)
    assert seen.pixels(0) != first
    assert seen.pixels(1) != second, "the other model shows the same place"
    assert seen.part("readout", 1).inner_text().startswith("Patch 7,1 attends most to")
    seen.part("layer", 1).press("ArrowLeft")
    seen.settle()
    seen.until("otherLayer=0")
    seen.page.get_by_label("Compare with").select_option("")
    seen.settle()
    assert seen.page.locator(".panel").count() == 1


# ── errors ──


@pytest.mark.parametrize(
    ("content", "name", "kind", "says"),
    [
        (b"no image at all", "notes.txt", "text/plain", "“notes.txt” is not an image"),
        (b"no image either", "notes.png", "image/png", "is not an image"),
        (image_file()[:90], "half.png", "image/png", "image"),
        (b"\0" * int(LIMIT * 2**20 + 1), "large.png", "image/png", "0.25 MB"),
        (b"", "empty.png", "image/png", "“empty.png” is empty"),
        (b"who knows", "thing", "", "“thing” is not an image"),
    ],
    ids=["text", "text-as-png", "truncated", "large", "empty", "typeless"],
)
def test_invalid_images_show_an_error(seen: Visit, content: bytes, name: str, kind: str, says: str) -> None:
    before = seen.pixels()
    upload(seen, content, name, kind)
    problem = seen.page.locator("#problem")
    problem.wait_for(timeout=WAIT)
    assert says in problem.inner_text()
    assert problem.inner_text().count(". ") == 0, "one message"
    assert problem.get_attribute("role") == "alert"
    seen.until("image=balloon")
    assert seen.pixels() == before, "what was shown stays"
    seen.page.get_by_role("button", name="daisy").click()
    problem.wait_for(state="hidden", timeout=WAIT)
    seen.until("image=daisy")
    seen.settle()


def test_a_busy_server_is_retried(seen: Visit) -> None:
    refused: list[str] = []

    def refuse_once(route: Any) -> None:
        if refused:
            route.continue_()
            return
        refused.append(route.request.url)
        route.fulfill(status=503, headers={"Retry-After": "1"}, json={"error": "too many wait", "request_id": "1"})

    seen.page.route("**/v1/predict*", refuse_once)
    seen.page.get_by_role("button", name="boat").click()
    seen.page.locator("#live", has_text="busy").wait_for(state="attached", timeout=WAIT)
    seen.settle()
    seen.page.unroute("**/v1/predict*")
    seen.until("image=boat")
    assert len(refused) == 1
    assert seen.page.locator("#problem").is_hidden()
    assert seen.page.locator("#live").inner_text().startswith("birds predicts")


def test_the_token_is_requested_and_kept(browser: Any, bundles: dict[str, Path]) -> None:
    with service({"birds": bundles["birds"]}, token="open-sesame") as address, visit(browser, DESKTOP) as seen:
        seen.page.goto(address)
        for wrong in ("öffne dich 🗝", "open-barley"):  # the first is not valid in a header
            seen.page.locator("#token-value").fill(wrong)
            seen.page.keyboard.press("Enter")
            seen.page.get_by_text("did not accept").wait_for(timeout=WAIT)
            seen.page.wait_for_function(
                "document.getElementById('token').open && !document.getElementById('token-value').value"
            )
        seen.page.locator("#token-value").fill("open-sesame")
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_selector("body[data-ready]", timeout=WAIT)
        assert len(predictions(seen)) == 5
        seen.page.reload()
        seen.page.wait_for_selector("body[data-ready]", timeout=WAIT)
        assert not seen.page.locator("#token").is_visible()
        assert "sesame" not in seen.page.url


# ── accessibility ──


def test_every_module_is_preloaded_and_nothing_is_inline() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    announced = re.findall(r'rel="modulepreload" href="assets/([^"]+)"', page)
    assert sorted([*announced, "main.js"]) == sorted(path.name for path in FOLDER.glob("*.js"))
    assert re.findall(r"<style|<script(?! type=\"module\" src=)| style=| on\w+=|https?://", page) == []


def test_everything_works_with_the_keyboard(seen: Visit) -> None:
    page = seen.page

    def focused() -> str:
        actual: str = page.evaluate(
            """(e => e.dataset.part || e.id || e.dataset.query || e.title || e.value ||
            e.textContent)(document.activeElement)"""
        )
        return actual

    assert page.evaluate("document.querySelector('a, button, input, [tabindex]').id") == "skip"
    page.locator("#skip").focus()
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(focused())
        if order[-1] == "copy":
            break
    expected = [
        "file",
        "balloon",
        "attention",
        "opacity",
        "grid",
        "models",
        "canvas",
        "class",
        "layer",
        "mean",
        "compare",
    ]
    places = [order.index(name) for name in expected]
    assert places == sorted(places), order

    page.keyboard.press("Shift+Tab")
    assert focused() == "compare"
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    assert focused() == "canvas", "the link leads to the image"
    shown = seen.pixels()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    seen.settle()
    seen.until("query=2,1")
    assert seen.pixels() != shown
    assert page.locator("#live").inner_text().startswith("Patch 2,1 attends most to")
    page.keyboard.press("Escape")
    seen.settle()
    assert seen.pixels() == shown
    page.locator("#methods input").first.focus()
    page.keyboard.press("ArrowRight")
    seen.settle()
    seen.until("method=rollout")


NAMELESS = """[...document.querySelectorAll('button, input, select, canvas[tabindex]')].filter(
    e => !(e.ariaLabel || e.textContent.trim() || e.title || e.querySelector('img[alt]') ||
           [...(e.labels ?? [])].some(l => l.textContent.trim()))).map(e => e.outerHTML)"""


def test_it_fits_the_window_and_everything_has_a_name(seen: Visit) -> None:
    seen.go("#model=birds&other=finer")
    page = seen.page
    assert page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
    assert page.evaluate(NAMELESS) == []
    page.locator("#stages li").nth(7).wait_for(timeout=WAIT)
    try:
        for viewport in (PHONE, DESKTOP):
            page.set_viewport_size(viewport)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        for scheme, paper in (("dark", "rgb(21, 24, 28)"), ("light", "rgb(255, 255, 255)")):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    finally:
        page.set_viewport_size(DESKTOP)


# ── ResNets ──


@pytest.fixture(scope="module")
def with_resnet(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a tiny ResNet, and a model with attention to switch to."""
    config = resnet_config(ResNet(depths=(1, 1), width_factor=0.5)).replace(image_size=32, classes=6)
    return {
        "resnet": some_bundle(config, NAMES, tmp_path_factory.mktemp("resnet") / "resnet"),
        "birds": bundles["birds"],
    }


@pytest.mark.slow
def test_a_resnet_is_shown_without_layers_and_heads(browser: Any, with_resnet: dict[str, Path]) -> None:
    with service(with_resnet) as address, visit(browser, DESKTOP) as seen:
        seen.open(f"{address}#model=resnet&layer=2&head=1")
        upload(seen, image_file())
        expected = vitrail.Classifier(with_resnet["resnet"], device="cpu").predict(image_file(), top=5)
        assert [name for name, _ in predictions(seen)] == list(expected.names)
        looks = {seen.pixels()}
        assert seen.page.get_by_role("radio", name="Grad-CAM").is_checked()
        assert f"Evidence for {expected.name}" in seen.part("readout").inner_text()
        seen.page.get_by_role("radio", name="PCA").check(force=True)
        seen.settle()
        looks.add(seen.pixels())
        assert "in the last feature map" in seen.part("readout").inner_text()
        for part in ("layers", "heads", "tokens"):
            assert seen.part(part).is_hidden()
        seen.page.locator("#opacity").fill("0")
        looks.add(seen.pixels())
        assert len(looks) == 3, "both maps are drawn over the image"
        seen.part("bars").locator("button").nth(1).click()
        seen.settle()
        assert seen.page.get_by_role("radio", name="Grad-CAM").is_checked(), "relevance needs attention"
        explained = [url for url in seen.requests if "/v1/explain" in url]
        assert len(explained) >= 3
        assert not any("layer=" in url for url in explained)

        stages = seen.page.locator("#stages h3").all_inner_texts()
        assert [stage for stage in stages if "ResNet stage" in stage] != []
        shown = seen.page.locator("body").inner_text()
        assert "See what a ResNet sees" in shown
        assert re.findall("attend|Transformer|heads|as a sequence|Layer", shown) == []

        seen.part("models").select_option("birds")
        seen.until("model=birds")
        seen.settle()
        assert "See what a Vision Transformer sees" in seen.page.locator("header").inner_text()
        assert seen.part("layers").is_visible()
        assert seen.page.get_by_role("radio", name="Attention").is_enabled()
        seen.page.get_by_label("Compare with").select_option("resnet")
        seen.page.wait_for_selector(".panel >> nth=1")
        seen.settle()
        assert seen.page.get_by_role("radio", name="Grad-CAM").is_checked(), "a method of both models"
        assert [len(predictions(seen, panel)) for panel in (0, 1)] == [5, 5]
        assert [seen.part("layers", panel).is_hidden() for panel in (0, 1)] == [False, True]
        assert (seen.complaints, seen.page.locator("#problem").is_hidden()) == ([], True)


# ── training samples ──


@pytest.fixture(scope="module")
def own(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle in a run folder with training samples."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(bundles["birds"], folder / "best")
    pixels = np.random.default_rng(3).integers(0, 256, (12, 6, 6, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    keep_samples(folder, Arrays(pixels, np.arange(12) % 6, NAMES))
    return folder / "best"


def test_it_starts_with_the_training_samples(browser: Any, own: Path, bundles: dict[str, Path]) -> None:
    """With a token, which the samples require too."""
    with service({"own": own, "birds": bundles["birds"]}, token="sesame") as address, visit(browser, DESKTOP) as seen:
        assert httpx.get(f"{address}v1/samples/image?number=0").status_code == 401
        assert httpx.get(f"{address}v1/samples").status_code == 401
        seen.page.goto(address)
        seen.page.locator("#token-value").fill("sesame")
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_selector("body[data-ready]", timeout=WAIT)
        seen.settle()
        buttons = seen.page.locator("#samples .sample")
        assert buttons.locator("span").all_inner_texts() == list(NAMES)
        assert buttons.first.get_attribute("aria-pressed") == "true"
        seen.page.wait_for_function("[...document.querySelectorAll('#samples img')].every(i => i.naturalWidth > 0)")
        seen.until("image=own%2F0")
        before = seen.pixels()
        buttons.nth(3).click()
        seen.until("image=own%2F3")
        seen.settle()
        assert seen.pixels() != before
        seen.part("models").select_option("birds")
        seen.until("model=birds")
        seen.settle()
        assert buttons.locator("span").count() == 0, "a model without training samples offers the built-in ones"
        assert [text for text in seen.complaints if not text.startswith(REFUSED)] == []


def test_training_samples_are_served(own: Path) -> None:
    with service({"own": own}) as address:
        listed = httpx.get(f"{address}v1/samples").json()
        assert [one["name"] for one in listed["samples"]] == list(NAMES)
        image = httpx.get(f"{address}v1/samples/image?number=5")
        assert (image.status_code, image.headers["content-type"]) == (200, "image/jpeg")
        for number in ("6", "-1", "", "../0", "9" * 20):
            refused = httpx.get(f"{address}v1/samples/image", params={"number": number})
            assert (refused.status_code, "error" in refused.json()) == (404, True)
        assert httpx.get(f"{address}v1/samples?model=nobody").status_code == 422


VISIBLE_IMAGE = """([row, column]) => {
  const canvas = document.querySelector("[data-part=canvas]");
  const image = document.querySelector("[data-part=plain]");
  const plain = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  plain.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const side = canvas.width / 4;
  const mean = (of) => {
    const { data } = of.getContext("2d").getImageData(column * side + 8, row * side + 8, side - 16, side - 16);
    return [0, 1, 2].map((part) => data.filter((_, i) => i % 4 === part).reduce((a, b) => a + b) / (data.length / 4));
  };
  const [shown, whole] = [mean(canvas), mean(plain)];
  return shown.map((value, part) => Math.abs(value - whole[part]));
}"""


def test_the_image_is_visible_under_the_map_and_shown_separately(seen: Visit) -> None:
    """Where the map is lowest, it changes the image by less than a fifth of the brightness range."""
    upload(seen, image_file())
    assert seen.part("plain").is_visible()
    assert "The preprocessed image: 32×32 pixels" in seen.part("plain-note").inner_text()
    apart = [
        max(seen.page.evaluate(VISIBLE_IMAGE, [row, column])) for row in range(GRID[0]) for column in range(GRID[1])
    ]
    assert min(apart) < 0.2 * 255
    assert sum(apart) / len(apart) < 0.35 * 255
    assert max(apart) > 0.1 * 255, "the map itself is seen"


def test_the_stages_of_a_convolutional_stem(seen: Visit) -> None:
    names = seen.page.locator("#stages h3").all_inner_texts()
    shapes = seen.page.locator("#stages .shape").all_inner_texts()
    result = {re.sub(r"^\d+\s*", "", name): shape for name, shape in zip(names, shapes, strict=True)}
    assert "patches" not in result, "a convolution never makes them"
    assert result["feature map"] == "1 × 32 × 4 × 4"
    assert result["patch embeddings"] == "1 × 16 × 32"
