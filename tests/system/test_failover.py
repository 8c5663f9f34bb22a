"""Processes die and freeze under running streams; clients notice nothing but time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from chaos import invariants
from chaos.history import Recorder
from chaos.run import Runner
from chaos.scenarios import GROUPS, SCENARIOS
from chaos.watch import Watch
from tests.system.cases import assert_drained
from tests.system.launch import System, wait_until

pytestmark = pytest.mark.slow

TOKENS = 120  # at the script's pace of 10 ms


@pytest.mark.parametrize("name", GROUPS["failover"])
def test_streams_survive_with_the_same_text(split: System, name: str) -> None:
    """One fault that counts, four streams: nothing lost, nothing twice, every text as undisturbed."""

    async def run() -> None:
        recorder = Recorder(time.monotonic)
        nats = await split.address.connect("test-failover")
        try:
            async with split.address.client() as http:
                watch = Watch(time.monotonic, recorder)
                await watch.start(nats)
                await watch.until(
                    lambda w: len(w.ready("decode")) >= 2 and len(w.ready("detokenize")) >= 2 and w.ready("prefill"),
                    timeout_s=30.0, what="the whole system heard",
                )  # fmt: skip
                await asyncio.sleep(0.5)
                lines: list[str] = []
                runner = Runner(
                    recorder, watch, http, nats, split.model, seed=11, say=lines.append, tokens=TOKENS, deadline_s=40.0
                )
                await runner.prepare()
                outcomes = await runner.rounds(SCENARIOS[name], 1)
                await runner.whole()
        finally:
            await nats.close()
        assert outcomes[-1].effective, lines
        assert [str(v) for o in outcomes for v in o.violations] == [], lines
        assert [o.failed for o in outcomes] == [0] * len(outcomes), lines
        assert sum(o.compared for o in outcomes) >= 4

    asyncio.run(run())


def test_a_frozen_process_is_replaced_and_its_late_words_change_nothing(split: System) -> None:
    """After a freeze the system is whole again and idle: nothing is held for streams that moved."""
    assert_drained(split)
    assert split.status("/health") == 200


def test_clients_that_leave_free_everything(split: System) -> None:
    """Streamed and not, in every phase; without other traffic all comes back."""

    async def leave(after_s: float, text: str, stream: bool) -> None:
        body = {"model": split.model, "messages": [{"role": "user", "content": text}], "max_tokens": 512}
        async with split.address.client() as http:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(after_s):
                    await http.post("/v1/chat/completions", json={**body, "stream": stream})

    async def run() -> None:
        for at in range(8):
            text = f"{at} " + "long " * (400 if at % 2 else 1)
            await leave(0.02 + 0.06 * at, text, stream=at % 4 < 2)

    asyncio.run(run())

    assert_drained(split)


def test_a_deadline_ends_a_stream_with_an_error_in_time(split: System) -> None:
    """No later than a second after it, with a status if nothing was sent, else with an error event."""
    began = time.monotonic()
    response = split.chat("Never ending.", max_tokens=4000, deadline_ms=700)
    took = time.monotonic() - began

    assert response.status_code == 408
    assert 0.6 <= took <= 1.8
    streamed = split.stream("Never ending.", max_tokens=4000, deadline_ms=700)
    assert "error" in streamed.chunks[-1] and "[DONE]" not in streamed.events
    assert_drained(split)


def test_a_scale_out_by_hand_takes_part_and_leaves_without_loss(split: System, tmp_path: Path) -> None:
    """A decode process of the same bus is used, and SIGTERM loses nothing."""
    import subprocess

    from chaos.instance import COMMAND

    state = split.state
    options = ("--bus", state["bus_url"], "--node", "by-hand", *split.options[-2:])
    env = {**os.environ, "HEADRACE_BUS_TOKEN": state["bus_token"]}
    log = tmp_path / "by-hand.log"
    with log.open("wb") as out:
        process = subprocess.Popen([*COMMAND, "actor", "decode", *options], stdout=out, stderr=out, env=env)
    try:
        row = wait_until(
            lambda: next((r for r in split.rows() if r["node"] == "by-hand" and r["state"] == "ready"), None),
            limit_s=30.0, what="the new node is ready",
        )  # fmt: skip
        reference = invariants.Answer((split.stream("Stay.", max_tokens=150).text,), ("length",))

        async def traffic() -> list[str]:
            body = {"model": split.model, "messages": [{"role": "user", "content": "Stay."}], "max_tokens": 150}
            async with split.address.client() as http:
                posts = [http.post("/v1/chat/completions", json={**body, "temperature": 0.0}) for _ in range(9)]
                tasks = [asyncio.ensure_future(p) for p in posts]
                await asyncio.sleep(0.7)  # in the middle of streams of 1.5 s
                process.send_signal(signal.SIGTERM)
                answers = [(await t).json() for t in tasks]
            return [a["choices"][0]["message"]["content"] for a in answers]

        texts = asyncio.run(traffic())
        assert row["pid"] == process.pid
        assert process.wait(30) == 0, log.read_text()
        assert texts == [reference.texts[0]] * 9
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_sigterm_leaves_no_process_and_no_shared_memory(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """With a stream open: it ends, and then everything is gone."""
    system = System(tmp_path, "--engine", f"scripted:{script_file}")
    system.start()
    children = system.processes()
    files = list(Path("/dev/shm").glob(f"headrace-{system.name}-*"))
    assert files and len(children) > 5

    code = system.stop()

    gone, alive = psutil.wait_procs(children, timeout=5.0)
    assert code == 0, system.tail()
    assert alive == []
    assert system.leftovers() == []


def test_children_die_with_their_supervisor(script_file: Path, tmp_path: Path, nats_binary: str) -> None:
    """SIGKILL of the supervisor orphans nobody."""
    system = System(tmp_path, "--engine", f"scripted:{script_file}")
    system.start()
    children = system.processes()

    system.stop(signal.SIGKILL)

    gone, alive = psutil.wait_procs(children, timeout=10.0)
    assert [p.cmdline() for p in alive] == []
    for file in system.leftovers():  # nobody was left to remove them; the next start of this instance reaps them
        Path(file).unlink(missing_ok=True)
