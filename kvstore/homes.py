"""Which of several stores of a host a prompt's blocks belong in: its *home*. Pure.

By rendezvous hashing over the ids of the stores: whoever knows the same stores names the same home, and a store that
joins or leaves moves its own share and nothing else. Epochs do not count, so that a store that was started again has
the share that it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from kvstore.block import BLOCK_TOKENS
from schemas.subjects import Ref

# Prompts that begin with the same blocks, so many of them, have one home. With the first block alone all prompts of one
# chat template would share theirs; with many, the turns of a conversation would change theirs for longer.
KEY_BLOCKS = 8


def home_key(hashes: Sequence[bytes], prompt_tokens: int) -> bytes:
    """Return what decides the home of a prompt.

    Args:
        hashes: of the prompt's first blocks, as far as they are known.
        prompt_tokens: its length. The last token never counts: it is always computed, so no lookup names its block.

    Raises:
        ValueError: if no hash is known.
    """
    if not hashes:
        raise ValueError("a prompt without a full block has no home")
    last = min(KEY_BLOCKS, (prompt_tokens - 1) // BLOCK_TOKENS, len(hashes))
    return hashes[max(0, last - 1)]


def ranked(stores: Sequence[Ref], key: bytes) -> list[Ref]:
    """Return the stores in the order in which they would be home to a prompt."""
    if len(stores) < 2:
        return list(stores)
    return sorted(stores, key=lambda store: (_weight(store, key), store), reverse=True)


def fullest(order: Sequence[Ref], held: Callable[[Ref], int], least: int) -> Ref:
    """Return the store to read a prompt from: that which has most of it, the home where none has `least` blocks.

    Args:
        order: of `ranked`, at least one; of those that have equally much the first one is taken.
        held: how many of the first blocks a store is known to have.
        least: fewer blocks are not worth asking for.
    """
    if len(order) == 1:
        return order[0]
    counts = [held(store) for store in order]
    most = max(counts)
    return order[counts.index(most)] if most >= least else order[0]


def pinned_at(stores: Sequence[Ref], hashes: Sequence[bytes]) -> list[Ref]:
    """Return the stores of one host in which a prefix has to be pinned.

    A prefix that is no longer than what decides the home may go on in ways that have different homes: all of them then.
    """
    return ranked(stores, hashes[KEY_BLOCKS - 1])[:1] if len(hashes) > KEY_BLOCKS else list(stores)


def _weight(store: Ref, key: bytes) -> bytes:
    return hashlib.blake2b(store.id.encode(), digest_size=8, key=key[:64]).digest()
