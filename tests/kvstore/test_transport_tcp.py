"""Blocks over real sockets: what arrives is right, and whatever goes wrong ends the fetch and nothing else."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transport_cases import KEY, TICKET, Rogue, Sides, nonce

import kvstore.transport.tcp_client as tcp_client
import kvstore.transport.tcp_server as tcp_server
from kvstore.errors import KvError, LayoutMismatch, PeerFailed, TransferAborted, TransferCorrupt
from kvstore.transport import protocol as p
from kvstore.transport.base import Wanted, runs
from kvstore.transport.grants import Grants
from kvstore.transport.tcp_server import TcpServer
from schemas.messages import BlockRef


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    """Two hosts' pools."""
    made = Sides(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rogue() -> Iterator[Callable[..., Rogue]]:
    """Makes misbehaving servers, and ends them."""
    made: list[Rogue] = []

    def make(act: Callable[[socket.socket, p.Request], None], **options: bytes) -> Rogue:
        made.append(Rogue(act, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def count(sides: Sides, name: str) -> float:
    """A counter of the server."""
    return sides.server.statistics()[name]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_arrive_whole_and_nothing_else_changes(sides: Sides, seed: int, known: bool) -> None:
    """Any choice of blocks in any order, with checksums that are known or that the source tells."""
    draw = random.Random(seed)
    number = draw.randrange(1, 40)
    from_, to = draw.sample(sides.from_, number), draw.sample(sides.to, number)
    sides.give()

    sums = sides.fetch(from_, to, known=known)

    assert sums == sides.sums(from_)
    filled = {t.index: f for f, t in zip(from_, to, strict=True)}
    for ref in sides.to:
        wanted = sides.block(sides.source, filled[ref.index]) if ref.index in filled else bytes(4096)
        assert sides.block(sides.dest, ref) == wanted


def test_a_large_fetch_goes_over_several_connections_which_serve_the_next_one_too(tmp_path: Path) -> None:
    """8 MB in four parts; neighbouring blocks travel in one piece of four megabytes at most."""
    sides = Sides(tmp_path, blocks=128, nbytes=1 << 16)
    try:
        sides.give()
        assert sides.fetch() == sides.sums(sides.from_) == sides.fetch()
        assert sides.dest.view() == sides.source.view()
        assert count(sides, "connections_total") == 4 and count(sides, "requests_total") == 8
        assert count(sides, "bytes_total") == 2 * len(sides.dest.view())
    finally:
        sides.close()


def test_a_fetch_of_more_blocks_than_a_request_may_name_is_divided(tmp_path: Path) -> None:
    """However small they are."""
    sides = Sides(tmp_path, blocks=p.MAX_BLOCKS + 5, nbytes=16)
    try:
        sides.give()
        assert sides.fetch() == sides.sums(sides.from_)
        assert count(sides, "requests_total") == 2
    finally:
        sides.close()


def test_neighbours_are_joined() -> None:
    """Up to the longest piece that is allowed."""
    assert runs([3, 4, 5, 9, 10, 2], 10) == [(0, 3), (3, 2), (5, 1)]
    assert runs([0, 1, 2, 3, 4], 2) == [(0, 2), (2, 2), (4, 1)]
    assert runs([], 2) == []


def test_nothing_is_served_without_a_grant(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket that nobody has told of, or one that was taken back."""
    monkeypatch.setattr(tcp_server, "GRANT_WAIT_S", 0.01)
    with pytest.raises(PeerFailed) as failed:
        sides.fetch()
    assert failed.value.why == "unknown"

    sides.give()
    sides.grants.revoke(TICKET)
    with pytest.raises(PeerFailed, match="unknown"):
        sides.fetch()
    assert bytes(sides.dest.view()) == bytes(len(sides.dest.view()))


def test_a_grant_that_comes_a_moment_later_is_waited_for(sides: Sides) -> None:
    """The word of a lease may be slower than its reader."""
    threading.Timer(0.05, sides.give).start()

    assert sides.fetch() == sides.sums(sides.from_)


def test_a_stale_generation_another_block_and_another_pool_are_refused(sides: Sides) -> None:
    """The ticket is good for what was lent under it and for nothing else."""
    sides.give(refs=sides.from_[:8])
    later = [BlockRef(index=ref.index, generation=ref.generation + 1) for ref in sides.from_[:8]]
    for refs in (later, sides.from_[:9]):
        with pytest.raises(PeerFailed, match="stale"):
            sides.fetch(refs, sides.to[: len(refs)])

    known = sides.wanted(sides.from_[:8])
    other = Wanted(TICKET, "another", known.layout, known.block_nbytes, known.blocks, known.expected)
    with pytest.raises(PeerFailed, match="stale"):
        sides.peer.fetch(other, sides.dest, sides.to[:8], should_stop=lambda: False, deadline=time.monotonic() + 5)
    assert sides.fetch(sides.from_[:8], sides.to[:8]) == sides.sums(sides.from_[:8])


def test_a_lease_that_is_over_before_or_while_it_is_read_is_a_failure(tmp_path: Path) -> None:
    """Also at the last moment, when all bytes have been sent."""
    sides = Sides(tmp_path, connections=1)
    try:
        sides.give(until=10.0)
        sides.now = 10.0
        with pytest.raises(PeerFailed, match="lapsed"):
            sides.fetch()

        class Lapsing(Grants):
            looks = 0

            def holds(self, ticket: str, grant: object) -> bool:
                self.looks -= 1
                return self.looks >= 0

        lapsing = Lapsing(lambda: 0.0)
        lapsing.give(TICKET, sides.source.handle(), sides.from_, 1.0)
        sides.server._grants = lapsing
        alternate = sides.from_[::2]
        for looks in range(2 * len(alternate) + 1):  # one before each block, one after it, one at the end
            lapsing.looks = looks
            with pytest.raises(PeerFailed, match="lapsed|cut"):
                sides.fetch(alternate, sides.to[::2])
        lapsing.looks = 2 * len(alternate) + 1
        assert sides.fetch(alternate, sides.to[::2]) == sides.sums(alternate)
    finally:
        sides.close()


def test_a_pool_that_has_gone_is_a_failure(sides: Sides) -> None:
    """Its file was removed."""
    sides.give()
    sides.source.close()

    with pytest.raises(PeerFailed, match="gone"):
        sides.peer.fetch(
            Wanted(TICKET, "e1", "l", 4096, sides.from_), sides.dest, sides.to,
            should_stop=lambda: False, deadline=time.monotonic() + 5,
        )  # fmt: skip


def test_a_block_that_is_not_what_was_stored_is_found(sides: Sides) -> None:
    """One bit, in the last block; nothing of the fetch counts."""
    sides.give()
    wanted = sides.wanted(sides.from_)
    sides.block(sides.source, sides.from_[-1])[7] ^= 1

    with pytest.raises(TransferCorrupt, match="block 63"):
        sides.peer.fetch(wanted, sides.dest, sides.to, should_stop=lambda: False, deadline=time.monotonic() + 5)


def test_a_stranger_gets_a_greeting_and_nothing_else(sides: Sides) -> None:
    """With another key, with noise, with a request before its proof, or another version."""
    sides.give()
    with pytest.raises(PeerFailed, match="cut"):
        sides.fetch(peer=sides.open(key=b"x" * 32))

    ask = p.request(TICKET, "e1", "l", 4096, sides.from_, sums=True)
    version = bytearray(p.hello(nonce()))
    version[4] ^= 7
    for said in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", bytes(200), p.hello(nonce()) + ask, bytes(version)):
        with socket.create_connection(("127.0.0.1", sides.port), 5.0) as stranger:
            stranger.sendall(said)
            heard = bytearray()
            try:
                while data := stranger.recv(4096):
                    heard += data
            except ConnectionResetError:
                pass
            assert len(heard) <= p.HELLO_NBYTES
    assert count(sides, "bytes_total") == 0 and count(sides, "strangers_total") == 5
    assert sides.fetch() == sides.sums(sides.from_)


def test_a_server_that_does_not_know_the_key_is_not_believed(sides: Sides, rogue: Callable[..., Rogue]) -> None:
    """Whoever sits at that address."""
    imposter = rogue(lambda connection, request: None, key=b"x" * 32)

    with pytest.raises(PeerFailed) as failed:
        sides.fetch(peer=sides.open(port=imposter.port))
    assert failed.value.why == "stranger"


def after_greeting(sides: Sides, said: bytes) -> None:
    """Say something to the server as one who knows the key, and wait for its end."""
    with socket.create_connection(("127.0.0.1", sides.port), 5.0) as connection:
        mine = nonce()
        connection.sendall(p.hello(mine))
        theirs = p.parse_hello(connection.recv(p.HELLO_NBYTES, socket.MSG_WAITALL))
        connection.sendall(p.proof(KEY, b"client", mine, theirs))
        assert len(connection.recv(p.PROOF_NBYTES, socket.MSG_WAITALL)) == p.PROOF_NBYTES
        connection.sendall(said)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass


def test_a_request_that_makes_no_sense_costs_its_connection_and_no_memory(sides: Sides) -> None:
    """A length of four gigabytes, noise, fields of other types."""
    good = p.request(TICKET, "e1", "l", 4096, sides.from_, sums=True)
    length = p.REQUEST_NBYTES
    for said in (
        p._REQUEST.pack(p.MAGIC, 0xFFFFFFFF) + bytes(100),
        b"NOPE" + good[4:],
        good[:length] + bytes(len(good) - length),
        p._REQUEST.pack(p.MAGIC, 3) + b"\x93\x01\x02",
    ):
        after_greeting(sides, said)
    assert count(sides, "strangers_total") == 4 and count(sides, "requests_total") <= 4
    sides.give()
    assert sides.fetch() == sides.sums(sides.from_)


def some_blocks(request: p.Request, number: int) -> bytes:
    """A good beginning of an answer, with bytes that nobody has stored."""
    return p.data_head(number, number * request.block_nbytes) + p.sums_bytes([0] * number if request.sums else [])


CUT = {
    "at once": lambda c, r: None,
    "in a head": lambda c, r: c.sendall(some_blocks(r, 4)[:7]),
    "in a block": lambda c, r: c.sendall(some_blocks(r, 4) + bytes(100)),
}
GARBAGE = {
    "noise": lambda c, r: c.sendall(bytes(range(256)) * 20),
    "more blocks than asked for": lambda c, r: c.sendall(p.data_head(99, 99 * r.block_nbytes)),
    "a length that does not fit": lambda c, r: c.sendall(p.data_head(1, 1 << 40)),
    "no block": lambda c, r: c.sendall(p.data_head(0, 0)),
    "an end too early": lambda c, r: c.sendall(p.end_head(p.Status.OK)),
    "a status that does not exist": lambda c, r: c.sendall(p._HEAD.pack(3, 77, 0, 0, 0)),
}


@pytest.mark.parametrize("how", CUT)
def test_a_connection_that_ends_anywhere_is_a_failure(sides: Sides, rogue: Callable[..., Rogue], how: str) -> None:
    """Before, between and in the middle of blocks."""
    with pytest.raises(PeerFailed) as failed:
        sides.fetch(peer=sides.open(port=rogue(CUT[how]).port))
    assert failed.value.why == "cut"


@pytest.mark.parametrize("how", GARBAGE)
def test_an_answer_that_makes_no_sense_is_a_failure(sides: Sides, rogue: Callable[..., Rogue], how: str) -> None:
    """Sizes are checked before anything is written."""
    with pytest.raises(PeerFailed) as failed:
        sides.fetch(peer=sides.open(port=rogue(GARBAGE[how]).port))
    assert failed.value.why == "garbage"
    assert bytes(sides.dest.view()) == bytes(len(sides.dest.view()))


def test_of_a_fetch_that_fails_the_whole_blocks_are_told(sides: Sides, rogue: Callable[..., Rogue]) -> None:
    """Three and a half blocks, then the connection ends: three lie there, verified."""

    def act(connection: socket.socket, request: p.Request) -> None:
        sent = b"".join(bytes(sides.block(sides.source, ref)) for ref in sides.from_[:4])
        connection.sendall(p.data_head(4, len(sent)) + sent[: 3 * 4096 + 2048])

    peer = sides.open(port=rogue(act).port)
    with pytest.raises(PeerFailed, match="cut") as failed:
        sides.fetch(sides.from_[:8], sides.to[:8], peer=peer)
    peer.close()

    assert list(failed.value.arrived) == [*sides.sums(sides.from_[:3]), 0, 0, 0, 0, 0]
    for from_, to in zip(sides.from_[:3], sides.to[:3], strict=True):
        assert sides.block(sides.dest, to) == sides.block(sides.source, from_)


def test_of_several_connections_what_the_others_brought_is_told(tmp_path: Path) -> None:
    """One block is damaged: the blocks of its part that came before it, and those of other parts."""
    sides = Sides(tmp_path, blocks=128, nbytes=1 << 16)
    try:
        sides.give()
        wanted = sides.wanted(sides.from_)
        sides.block(sides.source, sides.from_[40])[7] ^= 1
        with pytest.raises(TransferCorrupt) as failed:
            sides.peer.fetch(wanted, sides.dest, sides.to, should_stop=lambda: False, deadline=time.monotonic() + 30)
        told = failed.value.arrived
        assert len(told) == 128 and told[40] == 0 and any(told)
        assert all(each in (0, known) for each, known in zip(told, wanted.expected, strict=True))
    finally:
        sides.close()


def test_wrong_bytes_are_found_whatever_the_source_says_of_them(sides: Sides, rogue: Callable[..., Rogue]) -> None:
    """By the checksums that the owner of the blocks has told."""
    lying = rogue(lambda c, r: c.sendall(some_blocks(r, 64) + bytes(64 * 4096) + p.end_head(p.Status.OK)))
    for known in (True, False):
        with pytest.raises(TransferCorrupt):
            sides.fetch(peer=sides.open(port=lying.port), known=known)


@pytest.mark.parametrize("by", ["silence", "deadline", "trickle"])
def test_a_slow_source_is_given_up(
    sides: Sides, rogue: Callable[..., Rogue], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """One that says nothing for a while, or is not done by the deadline, however busy it seems."""
    monkeypatch.setattr(tcp_client, "STALL_S", 0.1 if by == "silence" else 60.0)
    pauses = 0.0 if by != "trickle" else 0.01

    def act(connection: socket.socket, request: p.Request) -> None:
        connection.sendall(some_blocks(request, 64))
        while not slow.ended.wait(pauses or 5.0):
            connection.sendall(b"x")

    slow = rogue(act)
    try:
        with pytest.raises(PeerFailed) as failed:
            sides.fetch(peer=sides.open(port=slow.port), limit_s=60.0 if by == "silence" else 0.1)
    finally:
        slow.ended.set()
    assert failed.value.why == "slow"


def test_nobody_at_an_address_is_a_failure(sides: Sides) -> None:
    """Nor is one that is none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    with pytest.raises(PeerFailed) as failed:
        sides.fetch(peer=sides.open(port=port))
    assert failed.value.why == "unreachable"


def test_an_abort_ends_all_parts_and_nothing_is_written_afterwards(tmp_path: Path, rogue: Callable[..., Rogue]) -> None:
    """The source goes on sending; the destination does not change any more once the fetch has ended."""
    sides = Sides(tmp_path, blocks=256, nbytes=1 << 16)
    asked: list[int] = []

    def act(connection: socket.socket, request: p.Request) -> None:
        number = len(request.indices)
        connection.sendall(p.data_head(number, number * request.block_nbytes))
        while not endless.ended.is_set():
            connection.sendall(bytes([7]) * 65536)

    endless = rogue(act)
    try:
        with pytest.raises((TransferAborted, TransferCorrupt)):
            sides.fetch(
                peer=sides.open(port=endless.port), should_stop=lambda: bool(asked.append(1)) or len(asked) > 20
            )
        before = bytes(sides.dest.view())
        assert not endless.ended.wait(0.1)
        assert bytes(sides.dest.view()) == before
    finally:
        endless.ended.set()
        sides.close()


def test_pools_of_another_shape_and_places_outside_are_refused_before_anything_is_asked(sides: Sides) -> None:
    """As in copies on one host."""
    good = sides.wanted(sides.from_[:2])
    stop = {"should_stop": lambda: False, "deadline": time.monotonic() + 5}
    for layout, nbytes in (("x", 4096), ("l", 512)):
        bad = Wanted(TICKET, "e1", layout, nbytes, good.blocks)
        with pytest.raises(LayoutMismatch):
            sides.peer.fetch(bad, sides.dest, sides.to[:2], **stop)  # type: ignore[arg-type]
    for to in (sides.to[:1], [BlockRef(index=-1, generation=1)] * 2, [BlockRef(index=64, generation=1)] * 2):
        with pytest.raises(ValueError):
            sides.peer.fetch(good, sides.dest, to, **stop)  # type: ignore[arg-type]
    assert count(sides, "connections_total") == 0


def test_a_server_that_starts_anew_is_connected_to_anew(sides: Sides) -> None:
    """Idle connections to the old one are not used."""
    sides.give()
    sides.fetch()
    sides.server.stop()
    sides.server = TcpServer(sides.grants, KEY, nonce=nonce, host="127.0.0.1", port=sides.port)
    sides.server.start()

    assert sides.fetch() == sides.sums(sides.from_)


def test_more_connections_than_allowed_are_turned_away(sides: Sides) -> None:
    """And those that greet and then say nothing do not stay."""
    sides.server._max = 1
    with socket.create_connection(("127.0.0.1", sides.port), 5.0) as first:
        end = time.monotonic() + 5.0
        while count(sides, "open") < 1 and time.monotonic() < end:
            time.sleep(0.005)
        with socket.create_connection(("127.0.0.1", sides.port), 5.0) as second:
            assert second.recv(10) == b""
        del first
    assert count(sides, "turned_away_total") == 1


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that served it is free again."""
    monkeypatch.setattr(tcp_server, "STALL_S", 0.5)
    sides = Sides(tmp_path, blocks=512, nbytes=1 << 16)
    try:
        sides.give()
        with socket.create_connection(("127.0.0.1", sides.port), 5.0) as connection:
            mine = nonce()
            connection.sendall(p.hello(mine))
            theirs = p.parse_hello(connection.recv(p.HELLO_NBYTES, socket.MSG_WAITALL))
            connection.sendall(p.proof(KEY, b"client", mine, theirs))
            connection.recv(p.PROOF_NBYTES, socket.MSG_WAITALL)
            connection.sendall(p.request(TICKET, "e1", "l", 1 << 16, sides.from_, sums=False))
            end = time.monotonic() + 20.0
            while count(sides, "requests_total") < 1 or count(sides, "open") > 0:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert count(sides, "bytes_total") < len(sides.source.view())
    finally:
        sides.close()


def test_the_table_of_grants_has_an_end() -> None:
    """What does not fit is not served; what is over makes room; a pool's grants go with it."""
    now = [0.0]
    grants = Grants(lambda: now[0], capacity=2)
    pool = BlockRef(index=0, generation=1)
    from schemas.messages import PoolHandle

    handle = PoolHandle(path="p", nbytes=1, block_nbytes=1, layout="l", epoch="e", host="h")
    assert grants.give("a", handle, [pool], 1.0) and grants.give("b", handle, [pool], 9.0)
    assert not grants.give("c", handle, [pool], 9.0) and grants.give("b", handle, [pool], 8.0)
    now[0] = 2.0
    grants.expire()
    assert grants.give("c", handle, [pool], 9.0) and len(grants) == 2 and grants.refused == 1
    grants.drop_pool("e")
    assert len(grants) == 0 and grants.wait("c", 0.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_fault_anywhere_in_the_bytes_is_taken_for_an_answer(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay flips, drops, repeats or cuts bytes of a real answer at random places: right bytes, or an error."""
    monkeypatch.setattr(tcp_client, "STALL_S", 0.2)
    draw, sides, wrong = random.Random(seed), Sides(tmp_path, connections=1), 0
    sides.give()
    try:
        for _ in range(40):
            sides.dest.view()[:] = bytes(len(sides.dest.view()))
            known = draw.random() < 0.5
            with relay(sides.port, draw) as port:
                try:
                    sums = sides.fetch(peer=sides.open(port=port), known=known, limit_s=5.0)
                except KvError:
                    wrong += 1
                    continue
            assert sums == sides.sums(sides.from_) and sides.dest.view() == sides.source.view()
        assert wrong >= 20
    finally:
        sides.close()


class relay:
    """Between client and server, damaging one place of what the server says, and cutting the line soon after."""

    def __init__(self, port: int, draw: random.Random) -> None:
        self._port, self._draw = port, draw
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            client.settimeout(0.05)
            server.settimeout(0.05)
            passed, at, how = 0, self._draw.randrange(p.HELLO_NBYTES + 40, 64 * 4096), self._draw.randrange(4)
            struck = False
            while True:
                try:
                    if data := client.recv(1 << 16):
                        server.sendall(data)
                    else:
                        return
                except TimeoutError:
                    pass
                except OSError:
                    return
                try:
                    data = server.recv(1 << 16)
                except TimeoutError:
                    if struck:
                        return  # it is silent because the client has what there is, or waits for what was dropped
                    continue
                if not data:
                    return
                if passed <= at < passed + len(data) and not struck:
                    struck, here = True, at - passed
                    match how:
                        case 0:
                            data = data[:here] + bytes([data[here] ^ 1 << self._draw.randrange(8)]) + data[here + 1 :]
                        case 1:
                            data = data[:here] + data[here + 1 :]
                        case 2:
                            data = data[: here + 1] + data[here:]
                        case _:
                            client.sendall(data[:here])
                            return
                passed += len(data)
                try:
                    client.sendall(data)
                except OSError:
                    return


def test_a_grant_that_is_renewed_is_the_same_one_and_another_is_not(sides: Sides) -> None:
    """A repeated job renews it while it is read; other blocks under its ticket end it for its reader."""
    sides.give(until=1.0)
    grant = sides.grants.wait(TICKET, 0.0)
    assert grant is not None
    sides.now = 0.9
    sides.give(until=2.0)
    sides.now = 1.5
    assert sides.grants.holds(TICKET, grant)

    sides.give(until=2.0, refs=sides.from_[:3])

    assert not sides.grants.holds(TICKET, grant)
