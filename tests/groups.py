"""Fixtures that the tests of an ``xdist_group`` share, and that end with its last test.

A session's fixture lives until its process has run everything. A service with nothing more to do takes 10 to
30 ms of a processor in each second, and four of them waited a quarter of an hour for the end of a whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

_OF_GROUPS: set[Callable[..., Any]] = set()


def group_fixture(make: Callable[..., Any]) -> Any:
    """Declare a fixture that is made once for the tests of a group, and again for another group's."""
    _OF_GROUPS.add(make)
    return pytest.fixture(scope="session")(make)


def group_of(item: pytest.Item) -> str:
    """The name of the group that a collected test is in; each is in one (``tests/tiers.py``)."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    name: str = mark.args[0]
    return name


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # The session ends what is left, as it ends all of its fixtures.
    if nextitem is None or group_of(nextitem) == group_of(item):
        return
    with ExitStack() as all_of_them:
        for definitions in item.session._fixturemanager._arg2fixturedefs.values():
            for definition in definitions:
                if definition.func in _OF_GROUPS:
                    # What was made of it ends before it does.
                    all_of_them.callback(definition.finish, item._request)  # type: ignore[attr-defined]
