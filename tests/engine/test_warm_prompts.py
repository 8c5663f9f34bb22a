"""A hit must equal a miss: the compiled runner's ids and log-probabilities from its pool, from memory, from disk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Time

from engine.core import EngineCore
from engine.native_runner import NativeRunner
from engine.scheduler import Scheduler
from engine.sequence import Key, Sequence
from kernels import native
from kvstore.block import BLOCK_TOKENS as B
from kvstore.block import root_hash
from kvstore.disk.tier import Block, DiskTier
from kvstore.handoff import copy_blocks
from kvstore.pool import BlockPool
from kvstore.shm import attach
from kvstore.tiers import HostTier
from schemas.record import Sampling
from tests.models.native_models import Shape, write_model

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

GREEDY = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True, frequency_penalty=0.5)
LENGTHS = (1, B - 1, B, B + 1, 2 * B, 2 * B + 1)
LONG = 5 * B + 3

Said = list[tuple[int, float | None]]


class Engine:
    """A core over the compiled runner, a host tier and a disk tier of its own."""

    def __init__(self, model: Path, directory: Path, name: str) -> None:
        self.runner = NativeRunner(model, 1)
        self.core = self._core(directory, name)
        size, layout = self.runner.block_nbytes, self.runner.layout
        self.host = HostTier(BlockPool.create(directory, f"{name}-host", 32, size, layout, "h0", "here"))
        self.disk = DiskTier(directory / name, layout=layout, block_nbytes=size, epoch="d0", max_nbytes=1 << 28)
        self.disk.open(0.0)
        self._number = 0

    def _core(self, directory: Path, name: str) -> EngineCore:
        pool = BlockPool.create(directory, name, 64, self.runner.block_nbytes, self.runner.layout, "00", "here")
        pool.view()[:] = b"\xff" * pool.view().nbytes  # no number is what was never written
        clock = Time()
        return EngineCore(
            self.runner, pool, Scheduler(16, 128, 48, 128), root=lambda salt: root_hash("test", salt), now=clock.now,
            wall=clock.now,
        )  # fmt: skip

    def ticket(self) -> str:
        self._number += 1
        return f"t{self._number}"

    def say(self, ids: list[int], loaded: int = -1) -> tuple[Said, int]:
        """Answer a prompt after loading what the host tier has of it; returns the items, and how many were cached.

        Args:
            loaded: how many blocks must come from there; -1: none is asked for.
        """
        seq = Sequence(Key(self.ticket(), 0), ids, GREEDY)
        self.core.add(seq)
        if loaded >= 0:
            assert self._load(seq.key) == loaded
        said: Said = []
        cached = -1
        while self.core.has_work:
            result = self.core.step()
            assert not result.failed, result.failed
            said += [(item.id, item.logprob) for item in result.items]
            cached = max([cached, *result.cached.values()])
        self.core.check_integrity()
        return said, cached

    def _load(self, key: Key) -> int:
        core, ticket = self.core, self.ticket()
        hashes, parents = core.want_load(key), core.load_parents(key)
        found = self.host.lookup(ticket, hashes, parents, 0.0, 10.0)
        if not found.refs:
            return 0
        blocks = core.begin_load(key, len(found.refs))
        assert blocks is not None
        source, dest = attach(self.host.pool.handle()), attach(core.pool.handle())
        sums = copy_blocks(source, found.refs, dest, core.pool.refs(blocks), should_stop=lambda: False)
        assert sums == found.checksums and self.host.release(ticket)
        core.load_prefix(key, blocks, hashes[: len(blocks)])
        return len(blocks)

    def keep(self) -> tuple[list[bytes], list[bytes]]:
        """Store what was computed since the last call in the host tier; returns hashes and parents."""
        core, ticket = self.core, self.ticket()
        made = core.stored_candidates()
        hashes, parents = [c.hash for c in made], [c.parent for c in made]
        staging = self.host.reserve(ticket, hashes, parents, 0.0, 10.0)
        source, dest = attach(core.pool.handle()), attach(self.host.pool.handle())
        refs = core.pool.refs([made[i].block for i in staging.positions])
        sums = copy_blocks(source, refs, dest, staging.refs, should_stop=lambda: False)
        self.host.commit(ticket, True, sums)
        core.written([c.block for c in made])
        return hashes, parents

    def write_out(self, hashes: list[bytes]) -> None:
        """Write blocks of the host tier to the disk."""
        ticket, size, view = self.ticket(), self.host.pool.block_nbytes, self.host.pool.view()
        headers = self.host.pin(ticket, hashes, 0.0, 10.0)
        made = [
            Block(h.hash, h.parent, h.num_tokens, h.checksum, view[h.block * size : (h.block + 1) * size])
            for h in headers
        ]
        assert self.disk.write(made, 0.0) == len(hashes)
        self.host.release(ticket)

    def read_in(self, hashes: list[bytes], parents: list[bytes]) -> int:
        """Read blocks from the disk into the host tier; returns how many came."""
        ticket, size, view = self.ticket(), self.host.pool.block_nbytes, self.host.pool.view()
        staging = self.host.reserve(ticket, hashes, parents, 0.0, 10.0)
        into = [view[ref.index * size : (ref.index + 1) * size] for ref in staging.refs]
        wanted = [(hashes[i], parents[i]) for i in staging.positions]
        sums = self.disk.read([h for h, _ in wanted], [p for _, p in wanted], into, 0.0)
        return self.host.commit(ticket, bool(sums), sums, head=True)

    def forget_pool(self, directory: Path) -> None:
        """Lose the device pool."""
        self.core.pool.close()
        self.core = self._core(directory, f"pool-{self.ticket()}")

    def forget(self, directory: Path, name: str) -> None:
        """Lose the device pool and the memory of the host tier; the disk stays."""
        self.forget_pool(directory)
        self.host.pool.close()
        size, layout = self.runner.block_nbytes, self.runner.layout
        self.host = HostTier(BlockPool.create(directory, f"{name}-host", 32, size, layout, "h1", "here"))

    def close(self) -> None:
        self.runner.close()
        self.disk.close()
        self.host.pool.close()
        self.core.pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with integer weights."""
    shape = Shape(heads=6, kv_heads=2, tied=False, kind="Q4_1", kinds={"token_embd": "Q8_0"})
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(model, tmp_path, "warm")
    yield made
    made.close()


