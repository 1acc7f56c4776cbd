"""Reads what a checkpoint declares of its own vectors and scores beside its weights; torch-free.

The files are those of ``sentence-transformers``: ``modules.json`` with a folder for each module,
``sentence_bert_config.json``, ``config_sentence_transformers.json``; the tokenizer's longest input; of
``config.json`` whether the model is causal and what its scores are; and ``adapter_config.json`` of PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args

from tessera.checkpoint.adapter import ADAPTER_FILE, Adapter
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import Side
from tessera.checkpoint.transformer import (
    TRANSFORMER_FILES,
    longest_input,
    refuse_other_models,
    refuse_other_texts,
    transformer_section,
    truncation_side,
)
from tessera.checkpoint.weight_names import MODULE_WEIGHTS, first_of
from tessera.errors import CheckpointError
from tessera.small_files import read_json

MODULES_FILE: Final = "modules.json"
PROMPTS_FILE: Final = "config_sentence_transformers.json"
STANFORD_FILE: Final = "artifact.metadata"
STANFORD: Final = "HF_ColBERT"
"""The value of ``architectures`` of ColBERT's own checkpoints, beside whose weights that file is."""

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal[
    "identity",
    "tanh",
    "sigmoid",
    "relu",
    "gelu",
    "silu",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "softplus",
    "softsign",
    "mish",
    "relu6",
    "rrelu",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "logsigmoid",
    "tanhshrink",
    "softshrink",
    "hardshrink",
    "gelu_tanh",
    "quick_gelu",
    "relu_squared",
    "laplace",
    "sqrt_softplus",
]
"""A function of each number alone, by its name in ``torch.nn.functional``; the last five have none there."""
Task = Literal["embed", "score", "sparse", "tokens"]

# In the order in which several of them are concatenated.
_POOLING_KEYS: Final[Mapping[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Classes that are made without arguments and have no tensors.
TORCH_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
    "CELU": "celu",
    "SELU": "selu",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Mish": "mish",
    "ReLU6": "relu6",
    "RReLU": "rrelu",
    "Hardtanh": "hardtanh",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "LogSigmoid": "logsigmoid",
    "Tanhshrink": "tanhshrink",
    "Softshrink": "softshrink",
    "Hardshrink": "hardshrink",
}
TRANSFORMERS_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "MishActivation": "mish",
    "LinearActivation": "identity",
    "ReLUSquaredActivation": "relu_squared",
    "LaplaceActivation": "laplace",
    "SqrtSoftplusActivation": "sqrt_softplus",
}
_TASKS: Final[Mapping[str, Task]] = {
    "SentenceTransformer": "embed",
    "CrossEncoder": "score",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "tokens",
    "ColBERT": "tokens",
}
_SIMILARITIES: Final = ("cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim")
_PACKAGE: Final = "sentence_transformers."
_FOREIGN_DENSE: Final = "pylate.models.Dense.Dense"
_TOKENS: Final = "token_embeddings"
_VECTOR: Final = "sentence_embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How tokens become a row: the rows of ``modes`` side by side, in this order.

    Without ``include_prompt`` the prompt's tokens have no part in it. The width that the file has is not
    read: a row is as wide as a token. ``file`` is for complaints.
    """

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Splade:
    """How logits of tokens become weights: the largest or the sum, of one logarithm, or two (``log1p_relu``).

    The width that the file has is not read, as in ``Pooling``.
    """

    strategy: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A product with an activation behind it; ``residual`` adds its input, by a product where widths differ.

    ``folder`` holds its tensors ``linear.weight``, ``linear.bias`` and ``residual.weight``.
    """

    folder: Path
    inner: int
    width: int
    bias: bool = True
    activation: Activation = "tanh"
    residual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """A LayerNorm with the default eps; ``folder`` holds ``norm.weight`` and ``norm.bias``."""

    folder: Path
    width: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """A row divided by its length."""


Step = Dense | LayerNorm | Normalize
"""What is done to a row, one after another."""


