"""One process of a deployment over several hosts or containers, as ``deploy/start-role`` starts it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Final, NoReturn

from tessera import etcd
from tessera.launch.children import Signals, Told
from tessera.launch.models import of_list
from tessera.launch.processes import (
    SYSTEM_PORT,
    common_flags,
    engine_args,
    frontend_flags,
    share_flags,
    shared_flags,
    without,
    worker_flags,
)
from tessera.launch.report import Report
from tessera.launch.settings import RoleSettings, SettingError
from tessera.launch.supervisor import Hopeless, Supervisor
from tessera.launch.variables import out_of_date, own_variables, process_words
from tessera.terminal import complain

ROLES: Final = ("frontend", "agg", "encode", "embed")

_SIOCGIFADDR: Final = 0x8915


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the process of a role: ``arguments`` are the role and further flags of the process.

    Exits with status 2 for what cannot be started. Raises ``OSError`` when there is no such interpreter.
    """
    try:
        python, words, own = command(arguments, environment)
    except SettingError as error:
        complain(f"start-role: {error}")
        raise SystemExit(2) from None
    for sentence in out_of_date(environment, RoleSettings, scripts=True):
        complain(f"start-role: {sentence}")
    os.execvpe(python, [python, *words], own)


def keep(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the process of a role and start it again whenever it ends, until a signal ends both; its status.

    For a task of a Slurm job: workers of one node share its address, so that each has a port of its own.
    Ends with 2 for what cannot be started.
    """
    signals = Signals()
    supervisor = Supervisor(signals, Report("text"), None, hopeless=frozenset({2}))
    try:
        settings = RoleSettings.read(environment)
        port = settings.dyn_system_port_base + settings.slurm_localid
        python, words, own = command(arguments, {**environment, "TESSERA_SYSTEM_PORT": str(port)})
        name = f"{arguments[0]} on {settings.slurmd_nodename or socket.gethostname()}"
        for sentence in out_of_date(environment, RoleSettings, scripts=True):
            complain(f"start-role: {sentence}")
        supervisor.start(name, arguments[0], [python, *words], own)
        supervisor.supervise()
    except (SettingError, OSError) as error:
        complain(f"start-role: {error}")
        return 2
    except Hopeless as error:
        return error.status
    except Told:
        (child,) = supervisor.children
        runs = child.pid is not None
        supervisor.stop()
        return child.status or 0 if runs else 0


def command(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, list[str], dict[str, str]]:
    """The interpreter, its arguments and its environment. Raises ``SettingError``."""
    role = arguments[0] if arguments else ""
    if role not in ROLES:
        raise SettingError(f"expected frontend, agg, encode or embed, not '{role}'")
    settings = RoleSettings.read(environment)
    several = Path(settings.models_file) if settings.models_file and role == "frontend" else None
    if settings.models_file and several is None:
        settings = of_list(settings.models_file, settings)
    if not settings.model_path and several is None:
        raise SettingError("TESSERA_MODEL_PATH must name a checkpoint directory, or ORG/NAME of a hub")
    if several is None:
        # The process downloads a hub's itself: it is the only one here that needs it.
        settings.check_path()
    address = settings.host_address or settings.pod_ip
    if not (address or settings.host_interface):
        address = _address_towards_etcd(settings, environment)
    interface, own_address = _interface(address or settings.host_interface)
    address = address or own_address
    if not address:
        raise SettingError("this host has no address of its own; set TESSERA_HOST_ADDRESS")
    own = without(environment, own_variables())
    # Workers call each other; the runtime would bind and announce loopback otherwise.
    own["DYN_TCP_RPC_HOST"] = settings.dyn_tcp_rpc_host or address
    own["DYN_TCP_RESPONSE_STREAM_HOST"] = settings.dyn_tcp_response_stream_host or address
    if settings.models_file:
        own["DYN_NAMESPACE"] = settings.dyn_namespace
    # Behind the flags from here, in whose place they are.
    of_frontends, of_workers = process_words(environment)
    given = [*(of_frontends if role == "frontend" else of_workers), *arguments[1:]]
    flags = common_flags(settings) if several else shared_flags(settings)
    flags += ["--drain-seconds", settings.drain_seconds]
    if role == "frontend":
        flags += frontend_flags(settings, settings.dyn_http_port, several)
        flags += settings.frontend_args.split()
        words = ["-m", "tessera.frontend", *flags, *given]
        return settings.python, words, without(own, SYSTEM_PORT)
    own["DYN_SYSTEM_PORT"] = settings.dyn_system_port
    own["DYN_SYSTEM_HOST"] = settings.dyn_system_host
    flags += worker_flags(settings, role, engine_args(settings))
    flags += share_flags(on_host=settings.workers_on_host, on_card=settings.workers_on_card)
    if role != "encode" and settings.cache_gb:
        flags += ["--multimodal-embedding-cache-capacity-gb", settings.cache_gb]
    if role != "agg":
        # One that is empty means all of them.
        names = (environment.get(name) for name in ("TESSERA_NIXL_INTERFACES", "NIXL_INTERFACES"))
        name = next((name for name in names if name is not None), interface)
        flags += ["--override-engine-args", json.dumps({"transport": {"nixl_interfaces": name}})]
    if role == "embed" and settings.encode_endpoint:
        flags += ["--encode-endpoint", settings.encode_endpoint]
    return settings.python, ["-m", "tessera.worker", *flags, *given], own


def _address_towards_etcd(settings: RoleSettings, environment: Mapping[str, str]) -> str:
    """The IPv4 address from which this host reaches etcd, where the others are; "" for one that is here.

    Of a container on several networks the first interface may be one that no other process is on. Raises
    ``SettingError`` where no way leads there: cut off, it would announce such an address for good.
    """
    if settings.dyn_discovery_backend != "etcd":
        return ""
    routed = False
    for host, port in etcd.servers(environment):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, _, _, to in found:
            with socket.socket(family, kind) as probe:
                try:
                    # Sends nothing: the system only chooses the way.
                    probe.connect(to)
                except OSError:
                    continue
                routed = True
                address: str = probe.getsockname()[0]
            if family == socket.AF_INET and not address.startswith("127."):
                return address
    if not routed:
        raise SettingError(
            f"ETCD_ENDPOINTS={environment.get('ETCD_ENDPOINTS', '')}: no way leads there from this host; "
            "TESSERA_HOST_ADDRESS says where the other processes reach this one"
        )
    return ""


def _interface(wanted: str) -> tuple[str, str]:
    """Name and IPv4 address of the network interface that has either; for "" the first but loopback.

    Both are empty where there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            address = socket.inet_ntoa(answer[20:24])
            if wanted in (address, name) if wanted else not address.startswith("127."):
                return name, address
    return "", ""
