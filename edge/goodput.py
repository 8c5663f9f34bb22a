"""Goodput and attainment: requests per second that were as quick as promised, and their share of what was offered.

Promised is a time to the first token of at most `TTFT_TIMES` and a mean time between a request's tokens of at most
`ITL_TIMES` their medians without load. These are set, or learnt from requests that were alone here in all their time.
"""

from __future__ import annotations

import statistics
from collections import deque

from runtime.telemetry import Telemetry

TTFT_TIMES = 5.0
ITL_TIMES = 3.0
WINDOW_S = 60
LEAST_ALONE = 5  # requests before a median is one
KEPT_ALONE = 63
OUTCOMES = ("met", "late_first", "late_tokens", "refused", "failed", "unjudged")


class Goodput:
    """Counts requests by what became of them; the figures are of the last `WINDOW_S` seconds."""

    def __init__(self, telemetry: Telemetry, unloaded_ttft_s: float = 0.0, unloaded_itl_s: float = 0.0) -> None:
        """Start with nothing offered; an unloaded median of 0 is learnt."""
        self._set = unloaded_ttft_s, unloaded_itl_s
        self._alone: tuple[deque[float], deque[float]] = (deque(maxlen=KEPT_ALONE), deque(maxlen=KEPT_ALONE))
        self._medians = [unloaded_ttft_s, unloaded_itl_s]
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_S + 1)  # each: which second, offered, met
        self._began: float | None = None
        self._requests = telemetry.counter(
            "slo_requests_total", "Requests by class, and whether they were as quick as promised", ("class", "outcome")
        )
        for outcome in OUTCOMES:
            self._requests.labels("interactive", outcome)  # on the page as zero before the first one

    @property
    def unloaded_ttft_s(self) -> float:
        """Median time to the first token without load; 0: not known yet."""
        return self._medians[0]

    @property
    def unloaded_itl_s(self) -> float:
        """Median time between tokens without load; 0: not known yet."""
        return self._medians[1]

    def refused(self, request_class: str, now: float) -> None:
        """A request was refused for load."""
        self._count(request_class, "refused", now)

    def failed(self, request_class: str, now: float) -> None:
        """A request ended with another error."""
        self._count(request_class, "failed", now)

    def ended(self, request_class: str, ttft_s: float, itl_s: float | None, now: float, *, alone: bool = False) -> None:
        """A request was answered.

        Args:
            request_class: its class.
            ttft_s: from its receipt to its first token.
            itl_s: the mean time between its tokens; None: it had one.
            now: the time.
            alone: whether no other request was open in all its time.
        """
        if alone:
            self._learn(0, ttft_s)
            if itl_s is not None:
                self._learn(1, itl_s)
        self._count(request_class, self._judge(ttft_s, itl_s), now)

    def statistics(self, now: float) -> dict[str, float]:
        """Return gauges by name."""
        recent = [entry for entry in self._seconds if entry[0] > now - WINDOW_S]
        offered, met = sum(entry[1] for entry in recent), sum(entry[2] for entry in recent)
        seconds = min(float(WINDOW_S), max(1.0, now - self._began)) if self._began is not None else float(WINDOW_S)
        return {
            "goodput_requests_per_second": met / seconds,
            "slo_attainment": met / offered if offered else 1.0,
            "unloaded_ttft_seconds": self.unloaded_ttft_s,
            "unloaded_itl_seconds": self.unloaded_itl_s,
        }

    def _judge(self, ttft_s: float, itl_s: float | None) -> str:
        if not self.unloaded_ttft_s or (itl_s is not None and not self.unloaded_itl_s):
            return "unjudged"
        if ttft_s > TTFT_TIMES * self.unloaded_ttft_s:
            return "late_first"
        return "late_tokens" if itl_s is not None and itl_s > ITL_TIMES * self.unloaded_itl_s else "met"

    def _learn(self, which: int, seconds: float) -> None:
        seen = self._alone[which]
        seen.append(seconds)
        if not self._set[which] and len(seen) >= LEAST_ALONE:
            self._medians[which] = statistics.median(seen)

    def _count(self, request_class: str, outcome: str, now: float) -> None:
        self._requests.labels(request_class, outcome).inc()
        if outcome == "unjudged":
            return
        self._began = now if self._began is None else self._began
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += 1
        self._seconds[-1][2] += outcome == "met"
