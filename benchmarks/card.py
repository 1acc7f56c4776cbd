"""How fast a GPU's clock runs and what it draws while something is measured, by ``nvidia-smi``."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass

_EVERY_MS = 200
_QUERY = "index,utilization.gpu,clocks.sm,power.draw"
# A card that does less has nothing to do with what is measured.
_BUSY_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Utilisation in percent, the clock in MHz, and the power of all cards in W; None for what is unknown."""

    busy: float | None = None
    mhz: float | None = None
    watts: float | None = None


NOTHING = Reading()


class CardMeter:
    """Samples the cards of this host from entering to leaving, or those of CUDA_VISIBLE_DEVICES where it is
    set; where ``nvidia-smi`` is missing, none."""

    def __enter__(self) -> CardMeter:
        self._samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
            if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
                command += ["-i", named]
            self._process = subprocess.Popen(
                [*command, "-lms", str(_EVERY_MS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def between(self, begin: float, end: float) -> Reading:
        """The means over the cards that were busy from ``begin`` to ``end`` of ``time.time``."""
        by_card: dict[float, list[list[float]]] = {}
        for at, (card, *values) in list(self._samples):
            if begin <= at <= end:
                by_card.setdefault(card, []).append(values)
        means = [
            [sum(column) / len(samples) for column in zip(*samples, strict=True)]
            for samples in by_card.values()
        ]
        if not (means := [mean for mean in means if mean[0] >= _BUSY_PERCENT]):
            return NOTHING
        busy, mhz, watts = zip(*means, strict=True)
        return Reading(sum(busy) / len(busy), sum(mhz) / len(mhz), sum(watts))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                values = [float(value) for value in line.split(",")]
            except ValueError:
                continue  # [N/A]: this card does not say
            if len(values) == len(_QUERY.split(",")):
                self._samples.append((time.time(), values))
