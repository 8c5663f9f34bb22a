"""Who holds whose records, by hand: a backup before `accepted`, another when it is lost, a release at the end."""

from __future__ import annotations

from actors.heirs import heir, ranked
from actors.keeping import (
    BACKUP_GRACE_S,
    KEEP_AGAIN_S,
    KEEP_WAIT_S,
    MAX_HELD,
    MAX_HELD_NBYTES,
    RELEASE_RESEND_S,
    Keeping,
)
from schemas import messages as m
from schemas.record import Fence, Record, ReplyTo
from schemas.subjects import Ref

ME, A, B, C = (Ref("admission", name, "e") for name in ("me", "a", "b", "c"))
EDGE = Ref("edge", "0", "e")


def record(request_id: str = "r", owner: Ref = ME, backup: Ref | None = None) -> Record:
    return Record(request_id=request_id, owner=owner, backup=backup, reply=ReplyTo(subject=EDGE.subject))


def kept(request_id: str = "r") -> m.Kept:
    return m.Kept(request_id=request_id, fence=Fence(0, "me.e", 0))


def keep(request_id: str = "r", term: int = 0) -> m.Keep:
    return m.Keep(request_id=request_id, fence=Fence(term, "a.e", 0), record=record(request_id, A))


def test_a_request_waits_for_its_backup_and_no_longer() -> None:
    """The answer ends the wait, once."""
    keeping = Keeping(ME)

    to = keeping.begin("r", [ME, A, B], 0.0)

    assert to in (A, B) and keeping.waits("r")
    assert keeping.on_kept(kept(), to, 0.0)
    assert not keeping.waits("r")
    assert not keeping.on_kept(kept(), to, 0.0)


def test_a_backup_that_does_not_answer_is_replaced_and_then_done_without() -> None:
    """Two tries; then the request is accepted all the same."""
    keeping = Keeping(ME)
    first = keeping.begin("r", [A, B, C], 0.0)

    second = keeping.tick([A, B, C], KEEP_WAIT_S)
    third = keeping.tick([A, B, C], 2 * KEEP_WAIT_S)

    assert [r for r, _ in second.keep] == ["r"] and second.keep[0][1] != first and not second.accept
    assert third.accept == ["r"]
    assert keeping.without == 1
    assert not keeping.on_kept(kept(), third.keep[0][1], 0.3)  # held from now on; accepted it is already


def test_a_request_is_accepted_before_its_edge_asks_another_actor() -> None:
    """Scenario: backups lag; an edge that waits 0.3 s asks one, which has the record by then and takes it over."""
    for phase in range(50):
        keeping = Keeping(ME)
        keeping.begin("r", [A, B, C], 0.0)
        ticks = [(phase / 1000) + 0.05 * n for n in range(8)]

        accepted = [at for at in ticks if keeping.tick([A, B, C], at).accept]

        assert len(accepted) == 1 and accepted[0] <= 0.2, f"the first tick came after {phase} ms"


def test_nobody_to_hold_a_record_is_nothing_to_wait_for() -> None:
    """Alone, a request is accepted at once; somebody who comes later gets the record."""
    keeping = Keeping(ME)

    assert keeping.begin("r", [ME], 0.0) is None
    assert not keeping.waits("r")
    assert keeping.tick([ME, A], KEEP_AGAIN_S).keep == [("r", A)]


def test_a_lost_backup_is_replaced_and_what_it_may_hold_is_released() -> None:
    """It may only have been silent: what it holds would end the request once more after its deadline."""
    keeping = Keeping(ME)
    first = keeping.begin("r", [A, B], 0.0)
    assert first is not None
    keeping.on_kept(kept(), first, 0.0)

    keeping.member_down(first, "silent", 1.0)
    due = keeping.tick([r for r in (A, B) if r != first], 1.0)

    assert [to for _, to in due.keep] == [B if first == A else A]
    assert due.release == [(first, ["r"])]


