"""stub, replaced by the branch masks"""

from vitrail.data.sources.source import Source

IGNORED_PIXEL = 255


def match_masks(source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
    return source
