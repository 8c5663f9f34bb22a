"""Whole instances whose engines sample for real: seeds, neighbours, penalties, rows that go wrong, bad parameters.

The model is made up: normal logits that depend on every id of the context, so that a text that strays once never finds
back. Each text is compared with an oracle that samples the same request alone, without an engine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from virtual_fleet import Fleet, Stream, fleet

from engine.plan import BatchPlan, Row, Sampled
from engine.sampling import choose_ids
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key
from kernels import native as compiled
from kernels.sampling import native, reference
from runtime.virtual_clock import VirtualClock, run_virtual
from schemas.openai import parse_request
from schemas.record import Sampling

EOS = 2
VOCAB = 127
POISON = "no number comes of this"
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 41}
PROMPT = "the water that turns the wheel comes down the headrace "


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Here the engines and all executors run on the loop by design; real time does not pass."""
    yield


def logits_of(context: list[int]) -> npt.NDArray[np.float32]:
    """Logits `[VOCAB]` after these ids: printable characters, and rarely the end."""
    if POISON.encode() in bytes(context):
        return np.full(VOCAB, np.nan, np.float32)
    digest = hashlib.blake2b(bytes(context), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(VOCAB).astype(np.float32)
    logits[:33] = -np.inf
    logits[EOS] = -3.0
    return logits


class SamplingRunner(ScriptedRunner):
    """Checks blocks as its parent does; ids come from the sampling op over all rows of a step at once."""

    def __init__(self) -> None:
        super().__init__(lambda *_: 0, vocab_size=VOCAB, eos_ids=frozenset({EOS}))
        self._sample = native.sample if compiled.available() else reference.sample

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        checked = super().execute(plan)
        if any(s.error for s in checked):
            return checked
        rows = [row for row in plan.rows if row.sample]
        if not rows:
            return []
        logits = np.stack([logits_of(row.context[: row.prompt_len + row.index]) for row in rows])
        return choose_ids(rows, logits, self.eos_ids, self._sample)


def oracle(prompt: str, count: int, *, choice: int = 0, **fields: Any) -> str:
    """The text of a request that is alone in the world."""
    body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, **fields}
    sampling: Sampling = parse_request("completion", body).sampling
    ids, outputs = list(prompt.encode()), list[int]()
    while len(outputs) < count:
        row = Row(Key("o", choice), [], 0, len(ids), [], True, len(outputs), (choice,), sampling, ids + outputs)
        (got,) = choose_ids([row], logits_of(ids + outputs)[None], {EOS}, reference.sample)
        assert got.error is None
        outputs.append(got.id)
        if got.id == EOS and not sampling.ignore_eos:
            break
    return bytes(i for i in outputs if i != EOS).decode()


def simulate(scenario: Any, directory: Path, *, seed: int = 0, **layout: int) -> Any:
    """Run `scenario(fleet)` on a fresh instance of sampling engines."""

    async def main(clock: VirtualClock) -> Any:
        async with fleet(clock, directory, make_runner=SamplingRunner, **layout) as f:
            return await scenario(f)

    return run_virtual(main, seed=seed)


async def finished(f: Fleet, *streams: Stream) -> list[str]:
    """Wait for all of them; their texts, choice by choice."""
    for stream in streams:
        await f.end(stream)
        assert stream.error is None
    return ["".join(text) for stream in streams for text in stream.texts]


