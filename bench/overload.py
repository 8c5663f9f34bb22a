"""`python -m bench.overload`: goodput under offered loads of 0.5 to 4 times capacity, with admission control and not.

Open-loop Poisson arrivals, seeded; streamed chat of about 110 prompt tokens and 32 output tokens. An engine that only
keeps the pace of the real one (calibrated to it, unless `--costs` says otherwise) makes the curve; the real one runs at
twice its capacity. A request counts for goodput if its first token came within 5 times, and its tokens within 3 times,
their medians without load. Capacity is the most requests per second that a closed loop completes while nine of ten
count. The last line is one JSON object; the exit code is 1 if goodput with admission control is, at twice the capacity
of either engine, below 0.95 of that engine's best (of all loads, with admission control and not), or at four times
below 0.8; or if such a load was not measured. Parts that options leave out are named in `left_out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import load, servers
from bench.arrivals import Sample, Slo, figures, offer, sample, send, times
from bench.client import LoadFailed
from bench.questions import long_text
from bench.servers import Server, ServerFailed
from headrace.fetch import ensure_model

TTFT_TIMES, ITL_TIMES = 5.0, 3.0
LOADS = (0.5, 1.0, 2.0, 4.0)
STREAMS = (1, 2, 4, 8, 16, 32)
TOKENS = 32
PROMPT = 110
DEADLINE_MS = 10_000  # clients wait no longer
WARM_S = 3.0  # arrivals that are not counted: queues form
# By engine and times capacity: the least goodput with admission control, over the best of that engine.
WANTED = {"null": {2.0: 0.95, 4.0: 0.8}, "real": {2.0: 0.95}}
PACE_OFF = 1.5  # an engine without a model that is quicker or slower than the real one by so much is another engine
DEFAULT_COSTS = "decode_s=0.008,decode_s_per_row=0.002,prefill_s_per_token=0.0008"


class Run:
    """One server under measurement, and texts that no prefix cache knows."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self._next = seed * 1_000_000

    def text(self) -> str:
        """Return a prompt that was not used before."""
        self._next += 1
        return long_text(self._next, PROMPT)

    async def one(self, at: float) -> Sample:
        """Send a request, with a deadline."""
        server = self.server
        return await send(
            server.base, server.model, self.text(), TOKENS, at, {"x-request-deadline-ms": str(DEADLINE_MS)}
        )

    async def unloaded(self, requests: int) -> Slo:
        """Return the medians of requests that run alone, the first ones apart."""
        found = []
        for number in range(requests + 3):
            timing = await load.one(self.server.base, self.server.model, self.text(), TOKENS)
            if number >= 3:
                found.append(sample(0.0, timing, TOKENS))
        return Slo(statistics.median(s.ttft_s for s in found), statistics.median(s.itl_s for s in found))

    async def closed(self, streams: int, seconds: float) -> tuple[list[Sample], float]:
        """Keep so many requests open for a while; returns their samples and the time that it took."""
        began = time.monotonic()

        async def worker() -> list[Sample]:
            out = []
            while time.monotonic() - began < seconds:
                out.append(await self.one(time.monotonic() - began))
            return out

        found = await asyncio.gather(*(worker() for _ in range(streams)))
        return [s for samples in found for s in samples], time.monotonic() - began

    async def capacity(self, slo: Slo, seconds: float) -> tuple[float, list[dict[str, Any]]]:
        """Return the most requests per second of a closed loop while nine of ten count, and all that was tried."""
        best, tried = 0.0, []
        for streams in STREAMS:
            samples, took = await self.closed(streams, seconds)
            met = sum(s.met(slo) for s in samples) / len(samples)
            tried.append({"streams": streams, "per_s": round(len(samples) / took, 2), "attainment": round(met, 3)})
            _say(f"  {streams} streams: {tried[-1]['per_s']} requests/s, {met:.2f} of them quick enough")
            if met < 0.9:
                break
            best = max(best, len(samples) / took)
        if not best:
            raise LoadFailed("not even one stream is quick enough")
        return best, tried

    async def offered(self, rate: float, seconds: float, slo: Slo, seed: int) -> dict[str, Any]:
        """Offer a load, and judge what came after the queues had formed."""
        samples = await offer(times(rate, WARM_S + seconds, seed), lambda _, at: self.one(at))
        return figures([s for s in samples if s.at >= WARM_S], slo, seconds)


