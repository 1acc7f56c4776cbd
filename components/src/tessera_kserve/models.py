"""The KServe models that a served model is offered as.

``router`` takes rows of token ids as Triton repositories with a router, or with all stages fused, take them:
``input_ids`` and ``attention_mask`` ``[rows, tokens]``. What is attended travels packed; padding is not
computed. A row whose mask is all zeros is empty: nothing is computed for it, and its answer is zeros.
``pixel_values``, which the client scaled and normalised itself, hold a tile for each row, or as many tiles as
the row with the most has. As many are read as a row's placeholders stand for, from the first on; the others
are padding. A row without placeholders is text, and its tiles are not looked at.

``hidden`` takes the same and gives ``last_hidden_state`` ``[rows, tokens, hidden]``, before pooling: a model
of its own, so that a client that asks for all that ``router`` has does not move megabytes a row. ``vit``
takes ``pixel_values`` and gives ``image_features`` ``[rows, tiles * rows of a tile, width]``.

The other model takes texts and images, in BYTES, as NVIDIA's NIM does; it has the served model's own names.
Both give further outputs of a model that has some: ``outputs`` has their tensors.

The only model of vectors has the short names, or the only one of all that give no scores; each other's name
stands before these, as ``some_model_router``. Names are compared as NVIDIA's clients write them: without
case, and with ``_`` for all that is neither letter nor digit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pybase64

from tessera.errors import InvalidInput, ModelNotFound
from tessera.frontend.api.content import InputBuilder, check_modality
from tessera.frontend.api.values import clip
from tessera.frontend.request import (
    BARE_BASE64,
    EmbeddingsRequest,
    ImageSource,
    Input,
    Modality,
    PixelSource,
)
from tessera.frontend.serving.models import Models
from tessera.frontend.serving.pipeline import Result
from tessera.frontend.serving.served import ServedModel
from tessera.models.base import (
    STATES,
    TRUNCATIONS,
    VISION,
    Model,
    OutputKind,
    Role,
    StagedModel,
    Truncate,
    VisionSpec,
)
from tessera_kserve.call import Call
from tessera_kserve.outputs import Made, OutputTensors
from tessera_kserve.spec import FLOATS, Spec
from tessera_kserve.tensors import BYTES, Tensor, floats

VERSION: Final = "1"
"""Of every model: there is no other."""
_MOST_ROWS: Final = 256
"""Of one call: NVIDIA's clients make batches of this many, or of 30."""
_INTEGERS: Final = ("INT64", "INT32")
# Triton's 1 is the most urgent, and where two is the default our 0 stands for it.
_DEFAULT_PRIORITY: Final = 2
_INT64: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """``request`` is None where nothing has to be computed; ``rows`` are those of the call.

    ``nbytes`` are those of the outputs as float32, where padding makes them more than the result's rows.
    ``write`` makes the outputs of a result, each by its name.
    """

    request: EmbeddingsRequest | None
    rows: int
    write: Callable[[Result | None], Made]
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One model by one name.

    ``parameters`` are what a call may say beside what every model knows. ``read`` makes a call into work, and
    raises ``InvalidInput`` naming a tensor or a parameter.
    """

    name: str
    served: ServedModel
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    most_rows: int
    parameters: frozenset[str]
    read: Callable[[Call], Work]


def folded(name: str) -> str:
    """As NVIDIA's clients write a model's name."""
    return re.sub("[^a-z0-9]", "_", name.lower())


class Offers:
    """All models, by names; made anew when the served models change."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._of: tuple[ServedModel, ...] = ()
        self._listed: tuple[Offer, ...] = ()
        self._by_name: dict[str, Offer] = {}

    def __iter__(self) -> Iterator[Offer]:
        self._look()
        return iter(self._listed)

    def find(self, name: str, version: str = "") -> Offer:
        """The model that a client means; raises ``ModelNotFound``, and ``Unavailable`` for a waiting one."""
        self._look()
        if version not in ("", VERSION):
            raise ModelNotFound(
                f"{clip(name)!r} has the version {VERSION} alone, found {clip(version)!r}", param="model"
            )
        found = self._by_name.get(folded(name))
        if found is not None:
            return found
        for waiting in self._models.waiting:
            if folded(name).startswith(folded(waiting)):
                self._models.find(waiting)
        known = ", ".join(repr(offer.name) for offer in self._listed) or "none"
        raise ModelNotFound(
            f"the model {clip(name)!r} is not served here; {known} are (--served-model-name adds names)",
            param="model",
        )

    def _look(self) -> None:
        served = self._models.served
        if served == self._of:
            return
        self._of = served
        listed: list[Offer] = []
        by_name: dict[str, Offer] = {}
        alone = _with_short_names(served)
        for model in served:
            if model.model.output.kind is OutputKind.SCORE:
                continue
            own, names = folded(model.served.model), [folded(name) for name in model.served.names]
            texts = _texts(own, model)
            listed.append(texts)
            by_name |= dict.fromkeys(names, texts)
            for short, stage in _stages(model.model):
                staged = stage(short if model is alone else f"{own}_{short}", model)
                listed.append(staged)
                by_name |= {f"{name}_{short}": staged for name in names}
                if model is alone:
                    by_name |= dict.fromkeys((short, *_OTHER_NAMES.get(short, ())), staged)
        self._listed, self._by_name = tuple(listed), by_name


