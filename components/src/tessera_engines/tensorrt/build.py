"""Building with TensorRT, in both of its flavours.

Networks are written through the network API and not parsed from ONNX: only there can attention be told to
fail where no fused kernel exists, take packed sequences, and have each type stated.
"""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import torch

from tessera.engine.placement import capability
from tessera.errors import ConfigError, EngineBuildFailed
from tessera.models.base import Model
from tessera_engines.compiled.build import Built, Progress
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile
from tessera_engines.networks import networks_of
from tessera_engines.networks.graph import Axis, Graph, NetworkRequest
from tessera_engines.tensorrt.calibration import read_samples
from tessera_engines.tensorrt.inspect import engine_information, network_information
from tessera_engines.tensorrt.module import PLAN_FILE, load_tensorrt, logging_of, make_monitor

if TYPE_CHECKING:
    from tessera_engines.compiled.build import Flavour


@contextmanager
def deferred_signals() -> Iterator[Callable[[], bool]]:
    """Defer SIGINT and SIGTERM to the end of the block; gives a function that tells whether one has come.

    For code that calls back into Python and swallows what that raises. When the block ends, also by an
    error, the first signal that came is handled as it would have been.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread alone.
        yield lambda: False
        return
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0])


_MAGIC = b"tessera timing cache, "


class TimingCache:
    """TensorRT's timing cache in a file, locked while entered; without a path it does nothing.

    ``version`` begins the file: a cache of another version is replaced, because TensorRT takes one without a
    word and then finds nothing in it.
    """

    def __init__(self, path: Path | None, version: str) -> None:
        self._path = path
        self._header = _MAGIC + version.encode() + b"\n"
        self._file: IO[bytes] | None = None

    def __enter__(self) -> TimingCache:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def attach(self, config: Any, progress: Progress) -> None:
        if self._file is None:
            return
        self._file.seek(0)
        content = self._file.read()
        known = content.startswith(self._header)
        if content and not known:
            progress(f"{self._path}: of another version, begun anew")
        cache = config.create_timing_cache(content[len(self._header) :] if known else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            progress(f"{self._path}: not for this machine, begun anew")
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def save(self, config: Any) -> None:
        if self._file is None:
            return
        cache = config.get_timing_cache()
        if cache is None:
            return
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._header)
        self._file.write(cache.serialize())


NETWORK_FILE = "network.json"


class TensorRTFlavour:
    """Implements ``Flavour``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(
        self, model: Model, spec: BuildSpec, directory: Path, *, timing_cache: Path | None, progress: Progress
    ) -> Built:
        networks_of(model, spec.stage)
        trt = load_tensorrt(self.name)
        capabilities = self._capabilities(trt, spec)
        logger, messages = logging_of(trt)
        messages.clear()
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        progress("describing the network")
        graph, notes = fill_network(trt, network, model, spec)
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        _target(trt, config, capabilities)
        for profile in spec.profiles:
            config.add_optimization_profile(optimization_profile(builder, graph, profile))
        progress(f"building {network.num_layers} layers for {', '.join(capabilities)}")
        if timing_cache is not None and self.name == "tensorrt_rtx":
            progress("tensorrt_rtx times nothing while it builds: the timing cache is not used")
            timing_cache = None
        with (
            TimingCache(timing_cache, f"{self.name} {trt.__version__}") as cache,
            deferred_signals() as interrupted,
        ):
            config.progress_monitor = make_monitor(trt, progress, interrupted)
            cache.attach(config, progress)
            plan = builder.build_serialized_network(network, config)
            if plan is None:
                raise EngineBuildFailed(
                    f"{self.name} {trt.__version__} could not build the {spec.stage} stage in {spec.dtype},"
                    f" {spec.layout}, for {', '.join(capabilities)}: {messages}{_advice(spec, str(messages))}"
                )
            cache.save(config)
        progress("writing the plan")
        (directory / PLAN_FILE).write_bytes(plan)
        information = network_information(trt, network, graph.attentions)
        (directory / NETWORK_FILE).write_text(json.dumps(information, indent=1) + "\n")
        return Built(
            bindings=tuple(graph.bindings),
            capabilities=capabilities,
            versions={self.name: str(trt.__version__)},
            notes=notes,
        )

    def inspect(self, directory: Path, manifest: Manifest) -> dict[str, Any]:
        """The network as it was described and, where it can be loaded, the engine that was made of it."""
        manifest.verify_files(directory, PLAN_FILE, NETWORK_FILE)
        network = json.loads((directory / NETWORK_FILE).read_text())
        return {"network": network} | engine_information(self.name, directory / PLAN_FILE)

    def _capabilities(self, trt: Any, spec: BuildSpec) -> tuple[str, ...]:
        """The compute capabilities to build for; raises ``ConfigError`` for one out of reach."""
        here = capability("cuda") if torch.cuda.is_available() else None
        wanted = spec.capabilities or ((here,) if here else ())
        if not wanted:
            raise ConfigError(
                f"torch {torch.__version__} finds no CUDA device here, so the compute capabilities to build"
                f" for must be named, such as --capability 8.9"
            )
        if not hasattr(trt, "ComputeCapability"):
            if wanted != (here,):
                raise ConfigError(
                    f"{self.name} builds only for the device it runs on"
                    f" ({here or 'none was found'}), not for {', '.join(wanted)}"
                )
            return wanted
        known = {
            f"{name[2:-1]}.{name[-1]}": name for name in trt.ComputeCapability.__members__ if name[:2] == "SM"
        }
        for target in wanted:
            if target not in known:
                raise ConfigError(
                    f"{self.name} {trt.__version__} cannot build for compute capability {target!r},"
                    f" only for {', '.join(known)}"
                )
        return wanted


