"""Vitrail: train, evaluate, explain, convert and deploy Vision Transformers.

>>> import vitrail
>>> model = vitrail.create("Ti/16", classes=10)

Each name is imported on first use, so `import vitrail` is fast. The functions and the types of their results are
those of `vitrail.api`.
"""

import importlib
from typing import TYPE_CHECKING

from vitrail._version import __version__

if TYPE_CHECKING:
    from vitrail.api import (
        Accelerated,
        Benchmark,
        CandidateSweep,
        ClassificationMetrics,
        ClassPrediction,
        ClusterPlan,
        Conversion,
        Data,
        DataCheck,
        Description,
        DrawnFigures,
        EmbedResult,
        ExplainedFiles,
        Explanation,
        Export,
        Features,
        Inspection,
        Metrics,
        ModelInfo,
        Prediction,
        ProbeResult,
        RayOptions,
        Run,
        ServeSettings,
        Summary,
        Sweep,
        accelerate,
        bench,
        check,
        convert,
        create,
        describe,
        embed,
        evaluate,
        explain,
        explain_files,
        export,
        figures,
        inspect,
        list_models,
        load,
        plan,
        predict,
        pretrain,
        probe,
        report,
        serve,
        sweep,
        train,
    )
    from vitrail.checkpoints.bundle import Bundle
    from vitrail.data.preprocess import Preprocess
    from vitrail.data.sources.opening import open_data
    from vitrail.errors import CheckpointError, ConfigError, DataError, Diverged, InputError, VitrailError
    from vitrail.inference.classifier import Classifier
    from vitrail.models.config import ViTConfig
    from vitrail.models.variants import variant_config
    from vitrail.models.vit import ViT
    from vitrail.training.recipe import Recipe
    from vitrail.training.recipe_files import read_recipe

__all__ = [
    "Accelerated",
    "Benchmark",
    "Bundle",
    "CandidateSweep",
    "CheckpointError",
    "ClassPrediction",
    "ClassificationMetrics",
    "Classifier",
    "ClusterPlan",
    "ConfigError",
    "Conversion",
    "Data",
    "DataCheck",
    "DataError",
    "Description",
    "Diverged",
    "DrawnFigures",
    "EmbedResult",
    "ExplainedFiles",
    "Explanation",
    "Export",
    "Features",
    "InputError",
    "Inspection",
    "Metrics",
    "ModelInfo",
    "Prediction",
    "Preprocess",
    "ProbeResult",
    "RayOptions",
    "Recipe",
    "Run",
    "ServeSettings",
    "Summary",
    "Sweep",
    "ViT",
    "ViTConfig",
    "VitrailError",
    "__version__",
    "accelerate",
    "bench",
    "check",
    "convert",
    "create",
    "describe",
    "embed",
    "evaluate",
    "explain",
    "explain_files",
    "export",
    "figures",
    "inspect",
    "list_models",
    "load",
    "open_data",
    "plan",
    "predict",
    "pretrain",
    "probe",
    "read_recipe",
    "report",
    "serve",
    "sweep",
    "train",
    "variant_config",
]

_HOME = {  # of the names that are not in `vitrail.api`
    "Bundle": "vitrail.checkpoints.bundle",
    "Preprocess": "vitrail.data.preprocess",
    "open_data": "vitrail.data.sources.opening",
    "CheckpointError": "vitrail.errors",
    "ConfigError": "vitrail.errors",
    "DataError": "vitrail.errors",
    "Diverged": "vitrail.errors",
    "InputError": "vitrail.errors",
    "VitrailError": "vitrail.errors",
    "Classifier": "vitrail.inference.classifier",
    "ViTConfig": "vitrail.models.config",
    "variant_config": "vitrail.models.variants",
    "ViT": "vitrail.models.vit",
    "Recipe": "vitrail.training.recipe",
    "read_recipe": "vitrail.training.recipe_files",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "vitrail.api")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
