"""``python -m training.train --out DIR``: trains the demonstration checkpoint, or goes on where it stopped.

In DIR: ``checkpoint/``, ready to serve, ``state.pt`` to resume from, ``log.csv`` and ``loss.png``. One H100
is enough; a processor can run a few steps of it, to try the code.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tessera.models.llama_nemotron_vl.config_reader import read_config
from training.batches import Pool, join
from training.checkpoint import write_settings, write_weights
from training.chunks import Chunk, Chunks, Recipe
from training.log import Report, write_reports
from training.losses import total_loss
from training.network import Network
from training.validation import validate

STATE_FILE = "state.pt"
CHECKPOINT_FOLDER = "checkpoint"
_WARM_UP = 0.04
_LAST_RATE = 0.02
_CLIP = 1.0
_DECAY = 0.05


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000, help="length of the whole run")
    parser.add_argument(
        "--minutes", type=float, help="end within this time all the same, with the learning rate brought down"
    )
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="stop there, to resume later")
    parser.add_argument("--chunk", type=int, default=128, help="pictures in a chunk")
    parser.add_argument("--chunks", type=int, default=8, help="chunks in a batch")
    parser.add_argument("--pool", type=int, default=64, help="chunks waiting on the device")
    parser.add_argument("--uses", type=int, default=3, help="how often a chunk is trained on")
    parser.add_argument("--simple-steps", type=int, default=1000, help="steps on pictures of one tile")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--held-out", type=int, default=8, help="chunks to validate with")
    parser.add_argument("--report-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args(arguments)


class Run:
    """One training run; everything that has to survive an interruption is in ``state``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.out / CHECKPOINT_FOLDER
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(options.seed)
        options.out.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "config.json").exists():
            write_settings(self.folder)
        config = read_config(self.folder)
        self.placeholder = config.prompt.image_token_id
        self.network = Network(config).place(self.device)
        self.optimizers = optimizers(self.network, options.rate)
        state: dict[str, Any] | None = None
        if (options.out / STATE_FILE).exists():
            state = torch.load(options.out / STATE_FILE, map_location=self.device, weights_only=False)
            self.network.load_state_dict(state["network"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        self.step: int = state["step"] if state else 0
        self.spent: float = state["spent"] if state else 0.0
        self.reports = [Report(**report) for report in state["reports"]] if state else []
        recipe = Recipe(
            settings=self.folder,
            seed=options.seed,
            size=options.chunk,
            uses=options.uses,
            simple=options.simple_steps * options.chunks // options.uses,
        )
        self.held_out = _made(
            Chunks(Recipe(settings=self.folder, seed=0, size=options.chunk, held_out=True)),
            options.held_out,
            options.workers,
        )
        self.pool = Pool(
            Chunks(recipe),
            capacity=options.pool,
            workers=options.workers,
            device=self.device,
            state=state["pool"] if state else None,
        )
        if options.compile:
            for layer in self.network.vision.vision.layers:
                layer.compile(dynamic=True)

    def run(self) -> None:
        """Train to the last step, or to the one to stop after, and write everything."""
        options = self.options
        last = min(options.steps, options.stop_after or options.steps)
        losses: list[torch.Tensor] = []
        started = time.monotonic() - self.spent
        with tqdm(total=options.steps, initial=self.step, unit="step", mininterval=2) as bar:
            while self.step < last and self._progress() < 1:
                losses.append(self._advance())
                self.spent = time.monotonic() - started
                self.step += 1
                bar.update()
                ending = self.step == last or self._progress() >= 1
                if self.step % options.report_every == 0 or ending:
                    report = self._report(torch.stack(losses).mean().item())
                    losses.clear()
                    bar.set_postfix(loss=f"{report.loss:.3f}", recall=f"{report.text_to_image:.3f}")
                    tqdm.write(f"step {report.step}, {report.seconds:.0f} s, {report}")
                    self.save()
        self.save()

    def save(self) -> None:
        """Replace the state in one move, and write the checkpoint and the log beside it."""
        out: Path = self.options.out
        fresh = out / f"{STATE_FILE}.new"
        torch.save(
            {
                "network": self.network.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "pool": self.pool.state,
                "step": self.step,
                "spent": self.spent,
                "reports": [_plain(report) for report in self.reports],
            },
            fresh,
        )
        fresh.replace(out / STATE_FILE)
        write_weights(self.folder, self.network)
        write_reports(out, self.reports)

    def _advance(self) -> torch.Tensor:
        options = self.options
        rate = options.rate * schedule(self._progress())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batch = join(self.pool.draw(options.chunks), self.device, self.placeholder)
        with self._precision():
            vectors = self.network(batch.tiles, batch.sequences)
        sides = {side: vectors[rows] for side, rows in batch.sides.items()}
        loss, main = total_loss(sides, self.network.scale)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        return main

    def _report(self, loss: float) -> Report:
        recalls = validate(self.network, self.held_out, self.device, self.placeholder, self._precision)
        self.reports.append(Report(step=self.step, seconds=self.spent, loss=loss, **_plain(recalls)))
        return self.reports[-1]

    def _progress(self) -> float:
        by_time: float = self.spent / 60 / self.options.minutes if self.options.minutes else 0.0
        by_steps: float = self.step / self.options.steps
        return max(by_steps, by_time)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()


def optimizers(network: Network, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and biases.

    Muon (Jordan et al. 2024) takes steps of equal size in all directions of a matrix; scaled as in Liu et
    al. 2025 (arXiv:2502.16982) it shares AdamW's learning rate.
    """
    inner = [value for name, value in network.named_parameters() if value.ndim == 2 and "embed" not in name]
    chosen = {id(value) for value in inner}
    others = [value for value in network.parameters() if id(value) not in chosen]
    return [
        torch.optim.Muon(inner, lr=rate, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(progress: float) -> float:
    """The share of the peak learning rate: a short rise, then half a cosine down."""
    if progress < _WARM_UP:
        return max(progress, 1e-4) / _WARM_UP
    share = min(1.0, (progress - _WARM_UP) / (1 - _WARM_UP))
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * share)) / 2


def _made(chunks: Chunks, count: int, workers: int) -> list[Chunk]:
    if count == 0:
        return []
    with torch.multiprocessing.get_context("fork").Pool(min(workers, count)) as processes:
        return processes.map(chunks.__getitem__, range(count), chunksize=1)


def _plain(value: Any) -> dict[str, float]:
    return {name: getattr(value, name) for name in value.__slots__}


def main(arguments: Sequence[str] | None = None) -> None:
    Run(parse(arguments)).run()


if __name__ == "__main__":
    main()
