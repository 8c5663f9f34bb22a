"""The pace that running sequences were promised: how long the next step may be, and how many may run. Pure.

Promised is the mean time between a sequence's tokens, so what counts is what it has had so far, not each step: one
whose steps were short may wait for a long one, and one that has waited long gets short ones until it has caught up.
What a step really takes, and what passes between steps, is in it by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.costs import STRETCH, StepCosts, Work
from engine.live import Live

SHARE = 0.85  # of a promised pace that is planned with: what steps really take varies
CREDIT = 4.0  # tokens' time that a sequence may owe from its start on, to be made up later,
CREDIT_SHARE = 0.1  # and no more than this share of the tokens that it may get
SAVED = 8.0  # most tokens' time that one step may use of what was saved
LOST = 16.0  # tokens' time that nobody makes up any more: the others do not wait for it
CHUNK = 256  # tokens at once, where a prompt's cost is estimated
MARGIN = 2.0  # mean deviations, beyond what usually passes from a prompt's start to its first id
_MEMORY = 1 / 16  # weight of each newest sequence in what is usual


class Pace:
    """Keeps what sequences were promised, by what they had."""

    def __init__(self, costs: StepCosts, promised_s: Mapping[int, float] | None = None) -> None:
        """Start with nothing usual.

        Args:
            costs: what steps take.
            promised_s: by priority, the longest mean time between tokens; absent: no such promise.
        """
        self._costs = costs
        self._promised_s = dict(promised_s or {})
        self._prompt_s = 0.0  # what a prompt usually takes to compute
        self._tokens = 0.0  # and how many tokens a sequence usually gets
        # From a prompt's start to its first id, over what its tokens cost alone; and how far off that is.
        self._first = self._first_off = 0.0

    @property
    def promised(self) -> bool:
        """Whether anybody is promised a pace."""
        return bool(self._promised_s)

    # --- what is learnt ----------------------------------------------------------------------------

    def computed(self, seconds: float) -> None:
        """A prompt took so long to compute."""
        self._prompt_s = _mean(self._prompt_s, seconds)

    def ended(self, live: Live) -> None:
        """A sequence has all its tokens."""
        self._tokens = _mean(self._tokens, float(len(live.seq.outputs)))

    def began(self, live: Live, now: float) -> None:
        """A sequence gets its next ids from here on one by one: the first has come, or it came with some."""
        live.paced = now, len(live.seq.outputs)
        seq = live.seq
        if live.started is not None and seq.num_preempted == 0 and not live.given:
            alone_s = self._alone_s(len(seq.prompt_ids) - seq.num_cached)
            if alone_s > 0.0:
                newest = max(0.0, now - live.started) / alone_s
                off = abs(newest - self._first) if self._first else newest / 4
                self._first, self._first_off = _mean(self._first, newest), _mean(self._first_off, off)

    # --- what follows ------------------------------------------------------------------------------

    def first_token_s(self, tokens: int) -> float:
        """Return what passes at most, nearly always, from a prompt's start to its first id; `tokens` are computed."""
        return (self._first + MARGIN * self._first_off) * self._alone_s(tokens)

    def _alone_s(self, tokens: int) -> float:
        """Return what so many tokens of a prompt take, nothing beside them; 0 before anything is known."""
        return self._costs.prefill_s(max(1, tokens), CHUNK) or 0.0

    def step_s(self, running: Iterable[Live], now: float) -> float | None:
        """Return how long the next step may be for the sequences that decode; None: as long as one likes.

        A pace that not even one sequence alone could keep is none.
        """
        if not self._promised_s:
            return None
        running = list(running)
        if (least := self._least(running)) is None or self._shortest_s(running) > least:
            return None
        allowed = [one for live in running if (one := self._allowed_s(live, now)) is not None]
        return max(0.0, min(allowed)) if allowed else None

    def _allowed_s(self, live: Live, now: float) -> float | None:
        promised = self._promised_s.get(live.seq.priority)
        if promised is None or live.paced is None:
            return None
        pace_s, (since, count), seq = SHARE * promised, live.paced, live.seq
        saved_s = pace_s * (len(seq.outputs) - count) - (now - since)
        if saved_s < -LOST * pace_s:
            return None
        credit = min(CREDIT, CREDIT_SHARE * (seq.sampling.max_tokens - count))
        return min(saved_s + (1.0 + credit) * pace_s, (1.0 + SAVED) * pace_s)

    def most_running(self, running: Iterable[Live], limit: int) -> int:
        """Return how many may run at once, at most `limit`, and one in any case.

        As many as decode within the promised pace with the prompts of those who come in the place of those who end: of
        m that run, each sees m - 1 others' prompts while it gets its tokens. Where not even one alone is so quick there
        is no sense in serving one after another: then as many as decode in `STRETCH` times its step.
        """
        if not self._promised_s or not self._costs.known:
            return limit
        running = list(running)
        if (least := self._least(running)) is None:
            return limit
        share_s = self._prompt_s / max(1.0, self._tokens)
        if (shortest_s := self._shortest_s(running)) > least:
            least, share_s = STRETCH * shortest_s, 0.0
        context = sum(live.seq.num_computed + 1 for live in running) / len(running)
        low, high = 1, limit  # the most of which a step is short enough
        while low < high:
            middle = (low + high + 1) // 2
            took = self._costs.predict(Work(middle, middle * context))
            fits = took is not None and took <= least and took + (middle - 1) * share_s <= least / SHARE
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _least(self, running: Iterable[Live]) -> float | None:
        promised = (self._promised_s.get(live.seq.priority) for live in running)
        least = min((pace for pace in promised if pace is not None), default=None)
        return None if least is None else SHARE * least

    def _shortest_s(self, running: list[Live]) -> float:
        """Return what a step takes in which one of those who run decodes alone; 0 before anything is known."""
        context = sum(live.seq.num_computed + 1 for live in running) / max(1, len(running))
        return self._costs.predict(Work(1, context)) or 0.0


def _mean(before: float, newest: float) -> float:
    return newest if before == 0.0 else before + _MEMORY * (newest - before)
