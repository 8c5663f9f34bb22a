"""`python -m bench.fairness`: one tenant at ten times another one's rate, and what the other one notices.

An engine without a model (pace as in `bench.overload`), open-loop Poisson arrivals, seeded. First tenant B alone, then
the same arrivals of B beside tenant A, who sends ten times as much: in all below what the engines can do (`below`), and
more than that, while nobody is refused (`above`) and with admission control (`control`), under which queues stay short.
The last line is one JSON object; the exit code is 1 if B's first tokens take, at the 95th percentile, more than 1.5
times what they take alone, if one of B's requests fails or is refused, or if the engines' virtual counters of those who
wait came further apart than their bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench import servers
from bench.arrivals import Sample, Slo, figures, offer, send, times
from bench.client import LoadFailed
from bench.overload import DEFAULT_COSTS, PROMPT, TOKENS, Run, controlled, promised
from bench.questions import long_text
from bench.servers import Server, ServerFailed
from chaos.probe import parse
from headrace.fetch import ensure_model

HEADER = "x-tenant"
TIMES, AT_MOST = 10, 1.5
WARM_S = 3.0
CASES = ("below", "above", "control")


async def beside(
    server: Server, rates: dict[str, float], seconds: float, seed: int, slo: Slo
) -> dict[str, dict[str, Any]]:
    """Offer each tenant's rate at once; returns the figures by tenant. A tenant's arrivals depend on its seed alone."""

    async def tenant(at: int, name: str, rate: float) -> list[Sample]:
        async def one(number: int, when: float) -> Sample:
            text = long_text(seed * 1_000_000 + at * 100_000 + number + len(rates) * 50_000, PROMPT)
            return await send(server.base, server.model, text, TOKENS, when, {HEADER: name})

        return await offer(times(rate, WARM_S + seconds, seed + at), one)

    found = await asyncio.gather(*(tenant(at, name, rate) for at, (name, rate) in enumerate(rates.items())))
    return {
        name: figures([s for s in samples if s.at >= WARM_S], slo, seconds)
        for name, samples in zip(rates, found, strict=True)
    }


async def counters(server: Server) -> tuple[float, float]:
    """Return how far the engines' counters of those who wait were apart at most, and the bound."""
    async with httpx.AsyncClient(base_url=server.base, timeout=10.0) as http:
        page = parse((await http.get("/metrics")).text)
    widest = max((v for (k, _), v in page.items() if "fair_spread_widest" in k), default=0.0)
    bounds = [v for (k, _), v in page.items() if "fair_spread_bound" in k]
    if not bounds:
        raise LoadFailed("no engine tells of its counters")
    return widest, min(bounds)


async def case(server: Server, rate: float, args: argparse.Namespace, slo: Slo) -> dict[str, Any]:
    """Measure B alone and beside A.

    Raises:
        LoadFailed: if nothing was answered.
    """
    alone = (await beside(server, {"b": rate}, args.seconds, args.seed, slo))["b"]
    both = await beside(server, {"b": rate, "a": TIMES * rate}, args.seconds, args.seed, slo)
    widest, bound = await counters(server)
    if not alone["answered"] or not both["b"]["answered"]:
        raise LoadFailed("nothing was answered")
    return judged({"rate_b": rate, "b_alone": alone, "b_beside": both["b"], "a": both["a"]}, widest, bound)


def judged(found: dict[str, Any], widest: float, bound: float) -> dict[str, Any]:
    """Add the verdict to what was found.

    Args:
        found: figures of B alone and beside A.
        widest: how far counters came apart.
        bound: how far they may.
    """
    alone, b = found["b_alone"], found["b_beside"]
    over = b["ttft_p95_ms"] / alone["ttft_p95_ms"]
    ok = over <= AT_MOST and widest <= bound and not b["failed"] and not b["refused"] and not alone["failed"]
    return found | {
        "ttft_p95_over_alone": round(over, 3), "counters_widest": round(widest, 1), "counters_bound": bound, "ok": ok,
    }  # fmt: skip


async def _main(args: argparse.Namespace) -> dict[str, Any]:
    if args.quick:
        args.seconds, args.cases = 15.0, ["above"]
    model = args.model or ensure_model()
    directory = Path(tempfile.mkdtemp(prefix="headrace-fairness-"))
    env = {"HEADRACE_LOG_LEVEL": "warning", "HEADRACE_TENANT_HEADER": HEADER}
    options = ["--engine", f"null:{args.costs}", f"--prefill={args.prefill}", "--decode=2", *args.up]
    out: dict[str, Any] = {"check": "fairness", "seed": args.seed, "costs": args.costs, "at_most": AT_MOST}
    out |= {"prefill": args.prefill, "decode": 2, "cases": {}}
    slo: Slo | None = None
    for number, name in enumerate(args.cases):
        extra = controlled(slo) if name == "control" and slo is not None else {}
        spec = servers.ours(model, args.port_base + 5 * number, options, env | extra)
        async with Server(spec, directory / f"{name}.log") as server:
            # Promises are multiples of what requests take alone, on an instance without any.
            slo = slo or promised(await Run(server, args.seed).unloaded(8))
            found = await case(server, args.rate if name != "below" else args.rate_below, args, slo)
        out["cases"][name] = found
        alone_ms, beside_ms = found["b_alone"]["ttft_p95_ms"], found["b_beside"]["ttft_p95_ms"]
        over, refused = found["ttft_p95_over_alone"], found["b_beside"]["refused"]
        what = f"first token p95 {alone_ms} ms alone, {beside_ms} ms beside the other ({over} times)"
        print(f"{name}: {what}, refused {refused}", flush=True)
    return out | {"ok": all(found["ok"] for found in out["cases"].values())}


def _cases(text: str) -> list[str]:
    names = text.split(",")
    if not names or set(names) - set(CASES) or names[0] == "control":
        raise argparse.ArgumentTypeError(f"some of {', '.join(CASES)}, and not `control` first")
    return names


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, alone and beside the other")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second of the lesser tenant")
    parser.add_argument("--rate-below", type=float, default=0.5, help="the same where all have room")
    parser.add_argument("--cases", type=_cases, default=list(CASES), help="some of below,above,control")
    parser.add_argument("--costs", default=DEFAULT_COSTS, help="pace of the engine")
    parser.add_argument("--prefill", type=int, default=1, help="engines for prompts beside the two that decode")
    parser.add_argument("--quick", action="store_true", help="the case `above` alone, and short")
    parser.add_argument("--port-base", type=int, default=19400)
    parser.add_argument("--up", action="append", default=[], help="one more argument for `headrace up`")
    args = parser.parse_args()
    try:
        result = asyncio.run(_main(args))
    except (ServerFailed, LoadFailed, TimeoutError, httpx.HTTPError) as exc:
        result = {"check": "fairness", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
