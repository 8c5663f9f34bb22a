"""What an engine tells those who place prompts: how long prompts and loads take here, and what its pool holds.

Costs ride in heartbeats; the blocks of the pool are a tier like any other, told as numbered changes on a subject that
only those who place listen to. What names blocks travels without the tenant's part: a record brings that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.kv_events import Announcer
from actors.prefill_fit import PrefillFit
from actors.ttft import PrefillCost
from engine.prefills import Prefill
from kvstore.block import BLOCK_TOKENS
from kvstore.pool import BlockPool
from runtime.actor import Context
from schemas import messages as m
from schemas.subjects import device_events

DEVICE = "device"
PREFILL_PRIOR = PrefillCost(0.005, 1e-3)  # seconds; believed until a prompt was computed
LOAD_PRIOR = PrefillCost(0.003, 2e-5)  # a store's answer and the copy of its blocks, likewise


class EngineReport:
    """The measured costs of one engine, and the announcer of its pool."""

    def __init__(self, context: Context) -> None:
        """Start with the priors and an empty pool."""
        self._prefill = PrefillFit(PREFILL_PRIOR)
        self._load = PrefillFit(LOAD_PRIOR)
        self._announcer = Announcer(context, DEVICE, subject=device_events(context.host))
        self._attached = False
        self.costs = (PREFILL_PRIOR, LOAD_PRIOR)  # of prefills and of loads from memory, as last told

    def computed(self, prefills: Iterable[Prefill]) -> None:
        """Prompts were computed."""
        for one in prefills:
            self._prefill.observe(one.num_tokens, one.num_cached, one.seconds)

    @property
    def per_token_s(self) -> float:
        """What a token of such prompts as come here takes, with its part of what does not depend on length."""
        return self.costs[0].average_s(self._prefill.typical)

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """Blocks came from the store's memory, in so long from the question to the last check."""
        self._load.observe(num_blocks * BLOCK_TOKENS, 0, seconds)

    def load(self) -> dict[str, Any]:
        """Return what rides in heartbeats: a, b, c of a + b·T + c·T² for prefills, a and b for loads, a number.

        An engine that has computed nothing yet says so: who places prompts takes it for one like the others. The number
        behind `prefill_tokens` is the length at which it knows best what it takes.
        """
        self.costs = prefill, load = self._prefill.cost, self._load.cost
        return {
            **({"prefill_tokens": round(self._prefill.typical, 1)} if self._prefill.typical else {"unmeasured": True}),
            "prefill_cost": [prefill.fixed_s, prefill.per_token_s, prefill.per_square_s],
            "load_cost": [load.fixed_s, load.per_token_s],
            "tiers": self._announcer.numbers(),
        }

    def on_query(self, msg: m.KvDumpQuery) -> None:
        """Somebody joins."""
        self._announcer.on_query(msg)

    def tick(self, pool: BlockPool, now: float) -> None:
        """Tell what has changed in the pool."""
        if not self._attached:
            self._attached = True
            self._announcer.attach(DEVICE, pool)
        self._announcer.tick(now)

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        fits = {"prefill": self._prefill, "load": self._load}
        out = {f"{name}_fit_{k}": v for name, fit in fits.items() for k, v in fit.statistics().items()}
        return {**out, **{f"device_{k}": v for k, v in self._announcer.statistics().items()}}
