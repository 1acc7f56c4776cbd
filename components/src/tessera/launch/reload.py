"""What SIGHUP does to a service of several models: the file is read again, and the models follow it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from tessera.launch.models import MOST_MODELS, Deployed, WantedModel, free_slot
from tessera.launch.settings import SettingError

if TYPE_CHECKING:
    from tessera.launch.service import Service

_DOWNLOADED: Final = "is being downloaded"
_REPLACED: Final = "is being replaced"

Steps = Generator[None, None, None]
Reread = Callable[[], tuple[Sequence[WantedModel], Sequence[str]]]


def reload(service: Service, reread: Reread) -> Steps:
    """Add, take away and replace models; the others serve on.

    What is new is found, and its memory counted, before anything else is touched: until then a
    ``SettingError`` leaves all as it was. Then the frontends are told, workers that are not wanted any more
    finish what they have, and the new ones are started.
    """
    wanted, changed = reread()
    for name in changed:
        service.report.warn(f"{name} has changed, which takes effect after a restart")
    now = {model.wanted.key: model for model in service.models}
    kept = {
        one.key: now[one.key]
        for one in wanted
        if one.key in now and now[one.key].wanted.of_workers == one.of_workers
    }
    followed = [one for one in wanted if one.key in kept and kept[one.key].wanted != one]
    for one in followed:
        one.check()
    leaving = [model for key, model in now.items() if key not in kept]
    new: list[Deployed] = []
    for one in wanted:
        if one.key not in kept:
            one.check()
            staying = {model.slot for model in (*kept.values(), *new)}
            # Frontends may still keep something where a model was that is leaving.
            avoided = staying | {model.slot for model in leaving}
            slots = avoided if free_slot(avoided) < MOST_MODELS else staying
            new.append(service.deployed(one, slots))
    if not (new or leaving or followed):
        service.report.say("no model was added, taken away or changed")
        return
    added = [model.name for model in new if model.wanted.key not in now]
    if added and service.settings.dyn_request_plane == "nats":
        raise SettingError(f"over NATS a model is added by a restart: {', '.join(added)}")
    before = list(service.models)
    try:
        yield from _prepare(service, new, list(kept.values()), leaving)
    except (SettingError, OSError):
        if service.models != before:
            service.models[:] = before
            _tell(service)
        raise
    for one in followed:
        kept[one.key].follow(one)
    by_key = kept | {model.wanted.key: model for model in new}
    service.models[:] = [by_key[one.key] for one in wanted]
    for model in new:
        model.loading = _REPLACED if model.wanted.key in now else ""
    _tell(service)
    yield from _end(service, leaving)
    for model in new:
        model.loading = ""
        service.start_workers(model)
    _tell(service)
    service.report.say(_said(new, leaving, followed, now))
    if new:
        yield from _wait_ready(service, new)


def _prepare(
    service: Service, new: Sequence[Deployed], kept: Sequence[Deployed], leaving: Sequence[Deployed]
) -> Steps:
    """Find the new models, and room for their workers. Raises ``SettingError``."""
    known = {model.wanted.key for model in leaving}
    for model in new:
        if not os.path.isdir(model.settings.model_path):
            model.loading = _DOWNLOADED
    if shown := [model for model in new if model.loading and model.wanted.key not in known]:
        service.models += shown
        _tell(service)
    for model in new:
        yield from service.find(model)
    yield from service.place(new, kept, leaving)


def _tell(service: Service) -> None:
    """Let the frontends read what models there are."""
    if service.settings.frontends:
        service.write_models()
        service.supervisor.tell("frontend", signal.SIGHUP)


def _end(service: Service, leaving: Sequence[Deployed]) -> Steps:
    """End the workers of models once no frontend has work for them."""
    from tessera.launch.ready import Asking, Gone

    if leaving and service.urls:
        states = {model.name: model.loading for model in service.models}
        gone = Gone(
            frontends=service.urls,
            models={model.name: states.get(model.name, "") for model in leaving},
            together=service.settings.frontends,
        )
        asking = Asking(gone, service.settings.stop_timeout_seconds)
        while not asking.done.is_set():
            yield
    children = [child for model in leaving for child in model.children]
    # Embed workers have work for encode workers.
    for encode in (False, True):
        told = [child for child in children if (child.role == "encode") is encode]
        service.supervisor.leave(told)
        # Each is equal to itself alone.
        while any(child in service.supervisor.children for child in told):
            yield


def _wait_ready(service: Service, new: Sequence[Deployed]) -> Steps:
    from tessera.launch.ready import Asking

    asking = Asking(service.expected(new), service.settings.ready_timeout_seconds)
    while not asking.done.is_set():
        if service.signals.told_to_reread:
            asking.hopeless.set()
        yield
    if asking.ready:
        service.report.say(f"ready: {', '.join(model.name for model in new)}")


def _said(
    new: Sequence[Deployed],
    leaving: Sequence[Deployed],
    followed: Sequence[WantedModel],
    now: Mapping[str, Deployed],
) -> str:
    keys = {model.wanted.key for model in new}
    parts = {
        "added": [model.name for model in new if model.wanted.key not in now],
        "changed": [one.name for one in followed],
        "replaced": [model.name for model in new if model.wanted.key in now],
        "taken away": [model.name for model in leaving if model.wanted.key not in keys],
    }
    return "models: " + "; ".join(f"{what} {', '.join(names)}" for what, names in parts.items() if names)
