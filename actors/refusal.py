"""Whether a request is refused before anything is computed for it: its first token would come too late. Pure.

Predicted is what an engine's queue takes to drain to this request: prompt tokens that go first, over the rate at which
the engine has worked such tokens off of late. Who goes first follows the engine's own rules: higher classes, then a
fair share of each other tenant (`engine.fairness`), then what came before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.errors import Overloaded
from schemas.subjects import Ref

SLACK_S = 1.0  # by which an estimate must miss a deadline: a deadline ends its request anyway, and heartbeats are old
SENT_S = 0.6  # what was sent earlier shows in heartbeats by now
MAX_SENT = 2048
CLASSES = ("interactive", "agent", "batch")


class Queue(NamedTuple):
    """Prompt tokens of one tenant and class (0: interactive) that wait."""

    tenant: str
    priority: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for: whose, of which class, and how many tokens must be computed for it."""

    tenant: str
    priority: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Standing:
    """An engine as its last heartbeat shows it, and what was sent there since."""

    queues: tuple[Queue, ...] = ()
    computing: float = 0.0  # tokens of prompts that it has begun
    rate: float = 0.0  # tokens per second; 0: not known
    busy: bool = False  # whether anything runs or waits
    age_s: float = 0.0  # how long ago the heartbeat came, as far as it counts


def standing(load: Mapping[str, Any], since: Iterable[Queue], *, age_s: float = 0.0) -> Standing:
    """Read a heartbeat's load; what makes no sense is taken for nothing."""
    queues = [Queue(str(t), int(p), float(n)) for t, p, n in _rows(load.get("queues"))]
    begun = float(load.get("queued_tokens", 0)) - sum(queue.tokens for queue in queues)
    queues += since
    busy = bool(queues) or any(load.get(name, 0) for name in ("running", "waiting", "expected"))
    rate = max(0.0, float(load.get("drain_rate", 0.0)))
    return Standing(tuple(queues), max(0.0, begun), rate, busy, min(age_s, SENT_S))


def tokens_ahead(engine: Standing, asked: Asked, weights: Mapping[str, float]) -> float:
    """Return the prompt tokens that are computed before those that are asked for."""
    own = sum(q.tokens for q in engine.queues if q.tenant == asked.tenant and q.priority <= asked.priority)
    ahead = engine.computing + own
    others: dict[str, float] = {}
    for queue in engine.queues:
        if queue.tenant == asked.tenant or queue.priority > asked.priority:
            continue
        if queue.priority < asked.priority:
            ahead += queue.tokens
        else:
            others[queue.tenant] = others.get(queue.tenant, 0.0) + queue.tokens
    weight = weights.get(asked.tenant, 1.0)
    for tenant, tokens in others.items():
        ahead += min(tokens, own * weights.get(tenant, 1.0) / weight)
    return ahead


def tokens_behind(engine: Standing, asked: Asked, weights: Mapping[str, float]) -> float:
    """Return the prompt tokens that wait and are computed after those that are asked for."""
    if all(q.tenant == asked.tenant and q.priority <= asked.priority for q in engine.queues):
        return 0.0
    return sum(q.tokens for q in engine.queues) + engine.computing - tokens_ahead(engine, asked, weights)


def predicted_ttft_s(engine: Standing, asked: Asked, service_s: float, weights: Mapping[str, float]) -> float:
    """Return the estimated time to the first token.

    Args:
        engine: where it would run.
        asked: what is asked for.
        service_s: what it takes on an idle engine.
        weights: of tenants; absent ones have 1.
    """
    if engine.rate > 0.0:
        # What was worked off since the heartbeat shows in none yet.
        ahead = max(0.0, tokens_ahead(engine, asked, weights) - engine.rate * engine.age_s)
        return (ahead + asked.tokens) / engine.rate
    return least_ttft_s(engine, asked, service_s, weights)  # nothing was measured of late


def least_ttft_s(engine: Standing, asked: Asked, service_s: float, weights: Mapping[str, float]) -> float:
    """Return the time to the first token if each token ahead took what one of these takes; arguments as above.

    Less than that it will hardly be: whatever else the queue waits for comes on top.
    """
    return service_s * (1.0 + tokens_ahead(engine, asked, weights) / max(1, asked.tokens))


def refusal(
    engine: Standing, predicted_s: float, least_s: float, remaining_s: float, slo_s: float | None
) -> Overloaded | None:
    """Return why a request is refused, if it is.

    An engine that does nothing refuses nobody: what was learnt when it was busy could be wrong, and only work corrects
    it. Nor is anybody refused whose class was promised nothing: queues are counted in whole prompts, of which much may
    be stored, and a deadline ends its request anyway. A deadline that is nearer than the promise has to be missed by
    both estimates, since a rate can be of minutes in which prompts were few and steps long.

    Args:
        engine: where it would run.
        predicted_s: the estimated time to its first token, by the rate at which the queue drains.
        least_s: the same by what its tokens cost.
        remaining_s: the time to its deadline.
        slo_s: the time to the first token that its class is promised, if it is.
    """
    if slo_s is None or not engine.busy:
        return None
    if slo_s < remaining_s:
        limit_s, what, late = slo_s, f"the {slo_s:g} s of its class", predicted_s > slo_s
    else:
        predicted_s = min(predicted_s, least_s)
        limit_s, what, late = remaining_s, "its deadline", predicted_s > remaining_s + SLACK_S
    if not late:
        return None
    return Overloaded(
        f"the first token is expected in {predicted_s:.2f} s, which is too late for {what}",
        code="overloaded",
        retry_after_s=max(0.05, predicted_s - max(0.0, limit_s)),  # until then the queue is as short as it has to be
    )


class Sent:
    """What this sender has sent to engines since their last heartbeats. Seconds of any one clock.

    Full at `MAX_SENT`: the oldest is forgotten, and with it counted as seen.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self._sent: OrderedDict[str, tuple[float, Ref, Queue]] = OrderedDict()  # by request, the oldest first

    def sent(self, ref: Ref, request_id: str, asked: Asked, now: float) -> None:
        """A request was sent to an engine."""
        self._sent[request_id] = now, ref, Queue(asked.tenant, asked.priority, asked.tokens)
        self._sent.move_to_end(request_id)
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)

    def ended(self, request_id: str) -> None:
        """A request is over: nobody waits behind it, whatever heartbeats show."""
        self._sent.pop(request_id, None)

    def since(self, ref: Ref, counted: Collection[str], senders: int, now: float) -> list[Queue]:
        """Return what an engine's heartbeat does not show yet.

        Args:
            ref: the engine.
            counted: requests that its heartbeat names.
            senders: how many send; the others are taken to have sent as much, but for each tenant's first request:
                one alone says nothing of a crowd.
            now: the time.
        """
        while self._sent and next(iter(self._sent.values()))[0] < now - SENT_S:
            self._sent.popitem(last=False)
        out: list[Queue] = []
        tenants: set[str] = set()
        for request_id, (_, to, queue) in self._sent.items():
            if to == ref and request_id not in counted:
                times = max(1, senders) if queue.tenant in tenants else 1
                tenants.add(queue.tenant)
                out.append(queue._replace(tokens=queue.tokens * times))
        return out


def _rows(said: Any) -> list[Any]:
    rows = said if isinstance(said, (list, tuple)) else []
    return [row for row in rows if isinstance(row, (list, tuple)) and len(row) == 3 and _numbers(row[1:])]


def _numbers(values: Any) -> bool:
    return all(isinstance(value, (int, float)) and value >= 0 for value in values)
