"""The settings of KServe's door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from tessera.errors import ConfigError
from tessera.extras import absent, missing
from tessera.settings import MIB, PORT, POSITIVE, Setting

if TYPE_CHECKING:
    from tessera.frontend.settings import FrontendSettings

_GRPC_PORT: Final = "--grpc-port"
# Not imported before they are used: it takes half a second.
_NEEDED: Final = ("grpc", "google.protobuf")


class KserveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """KServe v2 beyond ``/v2`` of the HTTP port, which is always there."""

    grpc_port: Annotated[
        int,
        Setting(
            flag=_GRPC_PORT,
            check=PORT,
            help="the port of KServe v2 over gRPC (Triton uses 8001); 0: none",
            more="All frontends of a service answer on it, with TLS if HTTP has it",
        ),
    ] = 0
    max_message_bytes: Annotated[
        int,
        Setting(
            flag="--grpc-max-message-mb",
            unit=MIB,
            check=POSITIVE,
            help="largest message of gRPC; of a larger one RESOURCE_EXHAUSTED",
            more="More travels in several calls, in a body of HTTP, or in shared memory. A frontend does "
            "nothing else while gRPC joins a message: 0.05 s of processor time for 32 MiB, 0.09 for 60",
        ),
    ] = 32 << 20
    shared_memory: Annotated[
        str,
        Setting(
            flag="--kserve-shared-memory",
            metavar="PREFIX",
            help="let KServe clients of this host name tensors in CUDA memory, and in files of /dev/shm "
            "whose names begin with PREFIX; needs a single frontend",
        ),
    ] = ""

    def check(self, frontend: FrontendSettings) -> None:
        """Raises ``ConfigError`` for what this frontend cannot have."""
        if self.grpc_port and absent(*_NEEDED):
            raise missing(_GRPC_PORT, "grpcio", "protobuf", extra="kserve")
        seat = frontend.seat
        if self.shared_memory and seat is not None and seat.size > 1:
            raise ConfigError(
                "--kserve-shared-memory: regions are one frontend's, and there are "
                f"{seat.size} on this port; --frontends 1"
            )
