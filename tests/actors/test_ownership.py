"""The owner's rules, driven by hand: each failover and each race as the messages that make it."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from actors import ownership as own
from actors.ownership import CLOSING_S, MAX_OPEN, OWNER_GRACE_S, RESEND_S, Ended, Failover, Ownership, Send, Terminal
from actors.placement import Placement
from schemas import messages as m
from schemas.errors import Cancelled, EngineFailed, HeadraceError, Overloaded, Unavailable
from schemas.record import Fence, Record, ReplyTo, Sampling
from schemas.subjects import Ref

ME = Ref("admission", "a", "e")
P0, D0, D1 = Ref("prefill", "p0", "e"), Ref("decode", "d0", "e"), Ref("decode", "d1", "e")
T0, T1 = Ref("detokenize", "t0", "e"), Ref("detokenize", "t1", "e")
FIRST = Fence(0, "a.e", 0)
DEADLINE_S = 30.0
T = TypeVar("T", bound=m.Message)


class Bench:
    """An `Ownership` with a scripted world around it; `sent` is what it said since the last look."""

    def __init__(self) -> None:
        self.now = 0.0
        self.down: set[Ref] = set()
        self.prefill: Ref | None = P0
        self.promised_s: float | None = None
        self.out: list[own.Directive] = []
        self.table = Ownership(
            ME,
            is_up=lambda ref: ref not in self.down,
            choose_engines=self._engines,
            choose_detokenizer=lambda record: next((t for t in (T0, T1) if t not in self.down), None),
            context_limit=lambda: 1000,
            survivors=lambda: not self.down.issuperset((P0, D0, D1)),
            promised_s=lambda record: self.promised_s,
        )

    def _engines(self, record: Record, suspects: frozenset[Ref]) -> Placement | None:
        live = [d for d in (D0, D1) if d not in self.down]
        decode = next((d for d in live if d not in suspects), live[0] if live else None)
        prefill = self.prefill if self.prefill not in self.down else None
        if prefill is not None:
            return Placement(prefill, decode)
        return Placement(decode, None) if decode is not None else None

    # --- the world speaks -----------------------------------------------------------------------

    def do(self, directives: list[own.Directive]) -> None:
        self.out += directives

    def admit(self, request_id: str = "r", *, term: int = 0, n: int = 1, max_tokens: int | None = 50) -> None:
        record = Record(
            request_id=request_id, n=n, reply=ReplyTo(subject="actor.edge.x.e"), owner=ME, sampling=Sampling(seed=7),
            deadline=1000.0 + DEADLINE_S,
        )  # fmt: skip
        self.do(
            self.table.admit(
                record, {"prompt": ["x"]}, term=term, max_tokens=max_tokens, remaining_s=DEADLINE_S, now=self.now
            )
        )

    def tokenized(self, ids: list[list[int]] | None = None) -> None:
        self.do(self.table.on_tokenized(m.Tokenized(**self.head(), prompt_ids=ids or [[1, 2, 3]]), self.now))

    def opened(self, detok: Ref = T0) -> None:
        self.do(self.table.on_opened(m.Opened(**self.head()), detok, self.now))

    def dispatched(self, sender: Ref, *, started: bool = False, error: HeadraceError | None = None) -> None:
        info = error.info() if error else None
        self.do(self.table.on_dispatched(m.Dispatched(**self.head(), started=started, error=info), sender, self.now))

    def ids(self, outputs: list[list[int]], *, detok: Ref = T0, known: bool = True, **fields: Any) -> None:
        fenced = m.FencedIds(**self.head(), known=known, outputs=outputs, **fields)
        self.do(self.table.on_fenced_ids(fenced, detok, self.now))

    def redirected(self, sender: Ref, *, known: bool) -> None:
        self.do(self.table.on_redirected(m.Redirected(**self.head(), known=known), sender, self.now))

    def finished(self, *, fence: Fence | None = None, detok: Ref = T0, **fields: Any) -> None:
        done = m.Finished(request_id="r", fence=fence or self.fence, finish_reasons=["stop"], **fields)
        self.do(self.table.on_finished(done, detok, self.now))

    def closed(self, sender: Ref) -> None:
        self.do(self.table.on_closed(m.Closed(**self.head()), sender, self.now))

    def exit(self, ref: Ref, reason: str = "exit") -> None:
        self.down.add(ref)
        self.do(self.table.member_down(ref, reason, self.now))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.table.tick(self.now))

    def running(self) -> None:
        """Up to a started decode on D0, with T0."""
        self.admit()
        self.tokenized()
        self.opened()
        self.dispatched(P0)
        self.dispatched(D0, started=True)
        self.out.clear()

    # --- what it said ---------------------------------------------------------------------------

    @property
    def fence(self) -> Fence:
        owned = self.table.get("r")
        return owned.fence if owned is not None else FIRST

    def head(self) -> dict[str, Any]:
        return {"request_id": "r", "fence": self.fence}

    def sent(self, kind: type[T], to: Ref | None = None) -> list[T]:
        """Messages of a kind since the last look (to one actor)."""
        return [
            d.message for d in self.out if isinstance(d, Send) and isinstance(d.message, kind) and to in (None, d.to)
        ]

    def one(self, kind: type[T], to: Ref) -> T:
        """The one message of a kind to an actor; looks once."""
        (found,) = self.sent(kind, to)
        self.out.clear()
        return found

    def all(self, kind: type[Any]) -> list[Any]:
        """Other directives since the last look."""
        return [d for d in self.out if isinstance(d, kind)]


# --- the way through --------------------------------------------------------------------------------


def test_a_request_is_driven_from_prompt_to_engines() -> None:
    """Tokenize, open, dispatch to prefill with decode named; the answer of decode says that it runs."""
    b = Bench()
    b.admit()
    assert [(d.kind, type(d.message)) for d in b.all(own.Anycast)] == [("tokenize", m.Tokenize)]
    b.out.clear()

    b.tokenized()
    assert b.sent(m.Open, T0)[0].record.prompt_ids == [[1, 2, 3]]
    dispatch = b.one(m.Dispatch, P0)
    assert (dispatch.decode, dispatch.detokenize, dispatch.outputs, dispatch.fence) == (D0, T0, [[]], FIRST)

    b.opened()
    b.dispatched(P0)
    b.dispatched(D0, started=True)
    assert b.out == []


def test_an_engine_is_told_when_a_first_token_is_late_by_the_first_try_alone() -> None:
    """In Unix seconds, from when the request was accepted. One that was with an engine is placed whatever it takes."""
    b = Bench()
    b.promised_s = 2.0
    b.now = 5.0
    b.admit()
    b.now = 6.0
    b.tokenized()
    assert b.one(m.Dispatch, P0).late_at == 1000.0 + 2.0, "its deadline is 1,030 there, and 35 here"

    b.opened()
    b.dispatched(P0, error=Unavailable("full"))
    b.after(RESEND_S)
    b.ids([[]])
    assert b.one(m.Dispatch, P0).late_at == 0.0

    other = Bench()
    other.promised_s = 2.0
    other.admit(term=1)
    other.tokenized()
    other.opened()
    other.ids([[]])
    assert other.one(m.Dispatch, P0).late_at == 0.0, "somebody may have accepted it before"


def test_only_the_very_first_dispatch_goes_out_before_the_detokenizer_answers() -> None:
    """Refused by its engine before `Opened`: what the detokenizer holds is asked for before the next one."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.out.clear()

    b.dispatched(P0, error=Unavailable("full"))
    assert b.sent(m.Open, T0) and not b.sent(m.Dispatch)
    b.after(RESEND_S)
    b.out.clear()
    b.opened()

    assert b.sent(m.FenceIds, T0) and not b.sent(m.Dispatch)
    b.out.clear()
    b.ids([[]])
    assert b.one(m.Dispatch, P0).fence == b.fence > FIRST