def _say(line: str) -> None:
    print(line, flush=True)


def promised(unloaded: Slo) -> Slo:
    """Return what counts as quick enough, by the medians without load."""
    return Slo(TTFT_TIMES * unloaded.ttft_s, ITL_TIMES * unloaded.itl_s)


def controlled(slo: Slo) -> dict[str, str]:
    """Return the settings of admission control."""
    return {
        "HEADRACE_SLO_TTFT_S": json.dumps({"interactive": round(slo.ttft_s, 4)}),
        "HEADRACE_SLO_ITL_S": json.dumps({"interactive": round(slo.itl_s, 5)}),
    }


async def calibrate(args: argparse.Namespace, directory: Path) -> tuple[str, Slo]:
    """Return the real engine's pace, and its medians without load.

    The pace is a step, what each further stream adds, and what a prompt token takes.
    """
    spec = servers.ours(args.model, args.port_base + 20, args.up, {"HEADRACE_LOG_LEVEL": "warning"})
    async with Server(spec, directory / "calibrate.log") as server:
        run = Run(server, args.seed + 900)
        alone = await run.unloaded(args.alone)
        streams = 16
        samples, _ = await run.closed(streams, args.level_s * 2)
    crowded = statistics.median(s.itl_s for s in samples if s.outcome == "ok")
    per_row = max(0.0, crowded - alone.itl_s) / (streams / args.engines - 1)
    step = max(0.0005, alone.itl_s - per_row)
    per_token = max(1e-5, (alone.ttft_s - step) / PROMPT)
    return f"decode_s={step:.5f},decode_s_per_row={per_row:.5f},prefill_s_per_token={per_token:.6f}", alone


async def curve(
    args: argparse.Namespace,
    directory: Path,
    name: str,
    options: list[str],
    loads: dict[bool, tuple[float, ...]],
    port: int,
) -> dict[str, Any]:
    """Measure capacity and the loads, first without admission control, then with it.

    Args:
        args: of the command line.
        directory: for logs.
        name: of the engine.
        options: of `headrace up`.
        loads: times capacity, without (False) and with admission control (True).
        port: of the first server.
    """
    quiet = {"HEADRACE_LOG_LEVEL": "warning"}
    out: dict[str, Any] = {"without": {}, "with": {}}
    async with Server(servers.ours(args.model, port, options, quiet), directory / f"{name}.log") as server:
        run = Run(server, args.seed)
        unloaded = await run.unloaded(args.alone)
        slo = promised(unloaded)
        _say(
            f"{name}: alone {unloaded.ttft_s * 1000:.0f} ms to the first token, {unloaded.itl_s * 1000:.1f} ms between"
        )
        capacity, tried = await run.capacity(slo, args.level_s)
        for times_capacity in loads[False]:
            found = await run.offered(times_capacity * capacity, args.seconds, slo, args.seed)
            out["without"][str(times_capacity)] = found
            _show(name, "without control", times_capacity, found)
    env = quiet | controlled(slo)
    async with Server(servers.ours(args.model, port + 5, options, env), directory / f"{name}-slo.log") as server:
        run = Run(server, args.seed + 1)
        await run.unloaded(3)
        for times_capacity in loads[True]:
            found = await run.offered(times_capacity * capacity, args.seconds, slo, args.seed)
            out["with"][str(times_capacity)] = found
            _show(name, "with control", times_capacity, found)
    return {"unloaded": in_ms(unloaded), "capacity_per_s": round(capacity, 2), "closed": tried, **out}


def in_ms(medians: Slo) -> dict[str, float]:
    """Return medians as they are printed."""
    return {"ttft_ms": round(medians.ttft_s * 1000, 1), "itl_ms": round(medians.itl_s * 1000, 2)}


def _show(name: str, what: str, times_capacity: float, found: dict[str, Any]) -> None:
    rates = f"goodput {found['goodput_per_s']}/s of {found['offered_per_s']}"
    late = f"late {found['late_first']} + {found['late_tokens']}"
    _say(
        f"{name}, {what}, {times_capacity:g} x capacity: {rates}, refused {found['refused']}, {late}, "
        f"failed {found['failed']}, first token p95 {found['ttft_p95_ms']} ms"
    )


