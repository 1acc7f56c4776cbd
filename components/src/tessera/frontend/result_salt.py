"""What vectors depend on beside their input: the checkpoint, and how the workers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tessera import wire


class ResultSalt:
    """Bytes that change when the same input may get another vector.

    ``workers`` gives those that are there of each component; where none is, its last ones count.
    """

    def __init__(self, fingerprint: str, *workers: Callable[[], Iterable[wire.WorkerInfo]]) -> None:
        self._fingerprint = fingerprint
        self._workers = workers
        self._last: list[list[str]] = [[] for _ in workers]

    def __call__(self) -> bytes:
        for number, workers in enumerate(self._workers):
            # Workers of the same checkpoint may run it in another number type, or rounded further.
            if found := sorted({f"{info.dtype}\0{info.rounding}" for info in workers()}):
                self._last[number] = found
        return "\0\0".join([self._fingerprint, *("\0".join(kinds) for kinds in self._last)]).encode()
