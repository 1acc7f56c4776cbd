"""Names of types here and in TensorRT, and of the file that holds a serialised engine."""

from __future__ import annotations

from typing import Any

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
