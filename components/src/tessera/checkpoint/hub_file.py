"""Fetches one file of a hub's commit into the cache, from where another process left it."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Final

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers

import tessera
from tessera.checkpoint.progress import Progress

# Connections that broke, one after another without a byte between them.
_MOST_BREAKS: Final = 5
# It becomes the name of a file.
_ETAG: Final = re.compile(r"[A-Za-z0-9_][\w.-]{0,254}", re.ASCII)


class Malformed(Exception):
    """A hub's answer is not what a hub answers."""


class _Stopped(Exception):
    """Another file has failed."""


@dataclass(frozen=True, slots=True)
class OneFile:
    """Fetches single files of a commit into the cache."""

    repository: str
    commit: str
    progress: Progress
    stopped: Event

    def fetch(self, *files: RepoFile) -> None:
        """Fetch files of the same content, which lie in one place."""
        for file in files:
            self._fetch(file)

    def _fetch(self, file: RepoFile) -> None:
        url = hf_hub_url(self.repository, file.path, revision=self.commit)
        if not _by_xet(file):
            found = get_hf_file_metadata(url, headers=_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
            if found.etag is None or not _ETAG.fullmatch(found.etag) or found.commit_hash != self.commit:
                raise Malformed(f"does not say which file {file.path} is")
            if found.size != file.size:
                raise Malformed(f"lists {file.path} with {file.size} bytes and has {found.size}")
            blobs = folder_of(self.repository) / "blobs"
            blobs.mkdir(parents=True, exist_ok=True)
            if not (blobs / found.etag).exists():
                self._transfer(url, file, blobs / found.etag)
        # Finds the bytes where they are and gives them their name in the snapshot.
        hf_hub_download(
            self.repository,
            file.path,
            revision=self.commit,
            tqdm_class=self._counter(file, 0),
            library_name="tessera",
            library_version=tessera.__version__,
        )

    def _transfer(self, url: str, file: RepoFile, blob: Path) -> None:
        """Fetch what is missing of a file's bytes; the library would begin anew after another process."""
        partial = partial_of(blob)
        before = partial.stat().st_size if partial.exists() else 0
        if before > file.size:
            partial.unlink()
            before = 0
        breaks = 0
        while True:
            with partial.open("ab") as into:
                done = into.tell()
                try:
                    http_get(
                        url,
                        into,
                        resume_size=done,
                        headers=_headers(),
                        expected_size=file.size,
                        displayed_filename=file.path,
                        tqdm_class=self._counter(file, done),
                    )
                    break
                # The library itself tries again after errors of other kinds.
                except httpx2.ReadError:
                    breaks = 0 if into.tell() > done else breaks + 1
                    if breaks == _MOST_BREAKS or self.stopped.is_set():
                        raise
            time.sleep(1)
        if before and not _is_whole(partial, file):
            partial.unlink()
            raise Malformed(
                f"sent a {file.path} that is not the one it lists; what was here of it is removed"
            )
        partial.replace(blob)

    def _counter(self, file: RepoFile, done: int) -> type:
        """What the library takes for the class of its progress bars."""
        progress, stopped = self.progress, self.stopped

        class Counter:
            def __init__(self, *_: object, **__: object) -> None:
                self._done = done

            def __enter__(self) -> Counter:
                return self

            def __exit__(self, *_: object) -> None: ...

            def update(self, nbytes: float | None = 1) -> None:
                if stopped.is_set():
                    raise _Stopped
                self._done += int(nbytes or 0)
                if self._done > file.size:
                    raise Malformed(f"lists {file.path} with {file.size} bytes and sends more")
                progress.add(int(nbytes or 0))

            def update_transfer(self, nbytes: float | None = 1) -> None: ...

            def set_postfix_str(self, *_: object, **__: object) -> None: ...

            def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        return Counter


def _by_xet(file: RepoFile) -> bool:
    """Whether the library is to fetch a file by chunks, in parallel.

    A file of which that is interrupted begins anew, so it is for those who ask for it, and for files that a
    hub sends in no other way.
    """
    if file.xet_hash is None or constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
        return False
    return constants.HF_XET_HIGH_PERFORMANCE or file.size > constants.MAX_HTTP_DOWNLOAD_SIZE


def _is_whole(path: Path, file: RepoFile) -> bool:
    """Whether a file that several processes wrote is the one that the hub lists, where it says so."""
    if file.lfs is None:
        return True
    with path.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest() == file.lfs.sha256


def partial_of(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def folder_of(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def _headers() -> dict[str, str]:
    return build_hf_headers(library_name="tessera", library_version=tessera.__version__)
