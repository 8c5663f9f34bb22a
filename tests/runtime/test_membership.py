"""Membership: silence, exits, new epochs, clocks; and the vitals that say whether silence may count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.membership import DEAF_S, Changed, Down, Membership, MembershipView
from runtime.virtual_clock import VirtualClock, run_virtual
from runtime.vitals import Vitals
from schemas.messages import ExitNotice, Heartbeat
from schemas.subjects import Ref

A = Ref("decode", "a", "e1")
A2 = Ref("decode", "a", "e2")
B = Ref("decode", "b", "e1")
WALL = 1_700_000_000.0


def beat(
    ref: Ref, seq: int = 1, *, now: float = 0.0, state: str = "ready", node: str = "", skew: float = 0.0
) -> Heartbeat:
    return Heartbeat(
        ref=ref,
        node=node or ref.id,
        host="h",
        pid=7,
        seq=seq,
        sent_at=WALL + now + skew,
        state=state,
        load={"running": seq},
    )


def hear(view: MembershipView, ref: Ref, now: float, **options: object) -> list[object]:
    return list(view.heard(beat(ref, int(now * 1000) + 1, now=now, **options), now, WALL + now))  # type: ignore[arg-type]


def test_a_member_appears_with_its_first_heartbeat() -> None:
    """It is listed by kind and state, with the load that it said."""
    view = MembershipView()
    assert hear(view, A, 0.0) == [Changed(A, "ready")]
    assert [m.ref for m in view.members("decode")] == [A]
    assert view.members("prefill") == []
    assert view.get(A).load == {"running": 1}  # type: ignore[union-attr]
    assert view.is_up(A) and not view.is_up(B)


def test_a_state_change_is_told_once() -> None:
    """Starting, ready and draining are told as they come; a plain heartbeat tells nothing."""
    view = MembershipView()
    assert hear(view, A, 0.0, state="starting") == [Changed(A, "starting")]
    assert view.members("decode") == []
    assert [m.ref for m in view.members("decode", states=("starting", "ready"))] == [A]
    assert hear(view, A, 0.25) == [Changed(A, "ready")]
    assert hear(view, A, 0.5) == []
    assert hear(view, A, 0.75, state="draining") == [Changed(A, "draining")]
    assert view.members("decode") == [] and view.is_up(A)


def test_silence_of_more_than_the_limit_is_suspected_once() -> None:
    """Not at 1.2 s, but after it; one event; a later heartbeat revives."""
    view = MembershipView()
    hear(view, A, 0.0)
    assert view.check(1.2, True) == []
    assert view.check(1.21, True) == [Down(A, "silent")]
    assert view.check(2.0, True) == []
    assert not view.is_up(A) and view.get(A).silent  # type: ignore[union-attr]
    assert hear(view, A, 3.0) == [Changed(A, "ready")]
    assert view.is_up(A)


def test_silence_does_not_count_while_this_node_is_ill() -> None:
    """After an illness every timer starts anew."""
    view = MembershipView()
    hear(view, A, 0.0)
    assert view.check(5.0, False) == []
    assert view.check(6.1, True) == []
    assert view.check(6.21, True) == [Down(A, "silent")]


def test_an_exit_is_told_at_once_and_late_heartbeats_revive_nobody() -> None:
    """Confirmed is confirmed, also after a suspicion, and twice is once."""
    view = MembershipView()
    hear(view, A, 0.0)
    view.check(2.0, True)
    notice = ExitNotice(node="a", pid=7, code=-9, refs=[A])
    assert view.exited(notice, 2.1) == [Down(A, "exit")]
    assert view.exited(notice, 2.2) == []
    assert hear(view, A, 2.3) == []
    assert not view.is_up(A) and view.get(A).exited  # type: ignore[union-attr]


def test_an_exit_covers_actors_that_the_notice_does_not_name() -> None:
    """A supervisor may not have heard of all actors of a node yet; node and pid tell."""
    view = MembershipView()
    hear(view, A, 0.0, node="n")
    hear(view, B, 0.0, node="n")
    events = view.exited(ExitNotice(node="n", pid=7, code=1, refs=[A]), 0.1)
    assert set(events) == {Down(A, "exit"), Down(B, "exit")}
    assert view.exited(ExitNotice(node="n", pid=8, code=1, refs=[]), 0.2) == []


def test_an_exit_heard_before_the_first_heartbeat_holds() -> None:
    """Messages may come in any order."""
    view = MembershipView()
    assert view.exited(ExitNotice(node="a", pid=7, code=1, refs=[A]), 0.0) == [Down(A, "exit")]
    assert hear(view, A, 0.1) == []
    assert view.members("decode") == []


def test_a_new_epoch_supersedes_the_old_one() -> None:
    """The old is down, the new is there, and the old cannot come back."""
    view = MembershipView()
    hear(view, A, 0.0)
    assert hear(view, A2, 0.1) == [Down(A, "superseded"), Changed(A2, "ready")]
    assert [m.ref for m in view.members("decode")] == [A2]
    assert hear(view, A, 0.2) == []
    assert view.exited(ExitNotice(node="zzz", pid=1, code=1, refs=[A]), 0.3) == [Down(A, "exit")]


def test_the_dead_are_forgotten_after_a_bounded_time() -> None:
    """Tables do not grow with restarts."""
    view = MembershipView()
    for i in range(100):
        ref = Ref("decode", "a", f"e{i}")
        hear(view, ref, float(i))
        view.exited(ExitNotice(node="a", pid=7, code=1, refs=[ref]), float(i))
    view.check(200.0, True)
    assert view.all() == [] and not view._dead and not view._offsets


def test_the_table_of_the_dead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loop of a whole fleet: who died first is forgotten first, and those that live are not touched."""
    monkeypatch.setattr("runtime.membership.MAX_DEAD", 10)
    view = MembershipView()
    hear(view, B, 0.0)
    for number in range(30):
        hear(view, Ref("decode", "a", f"e{number}"), 0.1 * number)
    assert len(view._dead) == 10 and len(view.all()) == 12
    assert [m.ref.epoch for m in view.members("decode")] == ["e29", "e1"]
    assert hear(view, Ref("decode", "a", "e25"), 3.0) == []


