"""KServe v2 over HTTP: ``/v2`` and what is below it, with tensors in JSON or behind it (``binary_data``).

Errors are ``{"error": text}`` with the statuses of Triton: 400, 404, 501, 503 and 500, and 401, 429 and 504
for what it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import orjson
import pybase64
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.errors import InvalidInput, UnsupportedOperation
from tessera.frontend.api.endpoint import header, key_name, read_body, until_disconnect
from tessera.frontend.api.values import Json, JsonObject, expected, json_object, read_json, reject_unknown
from tessera.frontend.http.errors import Failure
from tessera.frontend.kserve.call import REGION, Answer, Call, Parameter, Shared, Wanted
from tessera.frontend.kserve.inference import Inference
from tessera.frontend.kserve.shared_memory.cuda import CudaMemory
from tessera.frontend.kserve.shared_memory.memory import Memory
from tessera.frontend.kserve.shared_memory.system import SystemMemory
from tessera.frontend.kserve.tensors import Tensor, json_values, of_raw, of_values
from tessera.frontend.service import ClientApi
from tessera.tasks import Deadline

PREFIX: Final = "/v2"
BELOW: Final = tuple(
    f"{PREFIX}/{part}/"
    for part in ("models", "health", "repository", "systemsharedmemory", "cudasharedmemory")
)
"""What its other paths begin with; Cohere's clients have some below ``/v2``, too."""
_HEAD_LENGTH: Final = b"inference-header-content-length"
# Larger bodies are read on a thread: a row of pixels as JSON takes 40 ms.
_LARGE_BYTES: Final = 1 << 17
_STATUSES: Final = {408: 400, 413: 400, 415: 400, 422: 400, 429: 503}


T = TypeVar("T")


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    """Triton's shape; what waits no longer is 503, and 429 a key's own rate."""
    status = _STATUSES.get(failure.status, failure.status)
    if failure.error["code"] == "rate_limited":
        status = 429
    elif failure.error["code"] == UnsupportedOperation.code:
        status = 501
    return status, {"error": failure.error["message"]}


def read_call(
    body: bytes, head_length: bytes | None, model: str, version: str, peer: str
) -> tuple[Call, frozenset[str]]:
    """A call, and the names of the outputs that are wanted as binary data; "" stands for all of them.

    ``peer`` is the client's address.

    Raises ``InvalidInput`` naming what is wrong.
    """
    length = len(body)
    if head_length is not None:
        if not head_length.isdigit() or not 0 < int(head_length) <= len(body):
            raise InvalidInput(
                f"Inference-Header-Content-Length: expected 1 to {len(body)}, the bytes of the body's JSON"
            )
        length = int(head_length)
    head = json_object(read_json(body[:length]))
    reject_unknown(head, ("id", "parameters", "inputs", "outputs"), "")
    parameters = _parameters(head, "parameters")
    binary = memoryview(body)[length:]
    inputs: dict[str, Tensor] = {}
    shared: dict[str, Shared] = {}
    at = 0
    for index, value in enumerate(_list(head, "inputs")):
        param = f"inputs[{index}]"
        name, datatype, shape, own, given = _input(value, param)
        if name in inputs or name in shared:
            raise InvalidInput(f"{param}: the input {name[:80]!r} comes twice", param=param)
        if REGION in own:
            shared[name] = Shared(datatype=datatype, shape=shape, parameters=own)
        elif (size := own.get("binary_data_size")) is not None:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - at:
                raise InvalidInput(
                    f"{param}.parameters.binary_data_size: expected 0 to {len(binary) - at}, the bytes that "
                    "are there",
                    param=f"{param}.parameters.binary_data_size",
                )
            inputs[name] = of_raw(name, datatype, shape, binary[at : at + size])
            at += size
        else:
            if not isinstance(given, list):
                raise expected(f"{param}.data", "a list", given)
            inputs[name] = of_values(name, datatype, shape, given)
    if at != len(binary):
        raise InvalidInput(f"{len(binary) - at} bytes behind the JSON belong to no input")
    outputs = tuple(_wanted(value, f"outputs[{index}]") for index, value in enumerate(_list(head, "outputs")))
    everything = parameters.get("binary_data_output") is True
    asked = {wanted.name for wanted in outputs if wanted.parameters.get("binary_data", everything) is True}
    if everything and not outputs:
        asked = {""}
    identity = head.get("id", "")
    if not isinstance(identity, str):
        raise expected("id", "a string", identity)
    call = Call(
        model=model,
        version=version,
        id=identity,
        parameters=parameters,
        inputs=inputs,
        shared=shared,
        outputs=outputs,
        nbytes=len(body),
        peer=peer,
    )
    return call, frozenset(asked)


