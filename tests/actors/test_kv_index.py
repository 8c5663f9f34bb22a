"""The copy that engines keep of what the store holds: joining, losses, deaths, and what it spares and must not cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, fleet

from actors.kv_events import BLOCKS_PER_PAGE, CHANGES_PER_TURN, MAX_DUMPS, Announcer
from actors.kv_index import ASK_AGAIN_S, EXPECTED_S, MAX_EXPECTED, KvIndex
from kvstore.block import chain_hashes, root_hash
from kvstore.index import Dump, EventLog, Op
from runtime.actor import Actor, Context
from runtime.memory_bus import Faults
from runtime.node import Node
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.codec import decode, encode
from schemas.subjects import Ref, kv_events
from tests.support.memory_system import MemorySystem

ROOT = root_hash("r")
PROMPT = "the water that turns the wheel comes down the headrace " * 6
TICK_S = 0.05


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


# --- a store and a follower by themselves -------------------------------------------------------------


class Shelf:
    """A tier without bytes: what it stores, in order, and its log."""

    def __init__(self) -> None:
        self.events = EventLog("e")
        self.stored: dict[bytes, bytes] = {}
        self.dumps = 0

    def put(self, hashes: list[bytes], parent: bytes = ROOT) -> None:
        for before, digest in zip([parent, *hashes], hashes, strict=False):
            self.stored[digest] = before
            self.events.record(Op.ADD, digest, before)

    def drop(self, digest: bytes) -> None:
        del self.stored[digest]
        self.events.record(Op.DROP, digest)

    def dump(self) -> Dump:
        self.dumps += 1
        return Dump("e", self.events.number, tuple(self.stored), tuple(self.stored.values()))


class Store(Actor):
    """A kv actor that only tells."""

    def __init__(self, context: Context, tiers: dict[str, Shelf]) -> None:
        super().__init__(context)
        self.announcer = Announcer(context, *tiers)
        for kind, shelf in tiers.items():
            self.announcer.attach(kind, shelf)

    def load(self) -> dict[str, Any]:
        return {"tiers": self.announcer.numbers()}

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        assert isinstance(message, m.KvDumpQuery)
        self.announcer.on_query(message)

    def tick(self) -> None:
        self.announcer.tick(self.clock.now())

    def statistics(self) -> dict[str, float]:
        return self.announcer.statistics()


class Follower(Actor):
    """An actor that only listens."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.index = KvIndex(context)

    async def start(self) -> None:
        await self.index.start()
        self.state = "ready"

    def receive(self, message: m.Message, sender: Ref | None) -> None:
        assert isinstance(message, m.KvDump)
        self.index.on_dump(message, sender)

    def tick(self) -> None:
        self.index.tick(self.clock.now())

    def member_down(self, ref: Ref, reason: str) -> None:
        self.index.member_down(ref)


class Pair:
    """A store and a follower on one host."""

    def __init__(self, system: MemorySystem) -> None:
        self.system = system
        self.shelf, self.second = Shelf(), Shelf()
        self.store_node = self.add_store("kv-0", {"host": self.shelf, "disk": self.second})
        node = system.node("follower-0")
        node.add("both", "0", Follower)
        self.index: KvIndex = node.actors[0].index  # type: ignore[attr-defined]

    def add_store(self, name: str, tiers: dict[str, Shelf], host: str = "host-a") -> Node:
        node = self.system.node(name, host=host)
        node.add("kv", name, lambda context: Store(context, tiers))
        return node

    @property
    def store(self) -> Ref:
        return self.store_node.refs[0]

    async def known(self, *, limit_s: float = 3.0) -> None:
        """Wait until the follower knows this store."""
        await self.system.until(lambda: self.index.complete(self.store), limit_s=limit_s)

    async def sleep(self, seconds: float) -> None:
        await self.system.clock.sleep(seconds)

    def statistics(self) -> dict[str, float]:
        return self.index.statistics()


def chain(name: int, length: int, *, parent: bytes = ROOT) -> list[bytes]:
    """Hashes of a chain of its own."""
    return chain_hashes([name] * 16 * length, root=parent)


