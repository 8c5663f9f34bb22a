"""What an engine's actor holds per request: its ids on their way to a detokenizer, and its hand-offs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from actors.poison import alone_until
from engine.live import HeldBlocks, Spent
from engine.plan import Sampled
from engine.sequence import Key, Sequence
from schemas import messages as m
from schemas.errors import HeadraceError
from schemas.items import Item, ItemBatch
from schemas.record import Fence, Record
from schemas.subjects import Ref

RESEND_S = 0.3
ASK_END_S = 1.0
FORGOTTEN_S = 2.0
WAITING_S = 5.0
MAX_ITEMS_PER_MESSAGE = 2048
CLASSES = ("interactive", "agent", "batch")  # the first comes first


@dataclass(slots=True)
class Part:
    """One hand-off: a prompt with all its choices, or one resumed choice; seen from either side."""

    number: int
    choices: list[int]
    key: Key
    num_tokens: int
    # source
    reserved: m.Reserved | None = None
    held: list[Sampled] | None = None
    held_blocks: HeldBlocks | None = None
    transfer: Ref | None = None  # who moves it: nobody else ever may
    # destination
    source: Ref | None = None
    blocks: list[int] | None = None
    refs: list[m.BlockRef] | None = None
    pending: bool = False  # a command about it is with the engine
    activated: bool = False
    next_send: float = 0.0


@dataclass(slots=True)
class Work:
    """One request in one engine.

    `local` runs it whole, `source` computes prompts for another engine, `destination` continues what arrives.
    """

    record: Record
    fence: Fence
    detok: Ref
    owner: Ref
    role: Literal["local", "source", "destination"]
    ids: list[list[int]]
    decode: Ref | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    num_parts: int = 0
    acked: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    cached: dict[int, int] = field(default_factory=dict)  # by prompt: its tokens that were not computed
    began: float = 0.0  # Unix seconds
    unacked_since: float = 0.0  # the last time that something was sent with nothing unacknowledged, or progress came
    error: HeadraceError | None = None
    error_at: float = 0.0
    orphaned: bool = False  # its owner is gone, and nobody has claimed it
    orphan_at: float = 0.0  # when to report that next, or to look for it
    orphan_tries: int = 0
    alone_since: float = 0.0  # since when its detokenizer is gone, or its hand-off is waited for
    last_word: bool = False  # its client was told of the deadline from here
    counted: bool = False  # its sequences show in the engine's load
    late_at: float = 0.0  # as in `Dispatch`
    given: list[int] = field(default_factory=list)  # ids that each choice came with

    def __post_init__(self) -> None:
        self.given = [len(ids) for ids in self.ids]
        # Ids that came with the dispatch are sent again too: the detokenizer may be a new one, and checks the others.
        self.acked = [0] * len(self.ids)
        self.sent = [0] * len(self.ids)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.record.request_id

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were found in a tier, each prompt counted once; transferred ones do not count."""
        return sum(self.cached.values())

    def found(self, choice: int, tokens: int) -> None:
        """A choice's prompt is complete; the first of its choices says how much of it was found."""
        self.cached.setdefault(choice // self.record.n, tokens)

    @property
    def started(self) -> bool:
        """Whether this engine makes, or has made, its items."""
        if self.role == "destination":
            return len(self.parts) == self.num_parts and all(p.activated for p in self.parts.values())
        return self.role == "local"

    def job(self, part: Part) -> str:
        """Return the name of a part's transfer; it is also the writer that its blocks may wait for."""
        return f"{self.request_id}.{part.number}.{self.fence.label}"

    def spent_on_ended(self) -> Spent:
        """What was computed here for choices that the engine has brought to their ends."""
        out = Spent()
        for choice in self.ends:
            first = choice % self.record.n == 0  # the choices of a prompt share its blocks
            prompt = len(self.record.prompt_ids[choice // self.record.n]) - self.cached.get(choice // self.record.n, 0)
            here = first and self.role != "destination"
            out = out.plus(Spent(prompt if here else 0, len(self.ids[choice]) - self.given[choice]))
        return out

    @property
    def brought(self) -> int:
        """Tokens of its prompts that another engine computed and handed over to this one."""
        if self.role != "destination":
            return 0
        prompts = {choice // self.record.n for part in self.parts.values() if part.activated for choice in part.choices}
        return sum(len(self.record.prompt_ids[number]) - self.cached.get(number, 0) for number in prompts)

    def append(self, item: Sampled) -> bool:
        """Take an engine's next id; false if it is not the next one."""
        ids = self.ids[item.choice]
        if item.index != len(ids):
            return False
        ids.append(item.id)
        return True

    def sequence(self, choice: int, outputs: list[int], arrival: float, *, num_first: int = 0) -> Sequence:
        """Return a choice as the engine's sequence; with `num_first` it is a prompt to be handed off."""
        record = self.record
        return Sequence(
            key=Key(record.request_id, choice),
            prompt_ids=record.prompt_ids[choice // record.n],
            sampling=record.sampling,
            outputs=list(outputs),
            handoff=num_first > 0,
            num_first=max(1, num_first),
            salt=salt_of(record),
            tenant=record.tenant,
            warm=record.warm,
            deadline=record.deadline,
            arrival=arrival,
            priority=CLASSES.index(record.request_class),
            # Of several choices one may have ended before another one starts.
            late_at=self.late_at if record.num_choices == 1 and not outputs else 0.0,
            alone_until=alone_until(record.strikes, len(outputs)),
        )

    def keys(self) -> list[Key]:
        """All sequences that the engine may hold of it."""
        if self.role == "local":
            return [Key(self.request_id, c) for c in range(len(self.ids))]
        keys = [p.key for p in self.parts.values()]
        if self.role == "destination":
            keys += [Key(self.request_id, c) for p in self.parts.values() for c in p.choices[1:]]
        return keys

    def rest(self) -> list[tuple[int, list[int]]]:
        """Return the ids of choices that no part has, because they are complete."""
        parted = {c for part in self.parts.values() for c in part.choices}
        return [(c, list(ids)) for c, ids in enumerate(self.ids) if ids and c not in parted]

    def orphan(self, now: float) -> None:
        """The owner is gone: report it until somebody claims the request, or closes it here."""
        self.orphaned, self.orphan_at, self.orphan_tries = True, now, 0

    def forgotten(self, detok_up: bool, now: float) -> bool:
        """Whether the owner is to be asked, who would have said something: was this engine away when it did?

        That is when the detokenizer has been gone for `FORGOTTEN_S`, or a hand-off has not come for `WAITING_S`.
        """
        waits = self.role == "destination" and not self.started
        if detok_up and not waits:
            self.alone_since = 0.0
            return False
        self.alone_since = self.alone_since or now
        if now - self.alone_since < (WAITING_S if detok_up else FORGOTTEN_S):
            return False
        if detok_up:
            self.alone_since = now  # it may wait rightly, for a long prompt: asked again as long after
        return True

    def redirect(self, detok: Ref, fence: Fence) -> None:
        """Send everything again, from index 0, if the detokenizer is another one."""
        self.fence = fence
        self.orphaned = False
        if detok != self.detok:
            self.detok = detok
            self.acked = [0] * len(self.ids)
            self.sent = [0] * len(self.ids)
            self.unwanted.clear()

    def rewind(self, now: float) -> bool:
        """Prepare to repeat what is unacknowledged for `RESEND_S`; returns whether there is any.

        New items do not put it off: after a lost message the detokenizer can use none of them.
        """
        if now - self.unacked_since < RESEND_S:
            return False
        behind = self._behind
        for choice in behind:
            self.sent[choice] = self.acked[choice]
        return bool(behind) or self._ask_end(now)

    def _ask_end(self, now: float) -> bool:
        """Send the last id once more when nobody has closed what is complete: the word may have been lost."""
        whole = all(c in self.ends or c in self.unwanted for c in range(len(self.ids)))
        if not whole or not self.ids or not self.ids[0] or now - self.unacked_since < ASK_END_S:
            return False
        self.unwanted.discard(0)
        self.sent[0] = len(self.ids[0]) - 1
        return True

    @property
    def _behind(self) -> list[int]:
        return [c for c, n in enumerate(self.acked) if c not in self.unwanted and n < self.sent[c]]

    def take(self, now: float) -> Iterator[ItemBatch]:
        """Yield what has not been sent, in batches that fit one message."""
        if not self._behind:
            self.unacked_since = now
        items: list[Item] = []
        ends: list[tuple[int, str]] = []
        for choice, ids in enumerate(self.ids):
            if choice in self.unwanted:
                continue
            for index in range(self.sent[choice], len(ids)):
                items.append(Item(choice, index, ids[index], None))
            if len(ids) > self.sent[choice] and choice in self.ends:
                ends.append((choice, self.ends[choice]))
            self.sent[choice] = len(ids)
        if not items:
            return
        for start in range(0, len(items), MAX_ITEMS_PER_MESSAGE):
            chunk = items[start : start + MAX_ITEMS_PER_MESSAGE]
            last = start + MAX_ITEMS_PER_MESSAGE >= len(items)
            yield ItemBatch(self.request_id, self.fence, chunk, self.cached_tokens, ends if last else [])

    def acknowledge(self, nexts: list[int], now: float) -> list[int]:
        """Take the detokenizer's acknowledgement; returns the choices of which it wants no more.

        One that acknowledges less than before has opened the request anew, with nothing: it gets the rest again.
        """
        dropped = []
        for choice, upto in enumerate(nexts[: len(self.ids)]):
            if upto < 0:
                if choice not in self.unwanted:
                    self.unwanted.add(choice)
                    dropped.append(choice)
                continue
            upto = min(upto, len(self.ids[choice]))
            if upto < self.acked[choice] or choice in self.unwanted:
                self.unwanted.discard(choice)
                self.acked[choice] = upto  # what was sent is behind now, and repeated
            elif self.acked[choice] < upto:
                self.acked[choice] = upto
                self.sent[choice] = max(self.sent[choice], upto)
                self.unacked_since = now
        return dropped


def salt_of(record: Record) -> str:
    """Return what keeps one tenant's blocks from another's; the two fields cannot run together."""
    return salt_text(record.tenant, record.cache_salt)


def salt_text(tenant: str, cache_salt: str) -> str:
    """Return the same for a request that is none."""
    return f"{len(tenant)}:{tenant}:{cache_salt}"


def make_parts(record: Record, outputs: list[list[int]], finished: list[int]) -> list[Part]:
    """Cut a request into hand-offs: by prompt at first, by choice when some have ids already."""
    live = [c for c in range(record.num_choices) if c not in finished]
    if any(outputs):
        groups = [[c] for c in live]
    else:
        groups = [list(range(p * record.n, (p + 1) * record.n)) for p in range(len(record.prompt_ids))]
    return [
        Part(
            number=number,
            choices=choices,
            key=Key(record.request_id, choices[0]),
            num_tokens=len(record.prompt_ids[choices[0] // record.n]) + len(outputs[choices[0]]),
        )
        for number, choices in enumerate(groups)
    ]
