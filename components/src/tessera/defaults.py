"""What a service has where no setting says so: its model, its engines, and what it takes of its machine.

Functions are pure, and say what was measured: on one H200 with 16 cores, for llama_nemotron_vl and
Qwen3-VL-Embedding-2B at full size in bfloat16. What is chosen bounds work and memory; no vector depends on
it. The standard library alone: the launcher chooses before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODEL: Final = Path(__file__).parent / "checkpoints" / "tessera-demo"
"""The demonstration model."""
ENGINE_CONFIGS: Final = Path(__file__).parent / "engine_configs"
"""Engine settings: ``<family>/<mode>.yaml``, and ``default/<mode>.yaml`` for families without."""

MIB: Final = 1 << 20
GIB: Final = 1 << 30

# Six frontends and six decoders of 16 cores. Texts of 128 tokens, 512 at once, keep 6.1 cores busy in the
# frontends and 2.3 in the worker (596/s with one frontend, 2,150/s with six), new pages 0.6 and 5.1: no
# traffic wants both at once.
_OF_CORES: Final = (3, 8)
# More than a card can feed.
_MOST_ON_A_CARD: Final = 8
# Of a model that is fed faster than it is asked: new pictures for CLIP's large one kept 4.75 cores busy in
# decoders, 1.5 in frontends and 1.4 in a worker, and with ten decoders there were more (780 and 814/s).
_OF_CORES_OF_SMALL_MODELS: Final = (5, 8)
# What one interpreter answers of that traffic takes 9.9 ms of all processors, 780 times a second. Two cores
# that others used had 186 of 128 images at once from one worker, 585 from two and 622 from three, where each
# came alone. Where images meet, the messages of two workers are smaller: 1.5 times the worker's time.
_CORES_OF_AN_INTERPRETER: Final = 8
_MOST_WORKERS_ON_A_CARD: Final = 4
# The account of CLIP's large one with its largest batches has 3.2 GiB of a card. A context and graphs, which
# are in none, come on top. On 8 GiB four workers would have batches of a quarter.
_CARD_BYTES_OF_A_WORKER: Final = 6 * GIB
# That an input passes. An image of CLIP's large one passes 0.30 billion: its engine gave 3,055 a second in
# process, four times what a worker's interpreter does. One of SigLIP 2's so400m passes 0.43, of 2,400 in
# process 1,307 came by one worker and 1,913 by two (16 cores, one H200).
_SMALL_PARAMETERS: Final = 500_000_000
# Where engines run on processors they want the cores themselves.
_CORES_BESIDE_ENGINES: Final = 8
_LEAST_DECODERS: Final = 2
# A frontend has 0.2 GiB under load, and a decoder up to 0.3 GiB with a page of 9 million pixels.
_FRONTEND_BYTES: Final = GIB // 2
_DECODER_BYTES: Final = GIB // 2
_OF_MEMORY_FOR_PROCESSES: Final = 8

# A vision batch in values of its pixels: 28,800 patches of 16 x 16 pixels, which are 28 tiles of 512 x 512,
# or four of the largest images of either model. 28 tiles give 533 a second, and 32 no more.
_BATCH_VALUES: Final = 28_800 * 3 * 16 * 16
# On processors a batch is hardly faster for being larger.
_MOST_IMAGES_ON_CPU: Final = 4
# Their pixels wait in memory: 1.3 GiB, 256 pages. ``max_queue_seconds`` is the nearer bound, of 500 pages.
_QUEUED_VISION_BATCHES: Final = 64
_OF_MEMORY_FOR_PIXELS: Final = 16
_LEAST_QUEUED_BATCHES: Final = 4

TEXT_BATCH: Final = 16_384
"""Tokens: 512 texts of 32, 16 of 1,024, or nine pages."""
_QUEUED_TEXT_BATCHES: Final = 32

# While one batch is encoded, others are copied by their readers, and some readers are slow.
_LENT_BATCHES: Final = 4
_LEAST_SLAB_BYTES: Final = 256 * MIB
_SLAB_STEP: Final = 64 * MIB

_OF_MEMORY_FOR_CACHES: Final = 16
_LEAST_CACHE_BYTES: Final = GIB
# All of it is page-locked before a worker beside a card serves; 8 GiB hold 8,000 tiles.
_MOST_CACHE_BYTES: Final = 16 * GIB

_REQUESTS_OF_A_FRONTEND: Final = 1024


def workers(cards: int) -> int:
    """Workers of a mode. Two cards with one encode and one embed worker each, under MPS, gave 728 tiles, 99.9
    pages and 4,130 texts a second; with one of the two kinds on each card they gave 529, 76 and 2,410.
    """
    return max(1, cards)


def is_small(parameters: int) -> bool:
    """Whether a card runs an input through so many parameters faster than one worker can be asked."""
    return parameters <= _SMALL_PARAMETERS


def workers_on_a_card(*, cores: int, nbytes: int, parameters: int) -> int:
    """Workers with both stages on each card of ``nbytes``, which has ``cores`` of the host's to itself."""
    if not is_small(parameters):
        return 1
    by_memory = nbytes // _CARD_BYTES_OF_A_WORKER
    return max(1, min(_MOST_WORKERS_ON_A_CARD, cores // _CORES_OF_AN_INTERPRETER, by_memory))


def frontends(*, cores: int, nbytes: int, cards: int, workers: int) -> int:
    """Frontends of a host with so many workers."""
    if not workers:
        # Nothing else runs here.
        by_cores = cores // 2
    elif cards:
        by_cores = min(cores * _OF_CORES[0] // _OF_CORES[1], _MOST_ON_A_CARD * cards)
    else:
        by_cores = cores // _CORES_BESIDE_ENGINES
    return max(1, min(by_cores, nbytes // _OF_MEMORY_FOR_PROCESSES // _FRONTEND_BYTES))


def requests_in_flight(frontends: int) -> int:
    """Requests that the frontends of a host answer at a time."""
    return _REQUESTS_OF_A_FRONTEND * max(1, frontends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a worker has: ``cores`` and ``nbytes`` of memory are shared by ``beside`` workers of its mode.

    ``on_card`` says that its engines run on a card.
    """

    cores: int
    nbytes: int
    beside: int = 1
    on_card: bool = False

    def decoders(self, *, small: bool = False) -> int:
        """Images that are decoded at a time, more of them for a model that is ``small``."""
        most = _MOST_ON_A_CARD
        if self.on_card:
            part, of = _OF_CORES_OF_SMALL_MODELS if small else _OF_CORES
            most *= 1 + small
            by_cores = self.cores * part // of // self.beside
        else:
            by_cores = self.cores // _CORES_BESIDE_ENGINES // self.beside
        by_memory = self.nbytes // _OF_MEMORY_FOR_PROCESSES // _DECODER_BYTES // self.beside
        return max(_LEAST_DECODERS, min(by_cores, by_memory, most))

    def threads(self, usual: int) -> int:
        """CPU threads of a batch; ``usual`` are torch's own choice, which knows no quota and no neighbours.

        On a card more than one only spin beside the engine's thread. Two workers on two cores keep two each:
        often one of them has nothing to do.
        """
        if self.on_card:
            return 1
        return min(usual, max(self.cores // self.beside, min(self.cores, 2)))

    def vision_units(self, *, largest: int, values: int) -> int:
        """Units of a vision batch: whole images of the ``largest`` number of units, of ``values`` each."""
        images = max(1, round(_BATCH_VALUES / (largest * values)))
        return largest * (images if self.on_card else min(images, _MOST_IMAGES_ON_CPU))

    def vision_queue(self, *, batch: int, values: int) -> int:
        """Units that may wait, of ``values`` bytes each, where ``batch`` units make a batch."""
        room = self.nbytes // _OF_MEMORY_FOR_PIXELS // self.beside // (batch * values)
        return batch * max(_LEAST_QUEUED_BATCHES, min(_QUEUED_VISION_BATCHES, room))

    def text_queue(self, batch: int) -> int:
        """Tokens that may wait, where ``batch`` tokens make a batch."""
        return max(batch, _QUEUED_TEXT_BATCHES * TEXT_BATCH)

    def slab_bytes(self, batch_rows: int) -> int:
        """Of rows that an encode worker lends, where those of a batch have ``batch_rows`` bytes."""
        steps = -(-_LENT_BATCHES * batch_rows // _SLAB_STEP)
        return max(_LEAST_SLAB_BYTES, steps * _SLAB_STEP)

    def cache_bytes(self) -> int:
        """Of rows kept: all of the host's workers together hold each image once."""
        share = self.nbytes // _OF_MEMORY_FOR_CACHES // self.beside
        return min(_MOST_CACHE_BYTES, max(_LEAST_CACHE_BYTES, share))
