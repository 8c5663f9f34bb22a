"""The time to a first token at each replica, estimated, and the replica where it is least: pure.

An estimate is queue + load of stored blocks + prefill of the rest. Longest match alone sends everything to one replica
as soon as all prompts share their first block; least load alone computes the same prefixes everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIE_S = 0.001  # estimates within the same millisecond are equal: free blocks decide


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute T tokens: a + b·T + c·T², the square for attention.

    After a stored prefix of P tokens the new ones attend to it too: T² becomes (P + T)² − P².
    """

    fixed_s: float
    per_token_s: float
    per_square_s: float = 0.0

    def seconds(self, new: int, prefix: int = 0) -> float:
        """Return the time for `new` tokens after `prefix` that need no computing."""
        return self.fixed_s + self.per_token_s * new + self.per_square_s * new * (new + 2 * prefix)

    def average_s(self, tokens: float) -> float:
        """Return the time per token of a prompt of so many; 0: of no prompt in particular, the term per token alone."""
        whole = self.fixed_s + self.per_token_s * tokens + self.per_square_s * tokens * tokens
        return whole / tokens if tokens > 0.0 else self.per_token_s


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds to bring the KV of stored tokens to where it is used."""

    bytes_per_token: float
    bytes_per_s: float
    fixed_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Return the time for `tokens`; nothing takes none."""
        return self.fixed_s + tokens * self.bytes_per_token / self.bytes_per_s if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What the estimate knows of a replica's speed; without `copy` nothing is fetched from other replicas' stores."""

    prefill: PrefillCost
    load: LoadCost
    copy: LoadCost | None = None
    disk: LoadCost | None = None  # in addition to `load`, for what lies on a disk; None: it takes no more than memory


@dataclass(frozen=True, slots=True)
class View:
    """What is known of a replica, for one prompt.

    Of the prompt's first `stored_tokens` the first `resident_tokens` need no loading, and those behind the first
    `memory_tokens` (if that is set) lie on a disk. Its store would fetch what follows them, up to `far_tokens`, from
    another one's in `far_s`.
    """

    name: str
    queued_s: float  # before a prompt that is sent now would start
    stored_tokens: int = 0  # of this prompt, from its first token on
    free_blocks: int = 0
    stale: bool = False  # not heard for too long: only if nobody else can
    resident_tokens: int = 0
    memory_tokens: int | None = None
    costs: Costs | None = None  # of this replica, where replicas differ
    far_tokens: int = 0
    far_s: float = 0.0
    tie: int = 0  # decides between equals before the name does; drawn by request, it spreads what is equal


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for a prompt, what it takes there, and how much of it is loaded and copied instead of computed.

    What is resident counts as loaded.
    """

    name: str
    ttft_s: float
    service_s: float  # the estimate without the queue
    loaded_tokens: int = 0
    copied_tokens: int = 0
    copy_from: str = ""


def least_ttft(views: Sequence[View], tokens: int, costs: Costs) -> Choice | None:
    """Return the replica with the least estimated time to a first token, or None without replicas.

    Ties go to whoever has more free blocks, then to the lowest `tie`, then to the first name. With `costs.copy` a
    replica that has less of the prompt than another may take the difference from there: that is how a prefix that many
    ask for spreads, and only when waiting for its holder takes longer.

    Args:
        views: each replica's queue and stored prefix.
        tokens: of the prompt.
        costs: the cost model of replicas whose views bring none.
    """
    if not views:
        return None
    donor = max(views, key=lambda view: view.stored_tokens) if costs.copy is not None else None
    choices = {view.name: estimate(view, tokens, costs, donor) for view in views}
    best = min(views, key=lambda v: (v.stale, int(choices[v.name].ttft_s / TIE_S), -v.free_blocks, v.tie, v.name))
    return choices[best.name]


def estimate(view: View, tokens: int, costs: Costs, donor: View | None = None) -> Choice:
    """Return what a prompt takes at one replica, by the quickest of: compute all, load what is there, copy more.

    The last token is always computed: its logits are what a prefill is for.

    Args:
        view: the replica.
        tokens: of the prompt.
        costs: the cost model, unless the view brings its own.
        donor: a replica whose stored prefix may be copied.
    """
    costs = view.costs or costs
    resident = max(0, min(view.resident_tokens, tokens - 1))
    loaded = max(resident, min(view.stored_tokens, tokens - 1))
    ways = [(costs.prefill.seconds(tokens - resident, resident), resident, 0)]
    memory = loaded if view.memory_tokens is None else max(resident, min(view.memory_tokens, loaded))
    for have in sorted({memory, loaded} - {resident}):
        brought = costs.load.seconds(have - resident)
        if costs.disk is not None:
            brought += costs.disk.seconds(max(0, have - memory))
        ways.append((brought + costs.prefill.seconds(tokens - have, have), have, 0))
    if donor is not None and costs.copy is not None and donor.name != view.name:
        copied = min(donor.stored_tokens, tokens - 1) - loaded
        if copied > 0:
            have = loaded + copied
            brought = costs.load.seconds(loaded - resident) + costs.copy.seconds(copied)
            ways.append((brought + costs.prefill.seconds(tokens - have, have), loaded, copied))
    far = min(view.far_tokens, tokens - 1)
    if far > loaded:  # into the store's memory, and from there with what was there already
        brought = view.far_s + costs.load.seconds(far - resident)
        ways.append((brought + costs.prefill.seconds(tokens - far, far), loaded, far - loaded))
    service, loaded, copied = min(ways, key=lambda way: way[0])
    source = donor.name if donor is not None and copied and costs.copy is not None else ""
    return Choice(view.name, view.queued_s + service, service, loaded, copied, source)
