"""Plans engines: what their workers load, and the cards that they run on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tessera import machine
from tessera.checkpoint.source import Source
from tessera.defaults import ENGINE_CONFIGS, MODEL
from tessera.errors import ConfigError
from tessera.local.messages import Load
from tessera.local.options import VectorOptions
from tessera.models import find, open_model
from tessera.models.base import OutputKind
from tessera.terminal import complain


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """How engine processes are started: what their workers load, and the cards.

    ``cards`` are entries for CUDA_VISIBLE_DEVICES, an empty one where the environment is to stay as it is.
    ``allow_private_media`` lets image URLs reach private addresses. ``log`` are flags of ``LogSettings``.
    """

    loads: Sequence[Load]
    options: VectorOptions
    allow_private_media: bool = False
    cards: Sequence[str] = ("",)
    log: Sequence[str] = ()


def loads_of(source: Source, flags: Sequence[str], *, engines_on_host: int, split: bool) -> list[Load]:
    """Return what the workers of one engine load; ``flags`` are the user's own, for each of them.

    ``split`` makes a worker for each stage, where the model has two. Raises ``CheckpointError``.
    """
    own = ["--model-path", str(source.directory), "--workers-on-host", str(engines_on_host)]
    given = any(word.partition("=")[0] == "--extra-engine-args" for word in flags)
    if not given and not os.environ.get("TESSERA_EXTRA_ENGINE_ARGS"):
        own += ["--extra-engine-args", str(ENGINE_CONFIGS)]
    modes = [["--disaggregation-mode", "agg"]]
    if split and open_model(source.directory, {}).vision is not None:
        modes = [["--disaggregation-mode", mode, "--workers-on-card", "2"] for mode in ("encode", "embed")]
    return [Load([*own, *mode, *flags], source.as_json()) for mode in modes]


def model_of_environment() -> str:
    """Return the model that engines have where none is named: by a variable, or the demonstration model."""
    if named := os.environ.get("TESSERA_MODEL_PATH"):
        return named
    if named := os.environ.get("MODEL_PATH"):
        complain("MODEL_PATH is called TESSERA_MODEL_PATH now: the old name works in this release only")
        return named
    return str(MODEL)


def plan_engines(
    name: str,
    revision: str,
    options: VectorOptions,
    *,
    flags: Sequence[str] = (),
    log: Sequence[str] = (),
    bar: bool = False,
    most: int | None = None,
    split: bool = False,
    scores: bool = False,
    allow_private_media: bool = False,
) -> EnginePlan:
    """Plan an engine for each card, ``most`` of them, of the model of that name; download it if need be.

    ``flags`` are those of workers, and ``log`` those of ``LogSettings``; ``split`` as in ``loads_of``, and
    ``allow_private_media`` as in ``EnginePlan``. Raises ``CheckpointError`` for what is no model, and
    ``ConfigError`` for one that gives scores and no vectors, unless ``scores`` are wanted.
    """
    source = find(name, revision, bar=bar)
    model = open_model(source.directory, {})
    if model.output.kind is OutputKind.SCORE and not scores:
        raise ConfigError(f"{name} ({model.family}) gives scores of pairs, and no vectors")
    cards = ([card.entry for card in machine.this_machine(os.environ).cards] or [""])[:most]
    return EnginePlan(
        loads=loads_of(source, flags, engines_on_host=len(cards), split=split),
        options=options,
        allow_private_media=allow_private_media,
        cards=cards,
        log=log,
    )
