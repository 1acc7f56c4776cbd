"""The processes of a service of one model, as the launcher starts them, without starting any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.launch.models import Deployed, WantedModel
from tessera.launch.processes import Process, Workers, frontend_processes, share_flags, worker_processes
from tessera.launch.settings import LaunchSettings


def processes(
    settings: LaunchSettings,
    workers: list[Workers],
    environment: Mapping[str, str],
    sharing: Sequence[Sequence[int]],
) -> list[Process]:
    """Frontends, then workers; ``sharing`` says for each worker how many are on its card."""
    wanted = WantedModel(settings=settings, split=False)
    model = Deployed(wanted=wanted, slot=0, settings=settings, workers=workers)
    shares = [
        [share_flags(on_host=kind.count, on_card=count) for count in counts]
        for kind, counts in zip(workers, sharing, strict=True)
    ]
    ports = range(settings.dyn_system_port_base, settings.dyn_system_port_base + model.worker_count)
    return [
        *frontend_processes(settings, environment, None, model.frontend_flags()),
        *worker_processes(settings, workers, environment, shares, ports),
    ]
