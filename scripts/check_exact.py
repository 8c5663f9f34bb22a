"""Checks that the fast path is right and that nothing around a request changes its text; exit 1 if not.

`python scripts/check_exact.py` loads the model twice, as the fast path and as fp32 arithmetic on the same dequantized
weights, and checks (a) how far their distributions are apart over 50 questions, (b) and (c) that greedy and seeded
requests give the same ids alone and in every circumstance of serving, (d) that the check notices a runner which
depends on the batch. The last line is one JSON object with all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.exact import conditions, divergence  # noqa: E402  # the checkout is put on the path first
from bench.exact.conditions import Checker, Found, NotProvoked  # noqa: E402
from bench.exact.variant import VariantRunner  # noqa: E402
from bench.inprocess import EngineFailed, make_runner  # noqa: E402
from bench.questions import NoQuestions, default_path, read  # noqa: E402
from headrace.fetch import ensure_model  # noqa: E402
from models.text import load_text  # noqa: E402

MAX_KL, MIN_TOP1, MAX_PERPLEXITY = 5e-3, 0.98, 0.01  # nats; share; relative difference
PARTS = ("fp32", "text", "variant")


def prompts_of(model: Path, questions: Path, count: int) -> list[list[int]]:
    """Return the ids of the first questions that are not overlong, as chats."""
    text = load_text(model)
    ids = (text.chat_ids([{"role": "user", "content": q.text}], created=0) for q in read(questions))
    found = [one for one in ids if len(one) <= conditions.LONGEST_PROMPT][:count]
    if len(found) < count:
        raise NoQuestions(questions, f"{len(found)} questions of at most {conditions.LONGEST_PROMPT} tokens")
    return found


def against_fp32(runner: Any, model: Path, threads: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Compare distributions; `ok` by the bounds above, over the continuations."""
    began = time.monotonic()
    spans = divergence.compare(make_runner("torch:float32", model, threads), runner, prompts, tokens)
    answer, prompt = spans.continuation.figures(), spans.prompt.figures()
    ok = answer["kl"] <= MAX_KL and answer["top1"] >= MIN_TOP1 and abs(answer["perplexity_ratio"] - 1) <= MAX_PERPLEXITY
    figures = {"continuation": _rounded(answer), "prompt": _rounded(prompt)}
    return {"ok": ok, "prompts": len(prompts), **figures, "took_s": round(time.monotonic() - began, 1)}


def same_texts(runner: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Run all conditions, greedy and seeded together; a mismatch anywhere is a failure."""
    began = time.monotonic()
    greedy, seeded = conditions.requests(prompts, tokens)
    want = conditions.alone(runner, [*greedy, *seeded])
    out: dict[str, Any] = {"alone": {"requests": len(want), "took_s": round(time.monotonic() - began, 1)}}
    print(f"  alone: {out['alone']}", flush=True)
    first_choices = [r for r in seeded if r.choice == 0]
    checks = {f"{k}": v for k, v in Checker(runner, [*greedy, *first_choices], want).conditions().items()}
    # A hand-off of several choices copies the partial last block of the prompt for each of them.
    checks["handed_over"] = Checker(runner, [*greedy, *seeded], want).handed_over
    checks["several_choices"] = lambda: conditions.several_choices(runner, seeded, want)
    found: dict[str, Found] = {}
    for name, check in checks.items():
        found[name] = check()
        out[name] = found[name].figures()
        print(f"  {name}: {out[name]}", flush=True)
    mismatches = sum(f.mismatches for f in found.values())
    preemptions = int(out["preempted"]["preemptions"])
    ok = mismatches == 0 and preemptions > 0
    return {"ok": ok, "mismatches": mismatches, "preemptions": preemptions, "conditions": out}


def variant_is_found(runner: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Run the faulty runner: alone it is as good as any, beside others the check must find mismatches."""
    greedy, seeded = conditions.requests(prompts, tokens)
    wanted = [*greedy, *(r for r in seeded if r.choice == 0)]
    want = conditions.alone(VariantRunner(runner), wanted)
    checks = Checker(VariantRunner(runner), wanted, want).conditions()
    found = {name: checks[name]() for name in ("beside_7", "admitted_mid_run")}
    mismatches = {name: f.mismatches for name, f in found.items()}
    return {"ok": all(n > 0 for n in mismatches.values()), "requests": len(wanted), "mismatches": mismatches}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that are asked for."""
    began = time.monotonic()
    model = args.model or ensure_model()
    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    prompts = prompts_of(model, args.questions, args.requests)
    runner = make_runner(args.runner, model, threads)
    out: dict[str, Any] = {"check": "exact", "ok": True, "runner": args.runner, "threads": threads}
    out |= {"fingerprint": runner.fingerprint, "questions": args.questions.name, "tokens": args.tokens}
    parts = {
        "fp32": lambda: against_fp32(runner, model, threads, prompts, args.tokens),
        "text": lambda: same_texts(runner, prompts, args.tokens),
        "variant": lambda: variant_is_found(runner, prompts[: args.variant_requests], args.tokens),
    }
    for name in PARTS:
        if name in args.parts:
            print(f"{name}:", flush=True)
            out[name] = parts[name]()
            out["ok"] = out["ok"] and out[name]["ok"]
            print(f"  {out[name]}", flush=True)
    return out | {"took_s": round(time.monotonic() - began, 1)}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", default="native", help="native, native:BOUND, native:FORMAT or torch[:DTYPE]")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the default model without it")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--questions", type=Path, default=default_path("mt_bench"))
    parser.add_argument("--requests", type=int, default=50, help="questions, and requests of each kind and condition")
    parser.add_argument("--variant-requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--parts", default=PARTS, type=lambda s: tuple(s.split(",")), help=",".join(PARTS))
    parser.add_argument("--variant", action="store_const", dest="parts", const=("variant",), help="that part alone")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}")
    try:
        figures = check(args)
    except (EngineFailed, NotProvoked, NoQuestions, FloatingPointError) as exc:
        figures = {"check": "exact", "ok": False, "error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
