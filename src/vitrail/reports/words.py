"""How a report says numbers."""

from vitrail.evaluation import percent

Interval = tuple[float, float]


def share(value: float | None) -> str:
    """Write a share as a percentage; a dash where there is none."""
    return "–" if value is None else f"{percent(value)}%"


def span(interval: Interval) -> str:
    """Write an interval of shares."""
    return f"{percent(interval[0])}–{percent(interval[1])}%"


def loss_span(interval: Interval) -> str:
    """Write an interval of losses."""
    return f"{interval[0]:.3f}–{interval[1]:.3f}"


def points(difference: float) -> str:
    """Write a difference of shares in percentage points, with its sign."""
    rounded = round(100 * difference, 1)
    return f"{rounded:+.1f}".replace("-", "\N{MINUS SIGN}") if rounded else "0.0"


def many(count: int, one: str, more: str = "") -> str:
    """Write a count with its noun: 1 picture, 2 pictures."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def ended(text: str) -> str:
    """End a sentence, if it has not ended.

    >>> ended("it is gone"), ended("was it copied whole?")
    ('it is gone.', 'was it copied whole?')
    """
    return text if text.endswith((".", "?", "!")) else f"{text}."


def cut(text: str, most: int = 60) -> str:
    """Cut a text short, in its middle, where names of files differ least."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
