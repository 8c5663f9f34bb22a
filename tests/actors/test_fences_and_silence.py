"""Engines that are fenced off, only silent, or full, in whole instances in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_adoption import ask_of, check, failovers, simulate, steps
from test_system import simulate as run
from virtual_fleet import Fleet

from chaos.virtual.nodes import MODEL
from schemas import messages as m
from schemas.record import ReplyTo

PROMPT = "the water that turns the wheel comes down the headrace " * 4


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines run on the loop by design; real time does not pass."""
    yield


def test_what_is_fenced_off_takes_no_effect_and_stops(tmp_path: Path) -> None:
    """R3. Scenario: the ids are told, then one more item comes under the old fence: it is not among them.

    Whoever goes on from those ids would differ from the client by an item; and the fenced engine would work for nobody.
    """

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 400, deadline_s=3.0)
        await f.items(stream, 20)
        detok = f.actor(f.serving("detokenize", stream))
        engine, owner = f.actor(f.serving("decode", stream)), f.actor("admission-0").ref
        answers = await f.system.tap(owner.subject)
        fence = detok._sessions[stream.request_id].fence.next()
        f.system.send(detok.ref, m.FenceIds(request_id=stream.request_id, fence=fence), sender=owner)
        await f.system.clock.sleep(0.3)
        (told,) = [a for a in answers if isinstance(a, m.FencedIds)]
        assert told.known and [stream.num_items] == [len(ids) for ids in told.outputs]
        assert stream.request_id not in engine.works
        await f.end(stream, limit_s=5.0)
        assert stream.num_items == len(told.outputs[0])
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


def test_an_engine_drops_what_it_holds_under_a_lower_fence_when_it_gets_the_request_again(tmp_path: Path) -> None:
    """R3. Scenario: `Close(fenced)` is lost, and the next try goes to the same engine."""

    async def scenario(f: Fleet) -> None:
        seen = [await f.system.tap(f"actor.decode.{number}.*") for number in range(2)]
        stream = await ask_of(f, "admission-0", PROMPT, 100)
        await f.items(stream, 20)
        engine = f.actor(f.serving("decode", stream))
        first = next(d for messages in seen for d in messages if isinstance(d, m.Dispatch))
        again = first.model_copy(update={"fence": first.fence.next()})
        f.system.send(engine.ref, again, sender=f.actor("admission-0").ref)
        await f.system.clock.sleep(0.03)
        assert engine.works[stream.request_id].fence == again.fence
        assert engine.stepped.core.load()["running"] == 1
        await f.end(stream, limit_s=5.0)
        check(stream, PROMPT, 100)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_engines_that_pause_together_go_on_where_they_were(tmp_path: Path) -> None:
    """R7. Scenario: a host with all engines is paused for two seconds: nothing is fenced, nothing is computed twice."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=100)
        await f.items(stream, 20)
        for number in range(2):
            f.freeze(f"decode-{number}")
        await f.system.clock.sleep(2.0)
        assert stream.num_items < 30
        for number in range(2):
            f.thaw(f"decode-{number}")
        await f.end(stream, limit_s=10.0)
        check(stream, PROMPT, 100)
        assert failovers(f, "decode") == 0
        assert steps(f) <= 103
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, prefill=0)


@pytest.mark.slow
def test_the_only_owner_has_its_requests_back_when_it_speaks_again(tmp_path: Path) -> None:
    """R7. Scenario: it was silent for two seconds, and nobody has claimed what it owns: it must hear how that ends."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=300)
        await f.items(stream, 20)
        f.freeze("admission-0")
        await f.system.clock.sleep(2.0)
        f.thaw("admission-0")
        await f.system.clock.sleep(1.0)
        assert not any(s.orphaned for n in range(2) for s in f.actor(f"detokenize-{n}")._sessions.values())
        await f.end(stream, limit_s=10.0)
        check(stream, PROMPT, 300)
        await f.rest(limit_s=3.0)

    simulate(scenario, tmp_path, admission=1)


