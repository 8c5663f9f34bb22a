"""Clients leave at random moments: does the work stop, in every phase, and does everything come back?

One request at a time, without other traffic. A third has a prompt of about 1,500 tokens and leaves while it is
computed; the others leave at a random moment of an answer of 512 tokens. Half are streamed. After each: running,
waiting and blocks in use of every engine are back at their baseline within two seconds, and at most one step was begun
after the client had left. (An engine's counter counts finished steps: the one in progress when the client left is not
counted against it.) The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx

from chaos.gremlin import draw
from chaos.instance import Address, InstanceFailed, add_options, report, serving
from chaos.probe import Probe
from chaos.watch import Watch
from chaos.workload import FILLER, chat

ENGINES = ("prefill", "decode", "both")
BOUND_S = 2.0
FIGURES = ("running", "waiting", "held", "expected", "blocks_in_use", "blocks_quarantined")
Load = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Result:
    """What one disconnect came to."""

    phase: str
    left_after_s: float
    drained_s: float | None
    steps_after: int
    finished_before: bool


def load_of(watch: Watch) -> Load:
    """Return what every engine holds, by its last heartbeat."""
    return {seen.name: tuple(seen.figure(name) for name in FIGURES) for seen in watch.live(*ENGINES)}


def steps_of(watch: Watch) -> int:
    """Return how many steps all engines have finished, by their last heartbeats."""
    return sum(seen.figure("steps") for seen in watch.live(*ENGINES))


class Check:
    """Sends, leaves, and watches what remains."""

    def __init__(
        self, http: httpx.AsyncClient, watch: Watch, probe: Probe, model: str, args: argparse.Namespace
    ) -> None:
        self._http = http
        self._watch = watch
        self._probe = probe
        self._model = model
        self._args = args
        self._nodes = {seen.beat.node for seen in watch.ready(*ENGINES)}
        self.baseline: Load = {}
        self.prefill_s = 0.0

    def body(self, at: int, *, long: bool, tokens: int, stream: bool) -> dict[str, Any]:
        """Return a request that no cache knows: its number comes first."""
        text = f"{self._args.seed}-{at} " + (FILLER * self._args.repeats if long else "Write a very long story.")
        return chat(self._model, text, tokens, seed=None, stream=stream)

    async def measure(self) -> int:
        """Note the baseline and how long a long prompt takes; returns its number of tokens."""
        began = time.monotonic()
        answer = await self._http.post("/v1/chat/completions", json=self.body(-1, long=True, tokens=1, stream=False))
        answer.raise_for_status()
        self.prefill_s = time.monotonic() - began
        idle = asyncio.get_running_loop().time() + BOUND_S
        while asyncio.get_running_loop().time() < idle:
            await asyncio.sleep(0.1)
        self.baseline = load_of(self._watch)
        busy = {name: load for name, load in self.baseline.items() if any(load)}
        if busy or not self.baseline:
            raise InstanceFailed(f"engines are not idle without traffic: {busy or 'none is heard'}")
        return int(answer.json()["usage"]["prompt_tokens"])

    async def _steps_now(self) -> int:
        figures = await self._probe.ask(self._nodes)
        return int(sum(v for (name, _), v in figures.items() if name.endswith("_steps_total")))

    async def one(self, at: int) -> Result:
        """Send one request and leave it at a moment drawn by lot."""
        long, stream = at % 3 == 0, at % 2 == 0
        span = self.prefill_s if long else self._args.span_s
        wait = draw(self._args.seed, at, "moment") * span
        body = self.body(at, long=long, tokens=512, stream=stream)
        task = asyncio.create_task(self._read(body))
        began = time.monotonic()
        await asyncio.wait([task], timeout=wait)
        finished = task.done()
        before = await self._steps_now()
        task.cancel()
        await asyncio.wait([task])
        left = time.monotonic()
        drained: float | None = None
        while time.monotonic() < left + BOUND_S + 0.5:
            if all(seen.t > left for seen in self._watch.live(*ENGINES)) and load_of(self._watch) == self.baseline:
                drained = max(seen.t for seen in self._watch.live(*ENGINES)) - left
                break
            await asyncio.sleep(0.01)
        if drained is not None and drained > BOUND_S:
            drained = None
        settled = time.monotonic()
        await self._watch.until(
            lambda w: all(seen.t > settled for seen in w.live(*ENGINES)), timeout_s=5.0, what="one more heartbeat each"
        )
        after = steps_of(self._watch) - before
        in_progress = 0 if finished else 1
        if load_of(self._watch) != self.baseline:
            drained = None
        phase = ("prompt" if long else "answer") + ("-streamed" if stream else "-whole")
        return Result(phase, left - began, drained, max(0, after - in_progress), finished)

    async def _read(self, body: dict[str, Any]) -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass


async def check(where: Address, args: argparse.Namespace) -> dict[str, Any]:
    """Run all disconnects."""
    nats = await where.connect("check-disconnect")
    results: list[Result] = []
    try:
        watch, probe = Watch(time.monotonic), Probe(nats)
        await watch.start(nats)
        await probe.start()
        await watch.until(lambda w: w.ready("decode") or w.ready("both"), timeout_s=30.0, what="an engine heard")
        await asyncio.sleep(1.0)
        async with where.client() as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            run = Check(http, watch, probe, model, args)
            long_tokens = await run.measure()
            print(f"a prompt of {long_tokens} tokens takes {run.prefill_s:.2f} s; baseline {run.baseline}", flush=True)
            for at in range(args.count):
                result = await run.one(at)
                results.append(result)
                if result.drained_s is None or result.steps_after > 1:
                    print(f"  {at}: {result}; {load_of(watch)}", flush=True)
            last = await http.post(
                "/v1/chat/completions", json=run.body(args.count, long=False, tokens=8, stream=False)
            )
    finally:
        await nats.close()
    drained = sorted(r.drained_s for r in results if r.drained_s is not None)
    stuck = sum(r.drained_s is None for r in results)
    steps = [r.steps_after for r in results]
    return {
        "check": "disconnect",
        "disconnects": len(results),
        "during_prompt": sum(r.phase.startswith("prompt") for r in results),
        "prompt_tokens": long_tokens,
        "finished_before": sum(r.finished_before for r in results),
        "not_drained": stuck,
        "drained_ms": {
            "p50": round(drained[len(drained) // 2] * 1000) if drained else None,
            "max": round(drained[-1] * 1000) if drained else None,
        },
        "steps_begun_after": {str(n): steps.count(n) for n in sorted(set(steps))},
        "alive": last.status_code == 200,
        "ok": not stuck and max(steps, default=0) <= 1 and last.status_code == 200,
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find or start an instance and check it."""
    async with serving(args) as where:
        return await check(where, args)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, port_base=18660)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--span-s", type=float, default=4.0, help="short prompts: leave within this time")
    parser.add_argument("--repeats", type=int, default=74, help="how often the long prompt's sentence is repeated")
    return report("disconnect", run(parser.parse_args()), httpx.HTTPError, TimeoutError)


if __name__ == "__main__":
    sys.exit(main())
