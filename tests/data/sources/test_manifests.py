"""Manifests: CSV, JSONL and Parquet."""

import json
import pickle
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitrail.data.sources.manifests import Manifest, open_manifest
from vitrail.data.sources.parquet import GROUPS_HELD, ParquetImages, open_parquet
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import Labelling, Targets, targets_of
from vitrail.errors import DataError


def images(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images(tmp_path, "a.png", "b.png", "c.png", "in/d.png")
    return tmp_path


def csv(folder: Path, text: str | bytes) -> Path:
    path = folder / "list.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "list.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def parquet(folder: Path, metadata: dict[str, str] | None = None, rows: int = 2, **columns: Any) -> Path:
    path = folder / "list.parquet"
    table = pa.table(columns).replace_schema_metadata(metadata)
    pq.write_table(table, path, row_group_size=rows)
    return path


def summary(source: Source) -> list[tuple[bytes, str]]:
    return [(source.read(n), source.classes[source.labels[n]]) for n in range(len(source))]


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        (open_parquet if path.suffix == ".parquet" else open_manifest)(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), path.suffix[1:].upper())


def targets_in(path: Path) -> Targets:
    targets = targets_of((open_parquet if path.suffix == ".parquet" else open_manifest)(path))
    assert targets is not None
    return targets


def test_a_csv_file(folder: Path) -> None:
    path = csv(folder, "\ufeffid, Path ,label\r\n1,b.png,dog\r\n\r\n2,in/d.png,cat\r\n3,./a.png,dog\r\n")
    source = open_manifest(path)
    assert source.classes == ("cat", "dog")
    assert summary(source) == [(b"b.png", "dog"), (b"in/d.png", "cat"), (b"a.png", "dog")]
    assert (source.key(1), source.name(1)) == ("in/d.png", f"{folder}/in/d.png")
    assert source.stamp(0) == (5, (folder / "b.png").stat().st_ctime_ns)
    assert source.split_of is None
    assert summary(pickle.loads(pickle.dumps(source))) == summary(source)


@pytest.mark.parametrize("image", ["path", "file", "filename", "file_name", "image"])
@pytest.mark.parametrize("label", ["label", "class", "target", "category", "class_name"])
def test_column_names(image: str, label: str, folder: Path) -> None:
    source = open_manifest(csv(folder, f"{label},{image}\ncat,a.png\ndog,b.png\n"))
    assert summary(source) == [(b"a.png", "cat"), (b"b.png", "dog")]


def test_integers_are_sorted_numerically(folder: Path) -> None:
    source = open_manifest(csv(folder, "path,label\na.png,10\nb.png,9\nc.png,-1\nin/d.png,10\n"))
    assert (source.classes, source.labels.tolist()) == (("-1", "9", "10"), [2, 1, 0, 2])
    source = open_manifest(csv(folder, "path,label\na.png,010\nb.png,9\n"))
    assert source.classes == ("010", "9")
    source = open_manifest(jsonl(folder, {"path": "a.png", "label": 10}, {"path": "b.png", "label": 9.0}))
    assert source.classes == ("9", "10")


def test_numbers_with_names(folder: Path) -> None:
    rows = "path,label,label_name\na.png,10,ant\nb.png,9,bee\nc.png,10,ant\n"
    assert open_manifest(csv(folder, rows)).classes == ("bee", "ant")
    assert refused(csv(folder, rows.replace("c.png,10,ant", "c.png,10,cow"))) == (
        "CSV, line 4 names label 10 'cow', but it was 'ant' before; use one name"
    )
    assert refused(csv(folder, rows.replace("bee", "ant"))) == ("CSV has two classes named 'ant'; use unique names")


def test_split_column(folder: Path) -> None:
    rows = [("a.png", "train"), ("b.png", "Validation"), ("c.png", "test"), ("in/d.png", "valid")]
    source = open_manifest(jsonl(folder, *({"path": p, "label": "x", "split": s} for p, s in rows)))
    assert source.split_of is not None
    assert source.split_of.tolist() == [0, 1, 2, 1]
    assert refused(csv(folder, "path,label,split\na.png,x,train\nb.png,x,\n")) == (
        "CSV, line 3 has the split ''; write train, val or test"
    )


