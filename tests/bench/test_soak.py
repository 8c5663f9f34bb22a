"""The soak: what it asks follows from its seed, what is wrong with an answer is found, and a short run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.soak import memory
from bench.soak.__main__ import verdict
from bench.soak.forger import prefixes
from bench.soak.plan import TENANTS, TURNS, Answer, Sent, Traffic, document, problems, turn
from headrace.fetch import cached_model
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"


def asked(seed: int, count: int = 400) -> list[Sent]:
    traffic = Traffic(MODEL, seed, 16)
    return [traffic.next(worker) for _ in range(count // 4) for worker in range(4)]


def test_what_is_asked_follows_from_the_seed() -> None:
    """And requests of one name are the same request."""
    assert asked(1) == asked(1) and asked(1) != asked(2)

    bodies: dict[str, Any] = {}
    for sent in asked(1):
        assert bodies.setdefault(sent.request.key, sent.request.body) == sent.request.body


def test_everything_that_is_promised_is_in_the_mix() -> None:
    """Both tenants, conversations and documents, one and two choices, streamed and not, greedy and not, leavers."""
    mix = asked(1)

    assert Counter(sent.tenant for sent in mix) == dict.fromkeys(TENANTS, 200)
    assert {sent.request.key.partition("-")[0] for sent in mix} == {"talk", "document"}
    for each in (
        lambda sent: sent.request.stream, lambda sent: sent.request.choices == 2, lambda sent: sent.leaves,
        lambda sent: sent.request.body["temperature"] == 0.0,
    ):  # fmt: skip
        assert 0.05 < sum(map(each, mix)) / len(mix) < 0.95
    assert all(sent.request.stream for sent in mix if sent.leaves)
    documents = [(s.tenant, s.request.key) for s in mix if s.request.key.startswith("document")]
    assert len(set(documents)) == len(documents) and len({key for _, key in documents}) < len(documents)


def test_turns_send_again_what_was_said_and_chains_share_no_beginning() -> None:
    """Each turn's messages begin with the last one's; two chains differ in their first words."""
    for number in range(1, TURNS):
        before, now = (turn(MODEL, 3, at).body["messages"] for at in (number - 1, number))
        assert now[: len(before)] == before and len(now) == len(before) + 2
    chains = [turn(MODEL, talk, 0) for talk in range(16)] + [document(MODEL, number) for number in range(16)]
    assert len({one.body["messages"][0]["content"].split()[0] for one in chains}) == len(chains)


def answer(texts: tuple[str, ...] = ("one two",), **fields: Any) -> Answer:
    sent = Sent(turn(MODEL, 0, 0), TENANTS[0], fields.pop("leaves", False))
    return Answer(sent, texts, **fields)


REFERENCES = {"talk-0.0": ("one two",)}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (answer(), ""),
        (answer(("one",), leaves=True), ""),
        (answer(cached_tokens=16), ""),
        (answer(first=True), ""),
        (answer(("one",)), "differs"),
        (answer(("two",), leaves=True), "differs"),
        (answer(("one two", "")), "differs"),
        (answer((), error="503"), "failed"),
        (answer(first=True, cached_tokens=16), "never sent"),
    ],
)
def test_what_is_wrong_with_an_answer_is_found(given: Answer, found: str) -> None:
    """Another text, a failure, a token that the tenant had not sent."""
    named = problems([given], REFERENCES)

    assert [found in line for line in named] == ([True] if found else [])
    assert "no reference" in problems([given], {})[0] or given.error


def samples(grow_kib: float, count: int = 80, **fields: Any) -> list[memory.Sample]:
    out = []
    for at in range(count):
        size = {"kv-0": round(50_000 + grow_kib * at + 40 * (at % 3)), "edge": 20_000}
        out.append(
            memory.Sample(
                **{"t": float(at), "pss_kib": size, "rss_kib": size, "shm_nbytes": 5, "disk_nbytes": 7} | fields
            )
        )
    return out


@pytest.mark.parametrize(
    ("taken", "ok", "flat"),
    [
        (samples(0.0), True, True),
        (samples(1000.0), False, False),
        (samples(1000.0, count=20), True, None),
        (samples(0.0, disk_nbytes=11), False, True),
        (samples(0.0, count=20, disk_nbytes=11), False, None),
        (samples(0.0)[:-1] + samples(0.0, shm_nbytes=6)[-1:], False, True),
        (samples(0.0)[:-1] + samples(0.0, pss_kib={"edge": 1})[-1:], False, None),
    ],
)
def test_memory_that_grows_and_files_that_pass_their_bounds_are_found(
    taken: list[memory.Sample], ok: bool, flat: bool | None
) -> None:
    """By the slope's upper bound; too few samples are no line, and a process that came or went is no sum."""
    judged = memory.judge(taken, limit_mb=8.0, disk_limit=10, answers=100)

    assert (judged["ok"], judged["flat"]) == (ok, flat)


