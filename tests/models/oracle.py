"""Makes small seeded models with transformers, and computes what transformers makes of them. Runs as a program.

`python oracle.py ROOT` writes a folder per case of `CASES` below ROOT, then, for these and every other folder there,
`ROOT/NAME.npz`: `ids` (prompt), `logits` float32 `[prompt + 31, vocab]` of the prompt and of 31 decoded steps, `greedy`
32 ids; all in float32. `ROOT/tokens.json` holds ids and chat renderings of the tokenizers.
It must not see the checkout, whose package `kernels` transformers would take for another one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# name: (family, type of the file, size of a shard or None, tokenizer, options)
CASES: dict[str, tuple[str, str, str | None, str, dict[str, Any]]] = {
    "llama-f32": ("llama", "float32", None, "llama3", {"head_dim": 16}),
    "llama3-rope-bf16": ("llama", "bfloat16", "60KB", "llama3", {"rope_parameters": LLAMA3}),
    "llama-linear-f32": ("llama", "float32", None, "llama3", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen2-f32": ("qwen2", "float32", None, "qwen2", {"tie_word_embeddings": True}),
    "qwen2-bf16": ("qwen2", "bfloat16", "60KB", "qwen2", {}),
    "qwen3-f32": ("qwen3", "float32", "100KB", "qwen2", {"head_dim": 32}),
    "qwen3-bf16": ("qwen3", "bfloat16", None, "qwen2", {"head_dim": 32, "tie_word_embeddings": True}),
}
TEXTS = [
    "",
    "hello world",
    "Hello's WE'LL 12345 1,234.5",
    "  two  spaces\n\n\ttab \r\n",
    "e\u0301 \u00e9 \u6f22\u5b57 \U0001f469\u200d\U0001f680",
    "\x00\x7f\u2028",
    "<|im_start|>user\nhi<|im_end|>",
    "<think>x</think> y",
    "a<|im_end|><|im_end|>b <|im_end|",
    "def f(x):\n    return x+1\n",
]
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": " S "}, {"role": "user", "content": "é漢\n"}, {"role": "assistant", "content": "x"}],
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"


def make_tokenizer(kind: str) -> Any:
    """Train a byte-level tokenizer of the shape that a family uses, on this file."""
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    core = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    pattern = WORDS + (r"\p{N}{1,3}" if kind == "llama3" else r"\p{N}") + REST
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), byte_level])
    core.decoder = decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    core.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    if kind == "qwen2":
        core.normalizer = normalizers.NFC()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|begin|>", "<|im_start|>", "<|im_end|>")])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    if kind == "llama3":
        first = ("<|begin|>", core.token_to_id("<|begin|>"))
        template = processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[first])
        core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    if kind == "llama3":
        made.bos_token = "<|begin|>"
    made.chat_template = TEMPLATE
    return made


def make_model(folder: Path, number: int, case: tuple[str, str, str | None, str, dict[str, Any]]) -> None:
    """Save a model with random weights."""
    import torch
    import transformers

    family, dtype, shard, tokenizer, options = case
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    settings = SIZES | HEADS | {"tie_word_embeddings": False, "eos_token_id": [7, 9]} | options
    config = getattr(transformers, name + "Config")(**settings)
    torch.manual_seed(number)
    model = getattr(transformers, name + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases are 0 and norms 1 at first: both would hide a mistake; larger weights make clear winners.
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in parameter_name else 0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    make_tokenizer(tokenizer).save_pretrained(folder)


def compute(folder: Path) -> None:
    """Write what the model in a folder answers."""
    import numpy as np
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    ids = [(37 * i + i * i * 11 + 5) % 500 for i in range(45)]
    with torch.inference_mode():
        out = model(torch.tensor([ids]), use_cache=True)
        logits = [out.logits[0]]
        greedy = [int(out.logits[0, -1].argmax())]
        while len(greedy) < 32:
            out = model(torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0])
            greedy.append(int(out.logits[0, -1].argmax()))
    np.savez(folder.with_suffix(".npz"), ids=ids, logits=torch.cat(logits).numpy(), greedy=greedy)


def tokens(folder: Path) -> dict[str, Any]:
    """Return what the tokenizer in a folder makes of texts and chats."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chats = [
        (tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True), c)
        for c in CHATS
    ]  # fmt: skip
    return {
        "texts": [(text, tokenizer(text)["input_ids"]) for text in TEXTS],
        "chats": [(c, text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text, c in chats],
    }


def main(root: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        make_model(root / name, number, case)
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        compute(folder)
    made = {name: tokens(root / name) for name in CASES}
    assert "kernels" not in sys.modules, "transformers imported a package named kernels"
    (root / "tokens.json").write_text(json.dumps(made))


if __name__ == "__main__":
    ROOT = HERE.parents[1]
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, HERE)]
    main(Path(sys.argv[1]))
