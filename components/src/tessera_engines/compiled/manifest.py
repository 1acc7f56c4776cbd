"""The manifest beside a built engine: what it is, and whether it fits; one that does not is never loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from tessera.errors import ConfigError, EngineMismatch
from tessera_engines.compiled.spec import Layout, Profile, Stage

if TYPE_CHECKING:
    from tessera.models.base import Model

MANIFEST_FILE = "manifest.json"
FORMAT = 2
_CHUNK = 8 << 20


class Binding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input or output tensor; -1 stands for an axis whose size the batch decides."""

    name: str
    output: bool
    dtype: str
    shape: tuple[int, ...]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nbytes: int
    blake3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One built engine.

    ``fingerprint`` is the checkpoint's, ``capabilities`` what it runs on (CUDA compute capabilities or cpu),
    ``versions`` the libraries that must be the same when it is loaded, ``width`` that of an output row,
    ``row_width`` that of a vision row, 0 without vision, ``files`` everything in the directory but the
    manifest.
    """

    format: int = FORMAT
    stage: Stage
    flavour: str
    layout: Layout
    dtype: str
    family: str
    fingerprint: str
    width: int
    row_width: int
    capabilities: tuple[str, ...]
    versions: dict[str, str]
    profiles: tuple[Profile, ...]
    bindings: tuple[Binding, ...]
    files: dict[str, FileEntry]
    decomposable: bool = False
    build_seconds: float
    built_at: str
    notes: dict[str, str] = {}

    @staticmethod
    def of_model(model: Model) -> dict[str, Any]:
        """The fields that say what an engine of a model is for, for a new manifest and for ``require``."""
        return {
            "family": model.family,
            "fingerprint": model.fingerprint,
            "width": model.output.width,
            "row_width": model.vision.row_width if model.vision else 0,
        }

    def write(self, directory: Path) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (directory / MANIFEST_FILE).write_bytes(encoded + b"\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest alone; raises ``ConfigError`` naming the file."""
        path = directory / MANIFEST_FILE
        try:
            content = path.read_bytes()
            version = msgspec.json.decode(content, type=dict).get("format")
            if version != FORMAT:
                raise EngineMismatch(
                    f"{path}: format is {version!r}, this program reads {FORMAT};"
                    " tessera engine build makes the engine anew"
                )
            return msgspec.json.decode(content, type=cls)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; an engine directory is made by tessera engine build"
            ) from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: {error}") from error

    def require(self, directory: Path, **expected: object) -> None:
        """Compare fields with what the loader has; raises ``EngineMismatch`` naming both sides of each.

        ``capability`` must be among ``capabilities``, and each of ``versions`` equal.
        """
        if self.flavour != expected.get("flavour", self.flavour):
            # Of another flavour the other fields differ as a matter of course.
            expected = {"flavour": expected["flavour"]}
        found = [text for key, value in expected.items() if (text := self._difference(key, value))]
        if found:
            raise EngineMismatch(
                f"{directory}: the engine does not match: {'; '.join(found)}."
                " tessera engine build makes one that does"
            )

    def _difference(self, key: str, value: object) -> str | None:
        if key == "capability":
            if value in self.capabilities:
                return None
            return f"it was built for {', '.join(self.capabilities)}, this machine has {value}"
        if key == "versions" and isinstance(value, Mapping):
            differ = [name for name in self.versions if self.versions[name] != value.get(name)]
            built = ", ".join(f"{name} {self.versions[name]}" for name in differ)
            here = ", ".join(f"{name} {value.get(name, 'not installed')}" for name in differ)
            return f"it was built with {built}, here is {here}" if differ else None
        if key == "fingerprint" and value != self.fingerprint:
            return (
                f"it was built from another checkpoint, whose fingerprint is {self.fingerprint}: that of"
                f" model_path is {value}"
            )
        own = getattr(self, key)
        return None if own == value else f"its {key} is {own}, wanted is {value}"

    def verify_files(self, directory: Path, *needed: str) -> None:
        """Compare sizes and hashes; raises ``EngineMismatch``, also where a ``needed`` file is not listed."""
        if unlisted := [name for name in needed if name not in self.files]:
            raise EngineMismatch(f"{directory / MANIFEST_FILE}: it does not list {unlisted[0]}")
        for name, entry in self.files.items():
            path = directory / name
            try:
                found = file_entry(path)
            except OSError as error:
                raise EngineMismatch(f"{path}: {error.strerror}, but the manifest lists it") from error
            if found != entry:
                raise EngineMismatch(
                    f"{path}: {found.nbytes} bytes with hash {found.blake3}, but the manifest says"
                    f" {entry.nbytes} bytes with hash {entry.blake3}"
                )


def file_entry(path: Path) -> FileEntry:
    digest = blake3()
    nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileEntry(nbytes=nbytes, blake3=str(digest.hexdigest(length=16)))


def file_entries(directory: Path) -> dict[str, FileEntry]:
    """Every file below ``directory`` but the manifest, by relative path."""
    return {
        str(path.relative_to(directory)): file_entry(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_FILE
    }
