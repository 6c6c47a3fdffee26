"""The 1,000 class names of ImageNet, the default for a head with 1,000 outputs."""

from importlib import resources


def imagenet_names() -> tuple[str, ...]:
    """Return the names in the usual order: by WordNet ID, "tench" first."""
    text = (resources.files("vitrail.checkpoints") / "imagenet_1k.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
