"""What placements were made and why, and how right their estimates were."""

from __future__ import annotations

from actors.placement import Placement
from runtime.telemetry import Telemetry

REASONS = ("only", "load", "prefix")


class PlacementMetrics:
    """Counts placements; compares each estimate with the first item of its request. Bounded by open requests."""

    def __init__(self, telemetry: Telemetry) -> None:
        """Make the metrics; reasons are on the page as zero before they were first given."""
        self._estimates: dict[str, tuple[float, float]] = {}  # when placed, Unix seconds, and the estimate
        self._placements = telemetry.counter(
            "placements_total", "Placements by what decided (a stored prefix, load, nobody else there)", ("way", "why")
        )
        for why in REASONS:
            self._placements.labels("whole", why)
        self._error = telemetry.histogram(
            "placement_ttft_error_seconds", "Time from placement to the first item, off the estimate by",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )  # fmt: skip
        self._ratio = telemetry.histogram(
            "placement_ttft_ratio", "Time from placement to the first item, over the estimate",
            buckets=(0.1, 0.25, 0.5, 0.8, 1.25, 2, 4, 10, 100),
        )  # fmt: skip
        self._avoided = telemetry.counter("placement_stored_tokens_total", "Prompt tokens that placements counted on")

    def placed(self, request_id: str, placement: Placement, prompt_tokens: int, wall: float) -> None:
        """A request was placed, again perhaps: the first estimate counts."""
        self._placements.labels("whole" if placement.decode is None else "handed_over", placement.reason).inc()
        self._avoided.inc(max(0, prompt_tokens - placement.new_tokens))
        self._estimates.setdefault(request_id, (wall, placement.estimate_s))

    def ended(self, request_id: str, first_item_at: float) -> None:
        """A request is over; its first item came at this time, Unix seconds, or at none that can be compared (0)."""
        wall, estimate = self._estimates.pop(request_id, (0.0, 0.0))
        took = first_item_at - wall
        if first_item_at > 0.0 and wall > 0.0 and took >= 0.0:
            self._error.observe(abs(took - estimate))
            self._ratio.observe(took / max(estimate, 1e-6))
