"""The twelve known traps of NATS and nats-py, each shown on the pinned version, and what our bus makes of it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from runtime.actor import Actor
from runtime.bus import BusMessage
from runtime.clock import SystemClock
from runtime.nats_bus import NatsBus
from runtime.node import Node
from runtime.telemetry import Telemetry
from schemas.errors import BusUnavailable, DeadlineExceeded, TooLarge, Unavailable
from schemas.items import ITEMS
from schemas.messages import CancelAck, Message
from schemas.subjects import Ref, decode_name, encode_name
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio
CLOCK = SystemClock()


@pytest.fixture
async def bus(own_nats: NatsServer) -> AsyncIterator[NatsBus]:
    """Our bus on a server of this test's own."""
    bus = await NatsBus.connect(own_nats.url, name="ours", clock=CLOCK)
    yield bus
    await bus.close()


async def until(condition: Callable[[], Any], limit_s: float = 5.0) -> None:
    """Wait for a condition with a bound."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def raw(server: NatsServer, **options: Any) -> Client:
    """Connect nats-py as it comes."""
    return await nats.connect(server.url, **options)


def test_the_version_is_the_one_that_these_tests_describe() -> None:
    """The bus touches private parts: another version needs a look at each of them."""
    assert importlib.metadata.version("nats-py") == "2.16.0"


# --- 1 ---------------------------------------------------------------------------------------------------


async def test_trap_1_nats_py_does_not_count_headers_and_loses_the_connection_for_good(own_nats: NatsServer) -> None:
    """The server counts headers, closes, and the client never comes back."""
    closed = asyncio.Event()

    async def on_closed() -> None:
        closed.set()

    client = await raw(own_nats, closed_cb=on_closed, reconnect_time_wait=0.05)
    await client.publish("x", b"x" * (own_nats.max_payload - 10), headers={"key": "a value of some length"})
    async with asyncio.timeout(5):
        await closed.wait()
    assert client.is_closed


async def test_trap_1_our_bus_refuses_and_keeps_its_connection(own_nats: NatsServer, bus: NatsBus) -> None:
    """Sizes around the limit beside small messages: refused at once by name, the connection and the small ones live."""
    got: list[bytes] = []
    await bus.subscribe("small", lambda m: got.append(m.payload))
    before = bus.client_id

    for nbytes in (60 * 1024, 64 * 1024, 66 * 1024, 1024 * 1024):
        bus.publish("small", b"neighbour")
        started = time.perf_counter()
        if nbytes <= own_nats.max_payload:
            bus.publish("big", b"x" * nbytes)
        else:
            with pytest.raises(TooLarge, match=rf"{nbytes} bytes .* {own_nats.max_payload} bytes"):
                bus.publish("big", b"x" * nbytes)
        with pytest.raises(TooLarge):
            bus.publish("big", b"x", headers={"h": "x" * own_nats.max_payload})
        assert time.perf_counter() - started < 1.0
        bus.publish("small", b"neighbour")

    await until(lambda: len(got) == 8)
    await bus.flush()
    assert bus.client_id == before
    assert bus.connected


async def test_trap_1_a_limit_lowered_under_an_open_connection_costs_a_reconnect_not_the_node(
    own_nats: NatsServer, bus: NatsBus
) -> None:
    """A reloaded server enforces its new limit without saying it; the reconnect after the violation reads it."""
    before = bus.client_id
    own_nats.reload(max_payload=8192)

    async with asyncio.timeout(5):
        while bus.client_id == before:  # the reload takes a moment
            bus.publish("x", b"x" * 8193)
            await asyncio.sleep(0.01)
            if bus.max_payload == 8192:
                break
    await until(lambda: bus.connected and bus.max_payload == 8192)

    with pytest.raises(TooLarge, match="8193 bytes .* 8192 bytes"):
        bus.publish("x", b"x" * 8193)
    assert (await _echo(bus)) == b"alive"


async def _echo(bus: NatsBus) -> bytes:
    await bus.subscribe("echo", lambda m: bus.publish(m.reply, m.payload))
    return (await bus.request("echo", b"alive", timeout_s=5)).payload


# --- 2 ---------------------------------------------------------------------------------------------------


async def test_trap_2_a_cancelled_error_in_a_callback_ends_a_subscription_of_nats_py(own_nats: NatsServer) -> None:
    """After it nothing is delivered, and nothing says so."""
    client, got = await raw(own_nats), []

    async def callback(message: Any) -> None:
        got.append(message.data)
        raise asyncio.CancelledError

    await client.subscribe("x", cb=callback)
    for _ in range(3):
        await client.publish("x", b"x")
    await client.flush()
    await asyncio.sleep(0.05)
    assert len(got) == 1
    assert client.is_connected
    await client.close()


async def test_trap_2_our_subscription_survives_it(bus: NatsBus) -> None:
    """It is counted like any other error of a handler."""
    got: list[bytes] = []

    def handler(message: BusMessage) -> None:
        got.append(message.payload)
        raise asyncio.CancelledError

    await bus.subscribe("x", handler)
    for _ in range(3):
        bus.publish("x", b"x")
    await until(lambda: len(got) == 3)
    assert bus.statistics()["handler_errors"] == 3


# --- 3 ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_trap_3_iterating_over_messages_is_many_times_slower_than_our_path(
    own_nats: NatsServer, bus: NatsBus
) -> None:
    """Time per message from the queue to the code that wants it; the queue is full before the clock starts."""
    count = 5000
    client = await raw(own_nats)
    subscription = await client.subscribe("it")
    ours = 0

    def handler(message: BusMessage) -> None:
        nonlocal ours
        ours += 1

    held = await bus.subscribe("it", handler)
    held.pending.hold = True
    await client.flush()
    await bus.flush()
    for _ in range(count):
        bus.publish("it", b"x")
    await until(lambda: subscription.pending_msgs == count and len(held.pending) == count)

    started, seen = time.perf_counter(), 0
    async for _ in subscription.messages:
        seen += 1
        if seen == count:
            break
    iterating_s = time.perf_counter() - started
    started = time.perf_counter()
    held.pending.hold = False
    held.pending.schedule()
    while ours < count:
        await asyncio.sleep(0)
    handling_s = time.perf_counter() - started

    assert iterating_s > 5 * handling_s
    await client.close()


# --- 4 ---------------------------------------------------------------------------------------------------


async def test_trap_4_a_raising_error_callback_leaves_nats_py_deaf_but_connected(own_nats: NatsServer) -> None:
    """One slow-consumer report whose callback raises ends the read loop; the client still says CONNECTED."""

    async def error_cb(error: Exception) -> None:
        raise RuntimeError("broken error callback")

    client = await raw(own_nats, error_cb=error_cb)
    await client.subscribe("x", pending_msgs_limit=1)
    for _ in range(3):
        await client.publish("x", b"x")
    await until(lambda: client._reading_task is not None and client._reading_task.done())
    assert client.is_connected
    await client.close()


async def test_trap_4_our_bus_notices_a_dead_read_loop_and_reconnects(bus: NatsBus) -> None:
    """Whatever ends it: within two seconds the connection is a new one and subscriptions are back."""
    got: list[bytes] = []
    await bus.subscribe("x", lambda m: got.append(m.payload))
    before = bus.client_id
    assert bus._client._reading_task is not None
    bus._client._reading_task.cancel()
    await until(lambda: not bus.connected)

    await until(lambda: bus.connected and bus.client_id != before)
    bus.publish("x", b"again")

    await until(lambda: got == [b"again"])
    assert bus.statistics()["deaf_reconnects"] == 1


async def test_trap_4_our_error_callback_never_raises_and_pings_find_a_dead_peer(bus: NatsBus) -> None:
    """The settings that the design asks for are in force."""
    await bus._on_error(None)  # type: ignore[arg-type]
    options = bus._client.options
    assert options["ping_interval"] == 5
    assert options["max_outstanding_pings"] == 2
    assert options["max_reconnect_attempts"] == -1
    assert 0.05 <= options["reconnect_time_wait"] <= 0.5


async def test_trap_4_a_subject_that_is_not_text_does_not_end_the_read_loop(own_nats: NatsServer, bus: NatsBus) -> None:
    """Bytes of a foreign client that are no UTF-8 are dropped and counted."""
    got: list[bytes] = []
    await bus.subscribe("b.>", lambda m: got.append(m.payload))
    await bus.flush()
    reader, writer = await asyncio.open_connection("127.0.0.1", own_nats.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false}\r\nPUB b.\xff\xfe 1\r\nx\r\nPUB b.c 4\r\nfine\r\nPING\r\n')
    await reader.readline()
    await until(lambda: got == [b"fine"])
    assert bus.statistics()["malformed"] == 1
    assert bus.connected
    writer.close()
    await writer.wait_closed()


async def test_trap_4_a_connection_closed_for_good_is_reported(own_nats: NatsServer) -> None:
    """When nats-py gives up, `on_closed` is called: the node ends, its supervisor starts another."""
    closed = asyncio.Event()
    bus = await NatsBus.connect(own_nats.url, name="ours", clock=CLOCK, on_closed=closed.set)
    await bus._client._process_err("'authorization violation'")
    async with asyncio.timeout(10):
        await closed.wait()
    assert not bus.connected
    await bus.close()


# --- 5 ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_trap_5_nats_py_sends_stale_publishes_after_a_reconnect_and_we_do_not(own_nats: NatsServer) -> None:
    """Both publish while the server is away; only the one of nats-py arrives later. Ours is dropped and counted."""
    client = await raw(own_nats, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
    bus = await NatsBus.connect(own_nats.url, name="ours", clock=CLOCK)
    got: list[bytes] = []
    await bus.subscribe("x", lambda m: got.append(m.payload))
    own_nats.kill()
    await until(lambda: not bus.connected and not client.is_connected)

    await client.publish("x", b"stale")
    bus.publish("x", b"ours")
    own_nats.max_payload = 32_768
    own_nats.start()

    await until(lambda: bus.connected and client.is_connected)
    if not got:
        # The stale one may have gone out before our subscription was back: it is in flight no more.
        await bus.flush()
    bus.publish("x", b"fresh")
    await until(lambda: b"fresh" in got)
    assert b"ours" not in got
    assert client.stats["out_msgs"] == 1 and client.pending_data_size == 0
    assert bus.statistics()["dropped_disconnected"] == 1
    assert bus.statistics()["reconnects"] == 1
    assert bus.max_payload == 32_768
    assert CLOCK.now() - bus.connected_since < 5
    await client.close()
    await bus.close()


@pytest.mark.slow
async def test_trap_5_requests_work_again_after_each_restart_of_the_server(own_nats: NatsServer) -> None:
    """Killed or stopped cleanly: subscriptions, the reply inbox and queue groups are back."""
    bus = await NatsBus.connect(own_nats.url, name="ours", clock=CLOCK)
    await bus.subscribe("echo", lambda m: bus.publish(m.reply, m.payload), queue="g")
    assert (await bus.request("echo", b"0", timeout_s=5)).payload == b"0"
    for end in (own_nats.kill, own_nats.stop):
        end()
        await until(lambda: not bus.connected)
        own_nats.start()
        await until(lambda: bus.connected)
        replies = await asyncio.gather(*(bus.request("echo", b"%d" % i, timeout_s=5) for i in range(100)))
        assert [r.payload for r in replies] == [b"%d" % i for i in range(100)]
    await bus.close()


@pytest.mark.slow
async def test_trap_5_a_reconnect_that_dies_is_started_again(own_nats: NatsServer, bus: NatsBus) -> None:
    """When nats-py's own reconnect task ends without a connection, nobody else would try."""
    own_nats.kill()
    await until(lambda: not bus.connected and bus._client._reconnection_task is not None)
    assert bus._client._reconnection_task is not None
    bus._client._reconnection_task.cancel()
    await until(lambda: bus._client.stuck)
    own_nats.start()
    await until(lambda: bus.connected)
    assert await _echo(bus) == b"alive"
    assert bus.statistics()["deaf_reconnects"] == 1


