"""Shows traces as text, and writes the ones of docs/traces.md from a real run.

    .venv/bin/python -m tests.tracing.waterfall

Starts ``launch/e_p.sh`` with its default model and a collector, asks for the same image and text twice, and
puts the two traces into the page between its marks. The times are those of the machine it runs on.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.e2e.inputs import parts
from tests.e2e.service import ROOT, launch
from tests.tracing.asking import Asker
from tests.tracing.collector import Exported, collecting

PAGE = ROOT / "docs" / "traces.md"
CHECKPOINT = ROOT / "components" / "src" / "tessera" / "checkpoints" / "tessera-demo"
WIDTH = 32
SHOWN = (
    "tessera.cache",
    "tessera.units",
    "tessera.tokens",
    "tessera.transfer.route",
    "tessera.transfer.bytes",
    "tessera.batch.entries",
    "tessera.batch.tokens",
    "tessera.batch.units",
    "tessera.batch.rows",
)


def waterfall(spans: Sequence[Exported]) -> str:
    """One trace, a line for each span: where it ran, when and for how long, its name, what it says."""
    began = min(span.started for span in spans)
    whole = max(span.ended for span in spans) - began
    lines = []
    for depth, span in _nested(spans):
        left = round((span.started - began) / whole * WIDTH)
        bar = max(1, round((span.ended - span.started) / whole * WIDTH))
        drawn = (" " * min(left, WIDTH - 1) + "█" * bar)[:WIDTH].ljust(WIDTH)
        said = [
            f"{name.rpartition('.')[2]}={span.attributes[name]}" for name in SHOWN if name in span.attributes
        ]
        said += [f"links={len(span.links)}"] if span.links else []
        name = "  " * depth + span.name
        service = span.service.removeprefix("tessera-")
        lines.append(f"{service:8} │{drawn}│{span.milliseconds:7.2f} ms  {name}  {' '.join(said)}".rstrip())
    return "\n".join(lines)


def linked(batch: Exported, spans: Sequence[Exported]) -> str:
    """A batch and the spans that it links to, with each one's share in it."""
    shares = {
        span.parent: span.attributes["tessera.batch.share"]
        for span in spans
        if (batch.trace, batch.span) in span.links
    }
    said = " ".join(
        f"{name.rpartition('.')[2]}={batch.attributes[name]}" for name in sorted(batch.attributes)
    )
    lines = [f"{batch.name}  {batch.milliseconds:.2f} ms  {said}"]
    for trace, span in batch.links:
        (answer,) = (one for one in spans if one.span == span)
        lines.append(f"  link to {answer.name}  trace={trace[:8]}… span={span[:8]}… share={shares[span]}")
    return "\n".join(lines)


def _nested(spans: Sequence[Exported]) -> Iterator[tuple[int, Exported]]:
    """Depth first, what began earlier first."""
    known = {span.span for span in spans}

    def below(parent: str | None, depth: int) -> Iterator[tuple[int, Exported]]:
        for span in sorted(spans, key=lambda span: span.started):
            if span.parent == parent or (parent is None and span.parent not in known):
                yield depth, span
                yield from below(span.span, depth + 1)

    yield from below(None, 0)


def main() -> None:
    image = (ROOT / "examples" / "images" / "scene-01.jpg").read_bytes()
    other = (ROOT / "examples" / "images" / "scene-02.jpg").read_bytes()
    with tempfile.TemporaryDirectory() as name, collecting() as collector:
        environment = collector.environment()
        log = Path(name) / "log"
        with (
            launch("e_p.sh", CHECKPOINT, log, workers=2, environment=environment) as service,
            httpx.Client(base_url=service.url, timeout=60) as http,
        ):
            asker = Asker(http, collector)
            # First calls also connect to one another, and an engine's first batch is slower.
            for _ in range(3):
                asker.traced(parts("a red heart", other))
            miss, hit = (asker.traced(parts("a red heart", image)) for _ in range(2))
            batch, _ = asker.together(4)
            shown = {
                "miss": waterfall(miss),
                "hit": waterfall(hit),
                "batch": linked(batch, collector.all()),
            }
    page = PAGE.read_text()
    for mark, text in shown.items():
        head, _, rest = page.partition(f"<!-- {mark} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        page = f"{head}<!-- {mark} -->\n```\n{text}\n```\n{end}{tail}"
    PAGE.write_text(re.sub(r"(recorded on\s)\d{4}-\d\d-\d\d", rf"\g<1>{datetime.now(UTC):%Y-%m-%d}", page))


if __name__ == "__main__":
    main()
