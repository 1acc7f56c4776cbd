"""The settings of KServe's door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from tessera.errors import ConfigError
from tessera.settings import PORT, Setting

if TYPE_CHECKING:
    from tessera.frontend.settings import FrontendSettings

GRPC_PORT: Final = "--grpc-port"


class KserveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """KServe v2 beyond ``/v2`` of the HTTP port, which is always there."""

    grpc_port: Annotated[
        int,
        Setting(
            flag=GRPC_PORT,
            check=PORT,
            help="of KServe v2 over gRPC, where Triton has 8001; 0: none",
            more="All frontends of a service answer on it, by TLS where HTTP does",
        ),
    ] = 0
    shared_memory: Annotated[
        str,
        Setting(
            flag="--kserve-shared-memory",
            metavar="PREFIX",
            help="let KServe clients of this host name tensors in files of /dev/shm that begin so, and in "
            "CUDA memory; one frontend alone",
        ),
    ] = ""

    def check(self, frontend: FrontendSettings) -> None:
        """Raises ``ConfigError`` for what this frontend cannot have."""
        seat = frontend.seat
        if self.shared_memory and seat is not None and seat.size > 1:
            raise ConfigError(
                "--kserve-shared-memory: regions are one frontend's, and there are "
                f"{seat.size} on this port; --frontends 1"
            )
