"""Checks model, tokenizer and chat template against transformers and llama.cpp; the last line is one JSON object.

`python scripts/check_oracle.py [MODEL.gguf] [--prompts 20] [--tokens 64]`. Exit 1 if any of these fails:
- fp32 logits of every prompt position against transformers, which reads and dequantizes the GGUF file itself: ≤ 2e-3;
- greedy ids in fp32 equal for all prompts, ours through the paged pool one by one, theirs through their own cache;
- ids of 2,000 lines equal to llama.cpp's (tests/data/token_golden.json.gz, made by scripts/make_token_golden.py);
- renderings of the chat template equal to `apply_chat_template`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BOUND = 2e-3

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village by the sea, there lived",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees Celsius because",
    "The three laws of motion were written by Isaac Newton. The first one says that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet in the solar system?\nA:",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "In 1969, Apollo 11",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName 3 colours.<|im_end|>\n<|im_start|>assistant\n",
    "Ein Apfel am Tag hält den Doktor fern. Das bedeutet",
    "日本の首都は東京です。中国の首都は",
    "SELECT name, COUNT(*) FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "A list of fruits:\n- apple\n- banana\n-",
    '{"name": "Ada", "born": 1815, "field": "',
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "😀 means happy, 😢 means",
)

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "  spaces and\n\nlines 123 \n"},
        {"role": "assistant", "content": "Oh."},
        {"role": "user", "content": "漢字 😀 'quotes' \"double\" <b>&amp;</b>"},
    ],
    [{"role": "assistant", "content": ""}, {"role": "user", "content": ""}],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "> quoted <"},
        {"role": "assistant", "content": "|>"},
    ],
)


def theirs(model: Path) -> Any:
    """Load the file with transformers alone, before the checkout with its package `kernels` is on the path."""
    assert str(ROOT) not in sys.path
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # `from_pretrained(gguf_file=…)` does these steps, but asks for a further package to do them.
    config = transformers.AutoConfig.from_pretrained(str(model.parent), gguf_file=model.name)
    loaded = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(model), return_tensors=True, model_to_load=loaded)["tensors"]
    missing, unexpected = loaded.load_state_dict(tensors, strict=False)
    loaded.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    assert "kernels" not in sys.modules, "transformers imported a package named kernels"
    return loaded.eval()


def check_model(model: Path, num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """Compare logits of every prompt position, and greedy ids."""
    oracle = theirs(model)
    sys.path.insert(0, str(ROOT))
    import torch

    from engine.plan import Row
    from engine.sequence import Key
    from engine.torch_runner import TorchRunner
    from models.text import load_text
    from schemas.record import Sampling

    runner = TorchRunner(model, "float32")
    num_blocks = 64
    pool = bytearray(num_blocks * runner.block_nbytes)
    runner.bind(memoryview(pool), num_blocks)
    text = load_text(model)
    greedy = Sampling(temperature=0.0)

    def ours(ids: list[int], start: int, prompt_len: int) -> torch.Tensor:
        blocks = list(range(num_blocks))[::-1]
        return runner.logits([Row(Key("o", 0), ids, start, prompt_len, blocks, True, 0, (0,), greedy, [])])[0]

    worst, unequal, positions = 0.0, [], 0
    for number, prompt in enumerate(PROMPTS[:num_prompts]):
        ids = text.text_ids(prompt)
        with torch.inference_mode():
            want = oracle(torch.tensor([ids])).logits[0]
        # One position per step is the decode path; the chunk path is compared by its last position.
        rows = [ours([token], at, len(ids)) for at, token in enumerate(ids)]
        rows.append(ours(ids, 0, len(ids)))
        diff = (torch.stack(rows) - torch.cat((want, want[-1:]))).abs().max()
        worst = max(worst, float(diff))
        positions += len(ids)
        got, logits = [], rows[-1]
        for _ in range(num_tokens):
            got.append(int(logits.argmax()))
            logits = ours(got[-1:], len(ids) + len(got) - 1, len(ids))
        with torch.inference_mode():
            past, step, expected = None, torch.tensor([ids]), []
            for _ in range(num_tokens):
                out = oracle(step, past_key_values=past, use_cache=True)
                past, step = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                expected.append(int(step))
        if got != expected:
            unequal.append(number)
    return {
        "prompts": min(num_prompts, len(PROMPTS)),
        "positions": positions,
        "max_abs_logit_diff": worst,
        "greedy_tokens": num_tokens,
        "greedy_unequal": unequal,
    }


def check_tokens(model: Path) -> dict[str, Any]:
    """Compare ids with llama.cpp's, and the lines with those that the script makes now."""
    from models.text import load_text
    from scripts.make_token_golden import GOLDEN, golden_lines

    tokenizer = load_text(model).tokenizer
    golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    pairs = list(zip(golden["lines"], golden["ids"], strict=True))
    return {
        "token_lines": len(pairs),
        "token_lines_unequal": sum(tokenizer.encode(line) != ids for line, ids in pairs),
        "token_lines_current": golden["lines"] == golden_lines(),
    }


def check_chat(model: Path) -> dict[str, Any]:
    """Compare renderings with transformers' `apply_chat_template`, and their ids with encoding the text at once."""
    from transformers import PreTrainedTokenizerFast

    from models.gguf import GgufFile
    from models.text import load_text

    text = load_text(model)
    with GgufFile(model) as file, tempfile.TemporaryDirectory() as scratch:
        # Any vocabulary will do: only the rendering is compared here.
        path = Path(scratch) / "tokenizer.json"
        path.write_text(
            json.dumps(
                {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
            )
        )
        oracle = PreTrainedTokenizerFast(tokenizer_file=str(path))
        oracle.chat_template = file.metadata["tokenizer.chat_template"]
    unequal = 0
    for messages in CHATS:
        for prompt in (True, False):
            want = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            unequal += text.template.render_text(messages, prompt) != want
            ids = text.tokenizer.with_bos(text.tokenizer.encode(want, parse_special=True))
            unequal += text.template.render_ids(messages, prompt) != ids
    return {"chats": 2 * len(CHATS), "chats_unequal": unequal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; the default model, fetched, without it")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    if args.model is None:
        from headrace.fetch import ensure_model

        args.model = ensure_model()
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "scripts")]
    # Waiting threads that spin make a busy machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    begin = time.perf_counter()
    result = check_model(args.model, args.prompts, args.tokens)
    result |= check_tokens(args.model)
    result |= check_chat(args.model)
    ok = (
        result["max_abs_logit_diff"] <= BOUND
        and not result["greedy_unequal"]
        and result["token_lines_unequal"] == 0
        and result["token_lines_current"]
        and result["chats_unequal"] == 0
    )
    print(json.dumps({"ok": ok} | result | {"seconds": round(time.perf_counter() - begin, 1)}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
