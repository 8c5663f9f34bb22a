"""Prompts: question files (a JSON object a line, as MT-bench and Spec-Bench have), and texts of a wished length."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "bench" / "prompts"
SHARED = ROOT.parent / "shared" / "traces"
CHARS_PER_TOKEN = 4.7  # of English prose under the default model's tokenizer; servers report the true count
FRAME_TOKENS = 44  # chat template with its system message, first and last sentence of a long text


@dataclass(frozen=True, slots=True)
class Question:
    """The first turn of one question."""

    id: int
    category: str
    text: str


class NoQuestions(Exception):
    """Raised when a file holds no question, or something else than questions."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def read(path: Path) -> list[Question]:
    """Read a question file.

    Raises:
        NoQuestions: if it cannot be read, or a line is no question, or there is none.
    """
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                entry = json.loads(line)
                found.append(Question(int(entry["question_id"]), str(entry["category"]), str(entry["turns"][0])))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise NoQuestions(path, f"{type(exc).__name__}: {exc}") from exc
    if not found:
        raise NoQuestions(path, "it holds no question")
    return found


def default_path(name: str) -> Path:
    """Return where questions are read from: a public set beside the checkout if it lies there, else our own.

    Args:
        name: `mt_bench` or `spec_bench`.
    """
    shared = SHARED / f"{name}_questions.jsonl"
    own = {"mt_bench": OWN / "questions.jsonl", "spec_bench": OWN / "texts.jsonl"}
    return shared if shared.exists() else own[name]


def long_text(number: int, num_tokens: int) -> str:
    """Return prose that makes a prompt of about `num_tokens` tokens, its sentences in an order of its own.

    It begins with its number, so that no server finds the prefix of one request in another one's blocks; a later
    sentence is used again only when all have been used.
    """
    sentences = _sentences()
    wanted = max(0, num_tokens - FRAME_TOKENS) * CHARS_PER_TOKEN
    out, length, turn = [f"Case {number}, file {_digest(number, 0) % 100_000}."], 0, 0
    order: list[str] = []
    while length < wanted:
        if not order:
            turn += 1
            order = sorted(sentences, key=lambda s: _digest(number, turn, s))
        out.append(order.pop())
        length += len(out[-1]) + 1
    text = " ".join(out)
    return text[: int(wanted)] + " … What follows from that? Answer at length."


def _sentences() -> list[str]:
    texts = [q.text.split("\n\n", 1)[-1] for q in read(OWN / "texts.jsonl")]
    return [s.strip() + "." for t in texts for s in t.split(". ") if s.strip()]


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
