"""Reads a LoRA adapter of PEFT, and says what of it changes which stored tensor; torch-free.

The files are ``adapter_config.json`` and ``adapter_model.safetensors`` or ``.bin``, beside the weights that
they change.
Loading adds the products up, in float32, and rounds once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.pickled import weight_file
from tessera.checkpoint.safetensors import LowRank, StoredTensor
from tessera.checkpoint.section import Section
from tessera.checkpoint.weight_names import ADAPTER_WEIGHTS, first_of
from tessera.dtypes import FLOATS
from tessera.errors import CheckpointError

ADAPTER_FILE: Final = "adapter_config.json"

_WRAPPER: Final = "base_model.model."
_PART: Final = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(\.weight)?"
)
# Wrappers around what is stored whole: of a layer with an adapter, and of a module that is saved.
_AROUND: Final = re.compile(r"\.(base_layer|modules_to_save)(?=\.)")

_DONE: Final = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("fan_in_fan_out", "target_modules", "exclude_modules", "modules_to_save", "bias", "lora_bias"),
        *("init_lora_weights", "base_model_name_or_path", "revision"),
    }
)
# Of training, of where weights lie, or said by the names in the weight file.
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout", "merge_weights"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "runtime_config", "ensure_weight_tying", "layers_to_transform"),
        *("layers_pattern", "unsloth_fixed"),
    }
)
# Others take something off the base weights before training.
_BEGINNINGS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
_ALL: Final = "all-linear"

Parts = dict[str, StoredTensor]
"""The tensors of one module's adapter by their names behind it."""


