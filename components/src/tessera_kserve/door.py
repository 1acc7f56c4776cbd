"""Describes KServe to the launcher and to frontends.

The standard library alone, until a frontend asks for more: the launcher runs before anything is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tessera.frontend.door import Door, OpenDoor
    from tessera.frontend.service import Service
    from tessera.frontend.settings import FrontendSettings
    from tessera_kserve.settings import KserveSettings


class KserveDoor:
    """Adds ``/v2`` to the HTTP port, always, and answers by gRPC on a port of its own where it has one."""

    name: Final = "kserve"
    heading: Final = "KServe"
    ports: Final = ("--grpc-port",)

    def settings(self) -> type[KserveSettings]:
        from tessera_kserve.settings import KserveSettings

        return KserveSettings

    def check(self, settings: KserveSettings, frontend: FrontendSettings) -> None:
        settings.check(frontend)

    def open(self, settings: KserveSettings, service: Service) -> OpenDoor:
        from tessera_kserve.frontend import Kserve

        return Kserve(settings, service)


DOOR: Final[Door[KserveSettings]] = KserveDoor()