def test_absolute_paths(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("lists")
    assert summary(open_manifest(csv(elsewhere, f"path,label\n{folder}/a.png,x\n"))) == [(b"a.png", "x")]


@pytest.mark.parametrize("label", ["", " ", "nan", "NaN", "null"])
def test_a_label_missing_from_a_csv_file(label: str, folder: Path) -> None:
    assert refused(csv(folder, f"path,label\na.png,x\nb.png,{label}\n")) == (
        f"CSV, line 3 has no label (found {label!r}); add one, or remove the image"
    )


@pytest.mark.parametrize(
    "row", [{"path": "b.png"}, {"path": "b.png", "label": None}, {"path": "b.png", "label": float("nan")}]
)
def test_a_label_missing_from_a_jsonl_file(row: dict[str, object], folder: Path) -> None:
    assert refused(jsonl(folder, {"path": "a.png", "label": "x"}, "", row)) == (
        "JSONL, line 3 has no label; add one, or remove the image"
    )


@pytest.mark.parametrize("values", [["x", None], [1.0, float("nan")], [1, None]])
def test_a_label_missing_from_a_parquet_file(values: list[object], folder: Path) -> None:
    assert refused(parquet(folder, path=["a.png", "b.png"], label=values)) == (
        "PARQUET, row 2 has no label; add one, or remove the image"
    )


def test_several_labels_per_image(folder: Path) -> None:
    for path in (
        jsonl(folder, {"path": "a.png", "label": ["x", "y"]}, {"path": "b.png", "label": []}),
        csv(folder, "path,label\na.png,\"['x', 'y']\"\nb.png,[]\n"),
        parquet(folder, path=["a.png", "b.png"], label=[["x", "y"], []]),
        parquet(folder, bytes=[b"a", b"b"], label=[["x", "y"], []]),
    ):
        targets = targets_in(path)
        assert (targets.kind, targets.names, targets.values.tolist()) == ("labels", ("x", "y"), [[1, 1], [0, 0]])
        assert targets.reason == "label holds several labels per image, such as ['x', 'y']"
    assert refused(csv(folder, "path,label\na.png,x\nb.png,x\n./a.png,y\n")) == (
        "./a.png is listed twice in CSV, on lines 2 and 4, with different labels; list each image once, several labels "
        "in one line: cat;dog"
    )


@pytest.mark.parametrize("labels", ["ok|poly ok poly", "ok|poly ok ok|mono", "a;b a b", "a,b b,c a,c", "a|b|c b d"])
def test_joined_labels_are_not_classes(labels: str, folder: Path) -> None:
    files = ("a.png", "b.png", "c.png")
    rows = "".join(f'{file},"{label}"\n' for file, label in zip(files, labels.split(), strict=True))
    first = labels.split()[0]
    targets = targets_in(csv(folder, f"path,label\n{rows}"))
    assert targets.separator == next(c for c in first if not c.isalpha())
    pieces = [set(label.split(targets.separator)) for label in labels.split()]
    assert targets.names == tuple(sorted(set().union(*pieces)))
    assert [{n for n, has in zip(targets.names, row, strict=True) if has} for row in targets.values] == pieces
    assert targets.reason == f"label holds several labels per image, such as {first!r}"
    # Who says so, in the column's name or otherwise, has classes of such names.
    assert set(open_manifest(csv(folder, f"path,class_name\n{rows}")).classes) == set(labels.split())
    plain = open_manifest(csv(folder, f"path,label\n{rows}"), labelling=Labelling("classes"))
    assert (set(plain.classes), plain.targets) == (set(labels.split()), None)


@pytest.mark.parametrize(
    "labels", [["tench, Tinca tinca", "maillot, tank suit", "maillot"], ["cat|dog", "emu", "fox"], ["a;", "b;", "c;"]]
)
def test_names_with_separators_are_classes(labels: list[str], folder: Path) -> None:
    rows = [{"path": file, "label": label} for file, label in zip(("a.png", "b.png", "c.png"), labels, strict=True)]
    assert set(open_manifest(jsonl(folder, *rows)).classes) == set(labels)


@pytest.mark.parametrize("labels", [["0.0", "0.333", "1.0"], ["0.0011", "12", "-3e-2"], ["0,5", "0,25", "1"]])
def test_fractional_numbers_are_not_classes(labels: list[str], folder: Path) -> None:
    rows = "".join(f"{file};{label}\n" for file, label in zip(("a.png", "b.png", "c.png"), labels, strict=True))
    numbers = [float(label.replace(",", ".")) for label in labels]
    targets = targets_in(csv(folder, f"path;Target\n{rows}"))
    assert (targets.kind, targets.names, targets.values.tolist()) == ("values", ("Target",), [[n] for n in numbers])
    assert re.fullmatch(r"Target has numbers with fractions \(.*\)", targets.reason)
    assert len(open_manifest(csv(folder, f"path;class_name\n{rows}")).classes) == 3
    held = parquet(folder, bytes=[b"1", b"2", b"3"], label=pa.array(numbers))
    for unlabelled in (False, True):
        found = targets_of(open_parquet(held, unlabelled=unlabelled))
        assert found is not None
        assert found.values.tolist() == targets.values.tolist()
    assert len(open_parquet(held, labelling=Labelling("classes")).classes) == 3


def test_integers_are_classes_unless_there_are_as_many_as_images(folder: Path) -> None:
    def column(numbers: list[float]) -> Path:
        return parquet(folder, bytes=[b"1"] * len(numbers), label=pa.array(numbers))

    assert len(open_parquet(column([0.0, 1.0, 2.0])).classes) == 3
    assert len(open_parquet(column([n % 19 for n in range(19)])).classes) == 19
    assert len(open_parquet(column([n % 100 for n in range(200)])).classes) == 100
    many = column([n % 150 for n in range(200)])
    assert targets_in(many).reason == "label has 150 different numbers for 200 images"
    assert len(open_parquet(many, unlabelled=True).classes) == 150  # of images to evaluate, there may be few


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_separators(delimiter: str, suffix: str, folder: Path) -> None:
    path = folder / f"list.{suffix}"
    rows = [["Image", "notes", "Label"], ["a.png", '"x, y; z"', "cat"], ["in/d.png", "", "dog"]]
    path.write_text("\r\n".join(delimiter.join(row) for row in rows), encoding="utf-8-sig")
    assert summary(open_manifest(path)) == [(b"a.png", "cat"), (b"in/d.png", "dog")]
    with open(folder / "one.csv", "w") as file:
        file.write("path\na.png\n")
    assert len(open_manifest(folder / "one.csv", unlabelled=True)) == 1


def test_all_faults_are_reported_at_once(folder: Path) -> None:
    rows = "a.png,x,train\nb.png,,train\nc.png,y,tomorrow\n,x,train\na.png,y,train\ngone.png,x,val\nin/d.png,y,val\n"
    path = csv(folder, f"path,label,split\n{rows}")
    message = refused(path)
    assert message.startswith("CSV has 5 faults: (1) CSV, line 3 has no label")
    for text in (
        "line 4 has the split",
        "line 5 has ''",
        "listed twice in CSV, on lines 2 and 6",
        "(5) 1 file listed in",
    ):
        assert text in message
    faults: list[str] = []
    source = open_manifest(path, faults=faults)
    assert summary(source) == [(b"a.png", "x"), (b"in/d.png", "y")]
    assert source.split_of is not None
    assert source.split_of.tolist() == [0, 1]
    assert [text.split(";")[0] for text in faults[-1:]] == [f"gone.png, listed in {path}, does not exist"]
    assert len(faults) == 5
    many = "".join(f"{n}.png,\n" for n in range(40))
    assert refused(csv(folder, f"path,label\n{many}")).endswith("Run `vitrail check` to list 30 more")
    held = parquet(folder, bytes=[b"1", b"2", b"3"], label=["x", None, None])
    assert refused(held).startswith("PARQUET has 2 faults: (1) PARQUET, row 2 has no label")


def test_rows_with_a_wrong_number_of_fields_are_faults(folder: Path) -> None:
    path = csv(folder, "path,label\na.png\nb.png,\nb.png,x,y\ngone.png,x\nc.png,x\nin/d.png,y\n")
    message = refused(path)
    assert message.startswith("CSV has 4 faults: (1) CSV, line 2 has 1 field, but the header has 2; put")
    for text in ("(2) CSV, line 3 has no label", "(3) CSV, line 4 has 3 fields", "(4) 1 file listed in CSV not found"):
        assert text in message
    faults: list[str] = []
    assert summary(open_manifest(path, faults=faults)) == [(b"c.png", "x"), (b"in/d.png", "y")]
    assert len(faults) == 4


def test_lines_that_are_not_json_are_faults(folder: Path) -> None:
    good, nowhere = {"path": "c.png", "label": "x"}, {"path": "gone.png", "label": "x"}
    path = jsonl(folder, "{", good, "[1]", nowhere, {"path": "a.png"})
    message = refused(path)
    assert message.startswith("JSONL has 4 faults: (1) JSONL, line 1 is not JSON; write one object per line. (2)")
    for text in ("line 3 is not a JSON object", "line 5 has no label", "1 file listed in JSONL not found"):
        assert text in message
    faults: list[str] = []
    assert summary(open_manifest(path, faults=faults)) == [(b"c.png", "x")]
    assert len(faults) == 4


def test_a_read_error_does_not_hide_earlier_faults(folder: Path) -> None:
    long, bad = b"a" * 200_000, b"path,label\nb.png,\ngone.png,x\nc.png,x\n"
    for rest, what in (
        (long + b",x\n", "is not a valid CSV file"),
        (long[:9000] + b"\xe9,x\n", "is not UTF-8"),
    ):
        message = refused(csv(folder, bad + rest))
        assert message.startswith("CSV has 3 faults: (1) CSV, line 2 has no label")
        assert what in message
        assert "1 file listed in CSV not found (gone.png)" in message


def test_an_image_listed_twice(folder: Path) -> None:
    assert refused(csv(folder, "path,label\na.png,x\nin/../a.png,x\n")) == (
        "in/../a.png is listed twice in CSV, on lines 2 and 3; list each image once"
    )


def test_missing_files_are_counted(folder: Path) -> None:
    after = "correct the paths, which are relative to the manifest's folder"
    assert refused(csv(folder, "path,label\na.png,x\nz.png,x\n")) == f"1 file listed in CSV not found (z.png); {after}"
    rows = "".join(f"{n}.png,x\n" for n in range(9))
    assert refused(csv(folder, f"path,label\n{rows}in,x\n")) == (
        f"10 files listed in CSV not found (0.png, 1.png, 2.png and others); {after}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "CSV has no image column; rename one of its columns (none) to path or file or filename or file_name",
        ),
        ("a.png,x\nb.png,y\n", "CSV starts with a file name, not with a header; add a first line such as path,label"),
        ("path|label\na.png|x\n", "CSV separates fields by '|'; use commas, semicolons or tabs"),
        ("name,label\na.png,x\n", "CSV has no image column; rename one of its columns ('name', 'label') to path"),
        (
            "path,kind\na.png,x\n",
            "CSV has no label column; rename one of its columns ('path', 'kind') to label or class",
        ),
        (
            "path;label\na.png;x;y\n",
            "CSV, line 2 has 3 fields, but the header has 2; put fields with semicolons in quo",
        ),
        ("path,label\n", "CSV lists no images; add one line per image"),
        ("path,label\na.png\n", "CSV, line 2 has 1 field, but the header has 2; put fields with commas in quotes"),
        ("path,label\na.png,x,y\n", "CSV, line 2 has 3 fields, but the header has 2"),
        ("path,label\n,x\n", "CSV, line 2 has '' instead of an image path; write a path"),
        ("path,label\na\0.png,x\n", "1 file listed in CSV not found (a\\x00.png)"),
        (b"path,label\ncaf\xe9.png,x\n", "CSV is not UTF-8 (invalid continuation byte at byte 14); save it as UTF-8"),
        (
            "path,label\n" + "a" * 200_000 + ",x\n",
            "CSV is not a valid CSV file: field larger than field limit",
        ),
    ],
)
def test_invalid_csv_files(text: str | bytes, message: str, folder: Path) -> None:
    assert message in refused(csv(folder, text))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "JSONL lists no images; add one line per image"),
        (["{"], "JSONL, line 1 is not JSON; write one object per line"),
        (["[" * 100_000], "JSONL, line 1 is not JSON; write one object per line"),
        ([[1]], "JSONL, line 1 is not a JSON object; write one object per line"),
        ([{"image": 3, "label": 1}], "JSONL, line 1 has 3 instead of an image path; write a path"),
        ([{"image": "\ud800", "label": 1}], "JSONL, line 1 has '\\ud800', which is not a valid path; correct it"),
        ([{"path": "a.png", "label": {"a": 1}}], "JSONL, line 1 has the label {'a': 1}; use a name or an integer"),
    ],
)
def test_invalid_jsonl_files(rows: Sequence[object], message: str, folder: Path) -> None:
    assert message in refused(jsonl(folder, *rows))


