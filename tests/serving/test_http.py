"""The HTTP API: three kinds of request body, three operations, and all kinds of bad requests."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.support.live_server import Running, image, save_tiny, sent, server, wait_until

import vitrail
from vitrail.explanations.request import Method


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    save_tiny(folder / "run" / "best")
    save_tiny(folder / "other", seed=1, classes=None)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    words = [str(folder / "run" / "best"), f"second={folder / 'other'}", "--body-limit", "0.5", "--pixel-limit", "1"]
    with server(*words, environment={"VITRAIL_SERVE_IMAGES_LIMIT": "4", "VITRAIL_SERVE_WAIT": "50"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


def as_json(*images: bytes, **options: object) -> dict[str, object]:
    return {"images": [base64.b64encode(one).decode() for one in images], **options}


def unpacked(packed: dict[str, Any]) -> NDArray[np.float32]:
    dtype = np.dtype(packed["dtype"]).newbyteorder("<")
    return np.frombuffer(base64.b64decode(packed["data"]), dtype).reshape(packed["shape"]).astype(np.float32)


# ── inference ──


def test_three_kinds_of_body_give_the_predictions_of_the_library(client: httpx.Client, folder: Path) -> None:
    content = image()
    expected = vitrail.Classifier(folder / "run" / "best", device="cpu").predict(content, top=2)
    responses = [
        sent(client, content, "/v1/predict?top=2"),
        client.post("/v1/predict?top=2", files={"image": content}),
        client.post("/v1/predict", json=as_json(content, top=2)),
    ]
    for response in responses:
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "run"
        (result,) = response.json()["results"]
        assert [row["name"] for row in result["classes"]] == list(expected.names)
        assert [row["probability"] for row in result["classes"]] == pytest.approx(expected.probabilities, rel=1e-4)
        assert [("cat", "dog", "bird")[row["index"]] for row in result["classes"]] == list(expected.names)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_every_allowed_format(client: httpx.Client, kind: str) -> None:
    assert sent(client, image(kind)).status_code == 200


def test_a_batch_has_a_result_for_each_image_in_order(client: httpx.Client) -> None:
    first, second = image(seed=1), image(seed=2)
    alone = [sent(client, content).json()["results"][0] for content in (first, second)]
    files = [("image", first), ("image", b"no image"), ("image", second)]
    form = client.post("/v1/predict", files=files)
    coded = client.post("/v1/predict", json=as_json(first, b"no image", second))
    for response in (form, coded):
        assert response.status_code == 200
        results = response.json()["results"]
        assert "this is not an image" in results[1]["error"]
        for actual, expected in zip((results[0], results[2]), alone, strict=True):
            assert [row["index"] for row in actual["classes"]] == [row["index"] for row in expected["classes"]]


def test_models_by_name(client: httpx.Client) -> None:
    named = client.post("/v1/predict?model=second", files={"image": image()}).json()
    assert named["model"] == "second"
    assert {row["name"] for row in named["results"][0]["classes"]} == {"0", "1", "2"}
    models = client.get("/v1/models").json()["models"]
    assert [(model["name"], model["default"]) for model in models] == [("run", True), ("second", False)]
    first = models[0]
    assert first["classes"] == ["cat", "dog", "bird"]
    assert models[1]["classes"] is None
    assert models[1]["class_count"] == 3
    assert (first["grid"], first["depth"], first["heads"], first["width"]) == ([4, 4], 2, 2, 32)
    assert first["tokens"] == [{"index": 0, "kind": "class"}, {"index": 1, "kind": "register", "number": 0}]
    assert first["patch_start"] == 2
    assert first["stages"][0]["shape"] == [1, 3, 32, 32]
    assert first["stages"][-1]["shape"] == [1, 3]
    assert all(first["methods"].values())
    assert len(first["digest"]) == 12
    assert first["digest"] != models[1]["digest"]


def test_embeddings_are_those_of_the_model(client: httpx.Client, folder: Path) -> None:
    content = image()
    bundle = vitrail.load(folder / "run" / "best")
    pixels = bundle.preprocess(Image.open(io.BytesIO(content)))[None]
    for query, layer, scaled in (("", None, False), ("?layer=0&normalise=true", 0, True)):
        actual = client.post(f"/v1/embed{query}", files={"image": content}).json()["results"][0]["embedding"]
        expected = bundle.model.features(pixels, layer=layer).pooled[0].detach().numpy()
        expected = expected / np.linalg.norm(expected) if scaled else expected
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["attention", "rollout", "relevance", "gradcam", "pca"])
def test_explanations_are_those_of_the_library(client: httpx.Client, folder: Path, method: Method) -> None:
    content = image()
    response = client.post(f"/v1/explain?method={method}", files={"image": content})
    assert response.status_code == 200, response.text
    assert response.json()["method"] == method
    (result,) = response.json()["results"]
    expected = vitrail.explain(folder / "run" / "best", content, method=method, device="cpu")
    np.testing.assert_allclose(unpacked(result["map"]), expected.map, rtol=1e-3, atol=1e-5)
    seen = Image.open(io.BytesIO(base64.b64decode(result["image"].removeprefix("data:image/png;base64,"))))
    assert np.array_equal(np.asarray(seen), np.asarray(expected.image))
    if expected.target is None:
        assert result["target"] is None
    else:
        assert result["target"]["name"] == expected.target
        assert result["target"]["probability"] == pytest.approx(expected.probability, rel=1e-4)


def test_all_attention_of_a_layer_at_once(client: httpx.Client, folder: Path) -> None:
    content = image()
    (result,) = client.post("/v1/explain", json=as_json(content, method="attention", layer=0, query="all")).json()[
        "results"
    ]
    weights = unpacked(result["attention"])
    assert weights.shape == (2, 18, 18)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=5e-3)
    one = vitrail.explain(
        folder / "run" / "best", content, method="attention", layer=0, head=1, query="1,2", device="cpu"
    )
    np.testing.assert_allclose(weights[1, 2 + 6, 2:].reshape(4, 4), one.map, atol=1e-3)
    named = client.post("/v1/explain?method=relevance&target=dog", files={"image": content}).json()
    assert named["results"][0]["target"]["index"] == 1


# ── errors ──


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """Return a few bytes that claim to be a gigapixel image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PNG = {"content-type": "image/png"}
JSON = {"content-type": "application/json"}
BAD = [
    ("an empty body", "/v1/predict", b"", PNG, 400, "no body"),
    ("an empty file", "/v1/predict", json.dumps({"images": [""]}).encode(), JSON, 400, "empty"),
    ("text as an image", "/v1/predict", b"hello", PNG, 415, "this is not an image"),
    ("a format that is not allowed", "/v1/predict", b"II*\0" + bytes(50), PNG, 415, "tiff images are not accepted"),
    ("an array", "/v1/predict", b"\x93NUMPY\1\0" + bytes(50), PNG, 415, "this is not an image"),
    ("an unsupported type", "/v1/predict", b"<a/>", {"content-type": "text/xml"}, 415, "text/xml"),
    ("no type", "/v1/predict", b"x", {}, 415, "Content-Type"),
    ("a cut image", "/v1/predict", image()[:-900], PNG, 422, "corrupt PNG"),
    ("a cut JPEG", "/v1/predict", image("JPEG")[:200], PNG, 422, "corrupt JPEG"),
    ("a header alone", "/v1/predict", image()[:20], PNG, 422, "corrupt PNG"),
    ("too many bytes", "/v1/predict", bytes(600_000), PNG, 413, "limit of 0.5 MB"),
    ("too many pixels", "/v1/predict", bomb(), PNG, 413, "at most 1,000,000 are accepted"),
    ("more pixels than allowed", "/v1/predict", bomb(2_000, 1_000), PNG, 413, "2,000×1,000 pixels"),
    ("too many images", "/v1/predict", json.dumps(as_json(*[b"x"] * 5)).encode(), JSON, 413, "at most 4"),
    ("no JSON", "/v1/predict", b"{", JSON, 400, "not JSON"),
    ("deep JSON", "/v1/predict", b"[" * 100_000, JSON, 400, "not JSON"),
    ("a JSON list", "/v1/predict", b"[]", JSON, 400, "should be an object"),
    ("no images", "/v1/predict", b'{"images": []}', JSON, 400, "non-empty list"),
    ("no base64", "/v1/predict", b'{"images": ["*"]}', JSON, 400, "image 0 is not valid base64"),
    ("an address as base64", "/v1/predict", b'{"images": ["data:,x"]}', JSON, 400, "'data:' prefix"),
    ("no boundary", "/v1/predict", b"x", {"content-type": "multipart/form-data"}, 400, "boundary"),
    ("an unknown option", "/v1/predict?tops=3", image(), PNG, 422, "did you mean 'top'?"),
    (
        "a wrong option",
        "/v1/predict?top=abc",
        image(),
        PNG,
        422,
        "top is 'abc': it should be an integer from 1 to",
    ),
    (
        "a number out of range",
        "/v1/predict?top=0",
        image(),
        PNG,
        422,
        "top is '0': it should be an integer from 1",
    ),
    (
        "a very long option",
        f"/v1/predict?top={'9' * 900}",
        image(),
        PNG,
        422,
        "…: it should be an integer from 1",
    ),
    (
        "a layer that is no number",
        "/v1/embed?layer=x",
        image(),
        PNG,
        422,
        "layer is 'x': it should be an integer",
    ),
    ("neither true nor false", "/v1/embed?normalise=maybe", image(), PNG, 422, "'maybe': it should be true or false"),
    (
        "a list as text",
        "/v1/explain",
        b'{"images": ["AA=="], "query": [1]}',
        JSON,
        422,
        "it should be text of at most 200",
    ),
    ("an unknown model", "/v1/predict?model=runn", image(), PNG, 422, "did you mean 'run'?"),
    ("a path as a model", "/v1/predict?model=../../etc/passwd", image(), PNG, 422, "no model is called"),
    ("a layer out of range", "/v1/embed?layer=9", image(), PNG, 422, "layer 9 does not exist"),
    ("another layer out of range", "/v1/explain?method=attention&layer=-3", image(), PNG, 422, "layer -3"),
    ("a head out of range", "/v1/explain?method=attention&head=2", image(), PNG, 422, "head 2 does not exist"),
    ("an unknown method", "/v1/explain?method=guess", image(), PNG, 422, "method is 'guess'"),
    ("an unknown class", "/v1/explain?target=cow", image(), PNG, 422, "no class 'cow'"),
    (
        "an unknown token",
        "/v1/explain?method=attention&query=9,9",
        image(),
        PNG,
        422,
        "row 9, column 9 is outside the patch grid",
    ),
    (
        "text that is no text",
        "/v1/predict",
        b'{"images": ["AA=="], "model": "\\ud800"}',
        JSON,
        422,
        "it should be text",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_bad_requests_get_a_status_and_a_message(
    client: httpx.Client, path: str, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    response = client.post(path, content=body, headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    assert words in response.json()["error"]
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    assert "input should" not in response.text  # pydantic's wording


def test_bad_forms(client: httpx.Client) -> None:
    for form, words in (
        ({"files": {"photo": image()}}, "no 'image' field"),
        ({"files": {"image": (None, "text")}}, "is text"),
        ({"files": [("image", b"x")] * 6}, "more than 4 images"),
        ({"files": {"image": image(), "top": image()}}, "a file in the field 'top'"),
    ):
        response = client.post("/v1/predict", **form)
        assert response.status_code in (400, 413)
        assert words in response.json()["error"]
    torn = b"--b\r\nContent-Disposition: form-data; name=image; filename=x\r\n\r\n" + image()
    response = client.post("/v1/predict", content=torn, headers={"content-type": "multipart/form-data; boundary=b"})
    assert response.status_code == 400, response.text


def test_form_options_are_used(client: httpx.Client) -> None:
    files = {"image": image()}
    response = client.post("/v1/predict", params={"top": 3}, data={"model": "second", "top": "1"}, files=files).json()
    assert response["model"] == "second"
    assert len(response["results"][0]["classes"]) == 1
    response = client.post("/v1/predict", data={"tops": "1"}, files=files)
    assert (response.status_code, "did you mean 'top'?" in response.text) == (422, True)


def test_a_body_without_a_length_is_limited_while_reading(client: httpx.Client) -> None:
    response = client.post("/v1/predict", content=(bytes(10_000) for _ in range(200)), headers=PNG)
    assert response.status_code == 413
    whole = image()
    response = client.post("/v1/predict", content=iter([whole[:100], whole[100:]]), headers=PNG)
    assert response.status_code == 200


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/v1/predict").status_code in (404, 405)
    assert client.get("/nothing").status_code == 404
    assert client.put("/v1/models").status_code == 405
    for path in ("/assets/../settings.py", "/assets/%2e%2e/settings.py", "/samples/..%2f..%2fapp.py", "/assets/%00"):
        response = client.get(path)
        assert response.status_code == 404, path
        assert response.json()["error"] == "not found"


# ── service ──


def test_security_headers(client: httpx.Client) -> None:
    response = client.get("/", headers={"x-request-id": "mine-1", "origin": "https://example.org"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-request-id"] == "mine-1"
    assert "access-control-allow-origin" not in response.headers
    assert client.get("/", headers={"if-none-match": response.headers["etag"]}).status_code == 304
    assert client.get("/healthz", headers={"x-request-id": "a b\tc"}).headers["x-request-id"] != "a b\tc"


def test_samples_are_served(client: httpx.Client) -> None:
    for sample in client.get("/samples").json()["samples"]:
        address = httpx.URL("https://proxy/models/samples").join(sample["url"]).path
        assert address.startswith("/models/samples/")  # also under a path prefix
        result = client.get(address.removeprefix("/models"))
        assert result.headers["content-type"].startswith("image/")
        assert sent(client, result.content).status_code == 200


def test_requests_that_arrive_together_run_as_one_batch(client: httpx.Client) -> None:
    def counted() -> tuple[float, float]:
        text = client.get("/metrics").text
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vitrail_batch_size_"))
        return float(rows['vitrail_batch_size_count{model="run"}']), float(rows['vitrail_batch_size_sum{model="run"}'])

    sent(client, image())
    before = counted()
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda _: sent(client, image()), range(32)))
    assert [response.status_code for response in responses] == [200] * 32
    after = counted()
    assert after[1] - before[1] == 32
    assert after[0] - before[0] <= 16


def test_the_log_is_json_lines_without_secrets(client: httpx.Client, running: Running) -> None:
    client.get("/healthz?secret=1", headers={"x-request-id": "log-1"})
    wait_until(lambda: any('"log-1"' in line for line in running.log))
    lines = [json.loads(line) for line in list(running.log)]
    assert lines[0]["event"] == "settings"
    assert lines[0]["settings"]["images_limit"] == 4
    assert lines[0]["settings"]["token"] == "none"
    result = [line for line in lines if line.get("request_id") == "log-1"]
    assert [(line["path"], line["status"]) for line in result] == [("/healthz", 200)]
    assert not any("secret" in line for line in running.log)
