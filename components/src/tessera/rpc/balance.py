"""Choosing one of several instances by what is in flight at each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import random


def least_loaded(instances: Collection[int], loads: Mapping[int, int]) -> int:
    """Return the instance with the smallest load, at random where several have it.

    ``instances`` must not be empty; one that ``loads`` lacks has nothing in flight. In a fixed order every
    caller that has little in flight would choose the first.
    """
    return min(instances, key=lambda instance: (loads.get(instance, 0), random()))
