"""No background loop of the package ends by an error, and the next one that is written will not either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tessera import free_memory
from tessera.errors import EngineDead
from tessera.frontend.group import PULSE_SECONDS, FrontendGroup
from tessera.frontend.http.tls import Certificate
from tessera.frontend.service import Service
from tessera.tasks import KEEPER
from tessera.worker import stall
from tests.authority import Authority, needs_openssl
from tests.loops import Switch, fails_and_goes_on, quick
from tests.waiting import until

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")

SOURCES = Path(__file__).parent.parent / "components" / "src"


async def test_a_frontend_shows_that_it_is_there_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    switch, group = Switch(), FrontendGroup()
    group.siblings = [0]
    pulses = 0

    def pulse(workers: object, *, lent_bytes: int) -> None:
        nonlocal pulses
        switch.check()
        pulses += 1

    group.pulse = pulse  # type: ignore[method-assign]
    service = cast(Any, SimpleNamespace(group=group, models=(), _lender=SimpleNamespace(lent=0)))
    loop = KEEPER.start("group", partial(Service._pulse, service), every=PULSE_SECONDS)
    await until(lambda: pulses > 0)
    before = pulses
    await fails_and_goes_on("group", switch, lambda: pulses > before, caplog)
    loop.cancel()


@needs_openssl
async def test_certificates_are_looked_at_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switch, looks = Switch(), 0

    class Odd(Certificate):
        def _signature(self) -> tuple[object, ...]:
            nonlocal looks
            switch.check()
            looks += 1
            return super()._signature()

    monkeypatch.setattr("tessera.frontend.http.tls._LOOK_SECONDS", 0.01)
    loop = Odd(*Authority(tmp_path).sign("server")).watch()
    await until(lambda: looks > 1)
    before = looks
    await fails_and_goes_on("certificate", switch, lambda: looks > before, caplog)
    loop.cancel()


async def test_an_engine_is_watched_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    switch, busy, dead = Switch(), 0.0, cast("list[EngineDead]", [])

    def running_seconds() -> float:
        switch.check()
        return busy

    patience = SimpleNamespace(stall_seconds=0.05)
    settings = SimpleNamespace(stages=SimpleNamespace(text=patience, vision=patience))
    service = SimpleNamespace(running_seconds=running_seconds)
    loop = stall.watch(cast(Any, service), cast(Any, settings), dead.append)

    def died() -> bool:
        nonlocal busy
        busy = 1.0
        return bool(dead)

    await fails_and_goes_on("stall", switch, died, caplog)
    loop.cancel()


async def test_memory_is_given_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switch, looks = Switch(), 0

    class Clock:
        @staticmethod
        def process_time() -> float:
            nonlocal looks
            switch.check()
            looks += 1
            return 0.0

        perf_counter = process_time

    monkeypatch.setattr(free_memory, "time", Clock)
    loop = free_memory.give_back_free_memory(every=0.01)
    if loop is None:
        pytest.skip("the C library is not glibc")
    await until(lambda: looks > 1)
    before = looks
    await fails_and_goes_on("memory", switch, lambda: looks > before, caplog)
    loop.cancel()


# What is written next.

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_ONES_OF_TASKS = {"create_task", "ensure_future"}


def own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """What stands in a function, and not in one inside it."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def is_endless(function: ast.AsyncFunctionDef) -> bool:
    """Whether it loops until it is cancelled: for ever, or in the end on a condition that asks nobody."""
    for node in own_nodes(function):
        if not isinstance(node, ast.While):
            continue
        lasting = isinstance(node.test, ast.Name | ast.Attribute) and node is function.body[-1]
        if lasting or (isinstance(node.test, ast.Constant) and node.test.value):
            inside = [inner for statement in node.body for inner in ast.walk(statement)]
            if not any(isinstance(inner, ast.Return | ast.Break) for inner in inside):
                return True
    return False


def bare_loops(sources: dict[str, str]) -> list[str]:
    """Endless coroutines that become tasks which nothing keeps, as ``file:line name``."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    endless = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and is_endless(node)
    }
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args and name_of(node.func) in _ONES_OF_TASKS):
                continue
            made = node.args[0]
            if isinstance(made, ast.Call) and (name := name_of(made.func)) in endless:
                found.append(f"{file}:{node.lineno} {name}")
    return found


def name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_every_endless_loop_is_kept() -> None:
    sources = {str(path.relative_to(SOURCES)): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}
    # The keeper's own.
    assert bare_loops(sources) == [f"tessera/tasks.py:{keepers_line(sources['tessera/tasks.py'])} _run"]


def keepers_line(source: str) -> int:
    return next(
        number for number, line in enumerate(source.splitlines(), 1) if "create_task(self._run(" in line
    )


BARE = """
class Watcher:
    def __init__(self):
        self.task = asyncio.create_task(self._watch(), name="watch")

    async def _watch(self):
        while {condition}:
            await asyncio.sleep(1)
            {after}
"""


@pytest.mark.parametrize(("condition", "after", "count"), [
    ("True", "self.look()", 1),
    ("self.there", "self.look()", 1),
    ("True", "if self.look(): return", 0),
    ("not await self.look()", "pass", 0),
])  # fmt: skip
def test_a_bare_loop_is_found(condition: str, after: str, count: int) -> None:
    assert len(bare_loops({"watcher.py": BARE.format(condition=condition, after=after)})) == count
