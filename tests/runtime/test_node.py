"""Nodes on the in-memory bus, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from runtime.actor import Actor, Context
from runtime.bus import BusMessage
from runtime.memory_bus import Faults
from runtime.node import EXIT_BUS_LOST, Node
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.codec import encode, encode_hot
from schemas.errors import TooLarge
from schemas.items import ACKS, ITEMS
from schemas.messages import (
    CancelAck,
    Close,
    Drain,
    ExitNotice,
    Heartbeat,
    Message,
    MetricsQuery,
    MetricsReport,
    Opened,
    SubmitCancel,
)
from schemas.record import Fence
from schemas.subjects import DRAIN, EXIT, HEARTBEATS, METRICS, Ref, hot
from tests.support.memory_system import MemorySystem

FENCE = Fence(0, "o", 0)


class Probe(Actor):
    """Keeps everything that happens to it."""

    kind = "probe"
    anycast = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.got: list[tuple[Message, Ref | None]] = []
        self.hot: list[tuple[str, Any]] = []
        self.events: list[tuple[str, str, str]] = []
        self.ticks = 0
        self.busy = False
        self.stopped = False

    async def stop(self) -> None:
        self.stopped = True

    def receive(self, message: Message, sender: Ref | None) -> None:
        self.got.append((message, sender))
        if isinstance(message, CancelAck) and message.request_id == "raise":
            raise RuntimeError("broken handler")

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        self.hot.append((kind, body))

    def tick(self) -> None:
        self.ticks += 1

    def member_down(self, ref: Ref, reason: str) -> None:
        self.events.append(("down", ref.id, reason))

    def member_changed(self, ref: Ref, state: str) -> None:
        self.events.append(("changed", ref.id, state))

    @property
    def idle(self) -> bool:
        return not self.busy

    def load(self) -> dict[str, Any]:
        return {"running": len(self.got)}

    def statistics(self) -> dict[str, float]:
        return {"ticks": self.ticks}


def probe(node: Node, at: int = 0) -> Probe:
    actor = node.actors[at]
    assert isinstance(actor, Probe)
    return actor


Scenario = Callable[[MemorySystem], Coroutine[Any, Any, None]]


def play(scenario: Scenario, *, strict: bool = True, seed: int = 0, **options: Any) -> None:
    """Run a scenario on a fresh system in virtual time."""

    async def main(clock: VirtualClock) -> None:
        async with MemorySystem(clock=clock, strict=strict, **options) as system:
            await scenario(system)

    run_virtual(main, seed=seed)


async def pair(system: MemorySystem) -> tuple[Node, Node]:
    one, two = system.node("one"), system.node("two")
    one.add("probe", "p1", Probe)
    two.add("probe", "p2", Probe)
    await system.start()
    await system.until(lambda: all(len(n.membership.members("probe")) == 2 for n in (one, two)))
    return one, two


def test_messages_reach_the_mailbox_with_their_sender() -> None:
    """Control and hot messages, direct and anycast, come decoded to the right handler."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        context = probe(one).context
        context.send(two.refs[0], CancelAck(request_id="r"))
        context.send_hot(two.refs[0], ITEMS, [["r", 1]])
        context.publish(two.refs[0].subject, encode_hot(ACKS, one.refs[0], []))
        for _ in range(20):
            context.anycast("probe", SubmitCancel(request_id="any"))
        await system.clock.sleep(0.01)

        assert (CancelAck(request_id="r"), one.refs[0]) in probe(two).got
        assert sorted(probe(two).hot) == [(ACKS, []), (ITEMS, [["r", 1]])]
        shares = [sum(isinstance(m, SubmitCancel) for m, _ in probe(n).got) for n in (one, two)]
        assert sum(shares) == 20 and all(shares)

    play(scenario)


