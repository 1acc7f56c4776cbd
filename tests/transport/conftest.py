from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from transport_peer import Peer

from tessera.transport.inbox import Inbox
from tessera.transport.outbox import Outbox
from tessera.transport.settings import TransportSettings


@pytest.fixture(scope="session")
def peer() -> Iterator[Peer]:
    """A process that outlives each test; tests that kill their peer start their own."""
    process = Peer()
    yield process
    process.close()


@pytest.fixture
def mortal_peer() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.close()


@pytest.fixture
def make_inbox() -> Iterator[Callable[..., Inbox]]:
    made: list[Inbox] = []

    def make(transport: str, staging_mb: int = 0, **changes: object) -> Inbox:
        settings = TransportSettings(kind=transport, nixl_interfaces="", staging_mb=staging_mb)
        made.append(Inbox("reader-1", settings, **changes))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for inbox in made:
        inbox.close()


@pytest.fixture
def make_outbox() -> Iterator[Callable[..., Outbox]]:
    from transport_peer import outbox_config

    made: list[Outbox] = []

    def make(**changes: object) -> Outbox:
        made.append(Outbox(**outbox_config(**changes)))
        return made[-1]

    yield make
    for outbox in made:
        outbox.close()
