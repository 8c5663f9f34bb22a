"""The peers' engines alone: llama.cpp by its own `llama-batched-bench`, vLLM by its offline interface."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine_child import PROMPT_TOKENS
from bench.questions import ROOT
from bench.servers import VLLM_ENV, ServerFailed, llama_programs, vllm_python


def llama(directory: Path, model: Path, rows: Sequence[int], prefill: Sequence[int], tokens: int) -> dict[str, Any]:
    """Measure llama.cpp; figures by number of rows and by length of the prompt, tokens per second.

    Raises:
        PeerMissing: if it is not installed.
        ServerFailed: if it fails.
    """
    programs = llama_programs(directory)
    threads = len(os.sched_getaffinity(0))
    out: dict[str, Any] = {"runner": "llama", "threads": threads, "commands": [], "decode": {}, "prefill": {}}
    runs = [(PROMPT_TOKENS, tokens, ",".join(map(str, rows)), max(rows) * (PROMPT_TOKENS + tokens))]
    runs += [(length, 1, "1", length + 16) for length in prefill]
    for pp, tg, pl, context in runs:
        command = [str(programs / "llama-batched-bench"), "-m", str(model), "-t", str(threads)]
        command += ["-c", str(context), "-npp", str(pp), "-ntg", str(tg), "-npl", pl, "--output-format", "jsonl"]
        out["commands"].append(" ".join(command))
        print(f"$ {out['commands'][-1]}", flush=True)
        for row in _json_lines(command, {"LD_LIBRARY_PATH": str(programs)}):
            if tg > 1:
                out["decode"][str(row["pl"])] = round(float(row["speed_tg"]), 1)
            else:
                out["prefill"][str(row["pp"])] = round(float(row["speed_pp"]), 1)
    return out


def vllm(directory: Path, model: Path, rows: Sequence[int], prefill: Sequence[int], tokens: int) -> dict[str, Any]:
    """Measure vLLM on the converted model; figures as `llama` returns them.

    Raises:
        PeerMissing: if it is not installed.
        ServerFailed: if it fails.
    """
    command = [str(vllm_python(directory)), str(ROOT / "bench" / "vllm_offline.py"), str(directory / "model-hf")]
    command += [",".join(map(str, rows)), ",".join(map(str, prefill)), str(PROMPT_TOKENS), str(tokens)]
    print(f"$ {' '.join(command)}", flush=True)
    found = _json_lines(command, VLLM_ENV)
    if not found:
        raise ServerFailed("vLLM printed no figures")
    return {"runner": "vllm", "threads": len(os.sched_getaffinity(0)), "commands": [" ".join(command)], **found[-1]}


def _json_lines(command: Sequence[str], env: dict[str, str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
    if done.returncode:
        raise ServerFailed(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
