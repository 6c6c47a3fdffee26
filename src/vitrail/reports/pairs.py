"""Pair the predictions of two runs of one task for the same images."""

from vitrail.reports.label_pair import LabelPair
from vitrail.reports.mask_pair import MaskPair
from vitrail.reports.pair import ClassPair, Pair
from vitrail.reports.run_record import Record
from vitrail.reports.test_predictions import (
    ClassPredictions,
    LabelPredictions,
    MaskPredictions,
    StoredPredictions,
    ValuePredictions,
    read_predictions,
)
from vitrail.reports.value_pair import ValuePair


def pair_runs(one: Record, other: Record) -> tuple[Pair | None, str]:
    """Return the predictions of two runs for the same images, or the reason why they cannot be paired."""
    first, why = read_predictions(one)
    second, why_not = read_predictions(other) if first is not None else (None, "")
    if first is None or second is None:
        return None, why or why_not
    if not first.same_images(second):
        return None, _why_not_the_same(first, second)
    if isinstance(first, ClassPredictions) and isinstance(second, ClassPredictions):
        return ClassPair(first, second), ""
    if isinstance(first, LabelPredictions) and isinstance(second, LabelPredictions):
        return LabelPair(first, second), ""
    if isinstance(first, ValuePredictions) and isinstance(second, ValuePredictions):
        return ValuePair(first, second), ""
    if isinstance(first, MaskPredictions) and isinstance(second, MaskPredictions):
        return MaskPair(first, second, other.folder), ""
    return None, "The runs have different tasks."


def evaluated_on_same_images(one: Record, other: Record) -> bool:
    """Whether two runs were evaluated on the same images, by their digests or else by their recorded names."""
    first, second = read_predictions(one)[0], read_predictions(other)[0]
    if first is not None and second is not None:
        return first.same_images(second)
    there, here = (_recorded_names(run) for run in (one, other))
    return bool(there) and there == here and one.data == other.data


def _recorded_names(run: Record) -> list[str]:
    names = (run.split or {}).get("names", {})
    return list(names.get("test") or names.get("val") or ()) if isinstance(names, dict) else []


def _why_not_the_same(first: StoredPredictions, second: StoredPredictions) -> str:
    both = (first, second)
    if first.digests == second.digests and all(isinstance(one, ValuePredictions) for one in both):
        return "The two runs were evaluated on the same images, but predict other columns or have other true values."
    if first.digests == second.digests and all(isinstance(one, MaskPredictions) for one in both):
        return (
            "The two runs were evaluated on the same images, but their masks differ. Masks are compared as the models "
            "see them, resized and cropped."
        )
    if first.digests == second.digests:
        return "The two runs were evaluated on the same images, but with different labels."
    return (
        "The two runs were evaluated on different images, so they cannot be compared image by image. Runs with the "
        "same data and seed have the same test images."
    )
