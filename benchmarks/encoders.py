"""``python -m benchmarks.encoders DIR``: tokens a second of an encoder on the CPU, beside transformers.

Both run in this process on the same token ids, in turns (A B B A), and the medians are printed.
``transformers`` gets batches padded to the longest text; only tokens of texts are counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tessera.engine.batch import PackedInput, TextBatch, pack
from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import Int32Array, Model

_FIRST_ID = 1000  # ordinary words in BERT's vocabulary


def texts(model: Model, lengths: Sequence[int]) -> list[Int32Array]:
    source = np.random.default_rng(0)
    last = min(model.vocab_size, 30_000)
    return [source.integers(_FIRST_ID, last, length, dtype=np.int32) for length in lengths]


def packed(model: Model, tokens: Sequence[Int32Array]) -> TextBatch:
    return pack([PackedInput(tokens=ids, positions=model.positions(ids, ())) for ids in tokens])


def padded(module: Any, tokens: Sequence[Int32Array]) -> Callable[[], None]:
    longest = max(map(len, tokens))
    ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(tokens):
        ids[row, : len(values)] = torch.from_numpy(values)
        mask[row, : len(values)] = 1

    def run() -> None:
        with torch.inference_mode():
            hidden = module(input_ids=ids, attention_mask=mask).last_hidden_state
            (hidden * mask[..., None]).sum(1)

    return run


def seconds(run: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return found


def main() -> None:
    from transformers import AutoModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", help="checkpoint of an encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--times", type=int, default=3, help="runs of either side in each turn")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = open_model(options.directory)
    settings = EngineSettings(engine="torch", max_batch_cost=16_384, max_queue_cost=32_768)
    engine = make_text_engine(model, settings, place(settings))
    engine.warm()
    module = AutoModel.from_pretrained(options.directory, dtype=torch.float32).eval()
    mixed = np.random.default_rng(1).integers(4, 201, 32).tolist()
    for name, lengths in (
        ("32 texts of 128", [128] * 32),
        ("32 texts of 4 to 200", mixed),
        ("1 text of 32", [32]),
    ):
        tokens = texts(model, lengths)
        batch, theirs = packed(model, tokens), padded(module, tokens)

        def ours(batch: TextBatch = batch) -> None:
            engine.launch(batch).result()

        seconds(ours, 1), seconds(theirs, 1)
        own, other = seconds(ours, options.times), seconds(theirs, options.times)
        other += seconds(theirs, options.times)
        own += seconds(ours, options.times)
        rates = [sum(lengths) / statistics.median(times) for times in (own, other)]
        print(
            f"{name:22} Tessera {rates[0]:8,.0f} tokens/s   transformers {rates[1]:8,.0f}"
            f"   {rates[0] / rates[1]:.2f} times",
            flush=True,
        )
    engine.close()


if __name__ == "__main__":
    main()
