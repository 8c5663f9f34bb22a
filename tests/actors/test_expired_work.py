"""A hop that is given work which nobody wants any more does nothing: expired, cancelled, or cancelled while it waited.

The messages of an undisturbed request are recorded and said again for a request that is over, to one hop at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import PACE_S, Fleet, Stream, fleet

from actors.byte_text import ByteText
from actors.tokenize import TokenizeActor
from runtime.clock import SystemClock
from runtime.memory_bus import MemoryBroker
from runtime.node import Node
from runtime.telemetry import Telemetry
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas import messages as m
from schemas.codec import encode
from schemas.record import Fence
from schemas.subjects import Ref

PROMPT = "the water that turns the wheel comes down the headrace " * 12  # five steps of prefill
COUNT = 20
HOPS: list[tuple[type[m.RequestMessage], str]] = [
    (m.Tokenize, "tokenize-0"),
    (m.Dispatch, "prefill-0"),
    (m.Reserve, "decode-0"),
    (m.TransferJob, "transfer-0"),
    (m.Transferred, "decode-0"),
]


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def simulate(scenario: Any, directory: Path, **layout: int) -> Any:
    """Run `scenario(fleet)` on an instance whose requests take every hop."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, **layout) as f:
            return await scenario(f)

    return run_virtual(main, seed=0)


async def recorded(f: Fleet) -> dict[type[m.Message], m.RequestMessage]:
    """Run one request; returns a message of each type that its hops sent each other."""
    seen = [await f.system.tap(subject) for subject in ("actor.tokenize", "actor.*.*.*")]
    stream = await f.ask(PROMPT, max_tokens=COUNT)
    await f.end(stream)
    await f.rest()
    return {type(message): message for message in [*seen[0], *seen[1]] if isinstance(message, m.RequestMessage)}


def again(f: Fleet, message: m.RequestMessage, *, left_s: float) -> m.RequestMessage:
    """The same message for a request of another name, with so much time left."""
    deadline = f.system.clock.wall() + left_s
    update: dict[str, Any] = {"request_id": "another", "deadline": deadline}
    record = getattr(message, "record", None)
    if record is not None:
        update["record"] = record.model_copy(update={"request_id": "another", "deadline": deadline})
    if isinstance(message, m.TransferJob):
        update["job"] = "another/0"
    return message.model_copy(update=update)


def held(f: Fleet, name: str) -> list[Any]:
    """What an actor has in hand, and what it has done so far."""
    actor = f.actor(name)
    if hasattr(actor, "works"):
        core = actor.stepped.core
        return [len(actor.works), core.pool.in_use, core.statistics()["steps_total"], core.load()["expected"]]
    done = [len(actor._over)] if name.startswith("transfer") else []
    return [actor.load()["running"], *done]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), HOPS)
def test_expired_work_is_not_begun(kind: type[m.RequestMessage], name: str, tmp_path: Path) -> None:
    """A moment past its deadline the message is dropped and counted; a moment before it begins something."""

    async def scenario(f: Fleet) -> None:
        message = (await recorded(f))[kind]
        answers = await f.system.tap("actor.admission.*.*")
        before, mailbox = held(f, name), f.nodes[name]._hosted[0].mailbox
        f.system.send(f.actor(name).ref, again(f, message, left_s=-0.001))
        await f.system.clock.sleep(0.1)
        assert held(f, name) == before
        assert mailbox.stale == 1
        assert not [a for a in answers if getattr(a, "request_id", "") == "another"]

        handled = mailbox.handled
        f.system.send(f.actor(name).ref, again(f, message, left_s=0.3))
        await f.system.clock.sleep(0.05)
        assert mailbox.stale == 1 and mailbox.handled > handled
        if kind in (m.Dispatch, m.Reserve, m.TransferJob):
            assert held(f, name) != before
        await f.system.clock.sleep(2.0)  # and what was begun ends with its deadline, without anybody's word
        await f.rest()

    simulate(scenario, tmp_path, decode=1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [hop for hop in HOPS if hop[0] is not m.Tokenize])