def fill_network(trt: Any, network: Any, model: Model, spec: BuildSpec) -> tuple[Graph, dict[str, str]]:
    """Fill ``network`` with the stage; raises ``ConfigError`` for a family that has no networks."""
    describe = networks_of(model, spec.stage)
    samples, note = read_samples(model, spec)
    graph = Graph(trt, network, decomposable=spec.decomposable)
    longest = max(profile.tokens.max for profile in spec.profiles)
    packed = spec.layout is Layout.PACKED
    request = NetworkRequest(
        stage=spec.stage.value,
        dtype=spec.dtype,
        packed=packed,
        max_length=min(longest, model.max_tokens) if packed else longest,
        samples=samples,
    )
    with torch.inference_mode():
        describe(model, graph, request)
    return graph, {"calibration": note} if note else {}


def _target(trt: Any, config: Any, capabilities: tuple[str, ...]) -> None:
    if not hasattr(trt, "ComputeCapability"):
        return
    config.num_compute_capabilities = len(capabilities)
    for number, target in enumerate(capabilities):
        config.set_compute_capability(
            trt.ComputeCapability.__members__[f"SM{target.replace('.', '')}"], number
        )


def optimization_profile(builder: Any, graph: Graph, profile: Profile) -> Any:
    """The shapes that a profile gives every input of the graph."""
    made = builder.create_optimization_profile()
    for name, shape in graph.inputs.items():
        sizes = [
            tuple(
                getattr(getattr(profile, size.name), which) + size.plus if isinstance(size, Axis) else size
                for size in shape
            )
            for which in ("min", "opt", "max")
        ]
        if any(size == 0 for size in sizes[0]):
            raise ConfigError(f"profiles: {name} would have a smallest shape of {list(sizes[0])}; begin at 1")
        made.set_shape(name, *sizes)
    return made


def _advice(spec: BuildSpec, reason: str) -> str:
    if "packed" in reason and spec.layout is Layout.PACKED:
        return "; build it with --layout padded"
    if "dedicated kernel" in reason and not spec.decomposable:
        return "; --decomposable builds it without a fused attention kernel, at a price in speed"
    return ""


TENSORRT: Flavour = TensorRTFlavour("tensorrt")
TENSORRT_RTX: Flavour = TensorRTFlavour("tensorrt_rtx")