def test_a_lost_dispatch_is_repeated_once_the_detokenizer_has_answered() -> None:
    """`Opened` alone repeats nothing; time does."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.out.clear()

    b.opened()
    assert b.out == []
    b.after(RESEND_S)

    assert b.one(m.Dispatch, P0).fence == FIRST


def test_a_finish_closes_the_engine_and_is_counted_once() -> None:
    """`Finished` is acknowledged each time it comes; the request ends the first time."""
    b = Bench()
    b.running()

    b.finished(completion_tokens=9)
    b.finished(completion_tokens=9)

    assert len(b.sent(m.FinishedAck, T0)) == 2
    assert b.sent(m.Close, D0)[0].reason == "finish" and not b.sent(m.Close, T0)
    (ended,) = b.all(Ended)
    assert (ended.outcome, ended.failovers) == ("stop", 0)


def test_without_max_tokens_the_context_is_the_limit() -> None:
    """What is left of the window beside the longest prompt."""
    b = Bench()
    b.admit(max_tokens=None)

    b.tokenized([[1] * 10, [1] * 90])

    assert b.one(m.Open, T0).record.sampling.max_tokens == 910


def test_a_refused_prompt_is_ended_by_the_owner() -> None:
    """No detokenizer holds the request yet, so the terminal comes from here."""
    b = Bench()
    b.admit()

    error = Unavailable("no").info()
    b.do(b.table.on_tokenized(m.Tokenized(**b.head(), error=error), b.now))

    (terminal,) = b.all(Terminal)
    assert terminal.error.code == "unavailable" and len(b.all(Ended)) == 1


# --- everything is repeated until it is answered ----------------------------------------------------


def test_each_unanswered_message_is_repeated_and_an_answered_one_is_not() -> None:
    """Tokenize, Open, Dispatch and Close in turn."""
    b = Bench()
    b.admit()
    b.out.clear()
    b.after(RESEND_S)
    assert len(b.all(own.Anycast)) == 1

    b.tokenized()
    b.out.clear()
    b.after(RESEND_S)
    assert len(b.sent(m.Open, T0)) == 1 and not b.all(own.Anycast)

    b.opened()
    b.out.clear()
    b.after(RESEND_S)
    assert len(b.sent(m.Dispatch, P0)) == 1 and not b.sent(m.Open)

    b.dispatched(P0)
    b.out.clear()
    b.after(RESEND_S)
    assert b.out == []

    b.finished()
    b.out.clear()
    b.after(RESEND_S)
    assert len(b.sent(m.Close, P0)) == len(b.sent(m.Close, D0)) == 1
    b.closed(P0)
    b.closed(D0)
    assert len(b.table) == 0


def test_fence_ids_and_redirect_are_repeated_too() -> None:
    """The two questions of a failover."""
    b = Bench()
    b.running()
    b.exit(D0)
    b.out.clear()
    b.after(RESEND_S)
    assert len(b.sent(m.FenceIds, T0)) == 1

    c = Bench()
    c.running()
    c.exit(T0)
    c.opened(T1)
    c.out.clear()
    c.after(RESEND_S)
    assert len(c.sent(m.Redirect, D0)) == 1


def test_a_lost_start_of_dispatch_is_made_good_by_decodes_word() -> None:
    """Scenario: prefill's answer is lost, decode has started: the prompt is not computed once more."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.opened()
    b.dispatched(D0, started=True)
    b.out.clear()

    b.after(RESEND_S)

    assert b.out == []


