"""Admission actors that are silent, refuse, or die: the edge asks another, and the client sees one answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import edge.actor
from edge.submission import ACCEPT_LIMIT_S
from runtime.node import Node
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.errors import Overloaded
from schemas.messages import Submit
from tests.edge.sse import events, finishes, texts
from tests.support.edge_peer import Answer, EdgeSetup, Reading, ScriptedPeer, chat, edge_setup

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def serving(s: EdgeSetup) -> tuple[Node, ScriptedPeer, ScriptedPeer]:
    """Return the node and the peer that hold the request, and another peer."""
    index = next(i for i, p in enumerate(s.peers) if p.submits)
    return s.peer_nodes[index], s.peers[index], s.peers[1 - index]


@pytest.mark.slow
async def test_silence_is_answered_by_asking_another_under_the_same_id() -> None:
    """R8, R11. Scenario: `Submit` is lost. After 300 ms a higher term asks another; seed and time stay."""
    first: list[Submit] = []

    def answer(submit: Submit) -> Answer:
        if not first:
            first.append(submit)
            return Answer(silent=True)
        return Answer()

    async with edge_setup(answer, peers=2) as s:
        response = await s.http.post(CHAT, json=chat())
        one, two = sorted(s.submits, key=lambda x: x.term)

        assert response.json()["choices"][0]["message"]["content"] == "Hello!"
        assert (one.term, two.term) == (0, 1)
        assert one.request_id == two.request_id
        assert (one.seed, one.created, one.deadline) == (two.seed, two.created, two.deadline)
        assert one.created == response.json()["created"]
        assert all(len(p.submits) == 1 for p in s.peers)
        assert two.accept_by > one.accept_by


async def test_a_seed_of_the_client_is_the_seed_of_the_request() -> None:
    """One that the client left out is chosen at the edge, differently each time."""
    async with edge_setup() as s:
        await s.http.post(CHAT, json=chat(seed=-5))
        for _ in range(2):
            await s.http.post(CHAT, json=chat())

        assert s.submits[0].seed == -5
        assert s.submits[1].seed != s.submits[2].seed
        assert all(x.seed is not None and -(2**63) <= x.seed < 2**63 for x in s.submits)


async def test_the_death_of_an_owner_before_acceptance_is_noticed_at_once() -> None:
    """The exit notice is enough; nothing is seen by the client."""
    first: list[Submit] = []

    def answer(submit: Submit) -> Answer:
        first.append(submit)
        return Answer(silent=len(first) == 1)

    async with edge_setup(answer, peers=2) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: s.submits)
        node, _, other = serving(s)

        await s.system.kill(node)
        body = await reading.end()

        assert texts(events(body)) == {0: "Hello!"}
        assert [x.term for x in other.submits] == [1]


async def test_the_death_of_an_owner_in_mid_stream_leaves_no_gap_and_no_repeat() -> None:
    """Another one replays from item 0; the client sees each item once, one id, and one end."""
    async with edge_setup(lambda _s: Answer(texts=[["a", "b", "c", "d"], ["1", "2", "3"]], hold_at=2), peers=2) as s:
        reading = Reading(s, CHAT, chat(stream=True, n=2))
        await s.until(lambda: texts(events(reading.text)) == {0: "ab", 1: "12"} if reading.text else False)
        node, _, other = serving(s)

        await s.system.kill(node)
        await s.until(lambda: other.sessions)
        other.release()
        body = await reading.end()
        (again,) = other.submits

        chunks = events(body)[:-1]
        assert texts(chunks) == {0: "abcd", 1: "123"}
        assert sorted(finishes(chunks)) == [(0, "stop"), (1, "stop")]
        assert len({(c["id"], c["created"]) for c in chunks}) == 1
        assert body.count("[DONE]") == 1
        assert again.term == 1 and again.seed is not None
        page = (await s.http.get("/metrics")).text
        assert 'headrace_edge_resubmissions_total{node="edge"} 1.0' in page


async def test_a_replay_with_other_tokens_is_an_error_and_never_a_splice() -> None:
    """The client is told; the work is cancelled."""
    answers = iter([Answer(hold_at=1), Answer(texts=[["Hel", "p", "!"]], first_id=500)])
    async with edge_setup(lambda _s: next(answers), peers=2) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: reading.num_events == 1)
        node, _, other = serving(s)

        await s.system.kill(node)
        last = events(await reading.end())[-1]
        await s.until(lambda: other.cancels)

        assert last["error"]["code"] == "replay_mismatch"
        assert "[DONE]" not in reading.text


@pytest.mark.slow
async def test_a_slow_owner_keeps_its_work_when_the_second_one_refuses() -> None:
    """The refusal of a second try is not the answer of the first."""
    calls: list[Submit] = []

    def answer(submit: Submit) -> Answer:
        calls.append(submit)
        return Answer(silent=True) if len(calls) == 1 else Answer(refuse=Overloaded("full"))

    async with edge_setup(answer, peers=2) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: s.submits)
        _, slow, _ = serving(s)
        slow.answer = lambda _submit: Answer()
        slow._serve(slow.submits[0])
        body = await reading.end()

        assert texts(events(body)) == {0: "Hello!"}


async def test_an_older_owner_is_fenced_once_a_newer_one_has_accepted() -> None:
    """Its frames change nothing, and it is told to stop."""
    async with edge_setup(lambda _s: Answer(hold_at=1), peers=2) as s:
        reading = Reading(s, CHAT, chat(stream=True))
        await s.until(lambda: reading.num_events == 1)
        _, old, new = serving(s)
        request_id = s.submits[0].request_id
        s.edge.member_down(old.ref, "silent")
        await s.until(lambda: new.sessions)
        await s.until(lambda: any(a.status == "ok" for a in new.acks))

        old.release()
        await s.until(lambda: any(a.status == "fenced" for a in old.acks))
        new.release()
        body = await reading.end()

        assert texts(events(body)) == {0: "Hello!"}
        assert request_id not in old.sessions


def test_without_any_admission_actor_requests_are_refused_with_a_time_to_come_back() -> None:
    """Nobody comes in the place of the dead one: 503, after the time that nobody's acceptance is waited for."""

    async def main(clock: VirtualClock) -> None:
        async with edge_setup(clock=clock, listen=False) as s:
            await s.system.kill(s.peer_nodes[0])
            await s.until(lambda: s.edge.not_ready() is not None)

            for stream in (False, True):
                begun = clock.now()
                response = await s.http.post(CHAT, json=chat(stream=stream))
                assert response.status_code == 503
                assert ACCEPT_LIMIT_S <= clock.now() - begun <= ACCEPT_LIMIT_S + 0.1
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "not_ready"
            refused = await s.http.post(CHAT, json=chat(temperature=9))
            assert refused.status_code == 400, "a bad request waits for nobody"

    run_virtual(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_the_replacement_of_the_last_admission_actor(stream: bool) -> None:
    """R11. Scenario: owner and heir are dead; the next one is there 1.5 s later, and is asked at once."""

    async def main(clock: VirtualClock) -> None:
        async with edge_setup(clock=clock, listen=False) as s:
            await s.system.kill(s.peer_nodes[0])
            await s.until(lambda: s.edge.not_ready() is not None)
            begun = clock.now()
            asked = asyncio.create_task(s.http.post(CHAT, json=chat(stream=stream)))
            await clock.sleep(1.5)
            assert not asked.done()
            node = s.system.node("peer-9")
            node.add("admission", "admission-9", lambda c: ScriptedPeer(c, answer=lambda _submit: Answer()))
            await node.start()
            response = await asked

            assert response.status_code == 200 and "lo" in response.text
            assert clock.now() - begun <= 1.5 + 0.5
            held = [x for x in (await s.edge.metrics_page()).splitlines() if "edge_requests_held_total{" in x]
            assert [x.rsplit(" ", 1)[1] for x in held] == ["1.0"]

    run_virtual(main)


def test_no_more_requests_are_held_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes beyond, or can wait no longer than its deadline, or for what has failed, is refused before."""
    monkeypatch.setattr(edge.actor, "MAX_HELD", 2)

    async def main(clock: VirtualClock) -> None:
        async with edge_setup(clock=clock, listen=False) as s:
            await s.system.kill(s.peer_nodes[0])
            await s.until(lambda: s.edge.not_ready() is not None)

            async def took(**extra: Any) -> float:
                begun = clock.now()
                assert (await s.http.post(CHAT, json=chat(**extra))).status_code in (408, 503)
                return clock.now() - begun

            waits = await asyncio.gather(*(took() for _ in range(3)))
            assert sorted(round(w) for w in waits) == [0, round(ACCEPT_LIMIT_S), round(ACCEPT_LIMIT_S)]
            assert 1.0 <= await took(deadline_ms=1000) <= 1.1
            failing = s.system.node("peer-9")
            failing.add("admission", "admission-9", lambda c: ScriptedPeer(c, answer=lambda _submit: Answer()))
            await failing.start()
            failing.actors[0].state, failing.actors[0].reason = "failed", "it has no model"
            await s.until(lambda: "no model" in str(s.edge.not_ready()))
            assert await took() == 0.0

    run_virtual(main)


def test_a_request_that_nobody_accepts_is_refused_within_seconds() -> None:
    """The one actor there is stays silent: it is asked again, with longer and longer waits, and then given up."""

    async def main(clock: VirtualClock) -> None:
        async with edge_setup(Answer(silent=True), clock=clock, listen=False) as s:
            await clock.sleep(2.0)
            begun = clock.now()
            response = await s.http.post(CHAT, json=chat(stream=True))

            assert response.status_code == 503 and "retry-after" in response.headers
            assert ACCEPT_LIMIT_S <= clock.now() - begun <= ACCEPT_LIMIT_S + 0.2
            assert 4 <= len(s.submits) <= 6
            assert [x.term for x in s.submits] == list(range(len(s.submits)))
            assert s.edge.idle

    run_virtual(main)