def test_an_old_heartbeat_changes_nothing() -> None:
    """Sequence numbers order what two connections may have swapped."""
    view = MembershipView()
    view.heard(beat(A, 5, state="draining"), 0.0, WALL)
    assert view.heard(beat(A, 4, state="ready"), 0.1, WALL) == []
    assert view.get(A).state == "draining"  # type: ignore[union-attr]


@pytest.mark.parametrize("skew", [0.35, -0.35])
def test_a_clock_far_from_the_median_is_not_ready(skew: float) -> None:
    """Of four nodes one is off; it is up, but not among the ready. A slow heartbeat alone is no skew."""
    view = MembershipView()
    refs = [Ref("decode", name, "e") for name in "pqrs"]
    for step in range(4):
        for ref in refs:
            hear(view, ref, step * 0.25, skew=skew if ref.id == "s" else 0.0)
    assert [m.ref.id for m in view.members("decode")] == ["p", "q", "r"]
    assert view.get(refs[3]).skewed and view.is_up(refs[3])  # type: ignore[union-attr]
    assert view.skew("s") == pytest.approx(skew, abs=1e-3)
    late = beat(refs[0], 9999, now=1.0)
    view.heard(late, 1.5, WALL + 1.5)
    assert not view.get(refs[0]).skewed  # type: ignore[union-attr]


def test_our_own_clock_can_be_the_one_that_is_off() -> None:
    """Everyone else agrees: then it is us."""
    view = MembershipView()
    for step in range(4):
        for name in "pqr":
            hear(view, Ref("decode", name, "e"), step * 0.25, skew=-0.5)
    assert view.own_skew() == pytest.approx(0.5, abs=1e-3)


