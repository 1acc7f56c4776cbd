"""The text engine of a TensorRT plan: runs read and write buffers at fixed addresses."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import numpy as np
import torch

from tessera.dtypes import DTYPES
from tessera.engine.batch import (
    Cost,
    PackedInput,
    TextBatch,
    gather,
    pack,
    packed_cost,
    padded_cost,
    zeros,
)
from tessera.engine.placement import Placement
from tessera.engine.process import tune_interpreter
from tessera.engine.settings import EngineSettings
from tessera.engine.streams import CudaStreams, sendable
from tessera.errors import EngineFailed, EngineMismatch
from tessera.launched import Launched
from tessera.models.base import Model, sequential
from tessera.rows import Rows
from tessera_engines.compiled.manifest import Binding, Manifest
from tessera_engines.compiled.spec import Layout, Profile, Stage
from tessera_engines.tensorrt.loaded import LoadedEngine, Replays, open_engine
from tessera_engines.tensorrt.runs import BatchInputs, Run, RunInputs, Sizes


class TextRuns:
    """Owns the fixed inputs and outputs; runs of up to ``graph_tokens`` tokens are replayed from graphs."""

    def __init__(self, loaded: LoadedEngine, streams: CudaStreams, device: str, *, graph_tokens: int) -> None:
        manifest = loaded.manifest
        self._layout = manifest.layout
        self._width, self._row_width = manifest.width, manifest.row_width
        self._sizes = Sizes(manifest.profiles, manifest.layout, coarse=graph_tokens)
        self._profiles = manifest.profiles
        self._streams = streams
        self._buffers = Buffers(manifest, device)
        self._replays = Replays(loaded, streams)

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        with torch.inference_mode():
            inputs = BatchInputs(batch, self._layout)
            runs = self._sizes.cut(batch.lengths, inputs.rows)
            inputs_of = [inputs.of(run) for run in runs]
            with self._streams.copying():
                images, rows = self._images(batch)
            count = len(batch.lengths)
            vectors = self._streams.staging((count, self._width), torch.float32)
            norms = self._streams.staging((count,), torch.float32)
            keep: list[object] = [images, rows, vectors, norms]
            done = 0
            with self._streams.computing():
                for run, own in zip(runs, inputs_of, strict=True):
                    keep += self._fill(own, rows)
                    self._replays.run(run.profile, self._tensors(run))
                    members = len(run.members)
                    for host, name in ((vectors, "vectors"), (norms, "norms")):
                        host[done : done + members].copy_(self._buffers[name][:members], non_blocking=True)
                    done += members
                # The runs take the sequences in another order than the batch.
                order = np.argsort(np.concatenate([run.members for run in runs]))
                return self._streams.launched(
                    lambda: Rows(vectors.numpy()[order], np.arange(count + 1), norms.numpy()[order]),
                    keep=keep,
                )

    def record(self, max_length: int) -> None:
        """Record graphs of the sizes that small batches are rounded up to.

        No sequence of theirs is longer than ``max_length``: the engine's table of positions ends there.
        """
        with torch.inference_mode():
            for lengths, run in self._sizes.coarse():
                own = [min(length, max_length) for length in lengths]
                batch = pack(
                    [
                        PackedInput(tokens=np.zeros(length, np.int32), positions=sequential(length))
                        for length in own
                    ]
                )
                with self._streams.computing():
                    # Valid inputs; the output does not matter.
                    keep = self._fill(BatchInputs(batch, self._layout).of(run), None)
                    self._replays.record(run.profile, self._tensors(run))
                self._streams.synchronize()
                keep.clear()

    def close(self) -> None:
        self._streams.synchronize()
        self._replays.close()

    def _tensors(self, run: Run) -> dict[str, torch.Tensor]:
        """The run's inputs and outputs, each the beginning of its buffer."""
        buffers = self._buffers
        if self._layout is Layout.PADDED:
            tokens: tuple[int, ...] = (run.sequences, run.tokens)
            ends = {"lengths": (run.sequences,)}
        else:
            tokens = (run.tokens,)
            ends = {"positions": tokens}
            ends |= dict.fromkeys(("query_lengths", "key_value_lengths"), (run.sequences + 1,))
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": tokens,
            "vision_row": tokens,
            # Always of one size: only the rows that vision_row names are read.
            "vision_rows": (self._profiles[run.profile].rows.max, self._row_width),
            "vectors": (run.sequences, self._width),
            "norms": (run.sequences,),
        } | ends
        return {name: buffers.view(name, shape) for name, shape in shapes.items()}

    def _fill(self, inputs: RunInputs, rows: torch.Tensor | None) -> list[torch.Tensor]:
        """Copy a run's inputs into the buffers, behind the run before; returns what the copies read."""
        staged = []
        for name, array in inputs.arrays.items():
            source = self._streams.staging(array.shape, torch.int32)
            np.copyto(source.numpy(), array)
            self._buffers.view(name, array.shape).copy_(source, non_blocking=True)
            staged.append(source)
        offset = 0
        for start, end in inputs.rows:
            assert rows is not None
            self._buffers["vision_rows"][offset : offset + end - start].copy_(rows[start:end])
            offset += end - start
        return staged

    def _images(self, batch: TextBatch) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """What the copies read, and the vision rows of the whole batch on the device."""
        if not batch.vision:
            return [], None
        target = self._buffers["vision_rows"]
        sources = [sendable(image, self._streams) for image in batch.vision]
        if len(sources) == 1 and sources[0].device == target.device:
            return sources, sources[0]
        rows = torch.empty(len(batch.vision_index), self._row_width, dtype=target.dtype, device=target.device)
        return sources, gather(sources, rows)