@dataclass(frozen=True, slots=True)
class LogitScore:
    """A score of the logits at the last position: one token's, less another's unless that is None."""

    true_token: int
    false_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What the files of a checkpoint declare; None and empty where they are silent.

    ``directory`` is that with ``modules.json``, and ``folder`` the one of the transformer below it, which has
    ``config.json``, the tokenizer and the weights; empty where ``directory`` itself has them.
    ``modules`` are the types in ``modules.json`` by their last component, empty without that file.
    ``steps`` follow pooling, or change each token's row where ``of_tokens`` is true. ``max_tokens`` is the
    longest input: an explicit ``max_seq_length``, or with ``limit_of_tokenizer`` only the tokenizer's bound.
    ``query_tokens`` and ``document_tokens`` are those of a role, which win over it. ``truncation_side`` is
    among the arguments of the tokenizer; what the tokenizer's own files say of it is the tokenizer's.
    ``task_key`` is the file and the key that declare the task. ``prompts`` are those of the file, by name,
    and no others. ``activation`` is of scores, by the precedence of a cross-encoder, and ``labels`` how many
    a head has. ``mask`` is the file of a ``MultiVectorMask``. ``adapter`` is PEFT's. ``files`` are all that
    were read, and those that hold modules' weights, by their place from ``transformer``.
    """

    directory: Path
    folder: str = ""
    modules: tuple[str, ...] = ()
    pooling: Pooling | None = None
    splade: Splade | None = None
    steps: tuple[Step, ...] = ()
    of_tokens: bool = False
    max_tokens: int | None = None
    limit_of_tokenizer: bool = False
    query_tokens: int | None = None
    document_tokens: int | None = None
    truncation_side: Side | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    task: Task | None = None
    task_key: str = ""
    causal: bool | None = None
    activation: Activation | None = None
    labels: int | None = None
    logit_score: LogitScore | None = None
    truncate_dim: int | None = None
    similarity: str | None = None
    mask: Path | None = None
    adapter: Adapter | None = None
    files: tuple[str, ...] = ()

    @property
    def transformer(self) -> Path:
        """The directory of the transformer."""
        return self.directory / self.folder

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The products among the steps."""
        return tuple(step for step in self.steps if isinstance(step, Dense))

    @property
    def normalize(self) -> bool | None:
        """Whether the vector has length 1 in the end; None without ``modules.json``."""
        if not self.modules:
            return None
        return any(isinstance(step, Normalize) for step in self.steps[-1:])

    @property
    def query_prompt(self) -> str | None:
        """The prompt of queries; None where there is none of that name."""
        return self.prompts.get("query")

    @property
    def document_prompt(self) -> str | None:
        """The prompt of documents, the first that is not empty of ``document``, ``passage``, ``corpus``.

        ``encode_document`` of the reference takes ``document`` even if it is empty, which loses the prompt of
        checkpoints that call it ``passage``. Empty where all are, None where there is none.
        """
        named = [self.prompts[name] for name in ("document", "passage", "corpus") if name in self.prompts]
        return next(filter(None, named), "" if named else None)


def read_declared(directory: Path) -> Declared:
    """Read the files of ``directory``, or of a checkpoint whose transformer it has; all of them are optional.

    Raises ``CheckpointError`` naming file and key for a value of another type, for a module that is not
    served or from another package, for a path outside the directory, and for an adapter that is not done.
    """
    directory = transformer_directory(directory)
    above = _above(directory)
    config = Section.read(directory / CONFIG_FILE, optional=True)
    general = Section.read(above / PROMPTS_FILE, optional=True)
    modules = _Modules(above)
    modules.read()
    stated = transformer_section(directory)
    # The reference reads neither this file nor prompts without modules.json. A task is one all the same.
    transformer = stated if modules.names else Section(path=stated.path, values={})
    modules.check_logits(transformer)
    refuse_other_texts(directory, transformer)
    refuse_other_models(transformer, config)
    max_tokens, of_tokenizer = longest_input(directory, transformer)
    beside = general if modules.names else Section(path=general.path, values={})
    prompts, default = _prompts(beside)
    labels = _labels(config)
    task, task_key = _task(config, general, stated, modules)
    return Declared(
        directory=above,
        folder=modules.folder,
        modules=tuple(modules.names),
        pooling=modules.pooling,
        splade=modules.splade,
        steps=tuple(modules.steps),
        of_tokens=modules.of_tokens,
        max_tokens=max_tokens,
        limit_of_tokenizer=of_tokenizer,
        query_tokens=_optional(transformer, "query_length"),
        document_tokens=_optional(transformer, "document_length"),
        truncation_side=truncation_side(transformer),
        lower_case=transformer.truth("do_lower_case", False),
        prompts=prompts,
        default_prompt=default,
        task=task,
        task_key=task_key,
        causal=config.flag("is_causal") if config.has("is_causal") else None,
        activation=_score_activation(config, beside),
        labels=labels,
        logit_score=modules.logit_score,
        truncate_dim=_optional(beside, "truncate_dim"),
        similarity=_similarity(beside),
        mask=modules.mask,
        adapter=Adapter.read(directory),
        files=_files(above, modules, general),
    )


