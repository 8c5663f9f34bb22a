"""A stored block as bytes on a disk: a header that says what follows, then the payload.

    offset  nbytes
         0       8  magic
         8       2  version of this format
        10       2  nbytes of the header
        12       4  tokens in the block
        16      16  shelf: fingerprint of layout and block size (`shelf_of`)
        32      16  epoch of the writer, ASCII, padded with zeros
        48      32  hash of the block, h(i)
        80      32  hash before it, h(i-1)
       112       8  nbytes of the payload
       120       8  xxh3_64 of the payload
       128       8  owner: digest of the tenant whose block it is, zeros for nobody's
       136     112  zeros
       248       8  xxh3_64 of the 248 bytes before
       256          payload

Integers are little-endian. A header is whole or it is nothing: one wrong bit anywhere in it is found. A record is taken
out of a file by overwriting its header with zeros.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.block import HASH_NBYTES, root_hash
from kvstore.errors import BadRecord
from schemas.tenants import OWNER_NBYTES, SHARED

MAGIC = b"HRkvRec\x00"
VERSION = 1
HEADER_NBYTES = 256
SHELF_NBYTES = 16
EPOCH_NBYTES = 16

_FIELDS = struct.Struct(f"<8sHHI{SHELF_NBYTES}s{EPOCH_NBYTES}s{HASH_NBYTES}s{HASH_NBYTES}sQQ{OWNER_NBYTES}s")
_SUM = struct.Struct("<Q")
_SUM_AT = HEADER_NBYTES - _SUM.size


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of its block; `checksum` is the xxh3_64 of its `nbytes` bytes of payload."""

    hash: bytes
    parent: bytes
    num_tokens: int
    nbytes: int
    checksum: int
    shelf: bytes
    epoch: str
    owner: bytes = SHARED


def shelf_of(layout: str, block_nbytes: int) -> bytes:
    """Return the fingerprint, 16 bytes, of a layout: records of another one are never read into a pool of this one."""
    return root_hash("disk", VERSION, layout, block_nbytes)[:SHELF_NBYTES]


def pack(header: RecordHeader) -> bytes:
    """Return the 256 bytes of a header.

    Raises:
        ValueError: if a field does not fit the format.
    """
    epoch = header.epoch.encode("ascii", "replace")
    sizes = (len(header.hash), len(header.parent), len(header.shelf), len(header.owner))
    if sizes != (HASH_NBYTES, HASH_NBYTES, SHELF_NBYTES, OWNER_NBYTES) or len(epoch) > EPOCH_NBYTES:
        raise ValueError(f"hash, parent, shelf and owner of {sizes} bytes, epoch of {len(epoch)}")
    fields = _FIELDS.pack(
        MAGIC, VERSION, HEADER_NBYTES, header.num_tokens, header.shelf, epoch, header.hash, header.parent,
        header.nbytes, header.checksum, header.owner,
    )  # fmt: skip
    head = fields.ljust(_SUM_AT, b"\x00")
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def is_blank(data: bytes | bytearray | memoryview) -> bool:
    """Whether a header's place was emptied (or never reached the disk): nothing is there, and nothing is wrong."""
    return len(data) >= HEADER_NBYTES and not any(data[:HEADER_NBYTES])


def unpack(data: bytes | bytearray | memoryview) -> RecordHeader:
    """Return the header in the first 256 bytes of `data`.

    Raises:
        BadRecord: if it is not one, is one of another version, or is damaged.
    """
    if len(data) < HEADER_NBYTES:
        raise BadRecord(f"{len(data)} bytes of a header")
    head = bytes(data[:HEADER_NBYTES])
    fields = _FIELDS.unpack_from(head)
    magic, version, nbytes, num_tokens, shelf, epoch, digest, parent, payload, checksum, owner = fields
    if magic != MAGIC:
        raise BadRecord("no record begins here")
    if xxhash.xxh3_64_intdigest(head[:_SUM_AT]) != _SUM.unpack_from(head, _SUM_AT)[0]:
        raise BadRecord("the header's checksum is wrong")
    if (version, nbytes) != (VERSION, HEADER_NBYTES):
        raise BadRecord(f"format {version} with headers of {nbytes} bytes")
    text = epoch.rstrip(b"\x00").decode("ascii", "replace")
    return RecordHeader(digest, parent, num_tokens, payload, checksum, shelf, text, owner)