def write_answer(answer: Answer, call: Call, binary: frozenset[str]) -> Response:
    """Outputs in regions are there already."""
    places = call.output_places
    described: list[JsonObject] = []
    behind: list[bytes] = []
    for tensor in answer.outputs:
        one: JsonObject = {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
        }
        if tensor.name in places:
            one["parameters"] = dict(places[tensor.name])
        elif tensor.name in binary or "" in binary:
            raw = tensor.raw()
            behind.append(raw)
            one["parameters"] = {"binary_data_size": len(raw)}
        else:
            one["data"] = json_values(tensor)
        described.append(one)
    head: JsonObject = {"model_name": answer.model, "model_version": "1"}
    if answer.id:
        head["id"] = answer.id
    head["outputs"] = described
    content = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"x-request-id": answer.request_id}
    if not behind:
        return Response(content, media_type="application/json", headers=headers)
    headers[_HEAD_LENGTH.decode()] = str(len(content))
    return Response(b"".join((content, *behind)), media_type="application/octet-stream", headers=headers)


def _list(body: JsonObject, name: str) -> list[Json]:
    value = body.get(name, [])
    if not isinstance(value, list):
        raise expected(name, "a list", value)
    return value


def _parameters(body: Mapping[str, Json], param: str) -> dict[str, Parameter]:
    value = body.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise expected(param, "an object", value)
    for name, each in value.items():
        if not isinstance(each, bool | int | float | str):
            raise expected(f"{param}.{name[:80]}", "a boolean, a number or a string", each)
    return value


def _input(value: Json, param: str) -> tuple[str, str, list[Json], dict[str, Parameter], Json]:
    if not isinstance(value, dict):
        raise expected(param, "an object", value)
    reject_unknown(value, ("name", "shape", "datatype", "parameters", "data"), param)
    name, datatype, shape = value.get("name"), value.get("datatype"), value.get("shape")
    if not isinstance(name, str) or not name:
        raise expected(f"{param}.name", "a non-empty string", name)
    if not isinstance(datatype, str):
        raise expected(f"{param}.datatype", "a string", datatype)
    if not isinstance(shape, list):
        raise expected(f"{param}.shape", "a list of sizes", shape)
    return name, datatype, shape, _parameters(value, f"{param}.parameters"), value.get("data")


def _wanted(value: Json, param: str) -> Wanted:
    if not isinstance(value, dict):
        raise expected(param, "an object", value)
    reject_unknown(value, ("name", "parameters"), param)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise expected(f"{param}.name", "a non-empty string", name)
    return Wanted(name=name, parameters=_parameters(value, f"{param}.parameters"))


def api(inference: Inference) -> ClientApi:
    """The routes, all of which ask ``inference``."""
    return ClientApi(
        routes=lambda service: _routes(inference, service.settings.limits.max_body_bytes), error=write_error
    )