def _similarity(general: Section) -> str | None:
    """Return the measure of two vectors by its name, which PyLate writes as ``MaxSim``."""
    if not general.has("similarity_fn_name"):
        return None
    name = general.string("similarity_fn_name")
    if name.lower() not in _SIMILARITIES:
        raise general.error("similarity_fn_name", f"must be one of {list(_SIMILARITIES)}, not {name!r}")
    return name.lower()


def transformer_directory(directory: Path) -> Path:
    """Return the folder below the directory that ``modules.json`` names for the transformer, else the latter.

    What is wrong with the file is said by ``read_declared``.
    """
    with suppress(CheckpointError):
        for name, folder, _ in _entries(directory)[:1]:
            if name in _TRANSFORMERS and "/" not in folder:
                return directory / folder
    return directory


def _above(directory: Path) -> Path:
    """Return the directory whose ``modules.json`` names this one for the transformer, else this one."""
    above = directory.parent
    return above if transformer_directory(above) == directory else directory


def module_files(directory: Path) -> list[tuple[str, ...]]:
    """Return the files below the directory that the modules in ``modules.json`` need, for a download.

    Of each entry the first that is there. Raises ``CheckpointError`` for a path outside the directory.
    """
    files: list[tuple[str, ...]] = []
    for name, folder, _ in _entries(directory):
        if folder and name in _MODULES and name not in _WITHOUT_FILE:
            files.append((f"{folder}/{CONFIG_FILE}",))
            if name in _WITH_WEIGHTS:
                files.append(tuple(f"{folder}/{weights}" for weights in MODULE_WEIGHTS))
    return files