def _with_short_names(served: Sequence[ServedModel]) -> ServedModel | None:
    """Return the only model of vectors, or the only one that gives no scores; None where neither is alone."""
    able = [model for model in served if model.model.output.kind is not OutputKind.SCORE]
    dense = [model for model in able if model.model.output.kind is OutputKind.VECTOR]
    for models in (dense, able):
        if len(models) == 1:
            return models[0]
    return None


# Of a model without others beside it.
_OTHER_NAMES: Final = {"router": ("fused", "model_1")}
_SHARED: Final = frozenset(("dimensions", "normalize", "datatype"))
_DATATYPE: Final = frozenset(("datatype",))


def _stages(model: Model) -> Iterator[tuple[str, Callable[[str, ServedModel], Offer]]]:
    """Yield what takes tensors: the model, and its stages that can be asked for their own rows.

    Each comes by its short name, and is made with the name that clients have for it.
    """
    yield "router", _router
    if isinstance(model, StagedModel):
        yield "hidden", _hidden
        if _tiles(model) is not None:
            yield "vit", _vit


def _tiles(model: Model) -> VisionSpec | None:
    """Return what a model says of the tiles that it takes as pixels; None for one that takes none."""
    return model.vision if model.vision is not None and model.vision.independent_units else None


def _token_inputs(model: Model) -> tuple[Spec, ...]:
    ids = Spec(name="input_ids", datatypes=_INTEGERS, dims=(-1,))
    mask = Spec(name="attention_mask", datatypes=(*_INTEGERS, "BOOL"), dims=(-1,), optional=True)
    tiles = _tiles(model)
    return (ids, mask) if tiles is None else (ids, mask, _pixels(tiles, optional=True))


def _pixels(tiles: VisionSpec, *, optional: bool) -> Spec:
    return Spec(
        name="pixel_values",
        datatypes=("FP32", "FP16"),
        dims=tiles.unit_shape,
        optional=optional,
        several=True,
    )


def _router(name: str, served: ServedModel) -> Offer:
    """Offer a model's outputs of token ids."""
    tensors = OutputTensors("pooled", served.served)

    def read(call: Call) -> Work:
        rows, filled, inputs = _rows(served.model, call)
        request = EmbeddingsRequest(
            inputs=inputs,
            outputs=tensors.asked(call),
            dimensions=call.whole("dimensions"),
            normalize=call.flag("normalize", default=True),
            priority=priority_of(call),
        )

        def write(result: Result | None) -> Made:
            return tensors.write({} if result is None else result.outputs, request, rows, filled)

        return Work(request=request if inputs else None, rows=rows, write=write)

    return Offer(
        name=name,
        served=served,
        inputs=_token_inputs(served.model),
        outputs=tensors.specs,
        most_rows=min(_MOST_ROWS, served.served.limits.inputs),
        parameters=_SHARED,
        read=read,
    )


def _rows(model: Model, call: Call) -> tuple[int, list[int], tuple[Input, ...]]:
    """Return how many rows a call has, those that attend to something, and the inputs that these are."""
    rows = attended(call.inputs["input_ids"], call.inputs.get("attention_mask"))
    pixels = call.inputs.get("pixel_values")
    filled = [index for index, row in enumerate(rows) if len(row)]
    inputs = tuple(
        Input.of(
            parts=(rows[index], *_tiles_of(model, rows[index], pixels, index)),
            role=Role.NONE,
            param=f"input_ids[{index}]",
        )
        for index in filled
    )
    return len(rows), filled, inputs


