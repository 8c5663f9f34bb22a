"""Changes of a tier as bytes for the bus: 33 bytes each, and 32 more only where a chain begins or is left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.block import HASH_NBYTES
from kvstore.index import Op

Change = tuple[Op, bytes, bytes]  # what happened, to which hash, the hash before it (empty if not known)

DROP, ADD, ADD_AFTER, ADD_NEXT = range(4)


@dataclass(frozen=True, slots=True)
class Packed:
    """Changes in order: a byte each in `ops`, 32 each in `hashes`, 32 in `parents` for each `ADD_AFTER`.

    The parent of an `ADD_NEXT` is the hash of the change before it; that of an `ADD` is not known.
    """

    ops: bytes
    hashes: bytes
    parents: bytes


def pack(changes: Iterable[Change]) -> Packed:
    """Return the changes as bytes."""
    ops, hashes, parents = bytearray(), bytearray(), bytearray()
    before = b""
    for op, digest, parent in changes:
        if op is Op.DROP:
            ops.append(DROP)
        elif not parent:
            ops.append(ADD)
        elif parent == before:
            ops.append(ADD_NEXT)
        else:
            ops.append(ADD_AFTER)
            parents += parent
        hashes += digest
        before = digest
    return Packed(bytes(ops), bytes(hashes), bytes(parents))


def unpack(ops: bytes, hashes: bytes, parents: bytes) -> list[Change]:
    """Undo `pack`.

    Raises:
        ValueError: if the lengths do not fit together or an op is unknown.
    """
    if len(hashes) != HASH_NBYTES * len(ops) or len(parents) != HASH_NBYTES * ops.count(ADD_AFTER):
        raise ValueError(f"{len(ops)} changes with {len(hashes)} bytes of hashes and {len(parents)} of parents")
    if ops[:1] == bytes([ADD_NEXT]):
        raise ValueError("the first change follows none")
    out: list[Change] = []
    digest, at = b"", 0
    for position, op in enumerate(ops):
        before, digest = digest, hashes[position * HASH_NBYTES : (position + 1) * HASH_NBYTES]
        if op == ADD_NEXT:
            out.append((Op.ADD, digest, before))
        elif op == DROP:
            out.append((Op.DROP, digest, b""))
        elif op == ADD:
            out.append((Op.ADD, digest, b""))
        elif op == ADD_AFTER:
            out.append((Op.ADD, digest, parents[at : at + HASH_NBYTES]))
            at += HASH_NBYTES
        else:
            raise ValueError(f"unknown change {op}")
    return out
