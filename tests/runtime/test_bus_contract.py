"""What both buses promise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from runtime.bus import Bus, BusMessage
from runtime.clock import SystemClock
from runtime.memory_bus import MemoryBroker
from runtime.nats_bus import NatsBus
from schemas.errors import BusUnavailable, DeadlineExceeded, TooLarge, Unavailable
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio
Connect = Callable[[str], Awaitable[Bus]]
_numbers = itertools.count()


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Return a function that makes connections of one kind; all are closed at the end."""
    clock = SystemClock()
    made: list[Bus] = []
    if request.param == "memory":
        broker = MemoryBroker(clock, max_payload=65_536)

        async def make(name: str) -> Bus:
            made.append(broker.connect(name))
            return made[-1]
    else:
        server: NatsServer = request.getfixturevalue("small_nats")

        async def make(name: str) -> Bus:
            made.append(await NatsBus.connect(server.url, name=name, clock=clock))
            return made[-1]

    yield make
    for bus in made:
        await bus.close()


@pytest.fixture
def topic() -> str:
    """A subject of this test's own."""
    return f"contract.t{next(_numbers)}"


class Collected:
    """A handler that keeps what it gets, and can be waited on."""

    def __init__(self) -> None:
        self.messages: list[BusMessage] = []
        self._news = asyncio.Event()

    def __call__(self, message: BusMessage) -> None:
        self.messages.append(message)
        self._news.set()

    async def count(self, wanted: int, limit_s: float = 5.0) -> list[BusMessage]:
        async with asyncio.timeout(limit_s):
            while len(self.messages) < wanted:
                self._news.clear()
                await self._news.wait()
        return self.messages

    @property
    def payloads(self) -> list[bytes]:
        return [m.payload for m in self.messages]


async def test_a_message_arrives_with_payload_reply_and_headers(connect: Connect, topic: str) -> None:
    """Everything that was published is what the handler sees."""
    bus, got = await connect("a"), Collected()
    await bus.subscribe(topic, got)

    headers = {"Content-Type": "application/json", "Note": "č"}
    bus.publish(topic, b"\x00\xff\r\n", reply="some.reply", headers=headers)

    message = (await got.count(1))[0]
    assert message.subject == topic
    assert message.payload == b"\x00\xff\r\n"
    assert message.reply == "some.reply"
    assert message.headers == {"Content-Type": "application/json", "Note": "č"}
    assert not message.no_responders


async def test_messages_of_one_publisher_arrive_in_order(connect: Connect, topic: str) -> None:
    """Order holds per publisher and subject, over several rounds of the loop."""
    publisher, subscriber, got = await connect("a"), await connect("b"), Collected()
    await subscriber.subscribe(topic, got)
    await subscriber.flush()

    for i in range(2000):
        publisher.publish(topic, str(i).encode())
        if i % 100 == 0:
            await asyncio.sleep(0)

    await got.count(2000)
    assert got.payloads == [str(i).encode() for i in range(2000)]


async def test_a_subscription_is_in_force_once_subscribe_returns(connect: Connect, topic: str) -> None:
    """A publish on the same connection right after `subscribe` is never lost, many times over."""
    bus = await connect("a")
    for i in range(50):
        got = Collected()
        await bus.subscribe(f"{topic}.{i}", got)
        bus.publish(f"{topic}.{i}", b"x")
        await got.count(1)


async def test_after_a_flush_others_reach_a_new_subscription(connect: Connect, topic: str) -> None:
    """Interest is known to the bus once `flush` has returned, many times over."""
    one, two = await connect("a"), await connect("b")
    for i in range(100):
        await two.subscribe(f"{topic}.{i}", lambda m: two.publish(m.reply, b"here"))
        await two.flush()
        assert (await one.request(f"{topic}.{i}", b"x", timeout_s=5)).payload == b"here"


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("*.b", ["a.b", "c.b"]),
        ("a.>", ["a.b", "a.b.c"]),
        ("a.*.c", ["a.b.c"]),
        ("a.b", ["a.b"]),
        (">", ["a.b", "a.b.c", "c.b", "a"]),
    ],
)
async def test_wildcards_match_as_on_nats(connect: Connect, topic: str, pattern: str, hits: list[str]) -> None:
    """`*` is one token, `>` is one or more at the end."""
    bus, got, end = await connect("a"), Collected(), Collected()
    await bus.subscribe(f"{topic}.{pattern}", got)
    await bus.subscribe(f"{topic}-end", end)

    for subject in ("a.b", "a.b.c", "c.b", "a"):
        bus.publish(f"{topic}.{subject}", b"x")
    bus.publish(f"{topic}-end", b"x")

    await end.count(1)
    assert [m.subject.removeprefix(topic + ".") for m in got.messages] == hits


