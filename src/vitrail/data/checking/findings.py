"""Findings: the problems a dataset can have, each detected in a survey of its images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.checking.survey import Survey
from vitrail.data.checking.target_facts import TargetFacts
from vitrail.data.sources.targets import targets_of
from vitrail.text import plural

RowIndices = NDArray[np.int64]
"""Row indices of a survey."""
UNBALANCED = 10
"""Largest acceptable ratio between the largest and the smallest class."""
TINY_SIDE = 32
"""Images with a shorter side below this, or below a quarter of the model's input, are tiny."""
RARE_SHARE = 0.001
"""Classes of pixels with a smaller fraction of all labelled pixels are rare."""
HUGE_PIXELS = 20_000_000
LONG_RATIO = 4
"""Largest acceptable ratio of the longer to the shorter side."""

FindingKind = Literal[
    "faults", "unreadable", "misnamed", "outside", "conflicting", "across", "missing", "within", "unbalanced", "flat",
    "tiny", "huge", "long", "modes", "skipped",
]  # fmt: skip

CopiesKind = Literal["conflicting", "across", "within"]


class ImageRef(NamedTuple):
    """An image of the dataset."""

    name: str
    split: str
    label: str | None
    """Its class name, or its labels or numbers."""

    def __str__(self) -> str:
        return f"{self.name} ({self.split}, {self.label})"


class Unreadable(NamedTuple):
    """An unusable image, and why."""

    image: ImageRef
    reason: str


class DuplicateGroup(NamedTuple):
    """Images with the same content."""

    kind: CopiesKind
    """They have different labels (the worst), are in different splits, or in the same split."""
    images: tuple[ImageRef, ...]


@dataclass(frozen=True)
class Finding:
    """A problem, and what to do about it."""

    kind: FindingKind
    count: int
    brief: str
    """For a list: "3 cannot be read"."""
    text: str
    advice: str
    details: tuple[str, ...] = ()
    """The affected images or classes, one line each."""
    serious: bool = False
    """Whether ignoring it would make scores wrong or lose images."""


