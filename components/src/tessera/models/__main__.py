"""``python -m tessera.models --model-path PATH``: say in one line what a checkpoint is."""

from __future__ import annotations

import sys

import msgspec

from tessera.errors import TesseraError
from tessera.models import open_model
from tessera.settings import ModelOptions, ModelPath, parse_flags


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    model_path: ModelPath
    model_options: ModelOptions = {}


def main() -> int:
    """Print the line; what cannot be opened is one line on standard error, and status 1."""
    try:
        settings = parse_flags(
            _Settings, prog="python -m tessera.models", description="Say what a checkpoint is."
        )
        model = open_model(settings.model_path, settings.model_options)
    except TesseraError as error:
        print(error.message, file=sys.stderr)
        return 1
    output = model.output
    print(
        f"family={model.family} output={output.kind.value} width={output.width}",
        f"images={'no' if model.vision is None else 'yes'}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