def test_closing_ends_by_itself() -> None:
    """An actor that never answers cannot keep an entry for good."""
    b = Bench()
    b.running()
    b.finished()

    b.after(CLOSING_S)

    assert len(b.table) == 0


# --- an engine is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["exit", "silent", "drain"])
def test_a_lost_decode_is_replaced_from_the_ids_that_arrived(reason: str) -> None:
    """Fence raised, ids fenced at the detokenizer, dispatch elsewhere under the new fence with those ids."""
    b = Bench()
    b.running()

    b.exit(D0, reason)
    assert [(f.kind, f.reason) for f in b.all(Failover)] == [("decode", reason)]
    higher = b.one(m.FenceIds, T0).fence
    assert higher == FIRST.next()

    b.ids([[11, 12]])
    dispatch = b.one(m.Dispatch, P0)
    assert (dispatch.decode, dispatch.outputs, dispatch.fence) == (D1, [[11, 12]], higher)


def test_a_silent_engine_is_told_to_drop_what_is_below_the_fence() -> None:
    """It may be alive: `fenced` ends only lower work, so that a later dispatch there is not undone."""
    b = Bench()
    b.running()

    b.do(b.table.member_down(D0, "silent", b.now))

    close = b.sent(m.Close, D0)[0]
    assert (close.reason, close.fence) == ("fenced", FIRST.next())


