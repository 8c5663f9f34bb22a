"""All who own requests or hold their records die within a moment: who starts next takes over what still runs.

What is left is the edge, which asks again, and detokenizers and engines, which report what has no owner. All of them
reach whoever is started first, and they reach two of them where two are started: each request is to have one owner in
the end, and its whole text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_adoption import PROMPT, ask_of, check
from test_system import add_edge, read, submit
from virtual_fleet import Fleet, answer, fleet

from edge.exchange import OpenRequest
from runtime.bus import BusMessage
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.codec import encode
from schemas.errors import Unavailable
from schemas.items import ACKS, Ack, acks_body
from schemas.messages import ExitNotice
from schemas.record import Fence, ReplyTo
from schemas.subjects import EXIT, Ref

COUNT = 250
MOMENTS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, *, seed: int = 0, whole_below: int = 10_000) -> Any:
    """Run `scenario(fleet)` on a fresh instance with an edge, whose decode engines run requests whole by default."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, whole_below=whole_below) as f:
            await f.system.start(add_edge(f))
            await f.system.clock.sleep(0.5)
            return await scenario(f)

    return run_virtual(main, seed=seed)


async def whole(f: Fleet, request: OpenRequest, text: str = "") -> None:
    """The request comes to its end with the text of an undisturbed one."""
    limit = f.system.clock.now() + 20.0
    while not request.inflight.ended and f.system.clock.now() < limit:
        text += await read(f, request, until=sum(request.inflight.next) + 1)
    text += await read(f, request)
    assert request.inflight.error is None
    assert text == answer(PROMPT, COUNT)


async def ends(f: Fleet, requests: list[OpenRequest]) -> None:
    """All of them come to their ends well before their deadlines; says which did not."""
    limit = f.system.clock.now() + 15.0
    while f.system.clock.now() < limit and not all(r.inflight.ended for r in requests):
        await f.system.clock.sleep(0.05)
        for request in requests:
            f.actor("edge-0").exchange.taken(request)
    hung = [(r.id, r.inflight.next, r.inflight.accepted) for r in requests if not r.inflight.ended]
    assert not hung, f"{len(hung)} of {len(requests)} hang: {hung}"
    for request in requests:
        await whole(f, request)


async def untaken(f: Fleet) -> OpenRequest:
    """Ask for more than a client's window and take nothing: the engine is done, the detokenizer has the rest."""
    request = submit(f, PROMPT, 700)
    await f.system.until(lambda: sum(request.inflight.next) > 0, limit_s=5.0)
    await f.system.until(lambda: not any(e.works for e in f.engines()), limit_s=30.0)
    assert not request.inflight.ended
    return request


def test_streams_go_on_when_all_admission_actors_were_gone_for_a_second(tmp_path: Path) -> None:
    """R2, R11. Scenario: the heir dies before its replacement is there; the edge's try meets the orphans' reports."""

    async def scenario(f: Fleet) -> None:
        requests = [submit(f, PROMPT, COUNT) for _ in range(4)]
        native = await f.ask(PROMPT, max_tokens=COUNT)
        await f.system.until(lambda: all(sum(r.inflight.next) > 20 for r in requests), limit_s=5.0)
        for number in range(2):
            await f.kill(f"admission-{number}", again_after_s=None)
        await f.system.clock.sleep(1.0)
        await f.system.start(f.make("admission", 0))
        await ends(f, requests)
        await f.end(native, limit_s=10.0)
        check(native, PROMPT, COUNT)

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_every_request_has_one_owner_in_the_end(seed: int, tmp_path: Path) -> None:
    """R3. Scenario: two owners start at any distance after two have died, in a third of the cases with an engine."""

    async def scenario(f: Fleet) -> None:
        draw, sleep = random.Random(seed), f.system.clock.sleep
        requests = [submit(f, PROMPT, COUNT) for _ in range(3)]
        native = [await f.ask(PROMPT, max_tokens=COUNT) for _ in range(2)]
        moment = draw.randrange(60)
        await f.system.until(lambda: sum(requests[0].inflight.next) >= moment, limit_s=5.0)
        await f.system.until(lambda: all(s.accepted is not None for s in native), limit_s=5.0)
        requests += [submit(f, PROMPT, COUNT) for _ in range(3)]
        await sleep(draw.choice(MOMENTS))
        first, second = draw.sample(["admission-0", "admission-1"], 2)
        await f.kill(first, again_after_s=None)
        await sleep(draw.choice([0.0, 0.005, 0.1, 0.5, 1.5]))
        requests += [submit(f, PROMPT, COUNT) for _ in range(2)]
        await sleep(draw.choice(MOMENTS))
        await f.kill(second, again_after_s=None)
        if draw.random() < 0.35:
            await sleep(draw.choice(MOMENTS))
            await f.kill(draw.choice(["decode-0", "decode-1", "detokenize-0", "detokenize-1", "prefill-0"]))
        await sleep(draw.choice([0.05, 0.3, 0.6, 1.2]))
        number = draw.randrange(2)
        await f.system.start(f.make("admission", number))
        if draw.random() < 0.5:
            await sleep(draw.choice([0.01, 0.3, 1.0]))
            await f.system.start(f.make("admission", 1 - number))
        await ends(f, requests)
        for stream in native:
            await f.end(stream, limit_s=10.0)
            check(stream, PROMPT, COUNT)

    simulate(scenario, tmp_path, seed=seed)


