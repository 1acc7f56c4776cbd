"""A checkpoint of RoBERTa or XLM-RoBERTa as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

import numpy as np

from tessera.checkpoint.section import Section
from tessera.models.base import Family, Int32Array
from tessera.models.encoder.model import EncoderModel, Options
from tessera.models.options import OptionsFamily


class XlmRoberta(EncoderModel):
    """Implements ``tessera.models.base.Model``."""

    family = "xlm_roberta"
    revision = "xlm_roberta 1"
    first, last = "<s>", "</s>"
    stems = ("roberta.", "xlm-roberta.", "camembert.")

    def unused_positions(self, config: Section) -> int:
        """Return how many rows of the positions no token has: those up to padding's."""
        self._pad = config.integer("pad_token_id", 1, at_least=0)
        return self._pad + 1

    def places(self, tokens: Int32Array) -> Int32Array:
        """int32 ``[tokens]``: counted from behind padding's; a token that is padding's has its row.

        Such a token is not counted, as in the reference.
        """
        counted = tokens != self._pad
        places: Int32Array = np.cumsum(counted, dtype=np.int32) * counted + np.int32(self._pad)
        return places


FAMILY: Family = OptionsFamily(
    name=XlmRoberta.family,
    model_types=("xlm-roberta", "roberta", "camembert"),
    hub_models=(
        "intfloat/multilingual-e5-base",
        "intfloat/multilingual-e5-large",
        "Snowflake/snowflake-arctic-embed-l-v2.0",
    ),
    options=Options,
    opened=XlmRoberta,
    architectures=tuple(
        f"{name}{task}"
        for name in ("XLMRoberta", "Roberta", "Camembert")
        for task in ("Model", "ForMaskedLM")
    ),
)
