"""Downloads models of a hub into the cache of ``huggingface_hub``, where every other program finds them.

The library authorises, transfers and links; what it takes from the environment (``HF_TOKEN``, ``HF_HOME``,
``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and the rest) means what it means everywhere. What it does not do is done
here: it uses a cached snapshot without a word when a hub refuses, begins a file anew that another
process left unfinished, and knows no bounds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Final

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    get_token,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import get_session, validate_repo_id

import tessera
from tessera.checkpoint.adapter import ADAPTER_FILE
from tessera.checkpoint.declared import MODULES_FILE, STANFORD_FILE, module_files, transformer_directory
from tessera.checkpoint.hub_file import Malformed, OneFile, folder_of, partial_of
from tessera.checkpoint.progress import Progress, size
from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.source import HubModel, Source, is_adapter, is_commit
from tessera.checkpoint.tokenizer import TOKENIZER_FILE
from tessera.checkpoint.unread import weights_instead
from tessera.checkpoint.vocabulary import VOCABULARY_FILES
from tessera.checkpoint.weight_names import ADAPTER_WEIGHTS, HEAD_FILES, WEIGHTS, first_of
from tessera.checkpoint.weights import named_weights, weights_lacking
from tessera.errors import CheckpointError

log = logging.getLogger(__name__)


# Far above what published models have: tokenizer.json of 262,144 tokens takes 33 MB.
_MOST_LISTED: Final = 10_000
_MOST_JSON_FILES: Final = 64
_MOST_JSON_BYTES: Final = 128_000_000
_MOST_SHARDS: Final = 1_000

_AT_A_TIME: Final = 8


def fetch(model: HubModel, recognise: Callable[[Path], object], *, bar: bool = False) -> Source:
    """The snapshot of a model in the cache, downloaded if it is not there; see ``source.find``.

    One process of a host downloads, the others wait. What a process that was killed had fetched stays, and
    the next one goes on from there.
    """
    _adopt_log()
    try:
        validate_repo_id(model.repository)
    except HFValidationError as error:
        raise CheckpointError(
            f"{model.repository}: no such directory, and no model of a hub: {error}"
        ) from error
    # Some of the library's requests have no limit.
    get_session().timeout = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    source = _Fetch(model, recognise, bar).source()
    if source.cached:
        log.warning("serving %s", source)
    else:
        log.info("serving %s", source)
    return source


def _adopt_log() -> None:
    """Let the library's lines be lines like all others."""
    library = logging.getLogger("huggingface_hub")
    library.handlers.clear()
    library.propagate = True


