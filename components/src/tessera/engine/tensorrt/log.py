"""TensorRT's messages and progress, as Python's logging and as what an error can quote."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("tessera.engine.tensorrt")

_KEPT = 5


class Messages:
    """The latest errors of this process: where a call returns nothing, they are the only explanation."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def clear(self) -> None:
        self._errors = []

    def error(self, text: str) -> None:
        self._errors = [*self._errors, text][-_KEPT:]

    def __str__(self) -> str:
        return " | ".join(self._errors) or "TensorRT gave no reason"


@functools.cache
def logging_of(trt: Any) -> tuple[Any, Messages]:
    """The logger to make TensorRT's objects with, and what it keeps.

    One for each flavour: TensorRT goes on using the first that it was given.
    """
    messages = Messages()
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level >= logging.ERROR:
                messages.error(message.strip())
            log.log(level, "%s", message)

    return Logger(), messages


def make_monitor(trt: Any, tell: Callable[[str], None], stop: Callable[[], bool]) -> Any:
    """A progress monitor that tells the outer phases of a build and their steps, and ends it on ``stop``."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                tell(f"{phase_name}: step {step + 1} of {self._steps[phase_name]}")
            return not stop()

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()
