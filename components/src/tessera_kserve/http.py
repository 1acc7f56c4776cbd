"""KServe v2 over HTTP: ``/v2`` and what is below it, with tensors in JSON or behind it (``binary_data``).

Errors are ``{"error": text}`` with the statuses of Triton: 400, 404, 501, 503 and 500, and 401, 429 and 504
for what it does not know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import pybase64
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.errors import InvalidInput, UnsupportedOperation
from tessera.frontend.api.endpoint import read_body
from tessera.frontend.api.formats import json_content, json_matrix
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.values import (
    Json,
    JsonObject,
    expected,
    filled_string,
    integer,
    json_object,
    known_object,
    plain_list,
    read_json,
    reject_unknown,
    string,
)
from tessera.frontend.exchange import Exchange, exchange_of
from tessera.frontend.http.errors import Failure
from tessera.frontend.service import ClientApi
from tessera_kserve.call import REGION, Answer, Call, Parameter, Shared, Wanted, check_count
from tessera_kserve.inference import Inference
from tessera_kserve.shared_memory.cuda import CudaMemory
from tessera_kserve.shared_memory.memory import Memory
from tessera_kserve.shared_memory.system import SystemMemory
from tessera_kserve.tensors import Tensor, json_values, of_raw, of_values

PREFIX: Final = "/v2"
BELOW: Final = tuple(
    f"{PREFIX}/{part}/"
    for part in ("models", "health", "repository", "systemsharedmemory", "cudasharedmemory")
)
"""What its other paths begin with; Cohere's clients have some below ``/v2``, too."""
OPEN_PATHS: Final = frozenset((f"{PREFIX}/health/ready", f"{PREFIX}/health/live"))
_HEAD_LENGTH: Final = b"inference-header-content-length"
SMALL_BODY_BYTES: Final = 1 << 16
"""Of an index and of registrations, which have a few short fields."""
_STATUSES: Final = {408: 400, 413: 400, 415: 400, 422: 400, 429: 503}


