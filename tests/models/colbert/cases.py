"""Inputs that tell a right forward pass from a wrong one: both sides, punctuation, lengths around theirs."""

from __future__ import annotations

from tessera.models.base import Role
from tests.models.running import Given

TEXTS = [
    "what is the river?",
    "été naïve 東京 , the; market!",
    "a",
    "the river under the bridge by the old temple and a market (in the light) of morning. " * 8,
]
SIDES = (Role.QUERY, Role.PASSAGE)
CASES = [Given(parts=(text,), role=role) for role in SIDES for text in TEXTS]
