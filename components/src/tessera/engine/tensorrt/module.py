"""The one place that imports TensorRT, whichever flavour of it, or TensorRT-LLM; and its names of types."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from tessera.errors import ConfigError

_MODULES = {
    # The bindings can be installed without the package that gives them their short name.
    "tensorrt": ("tensorrt", "tensorrt_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_INSTALL = {
    "tensorrt": "pip install tensorrt-cu13 --extra-index-url https://pypi.nvidia.com",
    "tensorrt_rtx": "pip install tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs",
}


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
        f" {_INSTALL[flavour]}"
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
        f"flavour {flavour} is installed but cannot be imported ({error}): {_INSTALL[flavour]}"
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
    """The member of ``trt.DataType`` for a type's name here."""
    return getattr(trt.DataType, _NAMES[name])


def to_name(trt: Any, dtype: Any) -> str:
    """The name here of a member of ``trt.DataType``; for one without a name TensorRT's own words."""
    for name, member in _NAMES.items():
        if getattr(trt.DataType, member) == dtype:
            return name
    return str(dtype)
