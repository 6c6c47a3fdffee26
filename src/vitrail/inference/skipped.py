"""Files without an image suffix that a command skips: counted, and the first ones named.

A folder may have any number of them, so only the first are named, and only the first are sniffed.
"""

import os
from dataclasses import dataclass, field

from vitrail.data.image_files import ENDINGS, HEAD, sniff_file
from vitrail.text import printable_path

NAMED = 5
SNIFFED = 1000


@dataclass
class SkippedFiles:
    """The files skipped so far."""

    count: int = 0
    images: int = 0
    """How many of them are images by content."""
    named: list[str] = field(default_factory=list)
    """The first that are not images by content either."""
    misnamed: list[str] = field(default_factory=list)
    """The first images, each with its type and the name it should have."""

    def add(self, name: bytes, path: bytes, start: int = 0, size: int = HEAD) -> None:
        """Count a file called `name` at `path`, or inside it from `start` on."""
        self.count += 1
        kind = sniff_file(path, start, size) if self.count <= SNIFFED else None
        if kind is None:
            self.named += [printable_path(name)] if len(self.named) < NAMED else []
            return
        self.images += 1
        if len(self.misnamed) < NAMED:
            stem = printable_path(os.path.splitext(os.path.basename(name))[0])
            self.misnamed.append(f"{printable_path(name)}: a {kind}; rename it to {stem}.{ENDINGS[kind]}")

    def messages(self) -> list[str]:
        """Describe what was skipped, one message per kind."""
        lines = []
        others = self.count - self.images
        if self.images:
            what = "1 file is an image" if self.images == 1 else f"{self.images:,} files are images"
            listed = _listed(self.misnamed, self.images, "; ")
            lines.append(f"{what} by content but not by name; skipped ({listed})")
        if others:
            what = "1 file was" if others == 1 else f"{others:,} files were"
            lines.append(f"{what} skipped: no image suffix ({_listed(self.named, others, ', ')})")
        return lines


def _listed(names: list[str], count: int, joint: str) -> str:
    return joint.join(names) + (f"{joint}and {count - len(names):,} more" if count > len(names) else "")
