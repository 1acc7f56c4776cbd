"""ColQwen3: a query or page images, through Qwen3-VL's towers and a projection, to a vector of each token."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.colqwen3.config import OPS, TOMORO
from tessera.models.colqwen3.model import FAMILY_NAME, ColQwen3, Options
from tessera.models.options import OptionsFamily

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=(TOMORO, OPS),
    hub_models=(
        "TomoroAI/tomoro-colqwen3-embed-4b",
        "TomoroAI/tomoro-colqwen3-embed-8b",
        "OpenSearch-AI/Ops-Colqwen3-4B",
    ),
    options=Options,
    opened=ColQwen3.open,
)
