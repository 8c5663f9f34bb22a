"""Owners die and freeze in whole instances in virtual time: who holds the record takes over, and nothing shows.

Native clients throughout, unless a test says otherwise: no edge asks again for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_system import add_edge, read, submit
from virtual_fleet import Fleet, Stream, answer, fleet

from chaos.virtual.nodes import MODEL
from runtime.bus import BusMessage
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.codec import DecodeError, decode
from schemas.errors import DeadlineExceeded
from schemas.record import Fence, Record, ReplyTo
from schemas.subjects import EXIT

PROMPT = "the water that turns the wheel comes down the headrace " * 4
LONG = PROMPT * 5


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **layout: int) -> Any:
    """Run `scenario(fleet)` on a fresh instance whose decode engines run requests whole."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, whole_below=10_000, **layout) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


def check(stream: Stream, prompt: str, count: int) -> None:
    """The stream is the undisturbed one, and ended once."""
    assert stream.error is None
    assert stream.text == answer(prompt, count)
    assert stream.finish == {0: "length"}
    assert (stream.terminal or {})["usage"]["completion_tokens"] == count
    assert stream.later_terminals == 0


async def ask_of(f: Fleet, name: str, prompt: str, count: int, *, deadline_s: float = 60.0) -> Stream:
    """Ask this admission actor: the queue group would choose one."""
    stream = await f.ask(prompt, max_tokens=count, publish=False)
    stream.request_id, stream.deadline_s = f"r{len(f.streams)}", deadline_s
    submit_to(f, name, stream, prompt, count)
    return stream


def submit_to(f: Fleet, name: str, stream: Stream, prompt: str, count: int, *, term: int = 0) -> None:
    """Send a request to an admission actor, for the first time or once more."""
    wall = f.system.clock.wall()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}
    msg = m.Submit(
        request_id=stream.request_id, api="completion", body=body, deadline=wall + (stream.deadline_s or 60.0),
        accept_by=wall + 2.0, reply=ReplyTo(subject=stream.inbox, mode="inbox", encoding="json"), term=term,
    )  # fmt: skip
    f.system.send(f.actor(name).ref, msg)


def steps(f: Fleet) -> int:
    return sum(a.stepped.steps for a in f.engines())


def failovers(f: Fleet, kind: str) -> int:
    """How often requests were moved off actors of a kind, as all admission actors that live count it."""
    total = 0.0
    for name, node in f.nodes.items():
        if not f.system._slots[name].gone:
            for line in node.telemetry.render().splitlines():
                if line.startswith("headrace_failovers_total{") and f'kind="{kind}"' in line:
                    total += float(line.rsplit(" ", 1)[1])
    return int(total)


# --- the second holder ------------------------------------------------------------------------------


def test_a_record_is_at_a_second_admission_actor_before_accepted(tmp_path: Path) -> None:
    """R2. Scenario: the owner dies right after `accepted`: somebody must know of the request by then."""

    async def scenario(f: Fleet) -> None:
        seen: list[str] = []

        def note(message: BusMessage) -> None:
            try:
                seen.append(type(decode(message.payload)[0]).__name__)
            except DecodeError:
                pass

        await f.system.outside.subscribe("actor.admission.>", note)
        stream = await ask_of(f, "admission-0", PROMPT, 20)
        inner = f._take

        def take(got: Stream, message: BusMessage) -> None:
            seen.append("accepted" if b'"accepted"' in message.payload else "frame")
            inner(got, message)

        f._take = take  # type: ignore[method-assign]
        await f.end(stream)
        check(stream, PROMPT, 20)
        assert seen.index("Keep") < seen.index("Kept") < seen.index("accepted") < seen.index("frame")
        held = [f.actor(f"admission-{i}") for i in range(2)]
        await f.system.until(lambda: not any(a.statistics()["records_held"] for a in held), limit_s=0.2)

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_request_is_accepted_although_nobody_can_hold_its_record(frozen: bool, tmp_path: Path) -> None:
    """Scenario: the only other admission actor answers nothing, or is not there: no request waits for it long."""

    async def scenario(f: Fleet) -> None:
        if frozen:
            f.freeze("admission-1")
        else:
            await f.kill("admission-1", again_after_s=None)
        before = f.system.clock.now()
        stream = await ask_of(f, "admission-0", PROMPT, 20)
        await f.system.until(lambda: stream.accepted is not None, limit_s=1.0)
        assert f.system.clock.now() - before <= 0.25
        assert f.actor("admission-0").statistics()["accepted_without_backup"] == 1
        await f.end(stream)
        check(stream, PROMPT, 20)

    simulate(scenario, tmp_path)


