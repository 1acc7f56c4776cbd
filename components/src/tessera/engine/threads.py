"""How many of torch's threads run a batch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

# Multiplications of a mean product from which all threads are faster than one. On two quiet cores with
# passive threads all-MiniLM-L6-v2 (442,368 elements a matrix) took, on one and two, medians of 40 in turns:
# 8 tokens 11.8 and 15.2 ms, 16 (7 million) 12.8 and 14.7, 32 (14 million) 20.5 and 18.2, 64 25.8 and 22.7,
# 128 49.3 and 41.5; of processor time two always take a quarter more. Four layers of width 128 took, on two
# busy cores, 1.0 and 2.4 ms for 8 tokens, 2.2 and 3.1 for 64.
# All or one: OpenMP ends threads that a smaller team does without, and makes them anew for the next.
_LEAST_PRODUCT: Final = 10_000_000


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread; for the warm-up on the CPU, where other workers may be serving.

    Their operations are on all processors and wait for the slowest. With a warm-up on all 16 processors for
    0.1 s beside them answers took up to 133 ms; a process that imports its libraries on one is not felt.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fewest_rows(module: object) -> int:
    """Return the fewest rows that all threads should share, from the mean size of the module's matrices.

    A batch passes some ten operations a layer, and each wakes the other threads and waits for them. What
    they take off it grows with the multiplications of a product: rows times the elements of its matrix. It is
    0 where no matrices are seen, as in what was compiled ahead of time.
    """
    if not isinstance(module, nn.Module):
        return 0
    sizes = [
        weight.numel()
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
        if weight.dim() == 2
    ]
    return math.ceil(_LEAST_PRODUCT * len(sizes) / sum(sizes)) if sizes else 0
