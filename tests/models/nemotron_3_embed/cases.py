"""Inputs that tell a right forward pass from a wrong one: lengths around the original context, roles."""

from __future__ import annotations

from tests.models.llama_nemotron_embed.cases import CASES as SHORT
from tests.models.llama_nemotron_embed.cases import WORDS
from tests.models.running import Given

CASES = [*SHORT, Given(parts=(WORDS * 180,))]
