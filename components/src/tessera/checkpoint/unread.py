"""What a folder has in the place of a checkpoint, in words for whoever named it.

Other formats, parts of a download, a checkpoint further down. The standard library alone, for the launcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from typing import Final

from tessera.checkpoint.weight_names import INDEX_FILE, SINGLE_FILE, WEIGHTS, first_of

# Whoever names the root of a disk need not wait for it.
_MOST_FOLDERS: Final = 200
_MOST_FILES: Final = 10_000

# Of sentence-transformers' modules behind the first, whose configurations are no checkpoints'.
_LATER_MODULE: Final = re.compile(r"(^|/)\d+_(?!Transformer)\w+/config\.json$")

_MADE: Final = "serve the model that it was made from"
# The first that a file matches says most.
_KINDS: Final = tuple(
    (re.compile(name, re.IGNORECASE), said)
    for name, said in (
        (r"\.(incomplete|part|crdownload|aria2|tmp)$", "is of a download that did not end; run it again"),
        (
            r"(^|/)model-\d+-of-\d+\.safetensors$",
            f"is a shard without {INDEX_FILE}; run the download again",
        ),
        (r"\.gguf$", f"is for llama.cpp (GGUF); {_MADE}"),
        (r"\.onnx$", f"is for ONNX; {_MADE}"),
        (r"(^|/)openvino_model", f"is for OpenVINO; {_MADE}"),
        (r"\.(h5|msgpack)$", "is for TensorFlow or Flax; save_pretrained of transformers writes safetensors"),
        (r"\.(safetensors|bin|pt|pth)$", f"has another name than {SINGLE_FILE}"),
    )
)


def files_below(directory: str | os.PathLike[str]) -> list[str]:
    """Return the files of a folder, and of those below it, by their paths; not all of very many."""
    found = (
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in islice(os.walk(directory), _MOST_FOLDERS)
        for name in names
    )
    return sorted(islice(found, _MOST_FILES))


def weights_instead(names: Iterable[str]) -> str:
    """Return what is said of files that are none of weights that are read; empty without an idea."""
    names = list(names)
    if first_of(WEIGHTS, names.__contains__) is not None:
        return ""
    for kind, said in _KINDS:
        for name in names:
            if kind.search(name):
                return f": {name} {said}"
    return ""


def checkpoint_instead(directory: str | os.PathLike[str]) -> str:
    """Return what is added to the complaint that a folder has no ``config.json``; empty without an idea."""
    names = files_below(directory)
    if (weights := first_of(WEIGHTS, names.__contains__)) is not None:
        return f": {weights} is there without it; run the download again"
    # The cache of a hub has its snapshots so, and a folder of several models.
    for name in sorted(names, key=lambda name: name.count("/")):
        if os.path.basename(name) == "config.json" and not _LATER_MODULE.search(name):
            return f": {os.path.dirname(name)} in it has one; name that"
    return weights_instead(names)


def no_directory(path: str) -> str:
    """Return why a path that is no directory names no model."""
    if os.path.isfile(path):
        return "is a file; name the directory that it is in"
    return "no such directory; a model of a hub is ORG/NAME"
