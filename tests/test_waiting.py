"""Waiting has a bound that is not short, says what did not come about, and is in no loop of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.waiting import SECONDS, until, wait_for_line, wait_until

TESTS = Path(__file__).parent
# What is called to let time pass. A turn of the loop, ``sleep(0)``, lets none.
PAUSES = {"sleep", "wait", "wait_for_timeout"}
# The end of a loop that keeps up a load, or serves: a clock, or what its owner sets.
BOUNDS = {"monotonic", "is_set", "is_closing", "stopping"}
# What waits by itself, and ends with the other side.
READS = {"read", "recv", "readline", "readuntil", "select"}
# Functions that pause in a loop for another reason than to see something come about, by file.
EXCEPTIONS = {
    "waiting.py": {"wait_until", "until"},
    # Their conditions wake them.
    "test_tasks.py": {"until"},
    "tracing/collector.py": {"wait"},
    # They go on for as long as their task or process.
    "deploy/kubernetes_api.py": {"watch", "probe"},
    "transport/test_conformance.py": {"heartbeat"},
    "transport/transport_peer.py": {"heartbeat"},
    "families/dual_encoder/__init__.py": {"misbehave"},
    # They send, again and again: at the pace of a slow host, after a refusal, or another fault each time.
    "checkpoint/local_hub.py": {"_file"},
    "e2e/floods.py": {"answer"},
    "e2e/test_pixels.py": {"test_pixels_of_all_types_in_one_batch_are_those_of_each_alone"},
    "clients/fuzz.py": {"_post"},
    "e2e/faults/test_soak_models.py": {"_post"},
    "e2e/faults/test_pixels.py": {"test_workers_that_are_killed_with_pixels_under_way_are_not_noticed"},
    "tessera_corpus/test_embed.py": {
        "test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost",
    },
    # They count how often there is something.
    "models/llama_nemotron_vl/test_tokenizer.py": {"test_a_long_text_does_not_hold_up_other_threads"},
    "rpc/test_retry_budget.py": {"spend"},
}


# What ends a wait for something that comes about, by the function that waits: its place among the arguments,
# its name, and the seconds that it has at least.
LEAST = {
    "wait_until": (1, "seconds", SECONDS),
    "until": (1, "seconds", SECONDS),
    "wait_for_line": (2, "seconds", SECONDS),
    "run": (None, "timeout", SECONDS),
    "check_output": (None, "timeout", SECONDS),
    "communicate": (None, "timeout", SECONDS),
    "wait_for": (1, "timeout", 60.0),
    "wait": (0, "timeout", 60.0),
    "join": (0, "timeout", 60.0),
    "after": (0, "seconds", 60.0),
    "create_connection": (None, "timeout", 60.0),
}
# Functions whose bound passes where all is well, by file: they look again and again.
PASSING = {
    "batching/test_death.py": {"synchronize"},
    "e2e/floods.py": {"answer"},
}


class Functions(ast.NodeVisitor):
    """Finds lines of a file, by the function."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self._function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef


class ShortBounds(Functions):
    """Finds the waits that end too soon on a slow machine, but for those that are expected to."""

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        if not any("raises" in names(item.context_expr) for item in node.items):
            self.generic_visit(node)

    visit_AsyncWith = visit_With

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.Not):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        place, name, least = LEAST.get(function, (None, "", 0.0))
        bounds = [keyword.value for keyword in node.keywords if keyword.arg == name]
        bounds += [] if place is None else node.args[place : place + 1]
        if any(
            isinstance(bound, ast.Constant) and isinstance(bound.value, int | float) and bound.value < least
            for bound in bounds
        ):
            self.found.append((self._function, node.lineno))
        self.generic_visit(node)


class Loops(Functions):
    """Finds the loops in which a file waits."""

    def visit_While(self, node: ast.While) -> None:
        if _waits(node) and not names(node.test) & (BOUNDS | READS):
            self.found.append((self._function, node.lineno))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        # So many looks with a pause, and a way out.
        over = isinstance(node.iter, ast.Call) and names(node.iter.func) & {"range", "count"}
        leaves = any(isinstance(inner, ast.Return | ast.Break) for inner in ast.walk(node))
        if over and leaves and _pauses(node):
            self.found.append((self._function, node.lineno))
        self.generic_visit(node)


def names(node: ast.AST) -> set[str]:
    return {
        inner.id if isinstance(inner, ast.Name) else inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute)
    }


def _pauses(node: ast.AST) -> bool:
    return any(
        isinstance(inner, ast.Call)
        and names(inner.func) & PAUSES
        and not (inner.args and isinstance(inner.args[0], ast.Constant) and inner.args[0].value == 0)
        for inner in ast.walk(node)
    )