def pair(scenario: Callable[[Pair], Awaitable[None]], *, seed: int = 0, max_payload: int = 1_048_576) -> None:
    """Run `scenario(pair)`."""

    async def main(clock: VirtualClock) -> None:
        async with MemorySystem(clock=clock, max_payload=max_payload) as system:
            made = Pair(system)
            await system.start()
            await scenario(made)

    run_virtual(main, seed=seed)


@pytest.mark.parametrize("max_payload", [1_048_576, 4096])
def test_who_joins_late_gets_everything_in_pages_that_fit_the_bus(max_payload: int) -> None:
    """Several pages, all of one moment, while the tier goes on changing; then changes within a tick."""
    before, after = chain(1, 3 * BLOCKS_PER_PAGE), chain(2, 2 * CHANGES_PER_TURN + 100)

    async def scenario(p: Pair) -> None:
        p.shelf.put(before)
        while not p.index.complete(p.store):
            p.shelf.put(chain(3 + p.shelf.events.number, 2))
            await p.sleep(0.01)
        assert p.index.prefix(p.store, before) == len(before)
        p.shelf.put(after)
        p.shelf.drop(before[-1])
        await p.sleep(2 * TICK_S)
        assert p.statistics()["events_total"] < p.shelf.events.number  # the rest comes later
        await p.sleep(2 * TICK_S)

        assert p.index.prefix(p.store, after) == len(after)
        assert p.index.prefix(p.store, before) == len(before) - 1
        assert p.statistics()["hashes"] == len(p.shelf.stored)
        assert p.statistics()["gaps_total"] == 0 and p.shelf.dumps == 1

    pair(scenario, max_payload=max_payload)


def test_a_lost_message_shows_with_the_next_one_and_is_healed() -> None:
    """Until the new dump is there the store counts as not known."""

    async def scenario(p: Pair) -> None:
        await p.known()
        p.system.broker.partition("kv-0-stream", "follower-0-stream")
        p.shelf.put(chain(1, 3))
        await p.sleep(2 * TICK_S)
        p.system.broker.heal()
        p.system.broker.partition("kv-0-control", "follower-0-control")  # no dump, no heartbeat
        p.shelf.put(chain(2, 3))
        await p.sleep(2 * TICK_S)
        assert not p.index.complete(p.store) and p.statistics()["gaps_total"] == 1
        assert p.index.prefix(p.store, chain(2, 3)) == 0

        p.system.broker.heal()
        await p.known()
        assert p.index.prefix(p.store, chain(1, 3)) == p.index.prefix(p.store, chain(2, 3)) == 3

    pair(scenario)


def test_the_loss_of_the_last_message_shows_by_a_heartbeat() -> None:
    """Nothing follows that would show the gap."""

    async def scenario(p: Pair) -> None:
        await p.known()
        p.system.broker.partition("kv-0-stream", "follower-0-stream")
        p.shelf.put(chain(1, 3))
        await p.sleep(2 * TICK_S)
        p.system.broker.heal()

        await p.system.until(lambda: p.index.prefix(p.store, chain(1, 3)) == 3, limit_s=1.5)
        assert p.statistics()["gaps_total"] == 1 and p.index.complete(p.store)

    pair(scenario)