async def test_trap_5_a_close_during_a_reconnect_raises_nothing(own_nats: NatsServer) -> None:
    """At whatever moment of an outage a connection is closed, its owner is not cancelled by it."""
    buses = [await NatsBus.connect(own_nats.url, name=f"b{i}", clock=CLOCK) for i in range(12)]
    own_nats.kill()
    for bus in buses:
        await asyncio.sleep(0.003)
        await bus.close()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert not any(bus.connected for bus in buses)


async def test_trap_5_a_bus_that_is_not_there_is_an_error_within_its_bound() -> None:
    """With endless reconnects the first connect of nats-py never ends; ours names the address and gives up."""
    async with asyncio.timeout(10):
        with pytest.raises(BusUnavailable, match="127.0.0.1:9"):
            await NatsBus.connect("nats://secret@127.0.0.1:9", name="ours", clock=CLOCK, connect_timeout_s=0.3)


# --- 6, 7 ------------------------------------------------------------------------------------------------


async def test_trap_6_a_hanging_member_of_a_queue_group_keeps_being_picked(own_nats: NatsServer, bus: NatsBus) -> None:
    """Queue groups know no load: a member that handles nothing still gets its share, until it unsubscribes."""
    other = await NatsBus.connect(own_nats.url, name="other", clock=CLOCK)
    worked = 0

    def work(message: BusMessage) -> None:
        nonlocal worked
        worked += 1

    await bus.subscribe("job", work, queue="g")
    hanging = await other.subscribe("job", lambda m: None, queue="g")
    hanging.pending.hold = True
    await bus.flush()
    await other.flush()
    for _ in range(200):
        bus.publish("job", b"x")
    await until(lambda: worked + len(hanging.pending) == 200)
    assert 40 < len(hanging.pending) < 160

    await hanging.unsubscribe()
    await other.flush()
    before = worked
    for _ in range(200):
        bus.publish("job", b"x")
    await until(lambda: worked - before == 200)
    await other.close()


