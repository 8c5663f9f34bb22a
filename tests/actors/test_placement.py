"""Where a request runs: pure, over heartbeats and what was sent since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.placement import ALIKE, STALE_AFTER_S, Engines, Placement, Stored, least_loaded, place
from schemas.subjects import Ref

NOW = 100.0


@dataclass(frozen=True)
class Engine:
    """An engine as placement sees it."""

    ref: Ref
    load: dict[str, Any] = field(default_factory=dict)
    last_heard: float = NOW


def engine(kind: str, number: int = 0, *, heard_s_ago: float = 0.1, **load: Any) -> Engine:
    """An engine with a load."""
    return Engine(Ref(kind, str(number), "e"), load, NOW - heard_s_ago)


def choose(*engines: Engine, max_tokens: int = 100, sent: dict[Ref, int] | None = None, **options: Any) -> Any:
    """Place one request."""
    by_kind = Engines(*([e for e in engines if e.ref.kind == kind] for kind in ("prefill", "decode", "both")))
    return place(by_kind, sent or {}, NOW, **{"num_choices": 1, "max_tokens": max_tokens, **options})


def test_a_pair_of_prefill_and_decode_is_preferred() -> None:
    """The default layout uses every hop."""
    prefill, decode = engine("prefill"), engine("decode")

    assert choose(prefill, decode) == Placement(prefill.ref, decode.ref)


def test_any_survivor_runs_a_request_whole() -> None:
    """One engine is enough, whatever its role."""
    prefill, decode, both = engine("prefill"), engine("decode"), engine("both")

    assert choose(decode) == Placement(decode.ref, None)
    assert choose(prefill) == Placement(prefill.ref, None)
    assert choose(both) == Placement(both.ref, None)
    assert choose(both, decode) == Placement(both.ref, None)
    assert choose() is None


def test_a_request_of_one_token_is_never_handed_over() -> None:
    """Its first token is its last: the hand-off would be for nothing."""
    prefill, decode = engine("prefill"), engine("decode")

    assert choose(prefill, decode, max_tokens=1) == Placement(prefill.ref, None)


def test_a_short_prompt_stays_with_an_idle_decode_engine() -> None:
    """Where no stream runs that it could hold up, a hand-off is only a delay."""
    prefill, decode = engine("prefill"), engine("decode")

    assert choose(prefill, decode, prompt_tokens=99, whole_below=100) == Placement(decode.ref, None)


def test_a_prompt_is_handed_over_when_that_spares_somebody_or_its_choices_share_it() -> None:
    """Long prompts, several choices, and engines that have, may have, or get something to do."""
    prefill, idle, pair = engine("prefill"), engine("decode"), {"prompt_tokens": 99, "whole_below": 100}

    assert choose(prefill, idle, prompt_tokens=100, whole_below=100).decode == idle.ref
    assert choose(prefill, idle, **{**pair, "num_choices": 2}).decode == idle.ref
    assert choose(prefill, idle, sent={idle.ref: 64}, **pair).decode == idle.ref
    for busy in ({"running": 1}, {"waiting": 1}, {"expected": 1}, {"queued_tokens": 9}, {"heard_s_ago": 2.1}):
        decode = engine("decode", **busy)
        assert choose(prefill, decode, **pair) == Placement(prefill.ref, decode.ref)


def test_a_short_prompt_does_not_queue_for_prefill_while_a_decode_engine_has_less_to_do() -> None:
    """It starts there at once, in chunks that keep the pace of what runs."""
    prefill, decode = engine("prefill", queued_tokens=300), engine("decode", running=2)

    assert choose(prefill, decode, prompt_tokens=99, whole_below=100) == Placement(decode.ref, None)
    assert choose(prefill, decode, prompt_tokens=100, whole_below=100).decode == decode.ref
    crowded = engine("decode", running=9)
    assert choose(prefill, crowded, prompt_tokens=99, whole_below=100) == Placement(prefill.ref, crowded.ref)


def test_the_engine_with_less_work_is_chosen() -> None:
    """Running and waiting sequences, queued tokens and blocks in use all count."""
    prefill = engine("prefill")
    idle = engine("decode", 9)

    for busy in ({"running": 3}, {"waiting": 1}, {"queued_tokens": 500}, {"blocks_in_use": 50, "total_blocks": 100}):
        assert choose(prefill, engine("decode", 0, **busy), idle).decode == idle.ref


def test_what_was_sent_since_the_last_heartbeat_counts() -> None:
    """A burst between two heartbeats spreads over equal engines."""
    prefill, first, second = engine("prefill"), engine("decode", 0), engine("decode", 1)

    assert choose(prefill, first, second).decode == first.ref
    assert choose(prefill, first, second, sent={first.ref: 64}).decode == second.ref


def test_an_old_view_counts_as_busy() -> None:
    """An engine that was not heard of for two seconds is taken last, however idle it was."""
    prefill, busy = engine("prefill"), engine("decode", 0, running=50)
    old = engine("decode", 1, heard_s_ago=STALE_AFTER_S + 0.1)

    assert choose(prefill, busy, old).decode == busy.ref


def test_suspects_are_taken_only_when_nobody_else_is_left() -> None:
    """After a failover the engine that failed is avoided, and still better than nobody."""
    prefill, bad, good = engine("prefill"), engine("decode", 0), engine("decode", 1, running=9)

    assert choose(prefill, bad, good, avoid=frozenset({bad.ref})).decode == good.ref
    assert choose(bad, avoid=frozenset({bad.ref})) == Placement(bad.ref, None)
    assert choose(prefill, bad, avoid=frozenset({bad.ref})) == Placement(prefill.ref, None)


def test_an_idle_both_takes_what_a_busy_pair_would_delay() -> None:
    """The pair is as slow as its slower half."""
    prefill, decode, both = engine("prefill", queued_tokens=900), engine("decode"), engine("both")

    assert choose(prefill, decode, both) == Placement(both.ref, None)
    assert choose(engine("prefill"), decode, engine("both", running=5)).decode == decode.ref


def test_ties_are_broken_by_address() -> None:
    """The same view gives the same choice everywhere."""
    engines = [engine("decode", n) for n in (2, 0, 1)]

    assert least_loaded(engines, {}, NOW) == engines[1].ref
    assert least_loaded([], {}, NOW) is None


def test_a_stored_prefix_draws_a_prompt_until_the_queue_there_is_longer() -> None:
    """Neither the longest match nor the shortest queue decides alone."""
    holder, other = engine("decode", 0, queued_tokens=500), engine("decode", 1)
    stored = {holder.ref: Stored(900, 900, 900)}

    drawn = choose(holder, other, prompt_tokens=1000, stored=stored)
    busy = engine("decode", 0, queued_tokens=1500)
    away = choose(busy, other, prompt_tokens=1000, stored=stored)

    assert (drawn.first, drawn.reason, drawn.new_tokens) == (holder.ref, "prefix", 100)
    assert (away.first, away.reason, away.new_tokens) == (other.ref, "load", 1000)


def test_what_need_not_be_loaded_is_better_than_what_must_be() -> None:
    """Two engines of one host: one has the blocks itself, the other would get them from the store."""
    own, store = engine("decode", 1), engine("decode", 0)
    stored = {own.ref: Stored(2000, 2000, 2000), store.ref: Stored(0, 2000, 2000)}

    assert choose(store, own, prompt_tokens=2100, stored=stored).first == own.ref
    busy = engine("decode", 1, running=2)
    assert choose(store, busy, prompt_tokens=2100, stored=stored).first == store.ref


def test_an_engine_whose_store_can_fetch_a_prompt_is_taken_when_its_holder_is_busy() -> None:
    """Before one that would have to compute it all, and only if the wire is quick enough."""
    holder, near, other = engine("decode", 0, queued_tokens=800), engine("decode", 1), engine("decode", 2)
    stored = {holder.ref: Stored(900, 900, 900), near.ref: Stored(far=900, far_s=0.1)}

    quick = choose(holder, other, near, prompt_tokens=1000, stored=stored)
    idle = choose(engine("decode", 0), other, near, prompt_tokens=1000, stored=stored)
    slow = choose(other, near, prompt_tokens=1000, stored={near.ref: Stored(far=900, far_s=9.0)}, tie="x")

    assert (quick.first, quick.new_tokens) == (near.ref, 100)
    assert 0.1 < quick.estimate_s < 0.4
    assert (idle.first, slow.new_tokens) == (holder.ref, 1000)


def test_a_slow_disk_draws_nobody() -> None:
    """Reading would take longer than computing, or not."""
    holder, other = engine("decode", 0, queued_tokens=200), engine("decode", 1)
    stored = {holder.ref: Stored(0, 0, 900)}

    quick = choose(holder, other, prompt_tokens=1000, stored=stored, disk_s_per_token={holder.ref: 1e-4})
    slow = choose(holder, other, prompt_tokens=1000, stored=stored, disk_s_per_token={holder.ref: 1e-2})

    assert (quick.first, slow.first) == (holder.ref, other.ref)


def test_a_long_prompt_that_is_mostly_stored_stays_on_one_engine() -> None:
    """What counts is what has to be computed there, and whether a hand-off would be sooner."""
    prefill, decode = engine("prefill"), engine("decode", running=2)
    options = {"prompt_tokens": 4000, "whole_below": 512}

    known = choose(prefill, decode, stored={decode.ref: Stored(3900, 3900, 3900)}, **options)
    both_know = {ref: Stored(3900, 3900, 3900) for ref in (prefill.ref, decode.ref)}
    crowded = engine("decode", running=20)
    handed = choose(prefill, crowded, stored=both_know, **options)
    unknown = choose(prefill, decode, **options)

    assert known == Placement(decode.ref, None)
    assert handed == Placement(prefill.ref, crowded.ref)
    assert unknown == Placement(prefill.ref, decode.ref)


def test_equals_are_drawn_by_request_and_the_same_request_draws_the_same() -> None:
    """No engine is everybody's first choice."""
    engines = [engine("decode", n) for n in range(4)]

    drawn = [choose(*engines, tie=f"request-{n}").first for n in range(200)]
    again = [choose(*reversed(engines), tie=f"request-{n}").first for n in range(200)]

    assert drawn == again
    assert all(25 <= drawn.count(e.ref) <= 75 for e in engines)


