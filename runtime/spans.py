"""Where finished spans go: an OTLP collector, or a file of JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_FILE_NBYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span; times are Unix seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    node: str
    attributes: dict[str, Any] = field(default_factory=dict)


class SpanFile:
    """Appends spans to a file, one JSON object per line; at its cap it drops and counts."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)
        self.dropped = 0

    def record(self, span: Span) -> None:
        """Write one span."""
        if self._file.closed or self._file.tell() > MAX_FILE_NBYTES:
            self.dropped += 1
            return
        self._file.write(json.dumps(asdict(span), default=str) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class OtlpSink:
    """Sends spans to a collector over HTTP from the exporter's own thread; its queue is bounded and drops."""

    def __init__(self, node: str, endpoint: str) -> None:
        # The exporter's imports cost a quarter of a second; only those pay who trace.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        self._resource = Resource.create({"service.name": "headrace", "service.instance.id": node})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url), max_queue_size=8192)

    def record(self, span: Span) -> None:
        """Queue one span."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

        def context(span_id: str, remote: bool) -> SpanContext:
            return SpanContext(int(span.trace_id, 16), int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=context(span.span_id, False),
                parent=context(span.parent_id, True) if span.parent_id else None,
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind.INTERNAL,
                start_time=int(span.start * 1e9),
                end_time=int(span.end * 1e9),
            )
        )

    def close(self) -> None:
        """Send what is queued, within five seconds."""
        self._processor.force_flush(5000)
        self._processor.shutdown()  # type: ignore[no-untyped-call]