def judge(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Hold an engine's goodput with admission control against its best.

    The best may be one without admission control: refusing too much would else lower what it is held against.

    Args:
        name: of the engine, as in `WANTED`.
        found: by `curve`.
    """
    peak = max((p["goodput_per_s"] for way in ("with", "without") for p in found[way].values()), default=0.0)
    over = {key: round(p["goodput_per_s"] / peak, 3) if peak else 0.0 for key, p in found["with"].items()}
    why = []
    for times_capacity, least in WANTED[name].items():
        ratio = over.get(str(times_capacity))
        if ratio is None:
            why.append(f"{name}: nothing was measured at {times_capacity:g} times capacity")
        elif ratio < least:
            why.append(f"{name}: goodput at {times_capacity:g} times capacity is {ratio} of its peak, not {least}")
    return {"peak_per_s": peak, "over_peak": over, "why": why, "ok": not why}


def verdict(
    curves: Mapping[str, Mapping[str, Any]], left_out: Sequence[str], calibrated: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Judge every engine that was not left out on purpose, and whether they keep the same pace.

    Args:
        curves: by engine.
        left_out: engines that were not to be measured.
        calibrated: medians of the real engine just before those of the one without a model were taken. Without them
            those of its own curve count, which are minutes younger: a machine's clock may have changed by then.
    """
    wanted = [name for name in WANTED if name not in left_out]
    judged = {name: judge(name, curves[name]) for name in wanted if name in curves}
    why = [line for one in judged.values() for line in one["why"]]
    why += [f"{name}: not measured" for name in wanted if name not in curves]
    pace = {}
    real = calibrated or curves.get("real", {}).get("unloaded")
    if real and "null" in curves:
        pace = {key: round(curves["null"]["unloaded"][key] / real[key], 2) for key in ("ttft_ms", "itl_ms")}
        off = {key: ratio for key, ratio in pace.items() if not 1 / PACE_OFF <= ratio <= PACE_OFF}
        why += [f"the engine without a model takes {r} times the real one's {k} without load" for k, r in off.items()]
    ok = bool(judged) and not why
    return {"judged": judged, "null_over_real": pace, "left_out": list(left_out), "why": why, "ok": ok}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=18.0, help="measured, of each offered load")
    parser.add_argument("--level-s", type=float, default=5.0, help="of each closed loop that looks for capacity")
    parser.add_argument("--alone", type=int, default=15, help="requests that give the medians without load")
    parser.add_argument(
        "--costs", default="", help="pace of the engine without a model; empty: calibrated to the real one"
    )
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--loads", type=lambda s: tuple(map(float, s.split(","))), default=LOADS)
    parser.add_argument("--no-real", action="store_true", help="leave the real engine out")
    parser.add_argument("--quick", action="store_true", help="short loads of the engine without a model alone")
    parser.add_argument("--port-base", type=int, default=19300)
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    return parser


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    if args.quick:
        args.seconds, args.level_s, args.alone, args.no_real = 6.0, 2.5, 8, True
    args.model = args.model or ensure_model()
    directory = Path(tempfile.mkdtemp(prefix="headrace-overload-"))
    engines = [f"--decode={args.engines}", *args.up]
    costs, calibrated = args.costs or DEFAULT_COSTS, None
    if not args.costs and not args.no_real:
        costs, alone = await calibrate(args, directory)
        calibrated = in_ms(alone)
    _say(f"pace of the engine without a model: {costs}")
    without = (2.0,) if args.quick else args.loads
    loads = {False: without, True: args.loads}
    curves = {
        "null": await curve(args, directory, "null", ["--engine", f"null:{costs}", *engines], loads, args.port_base)
    }
    if not args.no_real:
        twice = {False: (2.0,), True: (1.0, 2.0)}
        curves["real"] = await curve(args, directory, "real", engines, twice, args.port_base + 10)
    said = verdict(curves, ("real",) if args.no_real else (), calibrated)
    for line in said["why"]:
        _say(line)
    return {"check": "overload", "seed": args.seed, "costs": costs, "calibrated": calibrated, **curves, **said}


def main() -> int:
    """Run the command line."""
    args = _arguments().parse_args()
    try:
        result = asyncio.run(_main(args))
    except (ServerFailed, LoadFailed, TimeoutError) as exc:
        result = {"check": "overload", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