async def test_trap_7_one_slow_subscription_holds_up_nobody_and_is_bounded(own_nats: NatsServer, bus: NatsBus) -> None:
    """A handler that does not get on fills its own queue, to its bound; neighbours on the connection see nothing."""
    producer = await NatsBus.connect(own_nats.url, name="producer", clock=CLOCK)
    got = 0

    def handler(message: BusMessage) -> None:
        nonlocal got
        got += 1

    slow = await bus.subscribe("slow", lambda m: None, max_pending=64)
    slow.pending.hold = True
    await bus.subscribe("quick", handler)
    await bus.flush()
    before = bus.client_id
    for _ in range(400):
        producer.publish("slow", b"x" * 32_768)
        producer.publish("quick", b"x")
        await asyncio.sleep(0)
    await until(lambda: got == 400)
    assert len(slow.pending) == 64
    assert bus.statistics()["dropped_pending"] == 336
    assert bus.client_id == before
    await producer.close()


@pytest.mark.slow
async def test_trap_7_a_frozen_server_stalls_no_publisher_and_fills_no_memory(
    own_nats: NatsServer, bus: NatsBus
) -> None:
    """While the server does not read, publishing returns at once, and the outbox drops at its bound."""
    import signal

    own_nats.signal(signal.SIGSTOP)
    try:
        started = time.perf_counter()
        for i in range(1500):
            bus.publish("x", b"x" * 60_000)
            if i % 50 == 0:
                await asyncio.sleep(0)
        assert time.perf_counter() - started < 5
        statistics = bus.statistics()
        assert statistics["dropped_outbox_full"] > 0
        assert statistics["outbox_bytes"] <= 32 * 1024 * 1024
    finally:
        own_nats.signal(signal.SIGCONT)


