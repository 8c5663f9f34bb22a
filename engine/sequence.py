"""One choice of a request inside an engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.record import Sampling


class Key(NamedTuple):
    """Names a sequence inside an engine."""

    request_id: str
    choice: int


class Phase(enum.Enum):
    """Where a sequence is in its life inside one engine."""

    WAITING = "waiting"  # not admitted to the batch
    RUNNING = "running"  # computing (prompt chunks or decode)
    HELD = "held"  # prompt computed for hand-off; blocks are pinned until released
    EXPECTED = "expected"  # blocks reserved; KV arrives by transfer
    FINISHED = "finished"


@dataclass(slots=True)
class Sequence:
    """Prompt ids + output ids, and how much of their KV is computed.

    `num_computed` counts tokens whose KV lies in `blocks`. A sequence wants `len(tokens)` computed, and samples the
    next id when it gets there. `outputs` may be non-empty at the start (resumed after a failover).
    """

    key: Key
    prompt_ids: list[int]
    sampling: Sampling
    outputs: list[int] = field(default_factory=list)
    handoff: bool = False  # stop after the first sampled token and hold the blocks
    num_first: int = 1  # hand-off: how many choices share this prompt (each gets a first token)
    salt: str = ""  # tenant salt of the block-hash chain
    tenant: str = "default"
    warm: bool = False  # the blocks of its answer are stored as they fill, for who resumes it
    deadline: float = 0.0  # Unix seconds
    arrival: float = 0.0  # monotonic seconds
    late_at: float = 0.0  # Unix seconds: not begun by then, less what its prompt takes, it is refused; 0: never
    priority: int = 0  # class: 0 comes first
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    num_cached: int = 0  # tokens found in the device tier or loaded from the store
    blocks: list[int] = field(default_factory=list)
    num_hashed: int = 0  # full blocks already published under their hash
    num_preempted: int = 0
    alone_until: int = 0  # output index before which nobody else takes part in its steps

    @property
    def alone(self) -> bool:
        """Whether its next step is its request's own."""
        return len(self.outputs) < self.alone_until

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_ids) + len(self.outputs)

    @property
    def tokens(self) -> list[int]:
        """All ids in order."""
        return self.prompt_ids + self.outputs

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV must still be computed before the next id can be sampled."""
        return self.num_tokens - self.num_computed