# --- owners die -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 30])
def test_a_stream_goes_on_without_a_step_lost_when_its_owner_dies(after: int, tmp_path: Path) -> None:
    """R2, R3. Scenario: the adopter's `Open` would fence the engine's items of that moment, and it would stop."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 60)
        await f.items(stream, after)
        await f.kill("admission-0", again_after_s=None)
        heir = f.actor("admission-1")
        await f.system.until(lambda: heir.load()["running"] == 1, limit_s=1.0)
        await f.end(stream)
        check(stream, PROMPT, 60)
        assert steps(f) <= 60 + 5
        assert failovers(f, "decode") == 0 and failovers(f, "admission") == 1
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_an_owner_may_die_at_any_moment_of_a_request(tmp_path: Path) -> None:
    """R2. Every 20 ms from its arrival on: before `accepted` nothing is promised, after it every request is right.

    Scenarios: the record alone is left; the detokenizer holds it and no engine does; an engine computes its prompt.
    """
    for tick in range(24):
        directory = tmp_path / str(tick)
        directory.mkdir()

        async def scenario(f: Fleet, tick: int = tick) -> None:
            stream = await ask_of(f, "admission-0", LONG, 12)
            await f.system.clock.sleep(0.0005 * tick if tick < 6 else 0.02 * (tick - 5))
            accepted = stream.accepted is not None
            await f.kill("admission-0")
            if accepted or stream.num_items:
                await f.end(stream, limit_s=5.0)
                check(stream, LONG, 12)
            await f.rest(limit_s=5.0)

        simulate(scenario, directory, seed=tick)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["decode", "detokenize"])
@pytest.mark.parametrize("after", [0, 20])
def test_an_owner_dies_together_with_another(other: str, after: int, tmp_path: Path) -> None:
    """Scenario: what the detokenizer has is all that is left of the engine, or the other way round."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", LONG, 60)
        if after:
            await f.items(stream, after)
        else:
            await f.system.clock.sleep(0.1)
        victim = f.serving(other, stream)
        await f.kill("admission-0", again_after_s=None)
        await f.kill(victim)
        await f.end(stream, limit_s=10.0)
        check(stream, LONG, 60)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_an_owner_and_its_backup_die_one_after_another(tmp_path: Path) -> None:
    """R2. Scenario: an adopter has no backup of its own; who was started meanwhile becomes it, and adopts next."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 300)
        for victim in ("admission-0", "admission-1", "admission-0"):
            at = stream.num_items
            await f.items(stream, at + 20)
            await f.kill(victim)
            await f.system.clock.sleep(1.2)  # a new backup is looked for every second
        victim = f.serving("decode", stream)
        await f.kill(victim)
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 300)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_everybody_who_holds_a_request_but_its_engine_dies_at_once(tmp_path: Path) -> None:
    """R2. Scenario: both light nodes die; the engine alone has the record, and reports it to who starts next."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=200)
        await f.items(stream, 20)
        await f.kill("light-0", again_after_s=None)
        await f.kill("light-1", again_after_s=None)
        await f.system.clock.sleep(0.5)
        for number in range(2):
            await f.system.start(f.make("light", number))
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 200)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, admission=0, tokenize=0, detokenize=0, light=2)