# --- 8 ---------------------------------------------------------------------------------------------------


async def test_trap_8_no_responders_means_no_subscription_not_a_dead_worker(bus: NatsBus) -> None:
    """A hanging worker looks like a slow one; only when its subscription is gone does the bus say so."""
    hanging = await bus.subscribe("work", lambda m: None)
    hanging.pending.hold = True
    with pytest.raises(DeadlineExceeded):
        await bus.request("work", b"x", timeout_s=0.1)
    await hanging.unsubscribe()
    with pytest.raises(Unavailable):
        await bus.request("work", b"x", timeout_s=5)


# --- 9 ---------------------------------------------------------------------------------------------------

_USERS = """
authorization {{
  users: [
    {{ user: asker, password: p, permissions: {{ publish: ">", subscribe: ["_INBOX_asker.>"] }} }}
    {{ user: worker, password: p
       permissions: {{ publish: ["none"], subscribe: ["work"], allow_responses: {responses} }} }}
  ]
}}
"""


@pytest.mark.parametrize(("responses", "arriving"), [("true", 1), ('{ max: 5, expires: "1m" }', 5)])
async def test_trap_9_a_service_may_answer_once_unless_allowed_more(
    nats_binary: str, tmp_path: Path, responses: str, arriving: int
) -> None:
    """`allow_responses: true` lets one reply pass. Inboxes have a prefix of their user, so nobody else reads them."""
    server = NatsServer(nats_binary, tmp_path, extra=_USERS.format(responses=responses))
    server.start()
    asker = await NatsBus.connect(
        server.url, name="asker", clock=CLOCK, user="asker", password="p", inbox_prefix="_INBOX_asker"
    )
    worker = await NatsBus.connect(server.url, name="worker", clock=CLOCK, user="worker", password="p")
    try:

        def work(message: BusMessage) -> None:
            for i in range(7):
                worker.publish(message.reply, b"%d" % i)

        got: list[bytes] = []
        inbox = asker.new_inbox()
        await worker.subscribe("work", work)
        await worker.flush()
        await asker.subscribe(inbox, lambda m: got.append(m.payload))
        asker.publish("work", b"x", reply=inbox)
        await until(lambda: len(got) >= arriving)
        await worker.flush()
        await asker.flush()
        await asyncio.sleep(0)
        assert len(got) == arriving
        # A refused publish is reported and costs no connection.
        await until(lambda: worker.statistics()["bus_errors"] > 0)
        assert worker.connected

        await worker.subscribe("_INBOX_asker.>", lambda m: got.append(m.payload))
        await until(lambda: "ermissions" in worker._last_error)
        assert worker.connected
    finally:
        await asker.close()
        await worker.close()
        server.stop()


