"""Whose turn it is among tenants: virtual token counters, pure.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): each tenant has a counter of the service
that it got, prompt tokens that were computed for it and output tokens at `OUTPUT_COST` each, over its weight; the
tenant with the lowest counter goes next. A tenant that comes back from idle is lifted to the lowest of those that
wait, so that nobody banks credit. Between two that both wait, service over weight differs by no more than `bound`.
"""

from __future__ import annotations

from collections.abc import Mapping

OUTPUT_COST = 2.0  # an output token costs about two of a prompt, as in the paper
MAX_TENANTS = 1024


class Fairness:
    """The counters of one engine.

    Full at `MAX_TENANTS`: of those without waiting work the one with the lowest counter is forgotten; it would be
    lifted when it comes back anyway.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, *, capacity: int = 0) -> None:
        """Start with nobody served.

        Args:
            weights: of tenants that shall get more or less than 1.
            capacity: tokens that can run at once, of prompts and outputs together: for `bound` alone.

        Raises:
            ValueError: if a weight is not positive.
        """
        self._weights = dict(weights or {})
        self._capacity = capacity
        if any(not weight > 0.0 for weight in self._weights.values()):
            raise ValueError("the weights of tenants are positive")
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._last = 0.0  # the counter of the tenant that waited last, when nobody waits
        self._widest = 0.0

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self._weights.get(tenant, 1.0)

    def counter(self, tenant: str) -> float:
        """Return the service that a tenant got, over its weight."""
        return self._counters.get(tenant, 0.0)

    @property
    def contested(self) -> bool:
        """Whether several tenants wait."""
        return len(self._waiting) > 1

    def arrived(self, tenant: str) -> None:
        """One more sequence of a tenant waits."""
        waiting = self._waiting.get(tenant, 0)
        if not waiting:
            floor = min((self._counters[name] for name in self._waiting), default=self._last)
            if tenant not in self._counters and len(self._counters) >= MAX_TENANTS:
                self._forget_one()
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._waiting[tenant] = waiting + 1

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
        return 2.0 * OUTPUT_COST * self._capacity / min([1.0, *self._weights.values()])

    def statistics(self) -> dict[str, float]:
        """Return gauges by name, in virtual tokens."""
        return {
            "fair_tenants": len(self._counters), "fair_spread": self.spread, "fair_spread_widest": self._widest,
            "fair_spread_bound": self.bound,
        }  # fmt: skip

    def _forget_one(self) -> None:
        idle = [name for name in self._counters if name not in self._waiting]
        if idle:
            del self._counters[min(idle, key=lambda name: self._counters[name])]
