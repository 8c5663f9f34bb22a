"""Checks that a row's bits do not depend on how it is computed; the last line is one JSON object. Exit 1 if they do.

`python scripts/check_rows.py [MODEL.gguf]` computes one sequence (300 prompt ids, 64 decoded ones) alone and in one
chunk, and then again in every other way that serving knows: beside 1, 7 and 31 others, with the prompt in chunks,
recomputed after a loss in the middle of the answer, on a cached prefix, on other blocks full of NaN, with another
number of threads. Ids, logits and every byte of the KV must be equal. A control with the wrong call shapes must differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.plan import Row  # noqa: E402  # the checkout is put on the path first
from engine.sequence import Key  # noqa: E402
from engine.torch_runner import TorchRunner  # noqa: E402
from headrace.fetch import ensure_model  # noqa: E402
from models.exactness import Exactness  # noqa: E402
from schemas.record import Sampling  # noqa: E402

NUM_PROMPT, NUM_OUTPUT, NUM_BLOCKS = 300, 64, 1500
GREEDY = Sampling(temperature=0.0)


def prompt(seed: int, length: int, vocab: int = 40000) -> list[int]:
    """Return `length` ids that look random and are not."""
    return [100 + (seed * 7919 + i * 104729 + i * i * 31) % (vocab - 200) for i in range(length)]


@dataclass
class Seq:
    """A sequence, its blocks and the logits of each output."""

    key: str
    prompt: list[int]
    blocks: list[int]
    outputs: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    done: int = 0  # tokens with KV

    @property
    def ids(self) -> list[int]:
        """Prompt and outputs."""
        return self.prompt + self.outputs

    def row(self, count: int | None = None) -> Row:
        """Return the next row: `count` tokens, or all that have no KV yet."""
        end = len(self.ids) if count is None else min(len(self.ids), self.done + count)
        sample = end == len(self.ids)
        ids = self.ids[self.done : end]
        return Row(
            Key(self.key, 0), ids, self.done, len(self.prompt), self.blocks, sample, len(self.outputs), (0,), GREEDY, []
        )


def step(runner: TorchRunner, seqs: list[Seq], counts: list[int | None] | None = None) -> None:
    """Compute one step of some sequences and take the most likely ids."""
    rows = [s.row(n) for s, n in zip(seqs, counts or [None] * len(seqs), strict=True)]
    logits = iter(runner.logits(rows))
    for seq, row in zip(seqs, rows, strict=True):
        seq.done += len(row.ids)
        if row.sample:
            seq.logits.append(next(logits).clone())
            seq.outputs.append(int(seq.logits[-1].argmax()))


class Bench:
    """A runner with a pool whose free blocks are full of NaN."""

    def __init__(self, model: Path, dtype: str, threads: int, num_output: int = NUM_OUTPUT) -> None:
        self.runner = TorchRunner(model, dtype, threads)
        self.pool = bytearray(NUM_BLOCKS * self.runner.block_nbytes)
        self.runner.bind(memoryview(self.pool), NUM_BLOCKS)
        self.free = 0
        self.num_output = num_output
        self.exact = self.runner._model.exact

    def clear(self) -> None:
        """Fill the pool with NaN and take it as free."""
        torch.frombuffer(self.pool, dtype=torch.uint8).fill_(0xFF)
        self.free = 0

    def seq(self, seed: int, length: int, key: str = "", outputs: int = NUM_OUTPUT) -> Seq:
        """Make a sequence on scattered blocks of its own."""
        count = -(-(length + outputs) // 16)
        blocks = list(range(self.free, self.free + count))
        self.free += count
        assert self.free <= NUM_BLOCKS
        return Seq(key or f"s{seed}", prompt(seed, length), blocks[1::2] + blocks[::2])

    def kv(self, seq: Seq, num_tokens: int) -> bytes:
        """Return the KV bytes of the first tokens, in order."""
        config = self.runner.config
        shape = (NUM_BLOCKS, config.num_layers, 2, 16, -1)
        blocks = torch.frombuffer(self.pool, dtype=torch.uint8).view(shape)[seq.blocks]
        tokens = blocks.permute(0, 3, 1, 2, 4).flatten(0, 1)[:num_tokens]
        return tokens.contiguous().numpy().tobytes()


def differing(want: Seq, got: Seq, first: int = 0) -> int:
    """Count outputs, from number `first` of `want`, whose id or logits differ in any bit."""
    wanted = list(zip(want.outputs, want.logits, strict=True))[first : first + len(got.logits)]
    assert wanted, "nothing to compare"
    outputs = got.outputs[len(got.outputs) - len(got.logits) :]
    pairs = zip(wanted, zip(outputs, got.logits, strict=True), strict=False)
    return sum(a[0] != b[0] or not torch.equal(a[1], b[1]) for a, b in pairs)


def baseline(bench: Bench) -> tuple[Seq, bytes]:
    """Compute the sequence alone: the prompt at once, then one token at a time."""
    bench.clear()
    seq = bench.seq(1, NUM_PROMPT)
    for _ in range(bench.num_output):
        step(bench.runner, [seq])
    return seq, bench.kv(seq, seq.done)


def beside(bench: Bench, others: int, want: Seq, kv: bytes) -> int:
    """Decode beside others of many lengths, one of which is always computing its prompt in chunks."""
    bench.clear()
    seq = bench.seq(1, NUM_PROMPT)
    crowd = [bench.seq(10 + i, 17 + 29 * i % 500) for i in range(others)]
    for number in range(bench.num_output):
        late = crowd[-1]
        chunk = 9 if len(late.prompt) > late.done + 9 else None
        step(bench.runner, [*crowd[:-1], seq, late], [*[None] * len(crowd), chunk])
        if number == bench.num_output // 2:
            crowd = crowd[: others // 2 + 1]
    return differing(want, seq) + (bench.kv(seq, seq.done) != kv)


def chunked(bench: Bench, sizes: list[int], want: Seq, kv: bytes) -> int:
    """Compute the prompt in chunks of the given sizes, over and over."""
    bench.clear()
    seq = bench.seq(1, NUM_PROMPT)
    number = 0
    while seq.done < NUM_PROMPT:
        step(bench.runner, [seq], [sizes[number % len(sizes)]])
        number += 1
    for _ in range(8):
        step(bench.runner, [seq])
    return differing(want, seq) + (bench.kv(seq, seq.done) != kv[: len(kv) * seq.done // want.done])


def recomputed(bench: Bench, lost_at: int, sizes: list[int], want: Seq, kv: bytes) -> int:
    """Compute prompt and the first outputs again after a loss, beside another sequence, and go on to the end."""
    bench.clear()
    seq, other = bench.seq(1, NUM_PROMPT), bench.seq(77, 123, outputs=2 * NUM_OUTPUT)
    seq.outputs = want.outputs[:lost_at]
    number = 0
    while len(seq.outputs) < bench.num_output:
        step(bench.runner, [other, seq], [None, sizes[number % len(sizes)]])
        number += 1
    return differing(want, seq, lost_at) + (bench.kv(seq, seq.done) != kv)


def cached(bench: Bench, num_cached: int, want: Seq, kv: bytes) -> int:
    """Start on blocks that another sequence with the same beginning computed."""
    bench.clear()
    donor = bench.seq(1, NUM_PROMPT, "donor")
    donor.prompt[num_cached:] = prompt(5, NUM_PROMPT - num_cached)
    step(bench.runner, [donor])
    seq = bench.seq(1, NUM_PROMPT)
    seq.blocks[: num_cached // 16] = donor.blocks[: num_cached // 16]
    seq.done = num_cached
    for _ in range(8):
        step(bench.runner, [seq])
    return differing(want, seq) + (bench.kv(seq, seq.done) != kv[: len(kv) * seq.done // want.done])


def check(model: Path, dtype: str, threads: int) -> dict[str, object]:
    """Run all comparisons; returns how many outputs or KV areas differ in each."""
    begin = time.perf_counter()
    bench = Bench(model, dtype, threads)
    want, kv = baseline(bench)
    again, again_kv = baseline(bench)
    cases = {"repeated": differing(want, again) + (kv != again_kv)}
    cases |= {f"beside_{n}": beside(bench, n, want, kv) for n in (1, 7, 31)}
    cases |= {
        f"chunks_{'_'.join(map(str, sizes))}": chunked(bench, sizes, want, kv)
        for sizes in ([100], [37, 1, 64], [16], [33, 2, 3], [255])
    }
    for at in (1, 20, 37, 50):
        cases[f"lost_at_{at}"] = recomputed(bench, at, [512], want, kv)
        cases[f"lost_at_{at}_chunks"] = recomputed(bench, at, [90, 7, 1], want, kv)
    cases |= {f"cached_{n}": cached(bench, n, want, kv) for n in (16, 144, 288)}
    exact = bench.exact
    bench.runner._model.exact = Exactness(dict.fromkeys(exact.min_rows, 1), 1)  # the shapes that come naturally
    control = recomputed(bench, 20, [512], want, kv) + beside(bench, 7, want, kv)
    digest = hashlib.blake2b(kv, digest_size=8)
    for logits in want.logits:
        digest.update(logits.numpy().tobytes())
    return {
        "dtype": dtype,
        "threads": threads,
        "differing": sum(cases.values()),
        "cases": cases,
        "control_differing": control,
        "min_rows": {"x".join(map(str, k)): v for k, v in exact.min_rows.items()},
        "max_rows": {"x".join(map(str, k)): v for k, v in exact.max_rows.items()},
        "repeat": exact.repeat,
        "digest": digest.hexdigest(),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; the default model, fetched, without it")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="run one configuration only")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.model is None:
        args.model = ensure_model()
    if args.dtype:
        print(json.dumps(check(args.model, args.dtype, args.threads)))
        return 0
    results = []
    for dtype in ("bfloat16", "float32"):
        for threads in (1, 2):
            # A process each: the number of threads is settled before the first product.
            command = [sys.executable, __file__, str(args.model), "--dtype", dtype, "--threads", str(threads)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(results[-1]))
    threads_agree = all(a["digest"] == b["digest"] for a, b in zip(results[::2], results[1::2], strict=True))
    ok = threads_agree and all(r["differing"] == 0 and r["control_differing"] > 0 for r in results)
    summary = {
        "ok": ok,
        "differing": sum(r["differing"] for r in results),
        "cases": sum(len(r["cases"]) for r in results),
        "threads_agree": threads_agree,
        "control_differing": [r["control_differing"] for r in results],
    }
    print(json.dumps(summary))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