async def test_trap_9_wrong_credentials_are_an_error_at_once(nats_binary: str, tmp_path: Path) -> None:
    """No waiting for a bus that will never let us in."""
    server = NatsServer(nats_binary, tmp_path, extra="authorization { token: right }")
    server.start()
    try:
        started = time.monotonic()
        with pytest.raises(BusUnavailable, match="(?i)authorization"):
            await NatsBus.connect(server.url, name="x", clock=CLOCK, token="wrong", connect_timeout_s=20)
        assert time.monotonic() - started < 5
        bus = await NatsBus.connect(server.url, name="x", clock=CLOCK, token="right")
        assert bus.connected
        await bus.close()
    finally:
        server.stop()


# --- 10, 11 ----------------------------------------------------------------------------------------------


class Recorder(Actor):
    """Keeps what it gets."""

    kind = "recorder"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.got: list[Message] = []
        self.hot = 0
        self.down: list[tuple[str, str]] = []

    def receive(self, message: Message, sender: Ref | None) -> None:
        self.got.append(message)

    def receive_hot(self, kind: str, body: list[Any], sender: Ref | None) -> None:
        self.hot += 1

    def member_down(self, ref: Ref, reason: str) -> None:
        self.down.append((ref.id, reason))


async def make_node(server: NatsServer, name: str) -> Node:
    control = await NatsBus.connect(server.url, name=f"{name}-control", clock=CLOCK)
    stream = await NatsBus.connect(server.url, name=f"{name}-stream", clock=CLOCK)
    node = Node(name, "host", control=control, stream=stream, clock=CLOCK, telemetry=Telemetry(name, level="error"))
    node.add("recorder", name, Recorder)
    await node.start()
    return node


