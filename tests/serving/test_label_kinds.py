"""Models that predict several labels or numbers, served over HTTP and on the explorer page."""

from pathlib import Path

import httpx
import pytest
import torch
from tests.support.browser import chromium
from tests.support.page_visit import DESKTOP, PHONE, service, visit
from tests.support.service_in_process import PNG, settings_for, with_client

import vitrail
from vitrail import Bundle, Preprocess, ViTConfig
from vitrail.serving.app import Service

CONFIG = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, classes=3, pool="mean")


def bundle(task: str, names: tuple[str, ...], constants: dict[str, list[float]], folder: Path) -> Path:
    torch.manual_seed(3)
    model = vitrail.create(CONFIG)
    with torch.no_grad():
        model.head.weight.normal_(std=0.5)
    made = Bundle(model, Preprocess(size=(32, 32)), names, task=task, task_constants=constants)
    return made.save(folder)


@pytest.fixture(scope="module")
def multilabel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("cat", "dog", "outdoor")
    return bundle("multilabel", names, {"thresholds": [0.01, 0.99, 0.01]}, tmp_path_factory.mktemp("labels") / "best")


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    constants = {"mean": [40.0, 170.0, 0.0], "std": [20.0, 10.0, 1.0], "median": [38.0, 171.0, 0.0]}
    return bundle("regression", ("age", "height", "tilt"), constants, tmp_path_factory.mktemp("numbers") / "best")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    path = tmp_path_factory.mktemp("image") / "own.png"
    Image.linear_gradient("L").resize((40, 40)).convert("RGB").save(path)
    return path


def test_labels_are_served(multilabel: Path, image: Path) -> None:
    (expected,) = vitrail.predict(multilabel, [image], device="cpu", top=2, precision="float32")

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        model = (await client.get("/v1/models")).json()["models"][0]
        assert (model["task"], model["classes"]) == ("multilabel", ["cat", "dog", "outdoor"])
        response = await client.post("/v1/predict?top=2", content=image.read_bytes(), headers=PNG)
        (result,) = response.json()["results"]
        assert set(result["labels"]) == {"cat", "outdoor"}
        assert result == expected.response()
        explained = await client.post("/v1/explain?target=dog", content=image.read_bytes(), headers=PNG)
        assert explained.json()["results"][0]["target"]["name"] == "dog"
        spec = (await client.get("/openapi.json")).json()["components"]["schemas"]["Predictions"]
        assert "top_labels" in str(spec)

    with_client(settings_for(multilabel), ask)


def test_numbers_are_served(regression: Path, image: Path) -> None:
    (expected,) = vitrail.predict(regression, [image], device="cpu", precision="float32")

    async def ask(_: Service, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/predict", content=image.read_bytes(), headers=PNG)
        (result,) = response.json()["results"]
        assert [row["name"] for row in result["values"]] == ["age", "height", "tilt"]
        assert result == expected.response()
        explained = await client.post("/v1/explain?target=age", content=image.read_bytes(), headers=PNG)
        target = explained.json()["results"][0]["target"]
        assert target["value"] == pytest.approx(result["values"][0]["value"], rel=1e-4)

    with_client(settings_for(regression), ask)


@pytest.mark.slow
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_explorer_page_shows_labels_and_numbers(
    multilabel: Path, regression: Path, image: Path, size: dict[str, int]
) -> None:
    models = {"labels": multilabel, "numbers": regression}
    with chromium() as browser, service(models) as address, visit(browser, size) as seen:
        seen.open(f"{address}#model=labels&method=relevance")
        seen.page.set_input_files("#file", image)
        seen.until("image=own")
        seen.settle()
        names = seen.part("bars").locator(".name").all_inner_texts()
        assert sorted(names) == ["dog", "✓ cat", "✓ outdoor"]
        assert seen.part("predictions-note").inner_text() == "✓: predicted"
        seen.part("models").select_option("numbers")
        seen.until("model=numbers")
        seen.settle()
        assert seen.part("bars").locator(".name").all_inner_texts() == ["age", "height", "tilt"]
        (made,) = vitrail.predict(regression, [image], device="cpu", precision="float32")
        shown = [float(text) for text in seen.part("bars").locator(".probability").all_inner_texts()]
        assert shown == pytest.approx(list(made.fields().values()), rel=1e-3)
        seen.part("bars").locator("button").nth(1).click()
        seen.settle()
        assert seen.part("readout").inner_text().startswith("Evidence for height: ")
        assert seen.complaints == []