@pytest.mark.slow
def test_a_stream_goes_on_although_its_living_engine_has_lost_it(tmp_path: Path) -> None:
    """R7. Scenario: the engine is up and steps, and sends nothing for this request: `Stalled`, `Redirect`, unknown."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=100)
        await f.items(stream, 20)
        engine = f.actor(f.serving("decode", stream))
        engine.close(stream.request_id, engine.works[stream.request_id].fence, None, reason="lost")
        await f.end(stream, limit_s=5.0)
        check(stream, PROMPT, 100)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, prefill=0)


def test_a_later_try_keeps_the_time_of_the_first_one(tmp_path: Path) -> None:
    """R8. Scenario: a chat template prints the date; another owner's prompt, a second later, would have other ids."""

    async def scenario(f: Fleet) -> None:
        seen = await f.system.tap("actor.tokenize")
        stream = await f.ask(PROMPT, max_tokens=5, publish=False)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        wall = f.system.clock.wall()
        submit = m.Submit(
            request_id="again", api="completion", body=body, deadline=wall + 60.0, accept_by=wall + 2.0, term=1,
            reply=ReplyTo(subject=stream.inbox, mode="inbox", encoding="json"), created=int(wall) - 100,
        )  # fmt: skip
        f.system.send(f.actor("admission-0").ref, submit)
        await f.end(stream, limit_s=5.0)
        assert stream.accepted is not None and stream.accepted["created"] == int(wall) - 100
        assert [t.body["created"] for t in seen if isinstance(t, m.Tokenize)] == [int(wall) - 100]

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["thaw", "kill"])
def test_blocks_wait_for_a_writer_that_is_only_silent(end: str, tmp_path: Path) -> None:
    """R10. Scenario: a copy was given up while its transfer actor is silent: that may wake and write until it exits."""

    async def scenario(f: Fleet) -> None:
        pools = [f.actor(f"decode-{number}").pool for number in range(2)]
        f.freeze("transfer-0")
        stream = await f.ask(PROMPT, max_tokens=30)
        await f.system.clock.sleep(0.5)
        f.cancel(stream)
        await f.system.clock.sleep(0.3)
        held = [pool.num_quarantined for pool in pools]
        assert sum(held) > 0
        await f.system.clock.sleep(2.5)
        assert not f.nodes["decode-0"].membership.is_up(f.actor("transfer-0").ref)
        assert [pool.num_quarantined for pool in pools] == held
        if end == "thaw":
            f.thaw("transfer-0")
        else:
            await f.kill("transfer-0")
        await f.rest(limit_s=5.0)
        assert [pool.num_quarantined for pool in pools] == [0, 0]

    run(scenario, tmp_path)


@pytest.mark.parametrize("prefill", [0, 1], ids=["a dispatch", "a reservation"])
def test_an_engine_that_holds_as_many_requests_as_it_may_refuses_more(
    prefill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request is asked for again until there is room; nothing of it is held meanwhile."""
    monkeypatch.setattr("actors.engine_host.MAX_WORKS", 1)

    async def scenario(f: Fleet) -> None:
        prompts = [f"{number} {PROMPT}" for number in range(2)]
        streams = [await f.ask(prompt, max_tokens=30) for prompt in prompts]
        most = 0
        while any(stream.terminal is None for stream in streams):
            await f.system.clock.sleep(0.02)
            most = max([most, *(len(engine.works) for engine in f.engines())])
        for prompt, stream in zip(prompts, streams, strict=True):
            check(stream, prompt, 30)
        assert most == 1
        await f.rest(limit_s=5.0)

    run(scenario, tmp_path, prefill=prefill, decode=1)


def test_a_detokenizer_that_was_given_up_and_chosen_again_gets_everything(tmp_path: Path) -> None:
    """Scenario: it is told to drop the request and opens it anew, with nothing; the engine sends on to the same one.

    It was acknowledged by it before, and would repeat what lies behind a gap until the deadline.
    """

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 100)
        await f.items(stream, 20)
        owner, now = f.actor("admission-0"), f.system.clock.now()
        table = owner._table
        owned = table.get(stream.request_id)
        again = owned.detok
        choose, table._choose_detokenizer = table._choose_detokenizer, lambda record: again
        owner._perform(table._lose_detok(owned, again, "silent", now))
        table._choose_detokenizer = choose
        await f.end(stream, limit_s=5.0)
        check(stream, PROMPT, 100)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)