async def test_one_member_of_a_queue_group_gets_each_message(connect: Connect, topic: str) -> None:
    """Members share, others get copies."""
    bus, one, two, copy = await connect("a"), Collected(), Collected(), Collected()
    await bus.subscribe(topic, one, queue="g")
    await bus.subscribe(topic, two, queue="g")
    await bus.subscribe(topic, copy)

    for i in range(200):
        bus.publish(topic, str(i).encode())

    await copy.count(200)
    await bus.flush()
    await asyncio.sleep(0)
    assert len(one.messages) + len(two.messages) == 200
    assert set(one.payloads).isdisjoint(two.payloads)
    assert one.messages and two.messages


async def test_nothing_arrives_after_unsubscribe(connect: Connect, topic: str) -> None:
    """Unsubscribing takes effect at once on this side."""
    bus, got, end = await connect("a"), Collected(), Collected()
    subscription = await bus.subscribe(topic, got)
    await bus.subscribe(f"{topic}.end", end)

    await subscription.unsubscribe()
    bus.publish(topic, b"late")
    bus.publish(f"{topic}.end", b"x")

    await end.count(1)
    assert got.messages == []


async def test_a_handler_that_raises_goes_on_receiving(connect: Connect, topic: str) -> None:
    """Neither an exception nor a leaked CancelledError ends a subscription; both are counted."""
    bus, got = await connect("a"), Collected()

    def handler(message: BusMessage) -> None:
        got(message)
        if message.payload == b"error":
            raise RuntimeError("broken handler")
        if message.payload == b"cancel":
            raise asyncio.CancelledError

    await bus.subscribe(topic, handler)
    for payload in (b"error", b"cancel", b"fine"):
        bus.publish(topic, payload)

    await got.count(3)
    assert got.payloads == [b"error", b"cancel", b"fine"]
    assert bus.statistics()["handler_errors"] == 2


async def test_request_returns_the_reply(connect: Connect, topic: str) -> None:
    """A reply comes back to the one who asked, also with many in flight."""
    client, server = await connect("a"), await connect("b")
    await server.subscribe(topic, lambda m: server.publish(m.reply, b"re:" + m.payload))
    await server.flush()

    replies = await asyncio.gather(*(client.request(topic, str(i).encode(), timeout_s=5) for i in range(50)))

    assert [r.payload for r in replies] == [f"re:{i}".encode() for i in range(50)]


async def test_request_without_listeners_fails_at_once(connect: Connect, topic: str) -> None:
    """Nobody there is known without waiting for the timeout."""
    bus = await connect("a")
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="nobody listens"):
            await bus.request(topic, b"x", timeout_s=60)


async def test_request_without_an_answer_times_out(connect: Connect, topic: str) -> None:
    """A listener that does not answer costs the timeout and leaves nothing behind."""
    bus = await connect("a")
    await bus.subscribe(topic, lambda m: None)
    with pytest.raises(DeadlineExceeded):
        await bus.request(topic, b"x", timeout_s=0.05)
    assert bus._waiting == {}  # type: ignore[attr-defined]


async def test_a_publish_with_reply_learns_that_nobody_listens(connect: Connect, topic: str) -> None:
    """The bus's own answer comes to the reply subject, marked."""
    bus, got = await connect("a"), Collected()
    inbox = bus.new_inbox()
    await bus.subscribe(inbox, got)

    bus.publish(topic, b"x", reply=inbox)

    assert (await got.count(1))[0].no_responders


@pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a.*", "a.>", "a\r\nPUB x 0"])
async def test_a_malformed_subject_is_refused(connect: Connect, subject: str) -> None:
    """Nothing that could be a wildcard or inject a command is published, as subject or as reply."""
    bus = await connect("a")
    with pytest.raises(ValueError):
        bus.publish(subject, b"x")
    if subject:
        with pytest.raises(ValueError):
            bus.publish("fine", b"x", reply=subject)


@pytest.mark.parametrize("pattern", ["", "a b", "a..b", "a.>.b", "a.b*", ">>"])
async def test_a_malformed_pattern_is_refused(connect: Connect, pattern: str) -> None:
    """A wildcard stands alone in its token, `>` at the end."""
    bus = await connect("a")
    with pytest.raises(ValueError):
        await bus.subscribe(pattern, lambda m: None)


@pytest.mark.parametrize("headers", [{"a b": "x"}, {"a:": "x"}, {"": "x"}, {"a": "x\r\ny"}])
async def test_a_malformed_header_is_refused(connect: Connect, headers: dict[str, str]) -> None:
    """Headers cannot carry a line break or a name that is none."""
    bus = await connect("a")
    with pytest.raises(ValueError):
        bus.publish("fine", b"x", headers=headers)


