"""The settings of the door: a port, and a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from tessera.errors import ConfigError
from tessera.settings import PORT, Setting

if TYPE_CHECKING:
    from tessera.frontend.settings import FrontendSettings


class KnockSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where to knock, and what is said."""

    port: Annotated[int, Setting(flag="--knock-port", check=PORT, help="to knock on; 0: none")] = 0
    word: Annotated[str, Setting(flag="--knock-word", help="what is said to who knocks")] = "come in"

    def check(self, frontend: FrontendSettings) -> None:
        """Raises ``ConfigError`` for a port that HTTP has."""
        if self.port == frontend.port:
            raise ConfigError(f"--knock-port {self.port}: HTTP has that port")