def _waits(node: ast.While) -> bool:
    """Whether it pauses, or does nothing but look: its body changes nothing that its condition looks at."""
    calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.test))
    idle = all(isinstance(one, ast.Pass | ast.Assert | ast.AugAssign) for one in node.body)
    return _pauses(node) or (calls and idle)


def found_by(visitor: Functions, source: str) -> list[tuple[str, int]]:
    visitor.visit(ast.parse(source))
    return visitor.found


def waiting(source: str) -> list[tuple[str, int]]:
    return found_by(Loops(), source)


@pytest.mark.parametrize(("kind", "exceptions"), [(Loops, EXCEPTIONS), (ShortBounds, PASSING)])
def test_nobody_waits_in_a_loop_of_its_own_or_too_shortly(
    kind: type[Functions], exceptions: dict[str, set[str]]
) -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line} in {function}"
        for path in TESTS.rglob("*.py")
        for function, line in found_by(kind(), path.read_text(encoding="utf-8"))
        if function not in exceptions.get(str(path.relative_to(TESTS)), ())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "wait_until(lambda: seen, 30)",
        "await until(lambda: seen, seconds=5.0)",
        "subprocess.run(command, timeout=60)",
        "await asyncio.wait_for(reader.read(), 5)",
        "assert process.wait(timeout=10) == 0",
        "thread.join(10)",
    ],
)
def test_a_short_bound_is_seen(source: str) -> None:
    assert len(found_by(ShortBounds(), source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "with pytest.raises(TimeoutError):\n    await asyncio.wait_for(call, 0.1)",
        "assert not await peers.wait(0.1)",
        "process.wait()",
        "wait_until(lambda: seen)",
        "', '.join(names)",
    ],
)
def test_a_bound_that_is_long_or_expected_to_pass_is_none(source: str) -> None:
    assert found_by(ShortBounds(), source) == []


@pytest.mark.parametrize(
    "source",
    [
        "while http.post(url).status_code != 429: pass",
        "while not log.exists():\n    assert process.poll() is None",
        "while not held:\n    page.wait_for_timeout(10)",
        "while len(waiting) < 16:\n    await asyncio.sleep(0.01)",
        "while True:\n    if seen():\n        break\n    time.sleep(0.1)",
        "for _ in range(600):\n    if seen():\n        break\n    time.sleep(0.1)",
        "while refused < 150:\n    await asyncio.wait(ended, timeout=1)",
        "while (answer := post()).status_code == 400:\n    count += 1",
    ],
)
def test_every_way_to_wait_is_seen(source: str) -> None:
    assert len(waiting(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "while data := await reader.read(65536):\n    await asyncio.sleep(0.1)",
        "while not done.is_set():\n    post()\n    time.sleep(0.1)",
        "while value and isinstance(value, list):\n    value = value[0]",
        "for _ in range(3):\n    await asyncio.sleep(0)",
        "for _ in range(3):\n    post()\n    time.sleep(0.1)",
    ],
)
def test_what_looks_like_it_is_none(source: str) -> None:
    assert waiting(source) == []


def test_every_exception_is_still_one() -> None:
    for kind, exceptions in ((Loops, EXCEPTIONS), (ShortBounds, PASSING)):
        for name, functions in exceptions.items():
            source = (TESTS / name).read_text()
            assert functions <= {function for function, _ in found_by(kind(), source)}, name


def test_the_first_true_value_is_given() -> None:
    values = iter(["", None, "there"])
    assert wait_until(lambda: next(values)) == "there"


async def test_coroutines_wait_as_well_as_functions() -> None:
    values = iter([0, 0, 1])

    async def later() -> int:
        return next(values)

    assert await until(later) == 1
    assert await until(lambda: 5) == 5


async def test_what_does_not_come_about_is_named_with_its_last_value() -> None:
    def odd() -> bool:
        raise OSError("not there yet")

    with pytest.raises(AssertionError, match=r"(?s)not within 0\.01 s: .*\[\] == \[3\].* is False\na log"):
        wait_until(lambda: [] == [3], 0.01, said=lambda: "a log")
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: def odd.*OSError\('not there yet'\)"):
        await until(odd, 0.01, despite=OSError)
    with pytest.raises(OSError, match="not there yet"):
        await until(odd, despite=ValueError)


def test_what_a_process_did_before_it_ended_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", f"open({str(log)!r}, 'w').write('ready')"]
    with subprocess.Popen(command) as process:
        process.wait()
        wait_for_line(log, "ready", process=process)
        with pytest.raises(
            AssertionError, match=r"(?s)ended with status 0 before: .*'steady' is not in .*ready"
        ):
            wait_for_line(log, "steady", process=process)


def test_clients_are_patient() -> None:
    with httpx.Client() as client:
        assert client.timeout == httpx.Timeout(60.0)