def _tiles_of(
    model: Model, row: npt.NDArray[np.int64], pixels: Tensor | None, index: int
) -> tuple[PixelSource, ...]:
    """Return the tiles that a row's placeholders stand for; raises ``InvalidInput`` where there are fewer."""
    if pixels is None or model.vision is None:
        return ()
    found, each = len(model.vision_index(row.astype(np.int32, copy=False))), model.vision.rows(1)
    if not found:
        return ()
    values, param = pixels.values[index], f"pixel_values[{index}]"
    tiles = values if values.ndim > len(model.vision.unit_shape) else values[None]
    count, rest = divmod(found, each)
    if rest or count > len(tiles):
        raise InvalidInput.at(
            param,
            f"found {found} image tokens in the row, and its {len(tiles)} tile(s) take {each} each",
        )
    return (PixelSource(values=tiles[:count], param=param),)


def _hidden(name: str, served: ServedModel) -> Offer:
    """Offer the last hidden state of each token of token ids, 0 where none is attended."""
    model = served.model
    assert isinstance(model, StagedModel)
    width = model.state_width

    def read(call: Call) -> Work:
        rows, _, inputs = _rows(model, call)
        ids, mask = call.inputs["input_ids"], call.inputs.get("attention_mask")
        shape = (*ids.shape, width)

        def write(result: Result | None) -> Made:
            states = np.zeros(shape, np.float32)
            if result is not None:
                places = np.ones(ids.shape, bool) if mask is None else mask.values != 0
                # Rows that nothing attends have no place, so that the others follow one another.
                states[places] = result.rows.values
            return {"last_hidden_state": states}

        request = EmbeddingsRequest(inputs=inputs, outputs=(STATES,), priority=priority_of(call))
        nbytes = 4 * math.prod(shape)
        return Work(request=request if inputs else None, rows=rows, write=write, nbytes=nbytes)

    return Offer(
        name=name,
        served=served,
        inputs=_token_inputs(model),
        outputs=(Spec(name="last_hidden_state", datatypes=FLOATS, dims=(-1, width)),),
        most_rows=min(_MOST_ROWS, served.served.limits.inputs),
        parameters=_DATATYPE,
        read=read,
    )


def _vit(name: str, served: ServedModel) -> Offer:
    """Offer the vision rows of tiles that a client normalised."""
    model, limits = served.model, served.served.limits
    vision = _tiles(model)
    assert isinstance(model, StagedModel) and vision is not None
    image_token = model.image_token_id

    def read(call: Call) -> Work:
        pixels = call.inputs["pixel_values"]
        rows = pixels.shape[0]
        several = pixels.values.ndim > len(vision.unit_shape) + 1
        shape = (rows, vision.rows(pixels.shape[1] if several else 1), vision.row_width)
        placeholders = np.full(shape[1], image_token)
        inputs = tuple(
            Input.of(
                parts=(
                    placeholders,
                    PixelSource(
                        values=pixels.values[index] if several else pixels.values[index : index + 1],
                        param=f"pixel_values[{index}]",
                    ),
                ),
                role=Role.NONE,
                param=f"pixel_values[{index}]",
            )
            for index in range(rows)
        )

        def write(result: Result | None) -> Made:
            assert result is not None
            return {"image_features": result.rows.values.reshape(shape)}

        request = EmbeddingsRequest(inputs=inputs, outputs=(VISION,), priority=priority_of(call))
        return Work(request=request, rows=rows, write=write, nbytes=4 * math.prod(shape))

    return Offer(
        name=name,
        served=served,
        inputs=(_pixels(vision, optional=False),),
        outputs=(Spec(name="image_features", datatypes=FLOATS, dims=(-1, vision.row_width)),),
        most_rows=min(_MOST_ROWS, limits.inputs, limits.images),
        parameters=_DATATYPE,
        read=read,
    )