class Buffers:
    """Memory for each input and output, as large as any profile needs; it never moves.

    ``view`` gives the beginning of a buffer in another shape; rows can be had by indexing.
    """

    def __init__(self, manifest: Manifest, device: str) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for binding in manifest.bindings:
            shapes = [_largest(binding, profile, manifest.layout) for profile in manifest.profiles]
            dtype = DTYPES[binding.dtype].torch
            self._tensors[binding.name] = torch.zeros(max(shapes, key=prod), dtype=dtype, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensors[name].view(-1)[: prod(shape)].view(shape)


def _largest(binding: Binding, profile: Profile, layout: Layout) -> tuple[int, ...]:
    """The binding's largest shape in a profile."""
    axes = {
        "vision_rows": ("rows",),
        "lengths": ("sequences",),
        "query_lengths": ("sequences",),
        "key_value_lengths": ("sequences",),
        "vectors": ("sequences",),
        "norms": ("sequences",),
    }.get(binding.name, ("sequences", "tokens") if layout is Layout.PADDED else ("tokens",))
    extra = 1 if binding.name in ("query_lengths", "key_value_lengths") else 0
    sizes = iter(getattr(profile, axis).max + extra for axis in axes)
    return tuple(next(sizes) if size == -1 else size for size in binding.shape)


def check_text_profiles(manifest: Manifest, max_tokens: int, where: str) -> None:
    """Check that a profile takes the longest input, all of it vision rows; raises ``EngineMismatch``."""
    if not any(min(profile.tokens.max, profile.rows.max) >= max_tokens for profile in manifest.profiles):
        found = "; ".join(f"tokens {profile.tokens}, rows {profile.rows}" for profile in manifest.profiles)
        raise EngineMismatch(
            f"{where}: the checkpoint takes inputs of {max_tokens} tokens, all of which may be vision rows,"
            f" but no profile does; they are {found}"
        )


# Tokens up to which a run is short enough for its launches to matter.
_GRAPH_TOKENS = 2048


class TensorRTTextEngine:
    """Runs the text stage of an engine directory; one thread drives it."""

    def __init__(self, model: Model, settings: EngineSettings, placement: Placement) -> None:
        loaded = open_engine(model, settings, placement, Stage.TEXT)
        check_text_profiles(loaded.manifest, model.max_tokens, str(settings.path))
        self._loaded: LoadedEngine | None = loaded
        self._model = model
        self._layout = loaded.manifest.layout
        graphs = _GRAPH_TOKENS if settings.graph_cost is None else settings.graph_cost
        self._runs = TextRuns(loaded, CudaStreams(placement.device), placement.device, graph_tokens=graphs)
        self._max_length = model.max_tokens
        self._max_tokens = max(settings.max_batch_cost, model.max_tokens)

    @property
    def cost(self) -> Cost:
        return padded_cost if self._layout is Layout.PADDED else packed_cost

    gives: Collection[str] = ()
    depth = 2

    def launch_named(self, batch: TextBatch) -> Launched[list[Rows]]:
        raise EngineFailed(f"this engine gives no outputs by name: {', '.join(batch.names)}")

    def warm(self) -> None:
        # The widest batch comes twice, because two are in flight.
        few, widest = zeros(self._model, 8, 8), zeros(self._model, self._max_tokens, self._max_length)
        for launched in [self.launch(few), self.launch(widest), self.launch(widest)]:
            launched.result()
        self._runs.record(self._max_length)
        self.launch(few).result()
        if self._loaded is not None:
            self._loaded.save_compiled()
        tune_interpreter()

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        return self._runs.launch(batch)

    def close(self) -> None:
        self._runs.close()
        self._loaded = None
