"""Match the targets of a dataset to a model's outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitrail.data.sources.source import Source, Wrapped
from vitrail.data.sources.targets import Targets, targets_of
from vitrail.errors import DataError, suggest

WHAT = {"labels": "several labels per image", "values": "numbers", "masks": "masks"}


@dataclass(frozen=True, eq=False)
class Retargeted(Wrapped):
    """A source with other targets."""

    targets: Targets


def match_labels(source: Source, names: Sequence[str] | None, outputs: int, *, by_number: bool = False) -> Source:
    """Return the source with a column of its targets for each label of a model, matched by name.

    A label of the model that the data does not have is on none of its images. Without `names`, or `by_number`, the
    labels are matched by their order.
    """
    targets = _known_targets(source, "labels")
    if names is None or by_number:
        return _by_order(source, targets, names, outputs, "labels")
    _check_names(targets.names, names, "label")
    values = np.zeros((len(targets), len(names)), np.uint8)
    values[:, [names.index(name) for name in targets.names]] = targets.values
    return Retargeted(source, replace(targets, names=tuple(names), values=values))


def match_values(source: Source, names: Sequence[str] | None, outputs: int, *, by_number: bool = False) -> Source:
    """Return the source with the columns that a model predicts, matched by name; `by_number`: by their order."""
    targets = _known_targets(source, "values")
    if names is None or by_number:
        return _by_order(source, targets, names, outputs, "columns")
    _check_names(names, targets.names, "column", model_has=True)
    values = targets.values[:, [targets.names.index(name) for name in names]]
    return Retargeted(source, replace(targets, names=tuple(names), values=values))


def _known_targets(source: Source, kind: str) -> Targets:
    """Return the targets; raise unless they are of the kind that the model predicts, and known for every image."""
    targets = targets_of(source)
    if targets is None or targets.kind != kind:
        found = "one class per image" if targets is None else WHAT[targets.kind]
        raise DataError(
            f"the model predicts {WHAT[kind]}, but the data has {found}; give a manifest with the columns that the "
            "model was trained on, or use vitrail predict"
        )
    unknown = np.flatnonzero(source.labels < 0 if kind == "labels" else np.isnan(targets.values).any(axis=1))
    if len(unknown):
        more = f" and {len(unknown) - 1:,} more have" if len(unknown) > 1 else " has"
        raise DataError(
            f"{source.name(int(unknown[0]))}{more} no {'labels' if kind == 'labels' else 'value'}, so predictions "
            "cannot be evaluated; add it to the manifest, or use vitrail predict"
        )
    return targets


def _by_order(source: Source, targets: Targets, names: Sequence[str] | None, outputs: int, what: str) -> Source:
    if len(targets.names) != outputs:
        raise DataError(
            f"the data has {len(targets.names):,} {what} and the model {outputs:,}, so they cannot be matched by "
            f"index; use data with the model's {what}"
        )
    return source if names is None else Retargeted(source, replace(targets, names=tuple(names)))


def _check_names(wanted: Sequence[str], known: Sequence[str], what: str, *, model_has: bool = False) -> None:
    """Raise for a name that only one side has."""
    strange = [name for name in wanted if name not in known]
    if not strange:
        return
    more = f" (and {len(strange) - 1:,} more)" if len(strange) > 1 else ""
    listed = ", ".join(map(repr, known[:3])) + (", …" if len(known) > 3 else "")
    one, other = ("the model predicts", "the data does not have") if model_has else ("the data has", "the model lacks")
    raise DataError(
        f"{one} the {what} {strange[0]!r}{more}, which {other}; {'its' if not model_has else 'the data has the'} "
        f"{what}s{' are' if not model_has else ''} {listed}{suggest(strange[0], known)}"
    )