@pytest.mark.slow
async def test_trap_10_liveness_needs_no_jetstream(own_nats: NatsServer) -> None:
    """The server has no JetStream: a bucket cannot even be made, and a silent node is known within seconds."""
    client = await raw(own_nats)
    with pytest.raises(nats.errors.Error):
        await client.jetstream(timeout=0.5).create_key_value(bucket="live", ttl=0.1)
    await client.close()
    one, two = await make_node(own_nats, "one"), await make_node(own_nats, "two")
    watcher = one.actors[0]
    assert isinstance(watcher, Recorder)
    await until(lambda: len(one.membership.members("recorder")) == 2)
    await asyncio.sleep(1.0)  # the watcher judges nobody in its first second on the bus
    started = time.monotonic()
    await two._sender.stop()
    await until(lambda: watcher.down == [("two", "silent")])
    assert time.monotonic() - started < 5
    await two.stop()
    await until(lambda: watcher.down[-1] == ("two", "exit"))
    await one.stop()


async def test_trap_11_a_node_has_a_connection_for_control_and_one_for_streams(own_nats: NatsServer) -> None:
    """Items queue on one, control messages pass on the other; heartbeats have a third in their own thread."""
    node, sender = await make_node(own_nats, "node"), await make_node(own_nats, "sender")
    actor = node.actors[0]
    assert isinstance(actor, Recorder)
    context = sender._hosted[0].context
    assert node.control.client_id != node.stream.client_id  # type: ignore[attr-defined]
    for pending in node.stream._client.routes.values():  # type: ignore[attr-defined]
        pending.hold = True

    for _ in range(100):
        context.send_hot(actor.ref, ITEMS, [])
    context.send(actor.ref, CancelAck(request_id="r"))

    await until(lambda: actor.got == [CancelAck(request_id="r")])
    assert actor.hot == 0
    for pending in node.stream._client.routes.values():  # type: ignore[attr-defined]
        pending.hold = False
        pending.schedule()
    await until(lambda: actor.hot == 100)
    await sender.stop()
    await node.stop()


@pytest.mark.slow
async def test_trap_11_a_busy_loop_does_not_look_dead(own_nats: NatsServer) -> None:
    """A node whose loop is blocked for two seconds still sends heartbeats, which say how late it is."""
    node = await make_node(own_nats, "busy")
    watcher = await NatsBus.connect(own_nats.url, name="watcher", clock=CLOCK)
    beats: list[BusMessage] = []
    await watcher.subscribe("heartbeat.>", beats.append)
    await watcher.flush()

    time.sleep(1.5)

    from schemas.codec import decode
    from schemas.messages import Heartbeat

    await until(lambda: len(beats) >= 5)
    lags = [b.loop_lag_s for b in (decode(m.payload)[0] for m in beats) if isinstance(b, Heartbeat)]
    assert max(lags) > 0.8
    await watcher.close()
    await node.stop()


# --- 12 --------------------------------------------------------------------------------------------------


async def test_trap_12_nats_py_publishes_to_subjects_that_are_none(own_nats: NatsServer) -> None:
    """Empty tokens and wildcards pass its check; ours refuses them (see the contract test)."""
    client = await raw(own_nats)
    for subject in ("a..b", "a.", "a.*", "a.>"):
        await client.publish(subject, b"x")
    await client.close()


@pytest.mark.parametrize("name", ["a.b", "*", ">", "", "with space", "a\r\nPUB x 0\r\n", "čeština", "x" * 200, "_"])
async def test_trap_12_any_name_travels_as_one_token(bus: NatsBus, name: str) -> None:
    """Tenants and models of any spelling stand in a subject as one token, and come back."""
    got: list[str] = []
    await bus.subscribe("tenant.*", lambda m: got.append(decode_name(m.subject.split(".")[1])))
    bus.publish(f"tenant.{encode_name(name)}", b"x")
    await until(lambda: got == [name])
