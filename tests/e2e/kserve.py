"""NVIDIA's own clients of KServe v2, over either transport, against one frontend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.e2e.disaggregated import NOTHING, Disaggregated
from tests.e2e.service import free_ports

CODES = {
    "StatusCode.INVALID_ARGUMENT": 400,
    "StatusCode.UNAUTHENTICATED": 401,
    "StatusCode.NOT_FOUND": 404,
    "StatusCode.RESOURCE_EXHAUSTED": 429,
    "StatusCode.INTERNAL": 500,
    "StatusCode.UNIMPLEMENTED": 501,
    "StatusCode.UNAVAILABLE": 503,
    "StatusCode.DEADLINE_EXCEEDED": 504,
}


@dataclass(frozen=True, slots=True)
class Door:
    """Where a frontend answers: ``http`` and ``grpc`` are addresses without a scheme."""

    http: str
    grpc: str

    def client(self, transport: str) -> KserveClient:
        module = tritonclient.grpc if transport == "grpc" else tritonclient.http
        return KserveClient(module, module.InferenceServerClient(getattr(self, transport)))


@dataclass(frozen=True, slots=True)
class KserveClient:
    """``module`` is tritonclient's."""

    module: ModuleType
    client: Any

    def tensor(self, name: str, values: Any, datatype: str | None = None) -> Any:
        """An input; texts and bytes are BYTES."""
        array = np.asarray(values)
        if array.dtype.kind in "SUO":
            array, datatype = np.array(values, object), "BYTES"
        kind = datatype or {"int64": "INT64", "int32": "INT32", "float32": "FP32", "float16": "FP16"}.get(
            str(array.dtype), "BOOL"
        )
        made = self.module.InferInput(name, list(array.shape), kind)
        made.set_data_from_numpy(array)
        return made

    def infer(self, model: str, inputs: dict[str, Any], **options: Any) -> Any:
        made = [self.tensor(name, values) for name, values in inputs.items()]
        return self.client.infer(model, made, **options)

    def close(self) -> None:
        self.client.close()


def refused(error: InferenceServerException) -> tuple[int, str]:
    """The HTTP status that an error has or stands for, and its message."""
    status = str(error.status())
    return CODES[status] if status in CODES else int(status), str(error.message())


@contextmanager
def kserve_frontend(
    service: Disaggregated, *flags: str, settings: Mapping[str, str] = NOTHING
) -> Iterator[Door]:
    """One more frontend, which answers by gRPC as well; ``settings`` are added to its environment.

    A message may be as large as a body: some have all pixels of several pages in FP32.
    """
    (port,) = free_ports(1)
    flags = ("--grpc-port", str(port), "--grpc-max-message-mb", "64", *flags)
    with service.frontend(*flags, settings=settings) as url:
        yield Door(http=url.removeprefix("http://"), grpc=f"127.0.0.1:{port}")