def test_what_was_cancelled_first_is_not_begun(kind: type[m.RequestMessage], name: str, tmp_path: Path) -> None:
    """The cancel overtakes the work: no block, no step, no copy."""

    async def scenario(f: Fleet) -> None:
        message = again(f, (await recorded(f))[kind], left_s=30.0)
        ref, before = f.actor(name).ref, held(f, name)
        if isinstance(message, m.TransferJob):
            over: m.Message = m.TransferAbort(request_id="another", fence=message.fence, job=message.job)
            before[-1] += 1  # it remembers that nothing may be written for this job
        else:
            over = m.Close(request_id="another", fence=message.fence, reason="cancel")
        f.system.send(ref, over, sender=f.actor("prefill-0").ref)
        f.system.send(ref, message, sender=message.record.owner if hasattr(message, "record") else None)
        await f.system.clock.sleep(1.0)
        assert held(f, name) == before
        await f.rest()

    simulate(scenario, tmp_path, decode=1)


def test_a_request_that_comes_after_its_deadline_is_refused_and_not_taken(tmp_path: Path) -> None:
    """Admission answers with the error at once: no acceptance, nothing is sent to any hop."""

    async def scenario(f: Fleet) -> None:
        seen = await f.system.tap("actor.*.*.*")
        stream = await f.ask(PROMPT, max_tokens=COUNT, deadline_s=0.05)
        await f.end(stream, limit_s=3.0)
        assert stream.error == "deadline_exceeded"
        before = len(seen)
        inbox = f.system.outside.new_inbox()
        wall = f.system.clock.wall()
        late = Stream(inbox, f.system.clock.now(), ids=[[]], texts=[[]])
        await f.system.outside.subscribe(inbox, lambda message: f._take(late, message))
        submit = m.Submit(
            request_id="late", api="completion", body={"model": "bytes", "prompt": PROMPT}, accept_by=wall + 1.0,
            deadline=wall - 0.001, reply={"subject": inbox, "mode": "inbox", "encoding": "json"},  # type: ignore[arg-type]
        )  # fmt: skip
        f.system.send(f.actor("admission-0").ref, submit)
        await f.end(late, limit_s=1.0)
        assert late.accepted is None and late.error == "deadline_exceeded"
        assert not [s for s in seen[before:] if isinstance(s, (m.Tokenize, m.Open, m.Dispatch))]
        await f.rest()

    simulate(scenario, tmp_path)