Handler = Callable[..., Awaitable[Response]]


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
    given = plain_list(head.get("inputs", []), "inputs")
    check_count(len(given), "inputs")
    for index, value in enumerate(given):
        param = f"inputs[{index}]"
        name, datatype, shape, own, data = _input(value, param)
        if name in inputs or name in shared:
            raise InvalidInput.at(param, f"the input {name[:80]!r} comes twice")
        if REGION in own:
            shared[name] = Shared(datatype=datatype, shape=shape, parameters=own)
        elif (size := own.get("binary_data_size")) is not None:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - at:
                raise InvalidInput.at(
                    f"{param}.parameters.binary_data_size",
                    f"expected 0 to {len(binary) - at}, the bytes that are there",
                )
            inputs[name] = of_raw(name, datatype, shape, binary[at : at + size])
            at += size
        else:
            inputs[name] = of_values(name, datatype, shape, plain_list(data, f"{param}.data"))
    if at != len(binary):
        raise InvalidInput(f"{len(binary) - at} bytes behind the JSON belong to no input")
    wanted = plain_list(head.get("outputs", []), "outputs")
    check_count(len(wanted), "outputs")
    outputs = tuple(_wanted(value, f"outputs[{index}]") for index, value in enumerate(wanted))
    everything = parameters.get("binary_data_output") is True
    asked = {output.name for output in outputs if output.parameters.get("binary_data", everything) is True}
    if everything and not outputs:
        asked = {""}
    call = Call(
        model=model,
        version=version,
        id=string(head.get("id", ""), "id"),
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
            values = json_values(tensor)
            one["data"] = values if isinstance(values, list) else json_matrix(values)
        described.append(one)
    head: JsonObject = {"model_name": answer.model, "model_version": "1"}
    if answer.id:
        head["id"] = answer.id
    head["outputs"] = described
    written = json_content(head)
    content = b"".join(written) if isinstance(written, tuple) else bytes(written)
    headers = {"x-request-id": answer.request_id}
    if not behind:
        return Response(content, media_type="application/json", headers=headers)
    headers[_HEAD_LENGTH.decode()] = str(len(content))
    return Response(b"".join((content, *behind)), media_type="application/octet-stream", headers=headers)


def _parameters(body: Mapping[str, Json], param: str) -> dict[str, Parameter]:
    value = body.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise expected(param, "an object", value)
    check_count(len(value), "parameters")
    for name, each in value.items():
        if not isinstance(each, bool | int | float | str):
            raise expected(f"{param}.{name[:80]}", "a boolean, a number or a string", each)
    return value


def _input(value: Json, param: str) -> tuple[str, str, Sequence[Json], dict[str, Parameter], Json]:
    known = ("name", "shape", "datatype", "parameters", "data")
    given = known_object(value, param, "an object", known)
    name = filled_string(given.get("name"), f"{param}.name")
    datatype = string(given.get("datatype"), f"{param}.datatype")
    shape = plain_list(given.get("shape"), f"{param}.shape", "a list of sizes")
    return name, datatype, shape, _parameters(given, f"{param}.parameters"), given.get("data")


def _wanted(value: Json, param: str) -> Wanted:
    given = known_object(value, param, "an object", ("name", "parameters"))
    name = filled_string(given.get("name"), f"{param}.name")
    return Wanted(name=name, parameters=_parameters(given, f"{param}.parameters"))


def api(inference: Inference) -> ClientApi:
    """The routes, all of which ask ``inference``."""
    return ClientApi(
        "KServe",
        lambda service: Routes(inference, service.settings.limits.max_body_bytes).routes,
        error=write_error,
        waits_below=BELOW,
        open_paths=OPEN_PATHS,
    )


class Routes:
    """Answers KServe's requests at its ``routes``, each by a method that takes what the path names."""

    def __init__(self, inference: Inference, max_body_bytes: int) -> None:
        self._inference = inference
        self._regions = inference.regions
        self._max_body_bytes = max_body_bytes
        self.routes: list[ApiRoute] = []
        self._tell("/health/live", lambda: {"live": True})
        self._add("/health/ready", self.ready, "GET")
        self._tell("", inference.server)
        self._add("/models/stats", self.statistics, "GET")
        for model in ("/models/{name}", "/models/{name}/versions/{version}"):
            self._tell(model, inference.metadata)
            self._add(f"{model}/ready", self.model_ready, "GET")
            self._tell(f"{model}/config", inference.configuration)
            self._add(f"{model}/stats", self.statistics, "GET")
            self._add(f"{model}/infer", self.infer)
        self._add("/repository/index", self.index)
        self._add("/repository/models/{name}/load", self.unsupported)
        self._add("/repository/models/{name}/unload", self.unsupported)
        self._add_memory("systemsharedmemory", SystemMemory, self.register_system)
        self._add_memory("cudasharedmemory", CudaMemory, self.register_cuda)

    def _tell(self, path: str, tell: Callable[..., JsonObject]) -> None:
        """Add the route of what is known without waiting."""

        async def answered(request: Request, **named: str) -> Response:
            return JSONResponse(tell(**named))

        self._add(path, answered, "GET")

    def _add(self, path: str, answer: Handler, method: str = "POST") -> None:
        async def answered(request: Request) -> Response:
            return await answer(request, **request.path_params)

        self.routes.append(ApiRoute(f"{PREFIX}{path}", answered, methods=(method,)))

    def _add_memory(self, name: str, kind: type[Memory], register: Handler) -> None:
        """Add the routes of one kind of shared memory."""

        async def unregister(request: Request, region: str = "") -> Response:
            await self._inference.at_regions(self._own(request), self._regions.unregister, kind, region)
            return JSONResponse({})

        def described(client: str, region: str) -> Response:
            return JSONResponse([entry.described for entry in self._regions.regions(client, kind, region)])

        async def status(request: Request, region: str = "") -> Response:
            # All that a key may have take 2 ms, and 32 such requests begin in one turn of the event loop.
            return await self._inference.at_regions(self._own(request), described, region)

        self._add(f"/{name}/region/{{region}}/register", register)
        self._add(f"/{name}/region/{{region}}/unregister", unregister)
        self._add(f"/{name}/unregister", unregister)
        self._add(f"/{name}/status", status, "GET")
        self._add(f"/{name}/region/{{region}}/status", status, "GET")

    async def ready(self, request: Request) -> Response:
        able = self._inference.ready
        return JSONResponse({"ready": able}, status_code=200 if able else 503)

    async def model_ready(self, request: Request, name: str, version: str = "") -> Response:
        able = self._inference.model_ready(name, version)
        return JSONResponse({"name": name, "ready": able}, status_code=200 if able else 503)

    async def statistics(self, request: Request, name: str = "", version: str = "") -> Response:
        counting = partial(self._inference.counted, name, version)
        counted = await self._inference.aside(counting, exchange_of(request.scope))
        return JSONResponse({"model_stats": counted})

    async def infer(self, request: Request, name: str, version: str = "") -> Response:
        exchange = exchange_of(request.scope)
        # The middleware let it in where there was room; the line does that here, and for those that wait.
        exchange.leave()
        self._inference.offers.find(name, version)
        call, binary = await self._call(request, exchange, name, version)
        exchange.deadline = self._inference.deadline(exchange.deadline.left(), call)
        answer = await exchange.departure.during(self._inference.infer(call, exchange))
        write = partial(write_answer, answer, call, binary)
        return await exchange.departure.during(self._inference.in_turn(write, exchange, answer.nbytes))

    async def _call(
        self, request: Request, exchange: Exchange, name: str, version: str
    ) -> tuple[Call, frozenset[str]]:
        body = await self._body(request, self._max_body_bytes)
        read = partial(read_call, body, exchange.headers.get(_HEAD_LENGTH), name, version, exchange.peer)
        return await exchange.departure.during(self._inference.in_turn(read, exchange, len(body), body=True))

    async def index(self, request: Request) -> Response:
        body = await self._body(request)
        asked = json_object(read_json(body)) if body else {}
        return JSONResponse(self._inference.index(ready=asked.get("ready") is True))

    async def unsupported(self, request: Request, name: str) -> Response:
        raise UnsupportedOperation("models are loaded and unloaded by whoever runs the service")

    async def register_system(self, request: Request, region: str) -> Response:
        exchange, body = await self._registration(request, "key", "offset", "byte_size")
        asked = string(body.get("key"), "key"), _whole(body, "offset", 0), _whole(body, "byte_size")
        await self._inference.at_regions(exchange, self._regions.register_system, region, *asked)
        return JSONResponse({})

    async def register_cuda(self, request: Request, region: str) -> Response:
        exchange, body = await self._registration(request, "raw_handle", "device_id", "byte_size")
        device, size = _whole(body, "device_id"), _whole(body, "byte_size")
        asked = _handle(body.get("raw_handle")), device, size
        await self._inference.at_regions(exchange, self._regions.register_cuda, region, *asked)
        return JSONResponse({})

    async def _registration(self, request: Request, *known: str) -> tuple[Exchange, JsonObject]:
        """Read the body of a registration, unless another host's client sends it."""
        exchange = self._own(request)
        body = json_object(read_json(await self._body(request)))
        reject_unknown(body, known, "")
        return exchange, body

    async def _body(self, request: Request, limit: int = SMALL_BODY_BYTES) -> bytes:
        return await read_body(request, limit=limit, timeout=self._inference.patience)

    def _own(self, request: Request) -> Exchange:
        """Return the exchange of a client of this host; raises ``UnsupportedOperation`` for another's."""
        exchange = exchange_of(request.scope)
        self._regions.check_peer(exchange.peer)
        return exchange


def _whole(body: JsonObject, name: str, default: int | None = None) -> int:
    return integer(body.get(name, default), name, low=-(2**63), high=2**63 - 1, what="a whole number")


def _handle(value: Json) -> bytes:
    """A handle of CUDA's, as Triton's clients write it."""
    text = value.get("b64") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise expected("raw_handle", "an object whose b64 is a string", value)
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidInput.at("raw_handle.b64", "expected base64") from None
