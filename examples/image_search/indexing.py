"""Indexing a folder: look at every file, embed what has no vector yet, a few requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from image_search.folder import File, digest, media_type, shown
from image_search.index import Index
from image_search.service import Served, Service, Vector, picture_part

_REQUEST_BYTES = 16 << 20
# A commit waits for the disk.
_COMMIT_FILES = 500


@dataclass(slots=True)
class Report:
    """What a run did; ``failures`` are (path, reason), ``cached_tokens`` those no encoder had to compute."""

    files: int = 0
    embedded: int = 0
    forgotten: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0
    failures: list[tuple[Path, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Wanted:
    digest: bytes
    file: File


async def index_files(
    folder: Path,
    files: Sequence[File],
    index: Index,
    service: Service,
    model: Served,
    *,
    concurrency: int,
    batch: int,
) -> Report:
    """Bring the index up to date with the ``files`` of ``folder``.

    What is embedded is kept even when a later request fails. At most ``concurrency`` requests of ``batch``
    pictures each are under way.
    """
    report = Report(files=len(files))
    wanted = await _look(files, index, model, report)
    with tqdm(total=len(wanted), desc="embedding", unit=" pictures", disable=not wanted) as bar:
        batches = _batches(wanted, batch)

        async def work() -> None:
            # The workers share the iterator: each takes the next batch when it is done with its last.
            for chosen in batches:
                await _embed(chosen, index, service, model, report)
                bar.update(len(chosen))
                bar.set_postfix_str(f"{report.cached_tokens:,} of {report.image_tokens:,} tokens cached")

        await _together([asyncio.ensure_future(work()) for _ in range(concurrency)])
    # Last, so that a file that was only moved keeps its vector.
    report.forgotten = index.forget_others(folder, files)
    return report


async def _look(files: Sequence[File], index: Index, model: Served, report: Report) -> list[_Wanted]:
    wanted: dict[bytes, _Wanted] = {}
    read: list[tuple[File, bytes]] = []
    for file in tqdm(files, desc="looking", unit=" files", leave=False):
        content = index.digest_of(file)
        if content is None:
            try:
                content = await asyncio.to_thread(digest, file.path)
            except OSError as error:
                report.failures.append((file.path, error.strerror or type(error).__name__))
                continue
            read.append((file, content))
            if len(read) == _COMMIT_FILES:
                index.add_files(read)
                read.clear()
        if content not in wanted and not index.has(content, model.key):
            wanted[content] = _Wanted(content, file)
    index.add_files(read)
    return list(wanted.values())


def _batches(wanted: Sequence[_Wanted], most: int) -> Iterator[list[_Wanted]]:
    """In order, bounded by number and by bytes; a picture that is larger alone goes alone."""
    chosen: list[_Wanted] = []
    size = 0
    for entry in wanted:
        if chosen and (len(chosen) == most or size + entry.file.size > _REQUEST_BYTES):
            yield chosen
            chosen, size = [], 0
        chosen.append(entry)
        size += entry.file.size
    if chosen:
        yield chosen


async def _embed(
    chosen: Sequence[_Wanted], index: Index, service: Service, model: Served, report: Report
) -> None:
    read: list[_Wanted] = []
    inputs = []
    for entry in chosen:
        path = entry.file.path
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            report.failures.append((path, error.strerror or type(error).__name__))
            continue
        read.append(entry)
        inputs.append([picture_part(data, media_type(path))])
    if not inputs:
        return
    answer = await service.embed(model, inputs)
    good: list[tuple[bytes, Vector]] = []
    for entry, row in zip(read, answer.rows, strict=True):
        if isinstance(row, str):
            report.failures.append((entry.file.path, row))
        else:
            good.append((entry.digest, row))
    index.add_vectors(model.key, good)
    report.embedded += len(good)
    report.image_tokens += answer.tokens
    report.cached_tokens += answer.cached_tokens


async def _together(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all; the first failure ends the others."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def describe(report: Report, model: Served) -> str:
    """A few lines for people."""
    lines = [
        f"{report.files} pictures, {report.embedded} of them new to {model.name}; "
        f"{report.image_tokens:,} tokens embedded, {report.cached_tokens:,} of them from the service's cache"
    ]
    if report.forgotten:
        lines.append(f"{report.forgotten} files that are gone were forgotten")
    lines += [f"not indexed: {shown(path)}: {reason}" for path, reason in report.failures[:20]]
    if len(report.failures) > 20:
        lines.append(f"not indexed: {len(report.failures) - 20} more")
    return "\n".join(lines)
