"""Values of a table's columns as Python has them, each of them by itself where one of them is bad."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from tessera.local.content import ImageFile

_MAX_PAGE: Final = (1 << 31) - 1
"""What the tables of an output hold."""
# As a float, too, which is what a program had before it wrote texts.
_NUMBER: Final = re.compile(r"\s*(\d{1,20})(?:\.0*)?\s*")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that Python cannot have, and why."""

    reason: str


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a ``pyarrow.RecordBatch`` or table, with ``Unreadable`` in place of bad values."""
    names = batch.schema.names
    for values in zip(*(_values_of(batch.column(place)) for place in range(len(names))), strict=True):
        yield dict(zip(names, values, strict=True))


def _values_of(column: Any) -> list[Any]:
    zone = getattr(column.type, "tz", None) or "UTC"
    if zone != "UTC" and zone[0] not in "+-":
        import pyarrow

        # The same moments. Where another zone is, only files say that a confined process may not open.
        column = column.cast(pyarrow.timestamp(column.type.unit, "UTC"))
    try:
        values: list[Any] = column.to_pylist()
        return values
    except (ValueError, OverflowError):
        # Which one it is, nobody says.
        return [_value_of(scalar) for scalar in column]


def _value_of(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 from byte {error.start} on")
    except (ValueError, OverflowError) as error:
        return Unreadable(f"out of range: {error}")


def id_of(value: Any) -> str | None:
    """An id as a text, bytes as hexadecimal digits; None for none, and for one that cannot be read."""
    if _is_nothing(value) or isinstance(value, Unreadable):
        return None
    return value.hex() if isinstance(value, bytes) else str(value)


def _is_nothing(value: Any) -> bool:
    # As pandas writes the gaps of numbers.
    return value is None or (isinstance(value, float) and math.isnan(value))


def text_of(value: Any) -> Any:
    """Text that is stored as bytes, as older programs do, as text."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 from byte {error.start} on")


def images_of(value: Any) -> tuple[str | ImageFile, ...]:
    """The images of a row: files and names, alone, in a list, or in structs as ``datasets`` writes them.

    None of what is empty. Raises ``ValueError`` that says what is wrong, as a place of a list with nothing
    in it.
    """
    if not isinstance(value, list | tuple):
        found = _image_of(value)
        return () if found is None else (found,)
    images = []
    for place, each in enumerate(value):
        if (image := _image_of(each)) is None:
            raise ValueError(f"nothing at place {place} of {len(value)} images")
        images.append(image)
    return tuple(images)


def _image_of(value: Any) -> str | ImageFile | None:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if value is not None and not isinstance(value, str | bytes):
        raise ValueError("expected bytes, a path or a URL, or a list of them")
    if not value:
        return None
    return value if isinstance(value, str) else ImageFile(value)


def page_of(value: Any) -> int | None:
    """A page's number, also of a float or a text that is one; None for none.

    Raises ``ValueError`` that says what is wrong with it.
    """
    if isinstance(value, Unreadable):
        raise ValueError(value.reason)
    if _is_nothing(value) or value == "":
        return None
    number = _whole(value)
    if number is None:
        raise ValueError(f"expected a number, not {str(value)[:40]!r}")
    if not 0 <= number <= _MAX_PAGE:
        raise ValueError(f"{number} is no number of a page")
    return number


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        written = _NUMBER.fullmatch(value)
        return None if written is None else int(written[1])
    if isinstance(value, float | Decimal) and not (math.isfinite(value) and value == int(value)):
        return None
    return int(value) if isinstance(value, int | float | Decimal) else None