def test_heartbeats_say_starting_until_the_actor_is_ready() -> None:
    """They begin at once, also while `start` takes its time; state changes are told without waiting."""

    class Slow(Probe):
        async def start(self) -> None:
            await self.clock.sleep(2.0)
            await super().start()

    async def scenario(system: MemorySystem) -> None:
        seen = await system.tap(HEARTBEATS)
        node = system.node("n")
        node.add("probe", "slow", Slow)
        await system.start()
        assert system.clock.now() >= 2.0
        await system.clock.sleep(0.01)
        states = [beat.state for beat in seen if isinstance(beat, Heartbeat)]
        assert 9 <= states.count("starting") <= 10
        assert states == sorted(states, reverse=True) and states[-1] == "ready"
        assert probe(node).context.bus_ok

    play(scenario)


def test_an_actor_that_does_not_start_says_why() -> None:
    """The error is raised to the caller, heartbeats say `failed` with its text, the other actor is ready."""

    class Broken(Probe):
        async def start(self) -> None:
            raise ValueError("the model file is truncated")

    async def scenario(system: MemorySystem) -> None:
        seen = await system.tap(HEARTBEATS)
        node = system.node("n")
        node.add("probe", "broken", Broken)
        node.add("probe", "fine", Probe)
        with pytest.raises(ValueError, match="truncated"):
            await system.start()
        await system.clock.sleep(0.01)
        last = {beat.ref.id: (beat.state, beat.reason) for beat in seen if isinstance(beat, Heartbeat)}
        assert last == {"broken": ("failed", "the model file is truncated"), "fine": ("ready", "")}

    play(scenario)


def test_a_broken_handler_and_malformed_bytes_end_nothing() -> None:
    """Each is counted; the actor goes on with the next message."""

    async def scenario(system: MemorySystem) -> None:
        node = system.node("n")
        ref = node.add("probe", "p", Probe)
        await system.start()
        system.send(ref, CancelAck(request_id="raise"))
        for junk in (b"", b"\xc1", b"junk", encode(CancelAck(request_id="x"))[:-3], b"\x94\x02\xa1x\xc0\xc0"):
            system.outside.publish(ref.subject, junk)
        system.outside.publish(hot(ref), b"\x94\x01\xa5Items\x91\x01\x90")
        system.send(ref, CancelAck(request_id="fine"))
        await system.clock.sleep(0.01)

        assert [m.request_id for m, _ in probe(node).got if isinstance(m, CancelAck)] == ["raise", "fine"]
        assert not probe(node).hot
        text = node.render_metrics()
        assert 'headrace_actor_errors_total{kind="probe"} 1.0' in text
        assert 'headrace_mailbox_malformed_total{kind="probe"} 6.0' in text
        assert [str(e) for e in system.errors] == ["broken handler"]

    play(scenario, strict=False)


def test_messages_past_their_deadline_are_dropped_but_those_that_end_work_are_not() -> None:
    """One second of grace; `Close` comes through however late."""

    async def scenario(system: MemorySystem) -> None:
        node = system.node("n")
        ref = node.add("probe", "p", Probe)
        await system.start()
        wall = system.clock.wall()
        for late, name in ((0.9, "in grace"), (1.1, "stale")):
            system.send(ref, Opened(request_id=name, fence=FENCE, deadline=wall - late))
        system.send(ref, Opened(request_id="none", fence=FENCE))
        system.send(ref, Close(request_id="late", fence=FENCE, deadline=wall - 99.0, reason="x"))
        await system.clock.sleep(0.01)
        assert [m.request_id for m, _ in probe(node).got] == ["in grace", "none", "late"]  # type: ignore[attr-defined]
        assert node._hosted[0].mailbox.stale == 1

    play(scenario)


def test_a_full_mailbox_drops_the_newest_and_counts() -> None:
    """The rest arrives, in order."""

    async def scenario(system: MemorySystem) -> None:
        node = system.node("n")
        ref = node.add("probe", "p", Probe)
        node._hosted[0].mailbox._capacity = 10
        await system.start()
        node._hosted[0].mailbox.hold(True)
        for i in range(15):
            system.send(ref, CancelAck(request_id=str(i)))
        await system.clock.sleep(0.01)
        node._hosted[0].mailbox.hold(False)
        await system.clock.sleep(0.01)
        assert [m.request_id for m, _ in probe(node).got] == [str(i) for i in range(10)]  # type: ignore[attr-defined]
        assert 'headrace_mailbox_dropped_total{kind="probe"} 5.0' in node.render_metrics()

    play(scenario)