def test_heartbeats_that_overtake_events_cause_no_dump() -> None:
    """A busy store is ahead of its events all the time."""

    async def scenario(p: Pair) -> None:
        p.system.broker.faults["kv-0-stream"] = Faults(delay_s=(0.1, 0.4))
        await p.known()
        for name in range(100):
            p.shelf.put(chain(name + 1, 3))
            await p.sleep(0.03)
        await p.sleep(0.6)

        assert p.index.complete(p.store) and p.statistics()["hashes"] == 300
        assert p.statistics()["gaps_total"] == 0 and p.shelf.dumps == 1

    pair(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_lost_the_follower_ends_up_equal(seed: int) -> None:
    """A fifth of all messages, with chains stored and dropped: at rest every prefix is the tier's."""
    chains = [chain(name, 40) for name in range(1, 30)]

    async def scenario(p: Pair) -> None:
        p.system.broker.default_faults = Faults(drop=0.2, delay_s=(0.0, 0.02))
        for hashes in chains:
            p.shelf.put(hashes)
            for digest in list(p.shelf.stored)[:: 7 + seed]:
                p.shelf.drop(digest)
            await p.sleep(0.07)
        p.system.broker.default_faults = Faults()
        await p.sleep(3.0)

        assert p.index.complete(p.store) and p.statistics()["hashes"] == len(p.shelf.stored)
        for hashes in chains:
            for start in range(0, 40, 5):
                want = next((i for i, h in enumerate(hashes[start:]) if h not in p.shelf.stored), 40 - start)
                assert p.index.prefix(p.store, hashes[start:]) == want

    pair(scenario, seed=seed)


def test_tiers_of_one_store_are_one_prefix_and_both_must_be_known() -> None:
    """Blocks 0 to 4 in memory, 5 to 9 on disk: ten; while the disk's dump is missing the store is not known."""
    hashes = chain(1, 10)

    async def scenario(p: Pair) -> None:
        p.shelf.put(hashes[:5])
        p.second.put(hashes[5:], parent=hashes[4])
        await p.known()

        assert p.index.prefix(p.store, hashes) == 10 and p.index.prefix(p.store, hashes[7:]) == 3
        assert p.statistics()["sources"] == 2
        p.index._index.lose(f"{p.store.epoch}/disk")
        assert not p.index.complete(p.store)
        await p.known()

    pair(scenario)


@pytest.mark.parametrize("kind", ["host", "remote"])
def test_a_tier_that_comes_later_is_followed_with_all_that_it_holds(kind: str) -> None:
    """It was found full: whether its kind was announced before, as empty, or not at all."""
    late, hashes = Shelf(), chain(1, 3000)
    late.put(hashes)

    async def scenario(p: Pair) -> None:
        store = p.add_store("kv-1", {"host": Shelf()})
        announcer: Announcer = store.actors[0].announcer  # type: ignore[attr-defined]
        await p.system.start(store)
        await p.system.until(lambda: p.index.complete(store.refs[0]), limit_s=3.0)
        await p.sleep(ASK_AGAIN_S)
        announcer.attach(kind, late)
        # Whoever follows its kind sees the gap at once, others learn of it from a heartbeat.
        limit_s = TICK_S if kind == "host" else 0.5
        await p.system.until(lambda: p.index.prefix(store.refs[0], hashes) == 3000, limit_s=limit_s)
        late.put(chain(2, 5))
        await p.sleep(2 * TICK_S)
        assert p.index.prefix(store.refs[0], chain(2, 5)) == 5 and p.index.complete(store.refs[0])
        assert announcer.statistics()["announced_events_total"] == 5

    pair(scenario)


@pytest.mark.parametrize("announce", [True, False])
def test_a_dead_store_is_forgotten_and_its_successor_followed(announce: bool) -> None:
    """By its exit, or by its silence; the new one is another epoch and begins empty."""

    async def scenario(p: Pair) -> None:
        p.shelf.put(chain(1, 5))
        await p.known()
        dead = p.store
        await p.system.kill(p.store_node, announce=announce)
        await p.system.until(lambda: not p.index.complete(dead), limit_s=2.0)
        assert p.index.prefix(dead, chain(1, 5)) == 0 and p.statistics()["sources"] == 0

        p.store_node = p.add_store("kv-0", {"host": Shelf()})
        await p.system.start(p.store_node)
        await p.known()
        assert p.store != dead and p.index.prefix(p.store, chain(1, 5)) == 0

    pair(scenario)


def test_a_store_that_was_silent_is_followed_anew() -> None:
    """A frozen store's blocks are not counted on; when it goes on they are known again."""

    async def scenario(p: Pair) -> None:
        p.shelf.put(chain(1, 5))
        await p.known()
        p.system.freeze(p.store_node)
        await p.system.until(lambda: not p.index.complete(p.store), limit_s=2.0)
        assert p.statistics()["sources"] == 0
        p.system.thaw(p.store_node)
        await p.known()
        assert p.index.prefix(p.store, chain(1, 5)) == 5

    pair(scenario)


def test_another_hosts_store_is_not_followed() -> None:
    """Its blocks cannot be mapped here."""

    async def scenario(p: Pair) -> None:
        far = p.add_store("kv-1", {"host": Shelf()}, host="host-b")
        await p.system.start(far)
        await p.known()
        await p.sleep(1.0)
        assert not p.index.complete(far.refs[0]) and p.statistics()["sources"] == 2

    pair(scenario)


def test_what_was_just_given_to_the_store_is_counted_on_for_a_while() -> None:
    """Until its event comes; a store that did not take it is believed in the end. Bounded."""

    async def scenario(p: Pair) -> None:
        await p.known()
        hashes = chain(1, 6)
        p.shelf.put(hashes[:2])
        await p.sleep(2 * TICK_S)
        p.index.expect(p.store, hashes[2:5])
        assert p.index.prefix(p.store, hashes) == 5
        await p.sleep(EXPECTED_S + 2 * TICK_S)
        assert p.index.prefix(p.store, hashes) == 2 and p.statistics()["expected"] == 0

        p.index.expect(p.store, chain(2, MAX_EXPECTED + 10))
        assert p.statistics()["expected"] == MAX_EXPECTED

    pair(scenario)


def test_what_is_no_event_changes_nothing() -> None:
    """Noise on the subject, changes that do not unpack, events of nobody that is followed."""

    async def scenario(p: Pair) -> None:
        p.shelf.put(chain(1, 3))
        await p.known()
        before = p.statistics()
        subject, stranger = kv_events("host-a"), Ref("kv", "x", "0" * 16)
        for payload in (
            b"noise",
            encode(m.KvEvents(tier="host", first=4, ops=b"\x07", hashes=b"x"), p.store),
            encode(m.KvEvents(tier="host", first=1, ops=b"\x01", hashes=b"x" * 32), stranger),
            encode(m.KvEvents(tier="host", first=1, ops=b"\x01", hashes=b"x" * 32)),
            encode(m.KvRelease(ticket="t"), p.store),
        ):
            p.system.outside.publish(subject, payload)
        await p.sleep(TICK_S)

        assert p.statistics() == {**before, "malformed_total": 2}
        p.shelf.put(chain(2, 3))
        await p.sleep(2 * TICK_S)
        assert p.index.prefix(p.store, chain(2, 3)) == 3 and p.statistics()["gaps_total"] == 0

    pair(scenario)


def test_a_store_keeps_few_dumps_and_starts_one_again_that_it_dropped() -> None:
    """Whoever asks for the rest of a dump that is gone gets the beginning of another."""

    async def scenario(p: Pair) -> None:
        await p.known()
        p.shelf.put(chain(1, 2 * BLOCKS_PER_PAGE))
        got: list[m.KvDump] = []
        asker = Ref("test", "asker", "1" * 16)
        await p.system.outside.subscribe(asker.subject, lambda msg: got.append(decode(msg.payload)[0]))  # type: ignore[arg-type]

        async def ask(ticket: str, start: int) -> m.KvDump:
            query = m.KvDumpQuery(ticket=ticket, tier="host", start=start, reply=asker)
            p.system.send(p.store, query, sender=asker)
            before = len(got)
            await p.system.until(lambda: len(got) > before, limit_s=1.0)
            return got[-1]

        first = await ask("t", 0)
        assert (first.start, first.total, len(first.ops)) == (0, 2 * BLOCKS_PER_PAGE, BLOCKS_PER_PAGE)
        for other in range(MAX_DUMPS):
            await ask(f"other-{other}", 0)
        p.shelf.put(chain(2, 1))
        again = await ask("t", BLOCKS_PER_PAGE)
        assert again.start == 0 and again.number == first.number + 1

        assert p.store_node.actors[0].statistics()["dumps"] == MAX_DUMPS
        await p.sleep(6.0)
        assert p.store_node.actors[0].statistics()["dumps"] == 0

    pair(scenario)


# --- in whole instances -------------------------------------------------------------------------------


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **layout: int) -> Any:
    """Run `scenario(fleet)` on an instance with engines that do everything."""

    async def main(clock: VirtualClock) -> Any:
        engines: Any = {"prefill": 0, "decode": 0, "both": 2, **layout}
        async with fleet(clock, directory, **engines) as f:
            await f.system.until(lambda: all(map(indexed, f.engines())), limit_s=3.0)
            return await scenario(f)

    return run_virtual(main, seed=seed)


