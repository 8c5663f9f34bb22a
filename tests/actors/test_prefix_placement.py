"""Whole instances: a prompt goes where it is cheapest, by what engines and stores of all hosts hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import SCRIPT, Fleet, Stream, answer, fleet

from actors.admission import AdmissionActor
from engine.scripted_runner import ScriptedRunner
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.record import Record, ReplyTo
from schemas.subjects import Ref

PROMPT = "the water that turns the wheel comes down the headrace " * 6
COUNT = 12


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **options: Any) -> Any:
    """Run `scenario(fleet)` on engines that decode, none that prefills for others."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, **{"whole_below": 10_000, "prefill": 0, "decode": 3, **options}) as f:
            await f.system.until(lambda: known(f), limit_s=5.0)
            return await scenario(f)

    return run_virtual(main, seed=seed)


def known(f: Fleet) -> bool:
    """Whether both admission actors follow all there is to follow."""
    return all(
        a._where.index._index.ready(f"{m.ref.epoch}/{kind}")
        for a in admissions(f)
        for m in a.context.membership.members()
        for kind in m.load.get("tiers", ())
    )


def admissions(f: Fleet) -> list[AdmissionActor]:
    """The admission actors."""
    return [a for n in f.nodes.values() for a in n.actors if isinstance(a, AdmissionActor)]


async def ask(f: Fleet, prompt: str) -> tuple[str, Stream]:
    """Send a prompt; returns the engine that ran it, and the stream."""
    stream = await f.ask(prompt, max_tokens=COUNT)
    await f.items(stream, 1)
    served = f.serving("decode", stream)
    await f.end(stream)
    assert stream.error is None and stream.text == answer(prompt, COUNT)
    await f.rest()
    await f.system.clock.sleep(0.3)  # events and heartbeats have told of it
    return served, stream


def cached(stream: Stream) -> int:
    """How many tokens of the prompt were not computed."""
    assert stream.terminal is not None
    return int(stream.terminal["usage"]["cached_tokens"])


def metric(f: Fleet, name: str) -> float:
    """A metric of both admission nodes together."""
    total = 0.0
    for a in admissions(f):
        for line in str(a.context.telemetry.render()).splitlines():
            if line.startswith(f"headrace_{name} "):
                total += float(line.split()[-1])
    return total


