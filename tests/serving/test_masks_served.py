"""A segmentation model over HTTP and on the explorer page."""

import base64
import io
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.support.browser import chromium
from tests.support.page_visit import DESKTOP, PHONE, service, visit
from tests.support.segmentation_models import COLOURS, SIDE, colour_bundle, colour_image
from tests.support.service_in_process import PNG, settings_for, with_client

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.mask_images import palette
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.serving.app import MASKS_AT_ONCE, Service
from vitrail.serving.operations import MaskResult
from vitrail.tasks.segmentation import MaskPrediction


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_bundle().save(tmp_path_factory.mktemp("colours") / "best")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "own.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed as 96×60
    Image.fromarray(colour_image(60, 96, seed=3)[0]).save(path, exif=exif)
    return path


def decoded(mask: str) -> np.ndarray:
    opened = Image.open(io.BytesIO(base64.b64decode(mask, validate=True)))
    assert opened.mode == "P"
    return np.asarray(opened)


def test_masks_are_served(bundle: Path, image: Path) -> None:
    (expected,) = vitrail.predict(bundle, [image], device="cpu", top=2, precision="float32")
    assert isinstance(expected, MaskPrediction)

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        model = (await client.get("/v1/models")).json()["models"][0]
        assert (model["task"], model["classes"]) == ("segmentation", list(COLOURS))
        response = await client.post("/v1/predict?top=2", content=image.read_bytes(), headers=PNG)
        (result,) = response.json()["results"]
        mask = decoded(result.pop("mask"))
        assert mask.shape == (96, 60)
        assert np.array_equal(mask, expected.mask(96, 60))
        assert result == expected.response()
        assert len(result["classes"]) == 2
        # Images of one request may have different sizes.
        small = io.BytesIO()
        Image.fromarray(colour_image(7, 5)[0]).save(small, "PNG")
        sent = [base64.b64encode(content).decode() for content in (image.read_bytes(), small.getvalue(), b"no image")]
        first, second, bad = (await client.post("/v1/predict", json={"images": sent})).json()["results"]
        assert np.array_equal(decoded(first["mask"]), mask)
        assert decoded(second["mask"]).shape == (7, 5)
        assert set(bad) == {"error"}
        explained = await client.post("/v1/explain?method=relevance&query=3,4", content=image.read_bytes(), headers=PNG)
        assert explained.status_code == 200, explained.text
        assert explained.json()["results"][0]["target"]["name"] in COLOURS
        embedded = await client.post("/v1/embed", content=image.read_bytes(), headers=PNG)
        assert (embedded.status_code, "does not pool its tokens" in embedded.text) == (422, True)
        entries = (await client.get("/openapi.json")).json()["components"]["schemas"]["Predictions"]
        kinds = entries["properties"]["results"]["items"]["anyOf"]
        (masks,) = [kind for kind in kinds if "mask" in kind["properties"]]
        assert masks["properties"]["mask"]["contentMediaType"] == "image/png"
        assert set(masks["required"]) == {"classes", "mask"}

    with_client(settings_for(bundle), ask)


def test_few_masks_are_made_at_a_time(bundle: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, whole = 0, 0, MaskResult.finished

    def noted(result: MaskResult, size: tuple[int, int]) -> dict[str, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return whole(result, size)

    lock = threading.Lock()
    monkeypatch.setattr(MaskResult, "finished", noted)

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        sent = [base64.b64encode(image.read_bytes()).decode()] * 8
        results = (await client.post("/v1/predict", json={"images": sent})).json()["results"]
        assert [decoded(result["mask"]).shape for result in results] == [(96, 60)] * 8

    with_client(settings_for(bundle), ask)
    assert most == MASKS_AT_ONCE


def test_models_without_masks_that_fit_are_refused(tmp_path: Path, image: Path) -> None:
    crops = colour_bundle(preprocess=Preprocess(size=SIDE, resize="cover")).save(tmp_path / "crops")
    many = colour_bundle(None, classes=300).save(tmp_path / "many")
    plain = colour_bundle()
    patches = Bundle(plain.model, plain.preprocess, COLOURS).save(tmp_path / "patches")
    config = ViTConfig(image_size=32, patch_size=8, width=32, depth=1, heads=2, classes=3)
    pooled = Bundle(ViT(config), Preprocess(size=32), COLOURS, task="segmentation").save(tmp_path / "pooled")
    cases = {
        crops: "this model crops or pads images, so its masks would not fit them",
        many: "at most 255 classes, but the model has 300",
        patches: "this model outputs logits per patch, not per image; use /v1/explain",
        pooled: "the task segmentation needs logits per patch, but the model has pool = 'cls'",
    }
    for folder, message in cases.items():

        async def ask(_: Service, client: httpx.AsyncClient, message: str = message) -> None:
            response = await client.post("/v1/predict", content=image.read_bytes(), headers=PNG)
            assert response.status_code == 422
            assert message in response.json()["error"]

        with_client(settings_for(folder), ask)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_page_shows_the_mask_with_a_legend(bundle: Path, image: Path, scheme: str) -> None:
    (expected,) = vitrail.predict(bundle, [image], device="cpu", precision="float32")
    assert isinstance(expected, MaskPrediction)
    with chromium() as browser, service({"colours": bundle}) as address:
        for viewport in (DESKTOP, PHONE):
            with visit(browser, viewport, scheme) as seen:
                seen.open(address)
                seen.page.set_input_files("#file", str(image))
                seen.settle()
                seen.page.wait_for_function(
                    "() => document.querySelector('[data-part=mask]').getAttribute('aria-label') !== null"
                )
                names = seen.part("bars").locator(".name").all_inner_texts()
                assert [name.strip() for name in names] == list(expected.classes)
                swatches = seen.part("bars").locator(".swatch")
                shown = [swatches.nth(i).evaluate("one => one.style.backgroundColor") for i in range(len(names))]
                wanted = palette(3)[list(expected.indices)].tolist()
                assert shown == [f"rgb({red}, {green}, {blue})" for red, green, blue in wanted]
                assert "Fractions of the image" in seen.part("predictions-note").inner_text()
                canvas = seen.part("mask")
                size = canvas.evaluate("one => [one.height, one.width]")
                assert size[0] / size[1] == pytest.approx(96 / 60, abs=0.01)
                mask = expected.mask(96, 60)
                pixels = np.rot90(colour_image(60, 96, seed=3)[0], -1)
                for row, column in ((5, 5), (50, 30), (90, 55)):
                    drawn = canvas.evaluate(
                        """(one, [x, y]) => [...one.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3)""",
                        [size[1] * (column + 0.5) / 60, size[0] * (row + 0.5) / 96],
                    )
                    mixed = 0.4 * pixels[row, column] + 0.6 * palette(3)[mask[row, column]]
                    assert np.abs(np.array(drawn) - mixed).max() < 12, (row, column)
                seen.page.locator("#opacity").fill("0")
                plain = canvas.evaluate("one => [...one.getContext('2d').getImageData(20, 20, 1, 1).data].slice(0, 3)")
                assert max(plain) == 220
                width = seen.page.evaluate("document.documentElement.scrollWidth")
                assert width <= viewport["width"]
                assert [text for text in seen.complaints if "willReadFrequently" not in text] == []  # read here
