"""Messages between actors of one node: not over the bus, in order, as bytes, and no more than an idle one can take."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from runtime.actor import Actor
from runtime.memory_bus import Faults
from runtime.node import Node
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.codec import encode
from schemas.items import ITEMS
from schemas.messages import CancelAck, Message, SubmitCancel
from schemas.subjects import Ref, anycast, hot
from tests.support.memory_system import MemorySystem


class Clerk(Actor):
    """Stateless, and busy when the test says so."""

    kind = "clerk"
    anycast = True

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.got: list[Message] = []
        self.hot: list[list[Any]] = []
        self.busy = False

    @property
    def idle(self) -> bool:
        return not self.busy

    def receive(self, message: Message, sender: Ref | None) -> None:
        self.got.append(message)

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        self.hot.append(body)


class Boss(Clerk):
    """Asks the clerks."""

    kind = "boss"
    anycast = False


def play(scenario: Callable[[MemorySystem], Coroutine[Any, Any, None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with MemorySystem(clock=clock, strict=True) as system:
            await scenario(system)

    run_virtual(main, seed=0)


async def office(system: MemorySystem) -> tuple[Node, Boss, Clerk, Clerk]:
    """Start a node with a boss and a clerk, and a node with another clerk."""
    one, two = system.node("one"), system.node("two")
    one.add("boss", "b", Boss)
    one.add("clerk", "near", Clerk)
    two.add("clerk", "far", Clerk)
    await system.start()
    boss, near, far = one.actors[0], one.actors[1], two.actors[0]
    assert isinstance(boss, Boss) and isinstance(near, Clerk) and isinstance(far, Clerk)
    return one, boss, near, far


def test_messages_within_a_node_do_not_cross_the_bus() -> None:
    """Control and hot messages reach the neighbour while the bus carries nothing to it, and even while it is down."""

    async def scenario(system: MemorySystem) -> None:
        _, boss, near, far = await office(system)
        seen = await system.tap(near.ref.subject)
        seen_hot = await system.tap(hot(near.ref))
        system.broker.default_faults = Faults(drop=1.0)
        boss.context.send(near.ref, CancelAck(request_id="r"))
        boss.context.send_hot(near.ref, ITEMS, [["r", 1]])
        boss.context.send(far.ref, CancelAck(request_id="lost"))
        await system.clock.sleep(0.01)
        assert near.got == [CancelAck(request_id="r")] and near.hot == [[["r", 1]]]
        assert not seen and not seen_hot and not far.got

    play(scenario)


def test_messages_within_a_node_keep_their_order_and_never_run_inside_their_sender() -> None:
    """The handler of one message comes after the sender's own handler, in the order of sending."""

    async def scenario(system: MemorySystem) -> None:
        _, boss, near, _ = await office(system)
        for number in range(300):
            boss.context.send(near.ref, CancelAck(request_id=str(number)))
        assert not near.got
        await system.clock.sleep(0.01)
        assert [m.request_id for m in near.got if isinstance(m, CancelAck)] == [str(n) for n in range(300)]

    play(scenario)


def test_what_a_neighbour_gets_is_its_own_copy() -> None:
    """A list that the sender goes on changing is as it was when it was sent."""

    async def scenario(system: MemorySystem) -> None:
        _, boss, near, _ = await office(system)
        body = [["r", 1]]
        boss.context.send_hot(near.ref, ITEMS, body)
        body[0].append(2)
        await system.clock.sleep(0.01)
        assert near.hot == [[["r", 1]]]

    play(scenario)


def test_an_idle_stateless_neighbour_is_asked_first_and_a_busy_one_like_all_others() -> None:
    """Idle, it gets every question; busy, draining or with one in its mailbox, the bus chooses among all."""

    async def scenario(system: MemorySystem) -> None:
        _, boss, near, far = await office(system)

        async def ask(times: int) -> tuple[int, int]:
            before = len(near.got), len(far.got)
            for _ in range(times):
                boss.context.anycast("clerk", SubmitCancel(request_id="any"))
                await system.clock.sleep(0.01)
            return len(near.got) - before[0], len(far.got) - before[1]

        assert await ask(10) == (10, 0)
        near.busy = True
        assert min(await ask(30)) > 0
        near.busy, near.state = False, "draining"
        assert min(await ask(30)) > 0
        near.state = "ready"
        at_once = len(far.got)
        for _ in range(30):
            boss.context.anycast("clerk", SubmitCancel(request_id="any"))
        await system.clock.sleep(0.01)
        assert len(far.got) > at_once

    play(scenario)


def test_a_private_actor_works_for_its_own_node_alone() -> None:
    """Its neighbours choose it, others do not see it among its kind, and no question of theirs is drawn for it."""

    async def scenario(system: MemorySystem) -> None:
        one, two = system.node("one"), system.node("two")
        one.add("boss", "boss", Boss)
        two.add("clerk", "far", Clerk)
        await system.start()
        await one.join("clerk", "near", Clerk, private=True)
        await system.clock.sleep(0.5)
        near, far = one.actors[1], two.actors[0]
        assert isinstance(near, Clerk) and isinstance(far, Clerk) and near.state == "ready"
        assert [m.ref for m in one.membership.members("clerk")] == [far.ref, near.ref]
        assert [m.ref for m in two.membership.members("clerk")] == [far.ref]
        assert near.ref in {m.ref for m in two.membership.members()}, "its death matters to all"
        for _ in range(30):
            system.outside.publish(anycast("clerk"), encode(SubmitCancel(request_id="any")))
        await system.clock.sleep(0.01)
        assert len(far.got) == 30 and not near.got
        one.actors[0].context.anycast("clerk", SubmitCancel(request_id="any"))
        await system.clock.sleep(0.01)
        assert len(near.got) == 1

    play(scenario)


def test_a_node_that_drains_lets_its_private_actors_finish() -> None:
    """They stay ready for what their neighbours still have, and the node waits for them."""

    async def scenario(system: MemorySystem) -> None:
        one = system.node("one")
        one.add("boss", "boss", Boss)
        await system.start()
        await one.join("clerk", "near", Clerk, private=True)
        near = one.actors[1]
        assert isinstance(near, Clerk)
        near.busy = True
        one.request_drain()
        await system.clock.sleep(1.0)
        assert (one.actors[0].state, near.state) == ("draining", "ready")
        near.busy = False
        assert await one.wait() == 0

    play(scenario)


def test_an_actor_that_cannot_join_says_why_and_harms_nobody() -> None:
    """Its neighbours go on without it."""

    told: list[str] = []

    class Broken(Clerk):
        async def start(self) -> None:
            raise RuntimeError("no vocabulary")

    async def scenario(system: MemorySystem) -> None:
        one = system.node("one")
        one.on_error = lambda error: told.append(str(error))
        one.add("boss", "boss", Boss)
        await system.start()
        await one.join("clerk", "near", Broken, private=True)
        await system.clock.sleep(0.5)
        assert [a.state for a in one.actors] == ["ready", "failed"] and told == ["no vocabulary"]
        found = one.membership.get(one.refs[1])
        assert found is not None and found.reason == "no vocabulary"

    play(scenario)


def test_an_earlier_incarnation_in_the_same_node_gets_nothing() -> None:
    """The address holds the epoch: what is sent to another epoch reaches nobody here."""

    async def scenario(system: MemorySystem) -> None:
        _, boss, near, _ = await office(system)
        boss.context.send(Ref("clerk", "near", "0" * 16), CancelAck(request_id="r"))
        await system.clock.sleep(0.01)
        assert not near.got

    play(scenario)
