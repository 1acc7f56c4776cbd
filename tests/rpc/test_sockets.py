"""Small messages in quick succession must not wait for each other's confirmation."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from tessera.rpc.runtime import own_sockets, send_at_once
from tests.rpc.conftest import Deployment, echo, echoing
from tests.waiting import until


def at_once(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def test_what_is_open_and_what_is_accepted_later_sends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as unconnected:
        with socket.create_connection(listening.getsockname()) as caller, listening.accept()[0] as early:
            assert not at_once(early)
            send_at_once()
            assert at_once(early) and at_once(caller) and at_once(unconnected)
        with socket.create_connection(listening.getsockname()) as caller, listening.accept()[0] as late:
            assert at_once(late) and not at_once(caller)


def test_other_descriptors_are_left_alone() -> None:
    read, write = os.pipe()
    one, other = socket.socketpair()
    with one, other, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        send_at_once()
        one.send(b"x")
        os.write(write, b"y")
        assert other.recv(1) == b"x" and os.read(read, 1) == b"y" and datagrams.fileno() > 0
    os.close(read)
    os.close(write)


async def test_a_server_acknowledges_at_once(deployment: Deployment) -> None:
    server = await deployment.serve(echoing)
    client = await deployment.client()
    await client.call(server.instance, echo(3), timeout=60)
    # Both ends of the connections of this process with itself; a reply's own lasts for that reply alone.
    assert connections()
    await until(lambda: all(connections()))


def connections() -> list[bool]:
    """For each connected TCP socket of this process whether it sends at once."""
    found = []
    for each in own_sockets():
        with suppress(OSError), each:
            if each.family == socket.AF_INET and each.getpeername():
                found.append(at_once(each))
    return found
