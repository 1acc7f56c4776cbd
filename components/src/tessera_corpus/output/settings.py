"""The settings of an output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tessera.settings import MIB, NOT_NEGATIVE, POSITIVE, Setting

Format = Literal["parquet", "lance", "openai"]
ElementType = Literal["float32", "float16", "int8"]


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    out: Annotated[Path, Setting(flag="--out", metavar="DIR", help="the directory for the vectors")]
    format: Annotated[
        Format,
        Setting(
            flag="--format", help="Parquet files, a Lance table, or the lines of an OpenAI batch's output"
        ),
    ] = "parquet"
    dtype: Annotated[
        ElementType,
        Setting(
            flag="--dtype",
            help="the vectors' element type; int8 holds round(127 * x / max|x|) of each row",
        ),
    ] = "float32"
    replace: Annotated[
        bool,
        Setting(
            flag="--replace",
            help="if DIR has vectors of another model or other options, move them to DIR/replaced-N and "
            "begin anew",
        ),
    ] = False
    keep_gone: Annotated[
        bool,
        Setting(
            flag="--keep-gone",
            help="keep the rows of files, pages and lines that the sources do not have any more",
        ),
    ] = False
    part_rows: Annotated[
        int, Setting(flag="--part-rows", check=POSITIVE, help="items in a part; a full part is published")
    ] = 32_768
    part_bytes: Annotated[
        int, Setting(flag="--part-mb", unit=MIB, check=POSITIVE, help="MiB of vectors in a part")
    ] = 128 * MIB
    part_seconds: Annotated[
        float,
        Setting(
            flag="--part-seconds",
            check=POSITIVE,
            help="time from a part's first item until it is published; a killed run repeats at most this",
        ),
    ] = 300.0
    max_errors: Annotated[
        int | None,
        Setting(
            flag="--max-errors",
            check=NOT_NEGATIVE,
            help="end the run when more items than this have failed in it; never by default",
        ),
    ] = None