def indexed(engine: Any) -> bool:
    """Whether an engine knows what the store of its host holds."""
    kv = engine.neighbour("kv")
    return kv is not None and bool(engine.prefix.index.complete(kv))


def metric(f: Fleet, name: str) -> float:
    """A counter, summed over the engines that live."""
    total = 0.0
    for engine in f.engines():
        lines = engine.context.telemetry.render().splitlines()
        total += sum(float(line.split()[-1]) for line in lines if line.startswith(f"headrace_{name}"))
    return total


def cached(stream: Stream) -> int:
    """Tokens of the prompt that were not computed."""
    assert stream.error is None and stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


def test_a_prompt_that_is_nowhere_is_not_asked_for(tmp_path: Path) -> None:
    """The store sees no lookup, and nothing is said to have failed."""

    async def scenario(f: Fleet) -> None:
        for name in "abc":
            await f.end(await f.ask(name + PROMPT, max_tokens=3))
        assert metric(f, "kv_lookups_skipped_total") == 3
        assert f.actor("kv-0").statistics()["misses_total"] == 0
        assert metric(f, "kv_lookups_failed_total") == 0

    simulate(scenario, tmp_path)


def test_without_a_whole_index_the_store_is_asked_as_before(tmp_path: Path) -> None:
    """An event was missed: until the dump that is asked for at the next tick nothing is taken for not stored."""

    async def scenario(f: Fleet) -> None:
        await f.end(await f.ask("a" + PROMPT, max_tokens=3))
        kv = f.actor("kv-0")
        await f.system.until(lambda: kv.statistics().get("stored", 0) > 0, limit_s=2.0)
        assert (metric(f, "kv_lookups_skipped_total"), kv.statistics()["misses_total"]) == (1, 0)
        for engine in f.engines():
            engine.prefix.index._index.lose(f"{kv.ref.epoch}/host")
        await f.end(await f.ask("b" + PROMPT, max_tokens=3))
        assert (metric(f, "kv_lookups_skipped_total"), kv.statistics()["misses_total"]) == (1, 20)

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_an_agents_next_turn_finds_its_last_ones_blocks_on_another_engine(seed: int, tmp_path: Path) -> None:
    """One tick after they were stored: the engine that has them in its pool is gone, and the other one loads them."""

    async def scenario(f: Fleet) -> None:
        first = await f.ask(PROMPT, max_tokens=20)
        await f.items(first, 1)
        serving = f.serving("both", first)
        await f.end(first)
        kv = f.actor("kv-0")
        whole = (len(PROMPT) - 1) // 16
        await f.system.until(lambda: kv.statistics().get("stored", 0) >= whole, limit_s=2.0)
        await f.kill(serving, again_after_s=None)
        await f.system.clock.sleep(TICK_S)

        turn = await f.ask(PROMPT + first.text + " and what comes next? Say it in a few words.", max_tokens=5)
        await f.end(turn)
        assert cached(turn) >= whole * 16
        assert metric(f, "kv_blocks_loaded_total") >= whole
        assert metric(f, "kv_lookups_skipped_total") == 0
        await f.rest()

    simulate(scenario, tmp_path, seed=seed)


