"""Describes the model of an engine before there is one."""

from __future__ import annotations

from tessera.checkpoint.origin import origin
from tessera.errors import ConfigError
from tessera.frontend.widths import Widths
from tessera.local.messages import Load
from tessera.local.model_info import ModelInfo, OutputInfo
from tessera.local.options import VectorOptions
from tessera.models import open_model
from tessera.models.base import Model, outputs_of
from tessera.worker.settings import WorkerSettings, parse


def model_of(load: Load, options: VectorOptions) -> ModelInfo:
    """Describe the model that an engine would have, without one; raises as ``Engine.start``."""
    settings, model = opened(load)
    return info_of(model, settings, options)


def opened(load: Load) -> tuple[WorkerSettings, Model]:
    """Return a worker's settings and its model; raises ``ConfigError`` and ``CheckpointError``."""
    settings = parse(load.flags, source=load.source or None)
    return settings, open_model(settings.model_path, settings.model_options)


def info_of(model: Model, worker: WorkerSettings, options: VectorOptions) -> ModelInfo:
    """Describe a model that was opened; raises ``ConfigError`` for a width that it does not offer."""
    found = outputs_of(model)
    info = ModelInfo(
        name=worker.served_model_names[0],
        fingerprint=model.fingerprint,
        outputs=tuple([OutputInfo(name=each.name, kind=each.kind, width=each.width) for each in found]),
        images=model.vision is not None,
        dimensions=tuple(model.dimensions),
        checkpoint=origin(model.path) or "",
        activation=model.output.activation,
    )
    return info.of_width(_width_of(model, options))


def _width_of(model: Model, options: VectorOptions) -> int:
    """Return the width of the vectors.

    Raises ``ConfigError`` for one that the model does not offer.
    """
    widths = Widths.offered(model.dimensions, model.output.width, "")
    if options.dimensions and options.dimensions not in widths:
        raise ConfigError(f"{options.dimensions_param} {options.dimensions}: the model offers {widths}")
    return options.dimensions or model.output.width
