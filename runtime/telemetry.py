"""What a node tells about itself: metrics, spans and log lines. Never prompt text, never keys."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from runtime.clock import Clock, SystemClock
from runtime.spans import OtlpSink, Span, SpanFile

PREFIX = "headrace_"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}\Z")
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

# Attribute names of OpenTelemetry's conventions for generative AI.
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"

M = TypeVar("M", bound=MetricWrapperBase)


def parse_traceparent(text: str | None) -> tuple[str, str] | None:
    """Return (trace id, span id) of a W3C traceparent, or nothing if it is not one."""
    match = _TRACEPARENT.match(text or "")
    if match is None or set(match[1]) == {"0"} or set(match[2]) == {"0"}:
        return None
    return match[1], match[2]


class Telemetry:
    """Metrics in a registry of its own, spans to OTLP or a file if configured, JSON log lines to stderr."""

    def __init__(
        self,
        node: str,
        *,
        clock: Clock | None = None,
        level: str = "info",
        otlp_endpoint: str | None = None,
        spans_file: str | None = None,
    ) -> None:
        self.node = node
        self.registry = CollectorRegistry()
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._metrics: dict[str, MetricWrapperBase] = {}
        endpoint = otlp_endpoint if otlp_endpoint is not None else os.environ.get("HEADRACE_OTLP_ENDPOINT", "")
        path = spans_file if spans_file is not None else os.environ.get("HEADRACE_SPANS_FILE", "")
        self._sinks: list[OtlpSink | SpanFile] = []
        if endpoint:
            self._sinks.append(OtlpSink(node, endpoint))
        if path:
            self._sinks.append(SpanFile(path))
        self.log = json_logger(level).bind(node=node)

    # --- metrics ---------------------------------------------------------------------------------------

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Counter:
        """Return the counter `headrace_<name>_total`, made at the first call."""
        return self._metric(Counter, name.removesuffix("_total"), doc, labels)

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Gauge:
        """Return the gauge `headrace_<name>`, made at the first call."""
        return self._metric(Gauge, name, doc, labels)

    def histogram(
        self, name: str, doc: str, labels: Sequence[str] = (), buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS
    ) -> Histogram:
        """Return the histogram `headrace_<name>`, made at the first call."""
        return self._metric(Histogram, name, doc, labels, buckets=buckets)

    def _metric(self, kind: type[M], name: str, doc: str, labels: Sequence[str], **options: Any) -> M:
        full = PREFIX + name.removeprefix(PREFIX)
        found = self._metrics.get(full)
        if found is None:
            found = self._metrics[full] = kind(full, doc, labels, registry=self.registry, **options)
        if not isinstance(found, kind):
            raise ValueError(f"metric {full} is a {type(found).__name__}, not a {kind.__name__}")
        return found

    def render(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    # --- spans -----------------------------------------------------------------------------------------

    @property
    def tracing(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self._sinks)

    def new_traceparent(self, parent: str | None = None) -> str:
        """Return a trace context for a new span: a child of `parent`, or the root of a new trace."""
        parsed = parse_traceparent(parent)
        trace_id = parsed[0] if parsed is not None else self._clock.random_hex(16)
        return f"00-{trace_id}-{self._clock.random_hex(8)}-01"

    def hop(self, name: str, traceparent: str, start_wall: float, end_wall: float, **attributes: Any) -> None:
        """Record a finished span under the span that `traceparent` names; times are Unix seconds."""
        if not self._sinks:
            return
        parsed = parse_traceparent(traceparent)
        if parsed is not None:
            span_id = self._clock.random_hex(8)
            self._record(Span(name, parsed[0], span_id, parsed[1], start_wall, end_wall, self.node, attributes))

    def request_span(
        self,
        name: str,
        traceparent: str,
        start_wall: float,
        end_wall: float,
        *,
        parent: str | None = None,
        **attributes: Any,
    ) -> None:
        """Record the span that `traceparent` itself names: the one whose children are a request's hops."""
        if not self._sinks:
            return
        parsed, above = parse_traceparent(traceparent), parse_traceparent(parent)
        if parsed is not None:
            parent_id = above[1] if above is not None else ""
            self._record(Span(name, parsed[0], parsed[1], parent_id, start_wall, end_wall, self.node, attributes))

    def _record(self, span: Span) -> None:
        for sink in self._sinks:
            sink.record(span)

    def close(self) -> None:
        """Send what spans are left."""
        for sink in self._sinks:
            sink.close()


def json_logger(level: str = "info") -> Any:
    """Return a logger that writes one JSON object per line to stderr.

    Raises:
        ValueError: if the level is unknown.
    """
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r}: use one of {', '.join(_LEVELS)}")
    return structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(sort_keys=False, default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
    )


class _JsonFormatter(logging.Formatter):
    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        line: dict[str, Any] = {
            "node": self._node,
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def route_standard_logging(node: str, level: str = "info") -> None:
    """Send the `logging` module's records of this process to stderr as JSON lines; for a process's entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(node))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    logging.getLogger("nats").setLevel(logging.WARNING)