def test_the_index_of_a_new_engine_knows_what_was_stored_before_it_came(tmp_path: Path) -> None:
    """An engine that is started again loads what its predecessor had computed."""

    async def scenario(f: Fleet) -> None:
        await f.end(await f.ask(PROMPT, max_tokens=5))
        kv = f.actor("kv-0")
        await f.system.until(lambda: kv.statistics().get("stored", 0) > 0, limit_s=2.0)
        await f.kill("both-0")
        await f.system.until(lambda: indexed(f.actor("both-0")), limit_s=3.0)

        again = await f.ask(PROMPT, max_tokens=5)
        await f.end(again)
        assert cached(again) > 0
        await f.rest()

    simulate(scenario, tmp_path, both=1)


def test_what_the_store_has_dropped_is_not_asked_for_again(tmp_path: Path) -> None:
    """More prompts than the tier holds: the index follows its evictions."""

    async def scenario(f: Fleet) -> None:
        for number in range(12):  # 20 blocks each; the tier has 64
            await f.end(await f.ask(f"{number:03}" + PROMPT, max_tokens=3))
            await f.system.clock.sleep(0.3)
        kv = f.actor("kv-0")
        assert kv.statistics()["evicted_total"] > 0
        for engine in f.engines():
            assert engine.prefix.index.statistics()["hashes"] == kv.statistics()["stored"]
            assert engine.prefix.index.statistics()["gaps_total"] == 0

    simulate(scenario, tmp_path)
