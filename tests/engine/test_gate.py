"""The gate of speculation, on a simulated engine: it must gain where guesses are right, and never lose much."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import StepCosts, Work, run_work
from engine.sequence import Key
from engine.speculation.gate import FIRST_PURSE_S, MOST_ROWS, Candidate, Gate


@dataclass
class Machine:
    """What a step of so many tokens takes, in seconds: weights are read once, then each row costs."""

    fixed_s: float
    row_s: float
    kink: int = 0  # the first rows are free up to here: a memory-bound machine

    def seconds(self, work: Work) -> float:
        return self.fixed_s + self.row_s * max(0, work.tokens - self.kink)


@dataclass
class Cliff(Machine):
    """One row more than its tile costs a tile more."""

    tile: int = 16

    def seconds(self, work: Work) -> float:
        return self.fixed_s + self.row_s * self.tile * -(-work.tokens // self.tile)


CLIFF = Cliff(0.002, 0.001)
SLOPED = Machine(0.008, 0.0008)
FREE = Machine(0.01, 0.0008, kink=8)
STEEP = Machine(0.001, 0.003)


def simulate(
    machine: Machine, rows: int, chance: float, *, steps: int = 1500, noise: float = 0.1, life: int = 200, seed: int = 1
) -> tuple[float, float]:
    """Run sequences that end after `life` ids and are replaced; returns ids per second with and without guesses."""
    rng, costs = random.Random(seed), StepCosts()
    gate = Gate(costs, 8)
    for _ in range(3):
        costs.observe(run_work(0, 256), machine.seconds(Work(256, 0)))
    lengths = {Key(f"s{n}", 0): rng.randint(0, life) for n in range(rows)}
    base = Work(rows, rows * 200)
    seconds, ids, number = 0.0, 0, rows
    for _ in range(steps):
        asked = gate.lengths([Candidate(key, 8) for key in lengths], base)
        total = sum(asked.values())
        work = base.plus(Work(total, total * 200))
        took = machine.seconds(work)
        measured = took * (1 + noise * rng.uniform(-1, 1))
        costs.observe(work, measured)
        guessed = []
        for key, count in asked.items():
            hits = 0
            while hits < count and rng.random() < chance:
                hits += 1
            guessed.append((key, count, hits))
            lengths[key] += hits
            ids += hits
        gate.settle(guessed, base, Work(total, total * 200), measured, 0.0)
        gate.skipped([key for key in lengths if key not in asked])
        for key in list(lengths):
            lengths[key] += 1
            ids += 1
            if lengths[key] >= life:
                del lengths[key]
                gate.forget(key)
                lengths[Key(f"s{number}", 0)] = 0
                number += 1
        seconds += took
    return ids / seconds, rows / machine.seconds(base)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SLOPED, FREE, STEEP, CLIFF], ids=["sloped", "free", "steep", "cliff"])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.98])
def test_it_never_costs_more_than_two_percent(machine: Machine, rows: int, chance: float) -> None:
    """Whatever the machine, the load and the chance of a guess."""
    with_guesses, without = simulate(machine, rows, chance)

    assert with_guesses >= 0.98 * without


@pytest.mark.parametrize(
    ("machine", "rows", "chance", "gain"),
    [(FREE, 1, 0.8, 2.5), (SLOPED, 1, 0.8, 1.8), (SLOPED, 4, 0.9, 1.4), (FREE, 1, 0.3, 1.3)],
)
def test_it_gains_where_guesses_are_right(machine: Machine, rows: int, chance: float, gain: float) -> None:
    """Few streams and good guesses: more ids per second, by a clear factor."""
    with_guesses, without = simulate(machine, rows, chance, steps=1500)

    assert with_guesses >= gain * without


def test_one_bad_sequence_does_not_spoil_a_good_one() -> None:
    """Lengths follow each sequence's own hits."""
    costs = StepCosts()
    for tokens in (1, 2, 4, 8, 10, 16, 256):
        costs.observe(Work(tokens, 0), SLOPED.seconds(Work(tokens, 0)))
    gate, good, bad = Gate(costs, 8), Key("good", 0), Key("bad", 0)
    gate.purse_s = 1.0
    for _ in range(20):
        gate.settle([(good, 4, 4), (bad, 4, 0)], Work(2, 400), Work(8, 1600), 0.015, 0.0)

    lengths = gate.lengths([Candidate(good, 8), Candidate(bad, 8)], Work(2, 400))

    assert lengths[good] >= 4 and lengths.get(bad, 0) <= 1
    assert gate.chance(good) > 0.8 > 0.2 > gate.chance(bad)


