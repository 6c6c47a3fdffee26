"""Formatting of numbers and names in reports."""

from vitrail.evaluation import percent

Interval = tuple[float, float]


def as_percent(value: float | None) -> str:
    """Format a fraction as a percentage; a dash for None."""
    return "–" if value is None else f"{percent(value)}%"


def span(interval: Interval) -> str:
    """Format an interval of fractions as percentages."""
    return f"{percent(interval[0])}–{percent(interval[1])}%"


def loss_span(interval: Interval) -> str:
    """Format an interval of losses."""
    return f"{interval[0]:.3f}–{interval[1]:.3f}"


def points(difference: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    rounded = round(100 * difference, 1)
    return f"{rounded:+.1f}".replace("-", "\N{MINUS SIGN}") if rounded else "0.0"


def plural(count: int, one: str, more: str = "") -> str:
    """Format a count with its noun: 1 image, 2 images."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def ended(text: str) -> str:
    """Add a full stop unless the sentence already ends.

    >>> ended("it is gone"), ended("was it copied whole?")
    ('it is gone.', 'was it copied whole?')
    """
    return text if text.endswith((".", "?", "!")) else f"{text}."


def file_name(path: str, most: int = 56) -> str:
    """Shorten a path: keep the whole file name if possible, and as many parent folders as fit.

    >>> file_name("/home/someone/photos/of/many/kinds/cat/IMG_1118.JPG", 24)
    '…/kinds/cat/IMG_1118.JPG'
    >>> file_name("photos/a-name-that-is-far-too-long-to-be-shown.jpg", 25)
    '…/a-name-that…e-shown.jpg'
    """
    if len(path) <= most:
        return path
    folders, _, name = path.rpartition("/")
    if not folders or len(name) > most - 2:
        return f"…/{cut(name, most - 2)}" if folders else cut(name, most)
    kept = name
    for folder in reversed(folders.split("/")):
        if not folder or len(kept) + len(folder) + 3 > most:
            break
        kept = f"{folder}/{kept}"
    return f"…/{kept}"


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(8.4), duration(95), duration(7300)
    ('8.4 s', '1 min 35 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def cut(text: str, most: int = 60) -> str:
    """Shorten a text in its middle, where file names differ least."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