def test_answers_under_a_lower_fence_change_nothing() -> None:
    """Scenario: words of the old try arrive after the fence was raised."""
    b = Bench()
    b.running()
    old = {"request_id": "r", "fence": b.fence}
    b.exit(D0)
    b.out.clear()

    b.do(b.table.on_dispatched(m.Dispatched(**old, started=True), D0, b.now))
    b.do(b.table.on_fenced_ids(m.FencedIds(**old, known=True, outputs=[[9]]), T0, b.now))
    b.do(b.table.on_redirected(m.Redirected(**old, known=False), D0, b.now))
    b.do(b.table.on_opened(m.Opened(**old), T0, b.now))
    b.do(b.table.on_stalled(m.Stalled(**old, next=[1]), lambda ref: 0.0, b.now))
    assert b.out == []

    b.do(b.table.on_engine_error(m.EngineError(**old, error=EngineFailed("x").info()), D0, b.now))
    assert [type(d.message) for d in b.all(Send)] == [m.Closed]


def test_finished_choices_are_not_run_again() -> None:
    """The detokenizer says which want no more."""
    b = Bench()
    b.admit(n=2)
    b.tokenized()
    b.opened()
    b.dispatched(P0)
    b.exit(D0)
    b.out.clear()

    b.ids([[1, 2], [3]], finished=[0])

    assert b.one(m.Dispatch, P0).finished == [0]


def test_a_prefill_that_dies_before_it_answered_is_replaced() -> None:
    """Nothing was handed over: the survivor computes the prompt itself."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.opened()
    b.out.clear()

    b.exit(P0)
    b.ids([[]])

    assert b.one(m.Dispatch, D0).decode is None


def test_a_prefill_that_dies_around_the_hand_off_is_asked_about() -> None:
    """Scenario: `started` may be on its way. Decode is asked; its yes ends the matter without a failover."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.opened()
    b.dispatched(P0)
    b.out.clear()

    b.exit(P0)
    assert b.one(m.Redirect, D0).detokenize == T0

    b.redirected(D0, known=True)
    b.after(RESEND_S)
    assert not b.all(Failover) and b.out == []


def test_a_hand_off_that_never_happened_is_run_again() -> None:
    """The same, and decode does not know the request."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.opened()
    b.dispatched(P0)
    b.exit(P0)
    b.out.clear()

    b.redirected(D0, known=False)
    assert len(b.all(Failover)) == 1

    b.ids([[]])
    assert b.sent(m.Dispatch, D1) or b.sent(m.Dispatch, D0)


def test_a_prefill_that_dies_after_the_hand_off_matters_to_nobody() -> None:
    """Decode runs it already."""
    b = Bench()
    b.running()

    b.exit(P0)

    assert b.out == []


def test_a_stalled_stream_asks_a_living_engine() -> None:
    """Scenario: the engine lives but has lost the request. One that is itself silent will be noticed anyway."""
    b = Bench()
    b.running()
    stalled = m.Stalled(**b.head(), next=[4])

    b.do(b.table.on_stalled(stalled, lambda ref: 1.1, b.now))
    assert b.out == []

    b.do(b.table.on_stalled(stalled, lambda ref: 0.1, b.now))
    assert len(b.sent(m.Redirect, D0)) == 1

    b.redirected(D0, known=False)
    assert len(b.sent(m.FenceIds, T0)) == 1


def test_an_engine_without_room_is_avoided_for_the_next_try() -> None:
    """A refusal with 503 is no error of the request: a little later, elsewhere, under a higher fence."""
    b = Bench()
    b.prefill = None
    b.admit()
    b.tokenized()
    b.opened()
    b.out.clear()

    b.dispatched(D0, error=Unavailable("draining", code="draining"))
    assert not b.sent(m.Dispatch)

    b.after(RESEND_S)
    b.ids([[]])
    assert len(b.sent(m.Dispatch, D1)) == 1
    assert b.fence == FIRST.next()


def test_a_stream_whose_engine_is_known_to_be_dead_goes_on_elsewhere() -> None:
    """Scenario: the word of its death came before the word that the request runs there; nobody speaks of it again."""
    b = Bench()
    b.running()
    b.down.add(D0)

    b.do(b.table.on_stalled(m.Stalled(**b.head(), next=[2]), lambda ref: float("inf"), b.now))
    assert [(f.kind, f.reason) for f in b.all(Failover)] == [("decode", "lost")]
    b.ids([[11, 12]])

    assert b.one(m.Dispatch, P0).decode == D1


@pytest.mark.parametrize("word", ["Migrated", "Dispatched"])
def test_a_move_to_an_engine_that_died_at_that_moment_is_made_good(word: str) -> None:
    """Scenario: the destination's death is heard before the word that the request runs there now."""
    b = Bench()
    b.running()
    b.do(b.table.move("r", D1, "balance", b.now))
    offer = b.one(m.Migrate, D0).next
    b.exit(D1)
    b.out.clear()

    if word == "Migrated":
        moved = m.Migrated(**b.head(), next=offer, outcome="moved")
        b.do(b.table.on_migrated(moved, D0, b.now))
    else:
        b.do(b.table.on_dispatched(m.Dispatched(request_id="r", fence=offer, started=True), D1, b.now))
    b.ids([[11, 12]])

    assert b.one(m.Dispatch, P0).decode == D0
    assert b.fence > offer


