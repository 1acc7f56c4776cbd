"""The processes that a service consists of: their command lines and environments."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.defaults import ENGINE_CONFIGS, requests_in_flight
from tessera.launch.port import Port
from tessera.launch.settings import LaunchSettings, Shared


@dataclass(frozen=True, slots=True)
class Process:
    """``arguments`` are the interpreter's; ``environment`` is all of it."""

    name: str
    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: Sequence[int] = ()
    """What it inherits."""


def model_flags(settings: Shared) -> list[str]:
    """The flags that say which model it is."""
    flags = ["--model-path", settings.model_path]
    if settings.model_revision:
        flags += ["--revision", settings.model_revision]
    if settings.model_options:
        flags += ["--model-options", settings.model_options]
    return flags


def named_model_flags(settings: Shared) -> list[str]:
    """Those, and its names."""
    return [*model_flags(settings), "--served-model-name", *settings.model_names]


def common_flags(settings: Shared) -> list[str]:
    """The flags of every process, whatever it serves."""
    return [
        *("--namespace", settings.dyn_namespace),
        *("--discovery-backend", settings.dyn_discovery_backend),
        *("--request-plane", settings.dyn_request_plane),
        *("--log-format", settings.log_format),
        *("--log-level", settings.log_level),
    ]


def shared_flags(settings: Shared) -> list[str]:
    """The flags of every process of one model."""
    return [*named_model_flags(settings), *common_flags(settings)]


def frontend_flags(settings: Shared, port: int, models: Path | None = None) -> list[str]:
    """What frontends alone have; ``models`` is a file with what they serve, where that is not one model."""
    flags = ["--host", settings.dyn_http_host, "--port", str(port)]
    flags += ["--max-file-size-mb", settings.max_file_size_mb]
    if settings.tls_cert:
        flags.append(f"--tls-cert={settings.tls_cert}")
    if settings.tls_key:
        flags.append(f"--tls-key={settings.tls_key}")
    if models is not None:
        flags += ["--models", str(models)]
    else:
        if settings.dimensions_allowed:
            flags.append(f"--dimensions-allowed={settings.dimensions_allowed}")
        if settings.max_embed_tokens:
            flags += ["--max-embed-tokens", str(settings.max_embed_tokens)]
    if settings.allowed_local_media_path:
        flags += ["--allowed-local-media-path", settings.allowed_local_media_path]
    return flags


def worker_flags(settings: Shared, role: str, engine_args: str) -> list[str]:
    """What workers alone have."""
    mode = ["--disaggregation-mode", role, "--modality", settings.modality]
    return [*mode, "--extra-engine-args", engine_args]


def share_flags(
    *, on_host: int = 1, on_card: int = 1, host_share: float = 0.0, card_share: float = 0.0
) -> list[str]:
    """What a worker that does not have its host, or its card, for itself is told."""
    flags = ["--workers-on-host", str(on_host)] if on_host > 1 else []
    flags += ["--workers-on-card", str(on_card)] if on_card > 1 else []
    flags += ["--host-share", str(host_share)] if host_share else []
    return flags + (["--card-share", str(card_share)] if card_share else [])