@pytest.mark.slow
def test_everybody_who_holds_a_request_but_its_detokenizer_dies_at_once(tmp_path: Path) -> None:
    """R2. Scenario: owner, backup and engine die; the detokenizer's `Orphan` to who starts next is all that is left."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 100)
        await f.items(stream, 20)
        await f.kill("admission-0", again_after_s=None)
        await f.kill("admission-1", again_after_s=None)
        await f.kill(f.serving("decode", stream), again_after_s=None)
        await f.system.clock.sleep(0.5)
        await f.system.start(f.make("admission", 0))
        await f.end(stream, limit_s=10.0)
        check(stream, PROMPT, 100)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("thaw_s", [2.0, 6.0])
def test_a_frozen_owner_is_replaced_and_lets_go_when_it_wakes(thaw_s: float, tmp_path: Path) -> None:
    """R3, R7. Scenario: the owner wakes, thinks that it owns the request, and is told `superseded`."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 400)
        await f.items(stream, 20)
        f.freeze("admission-0")
        await f.system.clock.sleep(1.8)
        assert f.actor("admission-1").load()["running"] == 1
        await f.kill(f.serving("decode", stream), again_after_s=0.2)
        await f.system.clock.sleep(thaw_s - 2.0)
        f.thaw("admission-0")
        await f.system.until(lambda: f.actor("admission-0").idle, limit_s=4.0)
        assert stream.terminal is None and f.actor("admission-1").load()["running"] == 1
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 400)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("later_s", [0.2, 6.0], ids=["it remembers the stream", "it remembers the fence alone"])
def test_a_detokenizer_that_was_fenced_off_does_not_end_what_goes_on_elsewhere(later_s: float, tmp_path: Path) -> None:
    """R2, R3. Scenario: a detokenizer freezes, is replaced and wakes; then the owner dies, and it answers first."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 600)
        await f.items(stream, 20)
        fenced = f.serving("detokenize", stream)
        f.freeze(fenced)
        await f.system.clock.sleep(2.0)
        f.thaw(fenced)
        await f.system.clock.sleep(later_s)
        serving = f.nodes[f.serving("detokenize", stream)]
        assert serving.name != fenced and stream.terminal is None
        f.freeze(serving.name)
        await f.kill("admission-0", again_after_s=None)
        await f.system.clock.sleep(0.15)
        f.thaw(serving.name)
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 600)
        assert failovers(f, "decode") == 0
        await f.rest(limit_s=6.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_two_adopters_at_once_are_resolved_by_the_fence(tmp_path: Path) -> None:
    """R3. Scenario: the backup adopts from its record, a third actor from a report: one of them lets go."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 200)
        await f.items(stream, 20)
        holder = next(i for i in (1, 2) if f.actor(f"admission-{i}").statistics()["records_held"])
        third = f.actor(f"admission-{3 - holder}")
        detok = f.actor(f.serving("detokenize", stream))
        session = detok._sessions[stream.request_id]
        orphan = detok._orphan(session)
        await f.kill("admission-0", again_after_s=None)
        f.system.send(third.ref, orphan, sender=detok.ref)
        await f.system.clock.sleep(0.4)
        owners = [i for i in (1, 2) if f.actor(f"admission-{i}").load()["running"]]
        assert len(owners) == 1
        await f.kill(f.serving("decode", stream))
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 200)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path, admission=3)


