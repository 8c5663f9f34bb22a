"""Stored prefixes cross hosts: real sockets between two hosts of one instance, and any failure is a miss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, Stream, answer, fleet

import actors.kv_remote as kv_remote
from actors.kv_remote import FETCH_LIMIT_S, LOAD_LIMIT_S, PAUSE_S
from actors.remote_cost import Way
from actors.transfer_peers import Peers
from chaos.virtual import nodes
from kvstore.block import BLOCK_TOKENS
from kvstore.errors import PeerFailed
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.record import Record, ReplyTo
from schemas.subjects import Ref

PROMPT = "the water that turns the wheel comes down the headrace " * 5
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
COUNT = 20
TWO_HOSTS = dict.fromkeys(("kv-1", "transfer-1", "decode-1"), "host-b")
LAYOUT = {"prefill": 0, "decode": 2, "kv": 2, "transfer": 2}


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, hosts: dict[str, str] = TWO_HOSTS, **layout: int) -> Any:
    """Run `scenario(fleet)` on an instance of two hosts, each with an engine, a store and a transfer actor."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, hosts=hosts, **{**LAYOUT, **layout}) as f:
            await f.system.until(lambda: settled(f), limit_s=10.0)
            found = await scenario(f)
            check(f)
            return found

    return run_virtual(main, seed=seed)


def alive(f: Fleet, kind: str) -> list[Any]:
    """The actors of a kind that live."""
    return [a for name, n in f.nodes.items() for a in n.actors if a.ref.kind == kind and not f.system._slots[name].gone]


def settled(f: Fleet) -> bool:
    """Whether every store knows what the stores of other hosts hold, and engines know that there is something."""
    for kv in alive(f, "kv"):
        if kv._tier is None:
            if any(e.context.host == kv.context.host for e in f.engines()):
                return False  # they will show it the layout of their blocks
            continue
        far = [other for other in alive(f, "kv") if other.context.host != kv.context.host]
        known = [kv._remote.index._index.number(f"{other.ref.epoch}/host") for other in far]
        if known != [other.load()["tiers"]["host"] for other in far]:
            return False
        for engine in alive(f, "decode"):
            member = engine.context.membership.get(kv.ref)
            if member is None or member.load.get("elsewhere", 0) != kv._remote.known:
                return False
    return True


def stat(f: Fleet, node: str, name: str) -> float:
    """A counter of a node's actor."""
    return float(f.actor(node).statistics().get(name, 0.0))


async def ask(f: Fleet, prompt: str = PROMPT) -> Stream:
    """Send a prompt and check its text, whatever the stores do."""
    stream = await f.ask(prompt, max_tokens=COUNT)
    await f.end(stream)
    assert stream.error is None and stream.text == answer(prompt, COUNT)
    await f.rest(limit_s=5.0)
    return stream


