"""Whether what a store has of a prompt is loaded or computed: pure, over what both were measured to take here.

Loads are measured while they are made, so an engine that never loads learns nothing new of them: now and then one is
made against the estimate, at a bounded price. The text is the same either way, only its time differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.ttft import Costs, LoadCost

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


@dataclass(frozen=True, slots=True)
class Loading:
    """Up to which token a prompt is loaded.

    A `probe` is made against the estimate, to see what a load takes: it is given up early. `read_to` is set where the
    disk's speed is to be measured: its owner may read up to that token, and nobody waits for it.
    """

    end: int
    probe: bool = False
    read_to: int = 0


def plan_load(
    offer: Offer,
    costs: Costs,
    *,
    queued_s: float = 0.0,
    since_load_s: float = 0.0,
    since_disk_s: float = 0.0,
) -> Loading:
    """Return what is loaded of a prompt, and what is done to learn what loads take.

    A probe may cost its prompt what it is estimated to save, once in `PROBE_S`; one that costs ten times as much is
    made a tenth as often. The disk is measured by its owner, without a prompt that waits.

    Args:
        offer: the prompt.
        costs: of prefills, of loads from memory, and of the disk in addition.
        queued_s: what the engine has to compute before this prompt.
        since_load_s: since the last load.
        since_disk_s: since the last one that went to the disk, or since the disk was last measured.
    """
    end = tokens_to_load(offer, costs, queued_s=queued_s)
    read_to = offer.total if end <= offer.memory < offer.total and since_disk_s >= PROBE_S else 0
    if end == offer.resident < offer.memory and since_load_s >= PROBE_S:
        computed, loaded = (_first_token_s(offer, costs, queued_s, to) for to in (offer.resident, offer.memory))
        whole, rest = (costs.prefill.seconds(offer.tokens - to, to) for to in (offer.resident, offer.memory))
        if loaded - computed <= (whole - rest) * since_load_s / PROBE_S:
            return Loading(offer.memory, True, read_to)
    return Loading(end, False, read_to)


def tokens_to_load(offer: Offer, costs: Costs, *, queued_s: float = 0.0) -> int:
    """Return up to which token the prompt is loaded: to `offer.resident` (nothing is), `memory` or `total`.

    The way with the earliest first token; of equal ones that which computes least. Loads run beside the engine's steps,
    so what waits before the prompt hides them. No end in between is best: a block saves the more the further it is.
    """
    ends = {offer.resident, offer.memory, offer.total}
    return min(ends, key=lambda end: (_first_token_s(offer, costs, queued_s, end), -end))


def may_pay_far(offer: Offer, costs: Costs, far: LoadCost, known: int, *, queued_s: float = 0.0) -> bool:
    """Whether another host may have something that is sooner fetched than computed.

    Only its store can tell what it has, and to ask takes two hops. So this is the best case: all of the prompt, up to
    as many tokens as others have at all.

    Args:
        offer: what is here.
        costs: likewise.
        far: of what comes from there, in addition to a load from memory.
        known: tokens that other hosts have, of whatever prompts.
        queued_s: what the engine has to compute before this prompt.
    """
    end = min(offer.tokens - 1, offer.total + known)
    if end <= offer.total:
        return False
    here = _first_token_s(offer, costs, queued_s, tokens_to_load(offer, costs, queued_s=queued_s))
    brought = costs.load.seconds(end - offer.resident) + far.seconds(end - offer.total)
    return max(queued_s, brought) + costs.prefill.seconds(offer.tokens - end, end) < here


def _first_token_s(offer: Offer, costs: Costs, queued_s: float, end: int) -> float:
    brought = costs.load.seconds(end - offer.resident)
    if costs.disk is not None:
        brought += costs.disk.seconds(max(0, end - offer.memory))
    return max(queued_s, brought) + costs.prefill.seconds(offer.tokens - end, end)