def test_engines_that_are_about_as_fast_count_as_equal_and_others_do_not() -> None:
    """Measured costs are noisy: a tenth must not send everybody to one engine, a factor should."""
    def paced(number: int, factor: float, **load: Any) -> Engine:
        return engine("decode", number, prefill_cost=[0.01, 1e-3 * factor, 0.0], **load)

    alike = choose(paced(0, 1.0, running=1), paced(1, ALIKE - 0.1), prompt_tokens=1000)
    slower = choose(paced(0, 1.0, running=1), paced(1, 2.0), prompt_tokens=1000)

    assert alike.first.id == "1" and slower.first.id == "0"


def test_the_noise_of_a_fit_to_prompts_of_one_length_sends_nobody_to_one_engine() -> None:
    """All of the time may be the term that does not depend on length, or all that does: the prompts took the same.

    By the terms the first one's queue would take no time at all, and every prompt would join it.
    """
    fixed, sloped = [0.05, 0.0, 0.0], [0.0, 4.5e-4, 0.0]
    for costs in ((fixed, sloped), (sloped, fixed), (fixed, fixed)):
        engines = [engine("decode", n, prefill_cost=costs[n], prefill_tokens=112.0) for n in range(2)]
        loaded = [engine("decode", n, prefill_cost=costs[n], prefill_tokens=112.0, running=3 * n) for n in range(2)]
        drawn = [choose(*engines, prompt_tokens=112, tie=f"request-{n}").first.id for n in range(100)]

        assert 25 <= drawn.count("0") <= 75
        assert choose(*loaded, prompt_tokens=112).first.id == "0"
        assert choose(*loaded[::-1], prompt_tokens=112).estimate_s == pytest.approx(0.05, rel=0.3)


