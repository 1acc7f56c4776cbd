"""The pipeline: shards of the sources to readers, their blocks to engines, and those to the driver."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from blake3 import blake3

from tessera.errors import TesseraError, Unavailable
from tessera.local.usage import Usage
from tessera_corpus.item import Embedded, Failure
from tessera_corpus.output.known import Known
from tessera_corpus.ray.blocks import LeftOut, rows_of
from tessera_corpus.ray.cluster import Pools
from tessera_corpus.ray.stages import Embedding, EngineActor, Reader, Reading

# Of each reader: the last shards end at about the same time, and a task that is done again is no large one.
_SHARDS: Final = 4
# A block of pages as PNG is some ten, of texts some ten thousand.
_BLOCK_BYTES: Final = 16 << 20
# Blocks that an engine has under way, and as many again that wait at its actor.
_BLOCKS: Final = 2
# An engine that ends over the same block so often ends the run.
_RETRIES: Final = 5


class RemoteEngines:
    """What is known here of engines that are elsewhere: nothing."""

    engines = 0

    async def usage(self) -> Usage:
        return Usage()


def embedded(
    reading: Reading,
    embedding: Embedding,
    pools: Pools,
    known: Known,
    done: Callable[[str, bytes], None],
    passed_over: Counter[str],
) -> Iterator[Sequence[Embedded | Failure]]:
    """What engines make of the sources; ``done`` is told what readers left out because it is ``known``.

    ``passed_over`` counts the files that are no sources, by kind.

    A task whose worker process ends is done again by Ray, which takes the blocks of the second time for those
    of the first: both stages make the same blocks in the same order. Should a file have changed in between,
    rows may come twice, and the second is dropped here. Raises the ``TesseraError`` of a stage, and
    ``Unavailable`` for what else Ray cannot go on after.
    """
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # One copy on each machine, which its readers map.
    kept = ray.put(known)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = _BLOCK_BYTES
    shard = reading.source.shard
    shards = [
        {"number": shard.number + shard.count * place, "count": shard.count * pools.readers * _SHARDS}
        for place in range(pools.readers * _SHARDS)
    ]
    with warnings.catch_warnings():
        # Ray 2.60 to 2.63 warn of max_task_retries, which nothing takes the place of.
        warnings.filterwarnings("ignore", "`ray_remote_args`", DeprecationWarning)
        data = (
            ray.data.from_items(shards, override_num_blocks=len(shards))
            .map_batches(
                Reader,
                fn_constructor_args=[reading, kept],
                compute=ActorPoolStrategy(
                    min_size=1, max_size=pools.readers, max_tasks_in_flight_per_actor=1
                ),
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=1,
            )
            .map_batches(
                EngineActor,
                fn_constructor_args=[embedding],
                compute=ActorPoolStrategy(
                    min_size=1,
                    max_size=pools.engines,
                    max_tasks_in_flight_per_actor=2 * _BLOCKS,
                    max_concurrent_calls_per_actor=_BLOCKS,
                    enable_true_multi_threading=True,
                ),
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=1,
                num_gpus=pools.cards,
                max_task_retries=_RETRIES,
            )
        )
    seen: set[bytes] = set()
    try:
        for block in data.iter_batches(batch_size=None, batch_format="pyarrow"):
            made: list[Embedded | Failure] = []
            for row in rows_of(block):
                if isinstance(row, LeftOut):
                    passed_over.update(row.passed_over)
                    for id, content_hash in row.items:
                        done(id, content_hash)
                elif isinstance(row, Embedded | Failure) and (key := _key(row)) not in seen:
                    seen.add(key)
                    made.append(row)
            if made:
                yield made
    except TesseraError:
        raise
    except Exception as error:
        raise _told(error) from error


def _key(row: Embedded | Failure) -> bytes:
    reason = row.reason if isinstance(row, Failure) else ""
    return bytes(blake3(f"{row.id}\0{reason}".encode()).digest(16))


def _told(error: BaseException) -> TesseraError:
    """The first ``TesseraError`` among the causes of what Ray raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TesseraError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    lines = str(error).strip().splitlines()
    return Unavailable(f"Ray: {lines[-1] if lines else type(error).__name__}")
