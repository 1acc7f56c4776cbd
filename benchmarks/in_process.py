"""What the engines do in process with the batches of a workload, sustained, as a measure of the service."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.batches import Workload, text_batch, vision_batch, workload_tokens
from tessera.launched import Launched
from tessera_tools.load.bodies import HttpWorkload

if TYPE_CHECKING:
    from benchmarks.engine import Engines

Row = tuple[HttpWorkload, int]
"""A workload, and how many requests there are at once."""


@dataclass(frozen=True, slots=True)
class Sustained:
    """``rate`` in inputs a second; with one request at once ``latency`` is its seconds, median.

    ``begin`` and ``end`` are of ``time.time``, for whoever looks at the card.
    """

    rate: float
    latency: float | None
    begin: float
    end: float


def sustained(
    model_path: Path,
    engine: Mapping[str, object],
    rows: Sequence[Row],
    *,
    warm: float,
    seconds: float,
    limit: float = 3600.0,
) -> dict[tuple[str, int], Sustained]:
    """Each row for ``seconds`` after ``warm`` seconds of the same, with the engines that ``engine`` sets.

    Runs in a process of its own, so that nothing of it stays on the card. Rows that mix texts and images, or
    that leave the engines nothing to do, are left out. Raises ``RuntimeError`` when the process takes more
    than ``limit`` seconds.
    """
    wanted = [row for row in rows if not row[0].text_share and (row[0].fresh or not row[0].alone)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        arguments = (model_path, dict(engine), wanted, warm, seconds)
        try:
            return pool.apply_async(_measure, arguments).get(limit)
        except multiprocessing.TimeoutError:
            raise RuntimeError(f"the engines in process took more than {limit:.0f} s") from None


def _measure(
    model_path: Path, engine: dict[str, Any], rows: Sequence[Row], warm: float, seconds: float
) -> dict[tuple[str, int], Sustained]:
    import torch

    from benchmarks.engine import Engines
    from tessera.models import open_model
    from tessera.worker.settings import load_stages

    stages = load_stages(None, engine)
    torch.set_num_threads(stages.threads or torch.get_num_threads())
    engines = Engines(open_model(model_path, stages.model_options), text=stages.text, vision=stages.vision)
    found = {}
    for workload, loop in rows:
        feed = _Feed(engines, stages.text.max_batch_cost, stages.vision.max_batch_cost, workload, loop)
        if loop == 1:
            feed.alone(warm)
            begin = time.time()
            latency = statistics.median(feed.alone(seconds))
            found[workload.name, loop] = Sustained(workload.inputs / latency, latency, begin, time.time())
        else:
            feed.keep_busy(warm)
            begin = time.time()
            rate = feed.keep_busy(seconds)
            found[workload.name, loop] = Sustained(rate, None, begin, time.time())
    return found


class _Feed:
    """Batches of one workload, as large as the budgets and the requests at once make them."""

    def __init__(self, engines: Engines, tokens: int, units: int, workload: HttpWorkload, loop: int) -> None:
        self._engines = engines
        model, size = engines.model, workload.size
        self._inputs = workload.inputs
        at_once = loop * workload.inputs
        length = workload_tokens(model, workload)
        rows = None
        self._texts = None
        self._images = 0
        if size is not None:
            plan = model.plan(*size, param="image")
            rows = engines.encoded(size)
            if workload.fresh:
                self._images = max(1, min(at_once, units // plan.units))
                self._pixels = vision_batch(model, (size,) * self._images, seed=0)
                self._out = [engines.rows(plan.rows) for _ in range(self._images)]
        if not length:
            self._items = self._images or at_once
            return
        self._items = max(1, min(at_once, tokens // length))
        batch = Workload(name=workload.name, tokens=length, size=size, items=self._items)
        self._texts = text_batch(model, batch, rows, seed=1)

    def alone(self, seconds: float) -> list[float]:
        """The seconds that each of the requests took, one after the other, both stages of it."""
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < seconds:
            started = time.perf_counter()
            for _ in range(-(-self._inputs // self._images) if self._images else 0):
                self._vision().result()
            for _ in range(-(-self._inputs // self._items) if self._texts else 0):
                self._engines.text.launch(self._texts).result()
            times.append(time.perf_counter() - started)
        return times

    def keep_busy(self, seconds: float) -> float:
        """Inputs a second while each engine has as many batches under way as a worker gives it."""
        vision, text = self._engines.vision, self._engines.text
        waiting: dict[str, deque[Launched[Any]]] = {"vision": deque(), "text": deque()}

        def launch(stage: str, depth: int, make: Callable[[], Launched[Any]]) -> None:
            if len(waiting[stage]) >= depth:
                waiting[stage].popleft().result()
            waiting[stage].append(make())

        done = encoded = 0
        begin = time.perf_counter()
        while done < 3 * self._items or time.perf_counter() - begin < seconds:
            while self._images and encoded < self._items:
                assert vision is not None
                launch("vision", vision.depth, self._vision)
                encoded += self._images
            encoded -= self._items if self._images else 0
            if self._texts is not None:
                launch("text", text.depth, partial(text.launch, self._texts))
            done += self._items
        for launched in (*waiting["vision"], *waiting["text"]):
            launched.result()
        return done / (time.perf_counter() - begin)

    def _vision(self) -> Launched[Any]:
        assert self._engines.vision is not None
        return self._engines.vision.launch(self._pixels, self._out)