def test_a_submission_that_its_edge_does_not_wait_for_any_more_is_dropped(tmp_path: Path) -> None:
    """R11. Scenario: it lay in the mailbox of a frozen actor; by now another one serves the request under this id."""

    async def scenario(f: Fleet) -> None:
        seen = await f.system.tap("actor.*.*.*")
        inbox, wall = f.system.outside.new_inbox(), f.system.clock.wall()
        late = Stream(inbox, f.system.clock.now(), ids=[[]], texts=[[]])
        await f.system.outside.subscribe(inbox, lambda message: f._take(late, message))
        submit = m.Submit(
            request_id="late", api="completion", body={"model": "bytes", "prompt": PROMPT}, accept_by=wall - 0.001,
            deadline=wall + 10.0, reply={"subject": inbox, "mode": "inbox", "encoding": "json"},  # type: ignore[arg-type]
        )  # fmt: skip
        f.system.send(f.actor("admission-0").ref, submit)
        await f.system.clock.sleep(1.0)
        assert late.accepted is None and late.terminal is None
        assert not [s for s in seen if isinstance(s, (m.Tokenize, m.Open, m.Dispatch, m.Keep))]

    simulate(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_request_that_waits_for_an_engine_is_dropped_without_a_step(how: str, tmp_path: Path) -> None:
    """All engines are gone: an accepted request waits at admission, and leaves no trace when nobody wants it."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=COUNT, deadline_s=0.7 if how == "deadline" else None)
        await f.system.until(lambda: stream.accepted is not None, limit_s=1.0)
        for name in ("prefill-0", "decode-0"):
            await f.kill(name, again_after_s=None)
        await f.system.clock.sleep(0.3)
        assert stream.terminal is None, "it waits"
        f.cancel(stream) if how == "cancel" else await f.end(stream, limit_s=2.0)
        await f.rest(limit_s=2.0)
        for name in ("prefill-0", "decode-0"):
            kind, _, number = name.partition("-")
            await f.system.start(f.make(kind, int(number)))
        await f.system.clock.sleep(1.0)
        assert [e.stepped.steps for e in f.engines()] == [0, 0]

    simulate(scenario, tmp_path, decode=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_what_waits_in_an_engines_queue_is_dropped_without_a_step(how: str, tmp_path: Path) -> None:
    """All places are taken: those that wait are never computed, and those that run do not notice."""

    async def scenario(f: Fleet) -> None:
        core = f.actor("both-0").stepped.core
        running = [await f.ask(f"{i} {'x' * 20}", max_tokens=200) for i in range(16)]
        await f.system.until(lambda: core.load()["running"] == 16, limit_s=2.0)
        limit_s = 0.5 if how == "deadline" else None
        # Short ones: long ones are refused, since they would be expected too late.
        waiting = [await f.ask(f"w{i} {'y' * 20}", max_tokens=COUNT, deadline_s=limit_s) for i in range(5)]
        await f.system.until(lambda: core.load()["waiting"] == 5, limit_s=2.0)
        tokens = core.statistics()["tokens_total"]
        for stream in waiting:
            f.cancel(stream) if how == "cancel" else await f.end(stream, limit_s=2.0)
        await f.system.until(lambda: core.load()["waiting"] == 0, limit_s=PACE_S * 4)
        assert core.statistics()["tokens_total"] - tokens <= 16 * (0.6 / PACE_S + 8), "only what ran was computed"
        for stream in running:
            await f.end(stream)
            assert stream.error is None and stream.num_items == 200
        await f.rest()
        assert core.statistics()["prompt_tokens_total"] < 16 * 30

    simulate(scenario, tmp_path, prefill=0, decode=0, both=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_reader_that_is_too_slow_gives_everything_back(how: str, tmp_path: Path) -> None:
    """Its window is full and its engine works ahead, or is done; when it leaves or its time is over all comes back."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask("slow", max_tokens=1500, deadline_s=4.0 if how == "deadline" else None, stream=True)
        ack, f._ack = f._ack, lambda stream, *, done: None  # type: ignore[method-assign]
        await f.system.clock.sleep(3.0)
        f._ack = ack  # type: ignore[method-assign]
        assert stream.num_items <= 256, "the window holds it"
        if how == "cancel":
            f.cancel(stream)
        else:
            await f.end(stream, limit_s=3.0)
            assert stream.error == "deadline_exceeded"
        await f.rest(limit_s=2.0)

    simulate(scenario, tmp_path)


class SlowEncoder(ByteText):
    """Encodes nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.texts: list[str] = []

    def text_ids(self, text: str) -> list[int]:
        self.go.wait(10.0)
        self.texts.append(text[:1])
        return super().text_ids(text)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_prompts_in_the_tokenizers_queue_are_not_encoded_for_nobody(how: str) -> None:
    """One is being encoded, three wait in the threads' queue: those that are closed, or late, are skipped there."""
    encoder, clock, answers = SlowEncoder(), SystemClock(), []

    async def scenario() -> None:
        bus = MemoryBroker(clock).connect("test")
        telemetry = Telemetry("n", otlp_endpoint="", spans_file="")
        node = Node("n", "h", control=bus, stream=bus, clock=clock, telemetry=telemetry)
        ref = node.add("tokenize", "t", lambda context: TokenizeActor(context, load_encoder=lambda: encoder))
        me = Ref("admission", "test", "0" * 16)
        await bus.subscribe(me.subject, lambda message: answers.append(message))
        await node.start()
        actor = node.actors[0]
        try:
            for name in "abcd":
                late = how == "deadline" and name in "bc"
                body = {"prompt": [name * 5000]}
                bus.publish(ref.subject, encode(m.Tokenize(
                    request_id=name, fence=Fence(0, "x", 0), api="completion", body=body, reply=me,
                    deadline=clock.wall() + (0.15 if late else 60.0),
                ), me))  # fmt: skip
            while actor.load()["running"] < 4:
                await clock.sleep(0.002)
            if how == "cancel":
                for name in "bc":
                    close = m.Close(request_id=name, fence=Fence(0, "x", 1), reason="cancel")
                    bus.publish(ref.subject, encode(close, me))
                while actor.load()["running"] > 2:
                    await clock.sleep(0.002)
            else:
                await clock.sleep(0.2)
            encoder.go.set()
            while len(answers) < 2 or not actor.idle:
                await clock.sleep(0.002)
        finally:
            encoder.go.set()
            await node.stop()

    import asyncio

    asyncio.run(asyncio.wait_for(scenario(), 10.0))
    assert encoder.texts == ["a", "d"]
