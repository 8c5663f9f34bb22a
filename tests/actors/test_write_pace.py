"""When an engine offers what it computed: a few blocks wait for more beside running streams, and for nothing else."""

from __future__ import annotations

from actors.write_pace import BATCH, ENDED_S, RUNNING_S, WritePace


def test_nothing_is_due_where_nothing_was_computed() -> None:
    """Not at first, and not after an offer."""
    pace = WritePace()
    assert not pace.due(9.0, busy=False)
    pace.ended(3, 10.0)
    assert pace.due(10.0, busy=False)
    assert not pace.due(99.0, busy=False)


def test_beside_streams_a_few_blocks_wait_for_more_but_not_long() -> None:
    """The time counts from the first of them, and anew after an offer."""
    pace = WritePace()
    pace.ended(3, 10.0)
    pace.ended(3, 10.0 + 0.8 * ENDED_S)
    assert not pace.due(10.0 + 0.9 * ENDED_S, busy=True)
    assert pace.due(10.0 + ENDED_S, busy=True)
    pace.ended(3, 20.0)
    assert not pace.due(20.0 + 0.9 * ENDED_S, busy=True)


def test_prompts_of_running_requests_wait_longer_but_not_for_their_ends() -> None:
    """Their blocks cannot be pushed out; an end of another one takes them along."""
    pace = WritePace()
    pace.computed(10.0)
    assert not pace.due(10.0 + 0.9 * RUNNING_S, busy=True)
    assert pace.due(10.0 + RUNNING_S, busy=True)
    pace.computed(20.0)
    pace.ended(1, 20.5)
    assert pace.due(20.5 + ENDED_S, busy=True)
    assert not pace.due(20.0 + RUNNING_S, busy=True)


def test_a_full_batch_or_a_hurry_or_an_idle_engine_waits_for_nothing() -> None:
    """Each alone is enough."""
    full, hurried, idle = WritePace(), WritePace(), WritePace()
    full.ended(BATCH - 1, 10.0)
    assert not full.due(10.0, busy=True)
    full.ended(1, 10.0)
    hurried.hurry(10.0)
    idle.computed(10.0)
    assert full.due(10.0, busy=True) and hurried.due(10.0, busy=True) and idle.due(10.0, busy=False)
