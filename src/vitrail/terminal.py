"""Text from files on a terminal: class names, file names and messages, in which anybody may have written anything."""

import re

_UNSAFE = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_UNSAFE}]"), re.compile(f"[\n\t{_UNSAFE}]")


def printable(text: str, *, line: bool = False) -> str:
    r"""Write out what would command a terminal instead of being seen: escape sequences, changes of direction.

    Line breaks and tabs stay, unless it is to be one `line`. The form is JSON's, so that JSON stays what it is.

    >>> print(printable("cat\x1b]0;owned\x07"))
    cat\u001b]0;owned\u0007
    """
    return (_IN_LINE if line else _IN_TEXT).sub(lambda found: f"\\u{ord(found[0]):04x}", text)