async def test_the_size_limit_counts_headers(connect: Connect, topic: str) -> None:
    """Exactly `max_payload` passes, one byte more is refused with size and limit, headers included."""
    bus, got = await connect("a"), Collected()
    await bus.subscribe(topic, got)
    limit = bus.max_payload
    block = len(b"NATS/1.0\r\nk: v\r\n\r\n")

    bus.publish(topic, b"x" * limit)
    bus.publish(topic, b"x" * (limit - block), headers={"k": "v"})
    with pytest.raises(TooLarge, match=f"{limit + 1} bytes .* {limit} bytes") as refused:
        bus.publish(topic, b"x" * (limit + 1))
    assert topic not in str(refused.value), "clients read this text: no address belongs in it"
    with pytest.raises(TooLarge, match=f"{limit + 1} bytes .* {limit} bytes"):
        bus.publish(topic, b"x" * (limit - block + 1), headers={"k": "v"})
    bus.publish(topic, b"after")

    await got.count(3)
    assert [len(p) for p in got.payloads] == [limit, limit - block, 5]
    assert bus.connected


async def test_a_full_subscription_drops_the_newest_and_counts(connect: Connect, topic: str) -> None:
    """What a subscription holds is bounded."""
    bus, got, end = await connect("a"), Collected(), Collected()
    subscription = await bus.subscribe(topic, got, max_pending=10)
    await bus.subscribe(f"{topic}.end", end)
    subscription.pending.hold = True  # type: ignore[attr-defined]

    for i in range(25):
        bus.publish(topic, str(i).encode())
    bus.publish(f"{topic}.end", b"x")
    await end.count(1)
    subscription.pending.hold = False  # type: ignore[attr-defined]
    subscription.pending.schedule()  # type: ignore[attr-defined]

    await got.count(10)
    assert got.payloads == [str(i).encode() for i in range(10)]
    assert bus.statistics()["dropped_pending"] == 15


async def test_drain_handles_what_has_come_and_replies_leave(connect: Connect, topic: str) -> None:
    """Ten messages are under way when the drain begins: ten are handled, and their replies arrive."""
    server, client, replies = await connect("a"), await connect("b"), Collected()
    handled: list[bytes] = []

    def handler(message: BusMessage) -> None:
        handled.append(message.payload)
        server.publish(message.reply, b"done " + message.payload)

    subscription = await server.subscribe(topic, handler)
    await server.flush()
    inbox = client.new_inbox()
    await client.subscribe(inbox, replies)
    subscription.pending.hold = True  # type: ignore[attr-defined]
    for i in range(10):
        client.publish(topic, str(i).encode(), reply=inbox)
    await client.flush()
    draining = asyncio.create_task(server.drain(5.0))
    await asyncio.sleep(0.02)
    assert not draining.done()
    subscription.pending.hold = False  # type: ignore[attr-defined]
    subscription.pending.schedule()  # type: ignore[attr-defined]

    assert await draining == 0
    await replies.count(10)
    assert handled == [str(i).encode() for i in range(10)]
    assert sorted(replies.payloads) == [f"done {i}".encode() for i in range(10)]


async def test_others_get_what_comes_after_a_drain_began(connect: Connect, topic: str) -> None:
    """A draining member of a queue group takes no new message."""
    leaving, staying, client = await connect("a"), await connect("b"), await connect("c")
    left, stayed = Collected(), Collected()
    subscription = await leaving.subscribe(topic, left, queue="g")
    await staying.subscribe(topic, stayed, queue="g")
    await leaving.flush()
    await staying.flush()
    subscription.pending.hold = True  # type: ignore[attr-defined]
    client.publish(topic, b"before")
    await client.flush()
    draining = asyncio.create_task(leaving.drain(0.3))
    await asyncio.sleep(0.1)

    for _ in range(50):
        client.publish(topic, b"after")

    await stayed.count(50)
    assert await draining == len([p for p in [b"before"] if p not in stayed.payloads])
    assert b"after" not in left.payloads


async def test_drain_over_its_limit_counts_what_is_left(connect: Connect, topic: str) -> None:
    """A handler that does not get on cannot keep the process: the rest is counted."""
    bus, end = await connect("a"), Collected()
    subscription = await bus.subscribe(topic, lambda m: None)
    await bus.subscribe(f"{topic}.end", end)
    subscription.pending.hold = True  # type: ignore[attr-defined]
    for _ in range(7):
        bus.publish(topic, b"x")
    bus.publish(f"{topic}.end", b"x")
    await end.count(1)

    async with asyncio.timeout(10):
        assert await bus.drain(0.1) == 7


async def test_a_closed_bus_drops_and_refuses(connect: Connect, topic: str) -> None:
    """After close a publish is dropped and counted, a subscribe raises."""
    bus = await connect("a")
    await bus.close()

    bus.publish(topic, b"x")

    assert not bus.connected
    assert bus.statistics()["dropped_disconnected"] == 1
    with pytest.raises(BusUnavailable):
        await bus.subscribe(topic, lambda m: None)
    with pytest.raises(BusUnavailable):
        await bus.flush(0.2)


async def test_inboxes_are_never_the_same(connect: Connect) -> None:
    """Inboxes differ within a connection and between connections."""
    one, two = await connect("a"), await connect("b")
    inboxes = [one.new_inbox() for _ in range(10)] + [two.new_inbox() for _ in range(10)]
    assert len(set(inboxes)) == 20
