"""One KServe call from its tensors to its answer: models, admission, the pipeline, statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from tessera import __version__
from tessera.errors import Overloaded, RateLimited, ResponseTooLarge, TesseraError
from tessera.frontend.api.endpoint import LARGE_BODY_BYTES
from tessera.frontend.exchange import Exchange
from tessera.frontend.service import Service
from tessera.frontend.serving import dispatch
from tessera.frontend.serving.pipeline import Result
from tessera.logs import note
from tessera.tasks import Deadline
from tessera.turns import Threads
from tessera_kserve.call import Answer, Call
from tessera_kserve.line import Line
from tessera_kserve.models import (
    VERSION,
    Offer,
    Offers,
    Work,
    check_inputs,
    check_outputs,
    written,
)
from tessera_kserve.outputs import padded_bytes
from tessera_kserve.shared_memory.cuda import have_driver
from tessera_kserve.shared_memory.regions import Regions
from tessera_kserve.spec import Spec
from tessera_kserve.statistics import Spent, Statistics
from tessera_kserve.tensors import BYTES

T = TypeVar("T")

SERVER: Final = "tessera"
EXTENSIONS: Final = (
    "model_configuration",
    "model_repository",
    "statistics",
    "binary_tensor_data",
    "parameters",
)

# A worker that is full says so; it is asked again after this.
_PAUSE_SECONDS: Final = 0.005
# Of a call that large, tensors are read on a thread: 3 MB raw take a millisecond, a row of pixels as JSON 40.
_LARGE_BYTES: Final = 1 << 17


class Inference:
    """What both transports ask; owned by one event loop."""

    def __init__(self, service: Service, shared_memory: str = "") -> None:
        """``shared_memory`` is what the names of clients' files begin with; empty: there are none."""
        self._service = service
        self._line = Line()
        settings = service.settings
        self.regions = Regions(shared_memory, settings.limits.max_body_bytes)
        self.offers = Offers(service.models)
        self.statistics = Statistics(service.metrics)

    @property
    def patience(self) -> float:
        """Seconds that a call has whose client sets no deadline."""
        return self._service.settings.limits.timeout_seconds

    @property
    def ready(self) -> bool:
        """Whether a model can be asked, or all where that is wanted; a frontend that drains is not ready."""
        return not self._service.not_ready()

    def model_ready(self, name: str, version: str = "") -> bool:
        """Raises ``ModelNotFound``."""
        return bool(self.offers.find(name, version).served.workers.embed.ready)

    def deadline(self, seconds: float | None, call: Call) -> Deadline:
        """For a call that has just come: what its transport leaves, its own ``timeout``, or ours."""
        left = self.patience if seconds is None else seconds
        asked = call.parameters.get("timeout")
        if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
            left = min(left, asked / 1e6)
        return Deadline.after(left)

    async def in_turn(
        self, work: Callable[[], T], exchange: Exchange, nbytes: int, *, body: bool = False
    ) -> T:
        """Return the result of ``work`` on so many bytes, in the turn of the exchange's key.

        A thread does what would keep the event loop, and one alone what parses a large ``body``: answers do
        not wait behind those.
        """
        service = self._service
        if nbytes <= _LARGE_BYTES:
            return await service.turns.run(work, exchange.client)
        if body and nbytes > LARGE_BODY_BYTES:
            return await self.aside(work, exchange, service.bodies)
        return await self.aside(work, exchange)

    async def hold(self, exchange: Exchange, nbytes: int, spare: Callable[[], int] = lambda: 0) -> None:
        """Wait until the exchange holds so many bytes more, as many as ``spare`` says are free beside them.

        Those that need few do not wait behind those that need many. Raises as ``Line.wait``.
        """

        def take() -> None:
            exchange.hold_once_free(nbytes, spare())

        await self._line.wait(nbytes, take, client=exchange.client, deadline=exchange.deadline)

    async def aside(self, work: Callable[[], T], exchange: Exchange, threads: Threads | None = None) -> T:
        """Return the result of ``work``, which a thread does in the turn of the exchange's key."""
        return await exchange.aside(threads or self._service.threads, work)

    async def at_regions(self, exchange: Exchange, work: Callable[..., T], *args: object) -> T:
        """Return the result of ``work`` for the exchange's client, on a thread of the regions."""
        client, deadline = exchange.client, Deadline.after(self.patience)
        return await self.regions.aside(client, deadline, work, client, *args)

    async def infer(self, call: Call, exchange: Exchange) -> Answer:
        """Answer a call that holds no place yet; raises ``TesseraError``."""
        started = time.perf_counter()
        offer = self.offers.find(call.model, call.version)
        spent = Spent()
        try:
            outputs = await self._infer(offer, call, exchange, spent)
        except TesseraError:
            self.statistics.fail(offer.name, time.perf_counter() - started)
            raise
        self.statistics.succeed(offer.name, spent, time.perf_counter() - started)
        return Answer(model=call.model, id=call.id, request_id=exchange.line.request_id, outputs=outputs)

    async def _infer(self, offer: Offer, call: Call, exchange: Exchange, spent: Spent) -> tuple[Any, ...]:
        began = time.perf_counter()
        note(model=offer.served.served.model, kserve=offer.name)
        call.check_parameters(offer.parameters)
        check_outputs(offer, call)
        call = await self.regions.load(exchange.client, call, exchange.deadline, partial(self.hold, exchange))
        spent.batch = check_inputs(offer, call)
        work = await self.in_turn(partial(offer.read, call), exchange, call.nbytes)
        exchange.count()
        self._check_size(work.nbytes)
        read = time.perf_counter()
        result = None
        if work.request is not None:
            result = await self._run(offer, call, work, exchange, spent)
        computed = time.perf_counter()
        rows = () if result is None else result.outputs.values()
        nbytes = max(work.nbytes, sum([each.nbytes for each in rows]))
        outputs = await self.in_turn(lambda: written(offer, call, work.write(result)), exchange, nbytes)
        await self.regions.store(exchange.client, call, outputs, exchange.deadline)
        ended = time.perf_counter()
        spent.compute_input = read - began
        spent.compute_infer = max(0.0, computed - read - spent.queue)
        spent.compute_output = ended - computed
        return outputs

    def _check_size(self, nbytes: int) -> None:
        limit = self._service.settings.limits.max_response_bytes
        if nbytes > limit:
            raise ResponseTooLarge(f"the answer may take {nbytes} bytes, over the limit of {limit}")

    async def _run(self, offer: Offer, call: Call, work: Work, exchange: Exchange, spent: Spent) -> Result:
        """Wait for room as often as it takes: that of a request is known in full once it has been read."""
        served, request = offer.served, work.request
        assert request is not None
        note(
            inputs=len(request.inputs),
            images=sum(len(entry.images) for entry in request.inputs),
            outputs=",".join(request.outputs) or None,
        )

        def take() -> None:
            exchange.ticket = self._service.admission.enter(exchange.client, call.nbytes)
            try:
                exchange.ticket.enter(served.room)
            except Overloaded:
                exchange.leave()
                raise

        of_request = dispatch.Call(
            request_id=exchange.line.request_id,
            deadline=exchange.deadline,
            client=exchange.client,
            priority=request.priority,
            hold=exchange.hold_in_turn,
        )
        prepared, held = None, exchange.held_bytes
        while True:
            asked = time.perf_counter()
            await self._line.wait(served.room, take, client=exchange.client, deadline=exchange.deadline)
            spent.queue += time.perf_counter() - asked
            try:
                if prepared is None:
                    prepared = await served.pipeline.prepare(request, of_request)
                if prepared.good:
                    cost = prepared.cost
                    nbytes = max(work.nbytes, padded_bytes(prepared.outputs, cost.bounds, work.rows))
                    self._check_size(nbytes)
                    exchange.pay(cost.tokens, cost.units, nbytes)
                result = await served.pipeline.embed(prepared, of_request)
            except RateLimited:
                raise
            except Overloaded:
                # Its cost was known too late, or a worker has less room than it had said, or its images have
                # none. Those are read again.
                asked = time.perf_counter()
                if prepared is None:
                    exchange.hold_only(held)
                exchange.deadline.left()
            else:
                spent.queue += result.timings.queue_ms / 1e3
                note(
                    tokens=result.usage.total_tokens,
                    cached_tokens=result.usage.cached_tokens,
                    **result.timings.spent(),
                )
                return result
            finally:
                exchange.leave()
            await asyncio.sleep(_PAUSE_SECONDS)
            spent.queue += time.perf_counter() - asked

    def server(self) -> dict[str, Any]:
        """The metadata of the server, as JSON has it."""
        more: tuple[str, ...] = ("system_shared_memory",) if self.regions.on else ()
        if self.regions.on and have_driver():
            more += ("cuda_shared_memory",)
        return {"name": SERVER, "version": __version__, "extensions": [*EXTENSIONS, *more]}

    def metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Of a model, as JSON has it."""
        offer = self.offers.find(name, version)

        def tensors(specs: tuple[Spec, ...]) -> list[dict[str, Any]]:
            return [
                {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs
            ]

        return {
            "name": name,
            "versions": [VERSION],
            "platform": SERVER,
            "inputs": tensors(offer.inputs),
            "outputs": tensors(offer.outputs),
        }

    def configuration(self, name: str, version: str = "") -> dict[str, Any]:
        """Of a model, as Triton's ``config.pbtxt`` has it, in JSON."""
        offer = self.offers.find(name, version)

        def tensor(spec: Spec, *, inputs: bool) -> dict[str, Any]:
            kind = "STRING" if spec.datatype == BYTES else spec.datatype
            found: dict[str, Any] = {
                "name": spec.name,
                "data_type": f"TYPE_{kind}",
                "dims": list(spec.dims),
            }
            if spec.flat:
                found["reshape"] = {"shape": []}
            if inputs and spec.optional:
                found["optional"] = True
            return found

        return {
            "name": name,
            "platform": SERVER,
            "backend": SERVER,
            "max_batch_size": offer.most_rows,
            "input": [tensor(spec, inputs=True) for spec in offer.inputs],
            "output": [tensor(spec, inputs=False) for spec in offer.outputs],
            "dynamic_batching": {},
            "model_transaction_policy": {"decoupled": False},
        }

    def counted(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return the statistics of a model, or of all without a name, as JSON has them."""
        return [
            {"name": name or offer.name, "version": VERSION, **self.statistics.of(offer.name)}
            for offer in ([self.offers.find(name, version)] if name else self.offers)
        ]

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """All models, as JSON has them; with ``ready`` those that can be asked."""
        found = []
        for offer in self.offers:
            able = bool(offer.served.workers.embed.ready)
            if able or not ready:
                state = "READY" if able else "UNAVAILABLE"
                reason = "" if able else "no worker that can serve is there"
                found.append({"name": offer.name, "version": VERSION, "state": state, "reason": reason})
        return found
