"""Whether what a store has of a prompt is loaded or computed: pure, over what both were measured to take here.

Loads are measured while they are made, so an engine that never loads learns nothing new of them: now and then one is
made against the estimate. The text is the same either way, only its time differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.ttft import Costs

PROBE_S = 10.0  # an estimate that forbids loads is believed for so long


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt of `tokens`, and what need not be computed of it.

    The engine's own pool has the first `resident` tokens, the store's memory goes on up to `memory`, its disk up to
    `total`.
    """

    tokens: int
    resident: int
    memory: int
    total: int


def tokens_to_load(
    offer: Offer,
    costs: Costs,
    *,
    queued_s: float = 0.0,
    since_load_s: float = 0.0,
    since_disk_s: float = 0.0,
) -> int:
    """Return up to which token the prompt is loaded: to `offer.resident` (nothing is), `memory` or `total`.

    The way with the earliest first token; of equal ones that which computes least. Loads run beside the engine's steps,
    so what waits before the prompt hides them. No end in between is best: a block saves the more the further it is.

    Args:
        offer: the prompt.
        costs: of prefills, of loads from memory, and of the disk in addition.
        queued_s: what the engine has to compute before this prompt.
        since_load_s: since the last load; from `PROBE_S` on one is made whatever the estimate.
        since_disk_s: since the last one that went to the disk, likewise.
    """
    ends = {offer.resident, offer.memory, offer.total}
    if offer.total > offer.memory and since_disk_s >= PROBE_S:
        ends = {offer.total}
    elif offer.memory > offer.resident and since_load_s >= PROBE_S:
        ends.discard(offer.resident)

    def first_token_s(end: int) -> float:
        brought = costs.load.seconds(end - offer.resident)
        if costs.disk is not None:
            brought += costs.disk.seconds(max(0, end - offer.memory))
        return max(queued_s, brought) + costs.prefill.seconds(offer.tokens - end, end)

    return min(ends, key=lambda end: (first_token_s(end), -end))
