"""The seam of engine kinds: what a package provides for one, and where kinds are found.

``torch`` is the core's own. A package adds a kind by an entry point of the group ``tessera.engines``, whose
name is the word for ``engine`` in an engine config and whose value is an ``EngineKind``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.settings import EngineSettings
from tessera.models.base import Model
from tessera.siblings import ENGINES, load, siblings

if TYPE_CHECKING:
    from tessera.engine.placement import Placement


def quantization(settings: EngineSettings) -> str:
    """Return what an engine rounds in products; ``auto`` has been resolved, or nothing is in FP8."""
    if settings.quantization in ("auto", "none"):
        return ""
    if settings.quantization == "stored":
        return "fp8 as stored"
    return f"{settings.quantization}, {settings.unquantized_blocks} blocks kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Makes the engines of one kind, not yet warm; a stage without a function has none of this kind.

    ``rounding`` returns what an engine rounds beyond its dtype: empty if nothing, else one text for engines
    that round alike. Kinds are not told apart by it: they differ from one another by less than the dtype's
    own rounding. ``configs`` is a folder of engine configs, which workers find by their names in it.
    """

    make_vision: Callable[[Model, EngineSettings, Placement], VisionEngine] | None = None
    make_text: Callable[[Model, EngineSettings, Placement], TextEngine] | None = None
    rounding: Callable[[EngineSettings], str] = quantization
    configs: Path | None = None


def lazy(where: str) -> Callable[[Model, EngineSettings, Placement], Any]:
    """Return what makes the engine class at ``module:Class``, and imports the module no sooner."""

    def make(model: Model, settings: EngineSettings, placement: Placement) -> Any:
        module, _, name = where.partition(":")
        return getattr(import_module(module), name)(model, settings, placement)

    return make


_OWN: Final = {
    "torch": EngineKind(
        make_vision=lazy("tessera.engine.torch.vision:TorchVisionEngine"),
        make_text=lazy("tessera.engine.torch.text:TorchTextEngine"),
    )
}


def kind_of(name: str) -> EngineKind | None:
    """Return the kind of that name, or None."""
    return _OWN.get(name) or next(
        (cast(EngineKind, load(entry)) for entry in siblings(ENGINES) if entry.name == name), None
    )


def kinds() -> dict[str, EngineKind]:
    """Return every kind by its name, the core's own first."""
    return _OWN | {entry.name: cast(EngineKind, load(entry)) for entry in siblings(ENGINES)}


def engine_config(name: Path) -> Path | None:
    """Return the file that comes with a kind under this name, such as ``<family>/aoti.yaml``, or None."""
    folders = [kind.configs for kind in kinds().values() if kind.configs is not None]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
