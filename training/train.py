"""``python -m training.train --out DIR``: trains the demonstration checkpoint, or goes on where it stopped.

In DIR, written every minute: ``checkpoint/``, ready to serve, ``state.pt`` to resume from, ``log.csv`` and
``loss.png``. SIGTERM ends a run after the step it is at, with all of that written. One H100 is enough; a
processor can run a few steps of it, to try the code.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tessera.checkpoint.weights import SINGLE_FILE
from tessera.models.llama_nemotron_vl.config import read_config
from training.batches import Pool, join
from training.checkpoint import copy_settings, write_settings, write_weights
from training.chunks import Chunk, Chunks, Recipe
from training.deadline import Deadline, process_age
from training.files import replacing
from training.log import Report, read_reports, write_reports
from training.losses import total_loss
from training.network import Network
from training.validation import Recalls, validate
from training.world.sampling import SHARES

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
        "--minutes",
        type=float,
        help="end this long after the process began, with the learning rate brought down by then",
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="CHECKPOINT",
        help="a new run begins with these weights and the log beside them, not with random ones",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.07, help="where a new run begins; the cosines' divisor"
    )
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="stop there, to resume later")
    parser.add_argument("--chunk", type=int, default=128, help="pictures in a chunk")
    parser.add_argument(
        "--chunks",
        type=int,
        default=8,
        help="chunks in a batch; 6, views included, take some 60 GB of a card",
    )
    parser.add_argument("--pool", type=int, default=64, help="chunks waiting on the device")
    parser.add_argument("--uses", type=int, default=3, help="how often a chunk is trained on")
    parser.add_argument("--simple-steps", type=int, default=1000, help="steps on pictures of one tile")
    parser.add_argument(
        "--pages", type=float, default=SHARES["page"], help="share of pages among the later pictures"
    )
    parser.add_argument(
        "--views", type=float, default=0.35, help="share of pictures that are shown a second time, smaller"
    )
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--held-out", type=int, default=8, help="chunks to validate with")
    parser.add_argument("--report-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args(arguments)


class Run:
    """One training run; everything that has to survive an interruption is in ``state``."""

    def __init__(self, options: argparse.Namespace, deadline: Deadline) -> None:
        self.options, self.deadline = options, deadline
        self.folder: Path = options.out / CHECKPOINT_FOLDER
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(options.seed)
        options.out.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "config.json").exists():
            if options.start:
                copy_settings(options.start, self.folder)
            else:
                write_settings(self.folder)
        config = read_config(self.folder)
        self.placeholder = config.image_token_id
        self.network = Network(config, temperature=options.temperature)
        self.step, self.spent = 0, 0.0
        self._began = self._ticked = self._saved = time.monotonic()
        self._stepping = self._validating = self._saving = 0.0
        self.reports: list[Report] = []
        state: dict[str, Any] | None = None
        if (options.out / STATE_FILE).exists():
            state = torch.load(options.out / STATE_FILE, map_location="cpu", weights_only=False)
            self.network.load_state_dict(state["network"])
            self.step, self.spent = state["step"], state["spent"]
            self.reports = [Report(**report) for report in state["reports"]]
        elif options.start:
            self.network.load_stored(load_file(options.start / SINGLE_FILE))
            self.reports = read_reports(options.start)
            if self.reports:
                self.step, self.spent = self.reports[-1].step, self.reports[-1].seconds
        self.network.place(self.device)
        self.optimizers = optimizers(self.network, options.rate)
        if state:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        recipe = Recipe(
            settings=self.folder,
            seed=options.seed,
            size=options.chunk,
            uses=options.uses,
            simple=options.simple_steps * options.chunks // options.uses,
            pages=options.pages,
            views=options.views,
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
            for layer in self.network.vision.vision.layers.layers:
                layer.compile(dynamic=True)

    def run(self) -> None:
        """Train to the last step, to the one to stop after, or for as long as allowed; write everything."""
        options = self.options
        last = min(options.steps, options.stop_after or options.steps)
        self.deadline.heed_signals()
        tqdm.write(f"step {self.step}, {process_age():.0f} s after the start: {self._validate()}")
        losses: list[float] = []
        under_way: torch.Tensor | None = None
        self._began = self._ticked = self._saved = time.monotonic()
        with tqdm(total=options.steps, initial=self.step, unit="step", mininterval=2) as bar:
            while self.step < last and self._progress() < 1 and not self.deadline.told:
                launched = self._advance()
                # Waiting for the step before keeps the device busy, and the clock honest.
                if under_way is not None:
                    losses.append(under_way.item())
                under_way = launched
                self.step += 1
                self._tick()
                bar.update()
                if self.step % options.report_every == 0 and losses:
                    self._report(fmean(losses), bar)
                    losses.clear()
                if time.monotonic() - self._saved >= options.save_every:
                    self.save()
            if under_way is not None:
                losses.append(under_way.item())
            reported = self.reports[-1].step if self.reports else 0
            if losses and self.step > reported and not self.deadline.told:
                self._report(fmean(losses), bar)
        self.save()

    def save(self) -> None:
        """Replace the state, the checkpoint and the log, each in one move."""
        began = time.monotonic()
        out: Path = self.options.out
        with replacing(out / STATE_FILE) as fresh:
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
        write_weights(self.folder, self.network)
        write_reports(out, self.reports)
        self._saved = time.monotonic()
        self._saving = self._saved - began

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
        loss, main = total_loss(
            sides, self.network.scale, owners=batch.owners, fits=batch.fits, originals=batch.originals
        )
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        return main

    def _report(self, loss: float, bar: tqdm[Any]) -> None:
        began = time.monotonic()
        recalls = self._validate()
        self._validating = time.monotonic() - began
        report = Report(step=self.step, seconds=self.spent, loss=loss, **_plain(recalls))
        self.reports.append(report)
        bar.set_postfix(loss=f"{loss:.3f}", words=f"{recalls.words_to_page:.3f}")
        tqdm.write(f"step {report.step}, {report.seconds:.0f} s, loss {loss:.4f}, {recalls}")

    def _validate(self) -> Recalls:
        return validate(self.network, self.held_out, self.device, self.placeholder, self._precision)

    def _tick(self) -> None:
        now = time.monotonic()
        self._stepping = now - self._ticked
        self.spent += self._stepping
        self._ticked = now

    def _progress(self) -> float:
        """How much of the run is over: of its steps, or of the time between its first step and its end."""
        now = time.monotonic()
        # One more step and what comes after the last one, with something to spare.
        ending = 1.5 * (self._stepping + self._validating + self._saving) + 2.0
        left = max(0.0, self.deadline.left - ending)
        by_time = 1.0 if left == 0 else (now - self._began) / (now - self._began + left)
        by_steps: float = self.step / self.options.steps
        return max(by_steps, by_time)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()


_EMBEDDINGS = ("embed_tokens.weight", "positions.weight", "patches.projection.weight")


def optimizers(network: Network, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and biases.

    Muon (Jordan et al. 2024) takes steps of equal size in all directions of a matrix; scaled as in Liu et
    al. 2025 (arXiv:2502.16982) it shares AdamW's learning rate.
    """
    inner = [
        value
        for name, value in network.named_parameters()
        if value.ndim == 2 and not name.endswith(_EMBEDDINGS)
    ]
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
    # The loader keeps its processes to one thread each: more can hang in a process forked late.
    loader: DataLoader[Chunk] = DataLoader(
        chunks, batch_size=None, sampler=range(count), num_workers=min(workers, count)
    )
    return list(loader)


def _plain(value: Any) -> dict[str, float]:
    return {name: getattr(value, name) for name in value.__slots__}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    Run(options, Deadline(options.minutes)).run()


if __name__ == "__main__":
    main()