def test_late_heartbeats_of_a_fleet_that_starts_are_no_skew() -> None:
    """The first ones of a node, those that waited here, and the beats of one node's other actors, tell nothing."""
    view = MembershipView()
    refs = [Ref("decode", name, "e") for name in "pqrs"]
    for number, ref in enumerate(refs):
        view.heard(beat(ref, 1), 0.4 * number, WALL + 0.4 * number)
        for kind in ("kv", "transfer", "tokenize", "detokenize"):
            view.heard(beat(Ref(kind, ref.id, "e"), 1, node=ref.id), 0.4 * number, WALL + 0.4 * number)
    for step in range(1, 8):
        for number, ref in enumerate(refs):
            waited = beat(ref, 1 + step, now=step * 0.25)
            view.heard(waited, 2.0 + number, WALL + 2.0 + number, timely=False)

    assert [m.ref.id for m in view.members("decode")] == ["p", "q", "r", "s"]
    assert view.own_skew() == 0.0


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.sampled_from("ab"), st.integers(0, 2)),
        st.tuples(st.just("exit"), st.sampled_from("ab"), st.integers(0, 2)),
        st.tuples(st.just("check"), st.booleans(), st.just(0)),
    ),
    max_size=60,
)


@given(_EVENTS, st.lists(st.floats(0.0, 2.0), min_size=60, max_size=60))
def test_no_history_revives_the_dead_or_lists_two_epochs(
    events: list[tuple[str, object, int]], steps: list[float]
) -> None:
    """Whatever comes in whatever order: an exit is final, and of one id at most one epoch is up."""
    view, now, seq = MembershipView(), 0.0, 0
    dead: set[Ref] = set()
    for (what, who, epoch), step in zip(events, steps, strict=False):
        now += step
        seq += 1
        if what == "check":
            view.check(now, bool(who))
            continue
        ref = Ref("decode", str(who), f"e{epoch}")
        if what == "beat":
            view.heard(beat(ref, seq, now=now, node=f"{who}{epoch}"), now, WALL + now)
        else:
            view.exited(ExitNotice(node=f"{who}{epoch}", pid=7, code=1, refs=[ref]), now)
            dead.add(ref)
        if now < view.forget_s:
            assert not any(view.is_up(r) for r in dead)
        up = [m.ref.id for m in view.all() if m.up]
        assert len(up) == len(set(up))


def test_vitals_judge_only_after_the_bus_is_settled() -> None:
    """The first second after a connect does not count, nor does time without a bus."""
    vitals = Vitals()
    vitals.tick(0.0, 0.05)
    vitals.tick(0.05, 0.05)
    assert not vitals.well(0.06, None)
    assert not vitals.well(0.06, 0.0)
    vitals.tick(1.05, 1.0)
    vitals.tick(2.1, 0.05)
    assert vitals.well(2.11, 1.0)


def test_vitals_need_a_second_after_a_lag() -> None:
    """A loop that was stopped for five seconds is ill, also before its next tick, and for a second after it."""
    vitals = Vitals()
    vitals.tick(10.0, 0.05)
    assert vitals.well(10.01, 0.0)
    assert not vitals.well(15.0, 0.0)
    assert vitals.tick(15.0, 0.05) == pytest.approx(4.95)
    assert not vitals.well(15.01, 0.0)
    for i in range(1, 21):
        vitals.tick(15.0 + i * 0.05, 0.05)
    assert vitals.well(16.01, 0.0)
    assert vitals.max_lag_s == pytest.approx(4.95)


def test_a_node_that_does_not_hear_itself_is_deaf() -> None:
    """R7. Scenario: cut off from a bus that looks connected, it would take all for dead, and move their work."""

    async def main(clock: VirtualClock) -> None:
        membership = Membership(clock, node="a")
        assert not membership.deaf  # nothing is known yet

        membership.heard(beat(A, node="a"))
        await clock.sleep(DEAF_S - 0.01)
        assert not membership.deaf
        membership.heard(beat(B, node="b"))
        await clock.sleep(0.02)

        assert membership.deaf

    run_virtual(main)
