from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from transport_peer import Peer

from tessera.transport.inbox import Inbox, InboxConfig
from tessera.transport.outbox import Outbox


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

    def make(transport: str, **changes: object) -> Inbox:
        made.append(Inbox(InboxConfig(reader="reader-1", transport=transport, **changes)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for inbox in made:
        inbox.close()


@pytest.fixture
def make_outbox() -> Iterator[Callable[..., Outbox]]:
    from transport_peer import outbox_config

    made: list[Outbox] = []

    def make(**changes: object) -> Outbox:
        made.append(Outbox(outbox_config(**changes)))
        return made[-1]

    yield make
    for outbox in made:
        outbox.close()
