"""Everything that is wrong with data, found in one pass: whoever mends it should not need a run for each fault."""

from collections.abc import Sequence

from vitrail.errors import DataError

Faults = list[str]
"""What is wrong, a sentence for each. Whoever opens data with such a list gets what can be used, and the rest is named
in the list; without one, the first opening raises an error that names all of it."""
SAID = 10
"""How many faults a message names; `vitrail check` lists them all."""


def settle(found: Sequence[str], place: str, faults: Faults | None, *, said: int = SAID) -> None:
    """Put what was found into the caller's list, or raise one error about all of it, in which so many are `said`."""
    if faults is not None:
        faults.extend(found)
    elif len(found) == 1:
        raise DataError(found[0])
    elif found:
        listed = ". ".join(f"({number}) {text}" for number, text in enumerate(found[:said], start=1))
        more = f". {len(found) - said:,} more are listed by `vitrail check`" if len(found) > said else ""
        raise DataError(f"{place} has {len(found):,} faults: {listed}{more}")
