"""The Python model ``router`` of a Triton repository: decides for each batch whether the encoder runs at all.

Copied into repositories as it is, so it imports nothing but numpy and what Triton provides. Tensors between
the models it calls stay where they were computed. A request that is malformed, or makes a model fail, fails
alone.
"""

# Triton's server provides the import below, and its objects have no types.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Pads the rows of several requests to one batch, and calls vit, embed, lm and post."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        values = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        self._image_token = int(values["image_token_id"])
        self._rows_per_unit = int(values["rows_per_unit"])
        self._max_units = int(values["max_units"])
        self._max_rows = int(config["max_batch_size"])
        shape = (1, self._rows_per_unit, int(values["row_width"]))
        # Stands for the vision rows of a batch without images, and is never read.
        self._no_rows = np.zeros(shape, np.dtype(values["dtype"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        pending: list[tuple[int, _Rows]] = []
        for number, request in enumerate(requests):
            try:
                pending.append((number, self._read(request)))
            except ValueError as error:
                answers[number] = _failure(str(error))
        for group in self._groups(pending):
            self._answer(group, answers)
        return answers

    def _answer(self, group: list[tuple[int, _Rows]], answers: list[Any]) -> None:
        try:
            vectors, norms = self._run([rows for _, rows in group])
        except RuntimeError as error:
            if len(group) == 1:
                answers[group[0][0]] = _failure(str(error))
                return
            # Each once more on its own, so that only the one at fault fails.
            for one in group:
                self._answer([one], answers)
            return
        start = 0
        for number, rows in group:
            part = slice(start, start + len(rows.ids))
            start = part.stop
            answers[number] = pb_utils.InferenceResponse(
                [pb_utils.Tensor("vectors", vectors[part]), pb_utils.Tensor("norms", norms[part])]
            )

    def _read(self, request: Any) -> _Rows:
        """Raises ``ValueError`` for a request that no model should see."""
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        mask = pb_utils.get_input_tensor_by_name(request, "attention_mask")
        tiles = pb_utils.get_input_tensor_by_name(request, "tiles")
        rows = _Rows(
            ids,
            np.ones_like(ids) if mask is None else mask.as_numpy(),
            None if tiles is None else tiles.as_numpy(),
        )
        if rows.mask.shape != ids.shape or not (rows.mask[:, :1] == 1).all():
            raise ValueError("attention_mask must have the shape of input_ids and begin with 1 in every row")
        wanted = ((ids == self._image_token) & (rows.mask != 0)).sum(1)
        there = rows.units_each * self._rows_per_unit
        if not np.isin(wanted, (0, there)).all():
            raise ValueError(
                f"found {wanted.tolist()} image tokens, but {rows.units_each} tiles a row give {there}"
            )
        rows.with_images = np.flatnonzero(wanted)
        if rows.count_units() > self._max_units:
            raise ValueError(f"{rows.count_units()} tiles are more than the {self._max_units} of one call")
        return rows

    def _groups(self, pending: list[tuple[int, _Rows]]) -> list[list[tuple[int, _Rows]]]:
        """What fits into one call of each model."""
        groups: list[list[tuple[int, _Rows]]] = []
        count = units = 0
        for number, rows in pending:
            count, units = count + len(rows.ids), units + rows.count_units()
            if not groups or count > self._max_rows or units > self._max_units:
                groups.append([])
                count, units = len(rows.ids), rows.count_units()
            groups[-1].append((number, rows))
        return groups

    def _run(self, group: list[_Rows]) -> tuple[Any, Any]:
        shape = (sum(len(rows.ids) for rows in group), max(rows.ids.shape[1] for rows in group))
        ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        start = 0
        for rows in group:
            part = slice(start, start + len(rows.ids))
            start = part.stop
            ids[part, : rows.ids.shape[1]] = rows.ids
            mask[part, : rows.ids.shape[1]] = rows.mask
        is_image = (ids == self._image_token) & (mask != 0)
        # Units follow one another in the order of the rows, and so do the placeholders.
        vision_map = np.where(is_image, np.cumsum(is_image).reshape(shape) - 1, -1).astype(np.int32)
        tiles = [
            rows.tiles[rows.with_images] for rows in group if rows.tiles is not None and rows.count_units()
        ]
        if tiles:
            flat = np.concatenate([one.reshape(-1, *one.shape[2:]) for one in tiles])
            vision_rows = _call("vit", "vision_rows", pb_utils.Tensor("tiles", flat))
        else:
            vision_rows = pb_utils.Tensor("vision_rows", self._no_rows)
        attention_mask = pb_utils.Tensor("attention_mask", mask)
        embedded = _call(
            "embed",
            "embedded",
            pb_utils.Tensor("input_ids", ids),
            vision_rows,
            pb_utils.Tensor("vision_map", vision_map),
        )
        hidden = _call("lm", "hidden", embedded, attention_mask)
        response = _exec("post", ["vectors", "norms"], hidden, attention_mask)
        return tuple(
            pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in ("vectors", "norms")
        )


class _Rows:
    """One request's rows of one length; each brings ``units_each`` tiles, used only with placeholders."""

    def __init__(self, ids: Any, mask: Any, tiles: Any | None) -> None:
        self.ids = ids
        self.mask = mask
        self.tiles = tiles
        self.units_each = 0 if tiles is None else int(tiles.shape[1])
        self.with_images: Any = np.empty(0, np.int64)

    def count_units(self) -> int:
        return self.units_each * len(self.with_images)


def _call(model: str, output: str, *inputs: Any) -> Any:
    return pb_utils.get_output_tensor_by_name(_exec(model, [output], *inputs), output)


def _exec(model: str, outputs: list[str], *inputs: Any) -> Any:
    """Raises ``RuntimeError`` with what the model said."""
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=list(inputs))
    response = request.exec()
    if response.has_error():
        raise RuntimeError(f"{model}: {response.error().message()}")
    return response


def _failure(message: str) -> Any:
    return cast(Any, pb_utils.InferenceResponse([], pb_utils.TritonError(message)))
