"""The one place that imports TensorRT, in either flavour, or TensorRT-LLM; its types and its messages."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tessera.errors import ConfigError
from tessera.extras import install

log = logging.getLogger("tessera.engine.tensorrt")

_KEPT = 5

_MODULES = {
    # The bindings can be installed without the package that gives them their short name.
    "tensorrt": ("tensorrt", "tensorrt_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}


def _install(flavour: str) -> str:
    if flavour == "tensorrt_rtx":
        return install("tensorrt-rtx")
    return "pip install tensorrt-cu13 --extra-index-url https://pypi.nvidia.com"


@functools.cache
def load_tensorrt(flavour: str) -> Any:
    """The module of ``tensorrt`` or ``tensorrt_rtx``; both have the same interface.

    Raises ``ConfigError`` that says what is missing and how to install it.
    """
    for name in _MODULES[flavour]:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise _unusable(flavour, error) from error
        except (ImportError, OSError) as error:
            raise _unusable(flavour, error) from error
    raise ConfigError(
        f"flavour {flavour} needs the Python module {_MODULES[flavour][0]}, which is not installed:"
        f" {_install(flavour)}"
    )


@functools.cache
def load_tensorrt_llm() -> Any:
    """The module; raises ``ConfigError`` where it is not installed or finds no GPU that it can use."""
    try:
        import_module("tensorrt_llm.llmapi")
        return import_module("tensorrt_llm")
    except Exception as error:
        # Importing it loads libraries and looks for a GPU, and fails in ways of its own.
        raise ConfigError(
            f"engine tensorrt_llm needs the Python package tensorrt_llm and a GPU"
            f" ({type(error).__name__}: {error}); it pins torch and CUDA: give it an environment of its own,"
            " pip install tensorrt_llm --extra-index-url https://pypi.nvidia.com"
        ) from error


def _unusable(flavour: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"flavour {flavour} is installed but cannot be imported ({error}): {_install(flavour)}"
    )


PLAN_FILE = "engine.plan"

_NAMES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8": "FP8",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
}


def to_tensorrt(trt: Any, name: str) -> Any:
    """The member of ``trt.DataType`` for an element type by its name in ``tessera.dtypes``."""
    return getattr(trt.DataType, _NAMES[name])


def to_name(trt: Any, dtype: Any) -> str:
    """The name in ``tessera.dtypes`` of a member of ``trt.DataType``, or TensorRT's own name."""
    for name, member in _NAMES.items():
        if getattr(trt.DataType, member) == dtype:
            return name
    return str(dtype)


class Messages:
    """TensorRT's latest errors: when a call returns nothing, they are the only explanation."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def clear(self) -> None:
        self._errors = []

    def error(self, text: str) -> None:
        self._errors = [*self._errors, text][-_KEPT:]

    def __str__(self) -> str:
        return " | ".join(self._errors) or "TensorRT gave no reason"


@functools.cache
def logging_of(trt: Any) -> tuple[Any, Messages]:
    """The logger to make TensorRT's objects with, and the messages that it keeps.

    One for each flavour: TensorRT goes on using the first that it was given.
    """
    messages = Messages()
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level >= logging.ERROR:
                messages.error(message.strip())
            log.log(level, "%s", message)

    return Logger(), messages


def make_monitor(trt: Any, tell: Callable[[str], None], stop: Callable[[], bool]) -> Any:
    """A progress monitor: calls ``tell`` for each step of the outer phases, ends the build on ``stop``."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                tell(f"{phase_name}: step {step + 1} of {self._steps[phase_name]}")
            return not stop()

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()
