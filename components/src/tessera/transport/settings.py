"""The settings of the hand-off; no torch is needed to read them."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from tessera.settings import CHOSEN, Setting


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vision rows go from encode workers to embed workers."""

    kind: Annotated[
        str,
        Setting(
            help="`auto` for the one that reaches the reader best, or `cuda_ipc`, `shm`, `nixl`, `inline`, "
            "with commas between"
        ),
    ] = "auto"
    slab_mb: Annotated[int, Setting(help=f"MiB of rows that an encode worker lends at a time; {CHOSEN}")] = 0
    staging_mb: Annotated[int, Setting(help=f"MiB of registered memory that NIXL reads into; {CHOSEN}")] = 0
    nixl_interfaces: Annotated[
        str,
        Setting(help="network interfaces that NIXL listens on, with commas between; empty for all"),
    ] = "lo"
    lease_seconds: Annotated[float, Setting(help="time that a reader has to copy rows")] = 10.0
    checksum: Annotated[bool, Setting(help="readers compare rows with a hash of the published ones")] = False

    def __post_init__(self) -> None:
        if self.slab_mb < 0 or self.staging_mb < 0:
            raise ValueError("slab_mb and staging_mb must not be negative")
        if not 0 < self.lease_seconds < math.inf:
            raise ValueError("lease_seconds must be positive")