class _Modules:
    """Reads ``modules.json`` and the file of each module."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / MODULES_FILE
        self.names: list[str] = []
        self.folder = ""
        self.folders: list[str] = []
        self.pooling: Pooling | None = None
        self.steps: list[Step] = []
        self.of_tokens = False
        self.mask: Path | None = None
        self.logit_score: LogitScore | None = None
        self.splade: Splade | None = None

    def read(self) -> None:
        for name, folder, entry in _entries(self._directory):
            if name not in _MODULES:
                raise entry.error("type", f"is {name}, a module that is not served")
            if (name in _TRANSFORMERS) == bool(self.names):
                raise entry.error("type", f"is {name}; the first module must be a Transformer, and no other")
            if name in _TRANSFORMERS:
                if "/" in folder:
                    raise entry.error("path", f"is {folder!r}, which is not just below the directory")
                self.folder = folder
            else:
                file = self._directory / folder / CONFIG_FILE
                self._module(name, Section.read(file, optional=name in _WITHOUT_FILE), entry)
                self.folders.append(folder)
            self.names.append(name)

    def _module(self, name: str, config: Section, entry: Section) -> None:
        folder = config.path.parent
        match name:
            case "Dropout":
                pass
            case "MultiVectorMask":
                self.of_tokens, self.mask = True, config.path
            case "Pooling":
                if self.pooling is not None or self.steps or self.splade is not None:
                    raise entry.error("type", "is Pooling behind another module than the Transformer")
                self.pooling = _pooling(config)
            case "Dense":
                self._step(_dense(config, folder), config, entry)
            case "LayerNorm":
                self._step(LayerNorm(folder=folder, width=config.integer("dimension")), config, entry)
            case "Normalize":
                self._step(Normalize(), config, entry)
            case "SpladePooling":
                if self.pooling is not None or self.steps or self.splade is not None:
                    raise entry.error("type", "is SpladePooling behind another module than the Transformer")
                self.splade = _splade(config)
            case "LogitScore":
                false = config.integer("false_token_id", at_least=0) if config.has("false_token_id") else None
                self.logit_score = LogitScore(config.integer("true_token_id", at_least=0), false)
            case _:
                raise AssertionError(name)

    def check_logits(self, transformer: Section) -> None:
        """Raise ``CheckpointError`` unless logits, and nothing else, go to ``SpladePooling``.

        ``transformer`` is the file of the first module.
        """
        if not self.names:
            return
        plain = "fill-mask" if self.names[0] == "MLMTransformer" else ""
        gives_logits = transformer.string("transformer_task", plain) == "fill-mask"
        if gives_logits and self.splade is None:
            raise CheckpointError(f"{self.path}: logits of a masked language model need SpladePooling")
        if self.splade is not None and not gives_logits:
            raise transformer.error("transformer_task", "must be fill-mask before SpladePooling")

    def _step(self, step: Step, config: Section, entry: Section) -> None:
        """Add a step; one of tokens is marked so, or stands where nothing has been pooled."""
        if self.splade is not None:
            raise entry.error("type", "is a module behind SpladePooling, which is not served")
        read = config.string("module_input_name", _VECTOR, among=(_VECTOR, _TOKENS))
        config.string("module_output_name", read, among=(read,))
        of_tokens = read == _TOKENS or self.pooling is None
        if of_tokens and self.pooling is not None:
            raise entry.error("type", "is a module of token vectors behind Pooling, which is not served")
        self.of_tokens = self.of_tokens or of_tokens
        self.steps.append(step)


_TRANSFORMERS: Final = ("Transformer", "MLMTransformer")
# Without parameters: their folders may be missing.
_WITHOUT_FILE: Final = (*_TRANSFORMERS, "Normalize", "Dropout")
_WITH_WEIGHTS: Final = ("Dense", "LayerNorm")
_WITH_FILE: Final = ("Pooling", "SpladePooling", "LogitScore", "MultiVectorMask")
_MODULES: Final = (*_WITHOUT_FILE, *_WITH_WEIGHTS, *_WITH_FILE)


def _entries(directory: Path) -> list[tuple[str, str, Section]]:
    """Return the type's last component, the folder ("" for the directory itself) and entry of each module.

    As in the reference their order is that of the list, whatever ``idx`` says, and of one ``name`` the last
    entry counts, in the place of the first.
    """
    path = directory / MODULES_FILE
    try:
        parsed = read_json(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(parsed, list) or not all(isinstance(entry, dict) for entry in parsed) or not parsed:
        raise CheckpointError(f"{path}: must hold a JSON list of modules")
    sections = [Section(path=path, prefix=f"[{place}].", values=entry) for place, entry in enumerate(parsed)]
    named = {entry.string("name", f"[{place}]"): entry for place, entry in enumerate(sections)}
    return [(_name(entry), _folder(directory, entry), entry) for entry in named.values()]


def _name(entry: Section) -> str:
    """Return the last component of a type of ``sentence_transformers``, whose modules have moved often."""
    dotted = entry.string("type")
    if not dotted.startswith(_PACKAGE) and dotted != _FOREIGN_DENSE:
        raise entry.error("type", f"is {dotted!r}, from another package than sentence_transformers")
    return dotted.rpartition(".")[2]


def _folder(directory: Path, entry: Section) -> str:
    written = entry.string("path", "")
    place = Path(written)
    if place.is_absolute() or ".." in place.parts or "\\" in written or "\0" in written:
        raise entry.error("path", f"must lie inside the directory, not be {written!r}")
    if not (directory / place).resolve().is_relative_to(directory.resolve()):
        raise entry.error("path", f"must lie inside the directory, which {written!r} leads out of")
    return "" if place == Path() else place.as_posix()


def _pooling(config: Section) -> Pooling:
    """Read a pooling of either form; without a mode it is the mean."""
    return Pooling(
        modes=_pooling_modes(config) or ("mean",),
        include_prompt=config.truth("include_prompt", True),
        file=config.path,
    )


def _splade(config: Section) -> Splade:
    """Read the pooling of logits."""
    return Splade(
        strategy=cast(Literal["max", "sum"], config.string("pooling_strategy", "max", among=("max", "sum"))),
        activation=cast(
            Literal["relu", "log1p_relu"],
            config.string("activation_function", "relu", among=("relu", "log1p_relu")),
        ),
    )


def _pooling_modes(config: Section) -> tuple[PoolingMode, ...]:
    if not config.has("pooling_mode"):
        return tuple(mode for key, mode in _POOLING_KEYS.items() if config.truth(key, False))
    written = config.values["pooling_mode"]
    names = written if isinstance(written, list) else [written]
    known = get_args(PoolingMode)
    if not all(name in known for name in names):
        raise config.error("pooling_mode", f"must be of {list(known)}, not {written!r}")
    return tuple(cast(Sequence[PoolingMode], names))


def _dense(config: Section, folder: Path) -> Dense:
    """Read a product, which has Tanh behind it where no activation is given."""
    return Dense(
        folder=folder,
        inner=config.integer("in_features"),
        width=config.integer("out_features"),
        bias=config.truth("bias", True),
        activation=_activation(config, "activation_function") or "tanh",
        residual=config.truth("use_residual", False),
    )


def _activation(config: Section, key: str) -> Activation | None:
    """Read the class of an activation, of torch or of transformers; None where the key is absent.

    The reference makes those of transformers with ``trust_remote_code`` alone, else Tanh of them.
    """
    if not config.has(key):
        return None
    dotted = config.string(key)
    package, _, name = dotted.rpartition(".")
    if f"{package}.".startswith("torch.nn.") and name in TORCH_ACTIVATIONS:
        return TORCH_ACTIVATIONS[name]
    if package == "transformers.activations" and name in TRANSFORMERS_ACTIVATIONS:
        return TRANSFORMERS_ACTIVATIONS[name]
    raise config.error(
        key,
        f"must be one of torch.nn's {list(TORCH_ACTIVATIONS)} or of transformers.activations'"
        f" {list(TRANSFORMERS_ACTIVATIONS)}, not {dotted!r}",
    )


def _score_activation(config: Section, general: Section) -> Activation | None:
    """Return the first of the three places that has an activation of scores."""
    places = [(general, "activation_fn"), (config, "sbert_ce_default_activation_function")]
    if config.has("sentence_transformers"):
        places.insert(1, (config.section("sentence_transformers"), "activation_fn"))
    return next((_activation(section, key) for section, key in places if section.has(key)), None)


def _labels(config: Section) -> int | None:
    if config.has("id2label"):
        return len(config.section("id2label").values)
    return config.integer("num_labels") if config.has("num_labels") else None


def _optional(section: Section, key: str) -> int | None:
    return section.integer(key) if section.has(key) else None


def _prompts(general: Section) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name and the default's name; one that is null is not there.

    The reference always has ``query`` and ``document``, so either may be the default without being there.
    """
    prompts: dict[str, str] = {}
    if general.has("prompts"):
        section = general.section("prompts")
        prompts = {name: section.string(name) for name in section.values if section.has(name)}
    default = general.string("default_prompt_name") if general.has("default_prompt_name") else None
    if default is not None and default not in {"query", "document", *prompts}:
        raise general.error("default_prompt_name", f"is {default!r}, none of the prompts {sorted(prompts)}")
    return prompts, default


