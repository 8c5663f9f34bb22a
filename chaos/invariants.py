"""The promises as pure checks over a client's history; each returns what it found wrong, nothing when all is well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chaos.history import Event, by_request

ROUNDING_S = 0.002  # of durations in milliseconds
GRACE_S = 1.0  # promise 1: a terminal comes no later than the deadline plus this


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    invariant: str
    request: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.request or 'system'}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request said in the end: per choice its text and finish reason."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Idle:
    """An engine's load with nothing to do."""

    running: int = 0
    waiting: int = 0
    blocks_in_use: int = 0


def answer(events: Iterable[Event]) -> Answer:
    """Return what one request's events say to a reader: items in order, repeats dropped as a client drops them."""
    texts: dict[int, list[str]] = {}
    next_index: dict[int, int] = {}
    reasons: dict[int, str] = {}
    for event in events:
        choice = int(event.data.get("choice", 0))
        if event.kind == "sent":
            for c in range(int(event.data["choices"])):
                texts.setdefault(c, [])
        elif event.kind == "item":
            index = event.data.get("index")
            if index is None or index == next_index.get(choice, 0):
                texts.setdefault(choice, []).append(str(event.data["text"]))
                next_index[choice] = next_index.get(choice, 0) + 1
        elif event.kind == "finish":
            reasons.setdefault(choice, str(event.data["reason"]))
    order = sorted(texts)
    return Answer(tuple("".join(texts[c]) for c in order), tuple(reasons.get(c, "") for c in order))


def one_ending(events: Iterable[Event]) -> list[Violation]:
    """Every request that was sent and not left has one terminal, at most a second after its deadline.

    Nothing comes after it, and to a terminal without an error belongs one finish for each choice. A native client that
    was itself cut off from the bus then can only be told once it is back: its second begins there. A native client
    names a duration, which runs from when its request is taken: the deadline is what `accepted` says, if it is known.
    """
    out = []
    events = list(events)
    away = [(e.t, e.t + float(e.data["for_s"])) for e in events if e.kind == "away"]
    for request, group in by_request(events).items():
        sent = next((e for e in group if e.kind == "sent"), None)
        if sent is None:
            out.append(Violation("one_ending", request, "has events but was never sent"))
            continue
        left = any(e.kind == "left" for e in group)
        terminals = [e for e in group if e.kind == "terminal"]
        if not terminals:
            if not left:
                out.append(Violation("one_ending", request, "never ended"))
            continue
        if len(terminals) > 1:
            out.append(Violation("one_ending", request, f"ended {len(terminals)} times"))
        end = terminals[0]
        limit = sent.t + float(sent.data["deadline_s"]) + GRACE_S
        taken = next((e for e in group if e.kind == "accepted" and "until" in e.data), None)
        if taken is not None:
            limit = float(taken.data["until"]) + GRACE_S
            if taken.data["until"] > taken.t + float(sent.data["deadline_s"]) + ROUNDING_S:
                out.append(Violation("one_ending", request, "was given more time than it asked for"))
        if sent.data["client"] == "native":
            for gone, back in sorted(away):  # one outage may follow another before its second is over
                if gone < limit <= back + GRACE_S:
                    limit = back + GRACE_S
        if end.t > limit:
            out.append(Violation("one_ending", request, f"ended {end.t - limit:.3f} s too late"))
        late = [e for e in group[group.index(end) + 1 :] if e.kind in ("item", "finish", "accepted")]
        if late:
            out.append(Violation("one_ending", request, f"{late[0].kind} after the terminal"))
        finished = [int(e.data["choice"]) for e in group if e.kind == "finish"]
        if len(set(finished)) != len(finished):
            out.append(Violation("one_ending", request, "a choice finished twice"))
        if end.data.get("error") is None and len(set(finished)) != int(sent.data["choices"]):
            detail = f"{len(set(finished))} of {sent.data['choices']} choices finished"
            out.append(Violation("one_ending", request, detail))
    return out


def no_gap_no_repeat(events: Iterable[Event]) -> list[Violation]:
    """Items of each choice are 0, 1, 2, … up to the total; an index that came before says the same thing again.

    Only histories with item indices can show this; HTTP histories are held to `same_text`. An index below the next
    expected one is a retransmission, which clients drop (that is the protocol), but it must repeat the same id and
    text; an index above it is kept back by nobody, so it must be sent again later.
    """
    out = []
    for request, group in by_request(events).items():
        sent = next((e for e in group if e.kind == "sent"), None)
        if sent is None or not sent.data.get("indexed"):
            continue
        seen: dict[int, list[tuple[int | None, str]]] = {}
        totals: dict[int, int] = {}
        for event in group:
            choice = int(event.data.get("choice", 0))
            if event.kind == "item":
                items = seen.setdefault(choice, [])
                index, what = int(event.data["index"]), (event.data.get("id"), str(event.data["text"]))
                if index == len(items):
                    items.append(what)
                elif index < len(items) and items[index] != what:
                    detail = f"choice {choice} item {index} was {items[index]!r}, then {what!r}"
                    out.append(Violation("repeat", request, detail))
            elif event.kind == "finish" and event.data.get("total") is not None:
                totals[choice] = int(event.data["total"])
        if any(e.kind == "terminal" and e.data.get("error") is None for e in group):
            for choice, total in totals.items():
                have = len(seen.get(choice, []))
                if have < total:
                    out.append(Violation("gap", request, f"choice {choice} has {have} of {total} items"))
                elif have > total:
                    out.append(Violation("repeat", request, f"choice {choice} has {have} items, announced {total}"))
    return out


