"""Who takes over the requests of a dead owner: pure. Whoever asks comes to the same answer without asking others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from schemas.record import Record
from schemas.subjects import Ref

ORPHAN_RESEND_S = 0.3
TRIES_EACH = 2  # of one heir, before the next one is asked


def ranked(request_id: str, actors: Iterable[Ref]) -> list[Ref]:
    """Return the actors in the order of one request (rendezvous hashing): a death moves only what the dead one had."""

    def weight(ref: Ref) -> bytes:
        return hashlib.blake2b(f"{request_id} {ref.id} {ref.epoch}".encode(), digest_size=8).digest()

    return sorted(actors, key=weight)


def heir(record: Record, owner: Ref, candidates: Iterable[Ref], attempt: int) -> Ref | None:
    """Return the admission actor to be told that `owner` is gone; its backup first, another after a few tries.

    Args:
        record: names the backup.
        owner: who is gone.
        candidates: admission actors that take work.
        attempt: 0, 1, … of this report.
    """
    order = ranked(record.request_id, (c for c in candidates if c != owner))
    if record.backup is not None and record.backup in order:
        order.remove(record.backup)
        order.insert(0, record.backup)
    return order[attempt // TRIES_EACH % len(order)] if order else None