@pytest.fixture(scope="module")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Said]]:
    """What is said to the prompts of all lengths, each computed by an engine that has nothing."""
    out: dict[int, Said] = {}
    for length in sorted({*LENGTHS, *(n + 1 for n in LENGTHS), LONG}):
        engine = Engine(model, tmp_path_factory.mktemp("cold"), "cold")
        out[length], cached = engine.say(prompt(length))
        assert cached == 0
        engine.close()
    yield out


def prompt(length: int) -> list[int]:
    """The first ids of one long text."""
    rng = random.Random(7)
    return [rng.randrange(3, 264) for _ in range(length)]


def full(length: int) -> int:
    """How many blocks of a prompt can be found: its last token is always computed."""
    return (length - 1) // B


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_from_the_pool_says_what_it_said_computed(length: int, engine: Engine, cold: dict[int, Said]) -> None:
    """The same prompt again, with one token more, and after one that shares a little more or less than whole blocks."""
    assert engine.say(prompt(length)) == (cold[length], 0)

    assert engine.say(prompt(length)) == (cold[length], full(length) * B)
    assert engine.say(prompt(length + 1)) == (cold[length + 1], min(full(length + 1), length // B) * B)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tier", ["memory", "disk", "both"])
def test_a_prompt_from_the_store_says_what_it_said_computed(
    tier: str, length: int, engine: Engine, cold: dict[int, Said], tmp_path: Path
) -> None:
    """From host memory, from the disk, and the first block from one and the others from the other."""
    engine.say(prompt(length + 1))
    hashes, parents = engine.keep()
    if hashes and tier != "memory":
        engine.write_out(hashes)
        engine.forget(tmp_path, "again")
        if tier == "both":
            engine.say(prompt(B + 1))
            engine.keep()
            engine.forget_pool(tmp_path)
        engine.read_in(hashes, parents)
    else:
        engine.forget_pool(tmp_path)

    assert engine.say(prompt(length), loaded=full(length)) == (cold[length], full(length) * B)
    engine.forget_pool(tmp_path)
    assert engine.say(prompt(length + 1), loaded=full(length + 1)) == (cold[length + 1], full(length + 1) * B)


@pytest.mark.parametrize("shared", [2 * B - 1, 2 * B, 2 * B + 1])
def test_prompts_that_part_at_a_block_s_edge_share_whole_blocks_alone(
    shared: int, engine: Engine, model: Path, tmp_path: Path
) -> None:
    """One token before, at, and after the edge."""
    other = prompt(shared) + [5 + (7 * at) % 200 for at in range(2 * B)]
    assert other[shared] != prompt(LONG)[shared]
    fresh = Engine(model, tmp_path, "fresh")
    wanted, _ = fresh.say(other)
    fresh.close()
    engine.say(prompt(LONG))
    engine.keep()
    engine.forget_pool(tmp_path)

    assert engine.say(other, loaded=shared // B) == (wanted, shared // B * B)


def test_a_hole_in_the_chain_ends_the_hit_there(engine: Engine, cold: dict[int, Said], tmp_path: Path) -> None:
    """A block in the middle is evicted: those behind it are no use, wherever they are."""
    engine.say(prompt(LONG))
    hashes, _ = engine.keep()
    assert len(hashes) == 5
    engine.host._drop(hashes[2])
    engine.forget_pool(tmp_path)

    assert engine.say(prompt(LONG), loaded=2) == (cold[LONG], 2 * B)
    engine.keep()
    engine.host.check_integrity()
    engine.forget_pool(tmp_path)
    assert engine.say(prompt(LONG), loaded=5) == (cold[LONG], 5 * B)
