"""Problems in a dataset, as values: unreadable images, duplicates, classes, sizes, modes, and unused files.

`check_data` decodes every image. `quick_check` runs before training, in bounded time: it reads the headers of some
images, compares the contents of as many as it can, and lists what it did not check.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.augmentation.draws import draws
from vitrail.data.checking.findings import (
    DuplicateGroup,
    Finding,
    SurveyIndex,
    Unreadable,
    class_findings,
    count_images,
    duplicate_findings,
    fault_finding,
    find_duplicates,
    flat_finding,
    label_findings,
    mode_finding,
    rare_pixels_finding,
    size_findings,
    them,
    unreadable_finding,
)
from vitrail.data.checking.rows import COMPARED, FINE, UNREAD
from vitrail.data.checking.survey import Survey, SurveyProgress, survey, survey_headers
from vitrail.data.checking.target_facts import TargetFacts, count_labels, target_facts
from vitrail.data.image_files import ENDINGS, HEAD, sniff_file
from vitrail.data.sources.contents import Contents
from vitrail.data.sources.folders import Folder
from vitrail.data.sources.in_memory import InMemory
from vitrail.data.sources.index_files import Progress
from vitrail.data.sources.labels import Faults, report_faults
from vitrail.data.sources.opening import open_data, title_of
from vitrail.data.sources.shards import Shards
from vitrail.data.sources.source import SkippedFile, Source
from vitrail.data.sources.splits import Splits
from vitrail.data.sources.targets import AUTOMATIC, Labelling, targets_of
from vitrail.errors import DataError

SIDES = (0, 32, 64, 128, 224, 384, 512, 768, 1024, 2048, 4096)
"""Lower edges of the size histogram's bins."""
QUICK_IMAGES, QUICK_SECONDS = 1000, 5.0


class Bin(NamedTuple):
    """Number of images with a shorter side in [low, high)."""

    low: int
    high: int | None
    images: int


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    images: int
    checked: int
    """Number of images whose size, format and mode were read."""
    compared: int
    """Number of images whose contents were compared, to find duplicates."""
    decoded: bool
    """Whether images were decoded, or only their headers read."""
    not_checked: tuple[str, ...]
    """Problems that this check could not have found."""
    faults: tuple[str, ...]
    """Why parts of the data could not be opened."""
    classes: tuple[str, ...]
    counts: dict[str, dict[str, int]]
    """Images by split and class."""
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[DuplicateGroup, ...] | None
    """None if none were found but not all images were compared."""
    findings: tuple[Finding, ...]
    """Ordered by severity."""
    formats: dict[str, int]
    modes: dict[str, int]
    short_sides: tuple[Bin, ...]
    bytes: int
    targets: TargetFacts | None = None
    """Facts about labels, numbers or masks; `classes` and `counts` are then those of labels, ranges, or pixels."""
    contents: Contents | None = field(default=None, repr=False, compare=False)
    """Digests of the compared images."""

    @property
    def usable(self) -> bool:
        """Whether any image can be read."""
        return len(self.unreadable) < self.checked

    @property
    def summary(self) -> str:
        """A one-line summary."""
        how = "" if self.decoded else f" (headers of {self.checked:,} read, contents of {self.compared:,} compared)"
        briefs = [finding.brief for finding in self.findings]
        problems = ", ".join(briefs[:4]) + (f", and {len(briefs) - 4} more" if len(briefs) > 4 else "")
        classes = (
            f" in {len(self.classes):,} classes" if len(self.classes) > 1 else ""
        )  # images without labels have one
        if self.targets is not None:
            classes = f" {self.targets.brief}"
        return f"{count_images(self.images)}{classes}{how}; {problems or 'no problems found'}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        rest = ("contents", "targets")
        return {
            "summary": self.summary,
            **{name: value for name, value in asdict(replace(self, contents=None)).items() if name not in rest},
            **({} if self.targets is None else {"targets": self.targets.as_dict()}),
            "unreadable": [{**bad.image._asdict(), "reason": bad.reason} for bad in self.unreadable],
            "duplicates": "not checked among all"
            if self.duplicates is None
            else [
                {"kind": copies.kind, "images": [which._asdict() for which in copies.images]}
                for copies in self.duplicates
            ],
            "short_sides": [span._asdict() for span in self.short_sides],
        }


def open_to_check(
    place: str | InMemory, *, labelling: Labelling = AUTOMATIC, on_progress: Progress | None = None
) -> tuple[Splits, Faults]:
    """Open the usable part of a dataset and return it with the faults; if nothing is usable, raise with all faults."""
    faults: Faults = []
    try:
        return open_data(place, labelling=labelling, faults=faults, on_progress=on_progress), faults
    except DataError as error:
        report_faults([*faults, str(error)], title_of(place), None, listed=len(faults) + 1)
        raise


