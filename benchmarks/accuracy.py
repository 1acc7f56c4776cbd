"""The engines against the plain float32 modules on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.batches import Size, image_tokens, text_input, vision_batch, words
from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.batch import PackedInput, output_rows, pack
from tessera.engine.placement import Placement
from tessera.models import Model
from tessera.models.base import NamingModule, OutputKind, TextTensors
from tessera.rows import Rows

LENGTHS = (1, 7, 32, 33, 128, 260, 600, 1024)


def texts(model: Model) -> list[PackedInput]:
    random = np.random.default_rng(0)
    return [
        text_input(model, words(model, length, random)) for length in LENGTHS if length <= model.max_tokens
    ]


def text_cosine(model: Model, engine: TextEngine, placement: Placement, size: Size) -> float:
    """The worst cosine of what ``compared`` gives, each sequence alone and all of them packed together.

    The last holds the rows of an image of ``size``, which are random here.
    """
    device, inputs = placement.device, texts(model)
    rows = torch.empty(0, model.output.width, device=device)
    if model.vision is not None and not model.vision.gives_output:
        plan = model.plan(*size, param="image")
        noise = np.random.default_rng(1).standard_normal((plan.rows, model.vision.row_width), np.float32)
        # The size of an embedding's numbers, so that an image is not all that a layer sees.
        rows = (0.02 * torch.from_numpy(noise)).to(device, placement.torch_dtype)
        tokens = image_tokens(model, plan)
        inputs.append(
            PackedInput(
                tokens=tokens,
                positions=model.positions(tokens, (plan,)),
                vision=(rows,),
                vision_index=model.vision_index(tokens),
            )
        )
    packed = pack(inputs)
    module = model.load_text(dtype="float32", device=device)
    assert isinstance(module, NamingModule)
    with torch.inference_mode():
        given = TextTensors(
            torch.from_numpy(packed.input_ids).to(device),
            torch.from_numpy(packed.positions).to(device),
            torch.from_numpy(packed.cu_seqlens).to(device),
            packed.lengths,
            rows.float(),
            torch.from_numpy(packed.vision_index).to(device),
        )
        (computed,) = module.named(("",), given)
    indices = None if computed.indices is None else computed.indices.cpu().numpy()
    expected = compared(model, output_rows(computed.values.cpu().numpy(), packed, model.output, indices))
    together = engine.launch(packed).result()
    alone = Rows.joined([engine.launch(pack([one])).result() for one in inputs])
    return min(_worst(compared(model, rows), expected) for rows in (together, alone))


def compared(model: Model, rows: Rows) -> torch.Tensor:
    """The vectors of which cosines tell how alike answers of a model are.

    They are the rows that hold something, all scores as one vector, and of sparse rows a vector over the
    vocabulary for each input.
    """
    held, kind = rows.held(), model.output.kind
    if kind is not OutputKind.SPARSE:
        return torch.from_numpy(held.values.T if kind is OutputKind.SCORE else held.values)
    vectors = torch.zeros(len(held), model.vocab_size)
    vectors[np.repeat(np.arange(len(held)), held.counts), held.indices] = torch.from_numpy(held.values[:, 0])
    return vectors


def vision_cosine(model: Model, engine: VisionEngine, placement: Placement, sizes: Sequence[Size]) -> float:
    """The worst cosine of a vision row, of the first image alone and of all together."""
    assert model.vision is not None
    worst = 1.0
    module = model.load_vision(dtype="float32", device=placement.device)
    for chosen in (sizes[:1], sizes):
        batch = vision_batch(model, chosen, seed=len(chosen))
        for image in batch.pixels[::2]:
            # Half of them smooth, as pages are, and half noise.
            image[:] = np.linspace(0, 255, image.shape[-1]).astype(np.uint8)
        with torch.inference_mode():
            expected = module(
                torch.from_numpy(np.concatenate(batch.pixels)).to(placement.device),
                torch.from_numpy(batch.positions).to(placement.device),
                torch.from_numpy(batch.cu_units).to(placement.device),
                batch.units,
            )
        out = torch.empty(expected.shape, dtype=placement.torch_dtype, device=placement.device)
        engine.launch(batch, torch.split(out, [plan.rows for plan in batch.plans])).result()
        worst = min(worst, _worst(out.float(), expected))
    return worst


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1).min())