def classify(text: str, reference: str) -> str:
    """Say how a text differs: `same`, `gap` (a run of the other is missing), `repeat` (one is doubled), `differs`."""
    if text == reference:
        return "same"
    at = 0
    while at < min(len(text), len(reference)) and text[at] == reference[at]:
        at += 1
    extra = len(text) - len(reference)
    if extra < 0 and reference[at - extra :] == text[at:]:
        return "gap"
    if extra > 0 and text[at + extra :] == reference[at:]:
        return "repeat"
    return "differs"


def same_text(events: Iterable[Event], references: Mapping[str, Answer]) -> list[Violation]:
    """Every request that ended well says what the undisturbed run of the same request said, reasons included.

    A request that ended in an error has shown a prefix of it.
    """
    out = []
    for request, group in by_request(events).items():
        sent = next((e for e in group if e.kind == "sent"), None)
        end = next((e for e in group if e.kind == "terminal"), None)
        if sent is None or end is None:
            continue
        reference = references.get(str(sent.data["key"]))
        if reference is None:
            out.append(Violation("same_text", request, f"no reference {sent.data['key']!r}"))
            continue
        got = answer(group)
        if end.data.get("error") is not None:
            for choice, (text, whole) in enumerate(zip(got.texts, reference.texts, strict=False)):
                if not whole.startswith(text):
                    out.append(Violation("same_text", request, f"choice {choice} is no prefix of its reference"))
            continue
        if len(got.texts) != len(reference.texts):
            out.append(Violation("same_text", request, f"{len(got.texts)} choices, reference {len(reference.texts)}"))
            continue
        for choice, (text, whole) in enumerate(zip(got.texts, reference.texts, strict=True)):
            how = classify(text, whole)
            if how != "same":
                detail = f"choice {choice} {how}: …{text[-60:]!r} against …{whole[-60:]!r}"
                out.append(Violation("same_text", request, detail))
        if got.reasons != reference.reasons:
            out.append(Violation("same_text", request, f"reasons {got.reasons} against {reference.reasons}"))
    return out


def work_stops(
    events: Iterable[Event], baseline: Mapping[str, Idle], *, within_s: float = 2.0
) -> list[Violation]:
    """After the last request of a quiet moment ended or left, every engine is back at its baseline in time.

    A moment is quiet until the next `sent`. Engines are those of `baseline`; one that says nothing in the moment is
    a violation too, since silence proves nothing.
    """
    out: list[Violation] = []
    ordered = sorted(events, key=lambda e: e.t)
    open_requests: set[str] = set()
    for at, event in enumerate(ordered):
        if event.kind == "sent":
            open_requests.add(event.request)
        elif event.kind in ("left", "terminal"):
            open_requests.discard(event.request)
            if not open_requests:
                out.extend(_settles(ordered[at:], event, baseline, within_s))
    return out


def _settles(after: list[Event], end: Event, baseline: Mapping[str, Idle], within_s: float) -> list[Violation]:
    quiet: list[Event] = []
    for event in after:
        if event.kind == "sent":
            break
        if event.kind == "load":
            quiet.append(event)
    if not quiet or quiet[-1].t < end.t + within_s:
        return []  # the next request came before the bound: this moment shows nothing
    out = []
    for actor, idle in baseline.items():
        loads = [e for e in quiet if e.data["actor"] == actor and e.t >= end.t]
        last = [e for e in loads if e.t >= end.t + within_s] or loads[-1:]
        if not last:
            out.append(Violation("work_stops", end.request, f"{actor} said nothing"))
            continue
        now = Idle(*(int(last[0].data[k]) for k in ("running", "waiting", "blocks_in_use")))
        if now != idle:
            out.append(Violation("work_stops", end.request, f"{actor} is at {now}, baseline {idle}"))
    return out


def bounded(events: Iterable[Event], caps: Mapping[str, float]) -> list[Violation]:
    """No load snapshot exceeds the cap on any of the named figures, each of which is a count or a size."""
    out = []
    for event in events:
        if event.kind != "load":
            continue
        for name, cap in caps.items():
            value = event.data.get(name)
            if value is not None and float(value) > cap:
                out.append(Violation("bounded", "", f"{event.data.get('actor')} {name} is {value}, cap {cap}"))
    return out


def longest_gap_s(events: Iterable[Event]) -> float:
    """Return the longest silence between two new items of any one request, in seconds; 0 without two items.

    Repeats are not new: to a reader they are silence.
    """
    longest = 0.0
    for group in by_request(events).values():
        times: list[float] = []
        next_index: dict[int, int] = {}
        for event in group:
            if event.kind == "item":
                choice, index = int(event.data["choice"]), event.data["index"]
                if index is None or index == next_index.get(choice, 0):
                    next_index[choice] = next_index.get(choice, 0) + 1
                    times.append(event.t)
        longest = max([longest, *(b - a for a, b in zip(times, times[1:], strict=False))])
    return longest