def check_data(
    splits: Splits,
    *,
    size: int = 224,
    workers: int = 0,
    on_progress: SurveyProgress | None = None,
    cache: bool = True,
    faults: Sequence[str] = (),
) -> Report:
    """Decode every image and report problems. `size` is the model's input size.

    `workers` processes decode; 0 means this process. With `cache`, images whose content has not changed since the last
    check are read but not decoded again. `faults` are those found by `open_data`.
    """
    surveyed = survey(_by_name(splits), workers=workers, on_progress=on_progress, cache=cache)
    return _report(surveyed, size, [*fault_finding(faults), *skipped_findings(find_skipped(splits[:3]))], tuple(faults))


def quick_check(
    splits: Splits,
    *,
    size: int = 224,
    most: int = QUICK_IMAGES,
    seconds: float = QUICK_SECONDS,
    labels: bool = True,
) -> Report:
    """Read the headers of at most `most` images, compare contents for at most `seconds`, and report problems.

    Without `labels`, nothing is said about classes.
    """
    sources = _by_name(splits)
    end = time.monotonic() + seconds
    order = draws(0, 0, "quick check").permutation(sum(map(len, sources.values()))).astype(np.int64)
    skipped = skipped_findings(find_skipped(splits[:3], most=most))
    return _report(survey_headers(sources, order, most, lambda: time.monotonic() > end), size, skipped, labels=labels)


def _by_name(splits: Splits) -> dict[str, Source]:
    named = {"train": splits.train, "val": splits.val, "test": splits.test}
    return {name: source for name, source in named.items() if source is not None}


def _report(
    surveyed: Survey, size: int, others: Sequence[Finding], faults: tuple[str, ...] = (), *, labels: bool = True
) -> Report:
    index, rows = SurveyIndex(surveyed), surveyed.rows
    images = sum(map(len, surveyed.sources.values()))
    fine = np.flatnonzero(rows["state"] == FINE)
    hashed = np.flatnonzero((rows["state"] == FINE) | (rows["state"] == COMPARED))
    unreadable = tuple(
        Unreadable(index.which(row), surveyed.faults[row]) for row in sorted(surveyed.faults, key=surveyed.indices.item)
    )
    duplicates = find_duplicates(index, hashed)
    facts = target_facts(surveyed.sources) if labels else None
    counts = {name: _count_classes(source) for name, source in surveyed.sources.items()}
    modes = _tally(rows["mode"][fine])
    findings = (
        *others,
        *unreadable_finding(unreadable, surveyed),
        *duplicate_findings(duplicates),
        *(_label_findings(counts, facts) if labels else ()),
        *flat_finding(index, fine),
        *size_findings(index, fine, size),
        *mode_finding(index, fine, modes),
    )
    short = np.minimum(rows["width"], rows["height"])[fine]
    return Report(
        images=images,
        checked=int((rows["state"] != COMPARED).sum()),
        compared=len(rows),
        decoded=surveyed.decoded,
        not_checked=_not_checked(surveyed, images),
        faults=faults,
        classes=tuple(counts["train"]),
        counts=counts,
        unreadable=unreadable,
        duplicates=duplicates if duplicates or len(rows) == images else None,
        findings=tuple(sorted(findings, key=lambda finding: not finding.serious)),
        formats=_tally(rows["format"][fine]),
        modes=modes,
        short_sides=_histogram(short),
        bytes=int(rows["bytes"].sum()),
        targets=facts,
        contents=_contents(index),
    )


def _contents(index: SurveyIndex) -> Contents:
    """Return the digests of the training and validation images that were read."""
    read = index.survey.rows["state"] != UNREAD
    digests, images = [], []
    for name in ("train", "val"):
        here = index.split == index.names.index(name) if name in index.names else np.zeros(len(read), bool)
        digests.append(np.sort(index.survey.rows["content"][here & read, 0]))
        images.append(len(index.survey.sources.get(name, ())) - int((here & ~read).sum()))
    return Contents(digests[0], digests[1], (images[0], images[1]))


def _not_checked(surveyed: Survey, images: int) -> tuple[str, ...]:
    """List the problems that a survey could not find."""
    rest = images - len(surveyed.rows)
    return (
        *(() if not rest else (f"duplicates among {rest:,} of the images",)),
        *(() if surveyed.decoded else ("corruption after the header of a file", "images of a single colour")),
        "near-duplicates: the same image cropped, resized or re-encoded",
    )


def _label_findings(counts: dict[str, dict[str, int]], facts: TargetFacts | None) -> list[Finding]:
    if facts is None:
        return class_findings(counts)
    if facts.kind == "masks":
        return [*label_findings(counts, "class", "classes"), *rare_pixels_finding(facts)]
    return label_findings(counts) if facts.kind == "labels" else []