def without_source(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment as it was before a launch script put the repository's source in front of PYTHONPATH.

    The launcher is the repository's, so that it runs before anything is installed; what it starts is what is
    installed.
    """
    own = dict(environment)
    first, _, rest = own.get("PYTHONPATH", "").partition(os.pathsep)
    if first == str(root / "components" / "src"):
        own["PYTHONPATH"] = rest
        if not rest:
            del own["PYTHONPATH"]
    return own


def without(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The environment without the variables of these names."""
    return {name: value for name, value in environment.items() if name not in names}


SYSTEM_PORT: Final = ("DYN_SYSTEM_PORT",)
"""No frontend has it: its runtime would listen there, too."""
PORTS_OF_ONE: Final = ("DYN_TCP_RPC_PORT", "DYN_TCP_RESPONSE_STREAM_PORT")
"""What only one process of a host can listen on. The images of single processes fix them."""
# Workers have no use for them.
_SECRETS_OF_FRONTENDS: Final = ("TESSERA_API_KEYS", "TESSERA_TLS_KEY_PASSWORD")


def listed(gpus: str) -> list[str]:
    """The entries of a list such as 0,1, whose last comma may be too many."""
    return gpus.removesuffix(",").split(",")


@dataclass(frozen=True, slots=True)
class Workers:
    """``count`` workers of one kind; ``gpus`` is a list like 0,1 of which each takes one in turn.

    ``model`` is the name of what they serve where the service has several models.
    """

    role: str
    count: int
    gpus: str
    engine_args: str
    flags: tuple[str, ...] = ()
    model: str = ""

    def name(self, index: int) -> str:
        """What one of them is called."""
        return f"{self.role} worker {index}" + (f" of {self.model}" if self.model else "")

    @property
    def cards(self) -> list[str]:
        """Each worker's CUDA_VISIBLE_DEVICES; empty without a list, where it sees all cards."""
        entries = listed(self.gpus)
        return [entries[index % len(entries)] for index in range(self.count)]


def agg_workers(settings: LaunchSettings, flags: Sequence[str]) -> list[Workers]:
    """Workers with both stages; further flags are theirs."""
    own = engine_args(settings, settings.agg_engine_args)
    cards = settings.agg_cuda_visible_devices
    return [Workers("agg", settings.agg_workers, cards, own, tuple(flags))]


def e_p_workers(
    settings: LaunchSettings, flags: Sequence[str], encode_flags: Sequence[str] = ()
) -> list[Workers]:
    """Encode and embed workers; further flags are the embed workers'."""
    encode_args = engine_args(settings, settings.encode_engine_args)
    embed_args = engine_args(settings, settings.embed_engine_args)
    endpoint = settings.encode_endpoint or f"dyn://{settings.dyn_namespace}.encode.generate"
    return [
        Workers(
            *("encode", settings.encode_workers, settings.encode_cuda_visible_devices, encode_args),
            flags=tuple(encode_flags),
        ),
        Workers(
            *("embed", settings.embed_workers, settings.embed_cuda_visible_devices, embed_args),
            flags=("--encode-endpoint", endpoint, *flags),
        ),
    ]


def engine_args(settings: Shared, own: str = "") -> str:
    """A file or a folder: a worker finds the file for its checkpoint's family there."""
    return own or settings.engine_args or str(ENGINE_CONFIGS)


def frontend_processes(
    settings: LaunchSettings,
    environment: Mapping[str, str],
    port: Port | None,
    own_flags: Sequence[str] = (),
    models: Path | None = None,
) -> list[Process]:
    """The frontends: of one model, by ``own_flags``, or of those in the file ``models``.

    ``port`` is the one that they share; without it each opens its own.
    """
    found = []
    for index in range(settings.frontends):
        flags = [*frontend_flags(settings, settings.dyn_http_port, models), *own_flags]
        if settings.frontend_page == "off":
            flags.append("--no-page")
        # Of all frontends together.
        flags += ["--max-in-flight", str(requests_in_flight(settings.frontends))]
        flags += [*settings.frontend_flags, *common_flags(settings)]
        name = f"frontend {index}" if settings.frontends > 1 else "frontend"
        arguments = ("-m", "tessera.frontend", *flags)
        own = without(environment, SYSTEM_PORT)
        if port is not None:
            own |= port.seat(index)
        found.append(Process(name, "frontend", arguments, own, port.descriptors if port else ()))
    return found


def worker_processes(
    settings: LaunchSettings,
    workers: Sequence[Workers],
    environment: Mapping[str, str],
    shares: Sequence[Sequence[Sequence[str]]],
    ports: Iterable[int],
) -> list[Process]:
    """The workers of one model: ``shares`` are flags of each of each kind, ``ports`` are for each in turn."""
    found, left = [], iter(ports)
    for kind, shared in zip(workers, shares, strict=True):
        for index, card in enumerate(kind.cards):
            own = without(environment, _SECRETS_OF_FRONTENDS) | {"DYN_SYSTEM_PORT": str(next(left))}
            if kind.gpus:
                own["CUDA_VISIBLE_DEVICES"] = card
            flags = [
                *worker_flags(settings, kind.role, kind.engine_args),
                *shared_flags(settings),
                *shared[index],
                *kind.flags,
            ]
            arguments = ("-m", "tessera.worker", *flags)
            found.append(Process(kind.name(index), kind.role, arguments, own))
    return found
