"""Asks nodes for their metrics over the bus, right now: fresher than a heartbeat."""

from __future__ import annotations

import asyncio
import secrets

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from prometheus_client.parser import text_string_to_metric_families

from schemas import subjects
from schemas.codec import DecodeError, decode, encode
from schemas.messages import MetricsQuery, MetricsReport

Labelled = dict[tuple[str, str], float]  # (metric, actor) -> value


def parse(text: str) -> Labelled:
    """Return every sample of a metrics text by its name and its `actor` label (empty without one), summed."""
    out: Labelled = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("actor", ""))
            out[key] = out.get(key, 0.0) + float(sample.value)
    return out


class Probe:
    """A mailbox that metrics reports come back to."""

    def __init__(self, nats: Nats) -> None:
        self._nats = nats
        self._ref = subjects.Ref("probe", "chaos", secrets.token_hex(8))
        self._reports: dict[str, dict[str, str]] = {}
        self._came = asyncio.Event()

    async def start(self) -> None:
        """Listen."""
        await self._nats.subscribe(self._ref.subject, cb=self._on_report)

    async def _on_report(self, message: Msg) -> None:
        try:
            report, _ = decode(message.data)
        except DecodeError:
            return
        if isinstance(report, MetricsReport) and report.ticket in self._reports:
            self._reports[report.ticket][report.node] = report.text
            self._came.set()

    async def ask(self, nodes: set[str], *, timeout_s: float = 1.0) -> Labelled:
        """Return the metrics of these nodes, merged.

        Raises:
            TimeoutError: if one of them does not answer in time.
        """
        merged: Labelled = {}
        for text in (await self.texts(nodes, timeout_s=timeout_s)).values():
            for key, value in parse(text).items():
                merged[key] = merged.get(key, 0.0) + value
        return merged

    async def texts(self, nodes: set[str], *, timeout_s: float = 1.0) -> dict[str, str]:
        """Return the metrics of these nodes as they wrote them.

        Raises:
            TimeoutError: if one of them does not answer in time.
        """
        ticket = secrets.token_hex(8)
        answers = self._reports[ticket] = {}
        query = MetricsQuery(ticket=ticket, reply=self._ref)
        await self._nats.publish(subjects.METRICS, encode(query, self._ref))
        # No flush: it waits by `asyncio.wait_for`, which on Python 3.11 loses a cancellation that comes with its end.
        try:
            async with asyncio.timeout(timeout_s):
                while not nodes <= set(answers):
                    self._came.clear()
                    await self._came.wait()
        finally:
            del self._reports[ticket]
        return {node: answers[node] for node in nodes}