def test_an_early_try_that_has_only_waited_takes_nothing_from_a_living_owner(tmp_path: Path) -> None:
    """R3, R11. Scenario: `Submit` of term 1 waits for a first engine; term 2 is accepted elsewhere and kept here."""

    async def scenario(f: Fleet) -> None:
        request = submit(f, PROMPT, COUNT)
        await f.system.until(lambda: request.inflight.accepted is not None, limit_s=5.0)
        first = request.inflight.accepted
        assert first is not None
        await f.kill(f"admission-{first.owner.id}")
        heir = f.actor(f"admission-{first.owner.id}")  # it was started anew, and is the next owner's backup
        await f.system.until(lambda: heir.statistics()["records_held"] == 1, limit_s=5.0)
        accepted = request.inflight.accepted
        assert accepted is not None and accepted.term > 0 and accepted.owner != heir.ref
        wall, edge = f.system.clock.wall(), f.actor("edge-0").ref
        early = m.Submit(
            request_id=request.id, api="completion", body=request.body, term=accepted.term, accept_by=wall + 2.0,
            deadline=wall + 60.0, reply=ReplyTo(subject=edge.subject, mode="mailbox"),
        )  # fmt: skip
        f.system.send(heir.ref, early, sender=edge)
        await f.system.clock.sleep(0.01)
        assert heir.load()["running"] == 0 and heir.statistics()["records_held"] == 1
        await ends(f, [request])
        assert request.inflight.accepted is not None and request.inflight.accepted.owner == accepted.owner

    simulate(scenario, tmp_path)


def test_an_orphan_of_a_former_owner_is_not_taken_from_a_living_one(tmp_path: Path) -> None:
    """R3. Scenario: an engine that was away reports what another owner has placed anew; its heir knows better."""

    async def scenario(f: Fleet) -> None:
        request = submit(f, PROMPT, COUNT)
        await f.system.until(lambda: sum(request.inflight.next) >= 20, limit_s=5.0)
        accepted = request.inflight.accepted
        assert accepted is not None and accepted.backup is not None
        heir, engine = f.actor(f"admission-{accepted.backup.id}"), f.actor("prefill-0").ref
        record = heir._records._keeping.held[request.id].keep.record
        gone = record.model_copy(update={"owner": Ref("admission", accepted.owner.id, "0" * 16)})
        told = await f.system.tap(engine.subject)
        f.nodes[f"admission-{accepted.backup.id}"].membership.handle(
            BusMessage(EXIT, encode(ExitNotice(node="gone", pid=1, code=-9, refs=[gone.owner])))
        )
        orphan = m.Orphan(request_id=request.id, fence=Fence(-1, "x", 0), record=gone, source=engine)
        f.system.send(heir.ref, orphan, sender=engine)
        await f.system.clock.sleep(0.2)
        assert [(x.reason, x.fence.term) for x in told if isinstance(x, m.Close)] == [("fenced", accepted.term)]
        assert heir.load()["running"] == 0
        await ends(f, [request])

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("order", ["closed, then opened", "opened, then closed"])
def test_who_is_fenced_off_is_welcome_under_the_fence_itself(order: str, tmp_path: Path) -> None:
    """R3. Scenario: an owner tells a detokenizer that it serves without it, and then chooses that very one."""

    async def scenario(f: Fleet) -> None:
        request = submit(f, PROMPT, COUNT)
        await f.system.until(lambda: sum(request.inflight.next) >= 20, limit_s=5.0)
        name = next(n for n in ("detokenize-0", "detokenize-1") if f.actor(n)._sessions)
        detok = f.actor(name)
        session = detok._sessions[request.id]
        fence = Fence(session.fence.term + 1, "other.e", 0)
        head = {"request_id": request.id, "fence": fence, "deadline": session.record.deadline}
        close, opening = m.Close(**head, reason="fenced"), m.Open(**head, record=session.record)
        for message in (close, opening) if order.startswith("closed") else (opening, close):
            f.system.send(detok.ref, message, sender=session.record.owner)
        await f.system.clock.sleep(0.01)
        now = detok._sessions[request.id]
        assert now.fence == fence and not now.ended and not now.fenced_off

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("how", ["a dispatch", "a reservation"])
def test_an_engine_is_welcome_to_whoever_has_fenced_off_its_work(how: str, tmp_path: Path) -> None:
    """R3. Scenario: a detokenizer acknowledges `fenced` with the new owner's fence; that one chooses this engine."""

    async def scenario(f: Fleet) -> None:
        request = submit(f, PROMPT, COUNT)
        await f.system.until(lambda: sum(request.inflight.next) >= 20, limit_s=5.0)
        engine = next(e for e in f.engines() if request.id in e.works)
        work = engine.works[request.id]
        fence = Fence(work.fence.term + 1, "other.e", 0)
        ack = Ack(request.id, fence, "fenced", [], 0)
        engine.receive_hot(ACKS, acks_body([ack]), work.detok)
        assert request.id not in engine.works
        head = {"request_id": request.id, "fence": fence, "deadline": work.record.deadline, "record": work.record}
        other = f.actor("prefill-0").ref
        if how == "a dispatch":
            engine.receive(m.Dispatch(**head, detokenize=work.detok, outputs=[[]], reply=work.owner), work.owner)
        else:
            engine.receive(
                m.Reserve(
                    **head, part=0, parts=1, num_tokens=10, choices=[0], outputs=[[]], detokenize=work.detok,
                    source=other,
                ),
                other,
            )  # fmt: skip
        assert engine.works[request.id].fence == fence

    simulate(scenario, tmp_path)