def test_a_killed_node_is_known_at_once_and_a_frozen_one_after_its_silence() -> None:
    """Exit by notice; silence after 1.2 s; a thawed node is back and suspects nobody."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        three = system.node("three")
        three.add("probe", "p3", Probe)
        await system.start(three)
        await system.clock.sleep(2.0)
        probe(one).events.clear()
        probe(two).events.clear()

        await system.kill(three)
        await system.clock.sleep(0.001)
        assert probe(one).events == [("down", "p3", "exit")]

        frozen_at = system.clock.now()
        system.freeze(two)
        await system.until(lambda: ("down", "p2", "silent") in probe(one).events)
        assert 0.9 < system.clock.now() - frozen_at < 1.5
        await system.clock.sleep(3.0)
        got_before = len(probe(two).got)
        system.send(two.refs[0], CancelAck(request_id="while frozen"))
        await system.clock.sleep(0.5)
        assert len(probe(two).got) == got_before
        system.thaw(two)
        await system.clock.sleep(1.0)
        assert probe(one).events[-1] == ("changed", "p2", "ready")
        assert len(probe(two).got) == got_before + 1
        await system.clock.sleep(3.0)
        assert not [e for e in probe(two).events if e[0] == "down" and e[1] == "p1"]

    play(scenario)


def test_a_kill_without_a_notice_is_silence() -> None:
    """Without a supervisor only heartbeats tell."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        await system.clock.sleep(1.5)
        await system.kill(two, announce=False)
        await system.clock.sleep(2.0)
        assert probe(one).events[-1] == ("down", "p2", "silent")
        assert probe(two).stopped

    play(scenario)


def test_nobody_is_suspected_across_an_outage_of_the_bus() -> None:
    """Five seconds without a bus: nobody judges, neither during nor right after."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        await system.clock.sleep(2.0)
        buses = [s.control for s in system._slots.values()] + [s.stream for s in system._slots.values()]
        for bus in buses:
            bus.disconnect()
        await system.clock.sleep(5.0)
        assert not probe(one).context.bus_ok
        for bus in buses:
            bus.reconnect()
        await system.clock.sleep(0.9)
        assert not probe(one).context.bus_ok
        await system.clock.sleep(3.0)
        assert probe(one).context.bus_ok
        assert not [e for n in (one, two) for e in probe(n).events if e[0] == "down"]
        assert two.membership.is_up(one.refs[0])

    play(scenario)


def test_a_drain_is_announced_takes_no_new_work_and_waits_until_idle() -> None:
    """Ten messages of 100 ms each, a drain in the middle of the third: ten finished, ten replies, then exit 0."""
    started: list[str] = []
    finished: list[str] = []

    class Worker(Probe):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.jobs: list[tuple[str, Ref | None]] = []

        async def start(self) -> None:
            self.context.spawn(self.work(), name="work")
            await super().start()

        def receive(self, message: Message, sender: Ref | None) -> None:
            assert isinstance(message, CancelAck)
            self.jobs.append((message.request_id, sender))

        async def work(self) -> None:
            while True:
                if not self.jobs:
                    await self.clock.sleep(0.001)
                    continue
                name, sender = self.jobs[0]
                started.append(name)
                await self.clock.sleep(0.1)
                finished.append(name)
                assert sender is not None
                self.context.send(sender, CancelAck(request_id=name))
                del self.jobs[0]

        @property
        def idle(self) -> bool:
            return not self.jobs

    async def scenario(system: MemorySystem) -> None:
        asker, server, spare = system.node("asker"), system.node("server"), system.node("spare")
        asker.add("probe", "asker", Probe)
        worker = server.add("worker", "w1", Worker)
        spare.add("probe", "p", Probe)
        await system.start()
        seen = await system.tap(HEARTBEATS)
        for i in range(10):
            probe(asker).context.send(worker, CancelAck(request_id=str(i)))
        await system.until(lambda: len(started) == 3)

        server.request_drain()
        await system.clock.sleep(0.001)
        last = [b for b in seen if isinstance(b, Heartbeat) and b.ref == worker][-1]
        assert last.state == "draining"
        assert await server.wait() == 0
        await server.stop()

        await system.clock.sleep(0.01)
        assert started == finished == [str(i) for i in range(10)]
        replies = [m.request_id for m, _ in probe(asker).got if isinstance(m, CancelAck)]
        assert replies == finished
        assert ("down", "w1", "exit") in probe(asker).events

    play(scenario)


def test_after_a_drain_began_others_get_the_anycast_messages() -> None:
    """The queue group is left at once; messages to the mailbox itself still come."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        probe(one).busy = True
        one.request_drain()
        await system.clock.sleep(0.01)
        for _ in range(30):
            system.outside.publish("actor.probe", encode(SubmitCancel(request_id="any")))
        system.send(one.refs[0], CancelAck(request_id="direct"))
        await system.clock.sleep(0.01)
        assert [type(m) for m, _ in probe(one).got] == [CancelAck]
        assert len(probe(two).got) == 30
        probe(one).busy = False
        assert await one.wait() == 0

    play(scenario)


