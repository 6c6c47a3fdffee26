"""Optional packages of other runtimes."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

from vitrail.errors import ConfigError

Extra = Literal["onnx", "openvino"]
"""The extras of this package that install a runtime."""


def require(package: str, extra: Extra) -> ModuleType:
    """Import a package, or raise with the command that installs it."""
    try:
        with quiet():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConfigError(_install_hint(f"{package} needs {error.name}, which is missing", extra)) from None
        raise ConfigError(_install_hint(f"{package} is not installed", extra)) from None
    except ImportError as error:
        raise ConfigError(_install_hint(f"{package} cannot be imported ({error})", extra)) from None


def _install_hint(what: str, extra: Extra) -> str:
    return f"{what}; install it with pip install 'vitrail[{extra}]'"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of other packages; exceptions are still raised."""
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
