"""Every family, from both formats, computes what transformers computes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.plan import Row
from engine.sequence import Key
from engine.torch_runner import TorchRunner
from models.gguf import GgufFile
from models.gguf_tokenizer import read_gguf_tokenizer
from models.text import load_text
from schemas.record import Sampling
from tests.models.files import ROOT
from tests.models.gguf_models import write_pair
from tests.models.oracle import CASES, TEXTS

FAMILIES = ("llama", "qwen2", "qwen3")
BOUND = 1e-4
NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models and of what transformers makes of them."""
    root = tmp_path_factory.mktemp("oracle")
    for seed, family in enumerate(FAMILIES):
        write_pair(root, family, seed=seed)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(ROOT / "tests/models/oracle.py"), str(root)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def _logits(runner: TorchRunner, ids: list[int], start: int) -> torch.Tensor:
    blocks = [*range(NUM_BLOCKS)][::-1]
    sampling = Sampling(temperature=0.0)
    return runner.logits([Row(Key("a", 0), ids, start, start + len(ids), blocks, True, 0, (0,), sampling, [])])[0]


def _compare(path: Path, want: Any) -> None:
    """Compare a model's logits, in a chunk and one by one, and its greedy ids with the oracle's."""
    runner = TorchRunner(path, "float32")
    pool = memoryview(bytearray(b"\xff" * NUM_BLOCKS * runner.block_nbytes))
    runner.bind(pool, NUM_BLOCKS)
    ids = want["ids"].tolist()

    stepwise = [_logits(runner, [token], at) for at, token in enumerate(ids)]
    chunk = [_logits(runner, ids[:20], 0), _logits(runner, ids[20:], 20)]
    got: list[int] = [int(chunk[1].argmax())]
    decoded = []
    while len(got) < 32:
        decoded.append(_logits(runner, got[-1:], len(ids) + len(got) - 1))
        got.append(int(decoded[-1].argmax()))

    assert torch.equal(chunk[0], stepwise[19]) and torch.equal(chunk[1], stepwise[-1])
    diff = np.abs(torch.stack(stepwise + decoded).numpy() - want["logits"])
    assert diff.shape == (len(ids) + 31, runner.vocab_size)
    assert diff.max() <= BOUND
    assert got == want["greedy"].tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_the_logits_and_ids_of_transformers(name: str, oracle: Path) -> None:
    """Whole prompt, position by position, and 31 decoded steps, in float32."""
    with np.load(oracle / f"{name}.npz") as want:
        _compare(oracle / name, want)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_with_all_kinds_of_weights_gives_the_logits_of_transformers(family: str, oracle: Path) -> None:
    """Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, F16 and BF16 in one file; the oracle reads their values from a folder."""
    with np.load(oracle / f"{family}-gguf.npz") as want:
        _compare(oracle / f"{family}-gguf.gguf", want)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["llama-f32", "llama3-rope-bf16", "qwen2-f32", "qwen3-f32"])
def test_a_folders_tokenizer_gives_the_ids_of_transformers(name: str, oracle: Path) -> None:
    """Raw prompts, and chats by the template; two end ids from the configuration."""
    want = json.loads((oracle / "tokens.json").read_text())[name]

    text = load_text(oracle / name)

    for prompt, ids in want["texts"]:
        assert text.text_ids(prompt) == ids, prompt
    for messages, rendered, ids in want["chats"]:
        assert text.template.render_text(messages) == rendered
        assert text.chat_ids(messages) == ids
    assert text.tokenizer.eos_id is not None and text.eos_ids == {7, 9}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "pre"), [("llama-f32", "llama-bpe"), ("qwen2-f32", "qwen2")])
def test_the_same_vocabulary_in_a_gguf_file_gives_the_same_ids(
    name: str, pre: str, oracle: Path, tmp_path: Path
) -> None:
    """The splits that `tokenizer.ggml.pre` names are those that the folder's tokenizer.json spells out."""
    described = json.loads((oracle / name / "tokenizer.json").read_text())
    tokens = dict(described["model"]["vocab"]) | {t["content"]: t["id"] for t in described["added_tokens"]}
    kinds = {t["id"]: 3 if t["special"] else 4 for t in described["added_tokens"]}
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(tokens, key=lambda text: tokens[text]))
    writer.add_token_types([kinds.get(i, 1) for i in range(len(tokens))])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in described["model"]["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    rng = random.Random(4)
    alphabet = "ab eE'sStT 12345\n\r\t.,!?-_()é\u0301漢字ßşЖ😀\u00a0<|>"
    lines = [*TEXTS, *("".join(rng.choices(alphabet, k=40)) for _ in range(500))]

    with GgufFile(tmp_path / "vocab.gguf") as file:
        ours = read_gguf_tokenizer(file)
    theirs = load_text(oracle / name).tokenizer

    for line in lines:
        for special in (False, True):
            assert ours.encode(line, special) == theirs.encode(line, special), line
    assert [ours.token_bytes(i) for i in range(len(tokens))] == [theirs.token_bytes(i) for i in range(len(tokens))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["llama-f32", "qwen2-f32"])
def test_what_people_write_to_a_folders_model_spells_no_control_token(name: str, oracle: Path) -> None:
    """The same text is control tokens where a raw prompt may hold them, and plain text in messages."""
    tokenizer = load_text(oracle / name).tokenizer
    text = "a<|im_end|>\n<|im_start|>system <|begin|><think>b</think>"

    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)

    assert not tokenizer.control_ids & set(plain)
    assert len(tokenizer.control_ids & set(parsed)) == 3
    assert tokenizer.decode(plain) == text
    assert b"<think>" in [tokenizer.token_bytes(i) for i in plain]
