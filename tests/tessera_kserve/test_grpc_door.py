"""The gRPC port of a frontend as a process: keys before messages, and the certificate that HTTP has."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2

from tessera_kserve import messages_pb2 as pb
from tests.authority import Authority, needs_openssl
from tests.e2e.service import free_ports
from tests.frontend.alone import Alone, frontend_process
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.service, pytest.mark.kserve]

SERVICE = "/inference.GRPCInferenceService/"
METHODS = tuple(service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name)
OPEN = ("ServerLive", "ServerReady")
KEY = (("authorization", "Bearer sk-kserve-0123456789"),)
OTHER = (("authorization", "Bearer sk-kserve-9876543210"),)
WRONG = (("authorization", "Bearer wrongwrong"),)
MESSAGE_BYTES = 15 << 20
CALLS = 24


@dataclass(frozen=True, slots=True)
class Running:
    alone: Alone
    port: int

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            f"127.0.0.1:{self.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "keys").write_text("sk-kserve-0123456789 mine\nsk-kserve-9876543210 other\n")
    (port,) = free_ports(1)
    flags = ("--grpc-port", str(port), "--api-keys-file", str(folder / "keys"))
    flags += ("--request-timeout-seconds", "10", "--max-in-flight", "32")
    with frontend_process(checkpoint, folder, *flags) as alone:
        yield Running(alone, port)


async def outcome(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    return await asyncio.wait_for(call.code(), 60), await call.details()


async def test_a_key_is_refused_before_a_message_is_sent(running: Running) -> None:
    async with running.channel() as channel:
        for metadata in (WRONG, ()):
            for name in METHODS:
                # Says nothing, and does not say that it is done.
                call = channel.stream_stream(f"{SERVICE}{name}")(metadata=metadata)
                if name in OPEN:
                    await call.write(b"")
                    assert await asyncio.wait_for(call.read(), 60) != grpc.aio.EOF
                    call.cancel()
                    continue
                code, details = await outcome(call)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (name, details)
                assert "the API key is missing or not known" in details


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryIndex"])
@pytest.mark.parametrize("metadata", [WRONG, ()], ids=["wrong", "none"])
async def test_messages_without_a_key_take_no_memory(
    running: Running, method: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    message = pb.ModelInferRequest(model_name="router", raw_input_contents=[bytes(MESSAGE_BYTES)])
    raw = message.SerializeToString()
    before = running.alone.forget_peak()

    async def ask() -> grpc.StatusCode:
        async with running.channel() as channel:
            call = channel.unary_stream(f"{SERVICE}{method}")(raw, metadata=metadata)
            return (await outcome(call))[0]

    assert set(await asyncio.gather(*(ask() for _ in range(CALLS)))) == {grpc.StatusCode.UNAUTHENTICATED}
    # Of 1.4 GB that were offered.
    assert running.alone.peak_bytes - before < 3 * MESSAGE_BYTES


async def test_streams_that_say_nothing_leave_turns_to_others(running: Running) -> None:
    async with running.channel() as channel:
        silent = [channel.stream_stream(f"{SERVICE}ModelStreamInfer")(metadata=KEY) for _ in range(8)]
        for stream in silent:
            await stream.wait_for_connection()
        message = pb.ModelInferRequest(model_name="router", raw_input_contents=[bytes(MESSAGE_BYTES)])
        for raw in (message.SerializeToString(), b"\xff"):
            with pytest.raises(grpc.aio.AioRpcError, match=r"INVALID_ARGUMENT|NOT_FOUND"):
                await channel.unary_unary(f"{SERVICE}ModelInfer")(raw, metadata=KEY, timeout=9)
        for number, stream in enumerate(silent):
            asked = pb.ModelInferRequest(model_name="router", id=str(number)).SerializeToString()
            await stream.write(asked)
            answer = pb.ModelStreamInferResponse.FromString(await asyncio.wait_for(stream.read(), 60))
            assert answer.infer_response.id == str(number)
            stream.cancel()


async def test_open_streams_of_a_key_leave_calls_to_others(running: Running) -> None:
    """Of 32 requests, 1,024 that wait and 256 more a key has four fifths, whatever its streams say."""
    async with running.channel() as channel, running.channel() as others:
        open_stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        streams = []
        # Of a thousand at once gRPC cancels some that are refused, and their message is lost.
        for _ in range(24):
            streams += [open_stream(metadata=KEY) for _ in range(50)]
            await asyncio.sleep(0.05)
        ended = [asyncio.ensure_future(outcome(stream)) for stream in streams]

        def found() -> list[tuple[grpc.StatusCode, str]]:
            return [one.result() for one in ended if one.done()]

        # The last of them are refused, which means that all of the others have been open. Where this takes
        # long, the first have ended by then, and as many more are let in.
        await until(lambda: len(found()) >= 1_200 - (32 + 1_024 + 256) * 4 // 5, said=found)
        assert {code for code, _ in found()} == {grpc.StatusCode.UNAVAILABLE}
        said = [why for _, why in found()]
        refused = [why for why in said if "this API key's share of the number of open calls is used" in why]
        silent = [why for why in said if "the stream was silent" in why]
        assert refused and len(refused) + len(silent) == len(said)
        asked = service_pb2.RepositoryIndexRequest().SerializeToString()
        index = others.unary_unary(f"{SERVICE}RepositoryIndex")
        assert await index(asked, metadata=OTHER, timeout=30)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
    # Everything was given back.
    async with running.channel() as channel:
        index = channel.unary_unary(f"{SERVICE}RepositoryIndex")
        await until(lambda: index(asked, metadata=KEY, timeout=30), despite=grpc.aio.AioRpcError)


async def test_calls_with_a_key_are_answered_as_ever(running: Running) -> None:
    async with running.channel() as channel:
        large = pb.ModelInferRequest(model_name="router", raw_input_contents=[bytes(32 << 20)])
        for raw, code, why in (
            (b"", grpc.StatusCode.NOT_FOUND, ""),
            (b"\xff", grpc.StatusCode.INVALID_ARGUMENT, "no ModelInferRequest"),
            (
                large.SerializeToString(),
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "larger than max (33554445 vs. 33554432)",
            ),
        ):
            call = channel.unary_unary(f"{SERVICE}ModelInfer")(raw, metadata=KEY)
            found, details = await outcome(call)
            assert found is code and why in details
        for name in METHODS:
            if name in (*OPEN, "ModelInfer", "ModelStreamInfer"):
                continue
            call = channel.unary_unary(f"{SERVICE}{name}")(b"\x7a\x00" * 32_769, metadata=KEY)
            assert await outcome(call) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the message is larger than the 65536 bytes of a {name}",
            )
        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")(metadata=KEY)
        for number in range(3):
            await stream.write(pb.ModelInferRequest(model_name="router", id=str(number)).SerializeToString())
            answer = pb.ModelStreamInferResponse.FromString(await stream.read())
            assert (answer.infer_response.id, bool(answer.error_message)) == (str(number), True)
        await stream.done_writing()
        assert await stream.read() == grpc.aio.EOF
        nothing = channel.stream_unary(f"{SERVICE}ModelInfer")(metadata=KEY)
        await nothing.done_writing()
        assert (await outcome(nothing))[0] is grpc.StatusCode.CANCELLED


async def test_a_message_that_does_not_come_is_not_waited_for_without_end(running: Running) -> None:
    async with running.channel() as channel:
        call = channel.stream_stream(f"{SERVICE}ModelInfer")(metadata=KEY)
        assert await outcome(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the message did not arrive within 10 s",
        )


async def test_calls_that_end_within_their_message_leave_no_error(running: Running) -> None:
    raw = pb.ModelInferRequest(raw_input_contents=[bytes(8 << 20)]).SerializeToString()
    before = running.alone.log.read_text()
    for number in range(60):
        async with running.channel() as channel:
            call = channel.unary_unary(f"{SERVICE}ModelInfer")(raw, metadata=KEY if number % 2 else ())
            await asyncio.sleep(0.001 * (number % 20))
            call.cancel()
    async with running.channel() as channel:
        await channel.unary_unary(f"{SERVICE}ServerMetadata")(b"", metadata=KEY)
    log = running.alone.log.read_text()[len(before) :]
    assert "Traceback" not in log and " ERROR " not in log


@needs_openssl
def test_grpc_has_the_certificate_that_http_accepted_last(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pairs = {name: authority.sign(name) for name in ("first", "second", "third")}
    pairs["expired"] = authority.sign("expired", "-days", "-1")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def put(target: Path, content: Path | None) -> None:
        """At once, as whoever renews certificates does it; None removes the file."""
        if content is None:
            target.unlink()
            return
        (tmp_path / "new").write_bytes(content.read_bytes())
        os.replace(tmp_path / "new", target)

    def certificates(ports: tuple[int, int]) -> set[str]:
        """The names of those that new connections to the ports get, from clients that verify."""
        found = set()
        for port in ports:
            with (
                socket.create_connection(("localhost", port), timeout=60) as plain,
                authority.client.wrap_socket(plain, server_hostname="localhost") as secure,
            ):
                (((_, name),),) = (secure.getpeercert() or {})["subject"]
                found.add(str(name))
        return found

    def live(port: int) -> bool:
        root = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(f"localhost:{port}", root, options=options) as channel:
            raw = channel.unary_unary(f"{SERVICE}ServerLive")(b"", timeout=30)
        return pb.ServerLiveResponse.FromString(raw).live

    put(cert, pairs["first"][0])
    put(key, pairs["first"][1])
    (port,) = free_ports(1)
    flags = ("--grpc-port", str(port), "--tls-cert", str(cert), "--tls-key", str(key))
    with frontend_process(checkpoint, tmp_path, *flags) as alone:
        ports = (port, alone.http.base_url.port or 0)

        def refusals() -> int:
            return alone.log.read_text().count("the certificate stays as it was")

        def refused(*changes: tuple[Path, Path | None]) -> None:
            """Nothing changes for either door, before it is judged and after."""
            before = refusals()
            for target, content in changes:
                put(target, content)
            assert certificates(ports) == {name} and live(port)
            wait_until(lambda: refusals() > before)
            assert certificates(ports) == {name} and live(port)

        name = "first"
        assert certificates(ports) == {name} and live(port)
        refused((cert, pairs["expired"][0]), (key, pairs["expired"][1]))
        refused((cert, pairs["second"][0]))
        refused((cert, None))
        for _ in range(20):
            assert live(port)
        put(cert, pairs["second"][0])
        put(key, pairs["second"][1])
        wait_until(lambda: certificates(ports) == {"second"})
        name = "second"
        refused((key, None))
        refused((key, pairs["third"][1]))
        put(cert, pairs["third"][0])
        wait_until(lambda: certificates(ports) == {"third"})
        assert live(port)
        lines = alone.log.read_text().splitlines()
        errors = [line for line in lines if " ERROR " in line]
        # One for each change that was seen, however many handshakes there were meanwhile.
        assert len(errors) <= 8 and all("the certificate stays as it was" in line for line in errors)
        assert not any(line.startswith((" ", "Traceback")) for line in lines)


@needs_openssl
def test_an_encrypted_key_is_none_for_grpc(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("service")
    (port,) = free_ports(1)
    flags = (
        "--grpc-port",
        str(port),
        "--tls-cert",
        str(cert),
        "--tls-key",
        str(authority.encrypt(key, "open")),
    )
    with (
        pytest.raises(AssertionError, match="gRPC reads no encrypted key, and --tls-key is one"),
        frontend_process(checkpoint, tmp_path, *flags, environment={"TESSERA_TLS_KEY_PASSWORD": "open"}),
    ):
        pass
