"""Survey rows: what is known about an image, as a row of a structured array, and the cache of such rows on disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.index_files import load_index, save_index

SurveyRows = NDArray[Any]
ROW = np.dtype(
    [
        ("state", "u1"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("bytes", "<i8"),
        ("content", "<u8", (2,)),
        ("flat", "?"),
        ("format", "S8"),
        ("mode", "S16"),
    ]
)
"""What is known about an image. `content` is a hash of the file, or of the pixels if it has no file; `flat` is set
for an image of a single colour."""
FINE, CORRUPT, UNREAD, PENDING, COMPARED = range(5)
"""States: decodable, or at least with a valid header; read but not decodable; not readable; not checked yet; content
hashed but not checked."""
IN_MEMORY = b"array"
"""The format of images without a file."""


class PreviousSurvey(NamedTuple):
    """The rows of an earlier survey, sorted by the first half of the content hashes."""

    contents: NDArray[np.uint64]
    rows: SurveyRows
    faults: dict[int, str]

    def find(self, content: tuple[int, int]) -> tuple[tuple[Any, ...], str | None] | None:
        """Return the row of a content hash, and why the image is unusable."""
        at = int(np.searchsorted(self.contents[:, 0], np.uint64(content[0])))
        while at < len(self.contents) and self.contents[at, 0] == content[0]:
            if self.contents[at, 1] == content[1]:
                row = self.rows[at].item()
                return row, self.faults.get(at, "it cannot be decoded") if row[0] == CORRUPT else None
            at += 1
        return None


NO_PREVIOUS_SURVEY = PreviousSurvey(np.zeros((0, 2), np.uint64), np.zeros(0, ROW), {})


def load_survey(path: Path) -> PreviousSurvey:
    """Load the rows of an earlier survey; none if the file is corrupt or of another version."""
    arrays = load_index(path, ("rows", "faults"))
    if arrays is None or arrays["rows"].dtype != ROW or arrays["rows"].ndim != 1:
        return NO_PREVIOUS_SURVEY
    try:
        faults = {int(row): str(reason) for row, reason in json.loads(arrays["faults"].tobytes()).items()}
    except (ValueError, AttributeError):
        return NO_PREVIOUS_SURVEY
    order = np.argsort(arrays["rows"]["content"][:, 0], kind="stable")
    places = {int(row): place for place, row in enumerate(order.tolist())} if faults else {}
    rows = arrays["rows"][order]
    return PreviousSurvey(
        rows["content"].copy(), rows, {places[row]: text for row, text in faults.items() if row in places}
    )


def save_survey(path: Path, rows: SurveyRows, faults: Mapping[int, str], previous: PreviousSurvey) -> None:
    """Save rows for `load_survey`, unless all are saved already; unreadable files have no content and are not saved."""
    states = rows["state"]
    kept = ((states == FINE) | (states == CORRUPT)) & (rows["format"] != IN_MEMORY)
    chosen = rows[kept]
    if not len(chosen) or ((states == PENDING).any() and len(chosen) <= len(previous.rows)):  # stopped early
        return
    if len(chosen) != len(previous.rows) or not np.isin(chosen["content"][:, 0], previous.contents[:, 0]).all():
        numbers = np.cumsum(kept) - 1
        by_number = {int(numbers[row]): reason for row, reason in faults.items() if kept[row]}
        save_index(path, {"rows": chosen, "faults": np.frombuffer(json.dumps(by_number).encode(), np.uint8)})
