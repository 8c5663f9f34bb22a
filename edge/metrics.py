"""The edge's own metrics, and the merged page of all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from runtime.actor import Context
from runtime.telemetry import Telemetry
from schemas import subjects
from schemas.codec import encode
from schemas.messages import MetricsQuery, MetricsReport

COLLECT_S = 0.3
MAX_REPORTS = 1024
SUFFIXES = ("", "_total", "_created", "_bucket", "_sum", "_count")  # of samples within one family
TTFT_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip


class EdgeMetrics:
    """What the edge counts itself."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.requests = telemetry.counter(
            "http_requests_total", "HTTP requests by route and status", ("route", "status")
        )
        self.ttft = telemetry.histogram(
            "time_to_first_token_seconds", "Receipt of a request to its first token", buckets=TTFT_BUCKETS
        )
        self.itl = telemetry.histogram(
            "inter_token_latency_seconds", "Time between tokens of one choice, once per token", buckets=ITL_BUCKETS
        )
        self.streams_failed = telemetry.counter(
            "http_streams_failed_total", "Streams that ended with an error after their first byte"
        )
        self.disconnects = telemetry.counter("http_disconnects_total", "Clients that left before their answer's end")
        self.slow_readers = telemetry.counter("http_slow_readers_total", "Clients given up because they took nothing")
        self.fenced = telemetry.counter("edge_frames_fenced_total", "Frames refused under a lower fence")
        self.malformed = telemetry.counter("edge_frames_malformed_total", "Frames that could not be read")
        self.held = telemetry.counter("edge_requests_held_total", "Requests held while a dead part was replaced")
        self.resubmitted = telemetry.counter("edge_resubmissions_total", "Submissions after the first of a request")

    def items(self, count: int, interval_s: float) -> None:
        """Observe `count` tokens of one choice that came together after `interval_s`."""
        each = interval_s / count
        for _ in range(count):
            self.itl.observe(each)


class MetricsCollector:
    """Asks every node for its metrics; concurrent scrapes share one question."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ticket = ""
        self._reports: dict[str, str] = {}
        self._complete = asyncio.Event()
        self._running: asyncio.Task[str] | None = None

    async def page(self) -> str:
        """Return the merged metrics of all nodes that answer in time."""
        if self._running is None or self._running.done():
            self._running = self._context.spawn(self._collect(), name="edge-metrics")
        return await asyncio.shield(self._running)

    async def _collect(self) -> str:
        context = self._context
        self._ticket, self._reports = context.clock.random_hex(8), {}
        self._complete.clear()
        query = MetricsQuery(ticket=self._ticket, reply=context.ref)
        context.publish(subjects.METRICS, encode(query, context.ref))
        try:
            async with asyncio.timeout(COLLECT_S):
                await self._complete.wait()
        except TimeoutError:
            pass
        self._ticket = ""
        reports, self._reports = self._reports, {}
        reports.setdefault(context.node, context.telemetry.render())
        return merge(reports)

    def report(self, message: MetricsReport) -> None:
        """Take one node's answer."""
        if not self._ticket or message.ticket != self._ticket or len(self._reports) >= MAX_REPORTS:
            return
        self._reports[message.node] = message.text
        states = ("starting", "ready", "draining", "failed")
        expected = {m.node for m in self._context.membership.members(states=states)} | {self._context.node}
        if expected <= self._reports.keys():
            self._complete.set()


def merge(reports: Mapping[str, str]) -> str:
    """Merge Prometheus texts, one per node, into one: every sample gets the label `node`, every family one head."""
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for node in sorted(reports):
        label = f'node="{_escape(node)}"'
        family = ""
        for line in reports[node].splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                what, family = line[2:6], line[7:].split(" ", 1)[0]
                heads.setdefault(family, {}).setdefault(what, line)
            elif line and not line.startswith("#"):
                name = _name(line)
                # A sample without a head of its own is a family of its own.
                if not family or name.removeprefix(family) not in SUFFIXES:
                    family = name
                samples.setdefault(family, []).append(_labelled(line, name, label))
    out: list[str] = []
    # A labelled counter that has not counted yet has a head and no sample: dashboards still find its name.
    for family in sorted({*heads, *samples}):
        out += [line for _, line in sorted(heads.get(family, {}).items())]
        out += samples.get(family, [])
    return "\n".join(out) + "\n" if out else ""


def _name(line: str) -> str:
    end = min((i for i in (line.find("{"), line.find(" ")) if i >= 0), default=len(line))
    return line[:end]


def _labelled(line: str, name: str, label: str) -> str:
    rest = line[len(name) :]
    if not rest.startswith("{"):
        return f"{name}{{{label}}}{rest}"
    inner = rest[1:]
    return f"{name}{{{label}{'' if inner.startswith('}') else ','}{inner}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
