"""Delivery: whatever the channel loses, repeats or swaps, each item arrives once and in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.delivery import MAX_RESEND_AFTER_S, Inbound, Outbound
from schemas.items import Item


def items(choice: int, first: int, count: int) -> list[Item]:
    return [Item(choice, i, 100 * choice + i, None) for i in range(first, first + count)]


def test_the_receiver_takes_only_the_next_item() -> None:
    """Lower ones are repeats, higher ones lie beyond a gap."""
    inbound: Inbound[Item] = Inbound(2)
    assert inbound.accept(items(0, 0, 2) + items(1, 0, 1)) == items(0, 0, 2) + items(1, 0, 1)
    assert inbound.accept(items(0, 1, 2)) == items(0, 2, 1)
    assert inbound.accept(items(0, 5, 1) + items(1, 1, 1)) == items(1, 1, 1)
    assert inbound.next == [3, 2]
    assert (inbound.accepted, inbound.repeated, inbound.gaps) == (5, 1, 1)


def test_an_item_of_a_choice_that_does_not_exist_is_dropped() -> None:
    """Nothing that a peer says may grow our state."""
    inbound: Inbound[Item] = Inbound(1)
    assert inbound.accept([Item(3, 0, 1, None), Item(-1, 0, 1, None)]) == []


def test_acks_go_out_on_progress_and_every_200_ms() -> None:
    """Also after a mere repeat, since the sender repeats for want of an ack."""
    inbound: Inbound[Item] = Inbound(1)
    assert inbound.ack_due(0.0)
    assert inbound.acked(0.0) == [0]
    assert not inbound.ack_due(0.1, at_once=True)
    assert inbound.ack_due(0.2)
    inbound.accept(items(0, 0, 1))
    assert inbound.ack_due(0.1, at_once=True)
    assert inbound.acked(0.1) == [1]
    inbound.accept(items(0, 0, 1))
    assert inbound.ack_due(0.11, at_once=True)


def test_new_items_are_due_once_and_again_after_the_silence() -> None:
    """Repeats slow down while nothing is heard, and speed up again with the first ack."""
    outbound: Outbound[Item] = Outbound(1)
    outbound.append(items(0, 0, 3))
    assert outbound.due(0.0) == items(0, 0, 3)
    assert outbound.due(0.29) == []
    assert outbound.due(0.3) == items(0, 0, 3)
    assert outbound.due(0.8) == []
    assert outbound.due(0.91) == items(0, 0, 3)
    times = [t / 100 for t in range(92, 1500) if outbound.due(t / 100)]
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) <= MAX_RESEND_AFTER_S + 0.02
    assert outbound.ack([2], 15.0) == 2
    assert outbound.due(15.2) == []
    assert outbound.due(15.3) == items(0, 2, 1)


def test_an_ack_releases_and_never_goes_back() -> None:
    """Old acks change nothing; one beyond what was appended releases what there is."""
    outbound: Outbound[Item] = Outbound(2)
    outbound.append(items(0, 0, 3) + items(1, 0, 2))
    outbound.due(0.0)
    assert outbound.ack([2, 1], 0.1) == 3
    assert outbound.ack([1, 0], 0.2) == 0
    assert outbound.ack([99, 1], 0.3) == 1
    assert outbound.acked == [3, 1]
    assert outbound.held == 1


def test_a_receiver_that_is_ahead_is_not_sent_what_it_has() -> None:
    """After a failover the new sender starts behind the receiver."""
    outbound: Outbound[Item] = Outbound(1)
    outbound.append(items(0, 0, 5))
    outbound.ack([3], 0.0)
    assert outbound.due(0.0) == items(0, 3, 2)


def test_the_window_holds_items_back() -> None:
    """Credit bounds what is on its way; with none at all a single item still probes."""
    outbound: Outbound[Item] = Outbound(1, window=2)
    outbound.append(items(0, 0, 5))
    assert outbound.due(0.0) == items(0, 0, 2)
    assert outbound.due(0.1) == []
    assert outbound.unsent == [3]
    outbound.ack([2], 0.1, window=1)
    assert outbound.due(0.1) == items(0, 2, 1)
    outbound.ack([3], 0.2, window=0)
    assert outbound.due(0.2) == items(0, 3, 1)
    assert outbound.due(0.2) == []


def test_the_terminal_follows_the_last_item_and_is_repeated_until_done() -> None:
    """Never before all items were sent; never after `done`."""
    outbound: Outbound[Item] = Outbound(1, window=1)
    outbound.append(items(0, 0, 2))
    outbound.end()
    outbound.due(0.0)
    assert not outbound.end_due(0.0)
    outbound.ack([1], 0.1)
    outbound.due(0.1)
    assert outbound.end_due(0.1)
    assert not outbound.end_due(0.3)
    assert outbound.end_due(0.41)
    assert not outbound.settled
    outbound.ack([2], 0.5, done=True)
    assert not outbound.end_due(9.0)
    assert outbound.due(9.0) == []
    assert outbound.settled and outbound.held == 0


def test_an_item_out_of_order_is_refused_by_the_sender() -> None:
    """The sender's own items have no gap."""
    outbound: Outbound[Item] = Outbound(1, start=[4])
    outbound.append(items(0, 4, 1))
    with pytest.raises(ValueError, match="item 6 of choice 0, 5 was next"):
        outbound.append(items(0, 6, 1))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    loss=st.floats(0.0, 0.7),
    window=st.integers(1, 64),
)
def test_over_a_lossy_reordering_channel_each_item_arrives_once_in_order(
    seed: int, counts: list[int], loss: float, window: int
) -> None:
    """Both directions lose and delay; within a bounded time everything is there and nothing is held."""
    dice = random.Random(seed)
    outbound: Outbound[Item] = Outbound(len(counts), window=window)
    inbound: Inbound[Item] = Inbound(len(counts))
    got: list[list[int]] = [[] for _ in counts]
    to_receiver: list[tuple[float, list[Item]]] = []
    to_sender: list[tuple[float, list[int]]] = []
    made = [0] * len(counts)
    ended = terminal = False
    now = 0.0
    while not outbound.done and now < 600.0:
        now += 0.05
        for choice, total in enumerate(counts):
            if made[choice] < total and dice.random() < 0.5:
                outbound.append(items(choice, made[choice], 1))
                made[choice] += 1
        if not ended and made == counts:
            outbound.end()
            ended = True
        if (batch := outbound.due(now)) and dice.random() >= loss:
            to_receiver.append((now + 0.3 * dice.random(), batch))
        if outbound.end_due(now) and dice.random() >= loss:
            terminal = True
        for at, batch in [x for x in to_receiver if x[0] <= now]:
            to_receiver.remove((at, batch))
            for item in inbound.accept(batch):
                got[item.choice].append(item.index)
        if inbound.ack_due(now, at_once=True):
            next_ = inbound.acked(now)
            if dice.random() >= loss:
                to_sender.append((now + 0.3 * dice.random(), next_))
        for at, next_ in [x for x in to_sender if x[0] <= now]:
            to_sender.remove((at, next_))
            outbound.ack(next_, now, window=window, done=terminal and next_ == counts)
        assert outbound.in_flight <= window

    assert outbound.done
    assert got == [list(range(n)) for n in counts]
    assert outbound.held == 0