def attended(ids: Tensor, mask: Tensor | None) -> list[npt.NDArray[np.int64]]:
    """The ids of each row that its mask leaves.

    Raises ``InvalidInput``: positions count from a row's first token that is attended, so what is attended
    is one run.
    """
    values = ids.values
    if mask is None:
        return list(values)
    if mask.shape != ids.shape:
        raise InvalidInput.at(
            "attention_mask", f"expected the shape of input_ids, {list(ids.shape)}, found {list(mask.shape)}"
        )
    found: list[npt.NDArray[np.int64]] = []
    for index, (row, keep) in enumerate(zip(values, mask.values, strict=True)):
        there = np.flatnonzero(keep)
        count = len(there)
        if not count:
            found.append(row[:0])
            continue
        first, end = int(there[0]), int(there[-1]) + 1
        ones = keep[first:end]
        if int(ones.min()) != 1 or int(ones.max()) != 1:
            param = f"attention_mask[{index}]"
            if count == end - first:
                raise InvalidInput.at(param, "expected 0 or 1 in all places")
            raise InvalidInput.at(param, "expected ones in one run")
        found.append(row[first:end])
    return found


def _texts(name: str, served: ServedModel) -> Offer:
    """Offer a model's outputs of texts and images, each in BYTES."""
    tensors, limits = OutputTensors("embeddings", served.served), served.served.limits

    def read(call: Call) -> Work:
        columns = {name: list(tensor.values.ravel()) for name, tensor in call.inputs.items()}
        if not columns.keys() & {"text", "image"}:
            raise InvalidInput.at("text", "neither text nor image is given")
        counts = {name: len(found) for name, found in columns.items()}
        rows = max(counts.values())
        if len(set(counts.values())) > 1:
            name = min(counts, key=lambda each: counts[each])
            raise InvalidInput.at(name, f"expected {rows} rows, found {counts[name]}")
        if call.text("embedding_type") not in (None, "float"):
            raise InvalidInput.at("embedding_type", "vectors are float alone here")
        asked = call.text("input_type")
        roles = {None: None, "query": Role.QUERY, "passage": Role.PASSAGE, "document": Role.PASSAGE}
        if asked not in roles:
            raise InvalidInput.at("input_type", "expected query or passage")
        truncate = call.text("truncate") or Truncate.NONE
        if truncate not in TRUNCATIONS:
            raise InvalidInput.at("truncate", "expected NONE, START or END")
        builder = InputBuilder(role=roles[asked], limits=limits)
        inputs = tuple(_entry(builder, columns, index, by_default=asked is None) for index in range(rows))
        request = EmbeddingsRequest(
            inputs=inputs,
            outputs=tensors.asked(call),
            dimensions=call.whole("dimensions"),
            normalize=call.flag("normalize", default=True),
            truncate=TRUNCATIONS[truncate],
            priority=priority_of(call),
        )

        def write(result: Result | None) -> Made:
            assert result is not None
            made = tensors.write(result.outputs, request, rows, range(rows))
            return made | {"token_count": np.asarray(result.lengths, np.int32)}

        return Work(request=request, rows=rows, write=write)

    names = ("text", "modality") if served.model.vision is None else ("text", "image", "modality")
    return Offer(
        name=name,
        served=served,
        inputs=tuple(Spec(name=column, datatypes=(BYTES,), dims=(1,), optional=True) for column in names),
        outputs=(*tensors.specs, Spec(name="token_count", datatypes=("INT32",), dims=(1,), flat=True)),
        most_rows=min(_MOST_ROWS, limits.inputs, limits.images),
        parameters=_SHARED | {"input_type", "truncate", "embedding_type"},
        read=read,
    )


def _entry(builder: InputBuilder, columns: dict[str, list[bytes]], index: int, *, by_default: bool) -> Input:
    param = f"text[{index}]" if "text" in columns else f"image[{index}]"
    parts: list[str | ImageSource] = []
    if image := columns["image"][index] if "image" in columns else b"":
        parts.append(_image(image, f"image[{index}]"))
    if "text" in columns:
        text = _decoded(columns["text"][index], f"text[{index}]")
        parts += [text] if text else []
    # Where nothing is said NIM's endpoint takes a text for a query.
    stated = Role.QUERY if by_default and not any(isinstance(part, ImageSource) for part in parts) else None
    found = builder.build(parts, param, stated=stated)
    if "modality" not in columns:
        return found
    said = _decoded(columns["modality"][index], f"modality[{index}]")
    if said not in tuple(Modality):
        raise InvalidInput.at(f"modality[{index}]", f"expected one of {', '.join(Modality)}")
    return check_modality(found, Modality(said))


