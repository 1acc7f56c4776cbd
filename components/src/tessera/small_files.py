"""Reads files that operators write, which are small: regular ones, of bounded size and depth.

The standard library alone, until there is YAML to read: the launcher runs before anything is installed.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Final

from tessera.file_kinds import kind_of

if TYPE_CHECKING:
    import yaml

MOST_JSON_BYTES: Final = 64 << 20
# A second for each MB.
MOST_YAML_BYTES: Final = 4 << 20
# 32,768 of 500 characters each.
MOST_KEYS_BYTES: Final = 16 << 20

_CHUNK_BYTES: Final = 1 << 20
# Each level takes calls of Python, and how many it has left differs between processes: compilers raise it.
_MOST_YAML_LEVELS: Final = 100


def read_regular(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Return the bytes of a regular file; raises ``OSError``, also for any other and for a larger one.

    A FIFO would be waited for without end, and a device read until memory ends.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        # Its size may be another one by now, or be said to be 0, as in /proc.
        data = b"" if status.st_size > most_bytes else file.read(status.st_size + _CHUNK_BYTES)
        if max(len(data), status.st_size) > most_bytes:
            raise OSError(errno.EFBIG, f"has more than the {most_bytes >> 20} MiB that are read", str(path))
    return data


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return what a JSON file holds; raises ``OSError``, and ``ValueError`` for what is no JSON."""
    data = read_regular(path, most_bytes)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if (kind := kind_of(data)) is not None:
            raise ValueError(f"it is {kind}") from error
        raise


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return what a YAML file holds; raises ``OSError``, and ``ValueError`` in one line for what is no YAML.

    So is a key that stands twice in a mapping, of which YAML's readers take the last.
    """
    import yaml

    data = read_regular(path, MOST_YAML_BYTES)
    try:
        return yaml.load(data, _loader())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except UnicodeDecodeError:
        raise
    except Exception as error:
        # A date of month 13, a number of 5,000 digits, an empty number: as Python has it.
        raise ValueError(f"a value cannot be read: {' '.join(str(error).split())}") from error


def why_unread(error: OSError | ValueError) -> str:
    """Return why ``read_yaml`` raised, as it follows the name of the file."""
    return str(error.strerror) if isinstance(error, OSError) else f"not valid YAML: {error}"


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's, for which a key that comes twice is an error, and a value below too many others."""

        _levels = 0

        def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
            """Read what stands below ``parent``, within the bound of levels."""
            if self._levels >= _MOST_YAML_LEVELS:
                raise yaml.YAMLError("it is nested too deeply")
            self._levels += 1
            try:
                node: yaml.Node | None = super().compose_node(parent, index)
            finally:
                self._levels -= 1
            return node

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            """Read a mapping as it is written; what ``<<`` adds to it later may be overridden."""
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line, again = key.start_mark.line + 1, (key.tag, key.value) in lines
                first = lines.setdefault((key.tag, key.value), line)
                if again:
                    places = (
                        f"twice on line {line}"
                        if first == line
                        else f"on line {first} and again on line {line}"
                    )
                    raise yaml.YAMLError(f"the key {key.value!r} stands {places}")
            return node

    return Loader
