"""The settings of a run on Ray."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tessera.settings import MIB, NOT_NEGATIVE, POSITIVE, Setting


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    address: Annotated[
        str,
        Setting(
            flag="--ray",
            metavar="ADDRESS",
            help="embed on a Ray cluster: local starts one here, auto or HOST:PORT joins one",
        ),
    ] = ""
    cpus: Annotated[
        int,
        Setting(flag="--ray-cpus", check=NOT_NEGATIVE, help="CPUs of a local cluster; 0: one for each core"),
    ] = 0
    memory_bytes: Annotated[
        int,
        Setting(
            flag="--ray-memory-mb", unit=MIB, check=POSITIVE, help="size of a local cluster's object store"
        ),
    ] = 1024 * MIB
    readers: Annotated[
        int,
        Setting(
            flag="--ray-readers",
            check=NOT_NEGATIVE,
            help="at most so many actors that read and draw pages; 0: one for each CPU that engines leave",
        ),
    ] = 0
    engines: Annotated[
        int,
        Setting(
            flag="--ray-engines",
            check=NOT_NEGATIVE,
            help="at most so many engines; 0: one for each GPU, or one for each machine if the cluster has "
            "no GPU",
        ),
    ] = 0