def test_the_streams_of_the_only_detokenizer_end_there_when_it_drains() -> None:
    """Without another one it goes on; one that comes meanwhile gets them, and the engine goes on too."""
    b = Bench()
    b.down.add(T1)
    b.running()

    b.down.add(T1)
    b.table._choose_detokenizer = lambda record: T1 if T1 not in b.down else None
    b.do(b.table.member_down(T0, "drain", b.now))
    b.after(RESEND_S)
    assert not b.sent(m.Close) and not b.all(Failover) and b.fence == FIRST

    b.down.discard(T1)
    b.after(RESEND_S)
    b.opened(T1)
    assert b.sent(m.Close, T0)[0].reason == "fenced"
    assert b.one(m.Redirect, D0).detokenize == T1


def test_without_a_survivor_it_waits() -> None:
    """And goes on when somebody appears."""
    b = Bench()
    b.running()
    b.exit(P0)
    b.exit(D1)
    b.exit(D0)
    b.ids([[5]])
    b.out.clear()
    b.after(RESEND_S)
    assert not b.sent(m.Dispatch)

    b.down.discard(D1)
    b.after(RESEND_S)

    assert b.one(m.Dispatch, D1).outputs == [[5]]


def test_a_silent_engine_keeps_its_work_if_it_speaks_before_anybody_could_take_it() -> None:
    """R7. Scenario: all engines pause for two seconds: its next item would be fenced, and all be computed again."""
    b = Bench()
    b.running()
    before = b.fence
    for ref in (P0, D1, D0):
        b.exit(ref, "silent")
    b.do(b.table.on_stalled(m.Stalled(**b.head(), next=[1]), lambda ref: 2.0, b.now))
    b.after(RESEND_S)
    assert b.fence == before and not b.sent(m.Close) and not b.all(own.Failover)

    b.down.discard(D0)
    b.after(RESEND_S)
    b.down.discard(D1)
    b.after(RESEND_S)

    assert b.fence == before and not b.sent(m.FenceIds)


def test_a_silent_engines_work_goes_to_the_first_one_that_is_there() -> None:
    """R7. Scenario: the other one comes back, the silent one does not: it is told to drop what it has."""
    b = Bench()
    b.running()
    for ref in (P0, D1, D0):
        b.exit(ref, "silent")
    b.down.discard(D1)
    b.after(RESEND_S)

    assert b.sent(m.Close, D0)[0].reason == "fenced"
    assert [f.reason for f in b.all(own.Failover)] == ["silent"]
    b.ids([[5]])
    assert b.one(m.Dispatch, D1).outputs == [[5]]


def test_a_request_whose_engines_go_one_after_another_is_placed_more_slowly() -> None:
    """R7. Scenario: each engine dies as soon as it has taken the request: four times at once, then once per second."""
    b = Bench()
    b.prefill = None
    b.admit()
    b.tokenized()
    b.opened()
    placed = []
    while b.now < 8.0:
        dispatches = [d for d in b.out if isinstance(d, Send) and isinstance(d.message, m.Dispatch)]
        asked = b.sent(m.FenceIds)
        b.out.clear()
        if dispatches:
            placed.append(b.now)
            b.dispatched(dispatches[0].to)
            b.exit(dispatches[0].to)
            b.down.clear()
        elif asked:
            b.ids([[5]])
        else:
            b.after(0.1)

    assert placed[:5] == [0.0] * 5
    assert 5 <= len(placed[5:]) <= 8 and all(b - a > 0.8 for a, b in zip(placed[4:], placed[5:], strict=False))


