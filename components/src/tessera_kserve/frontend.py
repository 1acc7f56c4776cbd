"""KServe in one frontend: routes of the HTTP port, and a port for gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.frontend.http.tls import Certificate
from tessera.frontend.service import ClientApi, Service
from tessera_kserve.http import api
from tessera_kserve.inference import Inference
from tessera_kserve.settings import KserveSettings

if TYPE_CHECKING:
    from tessera_kserve.grpc_server import GrpcServer


class Kserve:
    """Answers KServe's calls, of both transports by one ``Inference``. Owned by one event loop."""

    def __init__(self, settings: KserveSettings, service: Service) -> None:
        self._settings = settings
        self._service = service
        self._inference = Inference(service, settings.shared_memory)
        self._server: GrpcServer | None = None
        self.apis: tuple[ClientApi, ...] = (api(self._inference),)

    async def listen(self, certificate: Certificate | None) -> None:
        if not self._settings.grpc_port:
            return
        # Half a second of imports for those who have no such port.
        from tessera_kserve.grpc_server import GrpcServer

        self._server = GrpcServer(self._service, self._inference, self._settings, certificate)
        await self._server.start()

    async def drain(self, seconds: float) -> None:
        if self._server is not None:
            await self._server.stop(seconds)

    def close(self) -> None:
        """Let go of clients' memory."""
        self._inference.regions.close()
