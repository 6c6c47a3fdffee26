"""Collect all faults of a dataset in one pass, so that fixing them does not take one run per fault."""

from collections.abc import Sequence

from vitrail.errors import DataError

Faults = list[str]
"""One sentence per fault. If a list is passed when opening data, unusable items are skipped and named in the list;
otherwise an error names all of them."""
MAX_LISTED = 10
"""Number of faults in an error message; `vitrail check` lists them all."""


def report_faults(messages: Sequence[str], place: str, faults: Faults | None, *, listed: int = MAX_LISTED) -> None:
    """Add faults to the caller's list, or raise one error that names the first `listed` of them."""
    if faults is not None:
        faults.extend(messages)
    elif len(messages) == 1:
        raise DataError(messages[0])
    elif messages:
        texts = ". ".join(f"({number}) {text}" for number, text in enumerate(messages[:listed], start=1))
        more = f". Run `vitrail check` to list {len(messages) - listed:,} more" if len(messages) > listed else ""
        raise DataError(f"{place} has {len(messages):,} faults: {texts}{more}")