# --- an engine fails --------------------------------------------------------------------------------


def test_an_engines_error_is_written_by_the_detokenizer() -> None:
    """It alone writes to the client once it is open: exactly one terminal."""
    b = Bench()
    b.running()

    b.do(b.table.on_engine_error(m.EngineError(**b.head(), error=EngineFailed("nan").info()), D0, b.now))

    close = b.sent(m.Close, T0)[0]
    assert close.error is not None and close.error["code"] == "engine_failed"
    assert not b.all(Terminal) and not b.all(Ended)
    b.finished(error=close.error)
    assert [e.outcome for e in b.all(Ended)] == ["engine_failed"]


def test_an_error_survives_the_detokenizer_that_should_write_it() -> None:
    """Scenario: the detokenizer dies with the error in its hands; the owner writes it then."""
    b = Bench()
    b.running()
    b.do(b.table.on_engine_error(m.EngineError(**b.head(), error=EngineFailed("nan").info()), D0, b.now))
    b.out.clear()

    b.exit(T0)

    (terminal,) = b.all(Terminal)
    assert terminal.error.code == "engine_failed" and len(b.all(Ended)) == 1


# --- a detokenizer is lost --------------------------------------------------------------------------


def test_a_lost_detokenizer_is_replaced_and_decode_redirected() -> None:
    """Nothing is computed again: decode has all ids and repeats them from index 0, under a higher fence."""
    b = Bench()
    b.running()

    b.exit(T0)
    assert b.one(m.Open, T1).fence == FIRST.next()

    b.opened(T1)
    redirect = b.one(m.Redirect, D0)
    assert (redirect.detokenize, redirect.fence) == (T1, FIRST.next())

    b.redirected(D0, known=True)
    b.after(RESEND_S)
    assert b.out == []


def test_detokenizer_and_decode_lost_together_mean_a_new_run() -> None:
    """Scenario: the redirect finds nobody; ids are fenced at the new detokenizer, which has none."""
    b = Bench()
    b.running()
    b.exit(T0)
    b.opened(T1)
    b.out.clear()

    b.exit(D0)
    b.ids([[]], detok=T1)

    dispatch = b.one(m.Dispatch, P0)
    assert (dispatch.outputs, dispatch.detokenize, dispatch.decode) == ([[]], T1, D1)


def test_a_detokenizer_lost_during_prefill_starts_the_try_again() -> None:
    """The engines would send to the dead one: they drop the work, and get it again with another detokenizer."""
    b = Bench()
    b.admit()
    b.tokenized()
    b.opened()
    b.dispatched(P0)
    b.out.clear()

    b.exit(T0)
    assert {d.to for d in b.all(Send) if isinstance(d.message, m.Close)} == {P0, D0}
    b.opened(T1)

    assert b.sent(m.Dispatch, P0)[0].fence == FIRST.next()


def test_a_detokenizer_that_forgot_the_request_gets_it_again() -> None:
    """Scenario: it was restarted under the same address, or retired the request."""
    b = Bench()
    b.running()
    b.exit(D0)
    b.out.clear()

    b.ids([], known=False)

    assert len(b.sent(m.Open, T0)) == 1


# --- endings ----------------------------------------------------------------------------------------


def test_a_finish_sent_before_the_fence_was_raised_counts() -> None:
    """Scenario: the last item arrived, `Finished` is on its way, the engine exits. The request must not run again."""
    b = Bench()
    b.running()
    old = b.fence
    b.exit(D0)
    b.out.clear()

    b.ids([[1, 2]], ended=True)
    assert not b.sent(m.Dispatch)

    b.finished(fence=old)
    assert [e.outcome for e in b.all(Ended)] == ["stop"]


def test_a_finish_of_a_former_detokenizer_does_not_count() -> None:
    """Another one writes to the client now."""
    b = Bench()
    b.running()
    old = b.fence
    b.do(b.table.member_down(T0, "silent", b.now))
    owned = b.table.get("r")
    assert owned is not None
    owned.detok = T1
    b.out.clear()

    b.finished(fence=old, detok=T0)

    assert len(b.sent(m.FinishedAck, T0)) == 1 and not b.all(Ended)


