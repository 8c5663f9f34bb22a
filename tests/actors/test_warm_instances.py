"""A hit must equal a miss, in whole instances that compute: ids and log-probabilities from each tier and another host.

Log-probabilities are taken where the engine's runner chooses ids: no frame carries them yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import Fleet, fleet

from actors.kv_disk import DiskConfig
from engine.native_runner import NativeRunner
from engine.plan import BatchPlan, Sampled
from kernels import native
from kvstore.block import BLOCK_TOKENS as B
from runtime.virtual_clock import VirtualClock, run_virtual
from tests.models.native_models import Shape, write_model

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

pytestmark = pytest.mark.slow

TEXT = "The river came down from the hills, past the mill and the old bridge, and nobody knew how long it was."
LENGTHS = (1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B, 5 * B + 3)
COUNT = 6
CLOSE = 1e-3
CHOSEN: dict[tuple[str, int], tuple[int, float | None]] = {}  # by request and position
HOSTS = dict.fromkeys(("kv-1", "transfer-1", "decode-1"), "host-b")

Said = list[tuple[int, float]]


class Listening(NativeRunner):
    """The compiled runner, with what it chose in a table."""

    def __init__(self, model: Path, chosen: dict[tuple[str, int], tuple[int, float | None]]) -> None:
        super().__init__(model, 1)
        self.chosen = chosen

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        got = super().execute(plan)
        self.chosen.update({(one.key.request_id, one.index): (one.id, one.logprob) for one in got})
        return got


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with integer weights."""
    shape = Shape(heads=6, kv_heads=2, tied=False, kind="Q4_1", kinds={"token_embd": "Q8_0"})
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape)


def simulate(scenario: Any, directory: Path, model: Path, *, disk: bool = False, hosts: bool = False) -> Any:
    """Run `scenario(fleet)` on an engine with that model, with a store on each host."""
    config = DiskConfig(directory / "disk", 1 << 30, keep_all=True) if disk else None
    layout = {"prefill": 0, "decode": 1, "kv": 1, "transfer": 1}
    CHOSEN.clear()
    if hosts:
        layout |= {"kv": 2, "transfer": 2}

    async def main(clock: VirtualClock) -> Any:
        async with fleet(
            clock, directory, disk=config, hosts=HOSTS if hosts else None,
            make_runner=lambda: Listening(model, CHOSEN), **layout,
        ) as f:  # fmt: skip
            await f.system.until(lambda: known(f), limit_s=10.0)
            return await scenario(f)

    return run_virtual(main)


def known(f: Fleet) -> bool:
    """Whether every engine knows what the stores of its host hold, and that other hosts have something."""
    for kv in (f.actor(name) for name in f.nodes if name.startswith("kv-") and not f.system.is_gone(name)):
        numbers = kv.load()["tiers"]
        for engine in f.engines():
            member = engine.context.membership.get(kv.ref)
            if member is None:
                return False
            if kv.context.host != engine.context.host:
                continue
            if kv._tier is None or (kv._disk is not None and "disk_records" not in kv.statistics()):
                return False
            have = {kind: engine.prefix.index._index.number(f"{kv.ref.epoch}/{kind}") for kind in numbers}
            if have != numbers or (kv._remote is not None and not follows(f, kv, member)):
                return False
    return True


def follows(f: Fleet, kv: Any, member: Any) -> bool:
    """Whether a store knows what the other host's has, and its engine knows that it does."""
    (far,) = (f.actor(name) for name in ("kv-0", "kv-1") if f.actor(name).context.host != kv.context.host)
    number = kv._remote.index._index.number(f"{far.ref.epoch}/host")
    return number == far.load()["tiers"]["host"] and member.load.get("elsewhere", 0) == kv._remote.known


async def say(f: Fleet, prompt: str, salt: str = "") -> tuple[Said, int]:
    """Ask; returns ids with their log-probabilities, and how many blocks were not computed."""
    fields = {"cache_salt": salt} if salt else {}
    stream = await f.ask(prompt, max_tokens=COUNT, ignore_eos=True, **fields)
    await f.end(stream)
    assert stream.error is None and stream.terminal is not None and len(stream.ids[0]) == COUNT
    await f.rest(limit_s=5.0)
    await f.system.clock.sleep(0.3)
    await f.system.until(lambda: known(f), limit_s=10.0)
    cached = int(stream.terminal["usage"]["cached_tokens"])
    assert cached % B == 0 and cached < len(prompt)
    said: Said = []
    for index in range(COUNT):
        token, logprob = CHOSEN[stream.request_id, index]
        assert token == stream.ids[0][index] and logprob is not None and logprob < 0.0
        said.append((token, logprob))
    return said, cached // B


async def renew(f: Fleet, *names: str) -> None:
    """Kill these nodes: what their successors have, they have from elsewhere."""
    for name in names:
        await f.kill(name)
    await f.system.until(lambda: bool(f.engines()) and known(f), limit_s=10.0)


def same(said: Said, cold: Said) -> None:
    """Equal ids, and log-probabilities that are no farther apart than any kernel may be from itself."""
    assert [i for i, _ in said] == [i for i, _ in cold]
    assert max(abs(one - other) for (_, one), (_, other) in zip(said, cold, strict=True)) <= CLOSE


def found(length: int) -> int:
    """Blocks that are loaded of a prompt: its last token is always computed, and single blocks are not asked for."""
    full = (length - 1) // B
    return full if full >= 2 else 0


