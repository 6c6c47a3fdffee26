"""Text as people read it: numbers, paths and percentages, safe for terminals."""

import re

_UNSAFE = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_UNSAFE}]"), re.compile(f"[\n\t{_UNSAFE}]")


def printable(text: str, *, line: bool = False) -> str:
    r"""Escape control characters: terminal escape sequences and bidirectional overrides.

    Line breaks and tabs are kept, unless `line` is set. Escapes are written as in JSON, so JSON stays valid.

    >>> print(printable("cat\x1b]0;owned\x07"))
    cat\u001b]0;owned\u0007
    """
    return (_IN_LINE if line else _IN_TEXT).sub(lambda match: f"\\u{ord(match[0]):04x}", text)