def test_an_engine_that_has_computed_nothing_counts_as_one_like_the_others() -> None:
    """It was started again, and its guess is ten times what they take: it would get no prompt, and learn nothing."""
    fast, guess = [0.001, 1e-4, 0.0], [0.005, 1e-3, 0.0]
    old = [engine("decode", n, prefill_cost=fast, running=1) for n in range(2)]

    fresh = choose(*old, engine("decode", 2, prefill_cost=guess, unmeasured=True), prompt_tokens=1000)
    slow = choose(*old, engine("decode", 2, prefill_cost=guess), prompt_tokens=1000)
    nobody = choose(*(engine("decode", n, prefill_cost=guess, unmeasured=True) for n in range(2)), prompt_tokens=1000)

    assert fresh.first.id == "2" and slow.first.id != "2"
    assert nobody.estimate_s > 0.9


def test_costs_that_make_no_sense_are_not_believed() -> None:
    """What another node says is data, not trust."""
    for said in ([], ["a", 1, 2], [0.0, float("nan"), 0.0], [-1.0, 1.0, 1.0], 7):
        odd = choose(engine("decode", prefill_cost=said, load_cost=said), prompt_tokens=100)

        assert odd.estimate_s == choose(engine("decode"), prompt_tokens=100).estimate_s
