"""The prompts of very long texts, made in confined processes that end with their requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.serving.dispatch import Call
from tessera.models import open_model
from tessera.models.base import (
    Content,
    InputTask,
    PairLimits,
    PairModel,
    Pairs,
    Prompt,
    Role,
    Truncate,
)
from tessera.sandbox import Limits, Pool, ProcessLost, Stop, in_memory
from tessera.sandbox.memory import Memory
from tessera.turns import Threads
from tessera.wire import Failure

MOST_DOCUMENTS: Final = 1024
"""Of a query that are made into prompts at once."""

# 4,000,000 characters of the longest tokens' kind take 1.7 GB.
_MEMORY_BYTES: Final = 4 << 30
# An empty message would end the process; what there is to do is in the file.
_TASK: Final = b"prompts"
# Of errors, beside the tokens.
_MESSAGE_BYTES: Final = 4 << 20
_MOST_MESSAGE: Final = 2048
# A fork server with a vocabulary of 150,000 tokens holds 240 MB.
_IDLE_SECONDS: Final = 120.0
_MOST_PROCESSES: Final = 4
# Behind the loop, and behind what is made on threads: those are the texts that models read whole.
_NICE: Final = 10


def beside_the_loop(most: int) -> int:
    """Return one for each processor but the event loop's, at least 2; more would take time from the loop."""
    return min(most, max(2, len(os.sched_getaffinity(0)) - 1))


class _Built(msgspec.Struct, frozen=True, tag=True):
    """A prompt, with its tokens and the bounds of its chunks as bytes of int32."""

    tokens: bytes
    image_tokens: int
    truncated: bool
    chunks: bytes | None = None


class _Done(msgspec.Struct, frozen=True):
    """The message that so many bytes lie in the shared memory; they hold a list."""

    size: int


_decode_done: Final = msgspec.msgpack.Decoder(_Done)
_decode_list: Final = msgspec.msgpack.Decoder(list[_Built | Failure])


class LongTexts:
    """Makes prompts in processes, which requests take in turns by key; owned by one event loop.

    A thread that tokenises cannot be ended, and 4,000,000 characters take it 5 to 15 s. A process is killed
    when the request's client has left or its deadline is over, and another one is forked within
    milliseconds. The first long text starts them, and they end when there was none for a while.
    ``max_tokens`` bounds a prompt, ``seconds`` the time of any request.
    """

    def __init__(
        self, directory: Path, options: Mapping[str, object], *, max_tokens: int, seconds: float
    ) -> None:
        self._setup = msgspec.json.encode((str(directory), dict(options))).decode()
        self._max_tokens = max_tokens
        self._limits = Limits(seconds=seconds, memory_bytes=_MEMORY_BYTES)
        self._count = beside_the_loop(_MOST_PROCESSES)
        self._threads = Threads(self._count, "tokenise-long")
        self.turns = self._threads.turns
        self._lock = threading.Lock()
        self._pool: Pool[_Done] | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def prompts(self, task: InputTask | Pairs, call: Call, *, size: int) -> list[Prompt | TesseraError]:
        """Return the prompts, or errors, of a task; raises ``Unavailable`` where no process can be had."""
        stop = Stop()
        try:
            make = partial(self._make, task, stop)
            return await self._threads.run(make, call.client, size=size, priority=call.priority)
        except ProcessLost as loss:
            if loss.why == "timeout":
                raise call.deadline.exceeded(task.param) from None
            raise InvalidInput.at(
                task.param,
                "this text cannot be tokenised: the tokenizer failed over it,"
                f" or would take more than {_MEMORY_BYTES >> 30} GiB",
            ) from None
        finally:
            stop.stop()
            self._close_when_idle()

    def _make(self, task: InputTask | Pairs, stop: Stop) -> list[Prompt | TesseraError]:
        with self._lock:
            if self._pool is None:
                # From a thread that lives as long as this object: the processes end with it.
                self._pool = self._open()
            pool = self._pool
        descriptor = in_memory(pickle.dumps(task))
        try:
            return pool.call_until(stop, _TASK, descriptor, self._read, over=task.param)
        finally:
            os.close(descriptor)

    def _open(self) -> Pool[_Done]:
        return Pool(
            "tokeniser",
            f"{__name__}:Handler",
            self._setup,
            _decode_done,
            self._limits,
            # Pages are no memory until they are written to.
            shared_bytes=4 * self._max_tokens * MOST_DOCUMENTS + _MESSAGE_BYTES,
            count=self._count,
        )

    def _read(self, answer: _Done, memory: Memory) -> list[Prompt | TesseraError]:
        prompts: list[Prompt | TesseraError] = []
        try:
            for built in _decode_list.decode(memory[: answer.size].tobytes()):
                if isinstance(built, Failure):
                    prompts.append(built.error())
                    continue
                tokens = np.frombuffer(built.tokens, np.int32)
                if len(tokens) > self._max_tokens:
                    raise ProcessLost("crash")
                prompts.append(
                    Prompt(
                        tokens=tokens,
                        image_tokens=built.image_tokens,
                        truncated=built.truncated,
                        chunks=None if built.chunks is None else np.frombuffer(built.chunks, np.int32),
                    )
                )
        except (msgspec.MsgspecError, ValueError):
            raise ProcessLost("crash") from None
        return prompts

    def _close_when_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle = None
        if self.turns.used or self.turns.waiting or self._pool is None:
            return
        pool, self._pool = self._pool, None
        asyncio.get_running_loop().run_in_executor(None, pool.close)

    async def close(self) -> None:
        """End the processes; no request may be in progress."""
        if self._idle is not None:
            self._idle.cancel()
        self._threads.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
            self._pool = None


class Handler:
    """A tokeniser, in its confined process. Implements ``sandbox.memory.Handler``."""

    def __init__(self, setup: str) -> None:
        os.nice(_NICE)
        directory, options = msgspec.json.decode(setup)
        self._model = open_model(Path(directory), options)
        # A confined process can import nothing, so what is imported late is imported here.
        content = Content(parts=("warm-up",), role=Role.NONE)
        tasks: list[InputTask | Pairs] = [InputTask(content, self._model.max_tokens, Truncate.END, "")]
        if isinstance(self._model, PairModel):
            limits = PairLimits(tokens=self._model.max_tokens)
            tasks.append(Pairs(query=content, documents=[content], limits=limits, param="", params=[""]))
        for task in tasks:
            with contextlib.suppress(TesseraError):
                pickle.loads(pickle.dumps(task)).prompts(self._model)

    def answer(self, memory: Memory, task: bytes, descriptor: int) -> bytes:
        # The frontend's own words, which it has pickled itself.
        asked: InputTask | Pairs = pickle.loads(os.pread(descriptor, os.lseek(descriptor, 0, os.SEEK_END), 0))
        built: list[_Built | Failure] = []
        for prompt in asked.prompts(self._model):
            if isinstance(prompt, TesseraError):
                built.append(
                    Failure(code=prompt.code, message=prompt.message[:_MOST_MESSAGE], param=prompt.param)
                )
                continue
            tokens = prompt.tokens.astype(np.int32, copy=False).tobytes()
            chunks = None if prompt.chunks is None else prompt.chunks.tobytes()
            built.append(_Built(tokens, prompt.image_tokens, prompt.truncated, chunks))
        data = msgspec.msgpack.encode(built)
        memory[: len(data)] = np.frombuffer(data, np.uint8)
        return msgspec.msgpack.encode(_Done(len(data)))