@pytest.mark.parametrize("phase", ["tokenizing", "opening", "dispatching", "prefilling", "running"])
def test_a_cancel_closes_whoever_may_hold_something(phase: str) -> None:
    """In every phase, under a higher fence, once; a second cancel changes nothing."""
    b = Bench()
    b.admit()
    targets: set[Ref] = {T0}  # it may have been asked already
    if phase != "tokenizing":
        b.tokenized()
        targets |= {P0, D0}
    if phase in ("dispatching", "prefilling", "running"):
        b.opened()
    if phase in ("prefilling", "running"):
        b.dispatched(P0)
    if phase == "running":
        b.dispatched(D0, started=True)
    b.out.clear()

    b.do(b.table.cancel("r", "cancel", b.now))
    b.do(b.table.cancel("r", "cancel", b.now))

    closes = [d for d in b.all(Send) if isinstance(d.message, m.Close)]
    assert {d.to for d in closes} == targets and len(closes) == len(targets)
    assert all(d.message.fence == FIRST.next() for d in closes)  # type: ignore[union-attr]
    assert len(b.all(Ended)) == 1 and not b.all(Terminal)


def test_the_owner_ends_what_the_detokenizer_did_not_at_the_deadline() -> None:
    """At D + 0.3 s, from here, and everything is closed."""
    b = Bench()
    b.running()

    b.after(DEADLINE_S + OWNER_GRACE_S - 0.01)
    assert not b.all(Terminal)

    b.after(0.02)
    (terminal,) = b.all(Terminal)
    assert terminal.error.code == "deadline_exceeded" and terminal.fence > FIRST
    assert {d.to for d in b.all(Send) if isinstance(d.message, m.Close)} >= {D0, T0}
    assert len(b.all(Ended)) == 1


def test_a_dead_edge_takes_its_requests_along() -> None:
    """Nobody reads the answers; other edges' requests go on."""
    b = Bench()
    b.running()

    b.do(b.table.edge_down("actor.edge.other.e", b.now))
    assert b.out == []

    b.do(b.table.edge_down("actor.edge.x.e", b.now))
    assert len(b.all(Ended)) == 1


def test_a_confirmed_exit_answers_for_the_dead() -> None:
    """A close that a dead actor owed is no longer waited for."""
    b = Bench()
    b.running()
    b.finished()
    b.closed(P0)

    b.exit(D0)

    assert len(b.table) == 0


# --- the client asks again --------------------------------------------------------------------------


def test_a_higher_term_fences_everything_that_served_the_lower_one() -> None:
    """Scenario: the acceptance was lost, the client asks again: one try goes on, under the new term."""
    b = Bench()
    b.running()

    b.do(b.table.raise_term("r", 1, b.now))
    assert b.fence == Fence(1, "a.e", 0)
    assert {d.to for d in b.all(Send) if isinstance(d.message, m.Close)} == {P0, D0}
    b.opened()
    b.out.clear()

    b.ids([[7]])
    assert b.one(m.Dispatch, P0).outputs == [[7]]


def test_the_same_or_a_lower_term_changes_nothing() -> None:
    """A repeated submission is answered, not run twice."""
    b = Bench()
    b.running()

    b.do(b.table.raise_term("r", 0, b.now))

    assert b.out == [] and b.fence == FIRST


def test_ids_that_the_client_has_are_the_start_of_a_new_owners_first_try() -> None:
    """Scenario: the owner died; the edge submits with what it has under a higher term."""
    b = Bench()
    record = Record(request_id="r", reply=ReplyTo(subject="actor.edge.x.e"), owner=ME, deadline=1030.0)
    b.do(
        b.table.admit(record, {}, term=1, max_tokens=9, remaining_s=30.0, now=0.0, outputs=[[4, 5]])
    )  # fmt: skip
    b.tokenized()
    b.out.clear()
    b.opened()

    assert b.one(m.Dispatch, P0).outputs == [[4, 5]]


# --- bounds -----------------------------------------------------------------------------------------


def test_the_table_is_bounded() -> None:
    """Full is said, so that admission refuses with 429."""
    b = Bench()
    for number in range(MAX_OPEN):
        b.admit(f"r{number}")

    assert b.table.full and b.table.num_open == MAX_OPEN
    assert len(b.table.ids(10)) == 10


