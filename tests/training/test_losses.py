"""The loss for queries that several pictures answer, against sums written out by hand."""

from __future__ import annotations

import math

import torch
from training.losses import views_nce, words_nce


def test_what_also_fits_is_neither_wrong_nor_meant() -> None:
    generator = torch.Generator().manual_seed(3)
    images, queries = torch.randn(4, 8, generator=generator), torch.randn(5, 8, generator=generator)
    owners = [0, 0, 1, 2, 3]
    fitting = {(0, 0), (1, 0), (1, 3), (2, 1), (2, 0), (3, 2), (4, 3)}
    fits = torch.tensor([[(query, image) in fitting for image in range(4)] for query in range(5)])
    scale = torch.tensor(3.0)

    def score(query: int, image: int) -> float:
        return math.exp(3.0 * float(queries[query] @ images[image]))

    expected = 0.0
    for query, own in enumerate(owners):
        meant = score(query, own)
        wrong_images = sum(score(query, image) for image in range(4) if (query, image) not in fitting)
        wrong_queries = sum(score(other, own) for other in range(5) if (other, own) not in fitting)
        expected -= math.log(meant / (meant + wrong_images)) / 10
        expected -= math.log(meant / (meant + wrong_queries)) / 10
    found = words_nce(queries, images, scale, owners=torch.tensor(owners), fits=fits)
    assert math.isclose(found.item(), expected, rel_tol=1e-5)


def test_a_batch_without_pages_has_no_such_loss() -> None:
    found = words_nce(
        torch.zeros(0, 8),
        torch.zeros(4, 8),
        torch.tensor(3.0),
        owners=torch.zeros(0, dtype=torch.int64),
        fits=torch.zeros(0, 4, dtype=torch.bool),
    )
    assert found.item() == 0


def test_a_view_belongs_to_one_image_and_an_image_to_its_view() -> None:
    generator = torch.Generator().manual_seed(4)
    images, views = torch.randn(4, 8, generator=generator), torch.randn(2, 8, generator=generator)
    originals = [2, 0]

    def score(view: int, image: int) -> float:
        return math.exp(3.0 * float(views[view] @ images[image]))

    expected = 0.0
    for view, own in enumerate(originals):
        expected -= math.log(score(view, own) / sum(score(view, image) for image in range(4))) / 4
        expected -= math.log(score(view, own) / sum(score(other, own) for other in range(2))) / 4
    found = views_nce(views, images, torch.tensor(3.0), originals=torch.tensor(originals))
    assert math.isclose(found.item(), expected, rel_tol=1e-5)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert views_nce(views[:0], images, torch.tensor(3.0), originals=nothing).item() == 0
