"""A runner that emits chosen ids, and that checks the engine around it.

In place of keys and values it writes (token id, position, digest of all ids so far) for each position into the pool,
and before each step it compares what earlier positions hold with what the sequence says. A block that was lent twice,
copied wrongly, found under a wrong hash or lost on the way shows as an error of that row, not as a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.null_runner import idle, num_prompt_tokens
from engine.plan import BatchPlan, Row, Sampled, accept
from kvstore.block import BLOCK_TOKENS
from schemas.record import Sampling

Script = Callable[[list[int], int, int, Sampling], int]
"""Prompt ids, choice, index and sampling to the id at that index."""

_ENTRY = struct.Struct("<III4x")  # token id, position, crc of the ids up to here
_WHOLE_BLOCK = _ENTRY.size * BLOCK_TOKENS
_CHECK_ALL_BLOCKS = 64  # shorter sequences are checked in full at each step, longer ones in a rotating sample
_KEPT = 8192


class _Memory:
    """What the blocks of one sequence must hold."""

    __slots__ = ("context", "crc", "expected", "length", "prompt")

    def __init__(self, row: Row) -> None:
        self.context = row.context
        self.prompt = row.context[: row.prompt_len]
        self.expected = bytearray()
        self.length = 0
        self.crc = 0

    def extend(self, end: int) -> None:
        for position in range(self.length, end):
            token = self.context[position]
            self.crc = zlib.crc32(token.to_bytes(4, "little"), self.crc)
            self.expected += _ENTRY.pack(token, position, self.crc)
        self.length = max(self.length, end)

    def guessed(self, draft: list[int]) -> bytes:
        """Return what positions behind the known ids hold when these guesses are written there."""
        out, crc = bytearray(), self.crc
        for position, token in enumerate(draft, self.length):
            crc = zlib.crc32(token.to_bytes(4, "little"), crc)
            out += _ENTRY.pack(token, position, crc)
        return bytes(out)


class ScriptedRunner:
    """Emits `script(prompt, choice, index, sampling)`; verifies block contents at every step."""

    layout = "scripted-1"
    fingerprint = "scripted-1"

    def __init__(
        self,
        script: Script,
        *,
        block_nbytes: int = _WHOLE_BLOCK,
        vocab_size: int = 49152,
        max_context: int = 8192,
        eos_ids: frozenset[int] = frozenset({2}),
        pace_s: float = 0.0,
        prefill_pace_s_per_token: float = 0.0,
        sleep: Callable[[float], Any] = idle,
    ) -> None:
        """Set script and pace.

        Args:
            script: which id comes next; an exception in it is an error of that row.
            block_nbytes: bytes per block, at least 256.
            vocab_size: ids are below it.
            max_context: tokens per sequence.
            eos_ids: ids that end a sequence.
            pace_s: duration of a step.
            prefill_pace_s_per_token: added for each token of rows with more than one.
            sleep: how to let time pass.

        Raises:
            ValueError: if a block is too small to be checked.
        """
        if block_nbytes < _WHOLE_BLOCK:
            raise ValueError(f"a block has at least {_WHOLE_BLOCK} bytes")
        self.block_nbytes = block_nbytes
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.eos_ids = eos_ids
        self.pace_s = pace_s
        self.prefill_pace_s_per_token = prefill_pace_s_per_token
        self._script = script
        self._sleep = sleep
        self._pool: memoryview | None = None
        self._memories: OrderedDict[Any, _Memory] = OrderedDict()

    def bind(self, buffer: memoryview, num_blocks: int) -> None:
        """Use this memory as the pool."""
        if len(buffer) < num_blocks * self.block_nbytes:
            raise ValueError(f"{len(buffer)} bytes do not hold {num_blocks} blocks of {self.block_nbytes}")
        self._pool = buffer

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        """Verify, write and sample each row; let the step's time pass."""
        out: list[Sampled] = []
        for row in plan.rows:
            out += self._row(row, plan.step)
        pause = self.pace_s
        if self.prefill_pace_s_per_token:
            pause += self.prefill_pace_s_per_token * sum(num_prompt_tokens(row) for row in plan.rows)
        if pause > 0:
            self._sleep(pause)
        return out

    def warm_up(self) -> None:
        """Check that a pool is bound."""
        if self._pool is None:
            raise RuntimeError("no pool is bound")

    def close(self) -> None:
        """Let go of the pool."""
        self._pool = None
        self._memories.clear()

    def _row(self, row: Row, step: int) -> list[Sampled]:
        memory = self._memory(row)
        end = row.start + len(row.ids)
        known = end - len(row.draft)
        memory.extend(known)
        problem = self._verify(row, memory, step)
        if problem is None and row.ids != row.context[row.start : known] + row.draft:
            problem = f"ids at {row.start} are not the sequence's"
        if problem is None and row.draft and not (row.sample and known == memory.length == len(row.context)):
            problem = f"a draft at {known} does not follow the sequence's last id"
        if problem is None and len(row.blocks) * BLOCK_TOKENS < end:
            problem = f"{len(row.blocks)} blocks do not hold {end} tokens"
        if problem is not None:
            return [Sampled(row.key, row.choices[0], row.index, -1, error=problem)]
        self._write(row, row.start, memory.expected[row.start * _ENTRY.size : known * _ENTRY.size])
        self._write(row, known, memory.guessed(row.draft))
        if not row.sample:
            return []
        draws = [(choice, row.index) for choice in row.choices]
        if row.draft:
            draws = [(row.choices[0], row.index + at) for at in range(row.num_wanted)]
        try:
            return accept(
                row,
                (
                    Sampled(row.key, choice, index, self._script(memory.prompt, choice, index, row.sampling))
                    for choice, index in draws
                ),
            )
        except Exception as exc:  # a script's fault is this row's alone
            return [Sampled(row.key, row.choices[0], row.index, -1, error=f"script: {exc!r}")]

    def _memory(self, row: Row) -> _Memory:
        memory = self._memories.get(row.key)
        # The core keeps one list per sequence: another list under the same key is another sequence.
        if memory is None or memory.context is not row.context:
            memory = self._memories[row.key] = _Memory(row)
        self._memories.move_to_end(row.key)
        if len(self._memories) > _KEPT:
            self._memories.popitem(last=False)
        return memory

    def _verify(self, row: Row, memory: _Memory, step: int) -> str | None:
        """Return what is wrong with the positions before `row.start`."""
        num_blocks = -(-row.start // BLOCK_TOKENS)
        if len(row.blocks) < num_blocks:
            return f"{len(row.blocks)} blocks do not hold {row.start} computed tokens"
        indices: Sequence[int] = range(num_blocks)
        if num_blocks > _CHECK_ALL_BLOCKS:
            stride = num_blocks // _CHECK_ALL_BLOCKS + 1
            indices = [*range(step % stride, num_blocks - 1, stride), num_blocks - 1]
        pool, size = self._bound(), self.block_nbytes
        for index in indices:
            first = index * _WHOLE_BLOCK
            wanted = memory.expected[first : min(first + _WHOLE_BLOCK, row.start * _ENTRY.size)]
            at = row.blocks[index] * size
            if pool[at : at + len(wanted)] != wanted:
                return f"block {row.blocks[index]} does not hold positions {index * BLOCK_TOKENS} and following"
        return None

    def _write(self, row: Row, position: int, data: bytes | bytearray) -> None:
        """Write entries from a position on."""
        pool, size, first = self._bound(), self.block_nbytes, position
        end = position + len(data) // _ENTRY.size
        while position < end:
            index, offset = divmod(position, BLOCK_TOKENS)
            stop = min(end, (index + 1) * BLOCK_TOKENS)
            at = row.blocks[index] * size + offset * _ENTRY.size
            part = data[(position - first) * _ENTRY.size : (stop - first) * _ENTRY.size]
            pool[at : at + len(part)] = part
            position = stop

    def _bound(self) -> memoryview:
        if self._pool is None:
            raise RuntimeError("no pool is bound")
        return self._pool


@dataclass(frozen=True, slots=True)
class Death:
    """A process really ends when it is asked for the id at `at` or a later one: by a signal, or with exit code 3."""

    at: int
    by: str  # name of a signal, or `exit`

    def come(self) -> None:
        """End this process."""
        if self.by == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[self.by])
        signal.pause()


