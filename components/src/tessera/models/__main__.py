"""``python -m tessera.models --model-path MODEL``: find a model, download it if need be, and say what it is.

What is written to standard output is one JSON object, with ``error`` alone for what cannot be found,
downloaded or opened. Progress is lines of the log, or a bar on a terminal.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec

from tessera.errors import TesseraError
from tessera.flags import parse_flags
from tessera.logs import LogFormat, LogSettings, log_as, log_settings
from tessera.models import find, open_model, try_out
from tessera.models.base import parameters_of
from tessera.settings import ModelOptions, ModelPath, Revision, Setting


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    model_path: ModelPath
    revision: Revision = ""
    model_options: ModelOptions = {}
    log: Annotated[LogSettings, Setting(group="log")] = LogSettings()


def main() -> int:
    """The status is 1 after an error."""
    log_as("launch", early := log_settings())
    try:
        settings = parse_flags(
            _Settings, prog="python -m tessera.models", description="Find a model and say what it is."
        )
        bar = early.format is LogFormat.TEXT and sys.stderr.isatty()
        source = find(str(settings.model_path), settings.revision, bar=bar)
        model = open_model(source.directory, settings.model_options)
        try_out(model)
    except TesseraError as error:
        print(json.dumps({"error": error.message}))
        return 1
    said = {
        "source": json.loads(source.as_json()),
        "family": model.family,
        "output": model.output.kind.value,
        "width": model.output.width,
        "images": model.vision is not None,
        "parameters": parameters_of(model),
    }
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