@dataclass(frozen=True)
class Adapter:
    """An adapter as its configuration describes it; one that is not done is refused when it is read."""

    config: Section

    @classmethod
    def read(cls, directory: Path) -> Adapter | None:
        """Read the adapter in a directory, None where there is none.

        Raises ``CheckpointError`` naming file and key for another kind of adapter or a part that is not done.
        """
        path = directory / ADAPTER_FILE
        if not path.exists():
            return None
        adapter = cls(Section.read(path))
        adapter._check()
        return adapter

    @property
    def weights(self) -> Path:
        """The file of the adapter's tensors, the first of the two formats where there is none."""
        directory = self.config.path.parent
        return directory / (adapter_weights(directory) or ADAPTER_WEIGHTS[0])

    def _check(self) -> None:
        config = self.config
        kind = config.string("peft_type")
        if kind != "LORA":
            raise config.error("peft_type", f"is {kind!r}; of adapters only 'LORA' is done")
        for key, value in config.values.items():
            if value and key not in _DONE and key not in _WITHOUT_EFFECT:
                raise config.error(key, f"is {value!r}, which is not done for adapters")
        beginning = config.values.get("init_lora_weights")
        if beginning not in _BEGINNINGS:
            raise config.error("init_lora_weights", f"is {beginning!r}, which changes the base's weights")
        config.string("bias", "none", among=("none", "all", "lora_only"))
        if config.flag("use_dora", False) and config.flag("fan_in_fan_out", False):
            raise config.error("use_dora", "is true beside fan_in_fan_out, which is not done")
        for key in ("target_modules", "exclude_modules"):
            self._names(key)
        self._scale("")

    def merge(
        self,
        found: dict[str, StoredTensor],
        shapes: Mapping[str, tuple[int, ...]],
        canonical: Callable[[str], str | None],
    ) -> None:
        """Put into ``found`` what the adapter replaces, and say of its tensors what is added to them.

        All names are canonical, which ``canonical`` makes of stored ones as for ``stored_tensors``. Raises
        ``CheckpointError`` for tensors that are missing, unknown, or of another shape.
        """
        modules: dict[str, Parts] = {}
        for tensor in self._tensors():
            own = tensor.name.removeprefix(_WRAPPER)
            if (part := _PART.fullmatch(own)) is not None:
                modules.setdefault(part["module"], {})[part["part"]] = tensor
                continue
            name = canonical(_AROUND.sub("", own))
            if name is None:
                continue
            if shapes.get(name) != tensor.shape:
                raise self._error(tensor, f"has no place in the model with its shape {list(tensor.shape)}")
            found[name] = tensor
        for module, parts in modules.items():
            self._add(module, parts, found, canonical)

    def _tensors(self) -> tuple[StoredTensor, ...]:
        if not self.weights.exists():
            raise CheckpointError(
                f"{self.config.path.parent}: has {ADAPTER_FILE} without {' or '.join(ADAPTER_WEIGHTS)};"
                " no other weight format is read"
            )
        tensors = weight_file(self.weights).tensors
        for tensor in tensors:
            if not tensor.name.startswith(_WRAPPER):
                raise self._error(tensor, f"is none of PEFT's, which begin with {_WRAPPER}")
            if tensor.dtype.name not in (*FLOATS, "float64"):
                raise self._error(tensor, f"must be of floats, found {tensor.dtype.safetensors}")
        return tensors

    def _add(
        self,
        module: str,
        parts: Parts,
        found: dict[str, StoredTensor],
        canonical: Callable[[str], str | None],
    ) -> None:
        """Say of the module's weight, and of its bias, what is added to it."""
        name = canonical(f"{module}.weight")
        if name is None:
            return
        some = next(iter(parts.values()))
        if not self._targets(module):
            raise self._error(some, f"changes {module!r}, none of the target_modules of {ADAPTER_FILE}")
        if name not in found:
            raise self._error(some, f"changes {module!r}, which the model does not have")
        embeds = "lora_embedding_A" in parts
        stem, end = ("lora_embedding_", "") if embeds else ("lora_", ".weight")
        a, b = (parts.get(f"{stem}{letter}{end}") for letter in "AB")
        if a is None or b is None:
            raise self._error(some, f"is without its fellow {stem}{'B' if b is None else 'A'}{end}")
        rank, scale = self._scale(module)
        turned = embeds or self.config.flag("fan_in_fan_out", False)
        expected = found[name].shape[::-1] if turned else found[name].shape
        if len(expected) != 2 or (*b.shape, *a.shape) != (expected[0], rank, rank, expected[1]):
            raise self._error(
                a,
                f"and {b.name!r} have the shapes {list(a.shape)} and {list(b.shape)};"
                f" of rank {rank} for a weight of {list(found[name].shape)} they do not fit",
            )
        magnitude = parts.get("lora_magnitude_vector")
        if (magnitude is not None) != self.config.flag("use_dora", False):
            raise self._error(some, "fits no use_dora: a magnitude is there without it, or missing with it")
        if magnitude is not None and (embeds or magnitude.shape != expected[:1]):
            raise self._error(magnitude, f"has shape {list(magnitude.shape)}, which is not done")
        found[name] = replace(
            found[name], added=LowRank(a=a, b=b, scale=scale, turned=turned, magnitude=magnitude)
        )
        if (bias := parts.get("lora_B.bias")) is not None:
            self._add_bias(module, bias, scale, found, canonical)

    def _add_bias(
        self,
        module: str,
        bias: StoredTensor,
        scale: float,
        found: dict[str, StoredTensor],
        canonical: Callable[[str], str | None],
    ) -> None:
        name = canonical(f"{module}.bias")
        if name is None or name not in found or found[name].shape != bias.shape:
            raise self._error(bias, f"is added to a bias of {module!r} which the model does not have")
        found[name] = replace(found[name], added=LowRank(b=bias, scale=scale))

    def _targets(self, module: str) -> bool:
        named = self._names("target_modules")
        return (named in (None, _ALL) or _names_it(named, module)) and not _names_it(
            self._names("exclude_modules"), module
        )

    def _names(self, key: str) -> str | list[str] | None:
        """Return names of modules, or a pattern of them."""
        value: Any = self.config.values.get(key)
        if isinstance(value, str) and value != _ALL:
            self._pattern(key, value)
        elif not (value is None or isinstance(value, str) or _all_strings(value)):
            raise self.config.error(key, f"must be a string or a list of strings, not {value!r}")
        names: str | list[str] | None = value
        return names

    def _pattern(self, key: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise self.config.error(key, f"has {pattern!r}, which is no pattern: {error}") from error

    def _scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's adapter, and what its product is multiplied by."""
        rank = self._of_module("rank_pattern", self._ranks, module, self.config.integer("r", 8))
        alpha = self._of_module("alpha_pattern", self._alphas, module, self.config.number("lora_alpha", 8))
        return int(rank), alpha / (math.sqrt(rank) if self.config.flag("use_rslora", False) else rank)

    @cached_property
    def _ranks(self) -> dict[str, float]:
        section = self._section("rank_pattern")
        return {pattern: section.integer(pattern) for pattern in section.values}

    @cached_property
    def _alphas(self) -> dict[str, float]:
        section = self._section("alpha_pattern")
        return {pattern: section.number(pattern) for pattern in section.values}

    def _section(self, key: str) -> Section:
        if self.config.has(key):
            return self.config.section(key)
        return Section(path=self.config.path, values={})

    def _of_module(self, key: str, patterns: Mapping[str, float], module: str, general: float) -> float:
        """Return the value of the first pattern that ends a module's name, as PEFT looks for it."""
        for pattern, value in patterns.items():
            if self._pattern(key, rf"(.*\.)?({pattern})$").match(module):
                return value
        return general

    def _error(self, tensor: StoredTensor, complaint: str) -> CheckpointError:
        return CheckpointError(f"{tensor.file}: tensor {tensor.name!r} {complaint}")


def adapter_weights(directory: Path) -> str | None:
    """Return the name of the file of an adapter's tensors, None where there is none."""
    return first_of(ADAPTER_WEIGHTS, lambda name: (directory / name).exists())


def _all_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _names_it(named: str | list[str] | None, module: str) -> bool:
    """Whether a pattern fits a module's whole name, or a name of a list its end."""
    if isinstance(named, str):
        return re.fullmatch(named, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in named or ())
