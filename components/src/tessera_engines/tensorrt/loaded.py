"""A TensorRT engine from its directory, checked against its manifest, and its runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tessera.dtypes import DTYPES
from tessera.engine.placement import Placement, capability
from tessera.engine.settings import EngineSettings
from tessera.engine.streams import CudaStreams
from tessera.errors import ConfigError, EngineFailed, EngineMismatch
from tessera.models.base import Model
from tessera_engines.compiled.manifest import Binding, Manifest
from tessera_engines.compiled.spec import Stage
from tessera_engines.networks import networks_of
from tessera_engines.tensorrt.module import PLAN_FILE, load_tensorrt, logging_of, to_name

# Below that of the core, whose level the flag sets.
log = logging.getLogger("tessera.engine.tensorrt.loaded")

# What TensorRT expects of every address.
ALIGNMENT = 256

_Key = tuple[object, ...]


class Context:
    """Binds tensors to names and runs; ``complaint`` gives TensorRT's latest errors."""

    def __init__(
        self, context: Any, bindings: Mapping[str, Binding], *, complaint: Callable[[], str]
    ) -> None:
        self._context = context
        self._bindings = bindings
        self._complaint = complaint

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set shapes and addresses of all inputs and outputs; raises ``EngineFailed``.

        TensorRT returns False for a shape outside the profile, and does not check types.
        """
        if set(tensors) != set(self._bindings):
            raise EngineFailed(f"bound were {sorted(tensors)}, the engine has {sorted(self._bindings)}")
        for name, tensor in tensors.items():
            self._check(self._bindings[name], tensor)
            shape = tuple(tensor.shape)
            if not self._bindings[name].output and not self._context.set_input_shape(name, shape):
                raise EngineFailed(
                    f"TensorRT refused the shape {list(shape)} of {name}, which is outside the profile:"
                    f" {self._complaint()}"
                )
            if not self._context.set_tensor_address(name, tensor.data_ptr()):
                raise EngineFailed(f"TensorRT refused the address of {name}: {self._complaint()}")
        missing = self._context.infer_shapes()
        if missing:
            raise EngineFailed(f"the shapes leave {missing} undetermined")
        for name, binding in self._bindings.items():
            shape = tuple(self._context.get_tensor_shape(name))
            if binding.output and shape != tuple(tensors[name].shape):
                raise EngineFailed(
                    f"output {name} has the shape {list(shape)}, bound was {list(tensors[name].shape)}"
                )

    def run(self, stream: int) -> None:
        """Put the work on a CUDA stream."""
        if not self._context.execute_async_v3(stream):
            raise EngineFailed(f"TensorRT did not run: {self._complaint()}")

    def capturable(self, stream: int) -> bool:
        """Whether ``run`` can be recorded as a graph; True for releases that cannot tell."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))

    def _check(self, binding: Binding, tensor: torch.Tensor) -> None:
        expected = DTYPES[binding.dtype].torch
        fits = len(binding.shape) == tensor.ndim and all(
            said in (-1, size) for said, size in zip(binding.shape, tensor.shape, strict=True)
        )
        if tensor.dtype != expected or not fits or not tensor.is_contiguous():
            raise EngineFailed(
                f"{binding.name} is {binding.dtype} {list(binding.shape)}, contiguous; bound was"
                f" {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if tensor.data_ptr() % ALIGNMENT:
            raise EngineFailed(f"{binding.name} does not begin on {ALIGNMENT} bytes")


class LoadedEngine:
    """Makes contexts that share one block of device memory, so only one of them may run at a time."""

    def __init__(self, trt: Any, engine: Any, manifest: Manifest, directory: Path, device: str) -> None:
        self.manifest = manifest
        self.keep: object = None
        self._trt = trt
        self._engine = engine
        self._bindings = {binding.name: binding for binding in manifest.bindings}
        self._check_bindings(directory)
        needed = [
            int(engine.get_device_memory_size_for_profile_v2(number))
            for number in range(engine.num_optimization_profiles)
        ]
        self._memory = torch.empty(max(1, *needed), dtype=torch.uint8, device=device)
        self._settings = _RuntimeSettings(trt, engine, directory, device)

    def context(self, profile: int, stream: int) -> Context:
        """A new context of one profile; work that it needs first is put on ``stream``."""
        made = self._settings.create_context()
        if made is None:
            raise EngineFailed(f"TensorRT could not make a context: {logging_of(self._trt)[1]}")
        made.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        if not made.set_optimization_profile_async(profile, stream):
            raise EngineFailed(f"TensorRT refused profile {profile}: {logging_of(self._trt)[1]}")
        return Context(made, self._bindings, complaint=lambda: str(logging_of(self._trt)[1]))

    def save_compiled(self) -> None:
        """Save what the runtime compiled for this device, if the flavour has a runtime cache."""
        self._settings.save()

    def _check_bindings(self, directory: Path) -> None:
        """Compare the manifest's tensors with the engine's: TensorRT itself never notices a wrong type."""
        engine, output = self._engine, self._trt.TensorIOMode.OUTPUT
        found = set()
        for number in range(engine.num_io_tensors):
            name = engine.get_tensor_name(number)
            found.add(
                Binding(
                    name=name,
                    output=engine.get_tensor_mode(name) == output,
                    dtype=to_name(self._trt, engine.get_tensor_dtype(name)),
                    shape=tuple(engine.get_tensor_shape(name)),
                )
            )
        if found != set(self._bindings.values()):
            raise EngineMismatch(
                f"{directory}: the manifest lists {sorted(map(str, self._bindings.values()))},"
                f" the engine has {sorted(map(str, found))}"
            )
        if engine.num_optimization_profiles != len(self.manifest.profiles):
            raise EngineMismatch(
                f"{directory}: the manifest lists {len(self.manifest.profiles)} profiles,"
                f" the engine has {engine.num_optimization_profiles}"
            )


def open_engine(model: Model, settings: EngineSettings, placement: Placement, stage: Stage) -> LoadedEngine:
    """Load what ``settings.path`` holds.

    Raises ``ConfigError`` that says which GPU, package or setting is missing, and ``EngineMismatch`` naming
    both sides when the engine was built for something else.
    """
    directory, manifest = _manifest(model, settings, stage)
    trt = load_tensorrt(manifest.flavour)
    if not placement.is_cuda:
        raise ConfigError(
            f"{directory}: a {manifest.flavour} engine needs an NVIDIA GPU of compute capability"
            f" {' or '.join(manifest.capabilities)}, but device {settings.device!r} is {placement.device}"
            f" here (torch {torch.__version__}). Use a machine with such a GPU and a torch with CUDA, or"
            " engine: torch or aoti"
        )
    manifest.require(
        directory,
        capability=capability(placement.device),
        versions={manifest.flavour: str(trt.__version__)},
    )
    if settings.quantization not in ("auto", "none") and manifest.dtype != "float8":
        raise EngineMismatch(
            f"{directory}: the engine computes in {manifest.dtype}, but quantization in the engine config is"
            f" {settings.quantization}; that is decided by --dtype when the engine is built"
        )
    if rows_dtype(manifest) != placement.dtype:
        raise EngineMismatch(
            f"{directory}: the engine's vision rows are {rows_dtype(manifest)}, dtype in the engine config is"
            f" {settings.dtype}, here {placement.dtype}"
        )
    manifest.verify_files(directory, PLAN_FILE)
    logger, messages = logging_of(trt)
    messages.clear()
    with torch.cuda.device(placement.device):
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine((directory / PLAN_FILE).read_bytes())
        if engine is None:
            raise EngineFailed(
                f"{directory}: {manifest.flavour} {trt.__version__} cannot load it: {messages}"
            )
        loaded = LoadedEngine(trt, engine, manifest, directory, placement.device)
        # An engine must not outlive what deserialised it.
        loaded.keep = runtime
        return loaded


def _manifest(model: Model, settings: EngineSettings, stage: Stage) -> tuple[Path, Manifest]:
    """Check what can be checked without TensorRT and a GPU."""
    networks_of(model, stage)
    if settings.path is None:
        raise ConfigError(
            f"engine {settings.engine!r} needs path: the --out of tessera engine build --stage {stage}"
        )
    manifest = Manifest.read(settings.path)
    if manifest.flavour not in ("tensorrt", "tensorrt_rtx"):
        raise EngineMismatch(
            f"{settings.path}: the engine's flavour is {manifest.flavour}, engine {settings.engine!r} runs"
            " tensorrt and tensorrt_rtx"
        )
    manifest.require(settings.path, stage=stage, **Manifest.of_model(model))
    return settings.path, manifest


def rows_dtype(manifest: Manifest) -> str:
    """The type of vision rows: float8 engines take and give bfloat16."""
    return "bfloat16" if manifest.dtype == "float8" else manifest.dtype


class Replays:
    """A context for each profile, and one for each recorded graph, since a graph binds its context."""

    def __init__(self, loaded: LoadedEngine, streams: CudaStreams) -> None:
        self._loaded: LoadedEngine | None = loaded
        self._streams = streams
        self._plain: dict[int, Context] = {}
        self._graphs: dict[_Key, tuple[Context, Callable[[], None]]] = {}

    def run(self, profile: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put one run on the compute stream; the tensors are as large as its shapes."""
        recorded = self._graphs.get(_key(profile, tensors))
        if recorded is not None:
            recorded[1]()
            return
        context = self._plain.get(profile)
        if context is None:
            context = self._plain[profile] = self._context(profile)
        context.bind(tensors)
        context.run(self._streams.handle)

    def record(self, profile: int, tensors: Mapping[str, torch.Tensor]) -> None:
        context = self._context(profile)
        context.bind(tensors)
        if not context.capturable(self._streams.handle):
            log.info("profile %d cannot be recorded as a graph and is run as it comes", profile)
            return
        replay, _ = self._streams.record(lambda: context.run(self._streams.handle))
        self._graphs[_key(profile, tensors)] = (context, replay)

    @property
    def recorded(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        self._graphs.clear()
        self._plain.clear()
        self._loaded = None

    def _context(self, profile: int) -> Context:
        assert self._loaded is not None
        return self._loaded.context(profile, self._streams.handle)


def _key(profile: int, tensors: Mapping[str, torch.Tensor]) -> _Key:
    """The profile with each tensor's address and shape, which a graph has built in."""
    return (profile, *((name, tensors[name].data_ptr(), tensors[name].shape) for name in sorted(tensors)))


class _RuntimeSettings:
    """Makes contexts; TensorRT for RTX compiles kernels at first use, and its cache is kept in a file."""

    def __init__(self, trt: Any, engine: Any, directory: Path, device: str) -> None:
        self._engine = engine
        self._device = device
        self._user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._config = self._cache = None
        if not hasattr(trt, "IRuntimeCache"):
            return
        self._file = directory / f"runtime-{torch.cuda.get_device_name(device).replace(' ', '-')}.cache"
        self._config = engine.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(self._user_managed)
        # Compiled before the first batch, because a recorded graph would keep the slower kernels for good.
        strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        self._config.dynamic_shapes_kernel_specialization_strategy = strategy
        self._cache = self._config.create_runtime_cache()
        if self._file.exists() and not self._cache.deserialize(self._file.read_bytes()):
            log.info("%s: not for this GPU or driver, kernels are compiled anew", self._file)
        self._config.set_runtime_cache(self._cache)

    def create_context(self) -> Any:
        if self._config is None:
            return self._engine.create_execution_context(self._user_managed)
        return self._engine.create_execution_context(self._config)

    def save(self) -> None:
        if self._cache is None:
            return
        partial = self._file.with_suffix(".partial")
        try:
            with torch.cuda.device(self._device):
                partial.write_bytes(self._cache.serialize())
            partial.replace(self._file)
        except OSError as error:
            log.info("%s: %s; kernels are compiled at every start", self._file, error.strerror)
