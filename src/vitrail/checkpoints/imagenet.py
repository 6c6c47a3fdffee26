"""The names of ImageNet's 1,000 classes, for a head of 1,000 outputs of which nothing better is known."""

from importlib import resources


def imagenet_names() -> tuple[str, ...]:
    """Return the names in the order every library uses: by WordNet number, "tench" first."""
    text = (resources.files("vitrail.checkpoints") / "imagenet_1k.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
