"""The packages of other runtimes, which not everybody has."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

from vitrail.errors import ConfigError

Extra = Literal["onnx", "openvino"]
"""The extras of this package that bring a runtime along."""


def require(package: str, extra: Extra) -> ModuleType:
    """Import a package, or say how to get it."""
    try:
        with quiet():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConfigError(_cure(f"{package} misses {error.name}", extra)) from None
        raise ConfigError(_cure(f"{package} is not installed", extra)) from None
    except ImportError as error:
        raise ConfigError(_cure(f"{package} cannot be imported ({error})", extra)) from None


def _cure(what: str, extra: Extra) -> str:
    return f"{what}; get it with pip install 'vitrail[{extra}]'"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings and the log lines of other packages to themselves; what goes wrong is raised all the same."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