def test_files_that_cannot_be_read(folder: Path) -> None:
    assert refused(folder / "none.csv") == "CSV cannot be read: No such file or directory"
    assert refused(folder / "none.parquet") == "PARQUET cannot be read as Parquet: No such file or directory"
    (folder / "bad.parquet").write_bytes(b"no Parquet file at all")
    assert refused(folder / "bad.parquet").startswith(
        "PARQUET cannot be read as Parquet: Parquet magic bytes not found"
    )
    good = parquet(folder, path=["a.png"], label=["x"]).read_bytes()
    (folder / "list.parquet").write_bytes(good[:20] + good[-30:])
    assert refused(folder / "list.parquet").startswith("PARQUET cannot be read as Parquet: ")


def test_without_labels(folder: Path) -> None:
    source = open_manifest(csv(folder, "path\na.png\nb.png\n"), unlabelled=True)
    assert (source.labels.tolist(), source.classes) == ([-1, -1], ())
    held = open_parquet(parquet(folder, bytes=[b"1", b"2", b"3"]), unlabelled=True)
    assert (held.labels.tolist(), held.read(2)) == ([-1, -1, -1], b"3")


def test_parquet_with_paths(folder: Path) -> None:
    source = open_parquet(parquet(folder, path=["b.png", "in/d.png", "a.png"], label=[3, 11, 3], split=["train"] * 3))
    assert isinstance(source, Manifest)
    assert summary(source) == [(b"b.png", "3"), (b"in/d.png", "11"), (b"a.png", "3")]
    assert source.split_of is not None


