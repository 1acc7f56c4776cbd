"""A stand-in for Triton's ``triton_python_backend_utils``, with ONNX Runtime behind its calls between models.

Not Triton: it has the few names that the router uses, as Triton documents them, and holds the models' inputs
to what their ``config.pbtxt`` says, as Triton would.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

_DTYPES = {"TYPE_UINT8": np.uint8, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16}


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError:
    def __init__(self, message: str) -> None:
        self._message = message

    def message(self) -> str:
        return self._message


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Request:
    """What ``execute`` is given."""

    def __init__(self, **inputs: np.ndarray) -> None:
        self.tensors = [Tensor(name, array) for name, array in inputs.items()]

    def inputs(self) -> list[Tensor]:
        return self.tensors


class Repository:
    """The models below a directory; ``calls`` lists which of them the router asked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self.calls: list[str] = []
        self.failing_ids: int | None = None

    def config(self, name: str) -> ModelConfig:
        return text_format.Parse((self._directory / name / "config.pbtxt").read_text(), ModelConfig())

    def run(self, name: str, outputs: Sequence[str], inputs: Sequence[Tensor]) -> InferenceResponse:
        self.calls.append(name)
        feed = {tensor.name(): tensor.as_numpy() for tensor in inputs}
        if self.failing_ids is not None and (feed.get("input_ids", np.empty(0)) == self.failing_ids).any():
            return InferenceResponse([], TritonError("out of memory"))
        self._check(self.config(name), feed)
        if name not in self._sessions:
            path = self._directory / name / "1" / "model.onnx"
            self._sessions[name] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = self._sessions[name].run(list(outputs), feed)
        return InferenceResponse([Tensor(*pair) for pair in zip(outputs, found, strict=True)])

    @staticmethod
    def _check(config: ModelConfig, feed: dict[str, np.ndarray]) -> None:
        assert feed.keys() == {one.name for one in config.input}
        for one in config.input:
            array = feed[one.name]
            assert array.dtype == _DTYPES[DataType.Name(one.data_type)], one.name
            shape = array.shape
            if config.max_batch_size:
                assert shape[0] <= config.max_batch_size, (config.name, shape)
                shape = shape[1:]
            assert len(shape) == len(one.dims), one.name
            assert all(dim in (-1, size) for dim, size in zip(one.dims, shape, strict=True)), one.name

    def module(self) -> ModuleType:
        """The module for ``sys.modules``."""
        repository = self

        class InferenceRequest:
            def __init__(
                self, model_name: str, requested_output_names: Sequence[str], inputs: Sequence[Tensor]
            ) -> None:
                self._call = (model_name, requested_output_names, inputs)

            def exec(self) -> InferenceResponse:
                return repository.run(*self._call)

        def input_by_name(request: Request, name: str) -> Tensor | None:
            return next((one for one in request.inputs() if one.name() == name), None)

        def output_by_name(response: InferenceResponse, name: str) -> Tensor | None:
            return next((one for one in response.output_tensors() if one.name() == name), None)

        module: Any = ModuleType("triton_python_backend_utils")
        module.Tensor = Tensor
        module.TritonError = TritonError
        module.InferenceResponse = InferenceResponse
        module.InferenceRequest = InferenceRequest
        module.get_input_tensor_by_name = input_by_name
        module.get_output_tensor_by_name = output_by_name
        return module
