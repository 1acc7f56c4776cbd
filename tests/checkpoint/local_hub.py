"""A hub on this host with the three routes that a download asks, of one model, as faulty as a test wants."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = "some-org/tessera.random-1"
COMMIT = "a1" * 20


@dataclass(slots=True)
class LocalHub:
    """Serves ``files`` (name → bytes) at ``commits`` (revision → commit); counts what it is asked and sends.

    ``answer`` may answer a path itself: with (status, headers) in place of what is there, or with None.
    ``token``: without it every answer is 401, as of a private model. ``sizes`` are what it says of files.
    ``stop_after`` is how many bytes of a file it sends before it hangs up, once, and ``pause`` stands between
    pieces of 64 KiB. ``resumed`` are the files of which it was asked for the rest, and where that began.
    ``stores``: large files are sent from another address, as by huggingface.co; ``told`` are the credentials
    that were sent there.
    """

    files: dict[str, bytes]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    stop_after: int | None = None
    pause: float = 0.0
    answer: Callable[[str], tuple[int, Mapping[str, str]] | None] = lambda path: None
    asked: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    resumed: list[tuple[str, int]] = field(default_factory=list)
    stores: bool = False
    told: list[str | None] = field(default_factory=list)
    url: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process that downloads from here, into a cache of its own."""
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING_FACE_", "HUGGINGFACE_", "TRANSFORMERS_"))
        }
        return own | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # Ten seconds each, which an answer from this process may take on a busy machine.
            "HF_HUB_ETAG_TIMEOUT": "120",
            "HF_HUB_DOWNLOAD_TIMEOUT": "120",
        }

    def forget(self) -> None:
        self.asked.clear()
        self.sent.clear()
        self.resumed.clear()

    def listing(self, folder: str) -> list[dict[str, object]]:
        """What a folder holds, "" being the top."""
        entries: list[dict[str, object]] = (
            [] if folder else [{"type": "directory", "path": "onnx", "oid": "00" * 20}]
        )
        for name, content in self.files.items():
            if name.rpartition("/")[0] != folder:
                continue
            entry: dict[str, object] = {
                "type": "file",
                "path": name,
                "size": self.sizes.get(name, len(content)),
                "oid": etag(name, content),
            }
            if name.endswith((".safetensors", ".bin")):
                entry["lfs"] = {"oid": etag(name, content), "size": entry["size"], "pointerSize": 134}
                entry["xetHash"] = "ab" * 32
            entries.append(entry)
        return entries


def etag(name: str, content: bytes) -> str:
    """A file's name in the cache, as the hub has it: sha256 for large files, git's own for others."""
    if name.endswith((".safetensors", ".bin")):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    """A checkpoint as a hub has it: with what no service needs, some of which could be run."""
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    return files | {
        "README.md": b"# A model",
        "modeling_some.py": b"raise SystemExit('this was run')",
        "pytorch_model.bin": b"\x80\x04.",
        "consolidated.safetensors": b"never fetched",
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        hub = self.server.hub
        hub.asked.append(f"{self.command} {self.path}")
        if found := re.fullmatch(r"/store/(\w+)/([^?]+)", self.path):
            hub.told.append(self.headers.get("authorization"))
            self._file(found[1], found[2])
        elif (own := hub.answer(self.path)) is not None:
            self._say(*own)
        elif hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            # It may repeat what it was sent.
            self._say(401, {"X-Error-Message": f"not with {self.headers.get('authorization')}"})
        elif found := re.fullmatch(rf"/api/models/{REPOSITORY}/revision/([^?]+)(\?.*)?", self.path):
            self._revision(found[1])
        elif found := re.fullmatch(rf"/api/models/{REPOSITORY}/tree/(\w+)(?:/([^?]+))?(\?.*)?", self.path):
            if entries := hub.listing(found[2] or ""):
                self._json(entries)
            else:
                self._say(404, {"X-Error-Code": "EntryNotFound"})
        elif found := re.fullmatch(rf"/{REPOSITORY}/resolve/(\w+)/([^?]+)", self.path):
            if hub.stores and found[2].endswith(".safetensors"):
                self._elsewhere(found[1], found[2])
            else:
                self._file(found[1], found[2])
        else:
            self._say(404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _revision(self, revision: str) -> None:
        commit = self.server.hub.commits.get(revision)
        if commit is None:
            self._say(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            self._json({"id": REPOSITORY, "sha": commit, "siblings": []})

    def _file(self, commit: str, name: str) -> None:
        hub = self.server.hub
        content = hub.files[name]
        start = 0
        if ranged := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "")):
            start = int(ranged[1])
            hub.resumed.append((name, start))
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag(name, content)}"', "Accept-Ranges": "bytes"}
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        for place in range(start, len(content), 1 << 16):
            if hub.stop_after is not None and hub.sent.get(name, 0) >= hub.stop_after:
                hub.stop_after = None
                self.close_connection = True
                return
            piece = content[place : place + (1 << 16)]
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            hub.sent[name] = hub.sent.get(name, 0) + len(piece)
            time.sleep(hub.pause)

    def _elsewhere(self, commit: str, name: str) -> None:
        content = self.server.hub.files[name]
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{etag(name, content)}"',
            "X-Linked-Size": str(len(content)),
            "X-Xet-Hash": "ab" * 32,
            "Location": f"http://localhost:{self.server.server_address[1]}/store/{commit}/{name}",
        }
        self._say(302, headers)

    def _json(self, value: object) -> None:
        self._say(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _say(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: LocalHub

    def handle_error(self, *_: object) -> None:
        """Clients that hang up, or are killed, are what tests are about."""


@contextmanager
def local_hub(files: Mapping[str, bytes]) -> Iterator[LocalHub]:
    hub = LocalHub(dict(files))
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.hub = hub
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
