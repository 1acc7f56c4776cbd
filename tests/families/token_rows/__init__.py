"""A family of text alone that gives a row for each token, as late interaction does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tessera.models.base import Output, OutputKind
from tests.families.dual_encoder import HIDDEN, DualEncoder


class TokenRows(DualEncoder):
    family = "token_rows"
    output = Output(kind=OutputKind.TOKENS, width=HIDDEN)
    vision = None  # type: ignore[assignment]


class TokenRowsFamily:
    """Implements ``tessera.models.base.Family``."""

    name = "token_rows"
    model_types = ("test_token_rows",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> TokenRows:
        return TokenRows(path, json.loads((path / "config.json").read_text())["seed"])


FAMILY = TokenRowsFamily()