def test_parquet_with_bytes(folder: Path) -> None:
    content = [b"%d" % number * 10 for number in range(25)]
    labels = [f"class {number % 3}" for number in range(25)]
    coded = pa.array(labels).dictionary_encode()
    source = open_parquet(parquet(folder, rows=4, path=["gone.png"] * 25, bytes=content, label=coded))
    assert isinstance(source, ParquetImages)
    assert summary(source) == list(zip(content, labels, strict=True))
    assert [source.read(number) for number in (24, 0, 13)] == [content[24], content[0], content[13]]
    assert len(source._held) == GROUPS_HELD
    there = pickle.loads(pickle.dumps(source))
    assert len(there._held) == 0
    assert there.read(7) == content[7]
    assert (source.key(7), source.name(7)) == ("row 8", f"{folder}/list.parquet, row 8")
    status = (folder / "list.parquet").stat()
    assert source.stamp(7) == (status.st_size, status.st_ctime_ns)
    (folder / "list.parquet").unlink()
    with pytest.raises(DataError, match=r"list\.parquet, row 1 cannot be read: No such file"):
        there.read(0)


def hugging_face(folder: Path, labels: list[int], images: list[dict[str, object]]) -> Path:
    """Write a file like Hugging Face datasets: a struct per image, class names in the metadata."""
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog", "emu"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return parquet(folder, metadata, image=pa.array(images, kind), label=labels)