def _count_classes(source: Source) -> dict[str, int]:
    """Count the images of each class or label, or with pixels of it, or of each range of numbers."""
    targets = targets_of(source)
    if targets is not None and targets.kind != "values":
        return count_labels(targets)
    labels = source.labels[source.labels >= 0]
    return dict(zip(source.classes, np.bincount(labels, minlength=len(source.classes)).tolist(), strict=True))


def _tally(words: NDArray[np.bytes_]) -> dict[str, int]:
    """Count words, most frequent first."""
    values, counts = np.unique(words, return_counts=True)
    return {values[place].decode(): int(counts[place]) for place in np.argsort(-counts, kind="stable")}


def _histogram(sides: NDArray[np.int32]) -> tuple[Bin, ...]:
    """Return the histogram of sides, without empty bins at the ends."""
    counts = np.bincount(np.searchsorted(SIDES, sides, side="right") - 1, minlength=len(SIDES)).tolist()
    bins = [Bin(low, high, count) for low, high, count in zip(SIDES, (*SIDES[1:], None), counts, strict=True)]
    filled = [place for place, count in enumerate(counts) if count]
    return tuple(bins[filled[0] : filled[-1] + 1]) if filled else ()


# ── unused files ──


class UnusedFiles(NamedTuple):
    """Files that are not used."""

    misnamed: list[str]
    """Images without an image suffix, each with its type and the name it should have."""
    outside: list[str]
    """Images outside of class folders."""
    others: list[str]
    """All other files."""
    unlisted: int = 0
    """Number of further files, which were not read."""


def find_skipped(sources: Iterable[Source | None], *, most: int | None = None) -> UnusedFiles:
    """Sniff the unused files among the images of some sources, at most `most` of them.

    Shards may hold several of them for each image.
    """
    unused = UnusedFiles([], [], [])
    looked = unlisted = 0
    for base in _bases(sources):
        if isinstance(base, Folder):
            unused.outside.extend(base.outside())
        there = len(base.listing.others if isinstance(base, Folder) else base.index.others)
        taken = there if most is None else min(there, most - looked)
        looked, unlisted = looked + taken, unlisted + there - taken
        for file in islice(base.skipped(), taken):
            kind = kind_of_skipped(file)
            if kind is not None:
                unused.misnamed.append(f"{file.name}: a {kind}; rename it to {_renamed(file, kind)}")
            else:
                unused.others.append(file.name)
    return unused._replace(unlisted=unlisted)


def skipped_findings(unused: UnusedFiles) -> list[Finding]:
    """Report unused files, and what to do about those that should be used."""
    findings = []
    if count := len(unused.misnamed):
        text = (
            f"{_files(count)} {'is an image' if count == 1 else 'are images'} by content but not by name, "
            f"and {'is' if count == 1 else 'are'} not used"
        )
        lines = tuple(unused.misnamed)
        advice = f"give {'it' if count == 1 else 'each'} the suffix of its content"
        findings.append(Finding("misnamed", count, f"{_files(count)} misnamed", text, advice, lines, serious=True))
    if count := len(unused.outside):
        images, are = ("image is", "is") if count == 1 else ("images are", "are")
        text = f"{count:,} {images} outside of class folders and {are} not used"
        advice = f"move {them(count)} into the {'folder of its class' if count == 1 else 'folders of their classes'}"
        lines = tuple(unused.outside)
        findings.append(
            Finding("outside", count, f"{count:,} outside of class folders", text, advice, lines, serious=True)
        )
    if count := len(unused.others) + unused.unlisted:
        text = f"{_files(count)} {'was' if count == 1 else 'were'} skipped: no image suffix"
        endings = ", ".join(f".{ending}" for ending in ENDINGS.values())
        advice = (
            f"nothing, unless {'it is an image' if count == 1 else 'they are images'}: image files end in {endings}"
        )
        findings.append(Finding("skipped", count, f"{_files(count)} skipped", text, advice, tuple(unused.others)))
    return findings


def kind_of_skipped(file: SkippedFile) -> str | None:
    """Return the kind of image that a skipped file is by its content, or None."""
    return None if file.size == 0 else sniff_file(file.path, file.start or 0, HEAD if file.size is None else file.size)


def _bases(sources: Iterable[Source | None]) -> Iterator[Folder | Shards]:
    """Yield every folder and set of shards that sources come from, once."""
    seen: set[int] = set()
    waiting: list[object] = list(sources)
    while waiting:
        source = waiting.pop(0)
        if isinstance(source, Folder | Shards):
            if id(source) not in seen:
                seen.add(id(source))
                yield source
        else:
            waiting += [getattr(source, "base", None)] if hasattr(source, "base") else getattr(source, "sources", ())


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _renamed(file: SkippedFile, kind: str) -> str:
    stem = os.path.splitext(os.path.basename(file.name))[0]
    if file.start is not None and "." in stem:
        return f"{stem.replace('.', '_')}.{ENDINGS[kind]} (in a shard the suffix starts at the first dot)"
    return f"{stem}.{ENDINGS[kind]}"