@dataclass(frozen=True, slots=True)
class _Fetch:
    model: HubModel
    recognise: Callable[[Path], object]
    bar: bool

    def source(self) -> Source:
        revision = self.model.revision
        if is_commit(revision) and (kept := self._kept(thoroughly=True)) is not None:
            return self._found(kept)
        if constants.is_offline_mode():
            why = "HF_HUB_OFFLINE is set"
            if (kept := self._kept()) is not None:
                return self._found(kept, why)
            raise CheckpointError(
                f"{self.model}: {why}, and {_cache()} has no whole copy of it; download it where there is a "
                "network, or name a directory"
            )
        try:
            commit = revision if is_commit(revision) else self._ask()
            folder = self._fetched(commit)
        except RevisionNotFoundError as error:
            raise CheckpointError(f"{self.model}: {_why(error)}; name another revision") from error
        except (HfHubHTTPError, httpx2.HTTPError, OSError, Malformed) as error:
            why = _why(error)
            if _of_this_host(error) or (kept := self._kept()) is None:
                raise CheckpointError(f"{self.model}: {why}; {self._advice(error)}") from error
            return self._found(kept, why)
        self._remember(commit)
        return self._found(folder)

    def _found(self, folder: Path, cached: str = "") -> Source:
        self._recognise(folder)
        return Source(
            directory=folder,
            repository=self.model.repository,
            revision=self.model.revision,
            commit=folder.name,
            cached=cached,
        )

    def _recognise(self, folder: Path) -> None:
        # Of an adapter it is the base that somebody serves.
        if is_adapter(folder):
            return
        try:
            self.recognise(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{self.model}: {error.message}") from error

    def _kept(self, *, thoroughly: bool = False) -> Path | None:
        """The snapshot of the revision that the cache has, if it is whole.

        Weights come last here, so whoever has them has all. Other programs may have fetched them alone:
        ``thoroughly`` looks for every JSON file that the cache has a list of.
        """
        repository, revision = self.model.repository, self.model.revision
        first = (CONFIG_FILE, ADAPTER_FILE, MODULES_FILE)
        cached = (try_to_load_from_cache(repository, name, revision=revision) for name in first)
        found = next((path for path in cached if isinstance(path, str)), None)
        if found is None:
            return None
        folder = Path(found).parent
        names: list[str] = []
        if thoroughly:
            with suppress(CachedRepoTreeNotFoundError):
                names += [file.path for file in get_cached_repo_tree(repository, revision=revision)]
        below = _below(folder)
        own = [name.removeprefix(below) for name in names if name.startswith(below)]
        try:
            weights = self._weights(folder / below, os.listdir(folder / below))
            needed = [*(below + name for name in (*weights, *_descriptions(own))), *_descriptions(names)]
            return folder if _has(folder, needed) else None
        except CheckpointError:
            return None

    def _ask(self) -> str:
        """The commit that the hub has for the revision."""
        with _reading():
            commit = (
                _api()
                .model_info(
                    self.model.repository, revision=self.model.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT
                )
                .sha
            )
        if commit is None or not is_commit(commit):
            raise Malformed("names no commit")
        return commit

    def _fetched(self, commit: str) -> Path:
        folder = folder_of(self.model.repository) / "snapshots" / commit
        files = self._listed(commit)
        described, below = self._described(files), ""
        if CONFIG_FILE not in files and MODULES_FILE in files:
            # Which may name a folder that has all of the transformer.
            with _locked(self.model.repository):
                self._download(commit, [files[MODULES_FILE]])
            if below := _below(folder):
                listed = self._listed(commit, below.rstrip("/"))
                files = {name.removeprefix(below): file for name, file in listed.items()}
                described += self._described(files)
        whole = first_of(WEIGHTS, files.__contains__)
        alone = ADAPTER_FILE in files and whole is None and not below
        if CONFIG_FILE not in files and not alone:
            raise CheckpointError(
                f"{self.model}: has no {below}{CONFIG_FILE}, so it is no checkpoint{weights_instead(files)}"
            )
        if not alone and whole is None:
            raise weights_lacking(self.model, files)
        if _has(folder, [file.path for file in described], modules=False) and _has(
            folder, [below + name for name in self._weights(folder / below, files)]
        ):
            return folder
        with _locked(self.model.repository):
            # Before gigabytes: whether anybody serves it.
            self._download(commit, [files[ADAPTER_FILE if alone else CONFIG_FILE]])
            self._recognise(folder)
            self._download(commit, described)
            # How weights are quantised may stand in a file of its own.
            self._recognise(folder)
            self._download(commit, self._of_modules(commit, folder))
            weights = self._weights(folder / below, files)
            own = [files[name] for name in weights if name not in ADAPTER_WEIGHTS]
            self._download(commit, own, said=True)
            # Whoever has it has all, and can tell it from one that lies alone.
            self._download(commit, [files[name] for name in weights], said=True)
        return folder

    def _described(self, files: Mapping[str, RepoFile]) -> list[RepoFile]:
        """Return the files of one folder that describe a checkpoint; too many, or too large, are refused."""
        described = [files[name] for name in _descriptions(files)]
        large = [file for file in described if file.size > _MOST_JSON_BYTES]
        if large or len(described) > _MOST_JSON_FILES:
            what = (
                f"{large[0].path} of {size(large[0].size)}"
                if large
                else f"{len(described)} JSON files and templates"
            )
            most = size(_MOST_JSON_BYTES) if large else _MOST_JSON_FILES
            raise CheckpointError(f"{self.model}: has {what}; {most} is the most that is downloaded")
        return described

    def _of_modules(self, commit: str, folder: Path) -> list[RepoFile]:
        """Return the files of the modules that ``modules.json`` names, which are in folders of their own."""
        needed = module_files(folder)
        if len(needed) > _MOST_JSON_FILES:
            raise CheckpointError(
                f"{self.model}: {MODULES_FILE} names {len(needed)} files, which are too many"
            )
        files: dict[str, RepoFile] = {}
        for below in sorted({any_of[0].rpartition("/")[0] for any_of in needed}):
            files |= self._listed(commit, below)
        names = []
        for any_of in needed:
            name = first_of(any_of, files.__contains__)
            if name is None:
                raise CheckpointError(
                    f"{self.model}: {MODULES_FILE} needs {any_of[0]}, which the hub does not have"
                )
            names.append(name)
            if files[name].size > _MOST_JSON_BYTES and _is_description(name):
                raise CheckpointError(
                    f"{self.model}: has {name} of {size(files[name].size)}, which is too much"
                )
        return [files[name] for name in names]

    def _listed(self, commit: str, below: str = "") -> dict[str, RepoFile]:
        """The files in one folder by name, at the top unless it is named; nothing is read from below."""
        with _reading():
            try:
                listed = _api().list_repo_tree(self.model.repository, below or None, revision=commit)
                entries = list(islice(listed, _MOST_LISTED + 1))
            except EntryNotFoundError:
                return {}
        if len(entries) > _MOST_LISTED:
            raise CheckpointError(f"{self.model}: has more than {_MOST_LISTED} files, so it is no checkpoint")
        files = {
            file.path: file
            for file in entries
            if isinstance(file, RepoFile) and file.path.rpartition("/")[0] == below
        }
        if not all(type(file.size) is int and file.size >= 0 for file in files.values()):
            raise Malformed("lists files without sizes")
        return files

    def _weights(self, folder: Path, files: Collection[str]) -> list[str]:
        """The names of the weight files that are read, of those that the hub lists; an adapter's is last."""
        adapts, whole = ADAPTER_FILE in files, first_of(WEIGHTS, files.__contains__)
        if whole is None and not adapts:
            raise weights_lacking(self.model, files)
        names = [] if whole is None else named_weights(folder, whole)
        names += [name for name in HEAD_FILES if name in files]
        if adapts:
            names.append(first_of(ADAPTER_WEIGHTS, files.__contains__) or ADAPTER_WEIGHTS[0])
        missing = [name for name in names if name not in files]
        if missing or len(names) > _MOST_SHARDS:
            what = f"names {missing[0]}, which the hub does not have" if missing else "names too many files"
            named = ADAPTER_FILE if missing == [ADAPTER_WEIGHTS[0]] else whole
            raise CheckpointError(f"{self.model}: {named} {what}")
        return names

    def _download(self, commit: str, files: Sequence[RepoFile], *, said: bool = False) -> None:
        """Fetch files that are not there yet, some at a time; the first that fails ends all."""
        folder = folder_of(self.model.repository)
        there = folder / "snapshots" / commit
        files = [file for file in files if not (there / file.path).exists()]
        if not files:
            return
        total = sum(file.size for file in files)
        have = sum(_have(folder, file) for file in files)
        self._look_for_room(total - have)
        what = f"downloading {self.model.repository}"
        if said:
            there_before = f", {size(have)} of it from before" if have else ""
            log.info("%s at commit %s: %s%s", what, commit, size(total), there_before)
        progress = Progress(log, what, total, done=have, bar=said and self.bar)
        began, stopped = time.monotonic(), Event()
        one = OneFile(self.model.repository, commit, progress, stopped)
        with ThreadPoolExecutor(min(_AT_A_TIME, len(files))) as threads:
            running = [threads.submit(one.fetch, *equal) for equal in _by_content(files)]
            try:
                for each in as_completed(running):
                    each.result()
            except BaseException:
                stopped.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                progress.close()
        if said:
            log.info("downloaded %s in %.0f s", size(total - have), time.monotonic() - began)

    def _look_for_room(self, nbytes: int) -> None:
        place = Path(constants.HF_HUB_CACHE)
        while not place.exists():
            place = place.parent
        if (free := shutil.disk_usage(place).free) < nbytes:
            raise CheckpointError(
                f"{self.model}: needs {size(nbytes)} in {_cache()}, where {size(free)} are free; make room, "
                "or set HF_HOME to another place"
            )

    def _remember(self, commit: str) -> None:
        """Note what the revision stands for, as the library does: only now, when all of it is there.

        A download that failed so leaves the snapshot before it in use for hosts that are offline.
        """
        revision = self.model.revision
        if revision == commit:
            return
        path = folder_of(self.model.repository) / "refs" / revision
        with suppress(OSError):  # a cache that is mounted to be read
            if path.exists() and path.read_text() == commit:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{os.getpid()}.new")
            new.write_text(commit)
            new.replace(path)

    def _advice(self, error: Exception) -> str:
        if isinstance(error, GatedRepoError):
            place = f"{constants.ENDPOINT}/{self.model.repository}"
            token = "" if get_token() else ", and set HF_TOKEN to a token of that account"
            return f"ask for access at {place} with the account that the token is of{token}"
        status = _status(error)
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
            token = "let HF_TOKEN be of an account that may read it" if get_token() else "set HF_TOKEN"
            return f"look for a mistake in the name; for a private model {token}; no directory has that name"
        if isinstance(error, Malformed) or status is not None:
            return "try again later, or look at HF_ENDPOINT"
        if _of_this_host(error):
            return "set HF_HOME to a place that can be written to and has room"
        return "try again with a network, look at HF_ENDPOINT, or name a directory"


def _has(folder: Path, names: Iterable[str], *, modules: bool = True) -> bool:
    """Whether a snapshot has these files, and those of its ``modules``; raises ``CheckpointError``."""
    needed = [*((name,) for name in names), *(module_files(folder) if modules else ())]
    return all(any((folder / name).exists() for name in any_of) for any_of in needed)


def _below(folder: Path) -> str:
    """Return the transformer's folder below a snapshot, with a slash behind it; empty where it has none."""
    inner = transformer_directory(folder)
    return "" if inner == folder else f"{inner.name}/"


def _descriptions(names: Collection[str]) -> list[str]:
    """Return the files that describe a checkpoint, with a vocabulary's only without ``tokenizer.json``."""
    made = () if TOKENIZER_FILE in names else VOCABULARY_FILES
    return [name for name in names if _is_description(name) or name in made]


def _is_description(name: str) -> bool:
    """Whether a file describes a checkpoint: JSON, or a chat template."""
    return (name.endswith((".json", ".jinja")) or name == STANFORD_FILE) and "/" not in name


def _content(file: RepoFile) -> str:
    """What a hub calls a file's content."""
    return file.lfs.sha256 if file.lfs is not None else file.blob_id


def _by_content(files: Iterable[RepoFile]) -> Collection[list[RepoFile]]:
    """Files by what they hold: those that are equal would be written to one place at a time."""
    found: dict[str, list[RepoFile]] = defaultdict(list)
    for file in files:
        found[_content(file)].append(file)
    return found.values()


def _have(folder: Path, file: RepoFile) -> int:
    """How many bytes of a file are there, as far as can be told before the hub is asked."""
    blob = folder / "blobs" / _content(file)
    for path in (blob, partial_of(blob)):
        with suppress(OSError):
            return min(path.stat().st_size, file.size)
    return 0


def _cache() -> str:
    return str(constants.HF_HUB_CACHE)


def _api() -> HfApi:
    return HfApi(library_name="tessera", library_version=tessera.__version__)


@contextmanager
def _locked(repository: str) -> Iterator[None]:
    """Wait until no other process of this host downloads the model. The system frees a killed one's lock."""
    folder = Path(constants.HF_HUB_CACHE) / ".locks" / folder_of(repository).name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tessera.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process downloads %s: waiting for it", repository)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _reading() -> Iterator[None]:
    """Tell an answer that cannot be read from other errors."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Malformed("answers with something else than a hub") from error


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    for each in _chain(error):
        if isinstance(each, HfHubHTTPError):
            return each.response.status_code
    return None


def _of_this_host(error: BaseException) -> bool:
    """Whether it is the cache that cannot be written to."""
    return any(
        isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
        for each in _chain(error)
    )


def _why(error: BaseException) -> str:
    """One line without what a server said, which may repeat what it was sent."""
    hub = f"the hub at {constants.ENDPOINT}"
    if isinstance(error, Malformed):
        return f"{hub} {error}"
    status = _status(error)
    for each in _chain(error):
        match each:
            case RevisionNotFoundError():
                return f"{hub} has no such revision"
            case GatedRepoError():
                return f"{hub} says that it is gated ({status})"
            case RepositoryNotFoundError():
                return f"{hub} has no such model, or not for everybody ({status})"
            case HfHubHTTPError():
                return f"{hub} refused ({status})"
    for each in _chain(error):
        match each:
            case httpx2.TimeoutException():
                return f"{hub} did not answer in time"
            case httpx2.HTTPError():
                return f"{hub} cannot be reached ({type(each).__name__})"
            case OSError() if each.errno is not None and each.filename is not None:
                return f"{each.filename}: {each.strerror}"
            case OSError() if each.errno is not None:
                return f"{_cache()}: {each.strerror}"
    return f"{hub} did not send what it lists"
