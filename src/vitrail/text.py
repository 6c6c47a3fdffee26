"""Text as people read it: numbers, paths and percentages, safe for terminals."""

import math
import os
import re

_UNSAFE = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_UNSAFE}]"), re.compile(f"[\n\t{_UNSAFE}]")

_QUERY = re.compile(r"^(https?://[^?]*)\?.+", re.IGNORECASE | re.DOTALL)
"""A URL with a query, which may be a signature that nobody else should see."""
_LOGIN = re.compile(r"^(https?://)[^/?#]*@", re.IGNORECASE)
"""A URL with a user's name and password."""


def printable(text: str, *, line: bool = False) -> str:
    r"""Escape control characters: terminal escape sequences and bidirectional overrides.

    Line breaks and tabs are kept, unless `line` is set. Escapes are written as in JSON, so JSON stays valid.

    >>> print(printable("cat\x1b]0;owned\x07"))
    cat\u001b]0;owned\u0007
    """
    return (_IN_LINE if line else _IN_TEXT).sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable_path(path: bytes | str) -> str:
    """Return a path in printable form, on one line, whatever bytes it contains.

    >>> printable_path(b"caf\\xe9/new\\nline.jpg")
    'caf�/new\\\\nline.jpg'
    >>> printable_path("https://host/cats.tar?signature=secret")
    'https://host/cats.tar?…'
    >>> printable_path("https://me:secret@host/cats.tar")
    'https://…@host/cats.tar'
    """
    text = _LOGIN.sub(r"\1…@", _QUERY.sub(r"\1?…", os.fsencode(path).decode("utf-8", "replace")))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def short_repr(value: object, most: int = 200) -> str:
    """Return the repr of a value, truncated."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error message, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def shorten_path(path: str, most: int = 56) -> str:
    """Shorten a path: keep the whole file name if possible, and as many parent folders as fit.

    >>> shorten_path("/home/someone/photos/of/many/kinds/cat/IMG_1118.JPG", 24)
    '…/kinds/cat/IMG_1118.JPG'
    >>> shorten_path("photos/a-name-that-is-far-too-long-to-be-shown.jpg", 25)
    '…/a-name-that…e-shown.jpg'
    """
    if len(path) <= most:
        return path
    folders, _, name = path.rpartition("/")
    if not folders or len(name) > most - 2:
        return f"…/{shorten(name, most - 2)}" if folders else shorten(name, most)
    kept = name
    for folder in reversed(folders.split("/")):
        if not folder or len(kept) + len(folder) + 3 > most:
            break
        kept = f"{folder}/{kept}"
    return f"…/{kept}"


def shorten(text: str, most: int = 60) -> str:
    """Shorten a text in its middle, where file names differ least."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def plural(count: int, one: str, more: str = "") -> str:
    """Format a count with its noun: 1 image, 2 images."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def ended(text: str) -> str:
    """Add a full stop unless the sentence already ends.

    >>> ended("it is gone"), ended("was it copied whole?")
    ('it is gone.', 'was it copied whole?')
    """
    return text if text.endswith((".", "?", "!")) else f"{text}."


def percent(fraction: float) -> str:
    """Format a fraction as a percentage with one decimal; only 1 gives 100.0."""
    text = f"{100 * fraction:.1f}"
    return "99.9" if text == "100.0" and fraction < 1 else text


def as_percent(value: float | None) -> str:
    """Format a fraction as a percentage; a dash for None."""
    return "–" if value is None else f"{percent(value)}%"


def rounded(value: float) -> float:
    """Return a number with the six digits that float32 has, for JSON."""
    return float(f"{value:.6g}")


def number(value: float, scale: float | None = None) -> str:
    """Format a number with about four significant digits, or as many decimals as a number of size `scale` has.

    >>> number(0.117), number(2.3026), number(0.00042), number(253412.7), number(-3.1, scale=2000)
    ('0.117', '2.303', '0.00042', '253,413', '-3')
    """
    size = abs(value if scale is None else scale)
    if not math.isfinite(value) or 0 < size < 1e-6:
        return f"{value:.2g}"
    power = math.floor(math.log10(size)) if size else 0
    return f"{value:,.{max(0, 3 - max(0, power)) if size >= 0.01 or not size else 1 - power}f}"


def isolated(name: str) -> str:
    """Return a name for a sentence, so that a right-to-left name does not reorder the text around it."""
    return "\u2068" + re.sub("[\u2066-\u2069]", "", name) + "\u2069"


def capitalised(text: str) -> str:
    """Return text with a capital first letter; the rest stays as it is, and so does a name such as kNN.

    >>> capitalised("macro-F1"), capitalised("kNN accuracy")
    ('Macro-F1', 'kNN accuracy')
    """
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


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


def byte_size(count: float) -> str:
    """Format a number of bytes with three digits.

    >>> byte_size(812), byte_size(412_345_678), byte_size(3.42e9)
    ('812 bytes', '412 MB', '3.42 GB')
    """
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
