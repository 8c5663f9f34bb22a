"""Where a request runs: pure, over heartbeats and what was sent since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.placement import STALE_AFTER_S, Engines, Placement, least_loaded, place
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