def test_an_empty_purse_ends_all_guessing_until_it_fills() -> None:
    """Losses are paid for out of a hundredth of the time, and hope does not overdraw it."""
    costs = StepCosts()
    for tokens in (1, 9, 256):
        costs.observe(Work(tokens, 0), SLOPED.seconds(Work(tokens, 0)))
    gate, key = Gate(costs, 8), Key("a", 0)
    candidates, base = [Candidate(key, 8)], Work(1, 200)
    assert gate.lengths(candidates, base)
    gate.settle([(key, 8, 0)], base, Work(8, 1600), 0.014, 10 * FIRST_PURSE_S)

    assert gate.lengths(candidates, base) == {}
    for _ in range(10_000):
        gate.settle([], base, Work(0, 0), 0.0088, 0.0)
        gate.skipped([key])
    assert gate.lengths(candidates, base)


def test_a_sequence_without_a_guess_is_not_asked_at_every_step() -> None:
    """Where nothing is found, asking again waits as after a probe."""
    costs = StepCosts()
    for tokens in (1, 9, 256):
        costs.observe(Work(tokens, 0), STEEP.seconds(Work(tokens, 0)))
    gate, key, asked = Gate(costs, 8), Key("a", 0), 0
    gate._hits, gate._misses = 0.0, 10.0
    for _ in range(80):
        if gate.lengths([Candidate(key, 8)], Work(1, 200)):
            asked += 1
            gate.nothing([key])
        gate.skipped([key])

    assert 5 <= asked <= 12


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-5, 1.0)), max_size=20),
    st.lists(st.integers(0, 8), max_size=20),
    st.integers(1, 8),
)
def test_lengths_are_within_their_limits(history: list[tuple[int, float]], limits: list[int], most: int) -> None:
    """Never more than a sequence may guess, whatever was measured."""
    costs = StepCosts()
    for tokens, seconds in history:
        costs.observe(Work(tokens, tokens * 10), seconds)
    gate = Gate(costs, most)
    candidates = [Candidate(Key(str(n), 0), limit) for n, limit in enumerate(limits)]

    lengths = gate.lengths(candidates, Work(max(1, len(limits)), 100))

    assert all(0 < count <= min(most, dict(candidates)[key]) for key, count in lengths.items())


def test_nobody_guesses_in_a_crowd() -> None:
    """With many rows in a step there is less to win than the estimates are wrong by."""
    costs = StepCosts()
    for count in (1, 2, 4, 8, 9, 16, 32, 64, 256):
        for _ in range(5):
            costs.observe(run_work(100, count), FREE.seconds(Work(count, 0)))
    gate = Gate(costs, 8)
    asked = {
        rows: gate.lengths([Candidate(Key(f"s{n}", 0), 8) for n in range(rows)], Work(rows, rows * 100))
        for rows in (1, MOST_ROWS + 1)
    }

    assert asked[1]
    assert not asked[MOST_ROWS + 1]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_guesses_never_make_a_step_a_pause(rows: int) -> None:
    """However sure they are, the step takes at most twice its time: ids that come in one lump are waited for."""
    machine, costs = Machine(0.008, 0.0012), StepCosts()
    for count in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 64, 256):
        for _ in range(9):
            costs.observe(run_work(100, count), machine.seconds(Work(count, 0)))
    gate, base = Gate(costs, 8), Work(rows, rows * 100)
    keys = [Key(f"s{n}", 0) for n in range(rows)]
    for _ in range(30):
        gate.settle([(key, 8, 8) for key in keys], base, Work(8 * rows, 800 * rows), machine.seconds(base), 0.0)

    asked = gate.lengths([Candidate(key, 8) for key in keys], base)

    assert asked
    assert machine.seconds(Work(rows + sum(asked.values()), 0)) <= 2.05 * machine.seconds(base)
