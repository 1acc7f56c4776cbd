"""The models that one frontend serves, by every name of theirs; some of them may not be there yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from tessera.errors import TesseraError, Unavailable
from tessera.frontend.model_settings import ModelSettings
from tessera.frontend.serving.served import ServedModel, not_found
from tessera.model_names import find_name

log = logging.getLogger(__name__)

# How often a model that is leaving is looked at: this frontend or another of the port may have work for it.
_LOOK_SECONDS: Final = 0.05

# Opening a checkpoint takes a second or so; a download takes longer, and clients ask again.
_AGAIN_SECONDS: Final = 1.0


class Models:
    """Owned by one event loop.

    ``open_model`` makes a model of its settings, and ``leave`` says that it is asked for no more; what is in
    flight is waited for, ``patience`` seconds at most, before it is closed. ``served`` are in the order of
    the settings; ``by_name`` has each of them under each of its names. ``waiting`` says of names why there
    is nothing to ask under them now; ``names`` are all. ``leaving`` are those by name that are asked for no
    more, until nothing of theirs is in flight, in all frontends of a port.
    """

    def __init__(
        self,
        open_model: Callable[[ModelSettings], Awaitable[ServedModel]],
        leave: Callable[[ServedModel], None],
        *,
        patience: float,
    ) -> None:
        self._open_model = open_model
        self._leave = leave
        self._patience = patience
        self.served: tuple[ServedModel, ...] = ()
        self.by_name: dict[str, ServedModel] = {}
        self.waiting: dict[str, str] = {}
        self.names: tuple[str, ...] = ()
        self.leaving: dict[str, ServedModel] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._following = asyncio.Lock()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.served)

    async def start(self, wanted: Sequence[ModelSettings]) -> None:
        """Open them; raises the error of the first that cannot be."""
        found = [await self._open_model(model) for model in wanted if not model.loading]
        self._show(wanted, found)

    async def follow(self, wanted: Sequence[ModelSettings]) -> bool:
        """Serve these from now on: what is new is opened, what is not among them is asked for no more.

        One that cannot be opened is not served: the log and ``waiting`` give the reason. False when that was
        an error of no type of ours, of discovery that is away for example, and worth another try.
        """
        async with self._following:
            return await self._follow(wanted)

    async def _follow(self, wanted: Sequence[ModelSettings]) -> bool:
        now = {model.settings.name: model for model in self.served}
        kept: list[ServedModel] = []
        new: list[ModelSettings] = []
        for model in wanted:
            served = now.get(model.name)
            if served is not None and _same(served.settings, model):
                served.settings = model
                kept.append(served)
            else:
                new.append(model)
        refused: dict[str, str] = {}
        again = False
        self._show(wanted, kept)
        for gone in now.values():
            if gone not in kept:
                self._end(gone)
        for model in new:
            if model.loading:
                continue
            try:
                kept.append(await self._open_model(model))
            except TesseraError as error:
                log.error("%s cannot be opened: %s", model.name, error)
                refused |= dict.fromkeys(model.served_model_names, f"cannot be opened: {error}")
            except Exception as error:
                again = True
                log.exception("%s cannot be opened now", model.name)
                why = f"cannot be opened now, and will be tried again: {type(error).__name__}"
                refused |= dict.fromkeys(model.served_model_names, why)
            self._show(wanted, kept)
            self.waiting |= refused
        return not again

    def _show(self, wanted: Sequence[ModelSettings], open_: Sequence[ServedModel]) -> None:
        by_first = {model.settings.name: model for model in open_}
        self.served = tuple(by_first[model.name] for model in wanted if model.name in by_first)
        self.by_name = {name: model for model in self.served for name in model.served.names}
        self.waiting = {
            name: model.loading or "is being opened"
            for model in wanted
            if model.name not in by_first
            for name in model.served_model_names
        }
        self.names = (*self.by_name, *self.waiting)
        log.info("serving %s", ", ".join(model.settings.name for model in self.served) or "no model yet")

    def find(self, name: str) -> ServedModel:
        """The model that a client means; raises ``ModelNotFound``, and ``Unavailable`` for a waiting one."""
        if (served := find_name(name, self.by_name)) is not None:
            return self.by_name[served]
        if (waiting := find_name(name, self.waiting)) is not None:
            raise Unavailable(
                f"the model {waiting!r} {self.waiting[waiting]}", param="model", retry_after=_AGAIN_SECONDS
            )
        raise not_found(name, self.names)

    def _end(self, model: ServedModel) -> None:
        self._leave(model)
        self.leaving[model.settings.name] = model
        task = asyncio.create_task(self._close(model), name=f"end {model.settings.name}")
        self._ending.add(task)
        task.add_done_callback(partial(self._ended, model))

    def _ended(self, model: ServedModel, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if self.leaving.get(model.settings.name) is model:
            del self.leaving[model.settings.name]

    async def _close(self, model: ServedModel) -> None:
        try:
            async with asyncio.timeout(self._patience):
                while model.room.requests.used:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            log.warning("%s is closed with requests in flight", model.settings.name)
        await model.close()

    async def close(self) -> None:
        open_ = (*self.served, *self.leaving.values())
        for task in tuple(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        for model in open_:
            await model.close()


def _same(one: ModelSettings, other: ModelSettings) -> bool:
    """Whether they differ in nothing, or in the number of workers that are expected alone."""
    counts = {"expected_embed": 0, "expected_encode": 0}
    return msgspec.structs.replace(one, **counts) == msgspec.structs.replace(other, **counts)
