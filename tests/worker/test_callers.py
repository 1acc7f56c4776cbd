"""A worker's room is divided among the frontends that still ask."""

from __future__ import annotations

from tessera.fair_share import Callers


def test_whoever_has_stopped_asking_is_not_counted() -> None:
    now = 0.0
    callers = Callers(lambda: now)
    assert callers.share("a").of(900, least=1) == 900
    assert callers.share("b").of(900, least=1) == 450
    assert callers.share("c").of(900, least=1) == 300
    now = 4.0
    assert callers.share("a").of(900, least=1) == 300
    now = 8.0
    assert callers.share("a").of(900, least=1) == 900


def test_each_may_send_a_full_batch() -> None:
    callers = Callers(lambda: 0.0)
    for name in "abcd":
        callers.share(name)
    share = callers.share("e")
    assert share.of(1000, least=400) == 400
    assert share.of(300, least=400) == 300
    assert share.of(0, least=400) == 0
