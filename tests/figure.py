"""Figures as tables of benchmarks show them."""

from __future__ import annotations


def figure(cell: str) -> float:
    """Read what ``tessera_tools.table.number`` wrote: thousands have commas, also on a slow day."""
    return float(cell.replace(",", ""))