def test_a_release_is_repeated_until_it_is_answered() -> None:
    """Not by somebody else's answer."""
    keeping = Keeping(ME)
    to = keeping.begin("r", [A], 0.0)
    assert to == A
    keeping.on_kept(kept(), A, 0.0)

    keeping.ended("r", 1.0)

    assert keeping.tick([A], 1.0).release == [(A, ["r"])]
    keeping.on_released(m.Released(request_ids=["r"]), B)
    assert keeping.tick([A], 1.0 + RELEASE_RESEND_S).release == [(A, ["r"])]
    keeping.on_released(m.Released(request_ids=["r"]), A)
    assert keeping.tick([A], 2.0 + RELEASE_RESEND_S).release == []


def test_a_record_waits_half_a_second_past_its_deadline() -> None:
    """R4: then its backup ends the request, unless it has heard that it has ended."""
    keeping = Keeping(ME)
    keeping.on_keep(keep("late"), A, 10.0)
    keeping.on_keep(keep("ended"), A, 10.0)
    keeping.held["ended"].finished = m.Finished(request_id="ended", fence=Fence(0, "a.e", 0))

    assert keeping.tick([A], 10.0 + BACKUP_GRACE_S - 0.01).expired == []
    assert [h.keep.request_id for h in keeping.tick([A], 10.0 + BACKUP_GRACE_S).expired] == ["late"]
    assert not keeping.held


def test_records_are_bounded_and_never_replaced_by_older_ones() -> None:
    """Full: not answered, so that the owner asks another."""
    keeping = Keeping(ME)
    for number in range(MAX_HELD):
        assert keeping.on_keep(keep(f"r{number}", term=1), A, 10.0)

    assert not keeping.on_keep(keep("more"), A, 10.0)
    assert not keeping.on_keep(keep("r0", term=0), A, 10.0)
    assert keeping.on_keep(keep("r0", term=2), A, 10.0)
    assert (len(keeping), keeping.refused) == (MAX_HELD, 1)


def test_the_texts_of_records_are_bounded_too() -> None:
    """What was let go makes room."""
    keeping = Keeping(ME)
    text = "x" * (MAX_HELD_NBYTES // 2)
    large = [keep(f"r{n}").model_copy(update={"body": {"messages": [{"content": text}]}}) for n in range(2)]

    assert keeping.on_keep(large[0], A, 10.0)
    assert not keeping.on_keep(large[1], A, 10.0)
    keeping.on_release(m.Release(request_ids=["r0"]), A)
    assert keeping.on_keep(large[1], A, 10.0)


def test_a_former_owner_releases_nothing_that_the_present_one_has_kept() -> None:
    """It was told that another one serves the request, which may be held by the same backup by then."""
    keeping = Keeping(ME)
    assert keeping.on_keep(keep("r", term=0), A, 10.0) and keeping.on_keep(keep("r", term=1), B, 10.0)
    keeping.on_release(m.Release(request_ids=["r"]), A)
    assert "r" in keeping.held
    keeping.on_release(m.Release(request_ids=["r"]), B)
    assert "r" not in keeping.held


def test_a_death_moves_only_what_the_dead_one_had() -> None:
    """Rendezvous: the order of the others stays."""
    for number in range(50):
        order = ranked(f"r{number}", [A, B, C])
        assert ranked(f"r{number}", [r for r in (C, B, A) if r != order[0]]) == order[1:]
    assert len({ranked(f"r{number}", [A, B, C])[0] for number in range(50)}) == 3


def test_the_heir_is_the_backup_and_then_whoever_is_there() -> None:
    """Two tries each; never the owner that is gone."""
    mine = record(owner=A, backup=B)

    asked = [heir(mine, A, [A, B, C], attempt) for attempt in range(6)]

    assert asked == [B, B, C, C, B, B]
    assert heir(mine, A, [A, C], 0) == C
    assert heir(mine, A, [A], 0) is None