async def colds(f: Fleet, prompts: list[str]) -> dict[str, Said]:
    """What is said to each prompt where nothing of it is anywhere: under salts that nobody else has."""
    out = {}
    for prompt in prompts:
        out[prompt], cached = await say(f, prompt, f"cold {len(out)}")
        assert cached == 0
    return out


@pytest.mark.parametrize("tier", ["pool", "memory", "disk", "memory and disk"])
def test_a_prompt_from_a_tier_says_what_it_said_cold(tier: str, tmp_path: Path, model: Path) -> None:
    """Exactly as it was, with one token more, and around the size of a block."""
    prompts = [TEXT[:length] for length in sorted({*LENGTHS, *(n + 1 for n in LENGTHS)})]

    async def scenario(f: Fleet) -> None:
        cold = await colds(f, prompts)
        assert cold[prompts[-1]] != cold[prompts[0]]
        longest, _ = await say(f, prompts[-1])
        same(longest, cold[prompts[-1]])
        kv = f.actor("kv-0")
        if "disk" in tier:
            blocks = sum(len(prompt) // B for prompt in [*prompts, prompts[-1]])
            await f.system.until(lambda: kv.statistics()["disk_records"] >= blocks and known(f), limit_s=10.0)
        for prompt in prompts[::-1]:
            if tier == "pool":
                expected = (len(prompt) - 1) // B
            else:
                await renew(f, *(["kv-0"] if tier == "disk" else []), "decode-0")
                expected = found(len(prompt))
            if tier == "memory and disk":
                drop_but_the_first(f)
                await f.system.until(lambda: known(f), limit_s=10.0)
            said, cached = await say(f, prompt)
            same(said, cold[prompt])
            assert cached == expected
        loaded = f.actor("kv-0").statistics().get("disk_loaded_total", 0)
        assert (loaded > 0) == (tier == "memory and disk") or tier == "disk"

    simulate(scenario, tmp_path, model, disk="disk" in tier)


def drop_but_the_first(f: Fleet) -> None:
    """Leave in host memory one block of the longest prompt: what follows it is on the disk alone."""
    kv = f.actor("kv-0")
    for digest in list(kv._tier.dump().hashes):
        header = kv._tier._stored[digest]
        if header.parent in kv._tier._stored or header.depth > 1:
            kv._tier._drop(digest)
    kv._announcer.announce()


@pytest.mark.parametrize("shared", [3 * B - 1, 3 * B, 3 * B + 1])
@pytest.mark.parametrize("tier", ["pool", "memory", "disk"])
def test_prompts_that_part_around_a_block_s_edge(shared: int, tier: str, tmp_path: Path, model: Path) -> None:
    """They share whole blocks alone, and say what they say cold."""
    other = TEXT[:shared] + "#" + TEXT[:37]
    assert TEXT[shared] != "#"

    async def scenario(f: Fleet) -> None:
        cold = await colds(f, [other])
        await say(f, TEXT)
        if tier == "disk":
            kv = f.actor("kv-0")
            await f.system.until(lambda: kv.statistics()["disk_records"] >= len(TEXT) // B and known(f), limit_s=10.0)
            await renew(f, "kv-0")
        if tier != "pool":
            await renew(f, "decode-0")
        said, cached = await say(f, other)
        same(said, cold[other])
        assert cached == shared // B

    simulate(scenario, tmp_path, model, disk=tier == "disk")


def test_a_block_that_is_gone_from_the_middle_ends_the_hit(tmp_path: Path, model: Path) -> None:
    """Those behind it are no use; then they are all there again."""

    async def scenario(f: Fleet) -> None:
        cold = await colds(f, [TEXT])
        await say(f, TEXT)
        kv = f.actor("kv-0")
        chain = sorted((h.depth, h.hash) for h in kv._tier._stored.values() if h.head == longest_head(kv))
        kv._tier._drop(chain[3][1])
        kv._announcer.announce()
        for expected in (3, (len(TEXT) - 1) // B):
            await renew(f, "decode-0")
            said, cached = await say(f, TEXT)
            same(said, cold[TEXT])
            assert cached == expected
        kv._tier.check_integrity()

    simulate(scenario, tmp_path, model)


def longest_head(kv: Any) -> bytes:
    """The head of the chain that was stored last, which is the longest of those without a salt."""
    return next(reversed(kv._tier._stored.values())).head  # type: ignore[no-any-return]


def test_a_prompt_from_another_host_says_what_it_said_cold(tmp_path: Path, model: Path) -> None:
    """Fetched over real sockets by the store of the host whose engine has to answer."""
    prompts = [TEXT[:length] for length in (2 * B + 1, 3 * B, 3 * B + 1, 5 * B + 3)]

    async def scenario(f: Fleet) -> None:
        cold = await colds(f, prompts)
        await say(f, TEXT)
        await f.kill("decode-0", again_after_s=None)
        await f.system.start(f.make("decode", 1))
        await f.system.until(lambda: bool(f.engines()) and known(f), limit_s=10.0)
        for prompt in prompts:
            said, cached = await say(f, prompt)
            same(said, cold[prompt])
            assert cached == found(len(prompt))
            await renew(f, "kv-1", "decode-1")
        (engine,) = f.engines()
        assert engine.context.host == "host-b"

    simulate(scenario, tmp_path, model, hosts=True)