def _image(data: bytes, param: str) -> ImageSource:
    """A file as it is, or where one is: a data URL, or one that may be fetched."""
    head = data[:8].lower()
    if head.startswith((b"data:", b"http://", b"https://", b"file:")):
        return ImageSource(url=_decoded(data, param), param=param)
    return ImageSource(url=BARE_BASE64 + pybase64.b64encode_as_string(data), param=param)


def _decoded(data: bytes, param: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInput.at(param, "the bytes are no text in UTF-8") from None


def priority_of(call: Call) -> int:
    """Ours of Triton's: 0 where none is said or 0, the default; 1 is more urgent than that."""
    asked = call.whole("priority") or 0
    if not 0 <= asked <= _INT64:
        raise InvalidInput.at("priority", "expected 0 or more")
    return asked - _DEFAULT_PRIORITY if asked else 0


def check_inputs(offer: Offer, call: Call) -> int:
    """The rows of a call; raises ``InvalidInput`` naming the tensor that is not as the model says."""
    specs = {spec.name: spec for spec in offer.inputs}
    for name in call.inputs:
        if name not in specs:
            said = clip(name)
            raise InvalidInput.at(said, f"{offer.name} has no such input, only {', '.join(specs)}")
    rows = -1
    for spec in specs.values():
        tensor = call.inputs.get(spec.name)
        if tensor is None:
            if not spec.optional:
                raise InvalidInput.at(spec.name, "the input is missing")
            continue
        _check(spec, tensor)
        if rows >= 0 and tensor.shape[0] != rows:
            raise InvalidInput.at(spec.name, f"expected {rows} rows, found {tensor.shape[0]}")
        rows = tensor.shape[0]
        if not 0 < rows <= offer.most_rows:
            raise InvalidInput.at(spec.name, f"a call has 1 to {offer.most_rows} rows, found {rows}")
    return rows


def _check(spec: Spec, tensor: Tensor) -> None:
    if tensor.datatype not in spec.datatypes:
        raise InvalidInput.at(spec.name, f"expected {' or '.join(spec.datatypes)}, found {tensor.datatype}")
    found = tensor.shape
    if spec.several and len(found) == len(spec.shape) + 1:
        found = (found[0], *found[2:])
    fits = len(found) == len(spec.shape) and all(
        size in (-1, there) for size, there in zip(spec.shape, found, strict=True)
    )
    # A column of texts may come without its last dimension.
    if not fits and not (spec.datatype == BYTES and len(found) == 1):
        raise InvalidInput.at(spec.name, f"expected the shape {list(spec.shape)}, found {list(found)}")


def written(offer: Offer, call: Call, made: Made) -> tuple[Tensor, ...]:
    """The outputs that a call asks for, in its order."""
    whole = call.text("datatype")
    names: Sequence[tuple[str, str | None]] = [
        (wanted.name, _datatype(wanted.parameters.get("datatype"), wanted.name)) for wanted in call.outputs
    ] or [(spec.name, None) for spec in offer.outputs if not spec.optional]
    found: list[Tensor] = []
    for name, own in names:
        values = made[name]
        if values.dtype == np.float32:
            found.append(floats(name, values, own or _datatype(whole, "datatype") or "FP32"))  # type: ignore[arg-type]
        else:
            found.append(Tensor(name=name, datatype="INT32", shape=values.shape, values=values))
    return tuple(found)


def check_outputs(offer: Offer, call: Call) -> None:
    """Raises ``InvalidInput`` naming an output that is not there, or that cannot be as it is asked for."""
    known = [spec.name for spec in offer.outputs]
    seen: set[str] = set()
    for wanted in call.outputs:
        said = clip(wanted.name)
        if wanted.name not in known or wanted.name in seen:
            raise InvalidInput.at(said, f"{offer.name} has the outputs {', '.join(known)}, each once")
        seen.add(wanted.name)
        if wanted.parameters.get("classification", 0):
            raise InvalidInput.at(said, "there are no classes")
        _datatype(wanted.parameters.get("datatype"), said)
    _datatype(call.text("datatype"), "datatype")


def _datatype(asked: object, said: str) -> str | None:
    if asked is None:
        return None
    if asked not in FLOATS:
        raise InvalidInput.at(said, f"the datatype is one of {', '.join(FLOATS)}")
    return str(asked)
