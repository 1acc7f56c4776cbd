"""The worker's further endpoints, as a model of Dynamo's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tessera.rpc import ModelServer, Runtime, Server
from tessera.worker.embed import EmbedService
from tessera.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def model_addresses(settings: WorkerSettings) -> tuple[str, ...]:
    """Where discovery lists the model's names, one at each; none unless the configuration asks for them."""
    if not settings.dynamo_model:
        return ()
    # It brings the frontend's package along, which no other worker needs.
    from tessera.dynamo_model import names_of

    count = len(names_of(settings.served_model_name))
    return tuple(f"{settings.rpc.namespace}.embed.model{index or ''}" for index in range(count))


def model_servers(
    runtime: Runtime, settings: WorkerSettings, service: object, server: Server
) -> Sequence[ModelServer]:
    """One for each name of the model, not started yet; none unless the configuration asks for them.

    What comes in that way is answered through ``server``, so that it is logged, traced and drained like the
    rest.
    """
    if not settings.dynamo_model or not isinstance(service, EmbedService):
        return ()
    from tessera.dynamo_model import DynamoModel
    from tessera.frontend.media import ImageLimits
    from tessera.frontend.settings import Limits

    limits = Limits(images=ImageLimits(max_pixels=settings.max_image_pixels))
    model = DynamoModel(service.model, settings.served_model_name, server.answer, limits)
    server.expose_metrics(model.render_metrics)
    log.info("will also be served as models of Dynamo's own: %s", ", ".join(model.names))
    return [
        ModelServer(runtime, address, name, model.answer)
        for address, name in zip(model_addresses(settings), model.names, strict=True)
    ]
