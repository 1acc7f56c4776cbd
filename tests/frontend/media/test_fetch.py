"""Attacks on the fetcher by a real server on loopback."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
from contextlib import ExitStack

import httpcore2
import pytest

from tessera.budgets import Budget
from tessera.errors import DeadlineExceeded, MediaFetchError, Overloaded, PayloadTooLarge, TesseraError
from tessera.frontend.exchange import Exchange
from tessera.frontend.media import ImageLimits, MediaBudget, MediaPolicy
from tessera.frontend.media.fetch import BoundedStream, Fetcher, SystemResolver, bound_look_ups
from tessera.logs import RequestLine
from tessera.tasks import Deadline
from tessera.turns import Rounds
from tests.frontend.media.hostile import Handler, LoopbackPolicy, response, server
from tests.waiting import until

SECRET = "token=hunter2"


class Names:
    """A resolver for made-up names; numbers are themselves."""

    def __init__(self, **names: list[str]) -> None:
        self._names = {name.replace("_", "."): list(answers) for name, answers in names.items()}

    async def __call__(self, host: str, port: int) -> list[str]:
        answers = self._names.get(host)
        if answers is None:
            return [host]
        return [answers.pop(0) if len(answers) > 1 else answers[0]]


def holding(budget: Budget) -> Exchange:
    line, deadline = RequestLine("test"), Deadline.after(100)
    return Exchange(line=line, deadline=deadline, path="/", bodies=budget, client="alice")


async def get(
    url: str,
    *,
    policy: MediaPolicy | None = None,
    limits: ImageLimits | None = None,
    names: Names | None = None,
    seconds: float = 20,
) -> bytes:
    fetcher = Fetcher(policy or LoopbackPolicy(), limits, resolver=names or Names())
    try:
        return await fetcher.get(
            url, param="input[0]", deadline=Deadline.after(seconds), budget=MediaBudget(1 << 30)
        )
    finally:
        await fetcher.close()


async def refused(kind: type[TesseraError], handler: Handler, **options: object) -> str:
    """Fetch from a server that must not succeed; the message."""
    async with server(handler) as port:
        with pytest.raises(kind) as caught:
            await get(f"http://127.0.0.1:{port}/x?{SECRET}", **options)
    assert caught.value.param == "input[0]"
    assert "127.0.0.1" in caught.value.message
    assert "hunter2" not in caught.value.message
    return caught.value.message


async def test_a_body_arrives_and_nothing_private_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    heads: list[str] = []

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(response(b"image" * 1000, "set-cookie: a=b"))

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(), resolver=Names())
        for _ in range(2):
            found = await fetcher.get(
                f"http://127.0.0.1:{port}/a/b?c=d#e",
                param="input",
                deadline=Deadline.after(60),
                budget=MediaBudget(1 << 30),
            )
            assert found == b"image" * 1000
        await fetcher.close()
    assert all(head.startswith("get /a/b?c=d http/1.1") for head in heads)
    assert not any("cookie" in head or "authorization" in head for head in heads)
    assert all("accept-encoding: identity" in head for head in heads)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1", "0.0.0.0"]
)
async def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(MediaFetchError, match="may not be fetched"):
        await get(f"http://{host}/{SECRET}", policy=MediaPolicy())


async def test_nothing_reaches_a_private_server() -> None:
    hits: list[str] = []

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        hits.append(head)
        writer.write(response(b"secret"))

    async with server(handler) as port:
        for host in ("127.0.0.1", "name.example"):
            with pytest.raises(MediaFetchError, match="loopback"):
                await get(
                    f"http://{host}:{port}/", policy=MediaPolicy(), names=Names(name_example=["127.0.0.1"])
                )
        assert await get(f"http://127.0.0.1:{port}/", policy=MediaPolicy(allow_private=True)) == b"secret"
    assert len(hits) == 1


def redirect(location: str, status: str = "302 Found") -> Handler:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"", f"location: {location}", status=status))

    return handler


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (f"http://169.254.169.254/latest?{SECRET}", "link-local"),
        ("http://[::1]/", "loopback"),
        ("//10.0.0.1/x", "private"),
        ("file:///etc/passwd", "http or https"),
        ("ftp://127.0.0.1/x", "http or https"),
        ("data:image/png;base64,AAAA", "http or https"),
        (f"http://user:{SECRET}@127.0.0.1/", "user name or password"),
        ("http://[broken", "URL"),
    ],
)
async def test_every_redirect_is_checked_again(location: str, words: str) -> None:
    async with server(redirect(location)) as port:
        with pytest.raises(MediaFetchError, match=words) as caught:
            await get(f"http://127.0.0.1:{port}/")
    assert "hunter2" not in caught.value.message


async def test_redirects_follow_up_to_three_times() -> None:
    def hops(count: int) -> Handler:
        async def handler(head: str, writer: asyncio.StreamWriter) -> None:
            at = int(head.split()[1].strip("/"))
            if at == count:
                writer.write(response(b"arrived"))
            else:
                writer.write(response(b"", f"location: /{at + 1}", status="307 Temporary Redirect"))

        return handler

    async with server(hops(3)) as port:
        assert await get(f"http://127.0.0.1:{port}/0") == b"arrived"
    async with server(hops(4)) as port:
        with pytest.raises(MediaFetchError, match="more than 3 times"):
            await get(f"http://127.0.0.1:{port}/0")


async def test_a_name_that_moves_to_loopback_between_hops_is_refused() -> None:
    """The first look-up gives the (here allowed) server, the second one another address of this host."""

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"", "location: /again", "connection: close", status="302 Found"))

    async with server(handler) as port:
        with pytest.raises(MediaFetchError, match="loopback"):
            await get(
                f"http://rebind.example:{port}/", names=Names(rebind_example=["127.0.0.1", "127.0.0.2"])
            )


async def test_domain_lists_hold_for_redirects() -> None:
    policy = LoopbackPolicy(allowed_domains=frozenset({"good.example"}))
    names = Names(good_example=["127.0.0.1"], bad_example=["127.0.0.1"])
    async with server(redirect("http://bad.example/")) as port:
        with pytest.raises(MediaFetchError, match=r"bad\.example may not be fetched: its domain"):
            await get(f"http://good.example:{port}/", policy=policy, names=names)
        with pytest.raises(MediaFetchError, match="not among the allowed"):
            await get(f"http://127.0.0.1:{port}/", policy=policy, names=names)


@pytest.mark.parametrize("announce", [True, False])
async def test_bodies_are_capped_whatever_they_announce(announce: bool) -> None:
    sent = 0

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: 9999999999\r\n\r\n"
            if announce
            else b"HTTP/1.1 200 OK\r\n\r\n"
        )
        for _ in range(2000):
            writer.write(b"x" * 10_000)
            await writer.drain()
            sent += 10_000

    assert "100000" in await refused(PayloadTooLarge, handler, limits=ImageLimits(max_bytes=100_000))
    assert sent < 15_000_000


async def test_chunked_bodies_are_capped() -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            await writer.drain()

    await refused(PayloadTooLarge, handler, limits=ImageLimits(max_bytes=100_000))


async def test_a_body_shorter_than_announced_is_an_error() -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"half", length=8))

    await refused(MediaFetchError, handler)


async def test_a_body_longer_than_announced_is_cut_there() -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"half and more", length=4))

    async with server(handler) as port:
        assert await get(f"http://127.0.0.1:{port}/") == b"half"


async def test_compressed_bodies_are_refused() -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(gzip.compress(bytes(50_000_000)), "content-encoding: gzip"))

    assert "content encoding" in await refused(MediaFetchError, handler)


async def dripping(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def dripping_headers(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silent(head: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1)


@pytest.mark.parametrize("handler", [dripping, dripping_headers, silent])
async def test_slow_senders_are_cut_off(handler: Handler) -> None:
    async with asyncio.timeout(60):
        message = await refused(MediaFetchError, handler, policy=LoopbackPolicy(timeout=0.3))
    assert "0.3 seconds" in message


async def test_the_requests_deadline_wins_over_the_policy() -> None:
    async with asyncio.timeout(60):
        await refused(DeadlineExceeded, dripping, seconds=0.2)


async def test_a_name_server_that_hangs_is_cut_off() -> None:
    async def hang(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    fetcher = Fetcher(LoopbackPolicy(connect_timeout=0.2), resolver=hang)
    with pytest.raises(MediaFetchError, match="did not answer in time"):
        await fetcher.get(
            "http://slow.example/", param="input", deadline=Deadline.after(20), budget=MediaBudget(1 << 30)
        )
    await fetcher.close()


async def test_an_address_that_answers_nothing_leaves_time_for_the_next() -> None:
    class Loopback(LoopbackPolicy):
        def address_refusal(self, address: str) -> str | None:
            return None

    async def both(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"a picture"))

    async with server(handler) as port:
        with socket.create_server(("127.0.0.2", port), backlog=0) as silent, ExitStack() as waiting:
            # Whoever connects behind these is not answered.
            for _ in range(4):
                full = waiting.enter_context(socket.socket())
                full.setblocking(False)
                full.connect_ex(silent.getsockname())
            fetcher = Fetcher(Loopback(connect_timeout=20), resolver=both)
            found = await fetcher.get(
                f"http://two.example:{port}/",
                param="input",
                deadline=Deadline.after(60),
                budget=MediaBudget(1 << 30),
            )
            await fetcher.close()
    assert found == b"a picture"


async def test_fetches_are_bounded_and_slots_come_back() -> None:
    now = most = 0
    full = asyncio.Event()

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 60)
        await asyncio.sleep(0.02)
        now -= 1
        writer.write(response(b"x", "connection: close"))

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(max_fetches=3), resolver=Names())

        def start(count: int) -> list[asyncio.Task[bytes]]:
            url = f"http://127.0.0.1:{port}/"
            calls = (
                fetcher.get(url, param="input", deadline=Deadline.after(60), budget=MediaBudget(1 << 30))
                for _ in range(count)
            )
            return [asyncio.ensure_future(call) for call in calls]

        assert await asyncio.gather(*start(12)) == [b"x"] * 12
        assert most == 3
        tasks = start(12)
        await asyncio.sleep(0.01)
        for task in tasks[:2]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await fetcher.close()
    assert found[2:] == [b"x"] * 10


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial Content"])
async def test_only_200_is_an_image(status: str) -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"" if "204" in status else b"x", status=status))

    assert status.split()[0] in await refused(MediaFetchError, handler)


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", b"\0" * 100, b"x" * 300_000],
)
async def test_answers_that_are_no_http(answer: bytes) -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    await refused(MediaFetchError, handler)


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@127.0.0.1/",
        "http://user@127.0.0.1/",
        "http://",
        "http:///path",
        "http://[::1",
        "http://127.0.0.1:99999/",
        "http://a b/",
        "http://127.0.0.1/\r\nhost: x",
        "http://good.example\\@127.0.0.1/",
        "gopher://127.0.0.1/",
        "http://" + "a" * 70_000,
        "http://xn--a.127.0.0.1/",
        "http://bücher..127.0.0.1/",
    ],
)
async def test_urls_that_are_refused_unasked(url: str) -> None:
    with pytest.raises(MediaFetchError) as caught:
        await get(url)
    assert "hunter2" not in caught.value.message
    assert len(caught.value.message) < 300


async def test_a_server_that_is_not_there() -> None:
    async with server(dripping) as port:
        pass
    with pytest.raises(MediaFetchError, match="could not be reached"):
        await get(f"http://127.0.0.1:{port}/")
    names = Names(nowhere_example=["127.0.0.1"])

    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    fetcher = Fetcher(LoopbackPolicy(), resolver=unknown)
    with pytest.raises(MediaFetchError, match="could not be reached"):
        await fetcher.get(
            "http://nowhere.example/", param="input", deadline=Deadline.after(20), budget=MediaBudget(1 << 30)
        )
    await fetcher.close()
    assert await names("nowhere.example", 80) == ["127.0.0.1"]


async def test_a_clients_slow_hosts_leave_fetches_to_others() -> None:
    waiting: list[str] = []
    leave = asyncio.Event()

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET /slow"):
            waiting.append(head)
            await asyncio.wait_for(leave.wait(), 120)
        writer.write(response(b"x", "connection: close"))

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(), resolver=Names())

        def get(path: str, client: str) -> asyncio.Task[bytes]:
            budget = MediaBudget(1 << 30, client)
            url = f"http://127.0.0.1:{port}/{path}"
            return asyncio.create_task(
                fetcher.get(url, param="input", deadline=Deadline.after(100), budget=budget)
            )

        slow = [get("slow", "alice") for _ in range(100)]
        for _ in range(20):
            assert await get("fast", "bob") == b"x"
        await until(lambda: len(waiting) >= 16)
        assert await asyncio.gather(*(get("fast", "bob") for _ in range(100))) == [b"x"] * 100
        # All of alice's are still there, a quarter of the fetches in progress.
        assert len(waiting) == 16
        for task in slow[16:90]:
            task.cancel()
        leave.set()
        assert await asyncio.gather(*slow[:16], *slow[90:]) == [b"x"] * 26
        await fetcher.close()


async def test_bytes_behind_an_answer_are_not_the_next_one() -> None:
    may_end = asyncio.Event()
    connections = 0

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(response(b"good") + (response(b"evil") if head.startswith("GET /extra") else b""))
        await asyncio.wait_for(may_end.wait(), 60)

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(), resolver=Names())
        for path in ("extra", "extra", "plain"):
            body = await fetcher.get(
                f"http://127.0.0.1:{port}/{path}",
                param="input",
                deadline=Deadline.after(60),
                budget=MediaBudget(1 << 30),
            )
            assert body == b"good"
        may_end.set()
        await fetcher.close()
    # None of the first two was used again.
    assert connections == 3


async def test_a_connection_is_used_again_behind_a_whole_answer() -> None:
    connections = 0
    ended = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            writer.write(response(b"good"))
        writer.close()
        ended.set()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    fetcher = Fetcher(LoopbackPolicy(), resolver=Names())
    for number in range(3):
        body = await fetcher.get(
            f"http://127.0.0.1:{port}/{number}",
            param="input",
            deadline=Deadline.after(60),
            budget=MediaBudget(1 << 30),
        )
        assert body == b"good"
    await fetcher.close()
    await asyncio.wait_for(ended.wait(), 60)
    listener.close()
    assert connections == 1


async def test_two_lengths_of_one_body_are_refused() -> None:
    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"4\r\ngood\r\n0\r\n\r\n" + response(b"evil"))

    await refused(MediaFetchError, handler)


async def test_the_resolver_reads_the_hosts_file_and_numbers() -> None:
    resolver = SystemResolver(threads=1)
    assert set(await resolver("localhost", 80)) & {"127.0.0.1", "::1"}
    for host, address in (("127.1", "127.0.0.1"), ("2130706433", "127.0.0.1"), ("::ffff:8.8.8.8", None)):
        assert await resolver(host, 80) == [address or host]
    resolver.close()


def test_what_the_operator_has_set_for_look_ups_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    bound_look_ups()
    assert os.environ["RES_OPTIONS"] == "timeout:1 attempts:2"
    monkeypatch.setenv("RES_OPTIONS", "timeout:3")
    bound_look_ups()
    # The last of several values is the one that counts.
    assert os.environ["RES_OPTIONS"] == "timeout:1 attempts:2 timeout:3"


async def endless_interim(head: str, writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2000)
        await writer.drain()


async def many_fields(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n" + b"a:b\r\n" * 18_000 + b"\r\nx")


async def endless_extension(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;")
    while not writer.is_closing():
        writer.write(b"a" * 10_000)
        await writer.drain()


async def long_trailer(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
    writer.write(b"a:b\r\n" * 18_000 + b"\r\n")


@pytest.mark.parametrize("handler", [endless_interim, many_fields, endless_extension, long_trailer])
async def test_what_is_no_body_is_bounded(handler: Handler) -> None:
    # Not by the time: that of the policy is far off.
    async with asyncio.timeout(60):
        message = await refused(MediaFetchError, handler, policy=LoopbackPolicy(), seconds=100)
    assert "valid HTTP" in message


async def test_of_each_answer_the_head_is_read_in_small_pieces() -> None:
    """Also on a connection whose last answer had a body, which is read in large ones."""
    asked = []

    class Sending(httpcore2.AsyncNetworkStream):
        async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            asked.append(max_bytes)
            return b"x"

        async def write(self, buffer: bytes, timeout: float | None = None) -> None:
            pass

    stream = BoundedStream(Sending(), Rounds())
    for _ in range(2):
        await stream.write(b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(2):
            await stream.read(1 << 16)
            await stream.came()
    assert asked == [4096, 1 << 16] * 2


async def test_of_one_host_framing_is_read_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = most = total = 0
    read = BoundedStream.read

    async def counted(stream: BoundedStream, max_bytes: int, timeout: float | None = None) -> bytes:
        nonlocal reads
        data = await read(stream, max_bytes, timeout)
        reads += 1
        return data

    async def look() -> None:
        nonlocal reads, most, total
        while True:
            await asyncio.sleep(0)
            total, most, reads = total + reads, max(most, reads), 0

    monkeypatch.setattr(BoundedStream, "read", counted)
    async with server(endless_interim) as port:
        fetcher = Fetcher(LoopbackPolicy(), resolver=Names())
        looking = asyncio.create_task(look())
        calls = [
            fetcher.get(
                f"http://127.0.0.1:{port}/",
                param="input",
                deadline=Deadline.after(60),
                budget=MediaBudget(1 << 30),
            )
            for _ in range(8)
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        looking.cancel()
        await fetcher.close()
    assert {type(error) for error in found} == {MediaFetchError}
    # Each has eight, of 4 KiB.
    assert total >= 8 * 8 and most <= 2


async def test_a_body_in_pieces_of_a_byte_arrives_and_leaves_others_their_turns() -> None:
    count = 20_000

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n" * count + b"0\r\n\r\n")

    rounds = 0

    async def look() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(), resolver=Names())
        url = f"http://127.0.0.1:{port}/"
        calls = [
            fetcher.get(url, param="input", deadline=Deadline.after(60), budget=MediaBudget(1 << 30))
            for _ in range(3)
        ]
        looking = asyncio.create_task(look())
        assert await asyncio.gather(*calls) == [b"x" * count] * 3
        looking.cancel()
        await fetcher.close()
    # A read has 5,000 pieces and more.
    assert rounds > 3 * count // 100


async def test_of_a_names_many_addresses_few_are_judged() -> None:
    judged: list[str] = []

    class Counting(LoopbackPolicy):
        def address_refusal(self, address: str) -> str | None:
            judged.append(address)
            return super().address_refusal(address)

    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] * 4000

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"x", "connection: close"))

    async with server(handler) as port:
        fetcher = Fetcher(Counting(), resolver=resolver)
        url = f"http://many.example:{port}/"
        found = await fetcher.get(
            url, param="input", deadline=Deadline.after(60), budget=MediaBudget(1 << 30)
        )
        await fetcher.close()
    assert found == b"x"
    assert 0 < len(judged) <= 32


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_no_more_of_a_body_is_read_than_there_is_room_for(announced: bool) -> None:
    """What the system keeps of a connection is a few megabytes."""
    size, piece = 40 << 20, bytes(1 << 20)
    budget, sent = Budget(lambda: 2 * size), 0

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        framing = f"content-length: {size}" if announced else "transfer-encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode())
        for _ in range(size // len(piece)):
            writer.write(piece if announced else b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            sent += len(piece)
        if not announced:
            writer.write(b"0\r\n\r\n")

    budget.take("bob", 2 * size)
    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(), resolver=Names())
        body = asyncio.create_task(
            fetcher.get(
                f"http://127.0.0.1:{port}/",
                param="input",
                deadline=Deadline.after(100),
                budget=MediaBudget(1 << 30, "alice", holding(budget).hold_in_turn),
            )
        )
        clock, seen, since = asyncio.get_running_loop().time, -1, 0.0

        def rests() -> bool:
            nonlocal seen, since
            if sent != seen:
                seen, since = sent, clock()
            return clock() - since > 0.3

        await until(rests)
        assert not body.done() and sent < size // 2
        budget.give("bob", 2 * size)
        assert await body == bytes(size) and budget.held("alice") == size
        await fetcher.close()


async def test_a_body_that_finds_no_room_in_time_is_refused() -> None:
    budget = Budget(lambda: 100, unit="bytes")
    budget.take("alice", 70)

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"x" * 50))

    async with server(handler) as port:
        policy = LoopbackPolicy(timeout=0.3)
        fetcher = Fetcher(policy, resolver=Names())
        with pytest.raises(Overloaded, match="70 of 100 bytes"):
            await fetcher.get(
                f"http://127.0.0.1:{port}/",
                param="input",
                deadline=Deadline.after(100),
                budget=MediaBudget(1 << 30, "alice", holding(budget).hold_in_turn),
            )
        await fetcher.close()
    assert budget.held("alice") == 70


async def test_waiting_for_room_takes_nothing_of_the_time_to_fetch() -> None:
    async def hold(nbytes: int, seconds: float) -> None:
        await asyncio.sleep(1.5 * seconds)

    async def handler(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"x" * 50))

    async with server(handler) as port:
        fetcher = Fetcher(LoopbackPolicy(timeout=2.0), resolver=Names())
        found = await fetcher.get(
            f"http://127.0.0.1:{port}/",
            param="input",
            deadline=Deadline.after(100),
            budget=MediaBudget(1 << 30, "alice", hold),
        )
        await fetcher.close()
    assert found == b"x" * 50
