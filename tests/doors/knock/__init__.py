"""A door with a flag, routes and a port, which says a word to whoever knocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tessera.frontend.door import Door, OpenDoor
    from tessera.frontend.service import Service
    from tessera.frontend.settings import FrontendSettings
    from tests.doors.knock.settings import KnockSettings


class KnockDoor:
    """Describes it with the standard library alone."""

    name: Final = "knock"
    heading: Final = "knocking"
    ports: Final = ("--knock-port",)

    def settings(self) -> type[KnockSettings]:
        from tests.doors.knock.settings import KnockSettings

        return KnockSettings

    def check(self, settings: KnockSettings, frontend: FrontendSettings) -> None:
        settings.check(frontend)

    def open(self, settings: KnockSettings, service: Service) -> OpenDoor:
        from tests.doors.knock.frontend import Knock

        return Knock(settings, service)


DOOR: Final[Door[KnockSettings]] = KnockDoor()
