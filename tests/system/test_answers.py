"""What the whole system answers, over HTTP and over NATS, streamed and not, split and joined."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.system.cases import BROKEN, COUNTING, UNICODE, Alive, assert_drained
from tests.system.launch import System

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["split", "joined"])
def system(request: pytest.FixtureRequest) -> System:
    """Both layouts: what a client sees must not tell them apart."""
    found: System = request.getfixturevalue(request.param)
    return found


def same(system: System, text: str, **options: object) -> str:
    """SAME: assert that streamed and whole answers agree in text, reason and usage; returns the text."""
    response = system.chat(text, **options)
    assert response.status_code == 200, response.text
    whole, streamed = response.json(), system.stream(text, **options)
    choice = whole["choices"][0]
    assert streamed.text == choice["message"]["content"]
    assert streamed.reason == choice["finish_reason"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [streamed.usage[k] for k in counts] == [whole["usage"][k] for k in counts]
    assert streamed.events.count("[DONE]") == 1 and streamed.events[-1] == "[DONE]"
    return str(choice["message"]["content"])


def test_a_stream_equals_the_whole_answer(system: System) -> None:
    """Greedy and seeded, of any length."""
    for options in ({}, {"temperature": 0.9, "seed": 7}, {"max_tokens": 1}, {"max_tokens": 90}):
        assert same(system, "Tell me something.", **options)


def test_both_layouts_say_the_same(split: System, joined: System) -> None:
    """Whether prefill and decode share an engine does not show."""
    options = {"temperature": 0.9, "seed": 11, "max_tokens": 40}

    texts = {s.chat("Anything.", **options).json()["choices"][0]["message"]["content"] for s in (split, joined)}

    assert len(texts) == 1


@pytest.mark.parametrize(
    ("stop", "said", "reason"),
    [
        (["wo th"], "one t", "stop"),
        (["four"], "one two three ", "stop"),
        (["o t"], "one tw", "stop"),
        (["two", "two three"], "one ", "stop"),
        (["thr", "four", "e t", "zzz"], "on", "stop"),
        (["five"], COUNTING, "stop"),
    ],
)
def test_a_stop_string_ends_the_text_before_its_first_character(
    system: System, stop: list[str], said: str, reason: str
) -> None:
    """Wherever token borders lie, and in no delta is any part of it."""
    assert same(system, "CASE-COUNT", stop=stop) == said
    streamed = system.stream("CASE-COUNT", stop=stop)
    assert streamed.reason == reason
    assert "".join(streamed.deltas) == said


def test_a_stop_string_on_the_last_allowed_token_wins_over_the_limit(system: System) -> None:
    """The text is complete, and the reason says why."""
    limit = len("one two")

    response = system.chat("CASE-COUNT", stop=["two"], max_tokens=limit).json()

    assert response["choices"][0]["message"]["content"] == "one "
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == limit


def test_decoding_stops_within_a_step_of_the_match(system: System) -> None:
    """Tokens generated beyond the stop string are few: the engine hears of the match at once."""

    def generated() -> int:
        rows = [row for row in system.rows() if row["kind"] in ("decode", "both")]
        return sum(int(row["load"]["steps"]) for row in rows)

    assert_drained(system)
    before = generated()
    system.chat("Long.", stop=[system.stream("Long.", max_tokens=12).text[6:12]], max_tokens=400)
    assert_drained(system)

    assert generated() - before <= 12 + 12 + 8


def test_characters_split_over_tokens_arrive_whole(system: System) -> None:
    """No replacement character shows that is not in the text, however the bytes are cut into tokens."""
    streamed = system.stream("CASE-UNICODE", max_tokens=200)

    assert same(system, "CASE-UNICODE", max_tokens=200) == UNICODE
    assert not any("\ufffd" in delta for delta in streamed.deltas)
    assert streamed.usage["completion_tokens"] == len(UNICODE.encode()) + 1  # and the end of the text


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 9, 10, 14])
def test_a_character_cut_by_the_limit_is_the_same_streamed_and_not(split: System, limit: int) -> None:
    """What is pending at the end appears once or never, the same way in both."""
    text = same(split, "CASE-UNICODE", max_tokens=limit)

    assert text.rstrip("\ufffd") == UNICODE.encode()[:limit].decode(errors="ignore")


def test_bytes_that_are_no_text_are_replaced_and_never_an_error(split: System) -> None:
    """Lone and cut-off bytes in the middle and at the end."""
    text = same(split, "CASE-BROKEN", max_tokens=100)

    assert text.rstrip("\ufffd") == BROKEN.decode(errors="replace").rstrip("\ufffd")


def test_choices_differ_and_are_told_apart(split: System) -> None:
    """Several choices of one request, seeded: three texts, each with its finish."""
    response = split.chat("Choose.", n=3, temperature=1.0, seed=5, max_tokens=20).json()

    assert [c["index"] for c in response["choices"]] == [0, 1, 2]
    assert len({c["message"]["content"] for c in response["choices"]}) == 3
    assert response["usage"]["completion_tokens"] == 60


def test_the_native_example_prints_an_answer(split: System) -> None:
    """nats-py alone, JSON in and out, found by the state file."""
    options = ["--instance", split.name, "--model", split.model, "--max-tokens", "60"]
    argv = [sys.executable, "examples/nats_client.py", *options, "CASE-COUNT"]

    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == COUNTING
    assert json.loads(lines[-1])["ok"] is True


def test_ps_shows_every_actor(split: System) -> None:
    """One row per actor with its process, as JSON for programs."""
    rows = split.ps()

    kinds = {row["kind"] for row in rows}
    assert kinds == {"edge", "admission", "tokenize", "detokenize", "prefill", "decode", "transfer", "kv"}
    assert len({row["pid"] for row in rows}) == len(rows)
    assert all({"kind", "id", "pid", "epoch", "running", "waiting", "load"} <= set(row) for row in rows)


def test_an_empty_prompt_or_an_unknown_model_harms_nobody(split: System) -> None:
    """Refused with the envelope; neighbours and processes do not notice."""
    alive = Alive(split)
    for path, body, status in (
        ("/v1/completions", {"prompt": ["a", ""]}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "model": "nope"}, 404),
    ):
        for stream in (False, True):
            response = httpx.post(split.url + path, json={"model": split.model, "stream": stream, **body}, timeout=10)
            assert response.status_code == status, response.text
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    alive.check()


def test_a_lone_surrogate_is_refused_or_replaced_and_a_pair_is_its_character(split: System) -> None:
    """Half a pair is legal JSON and no text; it never becomes a server error."""
    head = b'{"model":"' + split.model.encode() + b'","max_tokens":2,"messages":[{"role":"user","content":"hi '
    for escape, good in ((rb"\ud83d\ude00", True), (rb"\ud83d", False), (rb"\ude00", False), (rb"\ude00\ud83d", False)):
        url = split.url + "/v1/chat/completions"
        headers = {"content-type": "application/json"}
        response = httpx.post(url, content=head + escape + b'"}]}', headers=headers, timeout=10)
        assert response.status_code in ((200,) if good else (200, 400)), response.text


def test_a_body_over_the_limit_of_the_bus_is_refused_by_name_and_disturbs_nobody(split: System) -> None:
    """With ten small requests beside it: 413 or 400 with the numbers, at once; the others are answered."""
    import concurrent.futures

    alive = Alive(split)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        small = [pool.submit(split.chat, f"small {i}", max_tokens=60) for i in range(10)]
        big = [pool.submit(split.chat, "x" * size) for size in (1_040_000, 1_048_576, 2_000_000)]
        refused = [f.result() for f in big]
        served = [f.result() for f in small]

    assert all(r.status_code in (400, 413) for r in refused), [r.text[:200] for r in refused]
    assert all(any(c.isdigit() for c in r.json()["error"]["message"]) for r in refused)
    assert [r.status_code for r in served] == [200] * 10
    alive.check()


def test_the_edges_of_the_context_are_exact(split: System) -> None:
    """A prompt of the whole context is refused with both numbers; one token less gets one token."""
    limit = 8192
    empty = split.chat("", max_tokens=1)
    base = empty.json()["usage"]["prompt_tokens"] if empty.status_code == 200 else None
    if base is None:
        base = split.chat("x", max_tokens=1).json()["usage"]["prompt_tokens"] - 1

    fits = split.chat("x" * (limit - 1 - base), max_tokens=1)
    whole = split.chat("x" * (limit - base), max_tokens=1)
    beyond = split.chat("x" * (limit + 1 - base), max_tokens=1)

    assert fits.status_code == 200, fits.text
    assert fits.json()["usage"]["prompt_tokens"] == limit - 1
    for response, count in ((whole, limit), (beyond, limit + 1)):
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"] and str(count) in error["message"]
    assert_drained(split)