def test_parquet_of_hugging_face(folder: Path) -> None:
    images: list[dict[str, object]] = [{"bytes": b"%d" % n, "path": f"{n}.png"} for n in range(5)]
    source = open_parquet(hugging_face(folder, [1, 0, 1, 0, 0], images))
    assert source.classes == ("cat", "dog", "emu")
    assert summary(source) == [(b"0", "dog"), (b"1", "cat"), (b"2", "dog"), (b"3", "cat"), (b"4", "cat")]
    paths: list[dict[str, object]] = [{"bytes": None, "path": name} for name in ("a.png", "b.png")]
    assert summary(open_parquet(hugging_face(folder, [2, 0], paths))) == [(b"a.png", "emu"), (b"b.png", "cat")]
    unknown = hugging_face(folder, [-1] * 5, images)
    assert open_parquet(unknown, unlabelled=True).labels.tolist() == [-1] * 5
    assert refused(unknown) == "PARQUET has the label '-1', which is not one of its 3 classes; correct the label"
    images[3]["bytes"] = None
    assert refused(hugging_face(folder, [0] * 5, images)) == (
        "1 row has no image in the column 'image.bytes' of PARQUET; fill or remove it"
    )


def test_invalid_parquet_files(folder: Path) -> None:
    assert "('image', 'kind') to label or class" in refused(parquet(folder, image=[b"1"], kind=["x"]))
    assert refused(parquet(folder, path=[3], label=["x"])) == (
        "PARQUET, row 1 has 3 instead of an image path; write a path"
    )
    assert refused(parquet(folder, bytes=pa.array([], pa.binary()), label=pa.array([], pa.string()))) == (
        "PARQUET lists no images; add one row per image"
    )


def test_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(folder, bytes=[b"1"], label=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refused(path) == "PARQUET cannot be read without pyarrow: pip install 'vitrail[parquet]'"