def _routes(inference: Inference, max_body_bytes: int) -> APIRouter:
    router = APIRouter(tags=["KServe"], include_in_schema=False)
    regions = inference.regions

    def shaped(request: Request) -> None:
        # Most paths have a model's name in them, and the application knows whole paths.
        request.state.error_shape = write_error

    def get(path: str, answer: Any) -> None:
        router.add_api_route(f"{PREFIX}{path}", answer, methods=["GET"])

    def post(path: str, answer: Any) -> None:
        router.add_api_route(f"{PREFIX}{path}", answer, methods=["POST"])

    def get_of_model(path: str, answer: Any) -> None:
        get(f"/models/{{name}}{path}", answer)
        get(f"/models/{{name}}/versions/{{version}}{path}", answer)

    async def live() -> Response:
        return JSONResponse({"live": True})

    async def ready() -> Response:
        return JSONResponse({"ready": inference.ready}, status_code=200 if inference.ready else 503)

    async def server() -> Response:
        return JSONResponse(inference.server())

    async def metadata(request: Request, name: str, version: str = "") -> Response:
        shaped(request)
        return JSONResponse(inference.metadata(name, version))

    async def model_ready(request: Request, name: str, version: str = "") -> Response:
        shaped(request)
        able = inference.model_ready(name, version)
        return JSONResponse({"name": name, "ready": able}, status_code=200 if able else 503)

    async def configuration(request: Request, name: str, version: str = "") -> Response:
        shaped(request)
        return JSONResponse(inference.configuration(name, version))

    async def statistics(request: Request, name: str = "", version: str = "") -> Response:
        shaped(request)
        found = await asyncio.to_thread(inference.counted, name, version)
        return JSONResponse({"model_stats": found})

    async def infer(request: Request, name: str, version: str = "") -> Response:
        shaped(request)
        state = request.scope["state"]
        # The middleware let it in where there was room; the line does that here, and for those that wait.
        ticket = state.pop("ticket", None)
        if ticket is not None:
            ticket.close()
        begun = Deadline.after(inference.patience)
        body = await read_body(request, limit=max_body_bytes, timeout=inference.patience)
        length = header(request, _HEAD_LENGTH)
        read = (body, length, name, version, _host(request))
        if len(body) > _LARGE_BYTES:
            call, binary = await asyncio.to_thread(read_call, *read)
        else:
            call, binary = read_call(*read)
        work = inference.infer(
            call,
            request_id=state["line"].request_id,
            key=key_name(request),
            deadline=inference.deadline(begun.left(), call),
            counted=ticket is not None,
        )
        answer = await until_disconnect(request, work)
        return write_answer(answer, call, binary)

    async def index(request: Request) -> Response:
        shaped(request)
        body = await read_body(request, limit=max_body_bytes, timeout=inference.patience)
        asked = json_object(read_json(body)) if body else {}
        return JSONResponse(inference.index(ready=asked.get("ready") is True))

    async def unsupported(request: Request) -> Response:
        shaped(request)
        raise UnsupportedOperation("models are loaded and unloaded by whoever runs the service")

    async def aside(work: Callable[..., T], *args: object) -> T:
        return await regions.aside(Deadline.after(inference.patience), work, *args)

    async def registration(request: Request, *known: str) -> JsonObject:
        """The body of a registration, for this host's own clients."""
        shaped(request)
        regions.check_peer(_host(request))
        raw = await read_body(request, limit=max_body_bytes, timeout=inference.patience)
        body = json_object(read_json(raw))
        reject_unknown(body, known, "")
        return body

    async def system_status(request: Request, region: str = "") -> Response:
        shaped(request)
        regions.check_peer(_host(request))
        found = regions.regions(SystemMemory, region)
        return JSONResponse(
            [
                {
                    "name": one.name,
                    "key": one.memory.key,
                    "offset": one.memory.offset,
                    "byte_size": one.byte_size,
                }
                for one in found
            ]
        )

    async def cuda_status(request: Request, region: str = "") -> Response:
        shaped(request)
        regions.check_peer(_host(request))
        found = regions.regions(CudaMemory, region)
        return JSONResponse(
            [
                {"name": one.name, "device_id": one.memory.device_id, "byte_size": one.byte_size}
                for one in found
            ]
        )

    async def register_system(request: Request, region: str) -> Response:
        body = await registration(request, "key", "offset", "byte_size")
        key = body.get("key")
        if not isinstance(key, str):
            raise expected("key", "a string", key)
        offset, size = _whole(body, "offset", 0), _whole(body, "byte_size")
        await aside(regions.register_system, region, key, offset, size)
        return JSONResponse({})

    async def register_cuda(request: Request, region: str) -> Response:
        body = await registration(request, "raw_handle", "device_id", "byte_size")
        device, size = _whole(body, "device_id"), _whole(body, "byte_size")
        await aside(regions.register_cuda, region, _handle(body.get("raw_handle")), device, size)
        return JSONResponse({})

    def unregister(kind: type[Memory]) -> Any:
        async def answer(request: Request, region: str = "") -> Response:
            shaped(request)
            regions.check_peer(_host(request))
            await aside(regions.unregister, kind, region)
            return JSONResponse({})

        return answer

    get("/health/live", live)
    get("/health/ready", ready)
    get("", server)
    get("/models/stats", statistics)
    get_of_model("", metadata)
    get_of_model("/ready", model_ready)
    get_of_model("/config", configuration)
    get_of_model("/stats", statistics)
    for path, answer in (
        ("/models/{name}/infer", infer),
        ("/models/{name}/versions/{version}/infer", infer),
        ("/repository/index", index),
        ("/repository/models/{name}/load", unsupported),
        ("/repository/models/{name}/unload", unsupported),
    ):
        post(path, answer)
    for memory, kind, register, status in (
        ("systemsharedmemory", SystemMemory, register_system, system_status),
        ("cudasharedmemory", CudaMemory, register_cuda, cuda_status),
    ):
        post(f"/{memory}/region/{{region}}/register", register)
        post(f"/{memory}/region/{{region}}/unregister", unregister(kind))
        post(f"/{memory}/unregister", unregister(kind))
        get(f"/{memory}/status", status)
        get(f"/{memory}/region/{{region}}/status", status)
    return router


def _whole(body: JsonObject, name: str, default: int | None = None) -> int:
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise expected(name, "a whole number", value)
    return value


def _handle(value: Json) -> bytes:
    """A handle of CUDA's, as Triton's clients write it."""
    text = value.get("b64") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise expected("raw_handle", "an object whose b64 is a string", value)
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidInput("raw_handle.b64: expected base64", param="raw_handle.b64") from None


def _host(request: Request) -> str:
    return str((request.scope.get("client") or ("",))[0])
