"""Vitrail: train, evaluate, explain, convert and deploy Vision Transformers.

>>> import vitrail
>>> model = vitrail.create("Ti/16", classes=10)

Each name is imported on first use, so `import vitrail` is fast.
"""

import importlib
from typing import TYPE_CHECKING

from vitrail._version import __version__

if TYPE_CHECKING:
    from vitrail.api import (
        accelerate,
        convert,
        create,
        describe,
        embed,
        evaluate,
        explain,
        export,
        load,
        probe,
        report,
        sweep,
        train,
    )
    from vitrail.checkpoints.bundle import Bundle
    from vitrail.data.preprocess import Preprocess
    from vitrail.errors import CheckpointError, ConfigError, DataError, Diverged, InputError, VitrailError
    from vitrail.inference.classifier import Classifier
    from vitrail.models.config import ViTConfig
    from vitrail.models.variants import variant_config
    from vitrail.models.vit import ViT

__all__ = [
    "Bundle",
    "CheckpointError",
    "Classifier",
    "ConfigError",
    "DataError",
    "Diverged",
    "InputError",
    "Preprocess",
    "ViT",
    "ViTConfig",
    "VitrailError",
    "__version__",
    "accelerate",
    "convert",
    "create",
    "describe",
    "embed",
    "evaluate",
    "explain",
    "export",
    "load",
    "probe",
    "report",
    "sweep",
    "train",
    "variant_config",
]

_HOME = {
    "Bundle": "vitrail.checkpoints.bundle",
    "Preprocess": "vitrail.data.preprocess",
    "Classifier": "vitrail.inference.classifier",
    "accelerate": "vitrail.api",
    "convert": "vitrail.api",
    "embed": "vitrail.api",
    "evaluate": "vitrail.api",
    "explain": "vitrail.api",
    "export": "vitrail.api",
    "load": "vitrail.api",
    "probe": "vitrail.api",
    "report": "vitrail.api",
    "sweep": "vitrail.api",
    "train": "vitrail.api",
    "create": "vitrail.api",
    "describe": "vitrail.api",
    "CheckpointError": "vitrail.errors",
    "ConfigError": "vitrail.errors",
    "DataError": "vitrail.errors",
    "Diverged": "vitrail.errors",
    "InputError": "vitrail.errors",
    "VitrailError": "vitrail.errors",
    "ViTConfig": "vitrail.models.config",
    "variant_config": "vitrail.models.variants",
    "ViT": "vitrail.models.vit",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
