"""The bytes of the TCP transport: greeting and proof, a request, and what is answered. No sockets here.

    client                                   server
    hello: magic, version, nonce        →
                                        ←    hello
    proof: HMAC(key, role, both nonces) →
                                        ←    proof
    request: length, msgpack            →
                                        ←    data: count, nbytes, [checksums], bytes of the blocks; any number of these
                                        ←    end: status

A request that names another way (`via`) is answered with a place instead of data: address, length, what that way has to
know; or, to `CHECK`, with nothing but the end. A client may send its next request after an end. Numbers are
little-endian. Every length is checked against what can be right before memory is taken for it.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum

import msgpack

from schemas.messages import BlockRef

MAGIC = b"HRKV"
VERSION = 1
NONCE_NBYTES = 16
PROOF_NBYTES = 32
MAX_BLOCKS = 4096  # of a request
MAX_REQUEST_NBYTES = 128 << 10
MAX_TEXT = 512
CHUNK_NBYTES = 4 << 20  # of blocks that follow one another, in one answer

_HELLO = struct.Struct(f"<4sHH{NONCE_NBYTES}s")
_REQUEST = struct.Struct("<4sI")
_HEAD = struct.Struct("<BBHIQ")
HELLO_NBYTES, REQUEST_NBYTES, HEAD_NBYTES = _HELLO.size, _REQUEST.size, _HEAD.size
SUM_NBYTES = 8
_DATA, _END, _PLACE = 2, 3, 4
MAX_PLACE_NBYTES = 1 << 20
NIXL, CHECK = "nixl", "check"  # ways that a request may name


class Status(IntEnum):
    """How an answer ended."""

    OK = 0
    UNKNOWN = 1  # nobody here lends anything under this ticket (any more)
    STALE = 2  # another pool, or blocks that are not lent under this ticket and generation
    LAPSED = 3  # the lease ended meanwhile: what came before must not be used
    GONE = 4  # the pool is not there
    BAD = 5  # a request that makes no sense


class Malformed(Exception):
    """Raised when bytes are not what the protocol says."""


@dataclass(frozen=True, slots=True)
class Request:
    """Blocks that a client asks for; with `sums` it has no checksums of them and wants the source's."""

    ticket: str
    epoch: str
    layout: str
    block_nbytes: int
    sums: bool
    indices: list[int]
    generations: list[int]
    via: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """What follows: `count` blocks, or with a status the end."""

    status: Status | None
    count: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a pool lies in its server's memory, what a way has to know of it, and checksums if they were asked for."""

    address: int = 0
    metadata: bytes = b""
    sums: tuple[int, ...] = ()


def hello(nonce: bytes) -> bytes:
    """Return a greeting."""
    return _HELLO.pack(MAGIC, VERSION, 0, nonce)


def parse_hello(data: bytes) -> bytes:
    """Return the nonce of a greeting.

    Raises:
        Malformed: if it is none, or of another version.
    """
    magic, version, _, nonce = _HELLO.unpack(data)
    if magic != MAGIC:
        raise Malformed("no greeting of this protocol")
    if version != VERSION:
        raise Malformed(f"version {version}, {VERSION} expected")
    return bytes(nonce)


def proof(key: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what only a holder of the key can say to these two nonces, for one of the two roles."""
    return hmac.new(key, role + client_nonce + server_nonce, hashlib.sha256).digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(one, other)


def request(
    ticket: str, epoch: str, layout: str, block_nbytes: int, blocks: list[BlockRef], *, sums: bool, via: str = ""
) -> bytes:
    """Return a request as bytes; `via` is empty for data on this connection.

    Raises:
        ValueError: if it is for more than `MAX_BLOCKS` blocks, or a text in it is too long.
    """
    if len(blocks) > MAX_BLOCKS or max(map(len, (ticket, epoch, layout))) > MAX_TEXT:
        raise ValueError("a request that is too large")
    indices = _little(array.array("I", [b.index for b in blocks]))
    generations = _little(array.array("Q", [b.generation for b in blocks]))
    more = [via] if via else []
    body: bytes = msgpack.packb([ticket, epoch, layout, block_nbytes, sums, indices, generations, *more])
    return _REQUEST.pack(MAGIC, len(body)) + body


def request_length(data: bytes) -> int:
    """Return how many bytes of a request follow its first `REQUEST_NBYTES`.

    Raises:
        Malformed: if it is no request, or too long.
    """
    magic, length = _REQUEST.unpack(data)
    if magic != MAGIC or not 0 < length <= MAX_REQUEST_NBYTES:
        raise Malformed("no request of this protocol")
    return int(length)


def parse_request(body: bytes) -> Request:
    """Undo `request`.

    Raises:
        Malformed: if it is not one.
    """
    try:
        ticket, epoch, layout, block_nbytes, sums, indices, generations, *more = msgpack.unpackb(body)
        if more not in ([], [NIXL], [CHECK]):
            raise ValueError("a way that is not known")
        texts = all(isinstance(text, str) and len(text) <= MAX_TEXT for text in (ticket, epoch, layout))
        if not (texts and isinstance(block_nbytes, int) and isinstance(sums, bool)):
            raise ValueError("fields of other types")
        at, of = _numbers("I", indices), _numbers("Q", generations)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as exc:
        raise Malformed(f"no request of this protocol: {exc}") from exc
    if not 0 < len(at) == len(of) <= MAX_BLOCKS:
        raise Malformed(f"a request for {len(at)} blocks of {len(of)} generations")
    return Request(ticket, epoch, layout, block_nbytes, sums, at, of, *more)


def data_head(count: int, nbytes: int) -> bytes:
    """Return what stands before the bytes of `count` blocks."""
    return _HEAD.pack(_DATA, 0, 0, count, nbytes)


def end_head(status: Status) -> bytes:
    """Return the end of an answer."""
    return _HEAD.pack(_END, int(status), 0, 0, 0)


def place_head(address: int, length: int) -> bytes:
    """Return what stands before the `length` bytes that a way has to know of the pool at an address."""
    return _HEAD.pack(_PLACE, 0, 0, length, address)


def parse_place(data: bytes) -> Head:
    """Read the answer to a request that names a way: an end, or the length (`count`) and address (`nbytes`) of a place.

    Raises:
        Malformed: if it does not fit.
    """
    kind, status, _, length, address = _HEAD.unpack(data)
    if kind == _END and status in set(Status):
        return Head(Status(status))
    if kind != _PLACE or not 0 < length <= MAX_PLACE_NBYTES:
        raise Malformed("no answer of this protocol")
    return Head(None, length, address)


def parse_head(data: bytes, *, block_nbytes: int, left: int) -> Head:
    """Read what comes next, when `left` blocks are still to come.

    Raises:
        Malformed: if it does not fit.
    """
    kind, status, _, count, nbytes = _HEAD.unpack(data)
    if kind == _END and status in set(Status):
        return Head(Status(status))
    if kind != _DATA or not 0 < count <= left or nbytes != count * block_nbytes:
        raise Malformed("no answer of this protocol")
    return Head(None, count, nbytes)


def sums_bytes(sums: list[int]) -> bytes:
    """Return checksums as bytes."""
    return _little(array.array("Q", sums))


def parse_sums(data: bytes) -> list[int]:
    """Undo `sums_bytes`."""
    return _numbers("Q", data)


def _little(numbers: array.array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(code: str, data: object) -> list[int]:
    if not isinstance(data, bytes):
        raise ValueError("numbers that are no bytes")
    numbers: array.array[int] = array.array(code)
    numbers.frombytes(data)  # ValueError: a length that is not whole
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
