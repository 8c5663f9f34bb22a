"""Blocks between hosts through NIXL (an optional extra), where its UCX finds something faster than TCP.

What may be had, and that a lease still holds, is asked over the TCP transport's connection: it answers with the address
of the pool and what NIXL has to know of its process. Then the receiver reads from there, into memory of its own, asks
once more whether the lease holds, and copies and verifies. Its own memory, because nothing says when a read that was
given up writes its last byte: such memory is not used again. A host that serves by TCP alone is fetched from by TCP.

A registered pool can be read as a whole by whoever was given its address: NIXL knows no blocks. So it is for hosts that
trust each other with all of what they store.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvstore.errors import KvError, PeerFailed, TransferAborted, TransferCorrupt
from kvstore.handoff import Memory, checksum
from kvstore.shm import AttachedPool
from kvstore.transport import protocol as p
from kvstore.transport.base import PeerAddress, Wanted, check, runs
from kvstore.transport.tcp_client import TcpPeer, TcpTransport
from schemas.messages import BlockRef

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
BOUNCE_NBYTES = 16 << 20
POLL_S = 0.0002
MAX_REGISTERED = 16  # pools; the oldest is let go


def installed() -> str:
    """Return the name of the module that is installed; empty if there is none."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), "")


class NixlAgent:
    """NIXL in this process; made at the first use, in the thread that needs it. Callable from any thread."""

    def __init__(self, name: str) -> None:
        """Load nothing yet; `name` must be unique among the hosts."""
        self._name = name
        self._lock = threading.Lock()
        self._made: Any = None
        self._pools: dict[int, tuple[AttachedPool, Any]] = {}
        self._remote: dict[bytes, str] = {}

    def _agent(self) -> Any:
        if self._made is None:
            api = importlib.import_module(f"{installed() or 'nixl'}._api")
            self._made = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
        return self._made

    def warm_up(self) -> None:
        """Load and start NIXL now: it takes a second or two, which no fetch has to spare.

        Raises:
            Exception: whatever NIXL raises if it cannot start here.
        """
        with self._lock:
            self._agent()

    def place(self, memory: AttachedPool) -> tuple[int, bytes]:
        """Return the address of a pool that is served, and what a peer must know of this process."""
        view = memory.view()
        address = _address(view)
        with self._lock:
            agent = self._agent()
            if address not in self._pools:
                self._pools[address] = memory, agent.register_memory([(address, len(view), 0, "")], "DRAM")
                while len(self._pools) > MAX_REGISTERED:
                    _, registered = self._pools.pop(next(iter(self._pools)))
                    agent.deregister_memory(registered)
            return address, bytes(agent.get_agent_metadata())

    def register(self, address: int, nbytes: int) -> None:
        """Make memory of this process known, for as long as the process lives."""
        with self._lock:
            self._agent().register_memory([(address, nbytes, 0, "")], "DRAM")

    def read(
        self,
        metadata: bytes,
        pieces: Sequence[tuple[int, int, int]],
        going: Callable[[], None],
        pause: Callable[[], None],
    ) -> None:
        """Read (address there, address here, bytes) pieces from a peer; `going` raises to give up.

        Raises:
            OSError: if NIXL says that it failed.
        """
        with self._lock:
            agent = self._agent()
            name = self._remote.get(metadata)
            if name is None:
                name = self._remote[metadata] = agent.add_remote_agent(metadata)
                while len(self._remote) > MAX_REGISTERED:
                    agent.remove_remote_agent(self._remote.pop(next(iter(self._remote))))
            here = agent.get_xfer_descs([(to, size, 0) for _, to, size in pieces], "DRAM")
            there = agent.get_xfer_descs([(of, size, 0) for of, _, size in pieces], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, name, b"")
            state = agent.transfer(handle)
        try:
            while state not in ("DONE", "ERR"):
                going()
                pause()
                with self._lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with self._lock:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError("the read failed")


class NixlTransport:
    """Opens peers that are read from through NIXL, and by TCP where they serve by that alone."""

    def __init__(self, tcp: TcpTransport, agent: NixlAgent) -> None:
        """Over a TCP transport, which carries the questions."""
        self.tcp, self.agent = tcp, agent

    def open(self, address: PeerAddress) -> NixlPeer:
        """Return the peer at an address; nothing is sent before its first fetch."""
        return NixlPeer(self, self.tcp.open(address), address)

    def close(self) -> None:
        """End the threads of the TCP transport."""
        self.tcp.close()