class SurveyIndex:
    """Maps the rows of a survey to images."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.names, self.sources = list(survey.sources), list(survey.sources.values())
        self.starts = np.cumsum([0, *map(len, self.sources)])
        self.split = np.searchsorted(self.starts, survey.indices, side="right") - 1
        labels = np.concatenate([np.asarray(source.labels) for source in self.sources])
        self.label = labels[survey.indices]
        self.classes = self.sources[0].classes
        self.targets = [targets_of(source) for source in self.sources]

    def which(self, row: int) -> ImageRef:
        """Return the image of a row."""
        split, label = int(self.split[row]), int(self.label[row])
        index, targets = int(self.survey.indices[row] - self.starts[split]), self.targets[split]
        text = None if label < 0 else self.classes[label] if targets is None else targets.text(index)
        return ImageRef(self.sources[split].name(index), self.names[split], text)

    def labelled_alike(self, rows: RowIndices) -> bool:
        """Whether images have the same label, or the same targets."""
        alike = set(self.label[rows].tolist())
        return len(alike) < 2 if not any(self.targets) else len({self._target(row) for row in rows.tolist()}) < 2

    def _target(self, row: int) -> bytes:
        split = int(self.split[row])
        targets, index = self.targets[split], int(self.survey.indices[row] - self.starts[split])
        return b"" if targets is None or self.label[row] < 0 else targets.values[index].tobytes()


def find_duplicates(index: SurveyIndex, hashed: RowIndices) -> tuple[DuplicateGroup, ...]:
    """Group images with the same content, among those whose content is known; the worst groups first."""
    content = index.survey.rows["content"][hashed]
    order = np.lexsort((content[:, 1], content[:, 0]))
    same = (content[order][1:] == content[order][:-1]).all(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    groups: dict[CopiesKind, list[DuplicateGroup]] = {"conflicting": [], "across": [], "within": []}
    for start, end in edges.reshape(-1, 2).tolist():
        rows = hashed[order[start : end + 1]]
        rows = rows[np.argsort(index.survey.indices[rows])]
        kind: CopiesKind = "within"
        if not index.labelled_alike(rows):
            kind = "conflicting"
        elif len(set(index.split[rows].tolist())) > 1:
            kind = "across"
        groups[kind].append(DuplicateGroup(kind, tuple(map(index.which, rows.tolist()))))
    return tuple(copies for group in groups.values() for copies in sorted(group, key=lambda c: c.images[0].name))


def fault_finding(faults: Sequence[str]) -> list[Finding]:
    """Report why parts of the data could not be opened."""
    if not faults:
        return []
    count = len(faults)
    what = "1 fault" if count == 1 else f"{count:,} faults"
    text = f"{what} in the layout of the data; training would stop"
    return [Finding("faults", count, what, text, "fix the listed faults", tuple(faults), serious=True)]


def unreadable_finding(unreadable: tuple[Unreadable, ...], survey: Survey) -> list[Finding]:
    """Report unreadable images."""
    if not unreadable:
        return []
    count = len(unreadable)
    of = "" if survey.decoded else f" of the {len(survey.rows):,} checked"
    details = tuple(f"{bad.image.name}: {bad.reason}" for bad in unreadable)
    return [
        Finding(
            "unreadable", count, f"{count:,} cannot be read", f"{count_images(count)}{of} cannot be read",
            f"fix or remove {them(count)}; training would replace {them(count)} by "
            f"{'another image' if count == 1 else 'other images'}, or stop with --set data.bad_files=refuse",
            details, serious=True,
        )
    ]  # fmt: skip


_COPIES: dict[CopiesKind, tuple[str, str]] = {
    "conflicting": ("with different labels", "decide which label is correct, and keep only that image"),
    "across": ("across splits", "keep one of each; accuracy on images seen in training is too optimistic"),
    "within": ("within a split", "keep one of each, unless they should count more"),
}


def duplicate_findings(duplicates: tuple[DuplicateGroup, ...]) -> list[Finding]:
    """Report how many images are redundant, by kind of duplicate."""
    findings: list[Finding] = []
    for kind, (where, advice) in _COPIES.items():
        groups = [copies.images for copies in duplicates if copies.kind == kind]
        count = sum(len(images) - 1 for images in groups)
        if count:
            what = f"{count:,} duplicate{'s' * (count > 1)} {where}"
            details = tuple(" = ".join(map(str, images)) for images in groups)
            findings.append(Finding(kind, count, what, what, advice, details, serious=kind != "within"))
    return findings


def class_findings(counts: dict[str, dict[str, int]]) -> list[Finding]:
    """Report classes missing from a split, and class imbalance. `counts` is by split and class."""
    missing = tuple(f"{label}: none in {split}" for split in counts for label, n in counts[split].items() if not n)
    findings = []
    if missing:
        classes = f"{len({line.rsplit(':', 1)[0] for line in missing}):,}"
        what = f"{classes} class{'es are' if classes != '1' else ' is'} missing from a split"
        advice = "add images; a class missing from a split is not trained, or not evaluated"
        findings.append(Finding("missing", len(missing), what, what, advice, missing, serious=True))
    some = {label: n for label, n in counts["train"].items() if n}
    if some and (ratio := max(some.values()) / min(some.values())) > UNBALANCED:
        most, fewest = max(some, key=lambda label: some[label]), min(some, key=lambda label: some[label])
        text = (
            f"class {most!r} has {ratio:,.0f} times as many training images as class {fewest!r}, "
            f"{some[most]:,} to {some[fewest]:,}"
        )
        advice = (
            "add images of the small classes, or sample every class equally often with --set data.balance=true; "
            "check the accuracy of each class"
        )
        findings.append(Finding("unbalanced", 1, f"classes unbalanced {ratio:,.0f}:1", text, advice))
    return findings


def label_findings(counts: dict[str, dict[str, int]], one: str = "label", more: str = "labels") -> list[Finding]:
    """Report labels, or classes of pixels, that no image of a split has. `counts` is by split and label."""
    missing = tuple(f"{label}: none in {split}" for split in counts for label, n in counts[split].items() if not n)
    if not missing:
        return []
    labels = len({line.rsplit(":", 1)[0] for line in missing})
    what = f"{labels:,} {f'{more} are' if labels > 1 else f'{one} is'} missing from a split"
    advice = f"add images; a {one} missing from a split is not trained, or not evaluated"
    serious = not all(counts["train"].values())
    return [Finding("missing", len(missing), what, what, advice, missing, serious=serious)]


def rare_pixels_finding(facts: TargetFacts) -> list[Finding]:
    """Report classes with very few pixels; those without any are missing."""
    rare = [one for one in facts.pixels if 0 < one.fraction < RARE_SHARE]
    if not rare:
        return []
    classes = plural(len(rare), "class", "classes")
    text = f"{classes} {'has' if len(rare) == 1 else 'have'} less than {100 * RARE_SHARE:g}% of the labelled pixels"
    details = tuple(f"{one.name}: {100 * one.fraction:.2g}%, in {plural(one.images, 'image')}" for one in rare)
    advice = "add images with more of them; check the IoU of each class, since pixel accuracy hardly counts them"
    return [Finding("unbalanced", len(rare), f"{classes} rare", text, advice, details)]


def flat_finding(index: SurveyIndex, fine: RowIndices) -> list[Finding]:
    """Report images of a single colour, usually all black."""
    flat = fine[index.survey.rows["flat"][fine]]
    if not len(flat):
        return []
    count = len(flat)
    text = f"{count_images(count)} {'has' if count == 1 else 'have'} only a single colour"
    details = tuple(str(index.which(row)) for row in flat.tolist())
    advice = f"remove {them(count)}, or export {them(count)} again"
    return [Finding("flat", count, f"{count:,} of a single colour", text, advice, details)]


def _size_advice(size: int, short: NDArray[np.int64], count: int) -> dict[FindingKind, str]:
    smaller = max(16, int(np.median(short)) // 16 * 16) if len(short) else size
    larger, cached = "a larger one" if count == 1 else "larger ones", max(32, size * 8 // 7)
    return {
        "tiny": f"use {larger}, or a model for smaller images: --set model.image_size={smaller}",
        "huge": f"downscale {them(count)} once, or let training do it with --set data.cache={cached}",
        "long": f"crop {them(count)}, or keep {them(count)} whole with --set preprocess.resize=contain",
    }


def size_findings(index: SurveyIndex, fine: RowIndices, size: int) -> list[Finding]:
    """Report images that are too small for a model with `size` input pixels, too large, or too elongated."""
    rows = index.survey.rows
    width, height = rows["width"][fine].astype(np.int64), rows["height"][fine].astype(np.int64)
    short, long, least = np.minimum(width, height), np.maximum(width, height), max(TINY_SIDE, size // 4)
    kinds: tuple[tuple[FindingKind, NDArray[np.bool_], str, str], ...] = (
        ("tiny", short < least, "tiny", f"a shorter side below {least} pixels"),
        ("huge", width * height > HUGE_PIXELS, "huge", f"more than {HUGE_PIXELS / 1e6:g} megapixels"),
        ("long", long > LONG_RATIO * short, "very long", f"sides of more than {LONG_RATIO}:1"),
    )
    findings = []
    for kind, hit, brief, what in kinds:
        if count := int(hit.sum()):
            chosen = fine[hit].tolist()
            details = tuple(f"{index.which(row).name}: {rows['width'][row]}×{rows['height'][row]}" for row in chosen)
            number = "all" if count == len(fine) else f"{count:,}"
            text = f"{count_images(count)} {'has' if count == 1 else 'have'} {what}"
            advice = _size_advice(size, short[short < least], count)[kind]
            findings.append(Finding(kind, count, f"{number} {brief}", text, advice, details))
    return findings


def mode_finding(index: SurveyIndex, fine: RowIndices, modes: dict[str, int]) -> list[Finding]:
    """Report images of another mode than most. `modes` has the most frequent first."""
    if len(modes) < 2:
        return []
    usual, *others = modes
    words = index.survey.rows["mode"]
    details = tuple(
        f"{index.which(row).name}: {words[row].decode()}" for row in fine[words[fine] != usual.encode()].tolist()
    )
    count = sum(modes[word] for word in others)
    listed = ", ".join(f"{modes[word]:,} {word}" for word in others)
    text = f"{count_images(count)} of another mode than the {modes[usual]:,} {usual}: {listed}"
    advice = "all are converted to one mode; make sure that no class differs from the others only by its mode"
    return [Finding("modes", count, "mixed modes", text, advice, details)]


def count_images(count: int) -> str:
    """Return "1 image" or "12,000 images"."""
    return "1 image" if count == 1 else f"{count:,} images"


def them(count: int) -> str:
    """Return the pronoun for `count` images or files."""
    return "it" if count == 1 else "them"