@pytest.mark.slow
def test_an_adopter_outbids_a_fence_that_it_had_not_heard_of(tmp_path: Path) -> None:
    """R3. Scenario: the client's side had raised the term, the backup did not hear, and would be told `superseded`."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 300)
        await f.items(stream, 20)
        f.system.broker.partition("admission-0-control", "admission-1-control")
        wall = f.system.clock.wall()
        again = m.Submit(
            request_id=stream.request_id, api="completion", body={}, deadline=wall + 60.0, accept_by=wall + 2.0, term=5,
            reply=ReplyTo(subject=stream.inbox, mode="inbox", encoding="json"),
        )  # fmt: skip
        f.system.send(f.actor("admission-0").ref, again)
        await f.items(stream, 60)
        await f.kill("admission-0", again_after_s=None)
        f.system.broker.heal()
        await f.items(stream, 100)
        assert f.actor("admission-1").load()["running"] == 1
        await f.kill(f.serving("decode", stream))
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 300)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_cancel_and_a_deadline_work_after_an_adoption(tmp_path: Path) -> None:
    """R4. Scenario: the adopter must know the deadline, and close what it never dispatched."""

    async def scenario(f: Fleet) -> None:
        left = await ask_of(f, "admission-0", PROMPT, 400)
        late = await ask_of(f, "admission-0", PROMPT + "!", 400, deadline_s=2.5)
        await f.items(left, 20)
        await f.kill("admission-0")
        await f.items(left, 60)
        f.cancel(left)
        await f.system.until(lambda: left.request_id not in f.actor("admission-1").load()["requests"], limit_s=1.0)
        await f.end(late, limit_s=5.0)
        assert late.error == "deadline_exceeded" and late.later_terminals == 0
        assert late.ended_at - late.asked_at <= 3.0
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_request_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    """Scenario: a request ends, its `Release` is lost, its owner dies: the backup's record is of nothing any more."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 20)
        await f.items(stream, 5)
        f.system.broker.partition("admission-0-control", "admission-1-control")
        await f.end(stream)
        await f.system.clock.sleep(0.2)
        assert f.actor("admission-1").statistics()["records_held"] == 1
        before = steps(f)
        await f.kill("admission-0")
        await f.system.clock.sleep(2.0)
        check(stream, PROMPT, 20)
        assert steps(f) == before
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_late_try_of_a_request_that_has_ended_leaves_nothing_open(tmp_path: Path) -> None:
    """Scenario: an owner dies at the end; its backup settles the account; then a try arrives that was sent before."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-1", PROMPT, 20)
        await f.items(stream, 15)
        f.freeze("admission-1")
        await f.end(stream, limit_s=2.0)
        check(stream, PROMPT, 20)
        await f.kill("admission-1", again_after_s=None)
        await f.system.until(lambda: not f.actor("admission-0").statistics()["records_held"], limit_s=2.0)
        await f.system.until(lambda: f.actor("admission-0").idle, limit_s=2.0)
        submit_to(f, "admission-0", stream, PROMPT, 20, term=1)
        await f.system.clock.sleep(1.0)
        await f.rest(limit_s=2.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_an_engine_that_was_away_when_a_request_ended_does_not_keep_it(tmp_path: Path) -> None:
    """Scenario: it comes back when the owner has forgotten the request, and the detokenizer has died meanwhile."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 100)
        await f.items(stream, 20)
        away = f.serving("decode", stream)
        detok = f.serving("detokenize", stream)
        buses = f.system.buses(away)
        for bus in buses:
            bus.disconnect()
        await f.end(stream, limit_s=10.0)
        check(stream, PROMPT, 100)
        await f.kill(detok)
        await f.system.until(lambda: f.actor("admission-0").idle, limit_s=5.0)
        for bus in buses:
            bus.reconnect()
        await f.system.clock.sleep(0.5)
        assert f.actor(away).works
        await f.rest(limit_s=4.0)

    simulate(scenario, tmp_path)


