"""The hash chain that names blocks: `h0 = root_hash(…)`, `h(i) = H(h(i-1), token ids of block i)`."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

BLOCK_TOKENS = 16
HASH_NBYTES = 32

_IDS = struct.Struct(f"<{BLOCK_TOKENS}I")


def root_hash(*fields: str | bytes | int | None) -> bytes:
    """Return the start of a chain: every field is tagged with its type and prefixed with its length.

    So no two different lists of fields meet: an absent field is not an empty one, and neighbours never run together.
    """
    digest = hashlib.blake2b(digest_size=HASH_NBYTES)
    digest.update(len(fields).to_bytes(8, "little"))
    for field in fields:
        if field is None:
            tag, data = b"-", b""
        elif isinstance(field, bytes):
            tag, data = b"b", field
        elif isinstance(field, int):
            tag, data = b"i", str(int(field)).encode()
        else:
            tag, data = b"s", field.encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_hashes(token_ids: Sequence[int], *, root: bytes, start: bytes | None = None) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`, 32 bytes each.

    Args:
        token_ids: ids from a block's beginning on; a last partial block has no hash.
        root: the chain's start, see `root_hash`.
        start: hash of the block before `token_ids[0]` when a chain is continued.
    """
    parent = root if start is None else start
    out = []
    for first in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        ids = _IDS.pack(*token_ids[first : first + BLOCK_TOKENS])
        parent = hashlib.blake2b(parent + ids, digest_size=HASH_NBYTES).digest()
        out.append(parent)
    return out


def answer_start(parent: bytes) -> bytes:
    """Return where the chain of an answer's blocks goes on after its prompt's full blocks.

    Blocks that decode wrote are kept for who resumes the answer, and under hashes that no prompt can meet: not every
    kernel gives a position the same bits in both ways of computing it.
    """
    return hashlib.blake2b(parent, digest_size=HASH_NBYTES, person=b"answer").digest()


def sequence_hashes(token_ids: Sequence[int], prompt_len: int, *, root: bytes, warm: bool) -> list[bytes]:
    """Return the hashes of the full blocks of prompt and answer.

    Args:
        token_ids: both, one behind the other.
        prompt_len: how many of them are the prompt's.
        root: the chain's start.
        warm: whether the blocks behind the prompt's have the chain of `answer_start`.
    """
    if not warm:
        return chain_hashes(token_ids, root=root)
    cut = prompt_len // BLOCK_TOKENS * BLOCK_TOKENS
    head = chain_hashes(token_ids[:cut], root=root)
    return head + chain_hashes(token_ids[cut:], root=root, start=answer_start(head[-1] if head else root))


def num_blocks_for(num_tokens: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)
