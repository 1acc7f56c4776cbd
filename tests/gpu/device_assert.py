"""A process whose CUDA context dies of a device-side assert in a launched batch: ``python -m … COUNT``.

Puts ``COUNT`` payloads into a batcher whose engine is guarded as every engine is, and prints as JSON how each
of them ended. The first one indexes past a table, behind a kernel that runs for a tenth of a second: the host
learns of it when it queries the event of the batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tessera.batching import Batcher, Events
from tessera.engine.batch import Cost, PackedInput, TextBatch, pack, packed_cost
from tessera.engine.guard import GuardedTextEngine
from tessera.engine.streams import CudaStreams
from tessera.errors import EngineDead
from tessera.launched import Launched
from tessera.rows import Rows
from tests.families.dual_encoder import DualEncoder

ROWS, WIDTH = 16, 8
# At least a tenth of a second at 2 GHz.
CYCLES = 200_000_000
WAIT = 60.0


class Table:
    """Implements ``TextEngine``: the row of a table at each input's first token, past its end, too."""

    cost: Cost = staticmethod(packed_cost)
    depth = 2
    gives: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._streams = CudaStreams("cuda")
        self._table = torch.ones(ROWS, WIDTH, device="cuda")
        torch.cuda.synchronize()
        self.open: list[bool] = []

    def warm(self) -> None: ...

    def close(self) -> None: ...

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        first = batch.input_ids[batch.cu_seqlens[:-1]]
        staged = self._streams.staging(first.shape, torch.int32)
        staged.copy_(torch.from_numpy(first))
        with self._streams.copying():
            indices = staged.to("cuda", non_blocking=True)
        with self._streams.computing():
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            rows = self._table.index_select(0, indices)
            host = self._streams.staging(tuple(rows.shape), torch.float32)
            host.copy_(rows, non_blocking=True)

            def finish() -> Rows:
                values = host.numpy()
                return Rows(values, np.arange(len(values) + 1), np.ones(len(values), np.float32))

            launched = self._streams.launched(finish, keep=(staged, indices, rows, host))
        self.open.append(not launched.done())
        return launched

    def launch_named(self, batch: TextBatch) -> Launched[list[Rows]]:
        raise NotImplementedError


async def run(count: int) -> dict[str, object]:
    table, died = Table(), list[str]()
    engine = GuardedTextEngine(table, DualEncoder(Path(), 0))

    def launch(inputs: Sequence[PackedInput]) -> Launched[list[object]]:
        return engine.launch(pack(inputs)).map(lambda output: list(output.values))

    batcher: Batcher[PackedInput, object] = Batcher(
        "text",
        launch,
        cost=engine.cost,
        budget=4,
        max_queued=1 << 20,
        depth=engine.depth,
        events=Events(died=lambda error: died.append(error.message)),
    )
    right = await asyncio.wait_for(batcher.submit(_input(3), 1), WAIT)
    futures = [batcher.submit(_input(1 if index else ROWS + 7), 1) for index in range(count)]
    ended = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT)
    later: Exception | None = None
    try:
        batcher.submit(_input(1), 1)
    except EngineDead as error:
        later = error
    await asyncio.wait_for(batcher.close(), WAIT)
    return {
        "right": bool(np.all(right.value == 1.0)),
        "open": table.open[1],
        "ended": [type(one).__name__ for one in ended],
        "messages": sorted({str(one) for one in ended}),
        "died": died,
        "later": type(later).__name__,
    }


def _input(token: int) -> PackedInput:
    return PackedInput(tokens=np.array([token], np.int32), positions=np.zeros((1, 1), np.int32))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(int(sys.argv[1])))), flush=True)
    # Whatever would be freed at the end belongs to a context that is gone.
    os._exit(0)