def test_a_drain_ends_at_its_limit_or_at_the_second_request() -> None:
    """An actor that never gets idle keeps the process no longer than that."""

    async def scenario(system: MemorySystem) -> None:
        one = system.node("one", drain_limit_s=5.0)
        two = system.node("two", drain_limit_s=5.0)
        one.add("probe", "p1", Probe)
        two.add("probe", "p2", Probe)
        await system.start()
        probe(one).busy = probe(two).busy = True
        began = system.clock.now()
        one.request_drain()
        two.request_drain()
        await system.clock.sleep(1.0)
        two.request_drain()
        assert await two.wait() == 0
        assert system.clock.now() - began < 1.1
        assert await one.wait() == 0
        assert 5.0 <= system.clock.now() - began < 5.1

    play(scenario)


def test_a_drain_can_be_asked_for_over_the_bus() -> None:
    """By the node's name; other nodes take no notice."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        system.outside.publish(DRAIN, encode(Drain(target="one")))
        assert await one.wait() == 0
        assert not two.draining

    play(scenario)


def test_a_node_whose_clock_is_off_says_so_and_is_not_ready() -> None:
    """R13. Scenario: its clock is half a second ahead, so that it would end requests before their deadlines."""

    async def scenario(system: MemorySystem) -> None:
        nodes = [system.node(name) for name in ("one", "two", "three")]
        for node in nodes:
            node.add("probe", node.name, Probe)
        clock, wall = system._slots["one"].clock, system.clock.wall
        clock.wall = lambda: wall() + 0.5  # type: ignore[method-assign]
        await system.start()
        await system.clock.sleep(4.0)
        for node in nodes:
            ready = [member.ref.id for member in node.membership.members("probe")]
            assert ready == ["three", "two"], f"as {node.name} sees it"
            member = node.membership.get(nodes[0].refs[0])
            assert member is not None and member.up
            assert member.state == "failed" and "clock" in member.reason
        clock.wall = wall  # type: ignore[method-assign]
        await system.clock.sleep(20.0)
        assert len(nodes[1].membership.members("probe")) == 3

    play(scenario)


def test_a_connection_closed_for_good_ends_the_node() -> None:
    """Exit code 75: the supervisor starts another."""

    async def scenario(system: MemorySystem) -> None:
        one, _ = await pair(system)
        system._slots["one"].stream.fail()
        assert await one.wait() == EXIT_BUS_LOST == 75

    play(scenario)


def test_metrics_are_answered_over_the_bus() -> None:
    """With the actors' statistics, the loop's lag and the bus counters."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        await system.clock.sleep(0.5)
        system.outside.publish(METRICS, encode(MetricsQuery(ticket="t", reply=one.refs[0])))
        await system.clock.sleep(0.01)
        reports = [m for m, _ in probe(one).got if isinstance(m, MetricsReport)]
        assert sorted(r.node for r in reports) == ["one", "two"]
        text = next(r.text for r in reports if r.node == "two")
        assert 'headrace_probe_ticks{actor="p2"}' in text
        assert "headrace_event_loop_lag_seconds" in text
        assert 'headrace_bus_published{connection="control"}' in text

    play(scenario)


