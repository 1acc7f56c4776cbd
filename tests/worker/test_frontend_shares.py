"""A worker's room is divided among the frontends that still ask."""

from __future__ import annotations

from tessera.worker.frontend_shares import FrontendShares


def test_whoever_has_stopped_asking_is_not_counted() -> None:
    now = 0.0
    shares = FrontendShares(lambda: now)
    assert shares.of("a").of(900, least=1) == 900
    assert shares.of("b").of(900, least=1) == 450
    assert shares.of("c").of(900, least=1) == 300
    now = 4.0
    assert shares.of("a").of(900, least=1) == 300
    now = 8.0
    assert shares.of("a").of(900, least=1) == 900


def test_each_may_send_a_full_batch() -> None:
    shares = FrontendShares(lambda: 0.0)
    for name in "abcd":
        shares.of(name)
    share = shares.of("e")
    assert share.of(1000, least=400) == 400
    assert share.of(300, least=400) == 300
    assert share.of(0, least=400) == 0
