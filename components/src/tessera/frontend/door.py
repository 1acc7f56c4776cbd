"""Describes a door: what a package beside the core adds to a frontend, so that requests come by it as well.

A door is found by its entry point in the group ``tessera.doors``, and nothing in the core names one. The
launcher looks at its ports before anything is installed: the module of the entry point, and what that imports
as it is loaded, need the standard library alone. So does this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tessera.siblings import DOORS, load, siblings

if TYPE_CHECKING:
    import msgspec

    from tessera.frontend.http.tls import Certificate
    from tessera.frontend.service import ClientApi, Service
    from tessera.frontend.settings import FrontendSettings

S = TypeVar("S", bound="msgspec.Struct")


class Door(Protocol[S]):
    """Describes a door that is installed, to the launcher and to frontends; its settings are an ``S``."""

    @property
    def name(self) -> str:
        """Return the name of its settings among ``FrontendSettings.doors``."""

    @property
    def heading(self) -> str:
        """Return what its flags stand below in ``--help`` and in the docs."""

    @property
    def ports(self) -> tuple[str, ...]:
        """Return its flags that are ports, 0 for none; the launcher finds out whether somebody has them."""

    def settings(self) -> type[S]:
        """Return the type of its settings, each of which has a default.

        ``FrontendSettings`` is made of it: its module is loaded before that exists.
        """

    def check(self, settings: S, frontend: FrontendSettings) -> None:
        """Compare its settings with all others, before models are looked for; raises ``ConfigError``."""

    def open(self, settings: S, service: Service) -> OpenDoor:
        """Return the door of one frontend, which listens nowhere yet."""


class OpenDoor(Protocol):
    """Takes requests for one service; owned by its event loop."""

    @property
    def apis(self) -> Sequence[ClientApi]:
        """Return what it adds to the HTTP port."""

    async def listen(self, certificate: Certificate | None) -> None:
        """Take requests on ports of its own, if it has any, by TLS where there is a certificate.

        HTTP is not served yet. Raises ``ConfigError`` where a port cannot be had.
        """

    async def drain(self, seconds: float) -> None:
        """Take no more requests on its own ports; those under way have so many seconds."""

    def close(self) -> None:
        """Let go of all else; no request is under way, and the service is closed."""


@cache
def doors() -> tuple[Door[Any], ...]:
    """Return the doors that are installed, in the order of their names."""
    return tuple(load(entry) for entry in siblings(DOORS))


def check_doors(settings: FrontendSettings) -> None:
    """Have every door check its settings; raises ``ConfigError``."""
    for door in doors():
        door.check(getattr(settings.doors, door.name), settings)


def open_doors(service: Service) -> list[OpenDoor]:
    """Open every door for a service."""
    settings = service.settings.doors
    return [door.open(getattr(settings, door.name), service) for door in doors()]