def test_ages_are_those_of_open_requests() -> None:
    """The gauge falls when the oldest ends."""
    b = Bench()
    b.admit()
    b.now = 5.0
    b.admit("later")
    assert b.table.oldest_age_s(6.0) == 6.0

    b.do(b.table.cancel("r", "cancel", 6.0))

    assert b.table.oldest_age_s(6.0) == 1.0


def test_every_tokenizer_hears_that_a_prompt_is_not_wanted_any_more() -> None:
    """Any of them may have it in its queue; once its ids are there none is told, and nobody has to answer."""
    for tokenized in (False, True):
        b = Bench()
        b.admit()
        if tokenized:
            b.tokenized()
        b.out.clear()
        b.do(b.table.cancel("r", "cancel", b.now))
        told = [d for d in b.out if isinstance(d, own.Broadcast)]
        assert [(d.kind, type(d.message)) for d in told] == ([] if tokenized else [("tokenize", m.Close)])
        assert all(isinstance(d.message, m.Close) and d.message.reply is None for d in told)


# --- early refusal ----------------------------------------------------------------------------------


def test_a_refusal_comes_before_anything_is_dispatched() -> None:
    """The owner writes the terminal itself; no engine and no detokenizer hears of it."""
    bench = Bench()
    bench.table._refuse = lambda record, placement, remaining_s: Overloaded("full", retry_after_s=2.0)
    bench.admit()
    bench.tokenized()

    terminal = next(d for d in bench.out if isinstance(d, Terminal))
    assert terminal.error.code == "rate_limit_exceeded" and terminal.error.retry_after_s == 2.0
    assert not bench.sent(m.Dispatch) and not bench.sent(m.Open)
    assert next(d for d in bench.out if isinstance(d, Ended)).outcome == "rate_limit_exceeded"


def test_a_stream_that_was_opened_before_its_refusal_is_closed() -> None:
    """Scenario: there was no engine at first, and the stream was opened meanwhile: it would stay until its deadline."""
    b = Bench()
    b.down |= {P0, D0, D1}
    b.admit()
    b.tokenized()
    assert len(b.sent(m.Open, T0)) == 1
    b.out.clear()
    b.table._refuse = lambda record, placement, remaining_s: Overloaded("full")
    b.down.clear()

    b.after(RESEND_S)

    assert len(b.all(Terminal)) == 1
    assert b.sent(m.Close, T0)[0].fence >= b.all(Terminal)[0].fence
    b.closed(T0)
    assert len(b.table) == 0


def test_what_was_begun_is_never_refused() -> None:
    """After a failure, or with what another owner's try has brought, the work goes on however long the queues are."""
    bench = Bench()
    bench.running()
    bench.table._refuse = lambda record, placement, remaining_s: Overloaded("full")
    bench.exit(D0)
    bench.ids([[7, 8]])

    assert bench.sent(m.Dispatch)
    assert not any(isinstance(d, Terminal) for d in bench.out)

    later = Bench()
    later.table._refuse = lambda record, placement, remaining_s: Overloaded("full")
    later.admit(term=1)
    later.tokenized()
    later.opened()
    assert later.sent(m.Dispatch)


def test_a_detokenizer_that_lets_go_of_the_former_owners_stream_ends_nothing() -> None:
    """R3. Scenario: the client has fenced a dead owner's stream; the same detokenizer is chosen for the next try."""
    b = Bench()
    b.admit(term=1)
    b.tokenized()
    b.out.clear()
    superseded = Cancelled("another owner serves this request", code="superseded").info()
    b.finished(fence=Fence(0, "dead.e", 0), error=superseded)

    assert [type(d.message) for d in b.all(Send)] == [m.FinishedAck] and not b.all(Ended)
    b.opened()
    assert b.table.num_open == 1

    b.finished(fence=Fence(0, "dead.e", 0))
    assert b.all(Ended), "an answer that is complete is the end whoever asked for it"


def test_who_is_superseded_closes_nothing_for_good() -> None:
    """R3. Scenario: another owner has the request; a holder that reports to the former one is not to drop it."""
    b = Bench()
    b.running()
    b.finished(fence=Fence(5, "z.e", 0), error=Cancelled("another owner", code="superseded").info())

    assert {d.message.reason for d in b.all(Send) if isinstance(d.message, m.Close)} == {"superseded"}
    owned = b.table.get("r")
    assert owned is not None
    assert [d.message.reason for d in b.table.close_elsewhere(owned, T1)] == ["fenced"]