def test_who_reports_a_request_to_an_owner_that_has_let_it_go_is_told_to_drop_it(tmp_path: Path) -> None:
    """Scenario: another owner took it over while an engine was away; the engine knows the former owner alone."""

    async def scenario(f: Fleet) -> None:
        owner, engine = f.actor("admission-0").ref, f.actor("decode-0").ref
        told = await f.system.tap(engine.subject)
        fence = Fence(0, f"{owner.id}.{owner.epoch}", 3)
        record = Record(request_id="r", owner=owner, reply=ReplyTo(subject="inbox", mode="inbox", encoding="json"))
        orphan = m.Orphan(request_id="r", fence=fence, deadline=f.system.clock.wall() + 60.0, record=record)
        f.system.send(owner, orphan, sender=engine)
        await f.system.until(lambda: told, limit_s=1.0)
        (close,) = told
        assert isinstance(close, m.Close) and (close.reason, close.fence) == ("drop", fence)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_the_account_of_a_request_whose_owner_died_is_written_once(tmp_path: Path) -> None:
    """Scenario: the owner dies with its last `Finished` unread: the detokenizer tells the backup."""

    async def scenario(f: Fleet) -> None:
        usage: list[bytes] = []
        await f.system.outside.subscribe("usage.settled", lambda message: usage.append(message.payload))
        stream = await ask_of(f, "admission-0", PROMPT, 20)
        await f.items(stream, 15)
        f.freeze("admission-0")
        await f.end(stream)
        check(stream, PROMPT, 20)
        await f.kill("admission-0", again_after_s=None)
        await f.system.clock.sleep(1.0)
        assert len(usage) == 1 and b'"completion_tokens":20' in usage[0]

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_request_waits_for_room_at_its_heir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2. Scenario: the heir owns as many requests as it may, and nobody else knows of this one."""

    async def scenario(f: Fleet) -> None:
        own = await ask_of(f, "admission-1", PROMPT, 100)
        await f.items(own, 5)
        for number in range(2):
            await f.kill(f"tokenize-{number}", again_after_s=None)
        stream = await ask_of(f, "admission-0", LONG, 20)
        await f.system.until(lambda: stream.accepted is not None)
        monkeypatch.setattr("actors.ownership.MAX_OPEN", 1)
        await f.kill("admission-0", again_after_s=None)
        await f.system.start(f.make("tokenize", 0))
        await f.system.clock.sleep(0.5)
        assert f.actor("admission-1").load()["running"] == 1
        await f.end(own)
        await f.end(stream, limit_s=5.0)
        check(own, PROMPT, 100)
        check(stream, LONG, 20)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


# --- the ladder of endings --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dead", "frozen", "at"),
    [
        ((), (), 0.0),
        (("detokenize-0", "detokenize-1"), (), 0.3),
        (("detokenize-0", "detokenize-1"), ("admission-0",), 0.5),
    ],
    ids=["the detokenizer at D", "its owner at D + 0.3 s", "its backup at D + 0.5 s"],
)
def test_a_deadline_needs_no_failure_detector(
    dead: tuple[str, ...], frozen: tuple[str, ...], at: float, tmp_path: Path
) -> None:
    """R4. Scenario: everybody before this one on the ladder is gone, and nobody has noticed of the last one yet."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 2000, deadline_s=3.0)
        await f.items(stream, 10)
        ends_at = stream.asked_at + 3.0
        await f.system.clock.sleep(ends_at - 0.4 - f.system.clock.now())
        for name in dead:
            await f.kill(name, again_after_s=None)
        for name in frozen:
            f.freeze(name)
        await f.end(stream, limit_s=5.0)
        assert stream.error == "deadline_exceeded"
        assert at - 0.01 <= stream.ended_at - ends_at <= at + 0.12
        assert stream.later_terminals == 0

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_an_engine_tells_a_native_client_of_its_deadline_when_nobody_else_is_left(tmp_path: Path) -> None:
    """R4. Scenario: both light nodes die and come back after D + 1 s; the engine alone has the record."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=2000, deadline_s=1.5)
        await f.items(stream, 20)
        for number in range(2):
            await f.kill(f"light-{number}", again_after_s=None)
        await f.end(stream, limit_s=5.0)
        assert stream.error == "deadline_exceeded" and stream.later_terminals == 0
        assert 0.7 <= stream.ended_at - stream.asked_at - 1.5 <= 1.0
        await f.system.until(lambda: not any(a.works for a in f.engines()), limit_s=1.0)

    simulate(scenario, tmp_path, admission=0, tokenize=0, detokenize=0, light=2)


@pytest.mark.slow
def test_the_edge_ends_what_nobody_else_can(tmp_path: Path) -> None:
    """R4. Scenario: detokenizers are dead, both admission actors frozen; the client still hears at D + 0.7 s."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        request = submit(f, PROMPT, 2000, deadline_s=3.0)
        await read(f, request, until=10)
        await f.system.clock.sleep(request.ends_at - 1.1 - f.system.clock.now())
        for number in range(2):
            await f.kill(f"detokenize-{number}", again_after_s=None)
            f.freeze(f"admission-{number}")
        await f.system.until(lambda: request.inflight.ended, limit_s=5.0)
        late = f.system.clock.now() - (request.ends_at - 0.7)
        assert 0.69 <= late <= 0.8
        assert isinstance(request.inflight.error, DeadlineExceeded)

    simulate(scenario, tmp_path)