class NixlPeer:
    """One other host; one fetch at a time, since they share memory to read into."""

    def __init__(self, transport: NixlTransport, tcp: TcpPeer, address: PeerAddress) -> None:
        """Nothing is sent yet."""
        self._transport, self._tcp, self._address = transport, tcp, address
        self._lock = threading.Lock()
        self._pause = threading.Event()  # never set: its wait is a pause
        self._bounce: mmap.mmap | None = None
        self._abandoned: list[mmap.mmap] = []  # a read may still write there
        self.plain = False  # it serves by TCP alone

    def close(self) -> None:
        """Close the connections."""
        self._tcp.close()

    def fetch(
        self,
        wanted: Wanted,
        into: Memory,
        refs: Sequence[BlockRef],
        *,
        should_stop: Callable[[], bool],
        deadline: float,
    ) -> list[int]:
        """See `kvstore.transport.base.Peer`."""
        check(wanted, into, refs)
        now, size = self._transport.tcp.now, wanted.block_nbytes
        each = min(p.MAX_BLOCKS, BOUNCE_NBYTES // size)
        if self.plain or each == 0 or not refs:
            return self._tcp.fetch(wanted, into, refs, should_stop=should_stop, deadline=deadline)
        if not self._lock.acquire(timeout=max(0.0, deadline - now())):
            raise PeerFailed(self._address.address, "slow", "another fetch from it goes on")
        sums: list[int] = []

        def going() -> None:
            if should_stop():
                raise TransferAborted(len(sums), len(refs))
            if now() > deadline:
                raise PeerFailed(self._address.address, "slow")

        try:
            for at in range(0, len(refs), each):
                some = replace(wanted, blocks=wanted.blocks[at : at + each], expected=wanted.expected[at : at + each])
                sums += self._some(some, into, refs[at : at + each], at, going, deadline)
        except KvError as exc:
            if not isinstance(exc, PeerFailed) or exc.why != "bad" or sums:
                exc.arrived = [*sums, *[0] * (len(refs) - len(sums))] if sums else ()
                raise
            self.plain = True
        finally:
            self._lock.release()
        if self.plain:
            return self._tcp.fetch(wanted, into, refs, should_stop=should_stop, deadline=deadline)
        return sums

    def _some(
        self,
        wanted: Wanted,
        into: Memory,
        refs: Sequence[BlockRef],
        at: int,
        going: Callable[[], None],
        deadline: float,
    ) -> list[int]:
        going()
        placed = self._tcp.ask(wanted, p.NIXL, deadline)
        size, sums = wanted.block_nbytes, list(wanted.expected or placed.sums)
        bounce = self._memory()
        here, indices = _address(memoryview(bounce)), [ref.index for ref in wanted.blocks]
        pieces = [
            (placed.address + indices[first] * size, here + first * size, count * size)
            for first, count in runs(indices, len(indices))
        ]
        try:
            self._transport.agent.read(placed.metadata, pieces, going, lambda: self._wait())
        except BaseException as exc:
            self._abandoned.append(bounce)
            self._bounce = None
            if isinstance(exc, (TransferAborted, PeerFailed)):
                raise
            raise PeerFailed(self._address.address, "cut", str(exc)) from exc
        self._tcp.ask(wanted, p.CHECK, deadline)
        view, data = into.view(), memoryview(bounce)
        for i, ref in enumerate(refs):
            place = view[ref.index * size : (ref.index + 1) * size]
            place[:] = data[i * size : (i + 1) * size]
            found = checksum(place)
            if found != sums[i]:
                raise TransferCorrupt(at + i, sums[i], found)
        return sums

    def _wait(self) -> None:
        self._pause.wait(POLL_S)

    def _memory(self) -> mmap.mmap:
        if self._bounce is None:
            if len(self._abandoned) >= 4:
                raise PeerFailed(self._address.address, "cut", "reads from it do not end")
            self._bounce = mmap.mmap(-1, BOUNCE_NBYTES)
            self._transport.agent.register(_address(memoryview(self._bounce)), BOUNCE_NBYTES)
        return self._bounce


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