def test_a_reservation_under_a_lower_fence_is_answered(tmp_path: Path) -> None:
    """R3. Scenario: a request was closed at the engine that its hand-off is meant for: without a word it would wait."""

    async def scenario(f: Fleet) -> None:
        request = submit(f, PROMPT, COUNT)
        await f.system.until(lambda: sum(request.inflight.next) >= 20, limit_s=5.0)
        engine = next(e for e in f.engines() if request.id in e.works)
        work, other = engine.works[request.id], f.actor("prefill-0").ref
        told = await f.system.tap(other.subject)
        fence = work.fence.before
        engine.receive(
            m.Reserve(
                request_id=request.id, fence=fence, deadline=work.record.deadline, record=work.record, part=0, parts=1,
                num_tokens=10, choices=[0], outputs=[[]], detokenize=work.detok, source=other,
            ),
            other,
        )  # fmt: skip
        await f.system.clock.sleep(0.01)
        (answer,) = [x for x in told if isinstance(x, m.Reserved)]
        assert answer.fence == fence and answer.error is not None
        assert engine.works[request.id] is work
        await ends(f, [request])

    simulate(scenario, tmp_path)


def test_a_request_that_failed_at_an_engine_fails_there_once(tmp_path: Path) -> None:
    """Scenario: its owner is dead, so nobody closes it; its abort is answered by what would fail it again, for ever."""

    async def scenario(f: Fleet) -> None:
        engine = f.actor("prefill-0")
        f.freeze("transfer-0")
        stream = await f.ask(PROMPT, max_tokens=20)
        parts = lambda: [p for w in engine.works.values() for p in w.parts.values()]  # noqa: E731
        await f.system.until(lambda: any(p.transfer for p in parts()), limit_s=5.0)
        for number in range(2):
            await f.kill(f"admission-{number}", again_after_s=None)
        seen = await f.system.tap(f.actor("transfer-0").ref.subject)
        engine.fail(engine.works[stream.request_id], Unavailable("its destination is gone"))
        f.thaw("transfer-0")
        await f.system.clock.sleep(1.0)
        assert len([x for x in seen if isinstance(x, m.TransferAbort)]) <= 3

    simulate(scenario, tmp_path, whole_below=0)  # it is handed over


def test_a_complete_choice_reaches_the_client_although_all_but_its_engine_die(tmp_path: Path) -> None:
    """R2, R8. Scenario: one of three choices is complete when the request is placed anew; then its detokenizer dies.

    The engine that runs the other two is the only one to have its ids.
    """

    async def scenario(f: Fleet) -> None:
        stop = answer(PROMPT, 30)[25:29]
        texts = [answer(PROMPT, COUNT, choice=c) for c in range(3)]
        assert all(stop not in text for text in texts[1:])
        stream = await f.ask(PROMPT, max_tokens=COUNT, n=3, stop=[stop])
        await f.system.until(lambda: stream.num_items > 140, limit_s=10.0)
        await f.kill(f.serving("decode", stream))
        at = stream.num_items
        await f.system.until(lambda: stream.num_items > at + 30, limit_s=10.0)
        await f.kill(f.serving("detokenize", stream), again_after_s=None)
        await f.end(stream, limit_s=10.0)
        assert ["".join(t) for t in stream.texts] == [texts[0].split(stop)[0], *texts[1:]]
        assert stream.finish == {0: "stop", 1: "length", 2: "length"}

    simulate(scenario, tmp_path, whole_below=0)


