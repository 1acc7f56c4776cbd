"""KServe v2 over gRPC, on a port of its own.

A call passes what an HTTP request passes: key, rate, id, trace, counters and log line, under the path of its
method. The servers of a frontend, and of all frontends of a group, listen on the port each for itself
(SO_REUSEPORT): gRPC takes no sockets from elsewhere. The system gives a connection to one of them, and all
calls of a connection are that one's.

A key is looked at before any message is read. gRPC reads the message of a unary handler before it calls it:
all methods are handlers of streams here, which makes no difference on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from tessera import tracing
from tessera.budgets import Budget
from tessera.errors import (
    ConfigError,
    InvalidInput,
    Overloaded,
    RequestCancelled,
    RequestTimeout,
    TesseraError,
    UnsupportedOperation,
)
from tessera.frontend.api.values import JsonObject
from tessera.frontend.exchange import Exchange, request_id_of
from tessera.frontend.http.access_log import AccessLog
from tessera.frontend.http.errors import Failure, release, render, render_status
from tessera.frontend.http.middleware import answer_counts
from tessera.frontend.http.server import listening
from tessera.frontend.http.tls import Accepted, Certificate
from tessera.frontend.service import Service
from tessera.logs import RequestLine, note, serving
from tessera.tasks import Deadline, own_cancellation
from tessera.terminal import place_of
from tessera_kserve import messages_pb2 as pb
from tessera_kserve.call import Call
from tessera_kserve.fields import Fields
from tessera_kserve.http import SMALL_BODY_BYTES, write_error
from tessera_kserve.inference import Inference
from tessera_kserve.line import MOST_WAITING
from tessera_kserve.messages import parsed, read_call, serialized, write_answer
from tessera_kserve.receiving import WINDOW_BYTES, Receiver, skip_message
from tessera_kserve.settings import KserveSettings
from tessera_kserve.shared_memory.cuda import CudaMemory
from tessera_kserve.shared_memory.memory import Memory
from tessera_kserve.shared_memory.system import SystemMemory

# Below that of the core, whose level the flag sets.
log = logging.getLogger("tessera.frontend.kserve.grpc_server")

SERVICE: Final = "inference.GRPCInferenceService"
_UNSUPPORTED: Final = (
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "TraceSetting",
    "LogSettings",
)
# Asked by probes, without a key.
_OPEN: Final = frozenset(("ServerLive", "ServerReady"))
# Calls that fail, ask for statistics or look for health while others wait.
_SPARE_CALLS: Final = 256
_INFER: Final = "ModelInfer"
_STREAM: Final = "ModelStreamInfer"
# A server of gRPC accepts one call at a time, two switches of threads each, and what waits there has no key.
# Behind 600 calls of 8 connections another key's took 2.0 to 3.8 s on a busy machine, and with 16 servers
# 0.10 to 0.41; with 8 up to 1.1, with 32 up to 0.6. An idle one takes a descriptor and 5 KiB.
_SERVERS: Final = 16
# Calls of one stream that are under way at a time.
_STREAM_CALLS: Final = 64
_TRACE: Final = frozenset(("traceparent", "tracestate", "baggage", "b3"))
# Of larger messages contents are not copied.
_LARGE_BYTES: Final = 1 << 18
# By the status as ``/v2`` has it.
_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Context = Any
Messages = AsyncIterator[bytes]
Metadata = Sequence[tuple[str, str | bytes]]
Method = Callable[[bytes, Context, Exchange], Awaitable[Message]]


class GrpcServer:
    """Serves from ``start`` until ``stop``. Owned by one event loop."""

    def __init__(
        self,
        service: Service,
        inference: Inference,
        settings: KserveSettings,
        certificate: Certificate | None,
    ) -> None:
        self._service = service
        self._port = settings.grpc_port
        self._inference = inference
        self._certificate = certificate
        self._log = AccessLog(frozenset(), service.settings.access_log_share)
        self._count = answer_counts(service.metrics)
        limits = service.settings.limits
        self._receiver = Receiver(
            settings.max_message_bytes, lambda: service.admission.bodies.own, inference.hold
        )
        self._watching: asyncio.Task[None] | None = None
        most = limits.max_in_flight + MOST_WAITING + _SPARE_CALLS
        # A stream is one however many of its messages are under way, and one that is silent is one, too.
        self._calls = Budget(lambda: most, "the number of open calls", "calls")
        options = [
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Of those that come while the loop is busy gRPC cancels some beyond 1,000 by chance.
            ("grpc.server.max_pending_requests", most),
            ("grpc.server.max_pending_requests_hard_limit", most),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            # With it a stream takes up to 16 MiB that nobody asks for.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_metadata_size", limits.connection.header_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(self._unary(name, answer))
            for name, answer in self._methods().items()
        }
        handlers[_STREAM] = grpc.stream_stream_rpc_method_handler(self._stream)
        answers = (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        # Beyond so many calls of its own a server refuses unread, with RESOURCE_EXHAUSTED.
        self._servers = [
            grpc.aio.server(handlers=answers, options=options, maximum_concurrent_rpcs=most)
            for _ in range(_SERVERS)
        ]

    async def start(self) -> None:
        """Raises ``ConfigError`` where the port cannot be had."""
        settings = self._service.settings
        address = place_of(settings.host, self._port)
        if settings.seat is None:
            # Else it would be shared with whoever shares it, too.
            for tried in listening(settings.host, self._port, "--grpc-port: "):
                tried.close()
        try:
            for server in self._servers:
                if self._certificate is None:
                    server.add_insecure_port(address)
                else:
                    server.add_secure_port(address, self._credentials(self._certificate))
        except RuntimeError as error:
            raise ConfigError(f"--grpc-port: cannot listen on {address}: {error}") from error
        for server in self._servers:
            await server.start()
        self._watching = self._receiver.silence.watch()
        log.info("listening on %s://%s", "grpcs" if self._certificate else "grpc", address)

    async def stop(self, seconds: float) -> None:
        """Take no more calls; those under way have so many seconds."""
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))
        if self._watching is not None:
            self._watching.cancel()

    @staticmethod
    def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
        """Give what takes the certificate that HTTP has accepted last; raises ``ConfigError``."""

        def configured(pair: Accepted) -> Any:
            return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)])

        seen = certificate.accepted
        if seen.encrypted:
            raise ConfigError("--grpc-port: gRPC reads no encrypted key, and --tls-key is one")

        def renewed() -> Any:
            """Give a new configuration where there is one: gRPC asks at each handshake, on its threads."""
            nonlocal seen
            if (now := certificate.accepted) is seen:
                return None
            seen = now
            if now.encrypted:
                log.error("the certificate of gRPC stays as it was: the key of the new one is encrypted")
                return None
            return configured(now)

        return grpc.dynamic_ssl_server_credentials(configured(seen), renewed)

    def _methods(self) -> dict[str, Method]:
        inference, regions = self._inference, self._inference.regions

        def kinds(name: str) -> tuple[type[Message], type[Message]]:
            return getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")

        def of(name: str, answer: Callable[[Any], JsonObject]) -> Method:
            """Answer by what is known without waiting."""
            request, response = kinds(name)

            async def answered(raw: bytes, context: Context, exchange: Exchange) -> Message:
                return ParseDict(answer(parsed(request, raw)), response())

            return answered

        def shared(name: str, answer: Callable[[str, Any], JsonObject | None]) -> Method:
            request, response = kinds(name)

            def written(client: str, asked: Message) -> Message:
                return ParseDict(answer(client, asked) or {}, response())

            async def answered(raw: bytes, context: Context, exchange: Exchange) -> Message:
                regions.check_peer(exchange.peer)
                return await inference.at_regions(exchange, written, parsed(request, raw))

            return answered

        async def statistics(raw: bytes, context: Context, exchange: Exchange) -> Message:
            asked = parsed(pb.ModelStatisticsRequest, raw)
            found = await inference.aside(partial(inference.counted, asked.name, asked.version), exchange)
            return ParseDict({"model_stats": found}, pb.ModelStatisticsResponse())

        def of_memory(
            name: str, kind: type[Memory], register: Callable[[str, Any], None]
        ) -> dict[str, Method]:
            """Give the methods of one kind of shared memory."""

            def status(client: str, asked: Any) -> JsonObject:
                listed = regions.regions(client, kind, asked.name)
                return {"regions": {region.name: region.described for region in listed}}

            def unregister(client: str, asked: Any) -> None:
                regions.unregister(client, kind, asked.name)

            answers = {"Status": status, "Register": register, "Unregister": unregister}
            named = {f"{name}SharedMemory{word}": answer for word, answer in answers.items()}
            return {words: shared(words, answer) for words, answer in named.items()}

        def register_system(client: str, asked: pb.SystemSharedMemoryRegisterRequest) -> None:
            regions.register_system(client, asked.name, asked.key, asked.offset, asked.byte_size)

        def register_cuda(client: str, asked: pb.CudaSharedMemoryRegisterRequest) -> None:
            regions.register_cuda(client, asked.name, asked.raw_handle, asked.device_id, asked.byte_size)

        async def unsupported(raw: bytes, context: Context, exchange: Exchange) -> Message:
            raise UnsupportedOperation("this service does not have that")

        known: dict[str, Callable[[Any], JsonObject]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": inference.ready},
            "ModelReady": lambda asked: {"ready": inference.model_ready(asked.name, asked.version)},
            "ServerMetadata": lambda _: inference.server(),
            "ModelMetadata": lambda asked: inference.metadata(asked.name, asked.version),
            "ModelConfig": lambda asked: {"config": inference.configuration(asked.name, asked.version)},
            "RepositoryIndex": lambda asked: {"models": inference.index(ready=asked.ready)},
        }
        methods = {
            **{name: of(name, answer) for name, answer in known.items()},
            "ModelStatistics": statistics,
            **of_memory("System", SystemMemory, register_system),
            **of_memory("Cuda", CudaMemory, register_cuda),
            _INFER: self._infer,
        }
        return methods | dict.fromkeys(_UNSUPPORTED, unsupported)

    async def _infer(self, raw: bytes, context: Context, exchange: Exchange) -> pb.ModelInferResponse:
        message = _InferMessage(raw)
        del raw
        return await self._inferred(message, context, exchange)

    async def _inferred(
        self, message: _InferMessage, context: Context, exchange: Exchange
    ) -> pb.ModelInferResponse:
        inference = self._inference
        read = partial(message.read, exchange.peer)
        call = await inference.in_turn(read, exchange, len(message.raw), body=True)
        exchange.deadline = inference.deadline(context.time_remaining(), call)
        answer = await inference.infer(call, exchange)
        return await inference.in_turn(partial(write_answer, answer, call), exchange, answer.nbytes)

    def _unary(self, name: str, answer: Method) -> Callable[[Messages, Context], Awaitable[bytes]]:
        async def answered(_: Messages, context: Context) -> bytes:
            with self._serving(name, context) as exchange:
                try:
                    self._open(name, exchange)
                    with self._counted(exchange.client), own_cancellation():
                        if name in _OPEN:
                            await skip_message(context)
                            return serialized(await answer(b"", context, exchange))
                        message = self._message(name, context, exchange)
                        return serialized(await answer(await message, context, exchange))
                except Exception as error:
                    end = _end_of(self._failed(error, exchange))
            del exchange
            await context.abort(*end)
            raise AssertionError

        return answered

    async def _message(self, name: str, context: Context, exchange: Exchange) -> bytes:
        """Read the one message of a call; raises ``RequestTimeout``, and ``RequestCancelled`` without one.

        Raises ``InvalidInput`` for a large message to a method that takes a name or a region.
        """
        seconds = self._inference.patience
        try:
            async with asyncio.timeout(seconds):
                raw = await self._receiver.receive(context, exchange)
        except TimeoutError as error:
            raise RequestTimeout(f"the message did not arrive within {seconds:.0f} s") from error
        if name != _INFER and len(raw) > SMALL_BODY_BYTES:
            raise InvalidInput(f"the message is larger than the {SMALL_BODY_BYTES} bytes of a {name}")
        return raw

    async def _stream(self, _: Messages, context: Context) -> AsyncIterator[bytes]:
        """Answer in the order of the calls, many of which may be under way; one that fails fails alone.

        All have the stream's metadata, so that a key that is refused ends the stream.
        """
        whole = self._exchange(_STREAM, context, context.invocation_metadata() or ())
        try:
            self._open(_STREAM, whole)
            with self._counted(whole.client):
                async for answer in self._answers(context, whole):
                    yield answer
        except (_Refused, Overloaded) as refused:
            with self._serving(_STREAM, context) as exchange:
                end = _end_of(self._failed(refused, exchange))
            del whole, exchange
            await context.abort(*end)

    async def _answers(self, context: Context, whole: Exchange) -> AsyncIterator[bytes]:
        under_way: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_STREAM_CALLS)
        # All that have begun: one may wait for its place in the queue.
        begun: set[asyncio.Task[bytes]] = set()

        async def take() -> None:
            receive, large = partial(self._receiver.receive_next, context, whole), False
            while (raw := await receive(large=large)) is not grpc.aio.EOF:
                large = len(raw) > WINDOW_BYTES
                task = asyncio.create_task(self._streamed(raw, context))
                del raw
                begun.add(task)
                task.add_done_callback(begun.discard)
                await under_way.put(task)

        def taken(_: asyncio.Task[None]) -> None:
            # Where the queue is full nobody waits for more.
            if not under_way.full():
                under_way.put_nowait(None)

        taking = asyncio.create_task(take())
        taking.add_done_callback(taken)
        try:
            while not (taking.done() and under_way.empty()):
                if (task := await under_way.get()) is not None:
                    with own_cancellation():
                        answer = await task
                    yield answer
            with own_cancellation():
                await taking
        finally:
            taking.cancel()
            for one in begun:
                one.cancel()
            await asyncio.gather(taking, *begun, return_exceptions=True)

    async def _streamed(self, raw: bytes, context: Context) -> bytes:
        answer = pb.ModelStreamInferResponse()
        message = _InferMessage(raw)
        del raw
        with self._serving(_STREAM, context) as exchange:
            try:
                self._open(_STREAM, exchange)
                exchange.hold(len(message.raw))
                with own_cancellation():
                    answer.infer_response.CopyFrom(await self._inferred(message, context, exchange))
                if message.wants_final:
                    answer.infer_response.parameters["triton_final_response"].bool_param = True
            except Exception as error:
                failure = self._failed(error, exchange)
                answer.error_message = str(write_error(failure)[1]["error"])
                # Whose error it is.
                answer.infer_response.id = message.id
        return serialized(answer)

    def _open(self, name: str, exchange: Exchange) -> None:
        """Check the key; raises ``_Refused``."""
        if self._service.keys is not None:
            key = self._service.keys.name_of(exchange.headers)
            if key is not None:
                exchange.key = exchange.client = key
            elif name not in _OPEN:
                raise _Refused

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        """Count a call that is open; raises ``Overloaded`` where its client has its share of them."""
        self._calls.hold(client, 1)
        try:
            yield
        finally:
            self._calls.give(client, 1)

    def _failed(self, error: Exception, exchange: Exchange) -> Failure:
        if isinstance(error, _Refused):
            self._service.metrics.refused.labels("unknown key").inc()
            failure = render_status(
                401, "the API key is missing or not known; send authorization: Bearer KEY as metadata"
            )
        else:
            failure = render(error)
            if isinstance(error, RequestCancelled):
                self._service.metrics.disconnects.inc()
            if not isinstance(error, TesseraError):
                exchange.unexpected = error
        release(error)
        exchange.failure = failure
        return failure

    def _exchange(self, name: str, context: Context, metadata: Metadata) -> Exchange:
        headers = _headers(metadata)
        return Exchange(
            line=RequestLine(request_id_of(headers)),
            deadline=Deadline.after(self._inference.patience),
            path=f"/{SERVICE}/{name}",
            peer=_host(context),
            headers=headers,
            rates=self._service.limiter,
            bodies=self._service.admission.bodies,
        )

    @contextmanager
    def _serving(self, name: str, context: Context) -> Iterator[Exchange]:
        """The line, trace and counters of one call; yields its exchange, which has how it ended."""
        # Each time that it is asked for it is made anew.
        metadata: Metadata = context.invocation_metadata() or ()
        exchange = self._exchange(name, context, metadata)
        path, line = exchange.path, exchange.line
        started = time.perf_counter()
        carrier: dict[str, str] = {}
        if tracing.recording():
            carrier = {key: value for key, value in metadata if isinstance(value, str) and key in _TRACE}
        attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": name}
        with tracing.serve(path[1:], carrier, attributes) as span, serving(line):
            note(trace_id=tracing.trace_id() or None)
            status = 499
            try:
                yield exchange
                failure = exchange.failure
                status = 200 if failure is None else write_error(failure)[0]
            except BaseException as error:
                # Of a call that is cancelled.
                release(error)
                raise
            finally:
                exchange.let_go()
                seconds = time.perf_counter() - started
                failure = exchange.failure
                model = str(line.fields.get("model") or "")
                code = None if failure is None else failure.error["code"]
                self._count(path, status, code, model)(seconds)
                if failure is not None:
                    tracing.fail(span, str(code))
                span.set_attribute("tessera.request_id", line.request_id)
                self._log.write(exchange, route=path, status=status, seconds=seconds)


class _InferMessage:
    """Holds an inference call from its bytes to its tensors, which take as much memory."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.id = ""
        self.wants_final = False

    def read(self, peer: str) -> Call:
        """Give the bytes up for the call; raises ``InvalidInput``."""
        raw = self.raw
        contents: Sequence[memoryview] = ()
        if len(raw) > _LARGE_BYTES:
            fields = Fields(raw)
            raw, contents = fields.rest, fields.contents
        message = parsed(pb.ModelInferRequest, raw)
        self.raw, self.id = b"", message.id
        call = read_call(message, peer, contents)
        self.wants_final = message.parameters["triton_enable_empty_final_response"].bool_param
        return call


class _Refused(Exception):
    """The key is missing or not known."""


def _end_of(failure: Failure) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return the status, words and trailing metadata that a failure ends a call with.

    gRPC's ``abort`` raises an error, of which gRPC keeps some for minutes, with the frames that they left:
    they are to hold nothing else by then.
    """
    status, body = write_error(failure)
    retry = failure.headers.get("retry-after")
    trailing = (("retry-after", retry),) if retry is not None else ()
    return _CODES.get(status, grpc.StatusCode.INTERNAL), str(body["error"]), trailing


def _headers(metadata: Metadata) -> dict[bytes, bytes]:
    """The first value of each key."""
    return {
        key.encode(): value.encode("utf-8", "replace") if isinstance(value, str) else value
        for key, value in reversed(metadata)
    }


def _host(context: Context) -> str:
    """The peer's address; empty where it has none."""
    peer = str(context.peer())
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = rest.rpartition(":")[0]
    return host.replace("%5B", "").replace("%5D", "").strip("[]")
