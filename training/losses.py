"""The contrastive losses between the sides of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import cross_entropy

_WEIGHTS = {
    ("queries", "images"): 1.0,
    ("captions", "images"): 0.5,
    ("queries", "captions"): 0.25,
    ("narrowed", "documents"): 0.5,
}


def info_nce(one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Mean of both directions' cross-entropy; row ``i`` of unit vectors ``[n, hidden]`` belongs to row ``i``.

    van den Oord et al. 2018 (arXiv:1807.03748), eq. 4, made symmetric as in Radford et al. 2021
    (arXiv:2103.00020), fig. 3; ``scale`` is the inverse of the temperature.
    """
    logits = scale * one.float() @ other.float().T
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def total_loss(sides: Mapping[str, torch.Tensor], scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of all pairs of sides, and the loss between queries and images alone."""
    losses = {pair: info_nce(sides[pair[0]], sides[pair[1]], scale) for pair in _WEIGHTS}
    weighted = sum((_WEIGHTS[pair] * loss for pair, loss in losses.items()), start=torch.zeros_like(scale))
    return weighted, losses["queries", "images"].detach()