def _death(spec: dict[str, Any]) -> Death:
    by = str(spec.get("by", "SIGABRT"))
    if set(spec) - {"at", "by"} or not (by == "exit" or by in signal.Signals.__members__):
        raise ValueError(f"{spec!r} is no death: `at` is an index, `by` a signal's name or `exit`")
    return Death(int(spec.get("at", 0)), by)


class Rules:
    """A script read from JSON: the first rule whose ids occur in the prompt emits its ids, then EOS; else a hash.

    A rule with `dies` ends the process in place of emitting anything: `{"at": index, "by": "SIGSEGV"}`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """Read the rules.

        Raises:
            ValueError: if a field is unknown or out of range.
        """
        unknown = set(spec) - _FIELDS
        if unknown:
            raise ValueError(f"unknown fields {sorted(unknown)}; known are {sorted(_FIELDS)}")
        self.vocab_size = int(spec.get("vocab_size", 49152))
        self.max_context = int(spec.get("max_context", 8192))
        self.eos = [int(i) for i in spec.get("eos", [2])]
        self.pace_s = float(spec.get("pace_s", 0.0))
        self.prefill_s_per_token = float(spec.get("prefill_s_per_token", 0.0))
        self.block_nbytes = int(spec.get("block_nbytes", _WHOLE_BLOCK))
        if spec.get("default", "hash") != "hash":
            raise ValueError(f"default {spec['default']!r} is not known; `hash` is")
        low, high = spec.get("default_range", [33, 126])
        self._ids = [i for i in range(int(low), int(high) + 1) if i not in self.eos]
        self._rules: list[tuple[list[int], list[list[int]]]] = []
        self._deaths: list[tuple[list[int], Death]] = []
        for rule in spec.get("rules", []):
            unknown = set(rule) - {"contains", "emit", "per_choice", "dies"}
            if unknown:
                raise ValueError(f"unknown fields {sorted(unknown)} in a rule")
            if "dies" in rule:
                self._deaths.append((list(rule.get("contains", [])), _death(rule["dies"])))
                continue
            emits = rule["per_choice"] if "per_choice" in rule else [rule["emit"]]
            if not emits:
                raise ValueError("a rule emits nothing: `per_choice` is empty")
            self._rules.append((list(rule.get("contains", [])), [list(ids) for ids in emits]))
        every = [*self._ids, *self.eos, *(i for _, emits in self._rules for ids in emits for i in ids)]
        if not self._ids or min(every) < 0 or max(every) >= self.vocab_size:
            raise ValueError(f"an id is outside the vocabulary of {self.vocab_size}, or the default range is empty")
        self._found: OrderedDict[int, tuple[list[int], list[list[int]] | None, bytes]] = OrderedDict()

    def __call__(self, prompt: list[int], choice: int, index: int, sampling: Sampling) -> int:
        """Return the id at `index`, or die if a rule says so."""
        for wanted, death in self._deaths:
            if index >= death.at and _contains(prompt, wanted):
                death.come()
        emits, digest = self._match(prompt)
        if emits is None:
            seed = sampling.seed if sampling.temperature > 0 else 0
            data = hashlib.blake2b(digest + struct.pack("<QII", seed & (2**64 - 1), choice, index), digest_size=8)
            return self._ids[int.from_bytes(data.digest(), "little") % len(self._ids)]
        ids = emits[choice % len(emits)]
        if index < len(ids):
            return ids[index]
        # Without an EOS the script's last id goes on until max_tokens.
        return self.eos[0] if self.eos else (ids[-1] if ids else self._ids[0])

    def _match(self, prompt: list[int]) -> tuple[list[list[int]] | None, bytes]:
        known = self._found.get(id(prompt))
        if known is not None and known[0] is prompt:
            return known[1], known[2]
        emits = next((emits for wanted, emits in self._rules if _contains(prompt, wanted)), None)
        digest = hashlib.blake2b(struct.pack(f"<{len(prompt)}I", *prompt), digest_size=16).digest()
        self._found[id(prompt)] = (prompt, emits, digest)
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)
        return emits, digest


def _contains(ids: list[int], wanted: list[int]) -> bool:
    size = len(wanted)
    return any(ids[at : at + size] == wanted for at in range(len(ids) - size + 1))


_FIELDS = {
    "vocab_size", "max_context", "eos", "pace_s", "prefill_s_per_token", "block_nbytes", "rules", "default",
    "default_range",
}  # fmt: skip


def from_spec(text: str, *, sleep: Callable[[float], Any] = idle) -> ScriptedRunner:
    """Build a runner from `scripted` (hash of the prompt) or `scripted:/path.json` (rules).

    Raises:
        ValueError: if the text is no such specification, or the file is unreadable or wrong; it names the file.
    """
    kind, _, path = text.partition(":")
    if kind != "scripted":
        raise ValueError(f"{text!r} is not `scripted` or `scripted:/path.json`")
    try:
        spec = json.loads(Path(path).read_text()) if path else {}
        if not isinstance(spec, dict):
            raise ValueError("it is not a JSON object")
        rules = Rules(spec)
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ValueError(f"script {path or 'default'}: {exc}") from exc
    return ScriptedRunner(
        rules,
        block_nbytes=rules.block_nbytes,
        vocab_size=rules.vocab_size,
        max_context=rules.max_context,
        eos_ids=frozenset(rules.eos),
        pace_s=rules.pace_s,
        prefill_pace_s_per_token=rules.prefill_s_per_token,
        sleep=sleep,
    )