def test_an_engine_that_was_away_when_its_hand_off_was_given_up_keeps_no_blocks(tmp_path: Path) -> None:
    """Scenario: `Reserved` is its last word; it comes back when nobody says again that the owner has let it go."""

    async def scenario(f: Fleet) -> None:
        f.freeze("transfer-0")
        stream = await f.ask(PROMPT, max_tokens=30)
        engines = [f.actor(f"decode-{number}") for number in range(2)]
        await f.system.until(lambda: any(e.works and e.stepped.core.load()["expected"] for e in engines), limit_s=2.0)
        (away,) = [f"decode-{number}" for number in range(2) if engines[number].works]
        buses = f.system.buses(away)
        for bus in buses:
            bus.disconnect()
        f.thaw("transfer-0")
        await f.end(stream, limit_s=15.0)
        check(stream, PROMPT, 30)
        await f.system.clock.sleep(3.0)
        assert f.actor(away).works
        for bus in buses:
            bus.reconnect()
        await f.rest(limit_s=8.0)

    simulate(scenario, tmp_path, whole_below=0)


def test_an_owner_that_was_away_when_a_request_ended_lets_go_of_it(tmp_path: Path) -> None:
    """Scenario: every `Finished` to it is lost, its backup writes the account; it would keep it until the deadline."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 30)
        await f.items(stream, 20)
        buses = f.system.buses("admission-0")
        for bus in buses:
            bus.disconnect()
        await f.end(stream, limit_s=10.0)
        await f.system.clock.sleep(4.0)
        for bus in buses:
            bus.reconnect()
        assert not f.actor("admission-0").idle
        await f.system.until(lambda: f.actor("admission-0").idle, limit_s=4.0)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


def test_a_detokenizer_that_another_owner_closes_says_so_to_its_own(tmp_path: Path) -> None:
    """R3. Scenario: both were silent while the heir saw the request to its end; what is left is dropped."""

    async def scenario(f: Fleet) -> None:
        stream = await ask_of(f, "admission-0", PROMPT, 2000)
        await f.items(stream, 20)
        detok, owner, heir = f.actor(f.serving("detokenize", stream)), f.actor("admission-0"), f.actor("admission-1")
        fence = Fence(detok._sessions[stream.request_id].fence.term + 1, f"{heir.ref.id}.{heir.ref.epoch}", 0)
        close = m.Close(request_id=stream.request_id, fence=fence, reason="drop")
        f.system.send(detok.ref, close, sender=heir.ref)
        await f.system.until(lambda: not owner.load()["running"], limit_s=1.0)

    simulate(scenario, tmp_path)


@pytest.mark.parametrize("victim", ["detokenize", "detokenize and admission"])
def test_an_answer_that_is_complete_and_not_yet_taken_survives_its_detokenizer(victim: str, tmp_path: Path) -> None:
    """R5. Scenario: the client takes nothing for a while; the engine is done, the detokenizer alone has the rest."""

    async def scenario(f: Fleet) -> None:
        request = await untaken(f)
        accepted = request.inflight.accepted
        assert accepted is not None
        name = next(n for n in ("detokenize-0", "detokenize-1") if f.actor(n)._sessions)
        await f.kill(name, again_after_s=None)
        if "admission" in victim:
            await f.kill(f"admission-{accepted.owner.id}", again_after_s=None)
        assert await read(f, request) == answer(PROMPT, 700)
        assert request.inflight.error is None
        f.actor("edge-0").exchange.close(request)
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


def test_an_answer_that_is_complete_is_delivered_by_a_detokenizer_that_drains(tmp_path: Path) -> None:
    """Scenario: its client takes it slowly; to move it would be to compute all of it again."""

    async def scenario(f: Fleet) -> None:
        request = await untaken(f)
        name = next(n for n in ("detokenize-0", "detokenize-1") if f.actor(n)._sessions)
        before = sum(e.stepped.steps for e in f.engines())
        f.nodes[name].request_drain()
        await f.system.clock.sleep(1.0)
        assert f.actor(name).state == "draining"
        assert await read(f, request) == answer(PROMPT, 700)
        assert sum(e.stepped.steps for e in f.engines()) == before

    simulate(scenario, tmp_path)
