"""What a detokenizer holds per request: text per choice, what the client has acknowledged, how it ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.text import ChoiceText, TextRules, TokenBytes
from schemas import messages as m
from schemas.errors import Cancelled, DeadlineExceeded, HeadraceError, ReplayMismatch, SlowReader
from schemas.items import Ack, ItemBatch, TextItem, frame
from schemas.record import Fence, Record
from schemas.subjects import Ref

RESEND_S = 0.3
STALL_S = 1.0
KEEPALIVE_S = 1.0
# How far a client that grants no window of its own may lag behind, in items per choice.
DEFAULT_WINDOW = 256
MAX_ITEMS_PER_FRAME = 512


@dataclass(slots=True)
class Choice:
    """One choice: its text, every item of it, and how far the client has them."""

    text: ChoiceText
    items: list[TextItem] = field(default_factory=list)
    sent: int = 0
    acked: int = 0
    finish_sent: bool = False

    @property
    def finished(self) -> bool:
        """Whether the last item is known."""
        return self.text.finish_reason is not None


@dataclass(slots=True)
class Session:
    """One request. `source` is the engine that sends its ids."""

    record: Record
    fence: Fence
    choices: list[Choice]
    opened_at: float
    deadline: float  # monotonic
    source: Ref | None = None
    cached_tokens: int = 0
    cached_by: Fence | None = None  # whose account that is: a later try finds what the first one computed
    error: HeadraceError | None = None
    silent: bool = False  # dropped: no terminal is owed
    fenced_off: bool = False  # because it is served elsewhere: that is no end of the request
    ended: bool = False
    window: int = DEFAULT_WINDOW
    first_item_at: float = 0.0
    last_item_at: float = 0.0
    last_frame_at: float = 0.0
    unacked_since: float = 0.0  # the last time that something was sent with nothing unacknowledged, or progress came
    terminal_sent: bool = False
    client_done: bool = False
    finished_acked: bool = False
    engine_closed: bool = True
    next_finished: float = 0.0
    finished_told: int = 0
    no_responder_at: list[float] = field(default_factory=list)
    former: set[Ref] = field(default_factory=set)  # owners that do not know yet that another one has taken over
    former_told_at: float = 0.0
    stall_reported_at: float = 0.0
    orphaned: bool = False  # its owner is gone, and nobody has claimed it
    orphan_at: float = 0.0  # when to report that next
    orphan_tries: int = 0
    traced: bool = False
    waits_since: float = 0.0  # since when items wait for a client that acknowledges none
    slow_at: float = 0.0  # when its client was given up

    @classmethod
    def open(
        cls,
        msg: m.Open,
        *,
        token_bytes: TokenBytes,
        eos_ids: frozenset[int],
        now: float,
        remaining_s: float,
    ) -> Session:
        """Start with nothing received."""
        sampling = msg.record.sampling
        rules = TextRules(tuple(sampling.stop), sampling.max_tokens, sampling.ignore_eos, eos_ids, sampling.min_tokens)
        choices = [Choice(ChoiceText(rules, token_bytes)) for _ in range(msg.record.num_choices)]
        return cls(
            record=msg.record,
            fence=msg.fence,
            choices=choices,
            opened_at=now,
            deadline=now + remaining_s,
            last_item_at=now,
            last_frame_at=now,
            unacked_since=now,
        )

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.record.request_id

    def accept(self, batch: ItemBatch, source: Ref, now: float) -> None:
        """Take the items that are next, drop the ones held already, leave gaps to be repeated.

        An id that differs from the one held under the same index ends the request with `ReplayMismatch`.
        """
        self.source, self.engine_closed = source, False
        if not self.waiting:
            self.waits_since = now
        if batch.cached_tokens is not None:
            if not self.first_item_at:
                self.cached_tokens, self.cached_by = batch.cached_tokens, batch.fence
            elif self.cached_by == batch.fence:  # further prompts of the same try
                self.cached_tokens = max(self.cached_tokens, batch.cached_tokens)
        for choice_no, index, token_id, logprob in batch.items:
            if self.ended or not 0 <= choice_no < len(self.choices):
                continue
            choice = self.choices[choice_no]
            have = len(choice.text.ids)
            if index < have:
                if choice.text.ids[index] != token_id:
                    self.end(ReplayMismatch(f"choice {choice_no} item {index} differs on replay"), now)
                continue
            if index > have or choice.finished:
                continue
            text = choice.text.push(token_id)
            choice.items.append(TextItem(choice_no, index, token_id, text, logprob))
            self.first_item_at = self.first_item_at or now
            self.last_item_at = now
        if all(c.finished for c in self.choices):
            self.end(None, now)

    @property
    def waiting(self) -> bool:
        """Whether there are items that the client has not acknowledged."""
        return any(c.acked < len(c.items) for c in self.choices)

    def give_up_reader(self, limit_s: float, now: float) -> bool:
        """End it if its client has acknowledged nothing for so long although items wait; true if so.

        What the engine computed is of no use then, even if that was all of it.
        """
        if self.slow_at or self.silent or self.client_done or not self.waiting or now - self.waits_since < limit_s:
            return False
        if self.ended and self.terminal_sent:
            self.client_done = True  # its end was told, and no other may be
            return False
        error = SlowReader(f"the client took nothing for {limit_s:g} s although items waited for it")
        self.end(error, now)
        self.error, self.slow_at, self.terminal_sent = error, now, False
        return True

    def end(self, error: HeadraceError | None, now: float, *, silent: bool = False) -> None:
        """Decide the one ending; later ones change nothing."""
        if not self.ended:
            self.ended, self.error, self.silent = True, error, silent
            self.client_done = silent
            self.next_finished = now

    @property
    def close_reason(self) -> str:
        """Why the engine is closed."""
        match self.error:
            case None:
                return "finish"
            case DeadlineExceeded():
                return "expire"
            case SlowReader():
                return "slow_reader"
            case Cancelled():
                return "cancel"
            case _:
                return "error"

    def engine_ack(self) -> Ack:
        """Return what the engine may forget: -1 for a choice that wants nothing more."""
        if self.ended:
            return Ack(self.request_id, self.fence, "done", [], 0)
        nexts = [-1 if c.finished else len(c.text.ids) for c in self.choices]
        return Ack(self.request_id, self.fence, "ok", nexts, 0)

    def take_frame(self, now: float) -> dict[str, Any] | None:
        """Return the next frame within the client's window, or None when there is nothing to send."""
        if self.silent or self.client_done:
            return None
        if not self.terminal_sent and all(c.acked >= c.sent for c in self.choices):
            self.unacked_since = now
        items: list[TextItem] = []
        finish: list[tuple[int, str, int]] = []
        everything = True
        for number, choice in enumerate(self.choices):
            upto = min(len(choice.items), choice.acked + self.window)
            upto = min(upto, choice.sent + MAX_ITEMS_PER_FRAME - len(items))
            if upto > choice.sent:
                items += choice.items[choice.sent : upto]
                choice.sent = upto
            if choice.sent < len(choice.items):
                everything = False
            elif choice.finished and not choice.finish_sent:
                reason = choice.text.finish_reason
                assert reason is not None
                finish.append((number, reason, len(choice.items)))
                choice.finish_sent = True
        terminal = None
        if self.ended and (everything or self.error is not None) and not self.terminal_sent:
            terminal, self.terminal_sent = self.terminal(), True
        if not items and not finish and terminal is None:
            return None
        self.last_frame_at = now
        return frame(self.request_id, self.fence, items=items, finish=finish, terminal=terminal)

    def terminal(self) -> dict[str, Any]:
        """Return the terminal's content: totals, and the error if there is one."""
        out: dict[str, Any] = {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "cached_tokens": self.cached_tokens,
            },
            "items": [len(c.items) for c in self.choices],
        }
        if self.error is not None:
            out["error"] = self.error.info()
        return out

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once."""
        return sum(len(p) for p in self.record.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Items of all choices up to their finish."""
        return sum(len(c.items) for c in self.choices)

    def client_ack(self, status: str, nexts: list[int], window: int, now: float) -> None:
        """Take the client's acknowledgement; a negative `window` leaves the one it granted before.

        A client may be ahead of what is held here: it had another detokenizer before. One that grants nothing still
        gets one item, and again, so that a lost grant cannot stop a stream for good.
        """
        if status == "done":
            self.client_done = True
            return
        for choice, upto in zip(self.choices, nexts, strict=False):
            upto = min(upto, len(choice.items))
            if choice.acked < upto:
                choice.acked = upto
                choice.sent = max(choice.sent, upto)
                self.unacked_since = self.waits_since = now
        if window >= 0:
            self.window = max(1, window)
        self.no_responder_at.clear()

    def rewind(self, now: float) -> bool:
        """Prepare to send again whatever is unacknowledged for `RESEND_S`; returns whether there is any.

        New frames do not put it off: after a lost one a client can use none of them.
        """
        if self.client_done or self.silent or now - self.unacked_since < RESEND_S:
            return False
        behind = [c for c in self.choices if c.acked < c.sent]
        if not behind and not self.terminal_sent:
            return False
        for c in self.choices:
            c.sent, c.finish_sent = min(c.sent, c.acked), False
        self.terminal_sent = False
        self.unacked_since = now
        return True

    def stalled(self, now: float) -> bool:
        """Whether the owner should be told that no ids come; at most once per `STALL_S`."""
        if self.ended or now - max(self.last_item_at, self.stall_reported_at) < STALL_S:
            return False
        self.stall_reported_at = now
        return True

    @property
    def untaken(self) -> bool:
        """Whether it has ended and its client has not acknowledged all of it: if this is lost, it is needed again."""
        return self.ended and not (self.client_done or self.silent or self.slow_at)

    @property
    def settled(self) -> bool:
        """Whether nothing more is owed to anybody."""
        return self.ended and self.client_done and self.finished_acked and self.engine_closed

    def reopen(self, msg: m.Open) -> None:
        """The same request under a higher fence, still here: its ids and text stay.

        A new owner has heard nothing yet, whatever was settled with the one before.
        """
        if msg.fence < self.fence:
            return
        self.fence = msg.fence
        if msg.record.owner != self.record.owner:
            self.former.add(self.record.owner)
            self.former.discard(msg.record.owner)  # who owned it once, and does so again
            self.finished_acked, self.finished_told = False, 0
        self.orphaned = False
        changed = {"owner": msg.record.owner, "backup": msg.record.backup}
        self.record = self.record.model_copy(update=changed)

    def orphan(self, now: float) -> None:
        """The owner is gone: report it until somebody claims the request."""
        if not self.orphaned:
            self.orphaned, self.orphan_at, self.orphan_tries = True, now, 0

    def finished_message(self, wall: float, now: float) -> m.Finished:
        """Return what the owner is told at the end; times travel as Unix seconds, `now` is `wall` on this clock."""
        return m.Finished(
            request_id=self.request_id,
            fence=self.fence,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            finish_reasons=[c.text.finish_reason or "" for c in self.choices],
            error=self.error.info() if self.error else None,
            first_item_at=wall - (now - self.first_item_at) if self.first_item_at else 0.0,
            ended_at=wall,
        )