@pytest.mark.parametrize("seed", range(4))
def test_the_next_turn_goes_to_the_engine_that_has_the_last_one(seed: int, tmp_path: Path) -> None:
    """Without a store; whichever admission actor gets it, and though all engines are equally idle."""

    async def scenario(f: Fleet) -> None:
        for who in ("Ann", "Ben", "Cleo"):
            text = f"{who}: {PROMPT}"
            first, _ = await ask(f, text)
            for _ in range(3):
                text += "and so on and on, until it is done; "
                again, stream = await ask(f, text)
                assert again == first and cached(stream) >= len(PROMPT) // 16 * 16
        assert metric(f, "placement_stored_tokens_total") >= 9 * (len(PROMPT) // 16 * 16)

    simulate(scenario, tmp_path, seed=seed, kv=0, transfer=0)


def test_requests_of_equal_cost_are_spread(tmp_path: Path) -> None:
    """One at a time, so that no queue decides: no engine gets them all."""

    async def scenario(f: Fleet) -> set[str]:
        return {(await ask(f, f"{number}: short"))[0] for number in range(16)}

    assert len(simulate(scenario, tmp_path)) == 3


def test_a_busy_holder_does_not_get_everything(tmp_path: Path) -> None:
    """A prefix that all ask for, in one burst: others load or compute it too."""

    async def scenario(f: Fleet) -> set[str]:
        await ask(f, PROMPT)
        streams = [await f.ask(f"{PROMPT}{number}", max_tokens=60) for number in range(12)]
        for stream in streams:
            await f.items(stream, 1)
        served = {f.serving("decode", stream) for stream in streams}
        for number, stream in enumerate(streams):
            await f.end(stream)
            assert stream.text == answer(f"{PROMPT}{number}", 60)
        return served

    assert len(simulate(scenario, tmp_path)) == 3


def test_a_prompt_goes_to_the_host_whose_store_has_it(tmp_path: Path) -> None:
    """The engine that computed it is gone with its pool; its host's store is not."""

    async def scenario(f: Fleet) -> None:
        for kind in ("kv", "transfer", "decode"):
            name = f"{kind}-9"
            node = f.nodes[name] = f.system.node(name, host="host-b")
            node.add(kind, "9", lambda context, kind=kind: f._actor(kind, context))
            await f.system.start(node)
        there = f.nodes["decode-9"].actors[0]
        await f.system.until(
            lambda: (
                known(f)
                and all(any(m.ref == there.ref for m in a.context.membership.members("decode")) for a in admissions(f))
            ),
            limit_s=5.0,
        )
        for name in ("decode-0", "decode-1", "decode-2"):
            await f.kill(name, again_after_s=None)
        served, _ = await ask(f, PROMPT)
        assert served == "decode-9"
        await f.system.until(lambda: f.actor("kv-9").statistics().get("stored", 0) >= len(PROMPT) // 16, limit_s=5.0)
        for number in range(3):
            await f.system.start(f.make("decode", number))
        await f.system.kill(f.nodes["decode-9"])
        node = f.nodes["decode-9"] = f.system.node("decode-9", host="host-b")
        node.add("decode", "9", lambda context: f._actor("decode", context))
        await f.system.start(node)
        await f.system.until(
            lambda: known(f) and all(len(a.context.membership.members("decode")) == 4 for a in admissions(f)),
            limit_s=5.0,
        )
        await f.system.clock.sleep(0.5)

        again, stream = await ask(f, PROMPT + "and so on")

        assert again == "decode-9" and cached(stream) == len(PROMPT) // 16 * 16
        assert f.actor("kv-0").statistics().get("hits_total", 0) == 0

    simulate(scenario, tmp_path)


def test_engines_learn_what_prompts_cost_and_admission_how_right_it_was(tmp_path: Path) -> None:
    """A pace of 2 ms per token shows in heartbeats after some prompts, and estimates are compared with first items."""
    spent = [0.0]

    def pass_time(seconds: float) -> None:
        spent[0] += seconds

    def runner() -> ScriptedRunner:
        return ScriptedRunner(SCRIPT, prefill_pace_s_per_token=0.002, sleep=pass_time)

    async def scenario(f: Fleet) -> None:
        for engine in f.engines():
            engine.stepped.core.now = lambda: f.system.clock.now() + spent[0]
        for number in range(12):
            await ask(f, f"{number} {PROMPT}"[: 60 + 40 * (number % 5)])
        members = admissions(f)[0].context.membership.members("decode")
        per_token = [m.load["prefill_cost"][1] for m in members]
        assert len(per_token) == 3 and all(0.0015 < each < 0.0025 for each in per_token)
        assert metric(f, "placement_ttft_error_seconds_count") == 12
        assert metric(f, "placement_ttft_ratio_count") == 12

    simulate(scenario, tmp_path, make_runner=runner, kv=0, transfer=0)


def test_tenants_share_no_hint(tmp_path: Path) -> None:
    """What one tenant's prompts left draws nobody else's: hints are by salted hashes, as blocks are."""

    def record(salt: str) -> Record:
        owner, reply = Ref("admission", "0", "e"), ReplyTo(subject="s")
        ids = [list(PROMPT.encode())]
        return Record(request_id="x", reply=reply, owner=owner, cache_salt=salt, prompt_ids=ids)

    async def scenario(f: Fleet) -> None:
        await ask(f, PROMPT)
        one = admissions(f)[0]
        engines = one.context.membership.members("decode")
        mine, others = (one._where.find(record(salt), engines) for salt in ("", "another"))
        assert mine and not others

    simulate(scenario, tmp_path)
