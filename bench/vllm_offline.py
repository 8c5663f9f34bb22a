"""vLLM's engine without a server; run in its own environment by `bench.engine`, so it imports nothing of the project.

Arguments: model folder, rows by commas, prompt lengths by commas, tokens of the decode prompts, output tokens. The last
line is a JSON object: decode and prefill in tokens per second. Decode is the time of `tokens` ids less that of one.
"""

import importlib
import json
import os
import statistics
import sys
import time
from typing import Any


def main(folder: str, rows: str, prefill: str, prompt_tokens: int, tokens: int) -> None:
    """Measure and print."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=folder, dtype="bfloat16", enforce_eager=True, max_num_seqs=64, enable_prefix_caching=False,
        disable_log_stats=True,
    )  # fmt: skip

    def timed(count: int, length: int, outputs: int, first: int) -> float:
        numbers = range(first, first + count)
        ids = [[100 + (n * 7919 + i * 104_729 + i * i * 31) % 39_900 for i in range(length)] for n in numbers]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        return time.perf_counter() - began

    timed(2, 64, 8, 0)
    out: dict[str, Any] = {"decode": {}, "prefill": {}}
    for count in map(int, rows.split(",")):
        spans = []
        for turn in range(2):
            whole = timed(count, prompt_tokens, tokens, 1000 * turn)
            spans.append(whole - timed(count, prompt_tokens, 1, 1000 * turn))
        out["decode"][str(count)] = round(count * (tokens - 1) / statistics.median(spans), 1)
    for length in map(int, prefill.split(",")):
        out["prefill"][str(length)] = round(
            length / statistics.median(timed(1, length, 1, 5000 + turn) for turn in range(3)), 1
        )
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