async def compute_on_first_host(f: Fleet, prompt: str = PROMPT, *, wait: bool = True) -> None:
    """Have a prompt computed and stored on the first host; then only the second one has an engine."""
    engine = f.nodes.pop("decode-1")
    await f.system.kill(engine)
    await ask(f, prompt)
    await f.system.until(lambda: stat(f, "kv-0", "stored") >= (len(prompt) - 1) // BLOCK_TOKENS, limit_s=5.0)
    f.make("decode", 1)
    await f.system.start(f.nodes["decode-1"])
    await f.system.kill(f.nodes.pop("decode-0"))
    if wait:
        await f.system.until(lambda: settled(f), limit_s=10.0)


def cached(stream: Stream) -> int:
    """How many tokens of the prompt were not computed."""
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


def check(f: Fleet) -> None:
    """Ledgers balance; nobody waits for anything."""
    for kv in alive(f, "kv"):
        if kv._tier is not None:
            kv._tier.check_integrity()
        if kv._remote is not None:
            kv._remote.check_integrity()
            assert kv._remote.statistics()["remote_waiting"] == 0


async def at_rest(f: Fleet, limit_s: float = 10.0) -> None:
    """Wait until no lease and no fetch is left, and no block is in doubt."""

    def quiet() -> bool:
        return all(
            kv.statistics()[name] == 0
            for kv in alive(f, "kv")
            if kv._tier is not None
            for name in ("reads", "writes", "unconfirmed", "lent_tickets", "blocks_quarantined")
        ) and all(kv._remote.statistics()["remote_fetching"] == 0 for kv in alive(f, "kv"))

    await f.system.until(quiet, limit_s=limit_s)


def test_a_prompt_computed_on_one_host_is_loaded_on_another(tmp_path: Path) -> None:
    """Every byte of it came over TCP; it lies in the second host's memory from then on; all leases are given back."""

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        stream = await ask(f)
        assert cached(stream) == BLOCKS * BLOCK_TOKENS
        size = f.actor("kv-1")._pool.block_nbytes
        assert stat(f, "transfer-0", "serve_bytes_total") == BLOCKS * size
        assert stat(f, "transfer-1", "peer_fetched_bytes_total") == BLOCKS * size
        assert stat(f, "kv-1", "remote_fetched_total") == BLOCKS == stat(f, "kv-1", "stored")
        await at_rest(f)
        assert stat(f, "transfer-0", "serve_grants") == 0
        await f.system.kill(f.nodes.pop("kv-0"))
        await f.system.kill(f.nodes.pop("transfer-0"))
        await f.system.kill(f.nodes["decode-1"])
        f.make("decode", 1)
        await f.system.start(f.nodes["decode-1"])
        await f.system.until(lambda: settled(f), limit_s=10.0)
        assert cached(await ask(f)) == BLOCKS * BLOCK_TOKENS

    simulate(scenario, tmp_path)


def test_placement_counts_on_what_would_be_fetched(tmp_path: Path) -> None:
    """With the time that the store says a fetch takes; nothing is expected from a host that has just failed."""

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        admissions = [a for n in f.nodes.values() for a in n.actors if a.ref.kind == "admission"]
        owner, reply = Ref("admission", "0", "e"), ReplyTo(subject="s")
        record = Record(request_id="x", reply=reply, owner=owner, prompt_ids=[list(PROMPT.encode())])
        engine, one = f.actor("decode-1"), admissions[0]

        def found() -> Any:
            return one._where.find(record, one.context.membership.members("decode")).get(engine.ref)

        await f.system.until(lambda: found() is not None, limit_s=5.0)
        assert (found().total, found().far) == (0, BLOCKS * BLOCK_TOKENS)
        assert 0.0 < found().far_s < BLOCKS * BLOCK_TOKENS * 1e-3
        assert set(f.actor("kv-1").load()["ways"]) == {"host-a"}
        fail_fetches(f)
        await ask(f)
        assert stat(f, "kv-1", "remote_failures_total") == 1 and f.actor("kv-1").load()["ways"] == {}

    simulate(scenario, tmp_path)


def test_what_is_here_is_not_fetched(tmp_path: Path) -> None:
    """The head of the chain is in this host's memory, the rest on the other host."""

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        head = PROMPT[: 6 * BLOCK_TOKENS]
        await ask(f, head + "!")
        await f.system.until(lambda: stat(f, "kv-1", "stored") == 6, limit_s=5.0)
        here = stat(f, "kv-1", "remote_fetched_total")
        await f.system.kill(f.nodes["decode-1"])  # its pool goes; the store stays
        f.make("decode", 1)
        await f.system.start(f.nodes["decode-1"])
        await f.system.until(lambda: settled(f), limit_s=10.0)
        assert cached(await ask(f)) == BLOCKS * BLOCK_TOKENS
        assert stat(f, "kv-1", "remote_fetched_total") - here == BLOCKS - 6
        await at_rest(f)

    simulate(scenario, tmp_path)


def test_requests_for_one_prompt_fetch_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves takes nothing with it."""
    slow(monkeypatch, lambda: 0.3)

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        streams = [await f.ask(PROMPT + str(i), max_tokens=COUNT) for i in range(4)]
        await f.system.until(lambda: stat(f, "kv-1", "remote_waiting") == 4, limit_s=5.0)
        f.cancel(streams[3])
        for i, stream in enumerate(streams[:3]):
            await f.end(stream)
            assert stream.text == answer(PROMPT + str(i), COUNT) and cached(stream) >= BLOCKS * BLOCK_TOKENS
        await f.rest()
        assert stat(f, "kv-1", "remote_fetches_total") == 1 and stat(f, "kv-1", "remote_joined_total") == 3
        await at_rest(f)

    simulate(scenario, tmp_path)


def test_without_another_host_nothing_listens_and_nothing_is_asked(tmp_path: Path) -> None:
    """The path of a single host has no hop more than before."""

    async def scenario(f: Fleet) -> None:
        assert all("elsewhere" not in kv.load() for kv in alive(f, "kv"))
        assert all("listens" not in transfer.load() for transfer in alive(f, "transfer"))
        await ask(f)
        for engine in f.engines():
            assert engine.prefix._skipped._value.get() in (0.0, 1.0)
        assert sum(kv.statistics()["misses_total"] for kv in alive(f, "kv")) == 0
        assert sum(kv.statistics()["remote_fetches_total"] for kv in alive(f, "kv")) == 0

    simulate(scenario, tmp_path, hosts={"decode-1": "host-a"}, kv=1, transfer=1)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float], *, stops: bool = False) -> None:
    """Let every fetch take a while; one that `stops` looks whether it has been aborted."""
    real = Peers.fetch

    async def slowly(self: Peers, job: Any, should_stop: Callable[[], bool]) -> list[int]:
        end = self._context.clock.now() + seconds()
        while self._context.clock.now() < end and not (stops and should_stop()):
            await self._context.clock.sleep(0.05)
        return await real(self, job, should_stop)

    monkeypatch.setattr(Peers, "fetch", slowly)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [True, False])
def test_a_slow_host_delays_nothing_for_long_and_its_staging_is_not_lent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """After a second the prompt is computed; staging stays in doubt until the transfer actor says that it is done."""
    slow(monkeypatch, lambda: 40.0, stops=stops)

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        began = f.system.clock.now()
        stream = await f.ask(PROMPT, max_tokens=COUNT)
        await f.items(stream, 1)
        assert f.system.clock.now() - began < LOAD_LIMIT_S + 1.0
        await f.end(stream)
        assert stream.text == answer(PROMPT, COUNT) and cached(stream) == 0
        pool = f.actor("kv-1")._pool
        if not stops:
            await f.system.clock.sleep(kv_remote.STAGING_LEASE_S + 1.0)
            assert pool.num_quarantined == BLOCKS
        await f.system.until(lambda: stat(f, "kv-1", "remote_fetching") == 0, limit_s=50.0)
        assert f.system.clock.now() - began < (FETCH_LIMIT_S + 2.0 if stops else 60.0)
        assert stat(f, "kv-1", "remote_failures_total") == 1 and stat(f, "kv-1", "remote_late_total") == 1
        await at_rest(f)

    simulate(scenario, tmp_path)


def break_key(f: Fleet) -> None:
    f.actor("transfer-1")._peers._key = bytes(32)
    known = f.actor("transfer-0")._peers
    known._server._key = b"x" * 32


def damage(f: Fleet) -> None:
    view = f.actor("kv-0")._pool.view()
    for at in range(0, len(view), 97):
        view[at] ^= 64


def close_listener(f: Fleet) -> None:
    f.actor("transfer-0")._peers._server.stop()


def revoke_everything(f: Fleet) -> None:
    f.actor("transfer-0")._peers._grants.give = lambda *_: False


def tell_other_generations(f: Fleet) -> None:
    lent = f.actor("kv-0")._lend

    def stale(msg: Any, found: Any) -> bool:
        done = lent(msg, found)
        for ref in found.refs:
            ref.__dict__["generation"] += 1  # what the reader is told is not what is lent
        return bool(done)

    f.actor("kv-0")._lend = stale


def fail_fetches(f: Fleet) -> None:
    async def fail(*_: Any) -> list[int]:
        raise PeerFailed("there", "cut")

    f.actor("transfer-1")._peers.fetch = fail


FAULTS = [break_key, damage, close_listener, revoke_everything, tell_other_generations, fail_fetches]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_on_the_way_is_a_miss(tmp_path: Path, fault: Callable[[Fleet], None]) -> None:
    """The text is right (scripted engines check every block they read), and nothing is left of the try."""

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        fault(f)
        assert cached(await ask(f)) == 0
        assert stat(f, "kv-1", "remote_failures_total") == 1 and stat(f, "kv-1", "remote_fetched_total") == 0
        await at_rest(f)
        if fault is damage:
            await f.system.until(lambda: stat(f, "kv-0", "corrupt_total") == BLOCKS, limit_s=2.0)

    simulate(scenario, tmp_path)


def test_what_came_before_a_fetch_failed_is_used_and_not_fetched_again(tmp_path: Path) -> None:
    """A damaged block in the middle: those before it are here, and the next fetch brings the rest alone."""
    good = 5

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        there = f.actor("kv-0")
        size, headers = there._pool.block_nbytes, list(there._tier._stored.values())
        places = {h.hash: h.block for h in headers}
        chain, parent = [], next(h.parent for h in headers if h.parent not in places)
        while len(chain) < len(headers):
            chain.append(next(h for h in headers if h.parent == parent))
            parent = chain[-1].hash
        there._pool.view()[chain[good].block * size + 9] ^= 1

        assert cached(await ask(f)) == good * BLOCK_TOKENS
        assert stat(f, "kv-1", "remote_kept_total") == good and stat(f, "kv-1", "remote_failures_total") == 1
        await at_rest(f)
        await f.system.until(lambda: stat(f, "kv-1", "stored") == BLOCKS, limit_s=5.0)  # the rest was computed

    simulate(scenario, tmp_path)


def test_a_host_that_fails_is_left_alone_for_a_while(tmp_path: Path) -> None:
    """The next prompt does not try it; after a pause one does, and finds it well again."""

    async def scenario(f: Fleet) -> None:
        await compute_on_first_host(f)
        working = f.actor("transfer-1")._peers.fetch
        fail_fetches(f)
        await ask(f)
        other = PROMPT[: 10 * BLOCK_TOKENS] + "and then"
        await f.system.kill(f.nodes["decode-1"])
        f.make("decode", 1)
        await f.system.start(f.nodes["decode-1"])
        await ask(f, other)
        assert stat(f, "kv-1", "remote_fetches_total") == 1
        f.actor("transfer-1")._peers.fetch = working
        await f.system.clock.sleep(PAUSE_S)
        await f.system.kill(f.nodes.pop("kv-1"))
        f.make("kv", 1)
        await f.system.start(f.nodes["kv-1"])
        await f.system.kill(f.nodes["decode-1"])
        f.make("decode", 1)
        await f.system.start(f.nodes["decode-1"])
        await f.system.until(lambda: settled(f), limit_s=10.0)
        assert cached(await ask(f)) == BLOCKS * BLOCK_TOKENS

    simulate(scenario, tmp_path)


def made(path: Path) -> Path:
    """A folder for one run."""
    path.mkdir()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["kv-0", "transfer-0", "transfer-1", "kv-1"])
def test_whoever_dies_on_the_way_the_text_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """At whatever moment; what the dead transfer actor may have written comes back once its exit is known."""
    slow(monkeypatch, lambda: 0.2)
    for after in (0.005, 0.05, 0.1, 0.2, 0.3):

        async def scenario(f: Fleet, after: float = after) -> None:
            await compute_on_first_host(f)
            stream = await f.ask(PROMPT, max_tokens=COUNT)
            await f.system.clock.sleep(after)
            await f.system.kill(f.nodes.pop(victim))
            kind, number = victim.split("-")
            f.make(kind, int(number))
            await f.system.start(f.nodes[victim])
            await f.end(stream)
            assert stream.error is None and stream.text == answer(PROMPT, COUNT)
            await f.rest(limit_s=5.0)
            await f.system.until(lambda: settled(f), limit_s=10.0)
            await at_rest(f, limit_s=40.0)

        simulate(scenario, made(tmp_path / str(after)))


@pytest.mark.slow
def test_no_mix_of_traffic_and_kills_changes_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go where their prefixes are, so a mix may fetch nothing from the other host; several of them do."""
    fetched = [traffic_and_kills(seed, made(tmp_path / str(seed)), monkeypatch) for seed in range(4)]

    assert sum(fetched) > 0


def traffic_and_kills(seed: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Stores far smaller than what is asked for, on both hosts; engines, stores, transfer actors that come and go.

    Returns:
        The most blocks that one store fetched from the other.
    """
    draw = random.Random(seed)
    slow(monkeypatch, lambda: draw.random() * 0.2, stops=True)
    names = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
    stems = [f"{name} tells of the wheel and the water, at length and in order, " * 3 for name in names]
    prompts = [stem + f"and in year {i} of the mill that stands below it, and more" for stem in stems for i in range(4)]
    seen: dict[str, float] = {}

    async def scenario(f: Fleet) -> None:
        for _ in range(40):
            batch = draw.sample(prompts, draw.randrange(1, 4))
            streams = [await f.ask(prompt, max_tokens=COUNT) for prompt in batch]
            await f.system.clock.sleep(draw.random() * 0.4)
            if draw.random() < 0.6:
                victim = draw.choice(["decode-0", "decode-1", "kv-0", "kv-1", "transfer-0", "transfer-1"])
                await f.system.kill(f.nodes.pop(victim))
                kind, number = victim.split("-")
                f.make(kind, int(number))
                await f.system.start(f.nodes[victim])
            for prompt, stream in zip(batch, streams, strict=True):
                await f.end(stream)
                assert stream.error is None and stream.text == answer(prompt, COUNT)
            for kv in alive(f, "kv"):
                for name, value in kv.statistics().items():
                    seen[name] = max(seen.get(name, 0.0), value)
        await f.rest(limit_s=5.0)
        await f.system.until(lambda: settled(f), limit_s=20.0)
        await at_rest(f, limit_s=40.0)

    simulate(scenario, directory, seed=seed)
    return seen["remote_fetched_total"]


APART = dict.fromkeys(("kv-1", "transfer-1", "decode-0", "decode-1"), "host-b")


def test_a_prompt_is_handed_over_to_an_engine_on_another_host(tmp_path: Path) -> None:
    """Prefill on one host, decode on the other; what the transfer actor there fetched is what was held here."""

    async def scenario(f: Fleet) -> None:
        for number in range(3):
            prompt = f"{number} {PROMPT}"
            stream = await f.ask(prompt, max_tokens=COUNT)
            await f.end(stream)
            assert stream.error is None and stream.text == answer(prompt, COUNT)
        await f.rest()
        size = f.actor("kv-0")._pool.block_nbytes
        assert stat(f, "transfer-0", "serve_bytes_total") >= 3 * BLOCKS * size
        assert stat(f, "transfer-0", "serve_bytes_total") == stat(f, "transfer-1", "peer_fetched_bytes_total")
        await f.system.until(lambda: stat(f, "transfer-0", "serve_grants") == 0, limit_s=2.0)

    simulate(scenario, tmp_path, hosts=APART, prefill=1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["transfer-0", "transfer-1", "prefill-0", "decode-0"])
def test_whoever_dies_in_a_hand_over_between_hosts_the_text_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """At whatever moment; nothing is left held or served."""
    slow(monkeypatch, lambda: 0.1)
    for after in (0.05, 0.1, 0.15, 0.2, 0.3):

        async def scenario(f: Fleet, after: float = after) -> None:
            streams = [await f.ask(f"{i} {PROMPT}", max_tokens=COUNT) for i in range(3)]
            await f.system.clock.sleep(after)
            await f.kill(victim)
            for i, stream in enumerate(streams):
                await f.end(stream)
                assert stream.error is None and stream.text == answer(f"{i} {PROMPT}", COUNT)
            await f.rest(limit_s=5.0)
            await f.system.until(lambda: stat(f, "transfer-0", "serve_grants") == 0, limit_s=12.0)

        simulate(scenario, made(tmp_path / str(after)), hosts=APART, prefill=1)


HOT = (PROMPT * 4)[: 48 * BLOCK_TOKENS]


async def hot_spell(f: Fleet, count: int, pause_s: float, max_tokens: int) -> list[float]:
    """Ask for one prefix again and again; returns the times to first tokens."""
    clock = f.system.clock

    async def one(number: int) -> float:
        prompt, began = f"{HOT}{number}", clock.now()
        stream = await f.ask(prompt, max_tokens=max_tokens)
        await f.items(stream, 1)
        took = clock.now() - began
        await f.end(stream)
        assert stream.error is None and stream.text == answer(prompt, max_tokens)
        return took

    asked = []
    for number in range(count):
        asked.append(asyncio.create_task(one(number)))
        await clock.sleep(pause_s)
    return list(await asyncio.gather(*asked))


def know_the_link(f: Fleet, seconds: float) -> None:
    """Let stores know what a fetch takes."""
    for kv in alive(f, "kv"):
        kv._remote._ways |= dict.fromkeys(("host-a", "host-b"), Way(seconds, 100e6))


@pytest.mark.slow
def test_a_hot_prefix_is_copied_ahead_of_demand_and_its_first_tokens_come_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two hosts of which one has it and is busy; with a cap of nothing the same run waits for fetches on demand."""

    def run(per_minute: int) -> tuple[list[float], float]:
        monkeypatch.setattr(nodes, "COPIES_PER_MINUTE", per_minute)

        async def scenario(f: Fleet) -> tuple[list[float], float]:
            await ask(f, HOT)
            await f.system.until(lambda: settled(f), limit_s=10.0)
            await f.system.clock.sleep(0.5)
            know_the_link(f, 0.15)
            await hot_spell(f, 10, 1.0, 4)  # it is hot, and its holder idle
            took = await hot_spell(f, 12, 0.2, 60)
            await at_rest(f)
            copied = sum(stat(f, kv, "remote_copied_total") for kv in ("kv-0", "kv-1"))
            refused = sum(stat(f, kv, "remote_copies_refused_total") for kv in ("kv-0", "kv-1"))
            assert refused == 0
            return took, copied

        found: tuple[list[float], float] = simulate(scenario, tmp_path, whole_below=10_000)
        return found

    slow(monkeypatch, lambda: 0.15)
    (on_demand, none), (ahead, copied) = run(0), run(1 << 30)

    assert none == 0 and copied == 48
    assert sum(ahead) < sum(on_demand) and max(ahead) < max(on_demand)


@pytest.mark.slow
def test_a_hot_prefix_stays_where_it_is_while_its_holder_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked for: no prompt would go elsewhere for a copy."""
    slow(monkeypatch, lambda: 0.15)

    async def scenario(f: Fleet) -> None:
        await ask(f, HOT)
        await f.system.until(lambda: settled(f), limit_s=10.0)
        await f.system.clock.sleep(0.5)
        know_the_link(f, 0.15)
        await hot_spell(f, 20, 1.0, 4)
        assert all(stat(f, kv, "remote_fetches_total") == 0 for kv in ("kv-0", "kv-1"))
        counted = [a._replication.statistics()["hot_prefixes_counted"] for a in alive(f, "admission")]
        assert min(counted) > 0

    simulate(scenario, tmp_path, whole_below=10_000)
