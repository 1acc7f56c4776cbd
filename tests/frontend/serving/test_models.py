"""Models that cannot be opened now, and what the reader of their list does then."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tessera.errors import ConfigError, Unavailable
from tessera.frontend import __main__ as main
from tessera.frontend.model_settings import ModelSettings
from tessera.frontend.serving.models import Models
from tessera.frontend.serving.served import ServedModel
from tessera.tasks import KEEPER
from tests.waiting import until


def named(name: str, slot: int) -> ModelSettings:
    return ModelSettings(served_model_names=(name,), slot=slot)


class Opening:
    """Opens models, but for those that have an error."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.models = Models(self.open, lambda model: None, patience=1.0)

    async def open(self, settings: ModelSettings) -> ServedModel:
        if settings.name in self.errors:
            raise self.errors[settings.name]
        served = SimpleNamespace(names=settings.served_model_names)
        return cast(ServedModel, SimpleNamespace(settings=settings, served=served))


@pytest.mark.parametrize(
    "error", [RuntimeError("etcd is away"), OverflowError("no room"), OSError(24, "too many")]
)
async def test_a_model_that_could_not_be_opened_is_opened_later(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening(two=error)
    models, wanted = opening.models, [named(name, slot) for slot, name in enumerate(("one", "two", "three"))]
    assert not await models.follow(wanted)
    assert [model.settings.name for model in models] == ["one", "three"]
    why = f"cannot be opened now, and will be tried again: {type(error).__name__}"
    assert models.waiting == {"two": why} and str(error) in caplog.text
    with pytest.raises(Unavailable, match=why):
        models.find("two")
    opening.errors.clear()
    assert await models.follow(wanted)
    assert [model.settings.name for model in models] == ["one", "two", "three"]


async def test_the_same_error_would_come_again_from_a_wrong_checkpoint() -> None:
    models = Opening(one=ConfigError("wrong")).models
    assert await models.follow([named("one", 0), named("two", 1)])
    assert models.waiting == {"one": "cannot be opened: wrong"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KEEPER, "first_pause", 0.01)
    monkeypatch.setattr(main, "_AGAIN_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
async def test_sighup_is_heard_after_every_error(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[bool | Exception] = [RuntimeError("odd"), RuntimeError("odd"), False, True, True]
    asked = 0

    async def follow() -> bool:
        nonlocal asked
        answer = answers[asked]
        asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    tasks: set[asyncio.Task[None]] = set()
    main._follow_when_told(cast(Any, SimpleNamespace(follow=follow, tasks=tasks)))
    # What could not be done is done again without another word.
    await until(lambda: asked == 4)
    assert "RuntimeError: odd" in caplog.text
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: asked == 5)
    (task,) = tasks
    task.cancel()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
