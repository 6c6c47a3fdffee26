"""The report of a segmentation run: images with masks, metrics of each class, and the comparison of two runs."""

import base64
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.html_page import Page
from tests.support.tiny_runs import CLASSES, EVIL

from vitrail.data.mask_images import palette
from vitrail.data.sources.masks import IGNORED_PIXEL, renumbering
from vitrail.data.sources.matching import Retargeted
from vitrail.data.sources.source import Arrays
from vitrail.data.sources.targets import Targets
from vitrail.metrics.intervals import bootstrap_mean
from vitrail.metrics.segmentation import count_pixels, mean_iou, mean_iou_of_each
from vitrail.reports.mask_pair import MaskPair
from vitrail.reports.mask_views import WRONG, MaskReader, coloured, legend, marked
from vitrail.reports.pairs import evaluated_on_same_images, pair_runs
from vitrail.reports.report import report
from vitrail.reports.run_artifacts import open_artifacts
from vitrail.reports.run_record import read_run
from vitrail.reports.test_predictions import MaskPredictions, read_predictions
from vitrail.tasks.segmentation import Segmentation
from vitrail.tasks.segmentation_metrics import SegmentationMetrics, segmentation_metrics
from vitrail.tasks.task import Predictions
from vitrail.text import as_percent
from vitrail.training.split_predictions import write_test_predictions


