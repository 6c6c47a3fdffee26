"""Reports: they match the run's files, survive missing files, are self-contained and escape every name."""

import base64
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.html_page import Page
from tests.support.tiny_runs import CLASSES, EVIL, TINY, tiny_run

import vitrail
from vitrail.__main__ import main
from vitrail.data.sources.source import Arrays
from vitrail.errors import ConfigError
from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.page import points, span
from vitrail.reports.report import report, report_of_finished
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.run_record import read_run
from vitrail.tasks.classification_metrics import classification_metrics
from vitrail.tasks.task import Predictions
from vitrail.text import as_percent
from vitrail.training.train import train

MARKUP = "<i>\"'><b evil=\"\" evil='' "


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(report(run, out=tmp_path_factory.mktemp("page") / "report.html"))


def test_the_page_is_self_contained(page: Page) -> None:
    assert len(page.html) < 8_000_000
    for tag in ("link", "iframe", "object", "embed", "base", "form"):
        assert page.all(tag) == []
    assert all((image["src"] or "").startswith("data:image/") for image in page.all("img"))
    assert all((link["href"] or "").startswith("#") for link in page.all("a"))
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_the_content_security_policy(page: Page) -> None:
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        result = re.findall(rf"<{tag}>(.*?)</{tag}>", page.html, re.DOTALL)
        assert len(result) == 1
        digest = base64.b64encode(hashlib.sha256(result[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # The policy would block these and log to the console.
    assert not [attributes for _, attributes in page.elements if "style" in attributes]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_baselines_and_warnings_are_at_the_top(page: Page, run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["warnings"], "the classes of this run are hard to tell apart"
    for text in result["warnings"]:
        assert text[1:] in page.sections[""]
    assert f"gives {as_percent(result['baselines']['majority'])}, chance 33.3%." in page.sections[""]
    assert "Chance 33.3%" in page.sections["result"]
    log = (run / "log.txt").read_text()
    assert f"WARNING: {result['warnings'][0]}\n" in log
    assert f"always {result['baselines']['majority_class']!r} gives " in log.splitlines()[-1]


def test_names_are_escaped(page: Page) -> None:
    assert len(page.all("script")) == 1
    assert page.all("i") == [], "the run's name is no markup"
    for name in CLASSES:
        assert name in page.sections["classes"]
    assert "a <i>run & more" in page.sections[""]


def marked(content: object) -> object:
    """Put markup into every string of a JSON file, including class-name keys."""
    match content:
        case str():
            return f"{content}{MARKUP}"
        case list():
            return [marked(one) for one in content]
        case dict():
            names = ("counts", "formats", "modes")
            return {
                key: _marked_names(value) if key in names and isinstance(value, dict) else marked(value)
                for key, value in content.items()
            }
    return content


def _marked_names(table: dict[str, object]) -> dict[str, object]:
    return {
        f"{name}{MARKUP}": _marked_names(value) if isinstance(value, dict) else value for name, value in table.items()
    }


def test_every_string_of_a_run_is_escaped(copy: Path, tmp_path: Path) -> None:
    other = shutil.copytree(copy, tmp_path / f"other{MARKUP.replace('/', '')}")
    for file in ("result.json", "check.json", "origin.json"):
        (copy / file).write_text(json.dumps(marked(json.loads((copy / file).read_text()))))
    check = json.loads((copy / "check.json").read_text())
    finding = {"text": MARKUP, "advice": MARKUP, "details": [MARKUP] * 9}
    (copy / "check.json").write_text(json.dumps({**check, "findings": [finding], "result": MARKUP}))
    config = json.loads((copy / "best" / "config.json").read_text())
    config["vitrail"]["provenance"] |= {"source": MARKUP, "written_by": MARKUP}
    (copy / "best" / "config.json").write_text(json.dumps(config))
    recipe = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(f"marked = '{MARKUP.replace(chr(39), '')}'\n{recipe}# {MARKUP}\n")
    for page in (Page(report(copy)), Page(report(copy, other)), Page(report(other, copy))):
        assert page.all("i") == []
        assert page.all("b") == []
        assert not [attributes for _, attributes in page.elements if "evil" in attributes]
        assert "<i>" in "".join(page.sections.values())
    alone = Page(copy / "report.html")
    for section in ("mistakes", "classes", "confusion", "data", "reproduce"):
        assert MARKUP[:9] in alone.sections[section], section


def test_the_headline_has_the_accuracy(page: Page, run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    low, high = result["top1_interval"]
    text = " ".join(page.sections[""].split())
    assert f"{as_percent(result['top1'])} accuracy on {result['images']} held-out images" in text
    assert f"interval is {as_percent(low)} to {as_percent(high)}" in text
    assert f"95% interval {span(tuple(result['macro_f1_interval']))}" in page.sections["result"]


def test_every_section_is_present(page: Page, run: Path) -> None:
    assert list(page.sections) == [
        "", "result", "mistakes", "classes", "confusion", "calibration", "curves", "model", "inside", "data",
        "reproduce",
    ]  # fmt: skip
    marks = {element["id"] for element in page.all("section")}
    assert {(link["href"] or "")[1:] for link in page.all("a")} == marks, "every part is linked to"
    titles = page.html
    for title in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Confusion matrix", "Reliability"):
        assert f'aria-label="{title}"' in titles
    weights = hashlib.sha256((run / "best" / "model.safetensors").read_bytes()).hexdigest()
    assert weights in page.sections["reproduce"]
    assert "vitrail train" in page.sections["reproduce"]
    assert "90 images in 3 classes" in page.sections["data"]
    assert "How far each head looks" in page.sections["inside"]


def test_each_mistake_has_its_image_and_a_map(page: Page, run: Path) -> None:
    worst = json.loads((run / "result.json").read_text())["worst"][:12]
    assert worst, "the images are meant to be hard"
    saw = [image["alt"] or "" for image in page.all("img")]
    assert sum(alt.endswith(", model input") for alt in saw) == len(worst)
    assert [alt.removeprefix("relevance for ") for alt in saw if alt.startswith("relevance for")] == [
        mistake["predicted"] for mistake in worst
    ]


@pytest.mark.parametrize(
    "missing",
    [
        {
            "check.json": ("data", "check.json is missing"),
            "test_predictions.parquet": ("reproduce", "missing; pip install 'vitrail[train]' adds it"),
            "metrics.jsonl": ("curves", "has no steps"),
            "split.json": ("mistakes", "does not record its path"),
            "best/model.safetensors": ("inside", "The best model cannot be opened"),
        },
        {"origin.json": ("inside", "does not record its path")},
        {"result.json": ("", "Not finished: step 16")},
    ],
    ids=lambda missing: "+".join(missing),
)
def test_missing_files_are_reported_in_place(copy: Path, missing: dict[str, tuple[str, str]]) -> None:
    for file in missing:
        (copy / file).unlink()
    page = Page(report(copy))
    for section, words in missing.values():
        assert words in " ".join(page.sections[section].split())
    if "result.json" in missing:
        assert "So far the checkpoint of step" in page.sections["result"]
        assert "it has not been evaluated on held-out images yet" in page.sections["confusion"]


@pytest.mark.parametrize("content", ["{", "[]", '{"result": "from another version"}'])
def test_corrupt_files_are_reported(bare: Path, content: str) -> None:
    for file in ("result.json", "check.json"):
        (bare / file).write_text(content)
    page = Page(report(bare))
    assert "result.json " in page.sections["result"]
    assert "check.json " in page.sections["data"]


@pytest.mark.parametrize(
    "change", [{"images": 0}, {"confusion": [[1]]}, {"per_class": []}, {"classes": ["a", "b"]}], ids=str
)
def test_an_inconsistent_result_is_reported(bare: Path, change: dict[str, object]) -> None:
    result = json.loads((bare / "result.json").read_text())
    (bare / "result.json").write_text(json.dumps({**result, **change}))
    assert "was not written by this version of vitrail" in read_run(bare).why_no_result


def test_missing_or_changed_data_is_reported(copy: Path, tmp_path: Path) -> None:
    origin = json.loads((copy / "origin.json").read_text())
    (copy / "origin.json").write_text(json.dumps({**origin, "data": str(tmp_path / "moved.csv")}))
    gone = Page(report(copy))
    assert "The images cannot be shown" in gone.sections["mistakes"]
    assert "predicted as" in gone.sections["mistakes"], "what is known of the mistakes is still reported"
    (copy / "origin.json").write_text(json.dumps(origin))
    result = json.loads((copy / "result.json").read_text())
    result["worst"][0]["name"] = "somewhere/else.png"
    (copy / "result.json").write_text(json.dumps(result))
    assert "another image has taken its place" in Page(report(copy)).sections["mistakes"]


def test_a_wide_interval_warns(bare: Path) -> None:
    split, result = (json.loads((bare / file).read_text()) for file in ("split.json", "result.json"))
    (bare / "split.json").write_text(json.dumps({**split, "counts": {**split["counts"], "test": {}}}))
    assert "selected on these same images" in Page(report(bare)).sections[""]
    (bare / "result.json").write_text(json.dumps({**result, "kind": "training images"}))
    assert "No images were held out" in Page(report(bare)).sections[""]


@pytest.mark.slow
def test_without_held_out_images_the_headline_warns(data: Path, tmp_path: Path) -> None:
    folder = tiny_run(data, tmp_path / "all", "data.val=0", "data.test=0", "epochs=1").folder
    head = Page(report(folder)).sections[""]
    assert "90 training images" in head
    assert "No images were held out" in head


@pytest.mark.slow
def test_without_a_test_split_the_headline_warns(data: Path, tmp_path: Path) -> None:
    folder = tiny_run(data, tmp_path / "val", "data.val=0.3", "data.test=0", "epochs=1").folder
    assert "selected on these same images" in Page(report(folder)).sections[""]


@pytest.mark.slow
def test_digits_are_built_in(tmp_path: Path) -> None:
    folder = vitrail.train(
        changes=["model.stem=conv", "model.width=16", "model.depth=1", "model.heads=1", "epochs=1"],
        folder=tmp_path / "digits", device="cpu", workers=0, quiet=True,
    ).folder  # fmt: skip
    page = Page(folder / "report.html")
    assert sum((image["alt"] or "").startswith("relevance for") for image in page.all("img")) == 12
    assert len(page.html) < 8_000_000


def test_two_hundred_classes_stay_readable(bare: Path) -> None:
    generator = np.random.default_rng(0)
    names = tuple(f"a class with a longer name, number {number}" for number in range(200))
    labels = np.repeat(np.arange(200), 10)
    probabilities = generator.dirichlet(np.full(200, 0.02), 2000).astype(np.float32)
    probabilities[np.arange(2000), labels] += 0.5
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    source = Arrays(np.zeros((2000, 2, 2), np.uint8), labels, names)
    measured = classification_metrics(Predictions(probabilities, labels, np.arange(2000)), source)
    (bare / "result.json").write_text(json.dumps(measured.as_dict()))
    page = Page(report(bare))
    assert len(page.html) < 2_000_000
    assert "Classes are labelled by their numbers in the table above" in page.sections["confusion"]
    assert "No." in page.sections["classes"]
    assert all(name in page.sections["classes"] for name in names)


def test_right_to_left_names_are_isolated(bare: Path) -> None:
    text = (bare / "result.json").read_text(encoding="utf-8")
    for place, name in enumerate(CLASSES):
        text = text.replace(json.dumps(name), f'"שלום {place}"')
    result = json.loads(text)
    result["worst"][0]["name"] = "photos/שלום/5.png"
    (bare / "result.json").write_text(json.dumps(result), encoding="utf-8")
    html = Page(report(bare)).html
    assert re.search('<bdi>שלום .</bdi> <span class="quiet">×', html), "the count stands behind the name"
    assert "<bdi>photos</bdi>/<bdi>שלום</bdi>/<bdi>5.png</bdi>" in html
    lead = html.partition('class="lead">')[2].partition("</p>")[0]
    assert lead.count("<bdi>") >= 1
    assert "שלום" not in re.sub("<bdi>.*?</bdi>", "", lead)


def test_a_class_has_its_interval_and_most_frequent_confusion(bare: Path) -> None:
    matrix = np.array([[20, 10, 0], [0, 10, 0], [2, 0, 3]])
    labels, predictions = (np.repeat(places, matrix.flatten()) for places in np.indices(matrix.shape).reshape(2, -1))
    source = Arrays(np.zeros((len(labels), 2, 2), np.uint8), labels, ("a", "b", "c"))
    probabilities = np.eye(3, dtype=np.float32)[predictions] * 0.7 + 0.1
    measured = classification_metrics(Predictions(probabilities, labels, np.arange(len(labels))), source)
    (bare / "result.json").write_text(json.dumps(measured.as_dict()))
    html = Page(report(bare)).html.partition('<section id="classes"')[2].partition("</section>")[0]
    rows = [re.sub("<[^>]+>", " ", row).split() for row in re.findall("<tr>(.*?)</tr>", html)[1:]]
    ends = [span(wilson_interval(right, count)) for right, count in ((20, 30), (10, 10), (3, 5))]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("a", "30", ends[0]),
        ("b", "10", ends[1]),
        ("c", "5", ends[2]),
    ]
    assert [row[6:] for row in rows] == [["b", "×10"], ["–"], ["a", "×2"]]


def test_a_class_with_zero_recall_is_not_in_the_highest_recall_chart(bare: Path) -> None:
    classes = 6
    labels = np.repeat(np.arange(classes), 20)
    probabilities = np.full((len(labels), classes), 0.02, np.float32)
    probabilities[:, 0] = 0.9
    source = Arrays(np.zeros((len(labels), 2, 2), np.uint8), labels, tuple(f"class {n}" for n in range(classes)))
    measured = classification_metrics(Predictions(probabilities, labels, np.arange(len(labels))), source)
    (bare / "result.json").write_text(json.dumps(measured.as_dict()))
    page = Page(report(bare))
    assert "asiest" not in page.html
    highest = page.html.partition('aria-label="Highest recall"')[2].partition("</svg>")[0]
    assert "<desc>class 0: 100%</desc>" in highest
    assert "overconfident" in page.sections["calibration"]


def test_few_images_do_not_show_overconfidence(bare: Path) -> None:
    result = json.loads((bare / "result.json").read_text())
    sure = sum(row["images"] * (row["confidence"] or 0) for row in result["reliability"]) / result["images"]
    result["top1"], result["top1_interval"] = sure - 0.05, (sure - 0.1, sure + 0.1)
    (bare / "result.json").write_text(json.dumps(result))
    assert "well calibrated" in Page(report(bare)).sections["calibration"]


def test_a_folder_that_is_not_a_run_raises(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for place, words in (
        (tmp_path, "no recipe.toml"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "sweep", "holds a sweep"),
        (copy / "best", "pass the run folder itself"),
    ):
        with pytest.raises(ConfigError, match=words):
            report(place)
    (copy / "recipe.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe.toml is not UTF-8"):
        report(copy)


def test_only_reports_are_overwritten(bare: Path, tmp_path: Path) -> None:
    assert report(bare) == report(bare) == bare / "report.html"
    letter = tmp_path / "letter.html"
    letter.write_text("dear")
    pipe = bare / "pipe.html"
    os.mkfifo(pipe)
    for target, words in (
        (pipe, "is not a regular file"),
        (letter, "is not a report"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "where.html", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            report(bare, out=target)
    assert letter.read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "letter.html"]


def call(*words: str) -> int | str | None:
    """Run the command in this process, because importing torch in another is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vitrail", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code


def test_the_command_prints_the_path_of_the_report(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("report", str(bare), "--out", str(tmp_path / "page.html")) == 0
    assert capsys.readouterr().out == f"the report is {tmp_path / 'page.html'}\n"
    assert call("report", str(tmp_path)) == 2
    refused = capsys.readouterr()
    assert (refused.out, refused.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("file", "content", "lacks"),
    [
        ("result.json", "{", "result.json is not JSON"),
        (
            "result.json",
            '{"result": "from another version"}',
            "result.json was not written by this version of vitrail",
        ),
        ("check.json", "[]", "check.json is not a JSON object"),
        ("split.json", '{"names": ', "split.json is not JSON"),
        ("origin.json", "\x00", "origin.json is not JSON"),
        ("metrics.jsonl", "gar\nbage\n", "metrics.jsonl has 2 unreadable lines"),
        ("sessions.json", "[{}]", "sessions.json cannot be read, so the report lacks time and hardware"),
        ("samples/samples.json", "{", "samples.json cannot be read, so the report lacks example images"),
        ("best/config.json", "{", "config.json is not JSON"),
        ("best/model.safetensors", "short", "The best model cannot be opened"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    file: str,
    content: str,
    lacks: str,
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (copy / file).write_text(content)
    assert call("report", str(copy)) == 0
    shown = capsys.readouterr()
    assert shown.out == f"the report is {copy / 'report.html'}\n"
    (line,) = shown.err.splitlines()
    assert line.startswith("WARNING: ")
    assert lacks in line
    assert lacks in " ".join(Page(copy / "report.html").sections[""].split())
    report(copy)  # the Python function logs it
    assert [record.message for record in caplog.records if record.name == "vitrail"] == [line.removeprefix("WARNING: ")]


def test_a_folder_in_place_of_a_file_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("split.json", "metrics.jsonl"):
        (copy / file).unlink()
        (copy / file).mkdir()
    assert call("report", str(copy)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("Is a directory" in line for line in lines)


def test_intact_and_interrupted_runs_do_not_warn(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "lo')
    assert call("report", str(copy)) == 0
    assert capsys.readouterr().err == ""


def test_unreadable_predictions_of_two_runs_are_named(
    copy: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "test_predictions.parquet").write_text("no parquet")
    (copy / "check.json").write_text("{")
    assert call("report", str(run), str(copy), "--out", str(copy / "both.html")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"WARNING: {copy}/") for line in lines] == [True, True]
    assert "test_predictions.parquet cannot be read" in " ".join(lines)
    assert "test_predictions.parquet cannot be read" in " ".join(Page(copy / "both.html").sections[""].split())


def test_small_differences_have_no_sign() -> None:
    assert [points(x) for x in (0.0, -1e-5, 0.012, -0.012)] == ["0.0", "0.0", "+1.2", "\N{MINUS SIGN}1.2"]


def test_images_are_spread_over_the_data() -> None:
    source = Arrays(np.zeros((200, 2, 2), np.uint8), np.zeros(200, np.int64), ("a",))
    result = RunArtifacts(None, None, "", source, "").some(128)
    assert len(result) == len({item.name for item in result}) == 128
    assert result[-1].name == os.fsencode(source.name(199))


def test_a_resnet_is_explained_by_gradcam(data: Path, tmp_path: Path) -> None:
    resnet = (
        "model.stem=resnet", "model.depth=0", "model.width=128", "model.heads=1", "model.patch_size=4",
        "model.resnet={depths=[1],width_factor=0.5}", "model.position=none", "model.class_token=none",
        "model.pool=mean", "model.final_norm=none", "model.image_size=16", "epochs=1", "batch=16",
    )  # fmt: skip
    run = train(data, changes=resnet, folder=tmp_path / "run", device="cpu", workers=0, quiet=True).folder
    page = Page(report(run))
    worst = json.loads((run / "result.json").read_text())["worst"][:12]
    maps = [image["alt"] or "" for image in page.all("img") if " for " in (image["alt"] or "")]
    assert maps == [f"Grad-CAM for {mistake['predicted']}" for mistake in worst]
    assert worst
    mistakes = page.sections["mistakes"]
    assert "the Grad-CAM map of the prediction (last feature map times gradient)" in " ".join(mistakes.split())
    assert "relevance" not in mistakes
    assert "not available" not in mistakes


def test_training_writes_the_report_and_survives_its_failure(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(data), "--run", str(tmp_path / "run"), "--device", "cpu", "--workers", "0"]
    words += [word for change in (*TINY, "epochs=1") for word in ("--set", change)]
    target = tmp_path / "run" / "report.html"
    assert call(*words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"the report is {target}"
    assert EVIL in Page(target).sections["classes"]
    target.unlink()
    target.mkdir()  # so that the report cannot be written
    assert call(*words) == 0
    assert f"the report was not written: {target} is a folder" in capsys.readouterr().err


def test_any_error_becomes_a_message(copy: Path) -> None:
    shutil.rmtree(copy / "best")
    (copy / "recipe.toml").unlink()
    path, message = report_of_finished(copy)
    assert path is None
    assert message.startswith("the report was not written:")


def test_a_rejected_candidate_explains_its_missing_result(copy: Path) -> None:
    (copy / "result.json").unlink()
    (copy / "outcome.json").write_text("{}")
    assert "run of a sweep was not selected" in read_run(copy).why_no_result
