"""Which spans are kept."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes


class LinkedSampler(Sampler):
    """Keeps the trace of a batch when one of its requests is kept; everything else as ``others`` says.

    A batch has many parents and so none: a sampler that looks at parents or trace ids would decide on it
    without its requests, and leave their links pointing nowhere.
    """

    def __init__(self, others: Sampler) -> None:
        self._others = others

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if not links or get_current_span(parent_context).get_span_context().is_valid:
            return self._others.should_sample(
                parent_context, trace_id, name, kind, attributes, links, trace_state
            )
        kept = any(link.context.trace_flags.sampled for link in links)
        return SamplingResult(Decision.RECORD_AND_SAMPLE if kept else Decision.DROP, attributes)

    def get_description(self) -> str:
        return f"LinkedSampler({self._others.get_description()})"