def _task(
    config: Section, general: Section, transformer: Section, modules: _Modules
) -> tuple[Task | None, str]:
    """Return the task and where it stands: by ``model_type``, by the modules, or by the architecture."""
    if general.has("model_type"):
        task = _TASKS[general.string("model_type", among=tuple(_TASKS))]
        # Written beside modules that pool nothing, too.
        if task != "embed" or modules.pooling is not None:
            return task, f"{general.path}: model_type"
    if transformer.string("transformer_task", "") == "sequence-classification":
        return "score", f"{transformer.path}: transformer_task"
    for task, declares in (
        ("score", modules.logit_score is not None),
        ("sparse", modules.splade is not None),
        ("embed", modules.pooling is not None),
        ("tokens", modules.of_tokens),
    ):
        if declares:
            return task, f"{modules.path}: type"
    architectures = config.values.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if architecture.endswith("ForSequenceClassification"):
        return "score", f"{config.path}: architectures"
    return ("tokens", f"{config.path}: architectures") if architecture == STANFORD else (None, "")


def _files(directory: Path, modules: _Modules, general: Section) -> tuple[str, ...]:
    """Return the files that are there and declare something, from the transformer's folder, sorted."""
    names = [MODULES_FILE]
    if modules.names or general.has("model_type"):
        names.append(PROMPTS_FILE)
    for folder in filter(None, modules.folders):
        names.append(f"{folder}/{CONFIG_FILE}")
        weights = (f"{folder}/{name}" for name in MODULE_WEIGHTS)
        names += filter(None, [first_of(weights, lambda name: (directory / name).exists())])
    if modules.folder:
        names = [f"../{name}" for name in names]
    names += [*TRANSFORMER_FILES, ADAPTER_FILE, STANFORD_FILE]
    own = directory / modules.folder
    return tuple(sorted(name for name in set(names) if (own / name).exists()))
