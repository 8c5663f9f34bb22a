"""Whose turn it is among tenants: virtual token counters, pure.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): each tenant has a counter of the service
that it got, prompt tokens that were computed for it and output tokens at `OUTPUT_COST` each, over its weight; the
tenant with the lowest counter goes next. A tenant that comes back from idle is lifted to the lowest of those that
wait, so that nobody banks credit. Between two that both wait, service over weight differs by no more than `bound`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

OUTPUT_COST = 2.0  # an output token costs about two of a prompt, as in the paper
SHARED_S = 30.0  # an engine counts as shared for so long after tenants took turns in coming
MAX_TENANTS = 1024


class Fairness:
    """The counters of one engine.

    Full at `MAX_TENANTS`: of those without waiting work the one with the lowest counter is forgotten; it would be
    lifted when it comes back anyway.
    """

    def __init__(
        self, weights: Mapping[str, float] | None = None, *, capacity: int = 0, credit: float = 0.0
    ) -> None:
        """Start with nobody served.

        Args:
            weights: of tenants that shall get more or less than 1.
            capacity: tokens that can run at once, of prompts and outputs together: for `bound` alone.
            credit: by how much a tenant that comes back from idle may be below the others, in virtual tokens: a few
                requests at once of one that asks for little do not wait for each other's turns.

        Raises:
            ValueError: if a weight is not positive.
        """
        self._weights = dict(weights or {})
        self._capacity = capacity
        self._credit = credit
        if any(not weight > 0.0 for weight in self._weights.values()):
            raise ValueError("the weights of tenants are positive")
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._last = 0.0  # the counter of the tenant that waited last, when nobody waits
        self._starts = 0
        self._served: dict[str, int] = {}  # the number of each tenant's last start
        self._latest: str | None = None  # who came last
        self._turned_at = -math.inf  # when last somebody else came than before
        self._widest = 0.0

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self._weights.get(tenant, 1.0)

    def counter(self, tenant: str) -> float:
        """Return the service that a tenant got, over its weight."""
        return self._counters.get(tenant, 0.0)

    @property
    def several(self) -> bool:
        """Whether more than one tenant has a counter."""
        return len(self._counters) > 1

    def shared(self, now: float) -> bool:
        """Whether different tenants came one after the other of late: another one may come during any step."""
        return now - self._turned_at < SHARED_S

    def saw(self, tenant: str, now: float) -> None:
        """A tenant asks for something here."""
        if self._latest not in (None, tenant):
            self._turned_at = now
        self._latest = tenant

    def served(self, tenant: str) -> int:
        """Return the number of a tenant's last start: between equal counters who started longest ago goes first."""
        return self._served.get(tenant, 0)

    def arrived(self, tenant: str, now: float = 0.0, *, in_service: float = math.inf) -> None:
        """One more sequence of a tenant waits.

        Args:
            tenant: whose.
            now: seconds of any one clock.
            in_service: the least counter at which a prompt that is being computed was started: a tenant that comes
                back is level with that, not behind what the same tenant has begun since it waits.
        """
        self.saw(tenant, now)
        waiting = self._waiting.get(tenant, 0)
        if not waiting:
            floor = min((self._counters[name] for name in self._waiting), default=self._last)
            floor = min(floor, in_service) - self._credit
            if tenant not in self._counters and len(self._counters) >= MAX_TENANTS:
                self._forget_one()
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._waiting[tenant] = waiting + 1

    def started(self, tenant: str) -> None:
        """A sequence of a tenant takes part in steps from now on."""
        if tenant in self._counters:
            self._starts += 1
            self._served[tenant] = self._starts

    def left(self, tenant: str) -> None:
        """A sequence of a tenant waits no more: it has started, or is gone."""
        waiting = self._waiting[tenant] - 1
        if waiting:
            self._waiting[tenant] = waiting
            return
        del self._waiting[tenant]
        if not self._waiting:
            self._last = self._counters[tenant]

    def price(self, tenant: str, prompt_tokens: int, output_tokens: int = 0) -> float:
        """Return by how much a counter rises for so many tokens."""
        return (prompt_tokens + OUTPUT_COST * output_tokens) / self.weight(tenant)

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int = 0) -> None:
        """A tenant got service."""
        if tenant in self._counters:
            self._counters[tenant] += self.price(tenant, prompt_tokens, output_tokens)

    def observe(self) -> None:
        """Note how far the counters of those who wait are apart; called after each step."""
        if len(self._waiting) > 1:
            self._widest = max(self._widest, self.spread)

    @property
    def spread(self) -> float:
        """How far the counters of the tenants that wait are apart."""
        counters = [self._counters[name] for name in self._waiting]
        return max(counters) - min(counters) if counters else 0.0

    @property
    def bound(self) -> float:
        """What the spread within one class cannot exceed: twice the most service that can be on its way at once."""
        return 2.0 * OUTPUT_COST * self._capacity / min([1.0, *self._weights.values()]) + self._credit

    def statistics(self) -> dict[str, float]:
        """Return gauges by name, in virtual tokens."""
        return {
            "fair_tenants": len(self._counters), "fair_spread": self.spread, "fair_spread_widest": self._widest,
            "fair_spread_bound": self.bound,
        }  # fmt: skip

    def _forget_one(self) -> None:
        idle = [name for name in self._counters if name not in self._waiting]
        if idle:
            forgotten = min(idle, key=lambda name: self._counters[name])
            del self._counters[forgotten]
            self._served.pop(forgotten, None)