# --- edges ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("announced_first_to", ["admission", "edge"])
def test_an_edges_stream_goes_on_without_a_step_lost_when_its_owner_dies(
    announced_first_to: str, tmp_path: Path
) -> None:
    """R2, R11. Scenario: the edge asks the backup before it knows of the death, or after it has adopted."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        request = submit(f, PROMPT, 100)
        text = await read(f, request, until=20)
        accepted = request.inflight.accepted
        assert accepted is not None and accepted.backup is not None
        slow = f"admission-{accepted.backup.id}" if announced_first_to == "edge" else "edge-0"
        f.nodes[slow].membership.handle = late(f, f.nodes[slow].membership.handle)  # type: ignore[method-assign]
        await f.kill(f"admission-{accepted.owner.id}", again_after_s=None)
        text += await read(f, request)
        assert request.inflight.error is None and text == answer(PROMPT, 100)
        assert request.inflight.accepted is not None and request.inflight.accepted.owner == accepted.backup
        assert steps(f) <= 100 + 5
        f.actor("edge-0").exchange.close(request)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


def late(f: Fleet, handle: Any) -> Any:
    """Exit notices are looked at 50 ms late."""

    def take(message: BusMessage) -> None:
        asyncio.get_running_loop().call_later(0.05 if message.subject == EXIT else 0.0, handle, message)

    return take


@pytest.mark.slow
@pytest.mark.parametrize("owner_too", [False, True])
def test_a_dead_edge_takes_all_its_work_with_it(owner_too: bool, tmp_path: Path) -> None:
    """R6. Scenario: owner and edge die together; whoever adopts knows that nobody waits for the answer."""

    async def scenario(f: Fleet) -> None:
        await f.system.start(add_edge(f))
        await f.system.clock.sleep(0.5)
        for i in range(4):
            submit(f, f"{i} {PROMPT}", 1000)
        await f.system.clock.sleep(0.5)
        assert sum(a.stepped.core.load()["running"] for a in f.engines()) == 4
        await f.kill("edge-0", again_after_s=None)
        if owner_too:
            await f.kill("admission-0", again_after_s=None)
        before = steps(f)
        await f.rest(limit_s=3.0)
        assert steps(f) - before <= (30 if owner_too else 4)

    simulate(scenario, tmp_path)


# --- cut off ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["admission", "decode", "detokenize"])
@pytest.mark.parametrize("for_s", [1.0, 5.0])
def test_a_node_that_is_cut_off_moves_nothing_and_is_replaced(kind: str, for_s: float, tmp_path: Path) -> None:
    """R3, R7. Scenario: its connections look open; it hears nobody, not even itself, and may not take all for dead."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 400)
        await f.items(stream, 20)
        name = f.serving(kind, stream)
        others = [bus for n in f.nodes if n != name for bus in (f"{n}-control", f"{n}-stream")]
        for mine in (f"{name}-control", f"{name}-stream"):
            for other in [*others, "outside", f"{name}-control", f"{name}-stream"]:
                f.system.broker.partition(mine, other)
        await f.system.clock.sleep(for_s)
        f.system.broker.heal()
        own = f.nodes[name].telemetry.render().splitlines()
        moved = [line for line in own if line.startswith("headrace_failovers_total{") and not line.endswith(" 0.0")]
        assert moved == []
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 400)
        await f.rest(limit_s=6.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_a_client_that_reconnects_later_than_the_nodes_is_not_taken_for_gone(tmp_path: Path) -> None:
    """R6. Scenario: after a restart of the bus nobody listens for the reply for two seconds."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=300)
        await f.items(stream, 30)
        nodes = [bus for slot in f.system._slots.values() for bus in (slot.control, slot.stream)]
        for bus in [f.system.outside, *nodes]:
            bus.disconnect()
        await f.system.clock.sleep(0.3)
        for bus in nodes:
            bus.reconnect()
        await f.system.clock.sleep(2.1)
        f.system.outside.reconnect()
        await f.end(stream, limit_s=20.0)
        check(stream, PROMPT, 300)
        assert failovers(f, "decode") == failovers(f, "admission") == failovers(f, "detokenize") == 0

    simulate(scenario, tmp_path)