def test_an_oversize_message_raises_at_the_sender() -> None:
    """Nothing is sent; the context's caller sees size and limit."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        with pytest.raises(TooLarge, match="4096 bytes"):
            probe(one).context.send(two.refs[0], CancelAck(request_id="x" * 5000))

    play(scenario, max_payload=4096)


def test_a_stopped_node_says_goodbye_and_leaves_no_task() -> None:
    """Everyone knows at once; nothing of it runs on."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        notices = await system.tap(EXIT)
        context = probe(two).context
        context.spawn(asyncio.Event().wait(), name="forever")  # type: ignore[arg-type]
        await two.stop()
        await system.clock.sleep(0.001)
        assert [n.refs for n in notices if isinstance(n, ExitNotice)] == [two.refs]
        assert probe(one).events[-1] == ("down", "p2", "exit")
        assert not len(two.tasks)
        assert probe(two).stopped

    play(scenario)


def test_the_error_of_a_spawned_task_is_counted_and_surfaces_in_the_test() -> None:
    """Nothing fails silently: not in a task, not in a subscription."""

    async def fail() -> None:
        raise RuntimeError("a task failed")

    async def scenario(system: MemorySystem) -> None:
        one, _ = await pair(system)

        def handler(message: BusMessage) -> None:
            raise RuntimeError("a subscription failed")

        await probe(one).context.subscribe("own.subject", handler)
        system.outside.publish("own.subject", b"x")
        probe(one).context.spawn(fail(), name="fails")
        await system.clock.sleep(0.01)
        assert {str(e) for e in system.errors} == {"a task failed", "a subscription failed"}
        assert one.tasks.failed == 1

    with pytest.raises(RuntimeError, match="failed"):
        play(scenario)


def test_messages_keep_their_order_under_random_delays() -> None:
    """A delayed message is never overtaken by a later one of the same publisher; a partition loses both ways."""

    async def scenario(system: MemorySystem) -> None:
        one, two = await pair(system)
        system.broker.faults["one-control"] = Faults(delay_s=(0.0, 0.1))
        for i in range(100):
            probe(one).context.send(two.refs[0], CancelAck(request_id=str(i)))
        await system.clock.sleep(0.2)
        assert [m.request_id for m, _ in probe(two).got] == [str(i) for i in range(100)]  # type: ignore[attr-defined]

        system.broker.partition("one-control", "two-control")
        probe(one).context.send(two.refs[0], CancelAck(request_id="lost"))
        await system.clock.sleep(3.0)
        assert len(probe(two).got) == 100
        assert ("down", "p1", "silent") in probe(two).events
        assert ("down", "p2", "silent") in probe(one).events
        system.broker.heal()
        await system.clock.sleep(1.0)
        assert two.membership.is_up(one.refs[0])

    play(scenario)


def test_the_same_seed_gives_the_same_run() -> None:
    """A whole system in virtual time is a function of its seed."""

    def run(seed: int) -> list[Any]:
        trace: list[Any] = []

        async def scenario(system: MemorySystem) -> None:
            system.broker.default_faults = Faults(delay_s=(0.001, 0.3), drop=0.2)
            one, two = system.node("one"), system.node("two")
            one.add("probe", "p1", Probe)
            two.add("probe", "p2", Probe)
            await system.start()
            for i in range(50):
                probe(one).context.anycast("probe", CancelAck(request_id=str(i)))
                await system.clock.sleep(0.05)
            await system.clock.sleep(5.0)
            for node in (one, two):
                trace.append((node.refs, probe(node).events, [m for m, _ in probe(node).got]))

        play(scenario, seed=seed)
        return trace

    assert run(3) == run(3)
    assert run(3) != run(4)
