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
_WORDS_WEIGHT = 1.0
_VIEWS_WEIGHT = 1.0
_VIEWS_CAPTIONS_WEIGHT = 0.5


def info_nce(one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Mean of both directions' cross-entropy; row ``i`` of unit vectors ``[n, hidden]`` belongs to row ``i``.

    van den Oord et al. 2018 (arXiv:1807.03748), eq. 4, made symmetric as in Radford et al. 2021
    (arXiv:2103.00020), fig. 3; ``scale`` is the inverse of the temperature.
    """
    logits = scale * one.float() @ other.float().T
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def words_nce(
    queries: torch.Tensor,
    images: torch.Tensor,
    scale: torch.Tensor,
    *,
    owners: torch.Tensor,
    fits: torch.Tensor,
) -> torch.Tensor:
    """``info_nce`` where several queries have the same image and may also fit others.

    ``owners`` int64 ``[queries]`` is the image that each query was made from, and ``fits`` bool
    ``[queries, images]`` where an image has all that the query asks for: it is neither wrong nor the one that
    was meant, so it stays out of the sum, and so do other queries that fit the same image.
    """
    if not len(queries):
        return torch.zeros_like(scale)
    logits = scale * queries.float() @ images.float().T
    places = torch.arange(len(queries), device=logits.device)
    others = fits.clone()
    others[places, owners] = False
    to_images = cross_entropy(logits.masked_fill(others, -torch.inf), owners)
    others = fits[:, owners].T.clone()
    others[places, places] = False
    to_queries = cross_entropy(logits[:, owners].T.masked_fill(others, -torch.inf), places)
    return (to_images + to_queries) / 2


def views_nce(
    views: torch.Tensor, images: torch.Tensor, scale: torch.Tensor, *, originals: torch.Tensor
) -> torch.Tensor:
    """``info_nce`` where only some of the images have a view, all others being wrong for each view.

    ``originals`` int64 ``[views]`` is the image that each view shows, every one another.
    """
    if not len(views):
        return torch.zeros_like(scale)
    logits = scale * views.float() @ images.float().T
    places = torch.arange(len(views), device=logits.device)
    to_images = cross_entropy(logits, originals)
    return (to_images + cross_entropy(logits[:, originals].T, places)) / 2


def total_loss(
    sides: Mapping[str, torch.Tensor],
    scale: torch.Tensor,
    *,
    owners: torch.Tensor,
    fits: torch.Tensor,
    originals: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over all pairs of sides, and the loss between queries and images alone.

    ``owners`` and ``fits`` are those of the side ``words``, as ``words_nce`` takes them, and ``originals``
    those of the side ``views``, as ``views_nce`` does.
    """
    losses = {pair: info_nce(sides[pair[0]], sides[pair[1]], scale) for pair in _WEIGHTS}
    words = words_nce(sides["words"], sides["images"], scale, owners=owners, fits=fits)
    weighted = sum((_WEIGHTS[pair] * loss for pair, loss in losses.items()), start=_WORDS_WEIGHT * words)
    for side, weight in (("images", _VIEWS_WEIGHT), ("captions", _VIEWS_CAPTIONS_WEIGHT)):
        # Captions share their images' numbers.
        weighted = weighted + weight * views_nce(sides["views"], sides[side], scale, originals=originals)
    return weighted, losses["queries", "images"].detach()
