"""How every process of a deployment logs: one line format, with the role and the process in it."""

from __future__ import annotations

import logging
import sys


def log_as(role: str) -> None:
    """Log to stderr from INFO up under this role; a later call changes the role."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {role}[%(process)d] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