@pytest.mark.slow
def test_a_seeded_text_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Alone, beside an unseeded one, beside eight other seeds, admitted in mid-decode, on a warm prefix."""

    async def scenario(f: Fleet) -> None:
        wanted = oracle(PROMPT, 32, **SEEDED)

        alone = await f.ask(PROMPT, max_tokens=32, **SEEDED)
        assert await finished(f, alone) == [wanted]

        unseeded = [await f.ask(PROMPT, max_tokens=32, temperature=0.8) for _ in range(2)]
        beside = await f.ask(PROMPT, max_tokens=32, **SEEDED)
        texts = await finished(f, beside, *unseeded)
        assert texts[0] == wanted and len(set(texts)) == 3  # without a seed each request has another

        others = [await f.ask(PROMPT, max_tokens=32, temperature=0.8, seed=i) for i in range(8)]
        among = await f.ask(PROMPT, max_tokens=32, **SEEDED)
        texts = await finished(f, among, *others)
        assert texts == [wanted, *(oracle(PROMPT, 32, temperature=0.8, seed=i) for i in range(8))]

        first = await f.ask(PROMPT + "elsewhere", max_tokens=64, temperature=0.8)
        await f.items(first, 10)
        late = await f.ask(PROMPT, max_tokens=32, **SEEDED)
        assert (await finished(f, late, first))[0] == wanted

        warm = await f.ask(PROMPT, max_tokens=32, **SEEDED)
        assert await finished(f, warm) == [wanted]
        assert warm.terminal is not None and warm.terminal["usage"]["cached_tokens"] > 0
        await f.rest()

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_choices_of_one_seed_differ_and_repeat(tmp_path: Path) -> None:
    """`n` 3 with one seed: three texts, the same three each time."""

    async def scenario(f: Fleet) -> None:
        wanted = [oracle(PROMPT, 24, choice=c, **SEEDED) for c in range(3)]
        for _ in range(2):
            stream = await f.ask(PROMPT, max_tokens=24, n=3, **SEEDED)
            assert await finished(f, stream) == wanted
        assert len(set(wanted)) == 3

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_each_of_many_requests_gets_its_own_answer(tmp_path: Path) -> None:
    """64 greedy requests at once, each forced to symbols of its own, mixed lengths, a third of them cancelled."""

    async def scenario(f: Fleet) -> None:
        chance = random.Random(3)
        asked = []
        for number in range(64):
            own = [33 + number, 97 + number % 26]  # the first of them belongs to this request alone
            fields = {"allowed_token_ids": own, "stream": bool(number % 2), "ignore_eos": True}
            prompt, count = f"{PROMPT * (1 + number % 3)}repeat {number}:", 8 + number % 25
            asked.append((await f.ask(prompt, max_tokens=count, **fields), prompt, count, fields))
        for stream, *_ in chance.sample(asked, 21):
            await f.system.clock.sleep(chance.uniform(0.0, 0.05))
            f.cancel(stream)
        survivors = [each for each in asked if each[0].error != "left"]
        assert len(survivors) == 43
        for stream, prompt, count, fields in survivors:
            await f.end(stream)
            assert stream.error is None
            assert stream.text == oracle(prompt, count, **fields)
        for stream, _, _, fields in asked:
            assert set(stream.ids[0]) <= set(fields["allowed_token_ids"])  # also what was cancelled later
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 2, "temperature": 0.7, "seed": 1},
    {"frequency_penalty": 1.5, "temperature": 0.0},
    {"repetition_penalty": 1.3, "temperature": 1.0, "seed": 2, "top_p": 0.8},
    {"logit_bias": {"65": 5, "66": -100}, "temperature": 0.9, "seed": 3, "min_p": 0.05},
    {"allowed_token_ids": [2, 48, 49], "temperature": 1.0, "seed": 4, "min_tokens": 30, "top_k": 2},
]


@pytest.mark.slow
def test_penalized_texts_are_the_same_when_their_engine_is_killed(tmp_path: Path) -> None:
    """Each parameter is honoured, alone in its request and in one batch; after a failover the replay draws the same."""

    async def scenario(f: Fleet) -> None:
        streams = [await f.ask(PROMPT, max_tokens=40, **fields) for fields in PENALTIES]
        await f.items(streams[0], 12)
        await f.kill(f.serving("decode", streams[0]))
        texts = await finished(f, *streams)
        plain = [oracle(PROMPT, 40, **{k: v for k, v in p.items() if k in ("temperature", "seed")}) for p in PENALTIES]
        for text, fields, without in zip(texts, PENALTIES, plain, strict=True):
            assert text == oracle(PROMPT, 40, **fields) != without
        assert len(texts[-1]) >= 30
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_logits_that_are_no_numbers_fail_one_request(tmp_path: Path) -> None:
    """It ends with a typed error; texts of the same batch are what they are without it."""

    async def scenario(f: Fleet) -> None:
        before = [await f.ask(PROMPT, max_tokens=32, temperature=0.8, seed=i) for i in range(2)]
        poisoned = await f.ask(f"{PROMPT}: {POISON}", max_tokens=32, **SEEDED)
        after = await f.ask(PROMPT, max_tokens=32, **SEEDED)

        texts = await finished(f, *before, after)
        await f.end(poisoned)

        assert poisoned.error == "logits_not_numbers"
        assert poisoned.num_items == 0
        wanted = [oracle(PROMPT, 32, temperature=0.8, seed=i) for i in range(2)]
        assert texts == [*wanted, oracle(PROMPT, 32, **SEEDED)]
        await f.rest(limit_s=5.0)

    simulate(scenario, tmp_path)


BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", 1.5), ("temperature", -1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1),
    ("top_k", 0), ("min_p", 2), ("n", 0), ("n", 10_000), ("top_logprobs", 21), ("seed", 2**63), ("stop", list("abcde")),
    ("stop", ""), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 1}), ("logit_bias", {"49152": 1}),
    ("allowed_token_ids", []), ("allowed_token_ids", [33, 49_152]), ("allowed_token_ids", [33] * 5000),
    ("min_tokens", 9), ("min_tokens", -1),
]  # fmt: skip


@pytest.mark.slow
def test_parameters_out_of_range_never_reach_an_engine(tmp_path: Path) -> None:
    """Each twice, over the bus: one terminal that names the field, and no engine takes a step; then all is well."""

    async def scenario(f: Fleet) -> None:
        for name, value in BAD:
            seen = []
            for _ in range(2):
                stream = await f.ask(PROMPT, **{"max_tokens": 8, name: value})
                await f.end(stream)
                assert stream.terminal is not None
                seen.append(stream.terminal["error"])
            assert seen[0] == seen[1], name
            assert (seen[0]["kind"], seen[0]["param"]) == ("BadRequest", name)
        assert [a.stepped.steps for a in f.engines()] == [0] * len(f.engines())

        good = await f.ask(PROMPT, max_tokens=8, **SEEDED)
        assert await finished(f, good) == [oracle(PROMPT, 8, **SEEDED)]

    simulate(scenario, tmp_path)


@pytest.mark.slow
def test_min_tokens_must_fit_what_the_prompt_leaves(tmp_path: Path) -> None:
    """Without `max_tokens` the context is the limit, which the tokenizer knows."""

    async def scenario(f: Fleet) -> None:
        stream = await f.ask(PROMPT, max_tokens=None, min_tokens=9000)  # type: ignore[arg-type]
        await f.end(stream)
        assert stream.terminal is not None
        assert stream.terminal["error"]["param"] == "min_tokens"

    simulate(scenario, tmp_path)
