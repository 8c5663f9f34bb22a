"""What an engine's actor holds per request: ids until they are acknowledged, and its hand-offs."""

from __future__ import annotations

from actors.work import ASK_END_S, RESEND_S, Work, make_parts, salt_of
from schemas.record import Fence, Record, ReplyTo, Sampling
from schemas.subjects import Ref

DETOK = Ref("detokenize", "t0", "e1")
OWNER = Ref("admission", "a", "e2")


def record(*, prompts: int = 1, n: int = 1, tenant: str = "default", salt: str = "") -> Record:
    """A request with short prompts."""
    return Record(
        request_id="r1",
        tenant=tenant,
        cache_salt=salt,
        n=n,
        sampling=Sampling(max_tokens=100),
        reply=ReplyTo(subject="_INBOX.x"),
        owner=OWNER,
        prompt_ids=[[10 + p, 11, 12] for p in range(prompts)],
    )


def work(ids: list[list[int]]) -> Work:
    """A request that this engine runs whole."""
    return Work(record(n=len(ids)), Fence(0, "a", 0), DETOK, OWNER, "local", ids)


def indices(w: Work, now: float) -> list[int]:
    """The indices of choice 0 that are sent now."""
    return [i.index for b in w.take(now) for i in b.items if i.choice == 0]


def test_only_what_is_one_sequence_without_ids_may_be_refused_for_being_late() -> None:
    """Of several choices one may have ended before another one starts."""
    alone, several = work([[]]), work([[], []])
    alone.late_at = several.late_at = 9.0

    assert alone.sequence(0, [], 1.0).late_at == 9.0
    assert alone.sequence(0, [], 1.0, num_first=1).late_at == 9.0
    assert alone.sequence(0, [5], 1.0).late_at == 0.0
    assert several.sequence(1, [], 1.0).late_at == 0.0


def test_each_id_is_sent_once_while_acknowledgements_come() -> None:
    """Taking sends what is new; nothing is repeated in time."""
    w = work([[5, 6]])
    assert indices(w, 0.0) == [0, 1]

    w.acknowledge([2], 0.1)
    w.ids[0].append(7)

    assert indices(w, 0.2) == [2]
    assert not w.rewind(0.2 + RESEND_S - 0.01)


def test_new_ids_do_not_put_off_the_repeat_of_a_lost_message() -> None:
    """Scenario: one message of a running sequence is lost; without a repeat the stream stands still until its end."""
    w = work([[]])
    now = 0.0
    for index in range(60):
        now = index * 0.02
        w.ids[0].append(index)
        if w.rewind(now):
            break
        list(w.take(now))

    assert now <= RESEND_S + 0.03
    assert indices(w, now)[0] == 0


def test_an_engine_that_resumed_sends_the_ids_it_was_given_too() -> None:
    """The detokenizer may be a new one; one that holds them compares."""
    assert indices(work([[5, 6, 7]]), 0.0) == [0, 1, 2]


def test_a_detokenizer_ahead_of_this_engine_acknowledges_what_is_here() -> None:
    """Scenario: the survivor recomputes ids that the detokenizer got from the dead engine."""
    w = work([[5, 6]])
    list(w.take(0.0))

    w.acknowledge([9], 0.1)

    assert w.acked == [2] and not w.rewind(9.0)


def test_an_unwanted_choice_is_stopped_once_and_never_sent_again() -> None:
    """-1 means that the detokenizer has decided its finish."""
    w = work([[5], [6]])
    list(w.take(0.0))

    assert w.acknowledge([-1, 0], 0.1) == [0]
    assert w.acknowledge([-1, 0], 0.2) == []

    w.ids[0].append(7)
    assert w.rewind(1.0)
    assert [i.choice for b in w.take(1.0) for i in b.items] == [1]


def test_another_detokenizer_gets_everything_from_index_zero() -> None:
    """Scenario: the detokenizer died; its text is a function of all ids. The same one again gets no repeats."""
    w = work([[5, 6, 7]])
    list(w.take(0.0))
    w.acknowledge([3], 0.1)

    w.redirect(DETOK, Fence(0, "a", 1))
    assert indices(w, 0.2) == []

    w.redirect(Ref("detokenize", "t1", "e9"), Fence(0, "a", 2))
    assert indices(w, 0.3) == [0, 1, 2]


def test_an_item_out_of_turn_is_refused() -> None:
    """The engine's next id is the next one, or something is wrong."""
    from engine.plan import Sampled
    from engine.sequence import Key

    w = work([[5]])

    assert not w.append(Sampled(Key("r1", 0), 0, 3, 9))
    assert w.append(Sampled(Key("r1", 0), 0, 1, 9))
    assert w.ids == [[5, 9]]


def test_hand_offs_are_cut_by_prompt_at_first_and_by_choice_when_resumed() -> None:
    """Choices of one prompt share its blocks; with ids of their own they no longer do. Finished ones are left out."""
    fresh = make_parts(record(prompts=2, n=2), [[], [], [], []], [])
    resumed = make_parts(record(prompts=2, n=2), [[1], [1, 2], [], [1]], [2])

    assert [p.choices for p in fresh] == [[0, 1], [2, 3]]
    assert [(p.choices, p.num_tokens) for p in resumed] == [([0], 4), ([1], 5), ([3], 4)]


def test_tenant_and_salt_do_not_run_together() -> None:
    """No pair of tenants and salts shares blocks by spelling."""
    pairs = [("ab", "c"), ("a", "bc"), ("X", ""), ("", "X"), ("a:1", ""), ("a", "1:")]

    assert len({salt_of(record(tenant=t, salt=s)) for t, s in pairs}) == len(pairs)


def test_what_is_complete_and_never_closed_asks_for_its_end() -> None:
    """Scenario: an engine is cut off while its last ids are acknowledged and closed: it would hold them until D."""
    w = work([[5, 6, 7]])
    assert indices(w, 0.0) == [0, 1, 2]
    w.acknowledge([3], 0.1)
    assert not w.rewind(0.1 + ASK_END_S)  # it may go on: no choice has ended
    w.ends[0] = "length"

    assert not w.rewind(0.05 + ASK_END_S)
    assert w.rewind(0.1 + ASK_END_S)
    assert indices(w, 0.1 + ASK_END_S) == [2]
    assert not w.rewind(0.2 + ASK_END_S)
    assert w.rewind(0.1 + 2 * ASK_END_S)


def test_transfers_of_two_owners_do_not_share_a_name() -> None:
    """R3. Scenario: two owners ask the same engine under the same term and number: one gets the other one's copy."""
    one, two = work([[1]]), work([[1]])
    one.fence, two.fence = Fence(1, "a.e1", 0), Fence(1, "b.e2", 0)
    (part,) = make_parts(one.record, [[]], [])
    assert one.job(part) != two.job(part)


def test_a_detokenizer_that_has_less_than_it_acknowledged_gets_it_again() -> None:
    """It has opened the request anew, with nothing: a choice of which it wanted no more is wanted again too."""
    w = work([[5, 6, 7, 8], [9, 9]])
    list(w.take(0.0))
    w.acknowledge([3, -1], 0.1)
    assert w.acknowledge([0, 0], 0.2) == []

    assert w.rewind(0.2 + RESEND_S)
    batches = list(w.take(0.2 + RESEND_S))
    assert [(i.choice, i.index) for b in batches for i in b.items] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    w.acknowledge([4, 2], 0.8)
    assert not w.rewind(0.8 + RESEND_S)