GOOD: dict[str, Any] = {
    "minutes": 20.0, "problems": 0, "texts_compared": 9, "crossings": 1, "hits_blocks": {"host": 1},
    "evicted_blocks": {"host": 1}, "memory": {"ok": True}, "unbalanced": [], "ledgers": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "worse",
    [
        {"problems": 1}, {"texts_compared": 0}, {"crossings": 0}, {"hits_blocks": {"host": 1, "disk": 0}},
        {"evicted_blocks": {"host": 0}}, {"memory": {"ok": False}}, {"unbalanced": ["kv-0: a block"]}, {"ledgers": 0},
    ],
)  # fmt: skip
def test_a_run_in_which_something_is_missing_is_no_good_run(worse: dict[str, Any]) -> None:
    """One reason each."""
    assert verdict(GOOD) == []
    assert len(verdict(GOOD | worse)) == 1


# In so short a time hardly anything is loaded if it is only what is dear to compute, or in the smallest tier.
FORGED = ["--forge", "--env", "HEADRACE_KV_LOAD=always", "--env", "HEADRACE_HOST_TIER_TOKENS=2560"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("forge", [False, True], ids=["honest", "forged"])
def test_a_short_soak_ends_well_and_fails_with_wrong_blocks_in_the_store(
    forge: bool, tmp_path: Path, nats_binary: str
) -> None:
    """The real model, some seconds of traffic; the second time somebody stores other bytes under the right names."""
    model = os.environ.get("HEADRACE_TEST_MODEL") or cached_model()
    if model is None:
        pytest.skip("the default model is not there")
    for seed in (1, 2, 3):  # in so short a time it is chance whether anything forged is asked for
        argv = [sys.executable, "-m", "bench.soak", "--minutes", "0.35", "--talks", "5", "--model", str(model)]
        argv += ["--seed", str(seed), "--port-base", str(free_ports(10)), "--directory", str(tmp_path)]
        argv += FORGED if forge else []
        done = subprocess.run(argv, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False)
        result = json.loads(done.stdout.splitlines()[-1])
        if not forge or result["problems"]:
            break

    assert done.returncode == (1 if forge else 0), done.stdout[-3000:] + done.stderr[-3000:]
    if forge:
        assert result["forged_blocks"] > 0 and result["problems"] > 0 and not result["failed"]
    else:
        assert result["texts_compared"] > 0 and result["crossings"] > 0 and not result["why"]
    assert not list(tmp_path.iterdir())


def test_the_forger_takes_what_went_last_behind_all_that_it_builds_on() -> None:
    """A block whose beginning is not there is never asked for."""
    gone = {b"b1": b"b0", b"b0": b"root", b"a2": b"a1", b"a0": b"root", b"a1": b"a0", b"c5": b"c4"}

    assert prefixes(gone, 9) == [b"c5", b"a0", b"a1", b"a2", b"b0", b"b1"]
    assert prefixes(gone, 3) == [b"c5", b"a0", b"a1"]
    assert prefixes({}, 3) == []
