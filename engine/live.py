"""A sequence inside the core, with what the core alone knows of it; and what a step reports."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.plan import Row, Sampled
from engine.prefills import Prefill
from engine.sequence import Key, Phase, Sequence
from kvstore.block import BLOCK_TOKENS, answer_start, chain_hashes, sequence_hashes
from schemas.errors import BadRequest, ContextTooLong
from schemas.messages import BlockRef


class NeverFits(ContextTooLong):
    """Raised when a sequence can never run here: context window or pool are too small for it. Travels as its parent."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"{num_tokens} tokens and one to answer exceed the {limit} tokens that this engine can hold", param="prompt"
        )
        self.num_tokens = num_tokens
        self.limit = limit

    def info(self) -> dict[str, object]:
        """Return the travelling form under a name that every node knows."""
        return {**super().info(), "kind": ContextTooLong.__name__}


class Spent(NamedTuple):
    """Work that was done for a sequence, in tokens."""

    prefill: int = 0
    decode: int = 0

    def plus(self, other: Spent) -> Spent:
        """Return both together."""
        return Spent(self.prefill + other.prefill, self.decode + other.decode)


class Live:
    """A sequence, its ids in one growing list, and its hash chain."""

    __slots__ = (
        "came", "context", "given", "hashes", "paced", "place", "prompt_hashes", "queued", "root", "seq", "started",
        "tag",
    )  # fmt: skip

    def __init__(self, seq: Sequence, root: bytes, place: tuple[float, int]) -> None:
        self.seq = seq
        self.root = root
        self.place = place  # where it stands in a line: its rank, then the order of coming
        self.tag = (0.0, 0)  # when it started: its tenant's counter, and the number of the tenant's start before
        self.given = len(seq.outputs)  # ids that it came with
        self.came = 0  # tokens that another engine computed
        self.started: float | None = None  # when its prompt was begun, monotonic seconds
        self.paced: tuple[float, int] | None = None  # since when it decodes, and how many ids it had then
        self.queued = 0  # tokens that were to be computed when it was last put into the queue
        self.context = seq.tokens  # shared with rows; grows in step with `seq.outputs`
        # Of full blocks, as far as they were needed.
        self.hashes = sequence_hashes(self.context, len(seq.prompt_ids), root=root, warm=seq.warm)
        self.prompt_hashes = len(seq.prompt_ids) // BLOCK_TOKENS

    @property
    def cacheable(self) -> list[bytes]:
        """Hashes that may be looked up: at least one token is always computed, or there are no logits."""
        return self.hashes[: (len(self.context) - 1) // BLOCK_TOKENS]

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be computed."""
        return self.seq.num_computed < len(self.seq.prompt_ids)

    @property
    def spent(self) -> Spent:
        """What was computed here for it: tokens that it came with, and ids that were chosen since."""
        seq = self.seq
        whole = len(seq.prompt_ids) + self.given - (self.came > 0)  # of one that came running the last id is decoded
        prefill = max(0, min(seq.num_computed, whole) - max(seq.num_cached, self.came))
        return Spent(prefill, len(seq.outputs) - self.given)

    def parent(self, index: int) -> bytes:
        """Return the hash before block `index`."""
        return self.hashes[index - 1] if index else self.root

    def extend_hashes(self, num_blocks: int) -> None:
        """Hash further blocks so that `num_blocks` are known."""
        have = len(self.hashes)
        if num_blocks > have:
            ids = self.context[have * BLOCK_TOKENS : num_blocks * BLOCK_TOKENS]
            start = self.parent(have)
            if self.seq.warm and have == self.prompt_hashes:
                start = answer_start(start)
            self.hashes += chain_hashes(ids, root=self.root, start=start)

    def restart(self) -> None:
        """Back to the queue: everything is computed again."""
        self.seq.phase = Phase.WAITING
        self.seq.blocks = []
        self.seq.num_computed = self.seq.num_hashed = 0


def check_sequence(seq: Sequence, vocab_size: int, max_context: int) -> None:
    """Refuse what could never be computed.

    Raises:
        BadRequest: if there is no prompt, or an id is outside the vocabulary.
        NeverFits: if its ids exceed the context, or fill it and there is no answer yet.
    """
    if not seq.prompt_ids:
        raise BadRequest("a prompt has at least one token", param="prompt")
    # With outputs, a full context is a finished sequence.
    if seq.num_tokens > max_context or (seq.num_tokens == max_context and not seq.outputs):
        raise NeverFits(seq.num_tokens, max_context)
    for ids in (seq.prompt_ids, seq.outputs):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise BadRequest(f"a token id is outside the vocabulary of {vocab_size}", param="prompt")


def end_reason(seq: Sequence, eos_ids: frozenset[int], max_context: int) -> str | None:
    """Return why nothing follows the last output, if so."""
    if not seq.outputs:
        return None
    if seq.outputs[-1] in eos_ids and not seq.sampling.ignore_eos:
        return "stop"
    full = len(seq.outputs) >= seq.sampling.max_tokens or seq.num_tokens >= max_context
    return "length" if full else None


def make_row(live: Live, count: int, draft: Listing[int] = ()) -> Row:
    """Return the part of a step that computes `count` more tokens of a sequence, and guessed ids behind them."""
    seq, context = live.seq, live.context
    start, first = seq.num_computed, seq.key.choice
    end = start + count
    return Row(
        key=seq.key,
        ids=context[start:end] + list(draft),
        start=start,
        prompt_len=len(seq.prompt_ids),
        blocks=seq.blocks,
        sample=end == len(context),
        index=len(seq.outputs),
        choices=tuple(range(first, first + seq.num_first)) if seq.handoff else (first,),
        sampling=seq.sampling,
        context=context,
        draft=list(draft),
    )


def check_ids(row: Row, got: Listing[Sampled]) -> str | None:
    """Return what is wrong with the ids that a runner chose for a row, if anything."""
    if not row.draft:
        wanted = len(row.choices) if row.sample else 0
        return None if len(got) == wanted else f"the runner chose {len(got)} ids where {wanted} were wanted"
    if not 1 <= len(got) <= row.num_wanted:
        return f"the runner chose {len(got)} ids where 1 to {row.num_wanted} were wanted"
    if [one.index for one in got] != list(range(row.index, row.index + len(got))):
        return "the runner chose ids out of turn"
    if [one.id for one in got[:-1]] != row.draft[: len(got) - 1]:
        return "the runner went on behind a wrong guess"
    return None


class Outcome(NamedTuple):
    """What became of the sequences of one step."""

    items: list[Sampled]
    held: list[Live]
    ended: list[tuple[Live, str]]
    failed: list[tuple[Live, str]]


class Candidate(NamedTuple):
    """A full prompt block that was computed here and may be stored; `key` decides in which store."""

    hash: bytes
    parent: bytes
    block: int
    tenant: str = "default"
    key: bytes = b""


class Progress(NamedTuple):
    """How far a sequence is: blocks in order, tokens computed, tokens in all, and whether the next step decodes it."""

    refs: list[BlockRef]
    num_computed: int
    num_tokens: int
    decoding: bool


class HeldBlocks(NamedTuple):
    """What a prompt that waits for its hand-off holds."""

    refs: list[BlockRef]
    num_tokens: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        items: ids for running sequences, in the order of the batch.
        held: prompts whose blocks now wait for their hand-off, with the first id of each choice.
        held_blocks: the blocks of those.
        ended: sequences of which no more is computed: `length`, `stop` or `expired`; they are gone from the engine.
        failed: sequences that went wrong, with a message; they are gone as well.
        cached: tokens found in a tier, for sequences that are reported for the first time.
        prefills: what the prompts that this step completed took to compute.
        late: sequences that were refused with nothing computed, and seconds until the queue is shorter; they are gone.
        expired: what had been computed for those that expired.
        num_tokens: tokens computed.
        num_rows: sequences that took part.
        duration_s: time spent.
        preempted: sequences that went back to the queue.
        crash: why the whole step failed, if it did.
    """

    items: list[Sampled] = field(default_factory=list)
    held: list[tuple[Key, list[Sampled]]] = field(default_factory=list)
    held_blocks: dict[Key, HeldBlocks] = field(default_factory=dict)
    ended: list[tuple[Key, str]] = field(default_factory=list)
    failed: list[tuple[Key, str]] = field(default_factory=list)
    cached: dict[Key, int] = field(default_factory=dict)
    prefills: list[Prefill] = field(default_factory=list)
    late: list[tuple[Key, float]] = field(default_factory=list)
    expired: Spent = Spent()
    num_tokens: int = 0
    num_rows: int = 0
    duration_s: float = 0.0
    preempted: int = 0
    crash: str | None = None

    @property
    def eventful(self) -> bool:
        """Whether anybody needs to hear of it."""
        return bool(self.items or self.held or self.ended or self.failed or self.late)