@pytest.fixture(scope="module")
def page(masks_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(report(masks_run, out=tmp_path_factory.mktemp("page") / "report.html"))


@pytest.fixture
def bare(masks_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(masks_run, tmp_path / "copy", ignore=shutil.ignore_patterns("best", "last", "state"))


@pytest.fixture
def moved(masks_run: Path, shapes: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the run and of its data, which tests change."""
    copy = shutil.copytree(masks_run, tmp_path / "copy")
    data = shutil.copytree(shapes, tmp_path / "data")
    origin = json.loads((copy / "origin.json").read_text())
    (copy / "origin.json").write_text(json.dumps({**origin, "data": str(data)}))
    return copy, data


def result_of(folder: Path) -> SegmentationMetrics:
    result = read_run(folder).result
    assert isinstance(result, SegmentationMetrics)
    return result


def stored_of(folder: Path) -> MaskPredictions:
    stored, why = read_predictions(read_run(folder))
    assert isinstance(stored, MaskPredictions), why
    return stored


def reader_of(folder: Path) -> MaskReader:
    artifacts = open_artifacts(read_run(folder))
    assert artifacts.bundle is not None
    return MaskReader(artifacts, artifacts.bundle)


def section(page: Page, name: str) -> str:
    return page.html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def words(text: str) -> str:
    return " ".join(text.split())


def with_result(folder: Path, classes: int, images: int) -> Path:
    """Replace result and predictions of a run by those of a model that knows little; the last class does not occur."""
    generator = np.random.default_rng(0)
    true = generator.integers(0, 60, (images, classes))
    true[:, -1] = 0
    correct = (true * generator.random((images, classes))).astype(np.int64)
    predicted = correct + generator.integers(0, 30, (images, classes))
    names = tuple(f"a class with a longer name, number {number}" for number in range(classes))
    targets = Targets("masks", names, true)
    source = Retargeted(Arrays(np.zeros((images, 2, 2), np.uint8), np.zeros(images, np.int64), ("all",)), targets)
    outputs = np.stack([correct, predicted, true * 0.5], axis=1).astype(np.float32)
    predictions = Predictions(outputs, true, np.arange(images))
    measured = segmentation_metrics(predictions, source)
    (folder / "result.json").write_text(json.dumps(measured.as_dict()))
    write_test_predictions(predictions, source, folder / "test_predictions.parquet", Segmentation())
    return folder


def with_counts(run: Path, target: Path, kind: str, counts: np.ndarray) -> Path:
    """Copy a run, with other counts of pixels (N, K)."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("last", "state"))
    table = pq.read_table(target / "test_predictions.parquet")
    column = pa.FixedSizeListArray.from_arrays(pa.array(counts.astype(np.int64).ravel()), counts.shape[1])
    table = table.set_column(table.schema.get_field_index(kind), kind, column)
    pq.write_table(table, target / "test_predictions.parquet")
    return target


# ── images ──


def test_every_section_is_present_and_none_speaks_of_other_tasks(page: Page) -> None:
    assert list(page.sections) == [
        "", "result", "masks", "classes", "curves", "model", "inside", "data", "reproduce",
    ]  # fmt: skip
    for name in page.sections.keys() - {"reproduce"}:  # with the recipe
        assert not re.search(r"\b(labels|confusion|accuracy on|top-1)\b", page.sections[name]), name
    assert "mean IoU on 18 held-out images" in words(page.sections[""])
    assert "are missing" not in "".join(page.sections.values())


def test_each_image_is_shown_once_with_its_masks(page: Page, masks_run: Path) -> None:
    html, text = section(page, "masks"), words(page.sections["masks"])
    assert re.findall("<h3>(.*?)</h3>", html) == ["Lowest mean IoU", "Median", "Highest mean IoU"]
    titles = ["Image", "True mask", "Predicted mask", "Wrong pixels"]
    assert re.findall("<figcaption>(.*?)</figcaption>", html) == titles * 12
    files = re.findall('class="quiet small file" title="(.*?)"', html)
    assert len(set(files)) == len(files) == 12
    result = result_of(masks_run)
    for image in (*result.worst[:6], *result.best[:3]):
        assert image.name in files
        shown = f"Mean IoU {as_percent(image.mean_iou)} , pixel accuracy {as_percent(image.pixel_accuracy)}"
        assert shown in text
    assert all(max(int(size) for size in pair) <= 208 for pair in re.findall(r'width="(\d+)" height="(\d+)">', html))


def test_the_masks_are_those_of_the_run(masks_run: Path) -> None:
    reader, stored = reader_of(masks_run), stored_of(masks_run)
    for image in result_of(masks_run).worst:
        read = reader.read(image.index, image.name)
        counts = count_pixels(read.predicted, read.true, len(CLASSES), IGNORED_PIXEL)
        row = stored.rows[image.index]
        assert counts[2].tolist() == stored.counts[row, 2].tolist()
        assert mean_iou_of_each(counts[None])[0] == pytest.approx(image.mean_iou, abs=0.03)


def test_the_wrong_pixels_are_marked_and_the_classes_have_their_colours() -> None:
    pixels = np.full((2, 2, 3), (200, 100, 0), np.uint8)
    drawn = marked(pixels, np.array([[True, False], [False, False]]))
    assert drawn[0, 0].tolist() == list(WRONG)
    assert len(set(drawn[0, 1].tolist())) == 1, "right pixels are grey"
    mask = np.array([[0, 1], [1, IGNORED_PIXEL]], np.uint8)
    shown = coloured(pixels, mask, 2).astype(float)
    assert shown[1, 1].tolist() == [100, 100, 100], "pixels without a label are grey"
    expected = 0.45 * 100 + 0.55 * palette(2)[[0, 1, 1]].astype(float)
    assert np.abs(shown[[0, 0, 1], [0, 1, 0]] - expected).max() <= 0.5


def test_the_legend_has_the_colours_of_the_classes(page: Page) -> None:
    legend = section(page, "masks").partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert re.findall('fill="(#.*?)"', legend) == [f"#{bytes(colour).hex()}" for colour in palette(3).tolist()]
    assert legend.count("<bdi>") == 3


def test_names_are_escaped_and_the_page_is_small(page: Page) -> None:
    assert EVIL in page.sections["classes"]
    assert EVIL in page.sections["masks"]
    assert page.all("i") == []
    assert len(page.all("script")) == 1
    assert len(page.html) < 1_000_000


def test_a_legend_of_many_classes_has_only_those_that_are_shown() -> None:
    names = [f"class {number}" for number in range(100)]
    assert legend(names[:24], {3}).count("<li>") == 24
    few = legend(names, {3, 98})
    assert re.findall("<bdi>(.*?)</bdi>", few) == ["class 3", "class 98"]
    assert f"#{bytes(palette(100)[98]).hex()}" in few
    many = legend(names, set(range(40)))
    assert many.count("<bdi>") == 24
    assert "and 16 more" in many


def test_few_images_are_not_shown_twice(bare: Path) -> None:
    page = Page(report(with_result(bare, classes=3, images=4)))
    html = section(page, "masks")
    assert re.findall("<h3>(.*?)</h3>", html) == ["Lowest mean IoU"]
    assert html.count("Mean IoU <strong>") == 4
    assert "The best model cannot be opened" in page.sections["masks"]


# ── data that has changed ──


def test_missing_data_is_reported(moved: tuple[Path, Path]) -> None:
    run, data = moved
    shutil.rmtree(data)
    text = Page(report(run)).sections["masks"]
    assert "The images cannot be shown" in text
    assert text.count("Mean IoU") == 12, "what is known of the images is still reported"


def test_changed_masks_are_reported(moved: tuple[Path, Path]) -> None:
    run, data = moved
    first = result_of(run).worst[0]
    mask = data / "masks" / Path(first.name).name
    with Image.open(mask) as opened:
        values = np.asarray(opened).copy()
    values[:4, :4] = 1 - np.minimum(values[:4, :4], 1)
    Image.fromarray(values).save(mask)
    page = Page(report(run))
    assert "another mask has taken its place" in page.sections["masks"]
    assert section(page, "masks").count("<figcaption>") == 11 * 4, "the others are shown"


def test_other_images_in_the_data_are_reported(moved: tuple[Path, Path]) -> None:
    run, _ = moved
    result = json.loads((run / "result.json").read_text())
    result["worst"][0]["name"] = "elsewhere.png"
    (run / "result.json").write_text(json.dumps(result))
    assert "another image has taken its place" in Page(report(run)).sections["masks"]


def test_renamed_classes_are_reported(moved: tuple[Path, Path]) -> None:
    run, data = moved
    (data / "classes.txt").write_text("0 sky\n1 sea\n2 land")
    text = Page(report(run)).sections["masks"]
    assert re.search(f"The images cannot be shown .* class '({'|'.join(map(re.escape, CLASSES))})'", text)


def test_an_unfinished_run_has_no_result(bare: Path) -> None:
    (bare / "result.json").unlink()
    page = Page(report(bare))
    for name in ("masks", "classes"):
        assert "has not been evaluated on held-out images yet" in page.sections[name]
    assert "So far the checkpoint of step" in page.sections["result"]
    assert "mean IoU" in page.sections["result"]


# ── classes ──


def test_each_class_has_its_bar_and_row(page: Page, masks_run: Path) -> None:
    html, text = section(page, "classes"), words(page.sections["classes"])
    result = result_of(masks_run)
    assert html.count('aria-label="IoU"') == 1
    cells = re.findall(r'<th scope="row" data-key="(.*?)">', html)
    assert len(cells) == 3
    for row in result.per_class:
        assert row.name in text
        assert f"{row.images:,} {as_percent(row.fraction)} {as_percent(row.iou)} {as_percent(row.dice)}" in text
    ious = [row.iou or 0.0 for row in result.weakest_first]
    assert ious == sorted(ious)


def test_many_classes_stay_readable(bare: Path) -> None:
    page = Page(report(with_result(bare, classes=60, images=80)))
    html, text = section(page, "classes"), words(page.sections["classes"])
    assert html.count('class="chart"') == 2, "the weakest and the best"
    assert "Lowest IoU" in text
    assert "Highest IoU" in text
    assert "The evaluated images have no pixel of 1 class." in text
    assert all(f"number {number} " in text for number in range(60))
    assert text.rindex("number 59 ") > max(text.rindex(f"number {number} ") for number in range(59)), "absent: last"
    assert len(page.html) < 1_000_000


# ── data ──


def test_the_data_section_counts_pixels_and_images(page: Page, masks_run: Path) -> None:
    text = words(page.sections["data"])
    check = json.loads((masks_run / "check.json").read_text())
    assert "Class % of pixels train val test" in text
    assert "all images 63 9 18" in text
    for one in check["targets"]["pixels"]:
        counts = [str(check["counts"][split][one["name"]]) for split in ("train", "val", "test")]
        assert f"{one['name']} {as_percent(one['fraction'])} {' '.join(counts)}" in text
    shares = [one["fraction"] for one in check["targets"]["pixels"]]
    largest = check["targets"]["pixels"][int(np.argmax(shares))]["name"]
    assert re.search(f"test {re.escape(largest)}", text), "the largest class is first"
    assert "Each is shown in the colours of its mask, under the rarest of its classes." in text


def test_samples_are_shown_in_the_colours_of_their_masks(masks_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(masks_run, tmp_path / "copy", ignore=shutil.ignore_patterns("best", "last", "state"))

    def first_sample() -> np.ndarray:
        url = re.findall(r'src="data:image/jpeg;base64,(.*?)"', section(Page(report(copy)), "data"))[0]
        with Image.open(io.BytesIO(base64.b64decode(url))) as image:
            return np.asarray(image).astype(float)

    tinted = first_sample()
    assert np.ptp(tinted, axis=2).mean() > 50, "strong colours"
    mask = next((copy / "samples").glob("001*-mask.png"))
    mask.write_bytes(b"no image")
    assert np.abs(first_sample() - tinted).mean() > 20, "without its mask, the image is shown as it is"


def test_the_model_card_names_task_and_classes(masks_run: Path) -> None:
    card = (masks_run / "best" / "README.md").read_text()
    assert "tags: [image-segmentation, vision-transformer]" in card
    assert "- Task: segmentation" in card
    assert "- Classes: 3 (" in card
    assert "| mean IoU | " in card


# ── two runs ──


def pair_of(one: Path, other: Path) -> MaskPair:
    both, why = pair_runs(read_run(one), read_run(other))
    assert isinstance(both, MaskPair), why
    return both


def test_the_difference_is_that_of_the_results_and_paired(masks_run: Path, other_masks_run: Path) -> None:
    both = pair_of(masks_run, other_masks_run)
    a, b = (result_of(run).mean_iou for run in (masks_run, other_masks_run))
    assert both.difference[0] == pytest.approx(b - a, abs=1e-9)
    assert both.difference[1].low <= b - a <= both.difference[1].high
    rows, first, second = both.each
    assert len(rows) == 18
    assert first == pytest.approx(mean_iou_of_each(stored_of(masks_run).counts))
    assert second == pytest.approx(mean_iou_of_each(stored_of(other_masks_run).counts))


def test_two_runs_are_compared_with_the_masks_of_both(masks_run: Path, other_masks_run: Path, tmp_path: Path) -> None:
    page = Page(report(masks_run, other_masks_run, tmp_path / "page.html"))
    assert list(page.sections) == ["", "result", "pairs", "settings", "curves", "classes", "reproduce"]
    text, html = words(page.sections["pairs"]), section(page, "pairs")
    both = pair_of(masks_run, other_masks_run)
    assert "The models' inputs have different sizes" in text
    captions = re.findall("<figcaption>(.*?)</figcaption>", html)
    assert captions[0].startswith("Above the dotted line")
    cards = html.count("Mean IoU of A")
    assert 3 <= cards <= 6
    assert captions[1:] == ["Image", "True mask", "A", "B"] * cards
    rows, first, second = both.each
    better = int((second > first).sum())
    assert f"and B on {better} image" in text
    low, high = bootstrap_mean(second - first)
    assert f"{100 * low:+.1f}".replace("-", "\N{MINUS SIGN}") in text
    assert f"{100 * high:+.1f}".replace("-", "\N{MINUS SIGN}") in text
    classes = words(page.sections["classes"])
    assert "IoU, A IoU, B B − A, percentage points" in classes
    for row in result_of(other_masks_run).per_class:
        assert f"{row.name} " in classes
        assert as_percent(row.iou) in classes
    assert page.all("i") == []
    name = Path(both.one.names[int(rows[0])]).name
    assert re.search(
        f"<title>[^<]*{re.escape(name)}: A {as_percent(first[0])}, B {as_percent(second[0])}</title>", html
    )


def test_a_better_run_wins(masks_run: Path, tmp_path: Path) -> None:
    stored = stored_of(masks_run)
    worse = with_counts(masks_run, tmp_path / "worse", "correct_pixels", stored.counts[:, 0] // 2)
    assert pair_of(masks_run, worse).better == "A"
    assert pair_of(worse, masks_run).better == "B"
    assert pair_of(worse, masks_run).difference[0] == pytest.approx(
        mean_iou(stored.counts) - mean_iou(stored_of(worse).counts)
    )
    page = Page(report(worse, masks_run, tmp_path / "page.html"))
    assert "B is better: " in page.sections[""]
    assert "A has the higher mean IoU on 0 images, and B on 18 images." in words(page.sections["pairs"])
    assert "A has the higher IoU" not in words(page.sections["pairs"])


def test_a_run_does_not_differ_from_itself(masks_run: Path, tmp_path: Path) -> None:
    page = Page(report(masks_run, masks_run, tmp_path / "page.html"))
    assert "No clear difference" in page.sections[""]
    assert "so the difference is not significant" in page.sections["pairs"]
    assert "higher IoU" not in page.sections["pairs"]


def test_other_masks_of_the_same_images_are_not_paired(masks_run: Path, tmp_path: Path) -> None:
    counts = stored_of(masks_run).counts.copy()
    counts[0, 2] = np.roll(counts[0, 2], 1)
    counts[0, 0] = 0
    swapped = with_counts(masks_run, tmp_path / "swapped", "correct_pixels", counts[:, 0])
    swapped = with_counts(swapped, tmp_path / "other", "true_pixels", counts[:, 2])
    both, why = pair_runs(read_run(masks_run), read_run(swapped))
    assert both is None
    assert "their masks differ" in why
    assert not evaluated_on_same_images(read_run(masks_run), read_run(swapped))


def test_masks_of_two_sizes_are_the_same_if_their_shares_are_similar(masks_run: Path, tmp_path: Path) -> None:
    stored = stored_of(masks_run)
    for factor, far in ((4, False), (9, True)):
        counts = stored.counts * factor
        if far:  # a third of the largest class is another one
            moved = counts[:, 2, 0] // 3
            counts[:, 2, 0] -= moved
            counts[:, 2, 1] += moved
        other = MaskPredictions(
            places=stored.places, names=stored.names, digests=stored.digests, classes=stored.classes, counts=counts,
            mean_iou=stored.mean_iou,
        )  # fmt: skip
        assert stored.same_images(other) is not far
        assert other.same_images(stored) is not far


def test_classes_in_another_order_have_the_same_masks(masks_run: Path) -> None:
    stored = stored_of(masks_run)
    other = MaskPredictions(
        places=stored.places, names=stored.names, digests=stored.digests, classes=("never", *stored.classes[::-1]),
        counts=np.pad(stored.counts[:, :, ::-1], ((0, 0), (0, 0), (1, 0))), mean_iou=stored.mean_iou,
    )  # fmt: skip
    assert stored.same_images(other)
    mask = np.array([[0, 1], [3, IGNORED_PIXEL]], np.uint8)
    renamed = renumbering(tuple(other.classes), tuple(stored.classes))[mask]
    assert renamed.tolist() == [[IGNORED_PIXEL, 2], [0, IGNORED_PIXEL]]


def test_corrupt_predictions_are_reported(masks_run: Path, bare: Path, tmp_path: Path) -> None:
    counts = stored_of(masks_run).counts
    impossible = with_counts(masks_run, tmp_path / "impossible", "correct_pixels", counts[:, 1] + 1)
    stored, why = read_predictions(read_run(impossible))
    assert stored is None
    assert "cannot be read" in why
    (bare / "test_predictions.parquet").write_bytes(b"PAR1 no")
    page = Page(report(masks_run, bare, tmp_path / "page.html"))
    assert "test_predictions.parquet cannot be read" in page.sections["pairs"]


def test_a_missing_model_leaves_out_its_masks(masks_run: Path, bare: Path, tmp_path: Path) -> None:
    counts = stored_of(bare).counts
    worse = with_counts(bare, tmp_path / "worse", "correct_pixels", counts[:, 0] // 2)
    page = Page(report(masks_run, worse, tmp_path / "page.html"))
    assert "the model of B cannot be opened" in page.sections["pairs"]
    captions = re.findall("<figcaption>(.*?)</figcaption>", section(page, "pairs"))
    assert captions[1:4] == ["Image", "True mask", "A"]
    assert "B" not in captions
