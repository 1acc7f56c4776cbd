"""Applies what a checkpoint declares to what its family assumes; torch-free.

What is declared wins, and what no family does is refused by file and key before weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tessera.checkpoint.declared import (
    MODULES_FILE,
    Declared,
    Dense,
    Normalize,
    PoolingMode,
    Task,
)
from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.transformer import TRANSFORMER_FILES
from tessera.errors import CheckpointError, InvalidInput
from tessera.models.base import Model, OutputKind, Role, ScoreActivation
from tessera.nn.spec import Pooling, TextSpec

_TASKS: Final[Mapping[OutputKind, Task]] = {
    OutputKind.VECTOR: "embed",
    OutputKind.SCORE: "score",
    OutputKind.TOKENS: "tokens",
    OutputKind.SPARSE: "sparse",
}
_POOLINGS: Final[Mapping[PoolingMode, Pooling]] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}


def declared_of(model: Model) -> Declared:
    """Return what the checkpoint of a model declares, nothing for a family from elsewhere that reads none."""
    return getattr(model, "declared", None) or Declared(directory=model.path)


def pooling_modes(model: Model) -> list[PoolingMode] | None:
    """Return the modes of pooling, None for what is not pooled to a vector."""
    if model.output.kind is not OutputKind.VECTOR:
        return None
    if (pooling := declared_of(model).pooling) is not None:
        return list(pooling.modes)
    return [mode for mode, own in _POOLINGS.items() if own == model.output.pooling] or None


def assumed(model: Model) -> list[str]:
    """Return what no file says and the family fills in, which may be wrong.

    These are ``pooling``, ``prompts``, or the key that a file lacks.
    """
    return list(getattr(model, "assumed", ()))


NAMED_ROLES: Final[Mapping[str, Role]] = {
    "query": Role.QUERY,
    "passage": Role.PASSAGE,
    "document": Role.PASSAGE,
}
"""The names of prompts that every model has."""


def named_prompt(declared: Declared, name: str) -> str | None:
    """Return the prompt of a name, None for the one of the role that has this name.

    Raises ``InvalidInput`` naming ``prompt_name`` for a name of neither.
    """
    if name in NAMED_ROLES:
        return None
    if (prompt := declared.prompts.get(name)) is not None:
        return prompt
    known = ", ".join(dict.fromkeys((*NAMED_ROLES, *declared.prompts)))
    raise InvalidInput(f"prompt_name: expected one of {known}, found {name[:100]!r}", param="prompt_name")


def check_task(declared: Declared, kind: OutputKind, *, family: str) -> None:
    """Raise ``CheckpointError`` for a checkpoint of another task than what the family gives."""
    if declared.task is None or declared.task == _TASKS[kind]:
        return
    raise CheckpointError(
        f"{declared.task_key} declares the task {declared.task!r}; family {family} does"
        f" {_TASKS[kind]!r} alone"
    )


def check_embeds(declared: Declared, task: str) -> None:
    """Raise ``CheckpointError`` for a language model of which neither its files nor ``task`` say "embed"."""
    if declared.pooling is None and task != "embed":
        raise CheckpointError(
            f"{declared.directory}: declares no way to make a vector: it has no modules.json with a Pooling,"
            " so it may be a chat model or a reranker. --task embed (as a model option: task) takes its last"
            " token"
        )


def declared_text(
    text: TextSpec,
    declared: Declared,
    *,
    family: str,
    kind: OutputKind,
    lower_case: bool = False,
    projects: bool = False,
    causal: bool = True,
) -> TextSpec:
    """Return the tower with the pooling, the steps and the width that are declared, causal or not.

    With ``lower_case`` the family's texts become lower case where that is declared, and with ``projects``
    steps are done for each token. With ``causal`` attention is as ``is_causal`` has it.
    Raises ``CheckpointError`` for what the family does not do, and for sizes that do not fit.
    """
    check_task(declared, kind, family=family)
    if declared.lower_case and not lower_case:
        file = declared.transformer / TRANSFORMER_FILES[0]
        raise CheckpointError(f"{file}: do_lower_case is true, which family {family} does not do")
    if causal and declared.causal is not None:
        text = replace(text, layer=replace(text.layer, causal=declared.causal))
    if declared.pooling is not None:
        text = _pooled(text, declared)
    # A vector is normalised in the end, or on request.
    steps = declared.steps[:-1] if declared.normalize else declared.steps
    if steps and kind is not OutputKind.VECTOR and not projects:
        raise CheckpointError(
            f"{declared.directory / MODULES_FILE}: type: family {family} does no modules behind the"
            " Transformer"
        )
    text = replace(text, steps=steps)
    _check_steps(text)
    cut = declared.truncate_dim
    return text if cut is None or cut >= text.width else replace(text, cut=cut)


def score_activation(declared: Declared) -> ScoreActivation:
    """Return the declared activation of scores, sigmoid where there is none; raises ``CheckpointError``."""
    activation = declared.activation or "sigmoid"
    if activation not in ("sigmoid", "identity"):
        raise CheckpointError(
            f"{declared.directory}: declares the activation {activation} of scores, which is not supported"
        )
    return activation


def longest(assumed: int, declared: Declared) -> tuple[int, dict[Role, int]]:
    """Return the longest input in tokens, and that of each role where roles have their own.

    A declared length counts if it is shorter than the assumed one. A tokenizer's own limit counts beside
    ``modules.json`` alone, whose authors keep theirs there. The length of a role may be longer than the
    general one.
    """
    general = assumed
    if declared.max_tokens is not None and (declared.modules or not declared.limit_of_tokenizer):
        general = min(assumed, declared.max_tokens)
    own = {Role.QUERY: declared.query_tokens, Role.PASSAGE: declared.document_tokens}
    if not any(own.values()):
        return general, {}
    roles = {role: min(assumed, own.get(role) or general) for role in Role}
    return max(roles.values()), roles


class RolePrompts(dict[Role, str]):
    """The prompt of each role; ``assumed`` are those roles whose prompt neither files nor options have."""

    assumed: frozenset[Role] = frozenset()


def role_prompts(
    declared: Declared,
    assumed: Mapping[Role, str],
    *,
    query: str = "",
    document: str = "",
    found: Mapping[Role, str] = {},
    leaves_out: bool = False,
) -> RolePrompts:
    """Return the prompt of each role: one that was found, else an option, the declared, the assumed.

    ``found`` is of the family's own files and options, of which ``query`` and ``document`` are passed over
    if they are empty. An input without a role gets the default prompt, as ``encode`` of the reference does.
    Raises ``CheckpointError`` for a pooling that leaves prompts out, unless the family's ``leaves_out`` them.
    """
    own = {Role.QUERY: declared.query_prompt, Role.PASSAGE: declared.document_prompt}
    said = {role: prompt for role, prompt in own.items() if prompt is not None}
    said |= {role: text for role, text in ((Role.QUERY, query), (Role.PASSAGE, document)) if text}
    said |= found
    prompts = RolePrompts({**assumed, **said})
    prompts.assumed = frozenset(role for role in own if assumed[role] and role not in said)
    if declared.default_prompt is not None:
        prompts[Role.NONE] = declared.prompts.get(declared.default_prompt, "")
    if not leaves_out and skipped_prompts(declared, prompts) and declared.pooling is not None:
        raise _refusal(declared.pooling.file, "include_prompt is false, and this family pools prompts, too")
    return prompts


def skipped_prompts(declared: Declared, prompts: Mapping[Role, str]) -> list[str]:
    """Return the prompts whose tokens pooling leaves out, none where it leaves out none."""
    if declared.pooling is None or declared.pooling.include_prompt:
        return []
    return [prompt for prompt in dict.fromkeys((*prompts.values(), *declared.prompts.values())) if prompt]


def _pooled(text: TextSpec, declared: Declared) -> TextSpec:
    pooling = declared.pooling
    assert pooling is not None
    first, *besides = (_POOLINGS[mode] for mode in pooling.modes)
    return replace(text, pooling=first, besides=tuple(besides))


def _check_steps(text: TextSpec) -> None:
    width = text.pooled_width
    for step in text.steps:
        if isinstance(step, Normalize):
            continue
        inner, key = (step.inner, "in_features") if isinstance(step, Dense) else (step.width, "dimension")
        if inner != width:
            raise _refusal(step.folder / CONFIG_FILE, f"{key} is {inner}, and the row has {width}")
        width = step.width


def _refusal(file: Path, complaint: str) -> CheckpointError:
    return CheckpointError(f"{file}: {complaint}", param=complaint.split()[0])
